"""State of one replicated module: parameters, plan, group, switches. `owners` has all replicas of this process."""

from __future__ import annotations

import contextlib
import itertools
import logging
import weakref
from collections import Counter
from collections.abc import Collection, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from dp_compile._torch import autograd
from dp_compile._torch.dtensors import laid_out_as, local_tensor
from dp_compile.comm_hooks.comm_hook import CommHook
from dp_compile.comm_hooks.functional import HookState, State
from dp_compile.config import ReplicateConfig
from dp_compile.passes.memory import BucketMemory
from dp_compile.plan.buckets import BucketPlan
from dp_compile.plan.planner import Certificate, PlanResult, ReadyTimes
from dp_compile.replica.gradients import dense_strides, local_view
from dp_compile.replica.group import Group
from dp_compile.replica.precision import Precision
from dp_compile.replica.record import CaptureRecord
from dp_compile.replica.sinks import AfterReduction

_numbers = itertools.count()


@dataclass(eq=False, slots=True, kw_only=True)
class PlanState:
    """Inputs and state of a replica's plan, and whether the plan is final (`engine/plan_sync.py`)."""

    comm_hook: CommHook | None = None
    ready: ReadyTimes  # input of the planner; estimated if the strategy needs none
    strategy: str  # of bucketing, from `ReplicateConfig.chosen_strategy`
    certificate: Certificate | None = None  # of the plan's predicted end; `None`: the strategy is not `optimal`
    groups: tuple[str, ...] = ()  # names of the groups that reduce its buckets
    code_key: str = ""  # replicas with equal keys can share compiled code; the key does not cover the model itself
    awaits_graph: bool = False  # the first synchronised backward computes the final plan from its graph
    awaits_code: bool = True  # before the first collective, ranks wait for each other's compilers
    for_next_forward: bool = False  # buckets are launched in the order in which the next forward needs them
    units: frozenset[str] | None = None  # with `bucket_policy`: names of the modules at whose ends buckets end


class ParameterRef(NamedTuple):
    """The place of a parameter or buffer: owner, attribute and full name. It may hold another tensor by now."""

    owner: weakref.ref[nn.Module]
    attribute: str
    name: str

    def find(self) -> torch.Tensor | None:
        owner = self.owner()
        for found in () if owner is None else (owner._parameters, owner._buffers):
            if self.attribute in found:  # the mapping of a ScriptModule is no dict and has no get()
                return found[self.attribute]
        return None


@dataclass(eq=False, slots=True, kw_only=True)
class ModuleRefs:
    """What a module had when `replicate` was called, by weak references, which keep no module alive."""

    root: weakref.ref[nn.Module]
    all_names: frozenset[str]  # of its parameters, including those of excluded submodules
    left_alone: weakref.WeakSet[nn.Module]  # excluded submodules
    frozen: tuple[tuple[str, nn.Parameter], ...]  # parameters without gradients, by name
    buffer_refs: tuple[ParameterRef, ...]
    parameter_refs: tuple[ParameterRef, ...]
    sparse: frozenset[int]  # parameters with sparse gradients: in no bucket, and no backward is captured
    dtensors: frozenset[int]  # DTensor parameters: each rank reduces its local tensor of the gradient
    renormalised: frozenset[int]  # parameters changed by their forward: weights of an embedding with `max_norm`
    is_plain: bool  # no gradient is a DTensor or complex
    beside_shards: bool  # submodules are managed by `fully_shard`, whose hooks cannot be captured
    precision: Precision | None
    hook_handles: tuple[RemovableHandle, ...] = ()
    topic: str = ""  # prefix of its keys in the store: equal on every rank of the group, unique to this replica
    number: int = field(default_factory=lambda: next(_numbers))  # of this replica in this process


class GradientReceiver(Protocol):
    """What a module's gradient hooks report to in one backward."""

    def mark_ready(self, index: int) -> None: ...


class Uneven(Protocol):
    """A module's part in `join()`: announces each backward to ranks that have no inputs left."""

    def announce(self, replicas: Sequence[Replica]) -> None: ...

    def rescale(self) -> None: ...

    @property
    def source(self) -> int: ...


@dataclass(eq=False, slots=True)
class History:
    """Counts and records of a module's backwards."""

    backwards: Counter[str] = field(default_factory=Counter)  # by kind of reduction
    synced_backwards: int = 0  # ended with reduced gradients; a warm-up restores it
    captures: dict[int, CaptureRecord] = field(default_factory=dict)  # by the number of the compiled code
    captures_of_other_plans: int = 0  # compiled for earlier plans
    compiled_after: int = 0  # synchronised backwards before the latest one that compiled code
    structures: dict[int, int] = field(default_factory=dict)  # uses by hash of the autograd graph: `engine/backward.py`
    refused: dict[int, str] = field(default_factory=dict)  # by the same hash, why a graph cannot be captured


