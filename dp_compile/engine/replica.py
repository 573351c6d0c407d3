"""One replicated module: its parameters, plan, group and switches. What hooks, capture and `replicate` share."""

from __future__ import annotations

import enum
import itertools
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

import torch
import torch.distributed as dist
from torch import nn

from dp_compile._torch import autograd
from dp_compile.config import ReplicateConfig
from dp_compile.engine.comm_hook import CommHook
from dp_compile.engine.record import CaptureRecord
from dp_compile.errors import ModuleError, ReductionError
from dp_compile.insight.launch_clock import Recording
from dp_compile.insight.step import MeasuredStep
from dp_compile.passes.reduction import Averaging, ReductionTag
from dp_compile.passes.result import GraphPass
from dp_compile.passes.sources import code_key
from dp_compile.plan.backends import PLAYED
from dp_compile.plan.buckets import UNUSED_FLAGS, BucketKey, BucketPlan, GradientSpec
from dp_compile.plan.certificate import Certificate
from dp_compile.plan.cost import AllReduceCost
from dp_compile.plan.ready_times import Launches, ReadyTimes
from dp_compile.plan.strategies import Planned

MAX_UNREAD_FLAGS: Final = 2
_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Group:
    """A process group with the facts that are asked for in every backward."""

    process_group: dist.ProcessGroup
    name: str
    backend: str
    world_size: int
    averaging: Averaging

    @property
    def has_others(self) -> bool:
        """Whether there are other ranks that really exist."""
        return self.world_size > 1 and self.backend not in PLAYED


class Revision(enum.Enum):
    """An occasion on which a plan is made anew, at the same backward on every rank."""

    FROM_GRAPH = "before the first synchronised backward, from the graph of it"
    FROM_ARRIVALS = "after the first synchronised backward, from the order in which gradients arrived"
    FROM_LAUNCHES = "after some synchronised backwards, from measured launches"


class Removable(Protocol):
    """Something that was installed and can be taken off."""

    def remove(self) -> None: ...


