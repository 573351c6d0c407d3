"""The self-check of a network: while ranks wait for an all-reduce, their processors are free.

Otherwise hiding communication gains nothing, and a benchmark of hiding it shows nothing.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist

from dp_compile.bench.modes.loop import device
from dp_compile.engine.calibration import calibrate

SLOWDOWN_LIMIT: Final = 1.15  # 1.03 to 1.11 seen on a shaped network, 1.5 and more on loopback
_MATMUL_SIZE: Final = {"cpu": 384, "cuda": 2048}
_REPETITIONS: Final = 5
_WANTED_S: Final = 0.15  # of an all-reduce, between 256 KiB and 32 MiB


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """Measurements of a network before its use.

    Args:
        alpha_us: latency of an all-reduce, see `dp_compile.calibrate`.
        mb_per_s: 1e6 bytes of an all-reduce per second, without latency; 0 for one rank, which has no network.
        matmul_slowdown: time of a matmul concurrent with an all-reduce over alone; median of five, of the worst rank.
    """

    alpha_us: float
    mb_per_s: float
    matmul_slowdown: float

    @property
    def passed(self) -> bool:
        return self.matmul_slowdown <= SLOWDOWN_LIMIT


def measure() -> SelfCheck:
    """On every rank of the default group, on its device: takes a few seconds at 80 MB/s."""
    if dist.get_world_size() == 1:
        return SelfCheck(0.0, 0.0, 1.0)
    place = device()
    cost = calibrate(device=place).cost
    nbytes = int(min(2**25, max(2**18, _WANTED_S / cost.beta_s_per_byte))) // 4 * 4
    data, matrix = torch.zeros(nbytes // 4, device=place), torch.ones(2 * (_MATMUL_SIZE[place.type],), device=place)
    alone_s = cost.seconds(nbytes)
    matmul_s, concurrent_s = (
        statistics.median(_matmul(matrix, alone_s, each) for _ in range(_REPETITIONS)) for each in (None, data)
    )
    return SelfCheck(cost.alpha_s * 1e6, 1e-6 / cost.beta_s_per_byte, concurrent_s / matmul_s)


def _matmul(matrix: torch.Tensor, seconds: float, data: torch.Tensor | None) -> float:
    """Mean seconds of a matmul, on all ranks at the same time: for so long, or during an all-reduce of `data`."""
    dist.barrier()
    start, count = time.perf_counter(), 0
    work = None if data is None else dist.all_reduce(data, async_op=True)
    while count < 1 or (time.perf_counter() - start < seconds if work is None else not work.is_completed()):
        result = torch.mm(matrix, matrix)
        if result.device.type != "cpu":  # the stream, not the device: the network has other streams
            torch.accelerator.current_stream(result.device).synchronize()
        count += 1
    end = time.perf_counter()
    if work is not None:
        work.wait()
    return (end - start) / count