@dataclass(eq=False, slots=True)
class StepGuard:
    """Detects optimizer steps on unreduced gradients, from the version counters of this rank's parameters."""

    parameters: Sequence[nn.Parameter]
    exempt: frozenset[int]  # `ModuleRefs.renormalised`
    checks: bool
    used: set[int] = field(default_factory=set)  # in unsynchronised backwards since the last synchronised one
    versions: dict[int, int] = field(default_factory=dict)  # of parameters, when a local gradient was computed
    stepped: set[int] = field(default_factory=set)  # changed while their gradient was not reduced
    moved: bool = False  # a parameter changed after an unsynchronised backward whose gradient was then dropped
    was_moved: bool = False  # `moved` as of the latest synchronised backward
    reduced: bool | None = None
    """Whether every rank has the gradients of the latest synchronised backward. `False`: no rank uses them. `None`:
    this rank has not completed its collectives."""
    missed: str = ""  # the error after which this rank omits a step, although other ranks have the gradients
    at_start: tuple[int, ...] = ()  # versions at the start of the synchronised backward; empty: unchecked, or unknown

    def backward_ended(self) -> None:
        """Record the versions of parameters after a backward without synchronisation."""
        self._note_changes()
        if self.checks:
            self.versions = {
                index: autograd.version_of(parameter)
                for index, parameter in enumerate(self.parameters)
                if parameter.grad is not None and index not in self.exempt
            }

    def begin(self) -> None:
        """Note that a synchronised backward starts, and the versions of parameters at its start."""
        self._note_changes()
        self.reduced = None
        self.versions.clear()
        self.at_start = self._versions_now() if self.checks else ()

    def note_steps(self) -> None:
        """Record parameters that changed since the backward began, for example by an optimizer in a hook."""
        if self.at_start:
            now = self._versions_now()
            if now != self.at_start:  # rare; this comparison is cheap
                versions = zip(self.at_start, now, strict=True)
                self.stepped |= {index for index, (one, other) in enumerate(versions) if one != other} - self.exempt
            self.at_start = ()

    def made_equal(self, indices: Collection[int]) -> None:
        """Forget changes of these parameters: they were averaged over all ranks and are equal again."""
        self.stepped.difference_update(indices)
        self.versions |= {
            index: autograd.version_of(self.parameters[index]) for index in indices if index in self.versions
        }
        if self.exempt.union(indices).issuperset(range(len(self.parameters))):
            self.moved = False

    @contextlib.contextmanager
    def updating(self, indices: Sequence[int]) -> Iterator[None]:
        """Context manager inside which these parameters may change, because their updates use reduced gradients."""
        if self.at_start:
            self.stepped |= {
                index for index in indices if self.at_start[index] != autograd.version_of(self.parameters[index])
            } - self.exempt
        try:
            yield
        finally:
            if self.at_start:
                now = list(self.at_start)
                for index in indices:
                    now[index] = autograd.version_of(self.parameters[index])
                self.at_start = tuple(now)

    def _note_changes(self) -> None:
        """Record parameters that changed since a local backward.

        A change with a nonzero local gradient is an error (`stepped`). If the gradient was dropped or zeroed, the local
        backward may only have found a direction, as SAM's first backward does: fine if all ranks have `moved`.
        """
        for index, version in self.versions.items():
            if version != autograd.version_of(self.parameters[index]):
                grad = self.parameters[index].grad
                if grad is not None and bool(local_tensor(grad).any()):
                    self.stepped.add(index)
                else:
                    self.moved = True

    def _versions_now(self) -> tuple[int, ...]:
        return tuple(map(autograd.version_of, self.parameters))


@dataclass(eq=False, slots=True)
class ReplicaState:
    """Mutable state of a replica: switches that the user sets between backwards, and what backwards change."""

    step_guard: StepGuard
    sync: bool = True  # the next backward is synchronised
    reduces_gradients: bool = True  # `False`: `after.updates` use local gradients at the end of a synced backward
    is_dry_run: bool = False  # backwards run for compilation only, without updates
    is_warmed_up: bool = False
    uneven: Uneven | None = None  # set inside `join()`
    receiver: GradientReceiver | None = None  # set during a backward of this module
    bucket_memory: BucketMemory = field(default_factory=BucketMemory)  # persistent buckets, by `plan.keeps_memory`
    untouched: tuple[int, ...] = ()  # not used by any rank in the last synchronised backward: gradients are unchanged
    warned: set[str] = field(default_factory=set)