class Reducer(Protocol):
    """What reduces instead of the hooks: torch's C++ reducer."""

    def prepare(self, outputs: Sequence[torch.Tensor]) -> None: ...

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
    measured: MeasuredStep | None = None
    """What the latest measured backward of this rank was like, if one was measured for people."""
    recording: Recording | None = None
    """While this rank's backwards are timed for people."""
    said: set[str] = field(default_factory=set)
    """Warnings that are given once for each module, and were."""
    dumped_to: Path | None = None
    """The directory of this rank's latest dump of a captured backward."""
    beside_shards: bool = False
    """Parts of the module are managed by `fully_shard`, whose own hooks do not survive a capture."""
    code_key: str = field(init=False)
    """Replicas with equal keys can share compiled code: the model itself is never part of it."""
    number: int = field(default_factory=lambda: next(_numbers))
    sync: bool = True
    comm_hook: CommHook | None = None
    """The user's own reduction of a bucket. Only torch's reducer can call it, so it reduces every backward then."""
    hooks: Removable | None = None
    reducer: Reducer | None = None
    make_reducer: Callable[[], Reducer] | None = None
    captures: dict[int, CaptureRecord] = field(default_factory=dict)
    """The compiled backwards that this module used, by the number of the compiled code."""
    backwards: Counter[str] = field(default_factory=Counter)
    used_without_sync: set[int] = field(default_factory=set)
    """Parameters that got a gradient in a backward without synchronisation since the last one with it."""
    version_without_sync: int | None = None
    """How often the parameters had been changed at the latest backward without synchronisation since then."""
    untouched: tuple[int, ...] = ()
    """Parameters whose gradients the last synchronised backward left as they were, because no rank had used them."""
    uneven: Uneven | None = None
    """While ranks may run out of inputs: how the others learn what this rank's next backward reduces."""
    _flags: tuple[tuple[int, ...], torch.Tensor] | None = None
    _unread: deque[_HostCopy] = field(default_factory=deque)

    def tag(self, index: int, ordinal: int) -> ReductionTag:
        """The constants of the reduction of parameter `index` when this is replica `ordinal` of the backward."""
        averaging = self.group.averaging
        return ReductionTag(index, ordinal, self.group.name, averaging.reduce_op, averaging.scale)

    def __post_init__(self) -> None:
        self.code_key = self._code_key()

    def _code_key(self) -> str:
        code = tuple(map(code_key, self.passes))
        return repr((self.group.name, self.plan, self.passes, code, self.config))

    @property
    def mode(self) -> str:
        """What reduces, for people."""
        if self.hooks is not None:
            return "python hooks"
        if self.comm_hook is not None:
            return f"torch's C++ reducer with comm hook {self.comm_hook.name}"
        return "not decided, no backward yet" if self.reducer is None else "torch's C++ reducer"

    def adopt(self, planned: Planned, ready: ReadyTimes) -> None:
        """Reduce by another plan from now on. Only between backwards, and on every rank."""
        self.plan, self.certificate, self.ready = planned.plan, planned.certificate, ready
        self.code_key = self._code_key()

    def awaits(self, revision: Revision) -> bool:
        """Whether this is the next occasion on which the plan is made anew."""
        return self.revisions[:1] == (revision,)

    def fill_missing(self) -> None:
        """Zeros for parameters that no rank used, for a reducer that leaves them without a gradient."""
        if self.config.unused == "zeros":
            for parameter in self.parameters:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter, requires_grad=False)

    @property
    def buffers(self) -> tuple[torch.Tensor, ...]:
        """The buffers as they are now."""
        return tuple(buffer for place in self.buffer_places if (buffer := place.find()) is not None)

    @property
    def device(self) -> torch.device:
        return self.parameters[0].device

    def unused_flags(self, unused: Sequence[int], used: Sequence[int]) -> torch.Tensor:
        """What this rank tells the others, one number for each parameter.

        To find unused ones a one says "used here", so that nothing but zeros means that no rank used it; if they are
        errors a one says "unused here", so that nothing but zeros means that all is well. Both survive averaging in any
        floating dtype. If they take part as zeros there is nothing to tell.
        """
        told = tuple({"find": used, "error": unused, "zeros": ()}[self.config.unused])
        if self._flags is None or self._flags[0] != told:
            flags = torch.zeros(len(self.parameters), dtype=self.parameters[0].dtype)
            flags[list(told)] = 1.0
            self._flags = (told, flags.to(self.device))
        return self._flags[1]

    def settle_unused(self, flags: torch.Tensor, unused: Sequence[int], averages: Sequence[torch.Tensor]) -> None:
        """Act on the reduced flags: hand out averages of gradients that only others produced, or raise.

        Args:
            flags: the reduced flags.
            unused: parameters without a gradient on this rank.
            averages: the reduced gradient of each of them.

        Raises:
            ReductionError: a parameter was unused on some rank and that is an error. What only other ranks did not
                use is reported at once on a CPU, up to `MAX_UNREAD_FLAGS` backwards later on a GPU.
        """
        self.untouched = ()
        if self.config.unused != "error":
            found = self.config.unused == "find"
            self.untouched = tuple(index for index in unused if found and not bool(flags[index]))
            with torch.no_grad():
                for index, average in zip(unused, averages, strict=True):
                    if index not in self.untouched:
                        _set_grad(self.parameters[index], average)
        elif self.config.check_reductions:
            self._unread.append(_HostCopy(flags))
            self._read_flags(unused)

    def note_without_sync(self) -> None:
        """A backward without synchronisation has ended."""
        self.version_without_sync = self._version()

    def check_unchanged(self) -> None:
        """The guard before a synchronised backward: nobody stepped on gradients that were not reduced.

        Raises:
            ReductionError: parameters were changed after a backward without synchronisation.
        """
        before, self.version_without_sync = self.version_without_sync, None
        if self.config.check_reductions and before is not None and before != self._version():
            raise ReductionError(
                "parameters were changed after a backward under no_sync and before its gradients were reduced, so "
                "they differ between ranks: did optimizer.step() follow it, perhaps on this rank only? End each "
                "accumulation with a backward outside of no_sync, or pass check_reductions=False."
            )

    def _version(self) -> int:
        return sum(autograd.version_of(parameter) for parameter in self.parameters)

    def _read_flags(self, unused: Sequence[int]) -> None:
        """Look at the flags that have reached the host. Reading a GPU's at once would stop it once a step."""
        while self._unread and (unused or self._unread[0].arrived() or len(self._unread) > MAX_UNREAD_FLAGS):
            flags = self._unread.popleft().read()
            if unused or bool(flags.any()):
                elsewhere = [index for index in flags.nonzero().flatten().tolist() if index not in set(unused)]
                self._unread.clear()
                raise ReductionError(self._unused_message(unused, elsewhere))

    def _unused_message(self, here: Sequence[int], elsewhere: Sequence[int]) -> str:
        parts = []
        if here:
            parts.append(f"without a gradient on this rank: {self.name_list(here)}")
        if elsewhere:
            parts.append(f"without a gradient on another rank: {self.name_list(elsewhere)}")
        return (
            f"parameters {'; '.join(parts)}. Every parameter has to take part in the loss on every rank. "
            "If some may be left out, pass find_unused_parameters=True, or unused_parameters='zeros'; if they never "
            "train, call requires_grad_(False) on them before replicate()."
        )

    def name_list(self, indices: Sequence[int], most: int = 8) -> str:
        names = [self.names[index] for index in indices[:most]]
        return ", ".join(names) + (f" and {len(indices) - most} more" if len(indices) > most else "")


