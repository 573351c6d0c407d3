"""One replicated module: its parameters, plan, group and switches; and all that this process has (`owners`)."""

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
    """How the plan came about, what realises it, and whether it is final (`engine/plan_sync.py`)."""

    comm_hook: CommHook | None = None
    ready: ReadyTimes  # the plan was made from them, or they were estimated for a plan that needs none
    strategy: str  # where buckets end: a name of `config.STRATEGIES`
    certificate: Certificate | None = None  # of the plan's end; `None`: no cost was given
    groups: tuple[str, ...] = ()  # in which its buckets are reduced, by name
    code_key: str = ""  # replicas with equal keys can share compiled code: the model itself is never part of it
    awaits_graph: bool = False  # the first synchronised backward makes the final plan, from its graph
    awaits_code: bool = True  # no collective was launched: ranks wait for each other's compilers before the first one
    for_next_forward: bool = False  # buckets are launched in the order in which the next forward needs them
    units: frozenset[str] | None = None  # modules at whose ends buckets end, by fully qualified name, under a policy


class ParameterRef(NamedTuple):
    """Where a parameter or a buffer was found, and its fully qualified name. Another one may be there since."""

    owner: weakref.ref[nn.Module]
    attribute: str
    name: str

    def find(self) -> torch.Tensor | None:
        owner = self.owner()
        for found in () if owner is None else (owner._parameters, owner._buffers):
            if self.attribute in found:  # of a ScriptModule: no dict, has no get()
                return found[self.attribute]
        return None


@dataclass(eq=False, slots=True, kw_only=True)
class ModuleRefs:
    """What belongs to a module as it was when it was replicated, and where it is found again. Holds no module."""

    root: weakref.ref[nn.Module]
    all_names: frozenset[str]  # of its parameters, those of parts too
    left_alone: weakref.WeakSet[nn.Module]  # parts
    frozen: tuple[tuple[str, nn.Parameter], ...]  # parameters without gradients, by name
    buffer_refs: tuple[ParameterRef, ...]
    parameter_refs: tuple[ParameterRef, ...]
    sparse: frozenset[int]  # whose gradients are sparse: in no bucket, and no backward is captured
    dtensors: frozenset[int]  # each rank reduces the part of their gradients that it holds
    renormalised: frozenset[int]  # that a forward changes itself: weights of an embedding with `max_norm`
    is_plain: bool  # each gradient is reduced as it is: none is a DTensor, or complex
    beside_shards: bool  # parts are managed by `fully_shard`, whose own hooks do not survive a capture
    precision: Precision | None
    hook_handles: tuple[RemovableHandle, ...] = ()
    topic: str = ""  # names its keys in the store: the same on every rank of the group, and for this replica only
    number: int = field(default_factory=lambda: next(_numbers))  # of this replica in this process


class GradientReceiver(Protocol):
    """Where the hooks of a module report in one backward: its gradients arrive there."""

    def mark_ready(self, index: int) -> None: ...


class Uneven(Protocol):
    """Where ranks that have run out of inputs learn what the others reduce."""

    def announce(self, replicas: Sequence[Replica]) -> None: ...

    def rescale(self) -> None: ...

    @property
    def source(self) -> int: ...


@dataclass(eq=False, slots=True)
class History:
    """What has happened to a module."""

    backwards: Counter[str] = field(default_factory=Counter)  # by the way in which they were reduced
    synced_backwards: int = 0  # that ended with reduced gradients; a warm-up puts it back
    captures: dict[int, CaptureRecord] = field(default_factory=dict)  # by the number of the compiled code
    captures_of_other_plans: int = 0  # compiled before the plan was what it is
    compiled_after: int = 0  # synchronised backwards before the latest one that compiled something
    structures: dict[int, int] = field(default_factory=dict)
    """The autograd graphs that were met once there was a choice (`engine/backward.py`), and how often."""
    refused: dict[int, str] = field(default_factory=dict)  # those that could not be captured, and why


