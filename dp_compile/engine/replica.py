"""One replicated module: its parameters, plan, group and switches. What hooks, capture and `replicate` share."""

from __future__ import annotations

import enum
import itertools
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch
import torch.distributed as dist
from torch import nn

from dp_compile._torch import autograd, distributed
from dp_compile.config import ReplicateConfig
from dp_compile.engine.comm_hook import CommHook
from dp_compile.engine.observers import Observer
from dp_compile.engine.precision import Precision
from dp_compile.engine.record import CaptureRecord
from dp_compile.errors import CommunicationError, ModuleError
from dp_compile.passes.reduction import dtype_of
from dp_compile.passes.result import GraphPass
from dp_compile.passes.sources import code_key
from dp_compile.plan.backends import PLAYED
from dp_compile.plan.buckets import UNUSED_FLAGS, BucketKey, BucketPlan, GradientSpec
from dp_compile.plan.certificate import Certificate
from dp_compile.plan.cost import AllReduceCost
from dp_compile.plan.flags import MORE
from dp_compile.plan.ready_times import Launches, ReadyTimes
from dp_compile.plan.reduction import Averaging, Levels, Reduction
from dp_compile.plan.strategies import Planned

if TYPE_CHECKING:
    from dp_compile.engine.flags import UnreadFlags

_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Group:
    """A process group with the facts that are asked for in every backward."""

    process_group: dist.ProcessGroup
    name: str
    backend: str
    world_size: int
    averaging: Averaging
    levels: Levels | None = None
    """Its ranks by node, if the network between nodes is another one than inside."""

    def reduction(self, dtype: torch.dtype) -> Reduction:
        """How gradients of a dtype are averaged over it; of a complex one, their real and imaginary parts."""
        averaging = replace(self.averaging, wire=None) if dtype.is_complex else self.averaging
        name = str(dtype.to_real()).removeprefix("torch.")
        return averaging.reduction(self.name, self.backend, self.world_size, name, self.levels)

    @property
    def ranks_inside(self) -> int | None:
        """Ranks of a node, on two levels."""
        return None if self.levels is None else self.levels.ranks_inside

    @property
    def has_others(self) -> bool:
        """Whether there are other ranks that really exist."""
        return self.world_size > 1 and self.backend not in PLAYED


class Revision(enum.Enum):
    """An occasion on which a plan is made anew, at the same backward on every rank."""

    FROM_GRAPH = "before the first synchronised backward, from the graph of it"
    FROM_ARRIVALS = "after the first synchronised backward, from the order in which gradients arrived"
    FROM_LAUNCHES = "after some synchronised backwards, from measured launches"


class Arrivals(Protocol):
    """Where the hooks of a module report in one backward: its gradients arrive there."""

    def arrive(self, index: int) -> None: ...


class Removable(Protocol):
    """Something that was installed and can be taken off."""

    def remove(self) -> None: ...


class Reducer(Protocol):
    """What reduces instead of the hooks: torch's C++ reducer."""

    def prepare(self, outputs: Sequence[torch.Tensor]) -> None: ...

    def register_comm_hook(self, state: Any, hook: Callable[..., Any]) -> None: ...

    def finish(self) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class BufferPlace:
    """Where a buffer is found. A forward may put another tensor there, as `self.scale = ...` does."""

    owner: weakref.ref[nn.Module]
    name: str

    def find(self) -> torch.Tensor | None:
        found = getattr(self.owner(), self.name, None)
        return found if isinstance(found, torch.Tensor) else None


@dataclass(frozen=True, slots=True)
class Outline:
    """A module as it was when it was replicated: the names of its parameters, and the parts that were left alone."""

    root: weakref.ref[nn.Module]
    names: frozenset[str]
    left_alone: weakref.WeakSet[nn.Module]


@dataclass(frozen=True, slots=True)
class ParameterPlace:
    """Where a parameter was found, and its fully qualified name. The user may put another one there."""

    owner: weakref.ref[nn.Module]
    attribute: str
    name: str

    def find(self) -> nn.Parameter | None:
        owner = self.owner()
        return None if owner is None else owner._parameters.get(self.attribute)


class Uneven(Protocol):
    """Where ranks that have run out of inputs learn what the others reduce."""

    def announce(self, replicas: Sequence[Replica]) -> None: ...

    def rescale(self) -> None: ...

    @property
    def source(self) -> int: ...


