"""Steps of a training whose ranks may be lost and may join."""

from __future__ import annotations

import copy
import logging
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from dp_compile._torch import compiler, distributed
from dp_compile._torch.distributed import PrefixStore, TCPStore
from dp_compile.elastic.membership import LeftOutError, LostStateError, Members, Registry
from dp_compile.engine import flags, guards
from dp_compile.engine.guards import fingerprints
from dp_compile.engine.monitor import MONITOR
from dp_compile.engine.plan_sync import plan_from_times
from dp_compile.errors import ConfigError, DesyncError, VoidBackwardError
from dp_compile.optim.update import Update
from dp_compile.plan.cost import AllReduceCost
from dp_compile.plan.planner import ReadyTimes
from dp_compile.replica.replica import Replica, StepGuard, owners
from dp_compile.replica.store_channel import LostStoreError, first_difference, is_of_other_ranks
from dp_compile.replication.gradient_averaging import keep_buckets

logger = logging.getLogger("dp_compile.elastic")

JOIN_VARIABLE: Final = "DP_COMPILE_ELASTIC_JOIN"  # the launcher gives a process that joins its name in it
MOST_LOSSES_IN_A_ROW: Final = 8
LOOK_FOR_JOINS_EVERY_S: Final = 0.2
START_S: Final = 300.0  # between the start of the first process and that of the last

_registry: Registry | None = None


def init_process_group(backend: str | None = None, *, timeout: timedelta = dist.default_pg_timeout) -> None:
    """`torch.distributed.init_process_group`, also in a process that joins a training later.

    Returns when all processes that the launcher started have come, or have ended; one that comes five minutes after the
    first is left out. A process that joins is alone in its group until its first step has ended.

    Args:
        backend: as torch's. `timeout`: of every collective, until `Training` has a shorter one.

    Raises:
        ConfigError: the environment has no key-value store of a launcher.
        LeftOutError: this process came too late.
    """
    global _registry
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if not address or not port or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        raise ConfigError(
            "elastic.init_process_group() needs a key-value store that outlives every rank. Start the script with "
            "python -m dp_compile.elastic --ranks N script.py."
        )
    store, joining = TCPStore(address, int(port), is_master=False, timeout=timeout), os.environ.get(JOIN_VARIABLE)
    if joining:
        _registry = Registry(store, joining, Members(0, (joining,)))
    else:
        _registry = Registry(store, os.environ["RANK"], Members.initial(int(os.environ["WORLD_SIZE"])))
        _registry.meet(grace_s=START_S, min_ranks=1, wait_s=0.0)
    _registry.backend = backend
    _init_process_group(_registry, timeout)


def _init_process_group(registry: Registry, timeout: timedelta) -> None:
    """Make the default group, of the members."""
    members, process = registry.members, registry.process
    of_one = f" of {process}" if len(members.processes) == 1 else ""  # a process that joins counts from 0
    store = PrefixStore(f"dp_compile.elastic/group {members.generation}{of_one}", registry.base)
    rank, ranks = members.processes.index(process), len(members.processes)
    dist.init_process_group(registry.backend, store=store, rank=rank, world_size=ranks, timeout=timeout)


