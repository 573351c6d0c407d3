"""Training steps that tolerate the loss of ranks and let processes join."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import time
from collections.abc import Iterator, Mapping
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

JOIN_VARIABLE: Final = "DP_COMPILE_ELASTIC_JOIN"  # the name of a joining process, set by the launcher
MOST_LOSSES_IN_A_ROW: Final = 8
LOOK_FOR_JOINS_EVERY_S: Final = 0.2
START_S: Final = 300.0  # limit between the starts of the first and the last process

_registry: Registry | None = None


def init_process_group(backend: str | None = None, *, timeout: timedelta = dist.default_pg_timeout) -> None:
    """Initialize the default process group, also in a process that joins a training later.

    Returns when every process that the launcher started has called this or exited. A process that calls more than
    five minutes after the first one is excluded. A joining process is alone in its group for its first step.

    Args:
        backend: as in torch. `timeout`: time-out of every collective, until `Training` sets its `timeout_s`.

    Raises:
        ConfigError: the environment has no key-value store of a launcher.
        LeftOutError: this process called too late.
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
    """Create the default process group of the members in `registry`."""
    members, process = registry.members, registry.process
    of_one = f" of {process}" if len(members.processes) == 1 else ""  # a joining process has its own generation 0
    store = PrefixStore(f"dp_compile.elastic/group {members.generation}{of_one}", registry.base)
    rank, ranks = members.processes.index(process), len(members.processes)
    dist.init_process_group(registry.backend, store=store, rank=rank, world_size=ranks, timeout=timeout)


class Training:
    """The steps of a training loop: `with training.step():` around forward, backward and optimizer step.

    If an error in the block reports lost ranks, the block ends without an exception. Gradients are dropped, buffers are
    restored, and the remaining ranks form a new group. The loop continues with its next batch, so at most this step is
    lost. Any other error, or the ninth lost step in a row, is raised and removes this rank; the others continue.

    Gradients are averaged over the ranks of the step. Joining ranks and ranks that have finished fewer steps receive
    parameters, buffers and `states` from the lowest of the ranks that have finished most steps.

    Args:
        model: a module passed to `replicate`, in the default group; parts with their own `replicate` are allowed.
        states: optimizers of `torch.optim`, and objects with `state_dict` and `load_state_dict`, as a `GradScaler`.
        timeout_s: time-out of every collective after this rank's first step without compilation, and so the longest
            time to detect a lost rank. A rank that then compiles longer than the others by more than `timeout_s` plus
            `grace_s` is excluded. `None`: that of `init_process_group`.
        min_ranks: if fewer ranks remain, `TooFewRanksError` ends the training.
        grace_s: how long ranks that have detected a loss wait for others that have not and are not known to be dead.
            `None`: one second longer than `timeout_s`.
        wait_s: how long to wait for joining processes if fewer than `min_ranks` ranks remain.

    Raises:
        ConfigError: `elastic.init_process_group` was not called; a training exists already; a module reduces over
            another group or reduces no gradients; a comm hook does more than cast; or an optimizer is sharded or
            defers updates to the next forward.
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
        self.steps = 0  # number of finished steps
        self._is_whole = True  # parameters and states are those after `steps`
        self._has_stepped = self._has_left = False
        self._saved: tuple[list[torch.Tensor], list[Any]] | None = None
        """Parameters and states before the step, if an optimizer updates in the backward."""
        self._losses, self._looked_s, self._written = 0, 0.0, -1
        self.is_joining = bool(os.environ.get(JOIN_VARIABLE))  # trains alone for one step, which compiles, then joins
        group = distributed.default_group()
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
            if isinstance(optimizer, torch.optim.Optimizer):  # fused ones do not increment versions of parameters
                optimizer.register_step_post_hook(lambda *_: setattr(self, "_has_stepped", True))
        self._registry.is_in_use = True

    @property
    def generation(self) -> int:
        """The number of the group, incremented when ranks are lost or join. Equal on all ranks of the group."""
        return self._registry.members.generation

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def world_size(self) -> int:
        return dist.get_world_size()

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Return the context of one step. All ranks enter the same number of steps."""
        early: RuntimeError | None = None
        try:
            vote, work = self._begin()
        except RuntimeError as error:
            if isinstance(error, LeftOutError) or not is_of_other_ranks(error):
                raise
            # This rank did not vote. Its next collective would match the others' vote, and gloo would end those ranks.
            distributed.end_all_groups()
            if isinstance(error, LostStoreError):
                raise
            early = error  # a context cannot skip its block: the error is handled after it
        try:
            yield
            if early is not None:
                raise early
            work.wait()
            is_asked = bool(vote.item())
        except BaseException as error:
            if early is None or not isinstance(error, Exception):
                if not self._lose(error):
                    raise
            elif not self._lose(early):
                raise early from None  # the block's own error follows from it
            return
        self._end(is_asked=is_asked)

    def _warn(self, text: str) -> None:
        """Log a warning with the process name, because ranks change with each group."""
        logger.warning("dp_compile, process %s: %s", self._registry.process, text)

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
                    f"elastic.Training needs {first} replicated in the default group, without a 2-D device_mesh."
                )
            if hook is not None and hook.averaging.hook is not None:
                raise ConfigError(
                    f"comm hook {hook.name} of {first} may have a state or a process group, which a joining process "
                    "does not have. Use a hook that only casts, or none."
                )
            if not replica.state.reduces_gradients:
                raise ConfigError(f"elastic.Training averages gradients, and those of {first} are not reduced.")
            if any(each.deferred is not None or type(each) is not Update for each in replica.after.updates):
                raise ConfigError(
                    f"an optimizer of {first} is sharded, or defers updates to the next forward: the state of a lost "
                    "rank would be lost with it. Call in_backward() without shard and overlap_forward."
                )

    def _begin(self) -> tuple[torch.Tensor, Any]:
        """Launch the vote on admitting processes: an all-reduce that overlaps the step, and fails if a rank is lost."""
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
        """Handle the error of a step. Return whether the training continues."""
        is_undone = isinstance(error, VoidBackwardError) and all(each.device.type == "cpu" for each in self._replicas())
        of_others = is_of_other_ranks(error) or is_undone  # on GPUs a void backward may have been stepped with
        self._losses += 1
        if not of_others or self._losses > MOST_LOSSES_IN_A_ROW:
            self._has_left = True
            self._registry.leave()
            return False
        # Log torch's error: our text would name the late rank, but the monitor, which finds it, is off here.
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
        """Form the next generation of the group, with remaining and joining ranks."""
        distributed.end_all_groups()  # ranks that wait for this one fail immediately
        before = self._registry.members.processes
        self._registry.meet(grace_s=self._grace_s, min_ranks=self._min_ranks, wait_s=self._wait_s)
        lost = [each for each in before if each not in self._registry.members.processes]
        new = [each for each in self._registry.members.processes if each not in before]
        self._warn(f"generation {self.generation}: lost processes: {lost or 'none'}; new: {new or 'none'}")
        self._form_or_meet()

    def _form_or_meet(self) -> None:
        """Form the group of the generation. If a rank is lost meanwhile, form the next generation."""
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
        """Create the group of the generation, and copy state to ranks that have finished fewer steps."""
        distributed.end_all_groups()
        _init_process_group(self._registry, timedelta(seconds=self._timeout_s))
        group, ranks = distributed.default_group(), dist.get_world_size()
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
                "a rank was lost while every remaining one was updating parameters. Restore a checkpoint."
            )
        source = next(number for number, each in enumerate(found) if each.steps == most)
        if own.statement != found[source].statement:
            raise DesyncError(
                f"process {self._registry.process} differs from rank {source}: "
                f"{first_difference(found[source].statement, own.statement, source)}. Use one script for all processes."
            )
        if any(each[::2] != found[source][::2] for each in found):
            self._copy(source, is_behind=own[::2] != found[source][::2])
        self.steps = most
        if not self._has_compiled:
            distributed.set_timeout(self._start_timeout_s)
        self._warn(f"{ranks} ranks go on after step {most}, this is rank {dist.get_rank()}")

    def _copy(self, source: int, *, is_behind: bool) -> None:
        """Broadcast the state of `source`. A receiving rank has no valid state until all of it has arrived."""
        self._is_whole = not is_behind
        tensors: list[torch.Tensor] = []
        for replica in self._replicas():
            tensors += [*replica.parameters, *(parameter for _, parameter in replica.module.frozen), *replica.buffers]
        is_source = dist.get_rank() == source
        into = [each.detach() if is_behind or is_source else torch.empty_like(each) for each in tensors]
        distributed.broadcast(into, distributed.default_group(), source)
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
        """Return the facts that must be equal on all ranks, as plain data."""
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
    """The status of a rank. `steps` is -1 if the rank joins, or lost a step after its parameters had changed."""

    steps: int
    statement: list[Any]
    fingerprint: list[int]  # of its parameters


