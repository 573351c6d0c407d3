"""Memory of large buckets that is used again in the next backward.

    bucket_memory(replica, bucket, numel, dtype, device)  ->  one flat tensor, not initialised

glibc gives blocks above 32 MiB back to the system at once and takes them from it anew, page by page (`mallopt(3)`,
`M_MMAP_THRESHOLD`): where little is computed for each byte, as for an embedding, that takes longer than the backward
itself. So code for CPUs asks this op for the memory of such a bucket, and gets that of the backward before if nobody
else has a part of it any more: a `.grad` that somebody kept stays what it was, and the bucket gets other memory.
Smaller blocks stay in the process, and on GPUs torch's allocator keeps all of them.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import torch
from torch import fx

from dp_compile._torch import storages
from dp_compile.fx.collectives import is_collective, is_wait
from dp_compile.passes.bucket_ops import ASSEMBLE

KEPT_FROM_NBYTES: Final = 32 * 2**20
"""The largest block that glibc keeps in the process, `DEFAULT_MMAP_THRESHOLD_MAX` in its malloc.c."""


def is_kept(bucket: fx.Node) -> bool:
    """Whether code lets a bucket have memory that is used again in the next backward.

    A bucket is a `flat_bucket` of a graph, or an `assemble`, which has the memory of its pieces.
    """
    value = bucket.meta["val"]
    large = value.device.type == "cpu" and value.numel() * value.dtype.itemsize > KEPT_FROM_NBYTES
    return large and not _is_a_piece(bucket) and storages.shows_holders()


def _is_a_piece(bucket: fx.Node) -> bool:
    """Whether it has a part of one gradient: what it becomes lies in the memory of the whole."""
    launches = [user for user in bucket.users if is_collective(user)]
    launched = [each for launch in launches for each in (launch, *launch.users)]  # of a grouped one, its items
    waits = [wait for each in launched for wait in each.users if is_wait(wait)]
    return any(user.target is ASSEMBLE for wait in waits for user in wait.users)


class _Kept(NamedTuple):
    """Memory, as a tensor that nobody else is given, and what `storages.holders` says when nobody has a part of it."""

    memory: torch.Tensor
    alone: tuple[int, int]


@dataclass(eq=False, slots=True)
class BucketMemory:
    """The memory of a module's large buckets, by their number in the plan, size and dtype. Used in many backwards."""

    kept: dict[tuple[int, int, torch.dtype], _Kept] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(each.memory.nbytes for each in self.kept.values())

    def take(self, bucket: int, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory that nobody else has a part of; new if there is none. Its values are whatever was there before."""
        kept = self.kept.get((bucket, numel, dtype))
        if kept is None or not _is_free(kept):
            memory = torch.empty(numel, dtype=dtype, device=device)
            kept = self.kept[bucket, numel, dtype] = _Kept(memory, storages.holders(memory))
        return torch.empty(0, dtype=dtype, device=device).set_(kept.memory.untyped_storage(), 0, (numel,), (1,))


def _is_free(kept: _Kept) -> bool:
    """Whether nobody else has a part of the memory, and it is what it was.

    Another process may look at shared memory, which no count shows. It is asked for last: whoever shares a tensor has
    it, and is seen until then.
    """
    if storages.holders(kept.memory) != kept.alone:
        return False
    storage = kept.memory.untyped_storage()
    return storage.nbytes() == kept.memory.nbytes and not storage.is_shared()


class _Running(threading.local):
    memories: Sequence[BucketMemory] = ()


_running = _Running()


@contextlib.contextmanager
def filling(memories: Sequence[BucketMemory]) -> Iterator[None]:
    """Inside, code of this thread fills the buckets of these modules, by their position among those of a backward."""
    before = _running.memories
    _running.memories = memories
    try:
        yield
    finally:
        _running.memories = before


def _take(replica: int, bucket: int, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if replica < len(_running.memories):
        return _running.memories[replica].take(bucket, numel, dtype, device)
    return torch.empty(numel, dtype=dtype, device=device)  # generated code that somebody runs by itself


def _shape_of_memory(replica: int, bucket: int, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(numel, dtype=dtype, device=device)


_library = torch.library.Library("dp_compile", "FRAGMENT")
_library.define("bucket_memory(int replica, int bucket, int numel, ScalarType dtype, Device device) -> Tensor")
_library.impl("bucket_memory", _take, "CompositeExplicitAutograd")
torch.library.register_fake("dp_compile::bucket_memory", _shape_of_memory, lib=_library)

BUCKET_MEMORY = torch.ops.dp_compile.bucket_memory.default
