"""Bounds: the time of a step without communication, without compute, and with both at best."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist
from torch import nn

from dp_compile.bench.contract import Batch, Mode, Trainer, Workload
from dp_compile.bench.modes.loop import Loop, device, trainable
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
        buffers: list[torch.Tensor] = []

        def wrap(model: nn.Module) -> Callable[..., torch.Tensor]:
            if self.communicates:
                count = sum(each.nbytes for each in trainable(model).values()) // 4
                zeros = torch.zeros(count, device=device())  # whose sums are zeros, too
                buffers.extend(zeros.split(max(1, int(self.cap_mb * BYTES_PER_MB) // 4)))
            return torch.compile(model, backend=self.backend)

        def around(compute: Callable[[], None]) -> None:
            works = [dist.all_reduce(each, async_op=True) for each in buffers]
            compute()
            for work in works:
                if work is not None:
                    work.wait()

        loop = Loop(workload, wrap, lambda loss: around(lambda: loss.backward()))
        return loop if self.computes else _AllReduces(lambda: around(lambda: None))


class _AllReduces(Trainer):
    def __init__(self, reduce: Callable[[], None]) -> None:
        self._reduce = reduce

    def step(self, batch: Batch) -> None:
        self._reduce()


KINDS: Final = (Bound("compute", False, True), Bound("comm", True, False), Bound("oracle", True, True))