class Training:
    """A training loop's steps: `with training.step():` around forward, backward and optimizer step.

    An error in the block that says that other ranks are lost ends the block quietly: its gradients are dropped, buffers
    become what they were, the ranks that are left form a new group, and the loop goes on with its next batch. At most
    this one step is lost. Any other error is raised as it is, and takes this rank out: the others go on without it.

    Gradients are averaged over the ranks of the step. Parameters, buffers and the states of optimizers and others of
    the lowest rank that has finished most steps are copied to ranks that have finished fewer, and to those that join.

    Args:
        model: a module that `replicate` took, in the default group; parts with their own `replicate` are fine.
        states: optimizers of `torch.optim`, and any value with `state_dict` and `load_state_dict`, as a `GradScaler`.
        timeout_s: of every collective, and so how long the loss of a rank may go unnoticed, from this rank's first step
            on in which nothing is compiled; `None`: that of `init_process_group`. A rank that compiles longer than the
            others by more than it, later, is left out.
        min_ranks: with fewer `TooFewRanksError` ends the training.
        grace_s: how long ranks that have noticed a loss wait for others that have not, and are not known to be dead;
            `None`: a second longer than a collective may take.
        wait_s: how long they wait for processes that join, if they are fewer than `min_ranks`.

    Raises:
        ConfigError: `elastic.init_process_group` was not called, there is a training already, a module reduces over
            another group, reduces no gradients, has a comm hook that does more than cast, or an optimizer that is
            sharded or leaves updates for the next forward.
    """

    def __init__(
        self,
        model: nn.Module,
        *states: Any,
        timeout_s: float | None = None,
        min_ranks: int = 1,
        grace_s: float | None = None,
        wait_s: float = 0.0,
    ) -> None:
        if _registry is None:
            raise ConfigError("call dp_compile.elastic.init_process_group() in place of torch.distributed's.")
        if _registry.is_in_use:
            raise ConfigError("this process has an elastic.Training already. Give that one all models and optimizers.")
        self._registry, self._model, self._states = _registry, model, states
        self._min_ranks, self._wait_s = min_ranks, wait_s
        self.steps = 0  # that every rank has finished
        self._is_whole = True  # parameters and states are those after `steps`
        self._has_stepped = self._has_left = False
        self._saved: tuple[list[torch.Tensor], list[Any]] | None = None
        """Parameters and states at the begin of the step, if an optimizer updates in the backward."""
        self._losses, self._looked_s, self._written = 0, 0.0, -1
        self.is_joining = bool(os.environ.get(JOIN_VARIABLE))  # trains alone for one step, which compiles, then joins
        group = dist.group.WORLD
        assert group is not None
        self._group_name = distributed.group_name(group)
        self._start_timeout_s = distributed.timeout_of(group, self._device)
        self._timeout_s = self._start_timeout_s if timeout_s is None else timeout_s
        self._grace_s = self._timeout_s + 1.0 if grace_s is None else grace_s
        self._has_compiled = False
        self._check()
        if self.is_joining:
            for replica, facts in zip(self._replicas(), self._registry.read_plan(), strict=True):
                take_plan(replica, facts)
        for replica in self._replicas():
            regroup(replica, group, self.generation)
        for optimizer in states:
            if isinstance(optimizer, torch.optim.Optimizer):  # fused ones do not count up versions of parameters
                optimizer.register_step_post_hook(lambda *_: setattr(self, "_has_stepped", True))
        self._registry.is_in_use = True

    @property
    def generation(self) -> int:
        """Which group it is: one more each time that ranks were lost or joined. The same on all of its ranks."""
        return self._registry.members.generation

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def world_size(self) -> int:
        return dist.get_world_size()

    def step(self) -> Step:
        """Around one step. Every rank enters as many of them as the others."""
        return Step(self)

    def _warn(self, text: str) -> None:
        """A process keeps its name, its rank changes with each group."""
        logger.warning("process %s: %s", self._registry.process, text)

    @property
    def _device(self) -> torch.device:
        return self._replicas()[0].device

    def _replicas(self) -> list[Replica]:
        found = {owner[0]: None for owner in map(owners.find, self._model.parameters()) if owner is not None}
        if not found:
            raise ConfigError("no parameter of the model is replicated. Call dp_compile.replicate(model) first.")
        return sorted(found, key=lambda replica: replica.module.number)

    def _parameters(self) -> list[torch.Tensor]:
        return [each for replica in self._replicas() for each in replica.parameters]

    def _check(self) -> None:
        for replica in self._replicas():
            first, hook = replica.names[0], replica.planning.comm_hook
            if replica.group.process_group is not dist.group.WORLD or replica.group.levels is not None:
                raise ConfigError(
                    f"elastic.Training needs modules in the default group: that of {first} is in another."
                )
            if hook is not None and hook.averaging.hook is not None:
                raise ConfigError(
                    f"comm hook {hook.name} of {first} has a state or a process group, which a joining process does "
                    "not have. Use a hook that only casts, or none."
                )
            if not replica.state.reduces_gradients:
                raise ConfigError(f"elastic.Training averages gradients, and those of {first} are not reduced.")
            if any(each.deferred is not None or type(each) is not Update for each in replica.after.updates):
                raise ConfigError(
                    f"an optimizer of {first} is sharded, or leaves updates for the next forward: the state of a lost "
                    "rank would be lost with it. Call in_backward() without shard and overlap_forward."
                )

    def _begin(self) -> tuple[torch.Tensor, dist.Work | None]:
        """Launch the vote, first, so that it is hidden: whether a process waits to join, and that no rank was lost."""
        if self._has_left:
            raise LeftOutError("this rank has left the training with an error. End the process; a new one may join.")
        if any(replica.state.uneven is not None for replica in self._replicas()):
            raise ConfigError("elastic.Training is not supported inside join(): ranks without inputs run no steps.")
        self._check()
        self._has_stepped, self._graphs = False, compiler.compiled_graphs()
        self._saved, updates_early = None, any(replica.after.updates for replica in self._replicas())
        if updates_early:
            copies = [each.detach().clone() for each in self._parameters()]
            self._saved = copies, [copy.deepcopy(each.state_dict()) for each in self._states]
        self._versions = [each._version for each in self._parameters()]
        self._buffers = [(each, each.clone()) for replica in self._replicas() for each in replica.buffers]
        now_s, is_asked = time.monotonic(), False
        if not self.is_joining and dist.get_rank() == 0 and now_s >= self._looked_s + LOOK_FOR_JOINS_EVERY_S:
            self._looked_s, is_asked = now_s, self._registry.wants_to_join()
        vote = torch.tensor([int(is_asked)], device=self._device)
        return vote, dist.all_reduce(vote, op=dist.ReduceOp.MAX, async_op=True)

    def _end(self, *, is_asked: bool) -> None:
        self.steps, self._losses, self._saved = self.steps + 1, 0, None
        if not self._has_compiled and compiler.compiled_graphs() == self._graphs:
            self._has_compiled = True
            distributed.set_timeout(self._timeout_s)
        if self.is_joining:
            self._registry.join()
            self.is_joining, self._is_whole, self._has_compiled = False, False, True
            self._form_or_meet()
        elif is_asked:
            self._meet()
        elif dist.get_rank() == 0 and self._written != self.generation:
            self._written = self.generation
            self._registry.write_plan([plan_facts(replica) for replica in self._replicas()])

    def _lose(self, error: BaseException) -> bool:
        """A step ended with an error. Returns whether the training goes on."""
        of_others = is_of_other_ranks(error) or isinstance(error, VoidBackwardError)
        self._losses += 1
        if not of_others or self._losses > MOST_LOSSES_IN_A_ROW:
            self._has_left = True
            self._registry.leave()
            return False
        # What this package adds names a rank that is late, by the monitor, which is off here.
        self._warn(f"step {self.steps + 1} is lost: {str(error.__cause__ or error).splitlines()[0]}")
        now = [each._version for each in self._parameters()]
        with torch.no_grad():
            for buffer, before in self._buffers:
                buffer.copy_(before)
            if self._saved is None:
                self._is_whole = self._is_whole and not self._has_stepped and now == self._versions
            else:
                self._restore(*self._saved)
        self._meet()
        return True

    def _restore(self, parameters: list[torch.Tensor], states: list[Any]) -> None:
        for parameter, before in zip(self._parameters(), parameters, strict=True):
            parameter.copy_(before)
        for each, state in zip(self._states, states, strict=True):
            each.load_state_dict(state)

    def _meet(self) -> None:
        """Form the next generation with the ranks that are left."""
        distributed.end_all_groups()  # ranks that wait for this one notice at once
        before = self._registry.members.processes
        self._registry.meet(grace_s=self._grace_s, min_ranks=self._min_ranks, wait_s=self._wait_s)
        lost = [each for each in before if each not in self._registry.members.processes]
        new = [each for each in self._registry.members.processes if each not in before]
        self._warn(f"generation {self.generation}: lost processes: {lost or 'none'}; new: {new or 'none'}")
        self._form_or_meet()

    def _form_or_meet(self) -> None:
        """Form the generation; the next one, if a rank is lost meanwhile."""
        try:
            self._form()
        except BaseException as error:
            if not is_of_other_ranks(error) or isinstance(error, LostStateError):
                self._has_left = True
                self._registry.leave()
                raise
            self._warn(f"a rank was lost while generation {self.generation} formed its group: {error}")
            self._meet()

    def _form(self) -> None:
        """Make the group of the generation, and give ranks that have not finished most steps what they lack."""
        distributed.end_all_groups()
        _init_process_group(self._registry, timedelta(seconds=self._timeout_s))
        group, ranks = dist.group.WORLD, dist.get_world_size()
        assert group is not None
        assert distributed.group_name(group) == self._group_name, "compiled code finds the group by its name"
        for parameter in self._model.parameters():
            parameter.grad = None
        for replica in self._replicas():
            regroup(replica, group, self.generation)
        self._check()
        hashed: list[int] = fingerprints(self._parameters()).tolist()
        own = _Standing(self.steps if self._is_whole else -1, self._statement(), hashed)
        found: list[_Standing] = [own] * ranks
        dist.all_gather_object(found, own)
        most = max(each.steps for each in found)
        if most < 0:
            raise LostStateError(
                "every remaining rank had already updated parameters when a rank was lost. Restore a checkpoint."
            )
        source = next(number for number, each in enumerate(found) if each.steps == most)
        if own.statement != found[source].statement:
            raise DesyncError(
                f"process {self._registry.process} differs from rank {source}: "
                f"{first_difference(found[source].statement, own.statement)}. Start all processes with the same script."
            )
        if any(each[::2] != found[source][::2] for each in found):
            self._copy(source, is_behind=own[::2] != found[source][::2])
        self.steps = most
        if not self._has_compiled:
            distributed.set_timeout(self._start_timeout_s)
        self._warn(f"{ranks} ranks go on after step {most}, this is rank {dist.get_rank()}")

    def _copy(self, source: int, *, is_behind: bool) -> None:
        """Send what the source has. A rank that receives has the state of no step until all of it has arrived."""
        group = dist.group.WORLD
        assert group is not None
        self._is_whole = not is_behind
        tensors: list[torch.Tensor] = []
        for replica in self._replicas():
            tensors += [*replica.parameters, *(parameter for _, parameter in replica.module.frozen), *replica.buffers]
        is_source = dist.get_rank() == source
        into = [each.detach() if is_behind or is_source else torch.empty_like(each) for each in tensors]
        distributed.broadcast(into, group, source)
        given = [each.state_dict() for each in self._states] if is_source else None
        box: list[Any] = [given, [plan_facts(replica) for replica in self._replicas()]]
        dist.broadcast_object_list(box, source, device=self._device)
        if is_behind:
            for each, state in zip(self._states, box[0], strict=True):
                each.load_state_dict(state)
            for replica, facts in zip(self._replicas(), box[1], strict=True):
                take_plan(replica, facts)
        self._is_whole = True

    def _statement(self) -> list[Any]:
        """What has to be the same on all ranks, as plain data."""
        found: list[Any] = [len(self._states)]
        for replica in self._replicas():
            named = (*zip(replica.names, replica.parameters, strict=True), *replica.module.frozen)
            found.append(
                {
                    "parameters": [f"{name}: {each.dtype}{list(each.shape)}" for name, each in named],
                    "buffers": [f"{each.dtype}{list(each.shape)}" for each in replica.buffers],
                    "options": repr(replica.config),
                    "averaging": repr(replace(replica.group.averaging, divide_by=None)),
                }
            )
        return found