@dataclass(eq=False, repr=False, slots=True, weakref_slot=True)
class Replica:
    """The state of one replicated module. Made by `replicate`, found again through its parameters.

    `parameters` are those whose gradients are reduced, in the module's order. The plan has one gradient more: flags,
    one for each parameter, that travel in the last bucket and tell every rank which parameters some rank did not use.
    """

    parameters: tuple[nn.Parameter, ...]
    names: tuple[str, ...]
    frozen: tuple[tuple[str, nn.Parameter], ...]
    buffer_places: tuple[BufferPlace, ...]
    group: Group
    config: ReplicateConfig
    plan: BucketPlan
    passes: tuple[GraphPass, ...]
    ready: ReadyTimes
    """The ready times that the plan was made from, or that were estimated for a plan that needs none."""
    strategy: str
    """Where buckets end: a name of `config.STRATEGIES`, or `single`: no pass makes buckets."""
    outline: Outline
    parameter_places: tuple[ParameterPlace, ...] = ()
    certificate: Certificate | None = None
    topic: str = ""
    """The same on every rank of the group, and for this replica only: where its ranks meet in the store."""
    revise: Callable[[ReadyTimes, AllReduceCost | None], Planned] | None = None
    revisions: tuple[Revision, ...] = ()
    """When the plan will be made anew, by `revise`: the next occasion first."""
    synced_backwards: int = 0
    settled_after: int = 0
    """How many synchronised backwards there were before the one in which the plan was settled."""
    by_hooks: bool | None = None
    """Whether hooks reduce, or torch's reducer; the same on every rank, not decided before the first backward."""
    arrivals: tuple[int, ...] = ()
    """The parameters in the order in which their gradients arrived in the first backward, if it was not captured."""
    seen_launches: list[Launches] = field(default_factory=list)
    """What this rank has measured for the revision from launches."""
    observers: list[Observer] = field(default_factory=list)
    """Who is told of this module's backwards, beside those who hear of all."""
    said: set[str] = field(default_factory=set)
    """Warnings that are given once for each module, and were."""
    beside_shards: bool = False
    """Parts of the module are managed by `fully_shard`, whose own hooks do not survive a capture."""
    code_key: str = field(init=False)
    """Replicas with equal keys can share compiled code: the model itself is never part of it."""
    python_hook: bool = field(init=False)
    """Whether the user wants hooks to reduce. The environment is asked once: every backward looks here."""
    number: int = field(default_factory=lambda: next(_numbers))
    sync: bool = True
    precision: Precision | None = None
    comm_hook: CommHook | None = None
    """The user's own reduction of a bucket. Only torch's reducer can call it, so it reduces every backward then."""
    average_by: Callable[[Averaging], None] | None = None
    """Lets gradients be averaged in another way from now on. Only between backwards, on every rank."""
    hooks: Removable | None = None
    reducer: Reducer | None = None
    make_reducer: Callable[[], Reducer] | None = None
    captures: dict[int, CaptureRecord] = field(default_factory=dict)
    """The compiled backwards that this module used, by the number of the compiled code."""
    backwards: Counter[str] = field(default_factory=Counter)
    used_without_sync: set[int] = field(default_factory=set)
    """Parameters that got a gradient in a backward without synchronisation since the last one with it."""
    versions_without_sync: dict[int, int] = field(default_factory=dict)
    """Of the parameters with a gradient that is not reduced yet: how often each had been changed by then."""
    stepped: set[int] = field(default_factory=set)
    """Parameters that were changed although they had a gradient that was not reduced."""
    moved: bool = False
    """Parameters were changed after a backward without synchronisation, whose gradients were then dropped."""
    versions_at_start: tuple[int, ...] = ()
    """How often the parameters had been changed when the synchronised backward began; nothing if nobody looked."""
    arrivals_in: Arrivals | None = None
    """Where the hooks report, while a backward of this module is under way that somebody of ours has seen begin."""
    renormalised: frozenset[int] = frozenset()
    """Parameters that a forward changes itself: weights of an embedding with `max_norm`."""
    gave_up: str = ""
    """Why backwards are not captured any more."""
    untouched: tuple[int, ...] = ()
    """Parameters whose gradients the last synchronised backward left as they were, because no rank had used them."""
    uneven: Uneven | None = None
    """While ranks may run out of inputs: how the others learn what this rank's next backward reduces."""
    flags_told: tuple[tuple[object, ...], torch.Tensor] | None = None
    """The flags that were sent last, and what they say."""
    flags_unread: deque[UnreadFlags] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.code_key = self._code_key()
        self.python_hook = self.config.uses_python_hook()
        index_of = {id(parameter): index for index, parameter in enumerate(self.parameters)}
        self.renormalised = frozenset(
            index_of[id(place.find())]
            for place in self.parameter_places
            if id(place.find()) in index_of and getattr(place.owner(), "max_norm", None) is not None
        )

    def _code_key(self) -> str:
        code = tuple(map(code_key, self.passes))
        return repr((self.group.name, self.plan, self.passes, code, self.config))

    @property
    def mode(self) -> str:
        """What reduces, for people."""
        if self.called_hook is not None:
            return f"torch's C++ reducer with comm hook {self.called_hook.name}"
        if self.reducer is not None:
            return "torch's C++ reducer"
        return "python hooks" if self.python_hook else "not decided, no backward yet"

    @property
    def called_hook(self) -> CommHook | None:
        """The comm hook that torch's reducer has to call, as nobody here knows what it does."""
        return None if self.comm_hook is None or self.comm_hook.averaging is not None else self.comm_hook

    def adopt(self, planned: Planned, ready: ReadyTimes) -> None:
        """Reduce by another plan from now on. Only between backwards, and on every rank."""
        self.plan, self.certificate, self.ready = planned.plan, planned.certificate, ready
        self.code_key = self._code_key()

    def take_for_static(self) -> None:
        """Every backward will use the same parameters in the same way.

        Raises:
            ModuleError: a backward has run already.
        """
        if self.backwards.total():
            raise ModuleError(f"a backward of the module of {self.names[0]} has run already. Pass static_graph=True.")
        self.config = replace(self.config, static_graph=True)
        self.code_key = self._code_key()

    def awaits(self, revision: Revision) -> bool:
        """Whether this is the next occasion on which the plan is made anew."""
        return self.revisions[:1] == (revision,)

    @property
    def buffers(self) -> tuple[torch.Tensor, ...]:
        """The buffers as they are now."""
        return tuple(buffer for place in self.buffer_places if (buffer := place.find()) is not None)

    @property
    def device(self) -> torch.device:
        return self.parameters[0].device

    def owning_modules(self) -> list[nn.Module]:
        """The modules that owned its parameters when it was replicated, as far as they are still there."""
        owners = (place.owner() for place in self.parameter_places)
        return [owner for owner in owners if owner is not None]

    def hand_out(self, unused: Sequence[int], averages: Sequence[torch.Tensor], flags: torch.Tensor) -> None:
        """Give parameters without a gradient on this rank what the others have.

        Args:
            unused: parameters without a gradient here.
            averages: the reduced gradient of each of them.
            flags: the reduced flags.
        """
        self.untouched = ()
        if self.config.unused == "error":
            return
        found = self.config.unused == "find"
        self.untouched = tuple(index for index in unused if found and not bool(flags[index]))
        for index, average in zip(unused, averages, strict=True):
            if index not in self.untouched:
                self.set_grad(index, average)

    def set_grad(self, index: int, value: torch.Tensor) -> None:
        """Let the gradient of a parameter be `value`, which is the real view of it if the parameter is complex."""
        parameter = self.parameters[index]
        with torch.no_grad():
            if parameter.grad is None and not parameter.is_complex() and value.stride() == dense_strides(parameter):
                parameter.grad = value
                return
            if parameter.grad is None:
                parameter.grad = torch.empty_strided(
                    parameter.shape, dense_strides(parameter), dtype=parameter.dtype, device=value.device
                )
            real_view(parameter.grad).copy_(value)

    # --- guards against steps on gradients that are not reduced

    def note_without_sync(self) -> None:
        """A backward without synchronisation has ended."""
        self._note_changes()
        if self.config.check_reductions:
            self.versions_without_sync = {
                index: autograd.version_of(parameter)
                for index, parameter in enumerate(self.parameters)
                if parameter.grad is not None and index not in self.renormalised
            }

    def check_group(self) -> None:
        """The guard before a synchronised backward: there is somebody to reduce with.

        Raises:
            CommunicationError: the process group was destroyed.
        """
        if not distributed.is_alive(self.group.process_group):
            raise CommunicationError(
                f"the process group with which the gradients of {self.names[0]} and others are reduced was destroyed. "
                "End training before destroy_process_group(); or, with a new group, call unreplicate() and replicate()."
            )

    def begin(self) -> None:
        """A synchronised backward begins."""
        self._note_changes()
        self.versions_without_sync.clear()
        self.versions_at_start = self._versions() if self.config.check_reductions else ()

    def note_steps(self) -> None:
        """Nobody may have changed parameters since the backward began, as an optimizer in a hook does."""
        if self.versions_at_start:
            versions = zip(self.versions_at_start, self._versions(), strict=True)
            changed = {index for index, (before, now) in enumerate(versions) if before != now}
            self.stepped |= changed - self.renormalised
            self.versions_at_start = ()

    def _note_changes(self) -> None:
        """Which parameters changed since a local backward.

        It is an error if the local gradient is still there. If it was dropped or zeroed the local backward may only
        have been there to find a direction, as the first one of SAM is; then every rank has to have moved.
        """
        for index, version in self.versions_without_sync.items():
            if version != autograd.version_of(self.parameters[index]):
                grad = self.parameters[index].grad
                if grad is not None and bool(grad.any()):
                    self.stepped.add(index)
                else:
                    self.moved = True

    def _versions(self) -> tuple[int, ...]:
        return tuple(map(autograd.version_of, self.parameters))

    def is_gone(self, index: int) -> bool:
        """Whether the module has nowhere the parameter that it had: tied to another, for one."""
        if self.precision is not None and self.precision.stands:
            return False
        parameter, name = self.parameters[index], self.names[index]
        places = [place for place in self.parameter_places if place.name == name]
        return bool(places) and all(place.find() is not parameter for place in self.parameter_places)

    def name_list(self, indices: Sequence[int], most: int = 8) -> str:
        names = [self.names[index] for index in indices[:most]]
        return ", ".join(names) + (f" and {len(indices) - most} more" if len(indices) > most else "")


