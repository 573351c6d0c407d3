"""Memory of buckets that is used again in the next backward.

    bucket_memory(replica, number, numel, dtype, device)  ->  one flat tensor, not initialised

glibc gives blocks above 32 MiB back to the system at once and takes them from it anew, page by page (`mallopt(3)`,
`M_MMAP_THRESHOLD`): where little is computed for each byte, as for an embedding, that takes longer than the backward
itself. So code for CPUs asks this op for the memory of such a bucket, and gets that of the backward before if nobody
else has a part of it any more: a `.grad` that somebody kept stays what it was, and the bucket gets other memory.
Smaller blocks stay in the process, and on GPUs torch's allocator keeps all of them: there it is done on request, with
`gradient_as_bucket_view=True`, for addresses that stay what they are.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch
from torch import fx

from dp_compile._torch import pairs, storages
from dp_compile.errors import InvalidGraphError
from dp_compile.plan.buckets import BucketPlan, GradientSpec

KEPT_FROM_NBYTES: Final = 32 * 2**20
"""The largest block that glibc keeps in the process, `DEFAULT_MMAP_THRESHOLD_MAX` in its malloc.c."""

_LOOKS: Final = 20
_PAUSE_S: Final = 50e-6
"""Of the calling thread between two looks, so that the one that has the memory may run."""
_PLACE: Final = "dp_compile_memory"


class MemoryPlace(NamedTuple):
    """Which memory a bucket has: that of a replica, by position, with a number. `wish`: `BucketPlan.keeps_memory`."""

    replica: int
    number: int
    wish: bool | None


@dataclass(slots=True)
class MemoryPlaces:
    """Numbers the buckets of a replica's plan, which get the same ones in every graph that is made for it."""

    replica: int
    wish: bool | None
    _given: int = 0

    def given_to(self, bucket: fx.Node) -> fx.Node:
        bucket.meta[_PLACE] = MemoryPlace(self.replica, self._given, self.wish)
        self._given += 1
        return bucket


def place_of(bucket: fx.Node) -> MemoryPlace | None:
    found = bucket.meta.get(_PLACE)
    return found if isinstance(found, MemoryPlace) else None


def is_kept(bucket: fx.Node) -> bool:
    """Whether code lets a bucket have memory that is used again in the next backward."""
    place = place_of(bucket)
    if place is None or place.wish is False or not storages.shows_holders():
        return False
    value = bucket.meta["val"]
    if place.wish is None:
        return bool(value.device.type == "cpu" and value.numel() * value.dtype.itemsize > KEPT_FROM_NBYTES)
    from dp_compile._torch import inductor  # loaded only by what compiles

    # What CUDA graphs replay asks nobody for memory.
    return bool(value.device.type == "cpu" or not inductor.uses_cuda_graphs({}))


class _Kept(NamedTuple):
    """Memory, as a tensor that nobody else is given, and what `storages.holders` says when nobody has a part of it.

    `is_waited_for`: not if somebody had the memory before it for long: they will have this too.
    """

    memory: torch.Tensor
    alone: tuple[int, int]
    is_waited_for: bool