@dataclass(eq=False, slots=True)
class StepGuard:
    """Against steps on gradients that are not reduced: what a rank knows of those, and of changed parameters."""

    parameters: Sequence[nn.Parameter]
    exempt: frozenset[int]  # `ModuleRefs.renormalised`
    checks: bool
    used: set[int] = field(default_factory=set)
    """Parameters that got a gradient in a backward without synchronisation since the last one with it."""
    versions: dict[int, int] = field(default_factory=dict)  # how often changed, when a local gradient was computed
    stepped: set[int] = field(default_factory=set)  # changed although they had a gradient that was not reduced
    moved: bool = False  # some changed after a backward without synchronisation, whose gradients were then dropped
    was_moved: bool = False  # the same of the latest synchronised backward
    reduced: bool | None = None
    """Of the latest synchronised backward: whether every rank has its gradients; `False`: no rank uses them; `None`:
    this rank's part in its collectives is not over."""
    missed: str = ""
    """The error with which this rank raised after the other ranks had the gradients: it leaves out their step."""
    at_start: tuple[int, ...] = ()
    """Versions when the synchronised backward began; empty if that is not checked, or was not seen."""

    def backward_ended(self) -> None:
        """A backward without synchronisation has ended."""
        self._note_changes()
        if self.checks:
            self.versions = {
                index: autograd.version_of(parameter)
                for index, parameter in enumerate(self.parameters)
                if parameter.grad is not None and index not in self.exempt
            }

    def begin(self) -> None:
        """A synchronised backward begins."""
        self._note_changes()
        self.reduced = None
        self.versions.clear()
        self.at_start = self._versions_now() if self.checks else ()

    def note_steps(self) -> None:
        """Parameters must not have changed since the backward began, as an optimizer in a hook changes them."""
        if self.at_start:
            now = self._versions_now()
            if now != self.at_start:  # seldom, and quick to see
                versions = zip(self.at_start, now, strict=True)
                self.stepped |= {index for index, (one, other) in enumerate(versions) if one != other} - self.exempt
            self.at_start = ()

    def made_equal(self, indices: Collection[int]) -> None:
        """These parameters were averaged over all ranks: they are equal again."""
        self.stepped.difference_update(indices)
        self.versions |= {
            index: autograd.version_of(self.parameters[index]) for index in indices if index in self.versions
        }
        if self.exempt.union(indices).issuperset(range(len(self.parameters))):
            self.moved = False

    @contextlib.contextmanager
    def updating(self, indices: Sequence[int]) -> Iterator[None]:
        """Inside, these parameters are changed with reduced gradients."""
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
        """Which parameters changed since a local backward.

        It is an error if the local gradient is still there. If it was dropped or zeroed the local backward may only
        have been there to find a direction, as the first one of SAM is; then every rank has to have moved.
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
    """What users switch between backwards, and what backwards change."""

    step_guard: StepGuard
    sync: bool = True  # the next backward is synchronised
    reduces_gradients: bool = True
    """`False`: what follows a synchronised backward (`after.updates`) takes this rank's own gradients, at its end."""
    is_dry_run: bool = False  # backwards are there to be compiled only: nothing is updated in them
    is_warmed_up: bool = False
    uneven: Uneven | None = None  # while ranks may run out of inputs
    receiver: GradientReceiver | None = None  # while a backward of this module is under way
    bucket_memory: BucketMemory = field(default_factory=BucketMemory)  # as far as `plan.keeps_memory` says
    untouched: tuple[int, ...] = ()  # whose gradients the last synchronised backward left alone: no rank had used them
    warned: set[str] = field(default_factory=set)


