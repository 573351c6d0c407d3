"""Bounds: the time of a step without communication, without compute, and with both at best."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist

from dp_compile.bench.contract import Batch, Mode, Trainer, Workload
from dp_compile.bench.modes.loop import Loop, build, device, trainable
from dp_compile.config import DEFAULT_CAP_MB
from dp_compile.plan.words import BYTES_PER_MB


@dataclass(frozen=True, slots=True)
class Bound(Mode):
    """Gradients are not reduced.

    `compute`: plain `torch.compile`, for one rank the reference of every mode. `comm`: all-reduces of as many bytes as
    the gradients have, in buffers of `cap_mb`, issued at once; no model. `oracle`: compiled forward, these all-reduces,
    compiled backward, wait, optimizer: no schedule of the backward can start its all-reduces earlier. Processor time
    of communication, and of a backward concurrent with it, is included.
    """

    name: str
    communicates: bool
    computes: bool
    cap_mb: float = DEFAULT_CAP_MB
    backend: str = "inductor"
    is_bound: bool = True

    def prepare(self, workload: Workload) -> Trainer:
        model = build(workload)
        buffers = zeros_like([*trainable(model).values()], self.cap_mb) if self.communicates else []

        def around(compute: Callable[[], None]) -> None:
            works = [dist.all_reduce(each, async_op=True) for each in buffers]  # zeros stay zeros
            compute()
            for work in works:
                if work is not None:
                    work.wait()

        if self.computes:
            compiled = torch.compile(model, backend=self.backend)
            return Loop(workload, model, compiled, lambda loss: around(lambda: loss.backward()))
        return _AllReduces(lambda: around(lambda: None))


class _AllReduces(Trainer):
    """The trainer of `comm`."""

    def __init__(self, reduce: Callable[[], None]) -> None:
        self._reduce = reduce

    def step(self, batch: Batch) -> None:
        self._reduce()


def zeros_like(parameters: Sequence[torch.Tensor], cap_mb: float) -> list[torch.Tensor]:
    """Zeros of as many bytes as the parameters have, by dtype, none larger than `cap_mb` MiB."""
    buffers: list[torch.Tensor] = []
    for dtype in dict.fromkeys(each.dtype for each in parameters):
        count = sum(each.numel() for each in parameters if each.dtype == dtype)
        size = max(1, int(cap_mb * BYTES_PER_MB) // dtype.itemsize)
        buffers += [torch.zeros(min(size, count - at), dtype=dtype, device=device()) for at in range(0, count, size)]
    return buffers


KINDS: Final = (Bound("compute", False, True), Bound("comm", True, False), Bound("oracle", True, True))