@dataclass(eq=False, repr=False, slots=True, weakref_slot=True, kw_only=True)
class Replica:
    """The state of one replicated module, created by `replicate` and found through its parameters (`owners`).

    `parameters`: those with reduced gradients, in the module's order. The plan has flags as one more gradient in a
    bucket: a number per parameter and some for the module. Flags show which parameters some rank did not use.
    """

    parameters: tuple[nn.Parameter, ...]
    names: tuple[str, ...]
    module: ModuleRefs
    group: Group
    config: ReplicateConfig
    plan: BucketPlan
    planning: PlanState
    after: AfterReduction = field(default_factory=AfterReduction)
    state: ReplicaState = field(init=False)
    history: History = field(default_factory=History)

    def __post_init__(self) -> None:
        guard = StepGuard(self.parameters, self.module.renormalised, self.config.check_reductions)
        self.state = ReplicaState(step_guard=guard)
        self.adopt(PlanResult(self.plan, self.planning.certificate), self.planning.ready)

    @property
    def reduces(self) -> bool:
        """Whether the next backward reduces the module's gradients."""
        return self.state.sync and self.state.reduces_gradients

    @property
    def mode(self) -> str:
        """The kind of reduction, as text for users."""
        if not self.state.reduces_gradients:
            return "no reductions"
        return "dp_compile" if self.called_hook is None else f"dp_compile, comm hook {self.called_hook.name}"

    @property
    def called_hook(self) -> CommHook | None:
        """The comm hook if it is called with each bucket and not captured, otherwise `None`."""
        hook = self.planning.comm_hook
        return hook if hook is not None and hook.is_called else None

    @property
    def hook_memory(self) -> HookState | None:
        """The state of the functional comm hook, `None` without one."""
        return None if self.planning.comm_hook is None else self.planning.comm_hook.memory

    def state_of_hook(self, index: int) -> State:
        """Return the functional hook's state for a gradient. Empty for the flags."""
        memory = self.hook_memory
        return {} if memory is None or index == len(self.parameters) else memory.of(self.names[index])

    def has_in_flight(self) -> bool:
        """Whether updates or all-gathers of the last backward are still pending."""
        return any(each.deferred is not None and each.deferred.has_in_flight for each in self.after.updates)

    def wait_for_updates(self) -> None:
        """Complete the updates that optimizers have deferred to the next forward."""
        for each in self.after.updates:
            if each.deferred is not None:
                each.deferred.complete()

    def count_synced(self) -> None:
        """Count a completed synchronised backward."""
        self.history.synced_backwards += 1
        if self.hook_memory is not None:
            self.hook_memory.backwards += 1

    def adopt(self, planned: PlanResult, ready: ReadyTimes) -> None:
        """Replace the plan. Call it between backwards, on every rank.

        On CPUs bucket memory persists by default if a bucket is scattered. A step uses this memory twice, for gradients
        and for the all-gather of parameters. If it did not persist, malloc might return it to the system in between,
        page by page (52.8 MiB are 13,500 pages).
        """
        code_before, keeps_memory = self.plan.for_code(), self.config.gradient_as_bucket_view
        if keeps_memory is None and self.device.type == "cpu":
            keeps_memory = any(bucket.key.reduction.is_scattered for bucket in planned.plan.buckets) or None
        self.plan = replace(planned.plan, keeps_memory=keeps_memory)
        stages = (stage for bucket in self.plan.buckets for stage in bucket.key.reduction.stages)
        self.planning.groups = tuple(dict.fromkeys(stage.group for stage in stages))
        self.planning.certificate, self.planning.ready = planned.certificate, ready
        self.state.bucket_memory.kept.clear()
        code = self.plan.for_code()
        if code != code_before or not self.planning.code_key:  # not for each new divide factor: the key is slow
            config = replace(self.config, gradient_divide_factor=None)  # the plan has it if code depends on it
            self.planning.code_key = repr((self.group.name, code, config))
            self.history.captures_of_other_plans = len(self.history.captures)
            self.history.structures.clear()

    @property
    def buffers(self) -> tuple[torch.Tensor, ...]:
        """The buffers that the module has now."""
        return tuple(buffer for place in self.module.buffer_refs if (buffer := place.find()) is not None)

    @property
    def device(self) -> torch.device:
        return self.parameters[0].device

    def owning_modules(self) -> list[nn.Module]:
        """Return the modules that owned the replica's parameters at `replicate` and still exist."""
        owners = (place.owner() for place in self.module.parameter_refs)
        return [owner for owner in owners if owner is not None]

    def hand_out(
        self, unused: Sequence[int], averages: Sequence[torch.Tensor | None], left_alone: Container[int]
    ) -> None:
        """Set `.grad` of `unused` parameters not in `left_alone` to `averages`, in which scattered ones are `None`."""
        self.state.untouched = tuple(index for index in unused if index in left_alone)
        if not self.config.may_be_unused:
            return
        for index, average in zip(unused, averages, strict=True):
            if index not in left_alone and average is not None:
                self.set_grad(index, average)

    def used_by_nobody(self, candidates: Sequence[int], flags: torch.Tensor) -> tuple[int, ...]:
        """Return which of `candidates`, the parameters unused on this rank, no rank used according to reduced flags."""
        if not self.config.may_be_unused or not candidates:
            return ()
        used = flags.tolist()
        return tuple(index for index in candidates if not used[index])

    def set_grad(self, index: int, value: torch.Tensor) -> None:
        """Set a parameter's gradient. `value`: its real view if it is complex, its local tensor if it is a DTensor."""
        parameter = self.parameters[index]
        with torch.no_grad():
            if parameter.grad is None:
                part = local_tensor(parameter)
                strides = dense_strides(part)
                if not parameter.is_complex() and value.stride() == strides:
                    parameter.grad = laid_out_as(parameter, value)
                    return
                empty = torch.empty_strided(part.shape, strides, dtype=part.dtype, device=part.device)
                parameter.grad = laid_out_as(parameter, empty)
            local_view(parameter.grad).copy_(value)

    def is_gone(self, index: int) -> bool:
        """Return whether the module has lost the parameter, for example because it was tied to another."""
        if self.module.precision is not None and self.module.precision.depth:
            return False
        return all(place.find() is not self.parameters[index] for place in self.module.parameter_refs)

    def name_list(self, indices: Sequence[int], most: int = 8) -> str:
        names = [self.names[index] for index in indices[:most]]
        return ", ".join(names) + (f" and {len(indices) - most} more" if len(indices) > most else "")


