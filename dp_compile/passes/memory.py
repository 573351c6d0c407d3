"""Bucket memory, and the modules for which compiled code runs. The code names neither, so equal modules share it.

glibc returns blocks above 32 MiB to the system at once, and a new one is mapped page by page (`mallopt(3)`,
`M_MMAP_THRESHOLD`). For an embedding this takes longer than the backward: 122 MiB of rows took 60.2 ms of processor
time per step, and take 5.3 ms with reuse (alternating runs, medians of 15, 2026-11-27). So on CPUs a bucket that large
reuses its memory in the next backward, unless a tensor still references a part of that, such as a `.grad` that the user
keeps. Smaller blocks stay in the process. On GPUs torch's allocator keeps all blocks, and buckets reuse memory only
with `gradient_as_bucket_view=True`, for constant addresses.
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

from dp_compile._torch import autograd
from dp_compile.comm_hooks.functional import HookRun, State
from dp_compile.plan.buckets import BucketPlan

KEPT_FROM_NBYTES: Final = 32 * 2**20  # largest block that glibc keeps: `DEFAULT_MMAP_THRESHOLD_MAX` in its malloc.c
KEEPS: Final = "dp_compile_keeps_memory"  # `meta` key of a bucket's node: `BucketPlan.keeps_memory`
_LOOKS: Final = 20


def is_kept(bucket: fx.Node) -> bool:
    """Return whether the next backward reuses a bucket's memory; otherwise each backward allocates new memory."""
    wish, value = bucket.meta.get(KEEPS, False), bucket.meta["val"]
    if value.device.type == "cpu":
        return wish is True or (wish is None and value.nbytes > KEPT_FROM_NBYTES)
    from dp_compile._torch import inductor  # here: only compiling processes load it

    # CUDA graphs replay addresses and never call the op.
    return wish is True and not inductor.uses_cuda_graphs({})


class _Kept(NamedTuple):
    """Memory of a bucket, and its reference counts (`autograd.holders`) while nothing else references a part of it."""

    memory: torch.Tensor
    alone: tuple[int, int]


@dataclass(eq=False, slots=True)
class BucketMemory:
    """The memory of a module's buckets, for its next backwards, by bucket number, numel and dtype."""

    kept: dict[tuple[int, int, torch.dtype], _Kept] = field(default_factory=dict)

    @property
    def buckets(self) -> int:
        return len({number for number, _, _ in self.kept})

    @property
    def nbytes(self) -> int:
        return sum(each.memory.nbytes for each in self.kept.values())

    def take(self, number: int, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory that nothing else references: kept memory, or new zeros. Gaps between members stay zero."""
        kept = self.kept.get((number, numel, dtype))
        if kept is None or not _becomes_free(kept):
            memory = torch.zeros(numel, dtype=dtype, device=device)
            kept = self.kept[number, numel, dtype] = _Kept(memory, autograd.holders(memory))
        return torch.empty(0, dtype=dtype, device=device).set_(kept.memory.untyped_storage(), 0, (numel,), (1,))

    def in_turn(self, device: torch.device) -> Callable[..., torch.Tensor]:
        """Return an allocator for one eager backward; each call returns the memory of the next bucket."""
        numbers = itertools.count()
        return lambda numel, *, dtype: self.take(next(numbers), numel, dtype, device)


def _becomes_free(kept: _Kept) -> bool:
    """Return whether nothing else references the memory, after waiting for at most about a millisecond.

    A gloo thread reports the end of its work, but references the tensor until the thread is scheduled again: seen in 4
    of 60 backwards of 4 ms, 2 ranks on 2 cores.
    """
    for _ in range(_LOOKS):
        if autograd.holders(kept.memory) == kept.alone:
            storage = kept.memory.untyped_storage()
            # Another process may read shared memory, which no count shows. This is checked last, because a thread that
            # shares a tensor references it until then.
            return storage.nbytes() == kept.memory.nbytes and not storage.is_shared()
        time.sleep(50e-6)  # let the thread run that references the memory
    return False


@dataclass(eq=False, slots=True)
class Running:
    """Context in which this thread runs the compiled code of a backward.
    Fields, indexed by module of that backward: the module's plan, bucket memory, optimizers that update its parameters
    (`passes/updates.py`), and its comm hook's state by gradient index. A class is faster than a generator: every
    backward enters it.
    """

    plans: Sequence[BucketPlan] = ()
    memories: Sequence[BucketMemory] = ()
    optimizers: Sequence[Sequence[Any]] = ()
    states: Sequence[Callable[[int], State]] = ()
    hook_runs: dict[tuple[int, int], HookRun] = field(default_factory=dict)  # by module and bucket
    _before: Any = None

    def __enter__(self) -> None:
        self._before, this_thread.running = this_thread.running, self

    def __exit__(self, *error: object) -> None:
        this_thread.running = self._before


class _Thread(threading.local):
    running = Running()  # no modules outside of a context


this_thread = _Thread()


def _new(replica: int, number: int, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(numel, dtype=dtype, device=device)


def _take(replica: int, number: int, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    memories = this_thread.running.memories
    if replica < len(memories):
        return memories[replica].take(number, numel, dtype, device)
    return _new(replica, number, numel, dtype, device)  # generated code called outside of a backward


_library = torch.library.Library("dp_compile", "FRAGMENT")


def nothing(*_: object) -> None:
    """Do nothing: the fake implementation of ops without a result."""


def make_op(
    schema: str, run: Callable[..., Any], fake: Callable[..., Any] = nothing, tags: tuple[torch.Tag, ...] = ()
) -> Any:
    """Define an op `dp_compile::NAME` for graphs, with its implementation and its fake implementation."""
    name = schema.partition("(")[0]
    _library.define(schema, tags=tags)
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"dp_compile::{name}", fake, lib=_library)
    return getattr(torch.ops.dp_compile, name).default


BUCKET_MEMORY = make_op(
    "bucket_memory(int replica, int number, int numel, ScalarType dtype, Device device) -> Tensor", _take, _new
)  # one flat tensor, uninitialised