def gradient_specs(parameters: Sequence[nn.Parameter], names: Sequence[str], group: Group) -> tuple[GradientSpec, ...]:
    """The gradients of a module in the order in which they are expected: last parameter first, flags at the end."""
    specs = []
    for index, (name, parameter) in enumerate(zip(names, parameters, strict=True)):
        dtype, shape, stride = parameter.dtype, tuple(parameter.shape), dense_strides(parameter)
        if parameter.is_complex():  # as torch's DDP: numbers are added, and NCCL has no complex ones
            dtype, shape, stride = dtype.to_real(), (*shape, 2), (*(2 * step for step in stride), 1)
        reduction = group.reduction(parameter.dtype)
        itemsize = (dtype if reduction.wire is None else dtype_of(reduction.wire)).itemsize
        key = BucketKey(reduction, str(dtype).removeprefix("torch."), parameter.device.type)
        specs.append(GradientSpec(index, name, shape, stride, itemsize, key))
    first, length = specs[0], len(specs) + MORE
    flags = GradientSpec(len(specs), UNUSED_FLAGS, (length,), (1,), first.itemsize, first.key)
    return (*reversed(specs), flags)


def real_view(grad: torch.Tensor) -> torch.Tensor:
    """A gradient as it is reduced: itself, or real and imaginary parts of a complex one, in the same memory."""
    return torch.view_as_real(grad) if grad.is_complex() else grad


def dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """The tensor's strides if it fills its memory without gaps or overlaps, otherwise those of a contiguous one.

    Source: the layout that torch gives a `.grad` (AccumulateGrad's gradient layout contract).
    """
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return torch.empty(tensor.shape, device="meta").stride()
        expected *= size
    return tensor.stride()


class Owners:
    """Which replica a parameter belongs to. Holds no module alive, and a replica as long as a module of its own."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[weakref.ref[Replica], int]] = {}
        self._forget: weakref.WeakKeyDictionary[Replica, weakref.finalize[..., Replica]] = weakref.WeakKeyDictionary()
        self._kept: weakref.WeakKeyDictionary[nn.Module, Replica] = weakref.WeakKeyDictionary()
        """By each module that owns a parameter: a part of what was replicated may train on when the whole is gone."""
        self._in_order: tuple[weakref.ref[Replica], ...] = ()
        """Sorted once: every backward of the process goes through them."""

    def add(self, replica: Replica) -> None:
        """Register a replica.

        Raises:
            ModuleError: one of its parameters is replicated already.
        """
        for name, parameter in zip(replica.names, replica.parameters, strict=True):
            if self.find(parameter) is not None:
                raise ModuleError(
                    f"parameter {name} is replicated already. Call replicate() once, on the outermost module."
                )
        for index, parameter in enumerate(replica.parameters):
            self._of[id(parameter)] = (weakref.ref(replica), index)
        for owner in replica.owning_modules():
            self._kept[owner] = replica
        # Entries go with their replica, so that a later tensor at the same address is not taken for a parameter.
        self._forget[replica] = weakref.finalize(replica, self._drop, [id(p) for p in replica.parameters])
        self._sort()

    def remove(self, replica: Replica) -> None:
        self._forget.pop(replica)()
        for owner in replica.owning_modules():
            self._kept.pop(owner, None)

    def _drop(self, identities: Sequence[int]) -> None:
        for identity in identities:
            self._of.pop(identity, None)
        self._sort()

    def _sort(self) -> None:
        self._in_order = tuple(map(weakref.ref, sorted(self._forget, key=lambda replica: replica.number)))

    def find(self, parameter: torch.Tensor) -> tuple[Replica, int] | None:
        """The replica of a parameter and its index there."""
        entry = self._of.get(id(parameter))
        replica = entry[0]() if entry else None
        return (replica, entry[1]) if entry and replica is not None else None

    def __iter__(self) -> Iterator[Replica]:
        return (replica for ref in self._in_order if (replica := ref()) is not None)

    def __len__(self) -> int:
        return len(self._forget)


owners: Final = Owners()
"""Every replica in this process."""
