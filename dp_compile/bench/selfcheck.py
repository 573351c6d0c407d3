"""The self-check of a network: while ranks wait for an all-reduce, their processors are free.

Otherwise hiding communication gains nothing, and a benchmark of hiding it shows nothing. A simulated network also has
to take the time that it states.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
import torch.distributed as dist

from dp_compile.bench.modes.loop import device
from dp_compile.bench.simulated_group import SimulatedGroup
from dp_compile.engine.calibration import calibrate

SLOWDOWN_LIMIT: Final = 1.15  # of a matmul: 1.03 to 1.11 seen on a shaped network, 1.5 and more on loopback
WAITING_LIMIT: Final = 0.15  # CPU seconds a second of a rank that waits: 0.05 to 0.10 seen on a shaped network
STATED_LIMIT: Final = 0.05  # deviation of a simulated network's latency and bandwidth from what it states
STATED_LIMIT_US: Final = 300.0  # more for its latency: sleeping threads wake up a little late
_MATMUL_SIZE: Final = {"cpu": 384, "cuda": 2048}
_REPETITIONS: Final = 5
_WANTED_S: Final = 0.15
_SMALLEST_NBYTES: Final = 2**18
_LARGEST_NBYTES: Final = 2**25


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """Measurements of a network before its use; medians of five, of the worst rank.

    Args:
        alpha_us: latency of an all-reduce, see `dp_compile.calibrate`.
        mb_per_s: 1e6 bytes of an all-reduce per second, without latency.
        nbytes: of the all-reduce in the figures that follow; 0 for one rank, which has no network.
        all_reduce_ms: alone.
        waiting_cpu_share: CPU seconds a second of the process while it waits. On a GPU 0: its driver spins while it
            waits, which takes nothing from the compute.
        matmul_slowdown: time of a matmul concurrent with the all-reduce over alone.
        stated_alpha_us, stated_mb_per_s: what a simulated network states, else 0.
    """

    alpha_us: float
    mb_per_s: float
    nbytes: int
    all_reduce_ms: float
    waiting_cpu_share: float
    matmul_slowdown: float
    stated_alpha_us: float = 0.0
    stated_mb_per_s: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether communication leaves the processors free, and takes as long as stated."""
        allowed_us = STATED_LIMIT_US + STATED_LIMIT * self.stated_alpha_us
        as_stated = not self.stated_mb_per_s or (
            abs(self.alpha_us - self.stated_alpha_us) <= allowed_us
            and abs(self.mb_per_s / self.stated_mb_per_s - 1) <= STATED_LIMIT
        )
        return as_stated and self.matmul_slowdown <= SLOWDOWN_LIMIT and self.waiting_cpu_share <= WAITING_LIMIT


def worst(checks: Sequence[SelfCheck]) -> SelfCheck:
    """Of all ranks; the calibration is the same on each."""
    names = "all_reduce_ms", "waiting_cpu_share", "matmul_slowdown"
    return replace(checks[0], **{name: max(getattr(check, name) for check in checks) for name in names})


def measure() -> SelfCheck:
    """On every rank of the default group, on its device: takes a few seconds at 80 MB/s."""
    if dist.get_world_size() == 1:
        return SelfCheck(0.0, 0.0, 0, 0.0, 0.0, 1.0)
    place = device()
    cost = calibrate(device=place).cost
    nbytes = int(min(_LARGEST_NBYTES, max(_SMALLEST_NBYTES, _WANTED_S / cost.beta_s_per_byte))) // 4 * 4
    data, matrix = torch.zeros(nbytes // 4, device=place), torch.ones(2 * (_MATMUL_SIZE[place.type],), device=place)
    alone = [_all_reduce(data) for _ in range(_REPETITIONS)]
    all_reduce_s = statistics.median(wall_s for wall_s, _ in alone)

    def for_a_while() -> Callable[[], bool]:
        start = time.perf_counter()
        return lambda: time.perf_counter() - start < all_reduce_s

    def during_an_all_reduce() -> Callable[[], bool]:
        work = dist.all_reduce(data, async_op=True)
        assert work is not None
        return lambda: not work.is_completed() or not work.wait()

    matmul_s, concurrent_s = (
        statistics.median(_matmul(matrix, begin) for _ in range(_REPETITIONS))
        for begin in (for_a_while, during_an_all_reduce)
    )
    group = dist.group.WORLD
    stated = group.cost if isinstance(group, SimulatedGroup) else None
    return SelfCheck(
        alpha_us=cost.alpha_s * 1e6,
        mb_per_s=1e-6 / cost.beta_s_per_byte,
        nbytes=nbytes,
        all_reduce_ms=all_reduce_s * 1e3,
        waiting_cpu_share=statistics.median(cpu_s / wall_s for wall_s, cpu_s in alone),
        matmul_slowdown=concurrent_s / matmul_s,
        stated_alpha_us=stated.alpha_s * 1e6 if stated else 0.0,
        stated_mb_per_s=1e-6 / stated.beta_s_per_byte if stated else 0.0,
    )


def _all_reduce(data: torch.Tensor) -> tuple[float, float]:
    """Seconds, and CPU seconds of this process."""
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    dist.all_reduce(data)
    _finish_compute(data)
    cpu_s = time.process_time() - cpu if data.device.type == "cpu" else 0.0
    return time.perf_counter() - wall, cpu_s


def _matmul(matrix: torch.Tensor, begin: Callable[[], Callable[[], bool]]) -> float:
    """Mean seconds of a matmul, on all ranks at the same time, as long as what `begin` returns says so."""
    dist.barrier()
    start, count = time.perf_counter(), 0
    goes_on = begin()
    while count < 1 or goes_on():
        _finish_compute(torch.mm(matrix, matrix))
        count += 1
    return (time.perf_counter() - start) / count


def _finish_compute(result: torch.Tensor) -> None:
    """Wait for the current stream, not for the device: the network has other streams."""
    if result.device.type != "cpu":
        torch.accelerator.current_stream(result.device).synchronize()
