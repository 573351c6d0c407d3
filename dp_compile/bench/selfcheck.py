"""The bed proves itself: while ranks wait for an all-reduce, their processors are free.

Without that, hiding communication gains nothing, and a benchmark of hiding it says nothing. A bed that is played has
to take the time that it was told to, besides.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
import torch.distributed as dist

from dp_compile.bench.fabric import Fabric
from dp_compile.bench.modes.loop import place
from dp_compile.engine.calibration import calibrate

SLOWDOWN_LIMIT: Final = 1.15
"""Of a matmul beside an all-reduce. 1.03 to 1.11 seen on a shaped link, 1.5 and more on loopback."""

WAITING_LIMIT: Final = 0.15
"""Processor time of a rank that waits for an all-reduce, per second. 0.05 to 0.10 seen on a shaped link."""

STATED_LIMIT: Final = 0.05
"""How far latency and bandwidth of a played bed may be from what was stated, as a share."""

STATED_LIMIT_US: Final = 300.0
"""So far the latency may be from it anyway: threads that sleep wake up a little late."""

_MATMUL_SIZE: Final = {"cpu": 384, "cuda": 2048}
_REPETITIONS: Final = 5
_WANTED_S: Final = 0.15
_SMALLEST_NBYTES: Final = 2**18
_LARGEST_NBYTES: Final = 2**25


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """What was measured on a bed before it was used; medians of five, of the rank where it was worst.

    Args:
        alpha_us: of an all-reduce, see `dp_compile.calibrate`.
        mb_per_s: 1e6 bytes of an all-reduce per second, without latency.
        fit_residual: mean relative deviation of that line.
        nbytes: of the all-reduce in the figures that follow.
        all_reduce_ms: alone.
        waiting_cpu_share: processor time of the process while it waits, per second. On a GPU 0: that its driver spins
            while it waits takes nothing from the compute.
        matmul_slowdown: time of a matmul beside the all-reduce over alone.
        all_reduce_slowdown: time of the all-reduce beside matmuls over alone.
        stated_alpha_us: what the latency should be, if the bed is played; else 0.
        stated_mb_per_s: the same for bandwidth.
    """

    alpha_us: float
    mb_per_s: float
    fit_residual: float
    nbytes: int
    all_reduce_ms: float
    waiting_cpu_share: float
    matmul_slowdown: float
    all_reduce_slowdown: float
    stated_alpha_us: float = 0.0
    stated_mb_per_s: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether communication leaves the processors alone, and takes as long as was stated."""
        return self.matmul_slowdown <= SLOWDOWN_LIMIT and self.waiting_cpu_share <= WAITING_LIMIT and self.agrees

    @property
    def agrees(self) -> bool:
        """Whether it takes as long as was stated; nothing is stated of a bed that is not played."""
        if not self.stated_mb_per_s:
            return True
        late_us = abs(self.alpha_us - self.stated_alpha_us)
        return (
            late_us <= STATED_LIMIT_US + STATED_LIMIT * self.stated_alpha_us
            and abs(self.mb_per_s / self.stated_mb_per_s - 1) <= STATED_LIMIT
        )


def worst(checks: Sequence[SelfCheck]) -> SelfCheck:
    """Of all ranks; the calibration is the same on each."""
    return replace(
        checks[0],
        all_reduce_ms=max(check.all_reduce_ms for check in checks),
        waiting_cpu_share=max(check.waiting_cpu_share for check in checks),
        matmul_slowdown=max(check.matmul_slowdown for check in checks),
        all_reduce_slowdown=max(check.all_reduce_slowdown for check in checks),
    )


def measure() -> SelfCheck:
    """On every rank of the default group, where it has its tensors: takes a few seconds at 80 MB/s.

    One rank waits for nobody.
    """
    if dist.get_world_size() == 1:
        return SelfCheck(0.0, 0.0, 0.0, 0, 0.0, 0.0, 1.0, 1.0)
    device = place()
    fitted = calibrate(device=device)
    wanted = _WANTED_S / fitted.cost.beta_s_per_byte
    nbytes = int(min(_LARGEST_NBYTES, max(_SMALLEST_NBYTES, wanted))) // 4 * 4
    size = _MATMUL_SIZE[device.type]
    data, matrix = torch.zeros(nbytes // 4, device=device), torch.ones(size, size, device=device)
    alone = [_all_reduce(data) for _ in range(_REPETITIONS)]
    all_reduce_s = statistics.median(each.wall_s for each in alone)
    matmul_s = statistics.median(_matmul(matrix, all_reduce_s) for _ in range(_REPETITIONS))
    both = [_side_by_side(data, matrix) for _ in range(_REPETITIONS)]
    stated_alpha_us, stated_mb_per_s = _stated()
    return SelfCheck(
        alpha_us=fitted.cost.alpha_s * 1e6,
        mb_per_s=1e-6 / fitted.cost.beta_s_per_byte,
        fit_residual=fitted.residual,
        nbytes=nbytes,
        all_reduce_ms=all_reduce_s * 1e3,
        waiting_cpu_share=statistics.median(each.cpu_s / each.wall_s for each in alone),
        matmul_slowdown=statistics.median(each.matmul_s for each in both) / matmul_s,
        all_reduce_slowdown=statistics.median(each.wall_s for each in both) / all_reduce_s,
        stated_alpha_us=stated_alpha_us,
        stated_mb_per_s=stated_mb_per_s,
    )


def _stated() -> tuple[float, float]:
    group = dist.group.WORLD
    if not isinstance(group, Fabric):
        return 0.0, 0.0
    return group.cost.alpha_s * 1e6, 1e-6 / group.cost.beta_s_per_byte


@dataclass(frozen=True, slots=True)
class _Reduced:
    wall_s: float
    cpu_s: float
    matmul_s: float


def _finish_compute(device: torch.device) -> None:
    """Wait for the current stream, not for the device: the network has streams of its own."""
    if device.type != "cpu":
        torch.accelerator.current_stream(device).synchronize()


def _all_reduce(data: torch.Tensor) -> _Reduced:
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    dist.all_reduce(data)
    _finish_compute(data.device)
    cpu_s = time.process_time() - cpu if data.device.type == "cpu" else 0.0
    return _Reduced(time.perf_counter() - wall, cpu_s, 0.0)


def _matmul(matrix: torch.Tensor, for_s: float) -> float:
    """Mean seconds of a matmul, on all ranks at the same time."""
    dist.barrier()
    start, count = time.perf_counter(), 0
    while count < 1 or time.perf_counter() - start < for_s:
        _one_matmul(matrix)
        count += 1
    return (time.perf_counter() - start) / count


def _side_by_side(data: torch.Tensor, matrix: torch.Tensor) -> _Reduced:
    dist.barrier()
    start, count = time.perf_counter(), 0
    work = dist.all_reduce(data, async_op=True)
    assert work is not None
    while count < 1 or not work.is_completed():
        _one_matmul(matrix)
        count += 1
    wall_s = time.perf_counter() - start
    work.wait()
    return _Reduced(wall_s, 0.0, wall_s / count)


def _one_matmul(matrix: torch.Tensor) -> None:
    torch.mm(matrix, matrix)
    _finish_compute(matrix.device)