# --- change of the group --------------------------------------------------------------------------------------------


def regroup(replica: Replica, group: dist.ProcessGroup, generation: int) -> None:
    """Set the group over which a replica averages. Call it between backwards, on every rank of `group`.

    From then on compiled code takes the number of ranks as an argument, so another number needs no recompilation.
    Counters that must be equal on all ranks restart. `group` has the name of the previous group, by which compiled
    code finds it. `generation` is equal on all ranks of `group` and different for each group.
    """
    ranks, averaging = dist.get_world_size(group), replica.group.averaging
    divide_by = averaging.divide_by if replica.config.gradient_divide_factor is not None else float(ranks)
    averaging = replace(averaging, divide_by=divide_by, given=True)
    measured = replica.group.cost  # kept: the cost for another number of ranks would change the plan
    now = replace(replica.group, process_group=group, world_size=ranks, averaging=averaging, measured=measured)
    keep_buckets(replica, now)
    if generation:  # skip the wait for compilers: joining processes have compiled, and a store detects losses late
        replica.planning.awaits_code = False
    replica.module.topic = f"{replica.module.topic.partition('@')[0]}@{generation}"
    flags.start_again(replica)
    guards.start_again(replica)
    guard = replica.state.step_guard
    replica.state.step_guard = StepGuard(guard.parameters, guard.exempt, guard.checks)
    MONITOR.watch(replica)


def plan_facts(replica: Replica) -> dict[str, Any]:
    """Return the facts from which another rank computes the same plan, as plain data."""
    return {
        "cost": asdict(replica.group.cost),
        "ready": replica.planning.ready.to_json(),
        "is final": not replica.planning.awaits_graph,
    }


def take_plan(replica: Replica, facts: Mapping[str, Any]) -> None:
    """Adopt the plan of another rank, computed from its `plan_facts`."""
    replica.group = replace(replica.group, measured=AllReduceCost.from_dict(facts["cost"]))
    if facts["is final"] and replica.planning.strategy == "optimal":
        replica.planning.awaits_graph, ready = False, ReadyTimes.from_json(facts["ready"])
        planned = plan_from_times(replica, ready)
        if planned.plan.signature() != replica.plan.signature():
            replica.adopt(planned, ready)