@dataclass(eq=False, repr=False, slots=True, weakref_slot=True, kw_only=True)
class Replica:
    """The state of one replicated module. Made by `replicate`, found again through its parameters.

    `parameters` are those whose gradients are reduced, in the module's order. The plan has one gradient more: flags,
    one for each parameter, that travel in the last bucket and tell every rank which parameters some rank did not use.
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
        """Whether its gradients are reduced in the next backward."""
        return self.state.sync and self.state.reduces_gradients

    @property
    def mode(self) -> str:
        """What reduces, for people."""
        if not self.state.reduces_gradients:
            return "no reductions"
        return "python hooks" if self.called_hook is None else f"python hooks, comm hook {self.called_hook.name}"

    @property
    def called_hook(self) -> CommHook | None:
        """The comm hook that is called with each bucket, and not captured."""
        hook = self.planning.comm_hook
        return hook if hook is not None and hook.is_called else None

    @property
    def hook_memory(self) -> HookState | None:
        """What a functional comm hook remembers; `None` without one."""
        return None if self.planning.comm_hook is None else self.planning.comm_hook.memory

    def state_of_hook(self, index: int) -> State:
        """What a functional hook remembers of a gradient; of the flags nothing."""
        memory = self.hook_memory
        return {} if memory is None or index == len(self.parameters) else memory.of(self.names[index])

    def has_in_flight(self) -> bool:
        """Whether updates or all-gathers of the last backward are still pending."""
        return any(each.deferred is not None and each.deferred.has_in_flight for each in self.after.updates)

    def wait_for_updates(self) -> None:
        """Do the updates that optimizers have left for the next forward."""
        for each in self.after.updates:
            if each.deferred is not None:
                each.deferred.complete()

    def count_synced(self) -> None:
        """A synchronised backward has ended."""
        self.history.synced_backwards += 1
        if self.hook_memory is not None:
            self.hook_memory.backwards += 1

    def adopt(self, planned: PlanResult, ready: ReadyTimes) -> None:
        """Reduce by this plan from now on. Only between backwards, and on every rank.

        The memory of buckets is used again if each rank keeps a part of some: that is there twice in a step, as
        gradients and as parameters on their way, and malloc may give it back to the system in between, page by page
        (52.8 MiB are 13,500 of them).
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
        if code != code_before or not self.planning.code_key:  # not for each new factor: the key is slow
            config = replace(self.config, gradient_divide_factor=None)  # the plan says it, where code depends on it
            self.planning.code_key = repr((self.group.name, code, config))
            self.history.captures_of_other_plans = len(self.history.captures)
            self.history.structures.clear()

    @property
    def buffers(self) -> tuple[torch.Tensor, ...]:
        """The buffers as they are now."""
        return tuple(buffer for place in self.module.buffer_refs if (buffer := place.find()) is not None)

    @property
    def device(self) -> torch.device:
        return self.parameters[0].device

    def owning_modules(self) -> list[nn.Module]:
        """The modules that owned its parameters when it was replicated, as far as they are still there."""
        owners = (place.owner() for place in self.module.parameter_refs)
        return [owner for owner in owners if owner is not None]

    def hand_out(
        self, unused: Sequence[int], averages: Sequence[torch.Tensor | None], left_alone: Container[int]
    ) -> None:
        """Give parameters that are `unused` here, but not on all ranks, averages; `None`: each rank has a part."""
        self.state.untouched = tuple(index for index in unused if index in left_alone)
        if not self.config.may_be_unused:
            return
        for index, average in zip(unused, averages, strict=True):
            if index not in left_alone and average is not None:
                self.set_grad(index, average)

    def used_by_nobody(self, candidates: Sequence[int], flags: torch.Tensor) -> tuple[int, ...]:
        """Of parameters that were not used on this rank, those whose average no rank is given, by reduced flags."""
        if not self.config.may_be_unused or not candidates:
            return ()
        used = flags.tolist()
        return tuple(index for index in candidates if not used[index])

    def set_grad(self, index: int, value: torch.Tensor) -> None:
        """Let the gradient of a parameter be `value`: the real view if it is complex, this rank's part of a DTensor."""
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
        """Whether the module has nowhere the parameter that it had: tied to another, for one."""
        if self.module.precision is not None and self.module.precision.depth:
            return False
        return all(place.find() is not self.parameters[index] for place in self.module.parameter_refs)

    def name_list(self, indices: Sequence[int], most: int = 8) -> str:
        names = [self.names[index] for index in indices[:most]]
        return ", ".join(names) + (f" and {len(indices) - most} more" if len(indices) > most else "")


def warn_once(logger: logging.Logger, replicas: Iterable[Replica], message: str, *args: object, key: str = "") -> None:
    """Warn, unless that was reported of each of these modules before.

    `key`: what may not be reported twice; `message` as it stands if not given, so that `args` do not count.
    """
    new = [replica for replica in replicas if (key or message) not in replica.state.warned]
    for replica in new:
        replica.state.warned.add(key or message)
    if new:
        warn(logger, message, *args)


def warn(logger: logging.Logger, message: str, *args: object, **options: Any) -> None:
    """Log a warning that names this rank: logs of ranks are often one stream."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    logger.warning(f"rank {rank}: {message}", *args, **options)


class Owners:
    """Which replica a parameter belongs to. Holds no module alive, and a replica as long as one of its modules."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[weakref.ref[Replica], int]] = {}  # by `id`; `_forget` takes out who is gone
        self._all: weakref.WeakSet[Replica] = weakref.WeakSet()
        self._kept: weakref.WeakKeyDictionary[nn.Module, Replica] = weakref.WeakKeyDictionary()
        """By each module that owns a parameter: a part of what was replicated may train on when the whole is gone."""

    def add(self, replica: Replica) -> None:
        """Register a replica, none of whose parameters is replicated already."""
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
        """Drop the entries of a replica, or of those that are gone."""
        self._of = {identity: entry for identity, entry in self._of.items() if entry[0]() is not replica}

    def find(self, parameter: torch.Tensor) -> tuple[Replica, int] | None:
        """The replica of a parameter and its index there."""
        entry = self._of.get(id(parameter))
        replica = entry[0]() if entry else None
        return (replica, entry[1]) if entry and replica is not None else None

    def __iter__(self) -> Iterator[Replica]:
        return iter(sorted(self._all, key=lambda replica: replica.module.number))

    def __len__(self) -> int:
        return len(self._all)


owners: Final = Owners()  # every replica in this process