def gradient_specs(parameters: Sequence[nn.Parameter], names: Sequence[str], group: Group) -> tuple[GradientSpec, ...]:
    """The gradients of a module in the order in which they are expected: last parameter first, flags at the end."""
    specs = []
    for index, (name, parameter) in enumerate(zip(names, parameters, strict=True)):
        key = BucketKey(
            group.name, group.averaging.reduce_op, str(parameter.dtype).removeprefix("torch."), parameter.device.type
        )
        specs.append(
            GradientSpec(
                index,
                name,
                tuple(parameter.shape),
                dense_strides(parameter),
                parameter.element_size(),
                key,
                group.averaging.scale,
            )
        )
    last = specs[0]
    flags = GradientSpec(len(specs), UNUSED_FLAGS, (len(specs),), (1,), last.itemsize, last.key, group.averaging.scale)
    return (*reversed(specs), flags)


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


def _set_grad(parameter: nn.Parameter, value: torch.Tensor) -> None:
    if parameter.grad is None and value.stride() == dense_strides(parameter):
        parameter.grad = value
        return
    if parameter.grad is None:
        parameter.grad = torch.empty_strided(
            parameter.shape, dense_strides(parameter), dtype=value.dtype, device=value.device
        )
    parameter.grad.copy_(value)


class _HostCopy:
    """Flags on their way to the host."""

    def __init__(self, flags: torch.Tensor) -> None:
        self._event: torch.Event | None = None
        self._flags = flags.detach()
        if flags.device.type != "cpu":
            self._flags = torch.empty(flags.shape, dtype=flags.dtype, pin_memory=True)
            self._flags.copy_(flags, non_blocking=True)
            self._event = torch.Event(flags.device)
            self._event.record()

    def arrived(self) -> bool:
        return self._event is None or bool(self._event.query())

    def read(self) -> torch.Tensor:
        if self._event is not None:
            self._event.synchronize()
        return self._flags


class Owners:
    """Which replica a parameter belongs to. Holds neither parameters nor replicas alive."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[weakref.ref[Replica], int]] = {}
        self._forget: weakref.WeakKeyDictionary[Replica, weakref.finalize[..., Replica]] = weakref.WeakKeyDictionary()

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
        # Entries go with their replica, so that a later tensor at the same address is not taken for a parameter.
        self._forget[replica] = weakref.finalize(replica, self._drop, [id(p) for p in replica.parameters])

    def remove(self, replica: Replica) -> None:
        self._forget.pop(replica)()

    def _drop(self, identities: Sequence[int]) -> None:
        for identity in identities:
            self._of.pop(identity, None)

    def find(self, parameter: torch.Tensor) -> tuple[Replica, int] | None:
        """The replica of a parameter and its index there."""
        entry = self._of.get(id(parameter))
        replica = entry[0]() if entry else None
        return (replica, entry[1]) if entry and replica is not None else None

    def __iter__(self) -> Iterator[Replica]:
        return iter(sorted(self._forget, key=lambda replica: replica.number))

    def __len__(self) -> int:
        return len(self._forget)


owners: Final = Owners()
"""Every replica in this process."""