@dataclass(eq=False, slots=True)
class BucketMemory:
    """The memory of a module's buckets, by number, size and dtype. Used in many backwards.

    A number below zero has what comes in while bucket `-1 - number` is sent.
    """

    kept: dict[tuple[int, int, torch.dtype], _Kept] = field(default_factory=dict)

    @property
    def buckets(self) -> int:
        return len({number for number, _, _ in self.kept if number >= 0})

    @property
    def nbytes(self) -> int:
        return sum(each.memory.nbytes for each in self.kept.values())

    def take(self, number: int, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory that nobody else has a part of; new if there is none. Its values are whatever was there before."""
        kept = self.kept.get((number, numel, dtype))
        if kept is None or not _becomes_free(kept):
            memory = torch.empty(numel, dtype=dtype, device=device)
            kept = _Kept(memory, storages.holders(memory), is_waited_for=kept is None)
        elif not kept.is_waited_for:
            kept = kept._replace(is_waited_for=True)
        self.kept[number, numel, dtype] = kept
        return torch.empty(0, dtype=dtype, device=device).set_(kept.memory.untyped_storage(), 0, (numel,), (1,))

    def beside(self, bucket: torch.Tensor) -> torch.Tensor | None:
        """Memory to receive in what other ranks send while this rank sends the bucket; `None`: it is not kept."""
        where = bucket.data_ptr()
        for (number, numel, dtype), kept in self.kept.items():
            if number >= 0 and kept.memory.data_ptr() == where and (numel, dtype) == (bucket.numel(), bucket.dtype):
                return self.take(-1 - number, numel, dtype, bucket.device)
        return None

    def in_turn(self, device: torch.device) -> Callable[..., torch.Tensor]:
        """For one backward that is not compiled: a function that gives one bucket after the other its memory."""
        numbers = itertools.count()
        return lambda numel, *, dtype: self.take(next(numbers), numel, dtype, device)


def _becomes_free(kept: _Kept) -> bool:
    """Whether nobody else has the memory any more, in a moment.

    A thread of gloo's has what it reduced until it runs again, after it has told whoever waits that it is done: seen in
    4 of 60 backwards of 4 ms, 2 ranks on 2 cores.
    """
    looks = _LOOKS if kept.is_waited_for else 1
    while not _is_free(kept):
        looks -= 1
        if not looks:
            return False
        time.sleep(_PAUSE_S)
    return True


def _is_free(kept: _Kept) -> bool:
    """Whether nobody else has a part of the memory, and it is what it was.

    Another process may look at shared memory, which no count shows. It is asked for last: whoever shares a tensor has
    it, and is seen until then.
    """
    if storages.holders(kept.memory) != kept.alone:
        return False
    storage = kept.memory.untyped_storage()
    return storage.nbytes() == kept.memory.nbytes and not storage.is_shared()


# --- which modules compiled code runs for ---


class Running:
    """Inside, code of this thread runs for these modules, by their positions among those of a backward.

    Args:
        plans: by which code that still holds `reduce_grad` reduces.
        memories: what its buckets are filled in.
        optimizers: what updates parameters, of each module: `passes/updates.py` says what that can do.

    A class and no generator: every backward enters it.
    """

    __slots__ = ("_before", "_gradients", "memories", "optimizers", "plans")

    def __init__(
        self,
        plans: Sequence[BucketPlan] = (),
        memories: Sequence[BucketMemory] = (),
        optimizers: Sequence[Sequence[Any]] = (),
    ) -> None:
        self.plans, self.memories, self.optimizers = plans, memories, optimizers
        self._gradients: list[dict[int, GradientSpec]] | None = None

    def __enter__(self) -> None:
        self._before, _here.running = _here.running, self

    def __exit__(self, *error: object) -> None:
        _here.running = self._before

    def gradient(self, replica: int, index: int) -> GradientSpec:
        """What a plan says of a gradient.

        Raises:
            InvalidGraphError: no such module runs.
        """
        if self._gradients is None:
            self._gradients = [{each.index: each for each in plan.gradients} for plan in self.plans]
        if replica >= len(self._gradients):
            raise InvalidGraphError(
                f"gradient {index} of module {replica} is reduced outside a backward of dp_compile's"
            )
        return self._gradients[replica][index]


class _Here(threading.local):
    running = Running()


_here = _Here()


def running() -> Running:
    """What runs in this thread; outside of all it has no modules."""
    return _here.running


def _beside(sent: torch.Tensor) -> torch.Tensor | None:
    for memory in running().memories:
        if (found := memory.beside(sent)) is not None:
            return found
    return None


pairs.receive_in(_beside)


def _take(replica: int, number: int, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    memories = running().memories
    if replica < len(memories):
        return memories[replica].take(number, numel, dtype, device)
    return torch.empty(numel, dtype=dtype, device=device)  # generated code that somebody runs by itself


def _shape_of_memory(replica: int, number: int, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(numel, dtype=dtype, device=device)


_library = torch.library.Library("dp_compile", "FRAGMENT")
_library.define("bucket_memory(int replica, int number, int numel, ScalarType dtype, Device device) -> Tensor")
_library.impl("bucket_memory", _take, "CompositeExplicitAutograd")
torch.library.register_fake("dp_compile::bucket_memory", _shape_of_memory, lib=_library)

BUCKET_MEMORY = torch.ops.dp_compile.bucket_memory.default
