"""One replicated module: its parameters, plan, group and switches. What hooks, capture and `replicate` share."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from dp_compile._torch import autograd, distributed
from dp_compile._torch.dtensors import is_dtensor, laid_out_as, local_tensor
from dp_compile.comm_hooks.comm_hook import CommHook
from dp_compile.comm_hooks.functional import State
from dp_compile.config import ReplicateConfig
from dp_compile.engine.gradients import dense_strides, empty_gradient, local_view
from dp_compile.engine.group import Group
from dp_compile.engine.parameter_refs import Outline, ParameterRef
from dp_compile.engine.precision import Precision
from dp_compile.engine.record import CaptureRecord
from dp_compile.engine.sinks import AfterReduction
from dp_compile.engine.step_guard import StepGuard
from dp_compile.errors import CommunicationError
from dp_compile.passes.memory import BucketMemory
from dp_compile.plan.buckets import BucketPlan, Layout
from dp_compile.plan.planner import Certificate, PlanResult, ReadyTimes

_numbers = itertools.count()


@dataclass(eq=False, slots=True, kw_only=True)
class PlanState:
    """How the plan came about, what realises it, and whether it is final (`engine/plan_sync.py`).

    Args:
        comm_hook: the user's own reduction of a bucket.
        ready: the ready times that the plan was made from, or that were estimated for a plan that needs none.
        strategy: where buckets end: a name of `config.STRATEGIES`.
        certificate: what is known of the plan's end; `None`: no cost was given.
        groups: the groups in which its buckets are reduced, by name.
        code_key: replicas with equal keys can share compiled code: the model itself is never part of it.
        factors: the numbers that compiled code is given, and tensors of them.
        awaits_graph: the first synchronised backward makes the final plan, from its graph.
        awaits_code: no collective was launched; ranks wait for each other's compilers before the first one.
        layout: how gradients lie in the buckets of a plan that is made again; `None`: the first plan is the last.
        for_next_forward: buckets are launched in the order in which the next forward needs them.
        units: the modules at whose ends buckets end, by fully qualified name; `None`: no policy was given.
    """

    comm_hook: CommHook | None = None
    ready: ReadyTimes
    strategy: str
    certificate: Certificate | None = None
    groups: tuple[str, ...] = ()
    code_key: str = ""
    factors: tuple[list[float], tuple[torch.Tensor, ...]] | None = None
    awaits_graph: bool = False
    awaits_code: bool = True
    layout: Layout | None = None
    for_next_forward: bool = False
    units: frozenset[str] | None = None


@dataclass(eq=False, slots=True, kw_only=True)
class ModuleRefs:
    """What belongs to a replicated module, and where it is found again. Holds no module.

    Args:
        frozen: parameters without gradients, by name.
        buffer_refs, parameter_refs: where buffers and parameters are, by owner.
        outline: its submodules.
        sparse: the parameters whose gradients are sparse, by index: they are in no bucket, and no backward is captured.
        dtensors: the parameters that are DTensors, by index: each rank reduces the part of a gradient that it holds.
        is_plain: each gradient is reduced as it is: none is a DTensor, or complex.
        beside_shards: parts are managed by `fully_shard`, whose own hooks do not survive a capture.
        precision: how it computes in another dtype.
        hook_handles: of the hooks on its parameters.
        topic: the same on every rank of the group, and for this replica only: names its keys in the store.
        number: of this replica in this process.
    """

    frozen: tuple[tuple[str, nn.Parameter], ...]
    buffer_refs: tuple[ParameterRef, ...]
    parameter_refs: tuple[ParameterRef, ...]
    outline: Outline
    sparse: frozenset[int] = frozenset()
    dtensors: frozenset[int] = frozenset()
    is_plain: bool = True
    beside_shards: bool = False
    precision: Precision | None = None
    hook_handles: tuple[RemovableHandle, ...] = ()
    topic: str = ""
    number: int = field(default_factory=lambda: next(_numbers))


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
    """What has happened to a module.

    Args:
        backwards: how many there were, by the way in which they were reduced.
        synced_backwards: how many ended with reduced gradients; a warm-up puts it back.
        captures: the compiled backwards that the module used, by the number of the compiled code.
        compiled_after: how many synchronised backwards there were when the latest one that compiled something began.
        structures: the autograd graphs that were met once there was a choice (`engine/backward.py`), and how often.
        refused: those that could not be captured, and why.
    """

    backwards: Counter[str] = field(default_factory=Counter)
    synced_backwards: int = 0
    captures: dict[int, CaptureRecord] = field(default_factory=dict)
    compiled_after: int = 0
    structures: dict[int, int] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    _of_other_plans: int = 0

    def compiled_for_plan(self) -> int:
        """How many backwards were compiled since the plan is what it is."""
        return len(self.captures) - self._of_other_plans

    def plan_changes(self) -> None:
        """Code of the earlier plan is not used any more."""
        self._of_other_plans = len(self.captures)
        self.structures.clear()


@dataclass(eq=False, slots=True, kw_only=True)
class Switches:
    """Of a module, also before it starts with its first forward. `sync`: the next backward is synchronised."""

    sync: bool = True


@dataclass(eq=False, slots=True, kw_only=True)
class ReplicaState(Switches):
    """What users switch between backwards, and what backwards change.

    Args:
        reduces_gradients: `False`: what follows a synchronised backward (`after.updates`) takes this rank's own
            gradients, at its end.
        is_dry_run: backwards are there to be compiled only: nothing is updated in them.
        is_warmed_up: `warmup` has compiled for it.
        uneven: while ranks may run out of inputs: how the others learn what this rank's next backward reduces.
        local: the gradients of this rank that are not reduced.
        receiver: where the hooks report while a backward of this module is under way.
        bucket_memory: of its buckets, as far as `plan.keeps_memory` says.
        untouched: whose gradients the last synchronised backward left as they were, because no rank had used the
            parameters.
        warned: warnings that were given, once for each module.
    """

    step_guard: StepGuard
    reduces_gradients: bool = True
    is_dry_run: bool = False
    is_warmed_up: bool = False
    uneven: Uneven | None = None
    receiver: GradientReceiver | None = None
    bucket_memory: BucketMemory = field(default_factory=BucketMemory)
    untouched: tuple[int, ...] = ()
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
        self.plan = self._with_memory(self.plan)
        self.planning.groups = _groups_of(self.plan)
        self.planning.code_key = self._code_key()
        dtensors = frozenset(index for index, each in enumerate(self.parameters) if is_dtensor(each))
        self.module.dtensors = dtensors
        self.module.is_plain = not dtensors and not any(map(torch.is_complex, self.parameters))
        self.state = ReplicaState(
            step_guard=StepGuard(self.parameters, self._renormalised(), self.config.check_reductions)
        )

    def _renormalised(self) -> frozenset[int]:
        """Parameters that a forward changes itself."""
        index_of = {id(parameter): index for index, parameter in enumerate(self.parameters)}
        return frozenset(
            index_of[id(place.find())]
            for place in self.module.parameter_refs
            if id(place.find()) in index_of and getattr(place.owner(), "max_norm", None) is not None
        )

    def _code_key(self) -> str:
        config = replace(self.config, gradient_divide_factor=None)  # the plan says it, where code depends on it
        return repr((self.group.name, self.plan.for_code(), config))

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
        return (
            self.planning.comm_hook
            if self.planning.comm_hook is not None and self.planning.comm_hook.is_called
            else None
        )

    def state_of_hook(self, index: int) -> State:
        """What a functional hook remembers of a gradient; of the flags nothing."""
        memory = None if self.planning.comm_hook is None else self.planning.comm_hook.memory
        return {} if memory is None or index == len(self.parameters) else memory.of(self.names[index])

    def given_factors(self) -> tuple[torch.Tensor, ...]:
        """What compiled code is given for `BucketPlan.given_reductions`: numbers in tensors, float64."""
        numbers = [each for reduction in self.plan.given_reductions() for each in reduction.given_factors]
        if self.planning.factors is None or self.planning.factors[0] != numbers:
            with autograd.made_like(self.parameters[0]):
                # Not written over: a GPU may not have read them yet.
                tensors = [torch.tensor(each, dtype=torch.float64, device=self.device) for each in numbers]
            self.planning.factors = numbers, tuple(tensors)
        return self.planning.factors[1]

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
        if self.planning.comm_hook is not None and self.planning.comm_hook.memory is not None:
            self.planning.comm_hook.memory.backwards += 1

    def adopt(self, planned: PlanResult, ready: ReadyTimes) -> None:
        """Reduce by another plan from now on. Only between backwards, and on every rank."""
        plan = self._with_memory(planned.plan)
        same_code = plan.for_code() == self.plan.for_code()
        self.plan, self.planning.certificate, self.planning.ready = plan, planned.certificate, ready
        self.planning.groups = _groups_of(plan)
        self.state.bucket_memory.kept.clear()
        if not same_code:  # else a factor is another one, perhaps in each step, and the key takes longest
            self.planning.code_key = self._code_key()
            self.history.plan_changes()

    def _with_memory(self, plan: BucketPlan) -> BucketPlan:
        """The plan, and whether the memory of its buckets is used again.

        What each rank keeps a part of is there twice in a step, as gradients and as parameters on their way: malloc
        may give the memory back to the system in between, page by page (52.8 MiB are 13,500 of them).
        """
        wish = self.config.gradient_as_bucket_view
        if wish is None and self.device.type == "cpu":
            wish = any(bucket.key.reduction.is_scattered for bucket in plan.buckets) or None
        return replace(plan, keeps_memory=wish)

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
        """Give parameters without a gradient on this rank what the others have.

        Args:
            unused: parameters without a gradient here.
            averages: the reduced gradient of each of them; `None`: each rank has a part of it.
            left_alone: those that no rank used, see `used_by_nobody`.
        """
        self.state.untouched = tuple(index for index in unused if index in left_alone)
        if not self.config.may_be_unused:
            return
        for index, average in zip(unused, averages, strict=True):
            if index not in left_alone and average is not None:
                self.set_grad(index, average)

    def used_by_nobody(self, candidates: Sequence[int], flags: torch.Tensor) -> tuple[int, ...]:
        """Of parameters that were not used on this rank, those whose average no rank is given.

        Args:
            candidates: their indices.
            flags: the reduced flags.
        """
        if not self.config.may_be_unused or not candidates:
            return ()
        used = flags.tolist()
        return tuple(index for index in candidates if not used[index])

    def set_grad(self, index: int, value: torch.Tensor) -> None:
        """Let the gradient of a parameter be `value`: the real view if it is complex, this rank's part of a DTensor."""
        parameter = self.parameters[index]
        with torch.no_grad():
            if parameter.grad is None:
                if not parameter.is_complex() and value.stride() == dense_strides(local_tensor(parameter)):
                    parameter.grad = laid_out_as(parameter, value)
                    return
                parameter.grad = empty_gradient(parameter)
            local_view(parameter.grad).copy_(value)

    def check_group(self) -> None:
        """The guard before a synchronised backward: its process group exists.

        Raises:
            CommunicationError: the process group was destroyed.
        """
        if not distributed.is_alive(self.group.process_group):
            raise CommunicationError(
                f"the process group with which the gradients of {self.names[0]} and others are reduced was destroyed. "
                "End training before destroy_process_group(); or, with a new group, call unreplicate() and replicate()."
            )

    def is_gone(self, index: int) -> bool:
        """Whether the module has nowhere the parameter that it had: tied to another, for one."""
        if self.module.precision is not None and self.module.precision.depth:
            return False
        parameter, name = self.parameters[index], self.names[index]
        places = [place for place in self.module.parameter_refs if place.name == name]
        return bool(places) and all(place.find() is not parameter for place in self.module.parameter_refs)

    def name_list(self, indices: Sequence[int], most: int = 8) -> str:
        names = [self.names[index] for index in indices[:most]]
        return ", ".join(names) + (f" and {len(indices) - most} more" if len(indices) > most else "")


def _groups_of(plan: BucketPlan) -> tuple[str, ...]:
    """The groups in which buckets are reduced, by name."""
    return tuple(dict.fromkeys(stage.group for bucket in plan.buckets for stage in bucket.key.reduction.stages))


def warn_once(logger: logging.Logger, replicas: Iterable[Replica], message: str, *args: object, key: str = "") -> None:
    """Warn, unless that was reported of each of these modules before.

    Args:
        replicas: whom it is about.
        message: with places for `args`.
        key: what may not be reported twice; `message` as it stands if not given, so that `args` do not count.
    """
    new = [replica for replica in replicas if (key or message) not in replica.state.warned]
    for replica in new:
        replica.state.warned.add(key or message)
    if new:
        logger.warning(message, *args)