def warn_once(logger: logging.Logger, replicas: Iterable[Replica], message: str, *args: object, key: str = "") -> None:
    """Log a warning with this rank, unless each of these modules has logged `key` before.

    `key`: `message` by default, without its `args`.
    """
    new = [replica for replica in replicas if (key or message) not in replica.state.warned]
    for replica in new:
        replica.state.warned.add(key or message)
    if new:
        warn(logger, message, *args)


def warn(logger: logging.Logger, message: str, *args: object, **options: Any) -> None:
    """Log a warning with this rank's number, because ranks and packages often share one log stream."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    logger.warning(f"dp_compile, rank {rank}: {message}", *args, **options)


class Owners:
    """A map of parameters to replicas. Keeps no module alive: a replica lives as long as an owner of its parameters."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[weakref.ref[Replica], int]] = {}  # by `id`; `_forget` removes dead replicas
        self._all: weakref.WeakSet[Replica] = weakref.WeakSet()
        self._kept: weakref.WeakKeyDictionary[nn.Module, Replica] = weakref.WeakKeyDictionary()
        """By owning module of a parameter: a submodule may be trained further after the whole module is freed."""

    def add(self, replica: Replica) -> None:
        """Register a replica. None of its parameters may be in another replica."""
        self._forget(None)
        self._of |= {id(each): (weakref.ref(replica), index) for index, each in enumerate(replica.parameters)}
        self._kept |= dict.fromkeys(replica.owning_modules(), replica)
        self._all.add(replica)

    def remove(self, replica: Replica) -> None:
        self._forget(replica)
        for owner in replica.owning_modules():
            self._kept.pop(owner, None)
        self._all.remove(replica)

    def _forget(self, replica: Replica | None) -> None:
        """Remove the entries of this replica or, for `None`, those of dead replicas."""
        self._of = {identity: entry for identity, entry in self._of.items() if entry[0]() is not replica}

    def find(self, parameter: torch.Tensor) -> tuple[Replica, int] | None:
        """Return the replica of a parameter and the parameter's index in it, `None` if it is not replicated."""
        entry = self._of.get(id(parameter))
        replica = entry[0]() if entry else None
        return (replica, entry[1]) if entry and replica is not None else None

    def __iter__(self) -> Iterator[Replica]:
        return iter(sorted(self._all, key=lambda replica: replica.module.number))

    def __len__(self) -> int:
        return len(self._all)


owners: Final = Owners()  # every replica in this process