class _Standing(NamedTuple):
    """Where a rank is: -1 steps if it joins, or lost a step in which its parameters were changed already."""

    steps: int
    statement: list[Any]
    fingerprint: list[int]  # of its parameters


class Step:
    """The context of one step. A class: an error before the block has to wait for its end."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._begun: tuple[torch.Tensor, dist.Work | None] | None = None
        self._error: Exception | None = None

    def __enter__(self) -> None:
        try:
            self._begun = self._training._begin()
        except RuntimeError as error:
            if isinstance(error, LeftOutError) or not is_of_other_ranks(error):
                raise
            # The vote of this rank is missing: another collective would take its place at the others, which gloo ends.
            distributed.end_all_groups()
            if isinstance(error, LostStoreError):
                raise
            self._error = error

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        training = self._training
        if self._error is not None and (error is None or isinstance(error, Exception)):
            if not training._lose(self._error):
                raise self._error
            return True
        if error is None:
            assert self._begun is not None
            vote, work = self._begun
            try:
                assert work is not None
                work.wait()
                is_asked = bool(vote.item())
            except RuntimeError as late:
                if not training._lose(late):
                    raise
                return True
            training._end(is_asked=is_asked)
            return True
        return training._lose(error)


# --- another group --------------------------------------------------------------------------------------------------


def regroup(replica: Replica, group: dist.ProcessGroup, generation: int) -> None:
    """Average over the ranks of `group` from now on; between backwards, and on every rank of it.

    The number of ranks is an argument of compiled code from then on, and no code is compiled for another number. What
    ranks count together starts again. `group` has the name of the one before, by which compiled code finds it;
    `generation` is the same on all of its ranks, and another one for each group.
    """
    ranks, averaging = dist.get_world_size(group), replica.group.averaging
    divide_by = averaging.divide_by if replica.config.gradient_divide_factor is not None else float(ranks)
    averaging = replace(averaging, divide_by=divide_by, given=True)
    measured = replica.group.cost  # of another number of ranks the plan would be another one
    now = replace(replica.group, process_group=group, world_size=ranks, averaging=averaging, measured=measured)
    keep_buckets(replica, now)
    if generation:  # a process that joins has compiled; a store does not notice at once that a rank is lost
        replica.planning.awaits_code = False
    replica.module.topic = f"{replica.module.topic.partition('@')[0]}@{generation}"
    flags.start_again(replica)
    guards.start_again(replica)
    guard = replica.state.step_guard
    replica.state.step_guard = StepGuard(guard.parameters, guard.exempt, guard.checks)
    MONITOR.watch(replica)


def plan_facts(replica: Replica) -> dict[str, Any]:
    """What another rank makes the same plan from, as plain data."""
    return {
        "cost": asdict(replica.group.cost),
        "ready": replica.planning.ready.to_json(),
        "is final": not replica.planning.awaits_graph,
    }


def take_plan(replica: Replica, facts: Mapping[str, Any]) -> None:
    """Make the plan that another rank has."""
    replica.group = replace(replica.group, measured=AllReduceCost.from_dict(facts["cost"]))
    if facts["is final"] and replica.planning.strategy == "optimal":
        replica.planning.awaits_graph, ready = False, ReadyTimes.from_json(facts["ready"])
        planned = plan_from_times(replica, ready)
        if planned.plan.signature() != replica.plan.signature():
            replica.adopt(planned, ready)
