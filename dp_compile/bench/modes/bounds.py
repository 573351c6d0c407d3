"""Bounds measured in the same run: what a step takes without communication, without compute, and at best with both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
import torch.distributed as dist

from dp_compile.bench.contract import Batch, Mode, Trainer, Workload
from dp_compile.bench.modes.loop import Loop, build, cap_mb_of, loop_around, place, trainable
from dp_compile.config import DEFAULT_CAP_MB
from dp_compile.plan.words import BYTES_PER_MB


@dataclass(frozen=True, slots=True)
class Compute:
    """Plain `torch.compile`, no data parallelism: with one rank, what data parallelism is held against."""

    name: str = "compute"
    is_bound: bool = True
    backend: str = "inductor"

    def why_not(self) -> str | None:
        return None

    def prepare(self, workload: Workload) -> Trainer:
        return loop_around(workload, lambda model: torch.compile(model, backend=self.backend))


@dataclass(frozen=True, slots=True)
class Communication:
    """All-reduces of as many bytes as the gradients have, in buffers of `cap_mb`, issued at once; no model."""

    name: str = "comm"
    cap_mb: float = DEFAULT_CAP_MB
    is_bound: bool = True

    def why_not(self) -> str | None:
        return None

    def prepare(self, workload: Workload) -> Trainer:
        return _OnlyCommunication(dummies([*trainable(build(workload)).values()], self.cap_mb))


@dataclass(frozen=True, slots=True)
class Oracle:
    """Compiled forward, then all the all-reduces of dummy buffers at once, compiled backward, wait, optimizer.

    No schedule of the backward can start its all-reduces earlier; what the communication costs the processor, and a
    backward beside it, is in there. The gradients themselves are not reduced.
    """

    name: str = "oracle"
    cap_mb: float = DEFAULT_CAP_MB
    is_bound: bool = True
    backend: str = "inductor"

    def why_not(self) -> str | None:
        return None

    def prepare(self, workload: Workload) -> Trainer:
        model = build(workload)
        parameters = trainable(model)
        buffers = dummies([*parameters.values()], self.cap_mb)

        def backward(loss: torch.Tensor) -> None:
            works = issue(buffers)
            loss.backward()
            finish(works)

        return Loop(workload, parameters, torch.compile(model, backend=self.backend), backward)


class _OnlyCommunication:
    """The trainer of `Communication`."""

    def __init__(self, buffers: Sequence[torch.Tensor]) -> None:
        self._buffers = buffers

    def step(self, batch: Batch) -> None:
        finish(issue(self._buffers))

    def gradients(self, batch: Batch) -> Mapping[str, torch.Tensor]:
        return {}


def dummies(parameters: Sequence[torch.Tensor], cap_mb: float) -> list[torch.Tensor]:
    """Zeros of as many bytes as the parameters have, by dtype, none larger than `cap_mb` MiB."""
    elements: dict[torch.dtype, int] = {}
    for each in parameters:
        elements[each.dtype] = elements.get(each.dtype, 0) + each.numel()
    buffers: list[torch.Tensor] = []
    for dtype, count in elements.items():
        size = max(1, int(cap_mb * BYTES_PER_MB) // dtype.itemsize)
        buffers += [torch.zeros(min(size, count - at), dtype=dtype, device=place()) for at in range(0, count, size)]
    return buffers


def issue(buffers: Sequence[torch.Tensor]) -> list[dist.Work]:
    """Start an all-reduce of each on the default group; zeros stay zeros."""
    works = [dist.all_reduce(each, async_op=True) for each in buffers]
    return [each for each in works if each is not None]


def finish(works: Sequence[dist.Work]) -> None:
    for each in works:
        each.wait()


KINDS: Final = (Compute(), Communication(), Oracle())


def with_cap(kind: Communication | Oracle, argument: str) -> Mode:
    """The same with dummy buffers of another size, in MiB."""
    return replace(kind, name=f"{kind.name}:{argument}", cap_mb=cap_mb_of(argument, kind.name))
