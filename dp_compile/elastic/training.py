"""Steps of a training whose ranks may be lost and may join."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist
from torch import nn

from dp_compile._torch import distributed
from dp_compile._torch.distributed import PrefixStore, TCPStore
from dp_compile.elastic.membership import Members, Registry
from dp_compile.engine.backward import BROADCAST_BYTES
from dp_compile.engine.owners import owners
from dp_compile.engine.plan_sync import is_of_other_ranks
from dp_compile.engine.regroup import plan_facts, regroup, take_plan
from dp_compile.engine.replica import Replica
from dp_compile.errors import CommunicationError, ConfigError, VoidBackwardError

logger = logging.getLogger("dp_compile.elastic")

JOIN_VARIABLE: Final = "DP_COMPILE_ELASTIC_JOIN"
"""The launcher gives a process that joins its name in it."""
MOST_LOSSES_IN_A_ROW: Final = 8
LOOK_FOR_JOINS_EVERY_S: Final = 0.2
_PLAN: Final = "plan"

_registry: Registry | None = None


class Stateful(Protocol):
    """What is copied to ranks that are behind, as an optimizer, a scheduler, a `GradScaler`."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


def init_process_group(backend: str | None = None, *, timeout: timedelta = dist.default_pg_timeout) -> None:
    """`torch.distributed.init_process_group`, also in a process that joins a training later.

    A process that joins is alone in its group until its first step has ended.

    Args:
        backend: as torch's. `timeout`: of every collective, and so how long the loss of a rank may go unnoticed.

    Raises:
        ConfigError: the environment has no key-value store of a launcher.
    """
    global _registry
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if not address or not port or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        raise ConfigError(
            "elastic.init_process_group() needs a key-value store that outlives every rank. Start the script with "
            "python -m dp_compile.elastic --ranks N script.py."
        )
    store = TCPStore(address, int(port), is_master=False, timeout=timeout)
    joining = os.environ.get(JOIN_VARIABLE, "")
    rank, world_size = (0, 1) if joining else (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    _registry = Registry(store, joining or str(rank))
    own = PrefixStore(f"dp_compile.elastic/{joining or 0}", store)
    dist.init_process_group(backend, store=own, rank=rank, world_size=world_size, timeout=timeout)


class Training:
    """A training loop's steps: `with training.step():` around forward, backward and optimizer step.

    An error in the block that says that other ranks are lost ends the block quietly: its gradients are dropped, the
    ranks that are left form a new group, and the loop goes on with its next batch. At most this one step is lost. Any
    other error is raised as it is, and takes this rank out: the others go on without it.

    Gradients are averaged over the ranks of the step. Parameters, buffers, optimizers and `others` of the lowest rank
    that has finished most steps are copied to ranks that have finished fewer, and to those that join.

    Args:
        model: a module that `replicate` took, in the default group; parts with their own `replicate` are fine.
        optimizers: one or several, of `torch.optim`, and whatever else has `state_dict` and `load_state_dict`.
        min_ranks: with fewer `TooFewRanksError` ends the training.
        grace_s: how long ranks that have noticed a loss wait for others that have not, and are not known to be dead;
            `None`: a second longer than a collective may take.
        wait_s: how long they wait for processes that join, if they are fewer than `min_ranks`.

    Raises:
        ConfigError: `elastic.init_process_group` was not called, a module reduces over another group, or an optimizer
            is sharded or updates in the backward.
    """

    def __init__(
        self,
        model: nn.Module,
        *optimizers: Stateful,
        min_ranks: int = 1,
        grace_s: float | None = None,
        wait_s: float = 0.0,
    ) -> None:
        if _registry is None:
            raise ConfigError("call dp_compile.elastic.init_process_group() in place of torch.distributed's.")
        self._registry, self._model, self._states = _registry, model, optimizers
        self._min_ranks, self._wait_s = min_ranks, wait_s
        self.steps = 0
        """Steps that every rank has finished."""
        self._members = Members.initial(dist.get_world_size())
        self._losses, self._looked_s = 0, 0.0
        self.is_joining = bool(os.environ.get(JOIN_VARIABLE))
        """This process trains alone for one step, which compiles, and then joins."""
        group = dist.group.WORLD
        assert group is not None
        self._backend, self._timeout_s = dist.get_backend(), distributed.timeout_of(group, self._device)
        self._grace_s = self._timeout_s + 1.0 if grace_s is None else grace_s
        for replica in self._replicas():
            _check(replica)
        if self.is_joining:
            self._members = Members(0, (self._registry.process,))
            facts = self._registry.read(_PLAN, self._timeout_s)
            for replica, each in zip(self._replicas(), facts, strict=True):
                take_plan(replica, each)
        for replica in self._replicas():
            regroup(replica, replica.group.process_group, self._members.generation)

    @property
    def generation(self) -> int:
        """Which group it is: one more each time that ranks were lost or joined. The same on all of its ranks."""
        return self._members.generation

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def world_size(self) -> int:
        return dist.get_world_size()

    @property
    def _device(self) -> torch.device:
        return next(iter(self._replicas())).device

    def _replicas(self) -> list[Replica]:
        found = {owner[0]: None for owner in map(owners.find, self._model.parameters()) if owner is not None}
        if not found:
            raise ConfigError("no parameter of the model is replicated. Call dp_compile.replicate(model) first.")
        return sorted(found, key=lambda replica: replica.module.number)

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Around one step. Every rank enters as many of them as the others."""
        versions = self._versions()
        try:
            # Launched first, so that it is hidden: whether a process waits to join; and that no rank was lost.
            vote = torch.tensor([int(self._wants_regroup())], device=self._device)
            work = dist.all_reduce(vote, op=dist.ReduceOp.MAX, async_op=True)
            yield
            assert work is not None
            work.wait()
            is_asked = bool(vote.item())
        except BaseException as error:
            of_others = is_of_other_ranks(error) or isinstance(error, VoidBackwardError)
            self._losses += 1
            if not of_others or self._losses > MOST_LOSSES_IN_A_ROW:
                self._registry.leave()
                raise
            logger.warning("step %d is lost: %s", self.steps + 1, str(error).splitlines()[0])
            for parameter in self._model.parameters():
                parameter.grad = None
            self._meet(is_whole=versions == self._versions())
            return
        self.steps, self._losses = self.steps + 1, 0
        if self.is_joining:
            self._join()
        elif is_asked:
            self._meet(is_whole=True)
        elif self.steps == 1 and dist.get_rank() == 0:
            self._registry.write(_PLAN, [plan_facts(replica) for replica in self._replicas()])

    def _versions(self) -> list[int]:
        """Equal as long as no parameter was changed."""
        return [parameter._version for replica in self._replicas() for parameter in replica.parameters]

    def _wants_regroup(self) -> bool:
        now_s = time.monotonic()
        if self.is_joining or dist.get_rank() != 0 or now_s < self._looked_s + LOOK_FOR_JOINS_EVERY_S:
            return False
        self._looked_s = now_s
        return self._registry.wants_to_join(self._members)

    def _meet(self, *, is_whole: bool) -> None:
        """Form the next generation with the ranks that are left. Again, if one is lost while it is formed."""
        while True:
            self._members = self._registry.meet(
                self._members, grace_s=self._grace_s, min_ranks=self._min_ranks, wait_s=self._wait_s
            )
            try:
                self._form(self.steps if is_whole else -1)
            except Exception as error:
                if not is_of_other_ranks(error) and not isinstance(error, dist.DistError):
                    raise
                logger.warning("a rank was lost while %d formed a group: %s", len(self._members.processes), error)
            else:
                return

    def _join(self) -> None:
        self._members = self._registry.join(self._timeout_s + self._grace_s)
        self.is_joining = False
        try:
            self._form(-1)
        except Exception as error:
            if not is_of_other_ranks(error) and not isinstance(error, dist.DistError):
                raise
            self._meet(is_whole=False)

    def _form(self, finished: int) -> None:
        """Make the group of the generation, and give ranks that have not `finished` most steps what they lack.

        -1: this rank joins, or lost a step in which its parameters were changed already.
        """
        members, rank = self._members, self._members.processes.index(self._registry.process)
        distributed.end_all_groups()
        store = PrefixStore(f"dp_compile.elastic/group {members.generation}", self._registry.base)
        dist.init_process_group(
            self._backend,
            store=store,
            rank=rank,
            world_size=len(members.processes),
            timeout=timedelta(seconds=self._timeout_s),
        )
        group = dist.group.WORLD
        assert group is not None
        for replica in self._replicas():
            regroup(replica, group, members.generation)
        steps: list[int] = [0] * len(members.processes)
        dist.all_gather_object(steps, finished)
        most = max(steps)
        if most < 0:
            raise CommunicationError(
                "every rank that is left had changed parameters when a rank was lost. Restore a checkpoint."
            )
        if min(steps) < most:
            self._copy(source=steps.index(most), is_behind=finished < most)
        self.steps = most
        logger.warning("%d ranks go on after step %d, this is rank %d", len(steps), most, rank)

    def _copy(self, source: int, *, is_behind: bool) -> None:
        group = dist.group.WORLD
        assert group is not None
        tensors = [*self._model.parameters(), *self._model.buffers()]
        distributed.broadcast_state([each.detach() for each in tensors], group, BROADCAST_BYTES, source)
        given = [each.state_dict() for each in self._states] if dist.get_rank() == source else None
        box: list[Any] = [given, [plan_facts(replica) for replica in self._replicas()]]
        dist.broadcast_object_list(box, source, device=self._device)
        if is_behind:
            for each, state in zip(self._states, box[0], strict=True):
                each.load_state_dict(state)
            for replica, facts in zip(self._replicas(), box[1], strict=True):
                take_plan(replica, facts)


def _check(replica: Replica) -> None:
    if replica.group.process_group is not dist.group.WORLD or replica.group.levels is not None:
        raise ConfigError(
            f"elastic.Training needs modules in the default group: that of {replica.names[0]} is in another."
        )
    if any(bucket.key.reduction.parts > 1 for bucket in replica.plan.buckets):
        raise ConfigError(
            f"the comm hook of {replica.names[0]} cuts buckets by the number of ranks, which may change. Use one that "
            "only casts, or none."
        )
    if replica.after.updates:
        raise ConfigError(
            f"an optimizer updates {replica.names[0]} in the backward: a rank that is lost there leaves parameters "
            "that are updated in part. Call optimizer.step() instead."
        )
