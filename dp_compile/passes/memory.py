"""The memory of buckets, and for which modules compiled code runs. Code holds neither: modules of one shape share it.

glibc returns blocks above 32 MiB to the system at once and maps them again page by page (`mallopt(3)`,
`M_MMAP_THRESHOLD`). For an embedding, that takes longer than the backward itself: 122 MiB of rows took 60.2 ms of
processor time a step, and take 5.3 (medians of 15 in turns, 2026-11-27). So on CPUs such a bucket gets the memory of
the last backward again, unless any part of it is still referenced: a `.grad` that was kept keeps its values. Smaller
blocks stay in the process, and on GPUs torch's allocator keeps all of them: there memory is used again only with
`gradient_as_bucket_view=True`, for constant addresses.
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

KEPT_FROM_NBYTES: Final = 32 * 2**20
"""The largest block that glibc keeps in the process, `DEFAULT_MMAP_THRESHOLD_MAX` in its malloc.c."""

KEEPS: Final = "dp_compile_keeps_memory"
"""Where a node that makes a bucket has `BucketPlan.keeps_memory`, in `meta`."""
_LOOKS: Final = 20


def is_kept(bucket: fx.Node) -> bool:
    """Whether the memory of a bucket is used again in the next backward; else each backward allocates it."""
    wish, value = bucket.meta.get(KEEPS, False), bucket.meta["val"]
    if value.device.type == "cpu":
        return wish is True or (wish is None and value.nbytes > KEPT_FROM_NBYTES)
    from dp_compile._torch import inductor  # loaded only by what compiles

    # CUDA graphs replay addresses and never call the op.
    return wish is True and not inductor.uses_cuda_graphs({})


class _Kept(NamedTuple):
    """Memory, and what `autograd.holders` says of it while no part of it is referenced elsewhere."""

    memory: torch.Tensor
    alone: tuple[int, int]


@dataclass(eq=False, slots=True)
class BucketMemory:
    """The memory of a module's buckets from one backward to the next, by number, size and dtype."""

    kept: dict[tuple[int, int, torch.dtype], _Kept] = field(default_factory=dict)

    @property
    def buckets(self) -> int:
        return len({number for number, _, _ in self.kept})

    @property
    def nbytes(self) -> int:
        return sum(each.memory.nbytes for each in self.kept.values())

    def take(self, number: int, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory of which no part is referenced elsewhere; new if there is none. Gaps between members stay zeros."""
        kept = self.kept.get((number, numel, dtype))
        if kept is None or not _becomes_free(kept):
            memory = torch.zeros(numel, dtype=dtype, device=device)
            kept = self.kept[number, numel, dtype] = _Kept(memory, autograd.holders(memory))
        return torch.empty(0, dtype=dtype, device=device).set_(kept.memory.untyped_storage(), 0, (numel,), (1,))

    def in_turn(self, device: torch.device) -> Callable[..., torch.Tensor]:
        """For one eager backward: a function that returns the memory of one bucket after the other."""
        numbers = itertools.count()
        return lambda numel, *, dtype: self.take(next(numbers), numel, dtype, device)


def _becomes_free(kept: _Kept) -> bool:
    """Whether no part of the memory is referenced elsewhere, within a millisecond.

    A thread of gloo references what it reduced until it runs again, after it has reported the end of its work: in 4 of
    60 backwards of 4 ms, 2 ranks on 2 cores.
    """
    for _ in range(_LOOKS):
        if autograd.holders(kept.memory) == kept.alone:
            storage = kept.memory.untyped_storage()
            # Another process may read shared memory, which no count shows. Looked at last: a thread that shares a
            # tensor references it until then.
            return storage.nbytes() == kept.memory.nbytes and not storage.is_shared()
        time.sleep(50e-6)  # so that the thread that holds the memory may run
    return False


@dataclass(eq=False, slots=True)
class Running:
    """Inside, compiled code of this thread runs for these modules, by their positions among those of a backward.

    Of each: the plan, the memory of its buckets, the optimizers that update its parameters (`passes/updates.py`), and
    what its comm hook remembers, by the index of a gradient. A class and no generator: every backward enters it.
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
    running = Running()
    """Outside of all it has no modules."""


this_thread = _Thread()


def _new(replica: int, number: int, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(numel, dtype=dtype, device=device)


def _take(replica: int, number: int, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    memories = this_thread.running.memories
    if replica < len(memories):
        return memories[replica].take(number, numel, dtype, device)
    return _new(replica, number, numel, dtype, device)  # generated code that is run outside of a backward


_library = torch.library.Library("dp_compile", "FRAGMENT")


def nothing(*_: object) -> None:
    """What ops without a result do on fake tensors, which have no values."""


def make_op(
    schema: str, run: Callable[..., Any], fake: Callable[..., Any] = nothing, tags: tuple[torch.Tag, ...] = ()
) -> Any:
    """An op of the package for graphs, and what it does on fake tensors."""
    name = schema.partition("(")[0]
    _library.define(schema, tags=tags)
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"dp_compile::{name}", fake, lib=_library)
    return getattr(torch.ops.dp_compile, name).default


BUCKET_MEMORY = make_op(
    "bucket_memory(int replica, int number, int numel, ScalarType dtype, Device device) -> Tensor", _take, _new
)
"""One flat tensor, not initialised."""
