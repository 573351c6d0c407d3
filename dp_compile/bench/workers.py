"""Functions that the runner calls in the process of one rank of one mode.

Each mode has separate processes (`testing.ranks.Ranks`), because Dynamo, Inductor and DDP keep state per process.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import torch
import torch.distributed as dist

from dp_compile._torch import distributed
from dp_compile.bench.contract import SEED, Batch, Trainer, Workload
from dp_compile.bench.modes import device, mode
from dp_compile.bench.networks import Placement, enter
from dp_compile.bench.workloads import workload
from dp_compile.errors import require
from dp_compile.replication.calibration import calibrate
from dp_compile.testing.ranks import Ranks

START_TIMEOUT_S: Final = 900.0  # of a process start, of the first backward, which compiles, and of the warm-up


def ranks_of(place: Placement, environment: Mapping[str, str]) -> Ranks:
    """Return one process per rank, to start at the first call as `place` says. Together they form the default group."""
    # Each rank compiles in its own process: a pool of workers would use memory during the turns of other modes.
    variables = {"TORCHINDUCTOR_COMPILE_THREADS": "1", **place.environment, **environment}
    return Ranks(place.processes, begin=partial(_begin, place), environment=variables, ends_groups=False)


def _begin(place: Placement, rank: int, processes: int, directory: str) -> None:
    with Path(directory, f"rank{rank}.log").open("a") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    if place.spaces:
        enter(place.spaces[rank])
    store: Any = dist.FileStore(f"{directory}/store", processes)  # type: ignore[attr-defined]
    if place.group_ranks is not None:  # simulated: no other process uses the store
        store = dist.HashStore()  # type: ignore[attr-defined]
    timeout, ranks = timedelta(seconds=START_TIMEOUT_S), place.group_ranks or processes
    dist.init_process_group(place.backend, store=store, rank=rank, world_size=ranks, timeout=timeout)
    dist.barrier()


this: Final = SimpleNamespace()  # `trainer` and `batches` of this process, set by `start`


def expect(name: str, path: str) -> int:
    """Rank 0 writes averages of eager gradients over 1 rank and over all, and returns the bytes of each; others, 0."""
    chosen, averages = workload(name), dict[int, dict[str, torch.Tensor]]()
    for ranks in {1, dist.get_world_size()} if dist.get_rank() == 0 else ():
        torch.manual_seed(SEED)
        model = chosen.build().train()
        for rank in range(ranks):
            chosen.loss(model, next(batches(chosen, rank))).backward()
        named = model.named_parameters()
        averages[ranks] = {name: each.grad / ranks for name, each in named if each.grad is not None}
    if averages:
        torch.save(averages, path)
    return sum(gradient.nbytes for gradient in averages.get(1, {}).values())


def start(name: str, mode_name: str, expected: str, warmup_steps: int) -> tuple[float, float, str]:
    """Build the mode's trainer, compare its first gradients with the file `expected` (if not empty), and warm it up.

    Returns the seconds that this took without the comparison, the largest error of a gradient, and its parameter.
    """
    chosen, rank = workload(name), dist.get_rank()
    this.batches = batches(chosen, rank)
    torch.manual_seed(SEED)
    begin = time.perf_counter()
    this.trainer = mode(mode_name).prepare(chosen)
    gradients = this.trainer.gradients(next(batches(chosen, rank))) if expected else {}
    _synchronize()
    seconds, parameter, error = time.perf_counter() - begin, "", 0.0
    if expected:
        real_ranks = 1 if distributed.backend_of(None, "cpu").simulated else dist.get_world_size()
        parameter, error = compare(gradients, torch.load(expected, mmap=True)[real_ranks])
    if warmup_steps:
        seconds += warmup_steps * steps(warmup_steps)
    if device().type != "cpu":
        torch.accelerator.reset_peak_memory_stats()
    else:
        with suppress(OSError):  # without this reset, the peak includes the compilation
            Path("/proc/self/clear_refs").write_text("5")
    return seconds, error, parameter


def steps(count: int) -> float:
    """Time `count` steps together and return seconds per step. Batches are ready, and ranks start together."""
    trainer: Trainer = this.trainer
    given = [next(this.batches) for _ in range(count + trainer.defers)]
    if dist.is_initialized():
        dist.barrier()
    if trainer.defers:
        trainer.step(given.pop())
        _synchronize(only_compute=True)
    begin = time.perf_counter()
    for batch in given:
        trainer.step(batch)
    _synchronize(only_compute=trainer.defers)
    wall_s = time.perf_counter() - begin
    if trainer.defers:
        trainer.wait()
    return wall_s / count


def end() -> tuple[int, Mapping[str, int]]:
    """Return the memory peak in bytes since the end of `start`, and the trainer's `counts`."""
    counts = this.trainer.counts()
    if device().type != "cpu":
        return int(torch.accelerator.max_memory_allocated()), counts
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024 if found else 0, counts


def _synchronize(*, only_compute: bool = False) -> None:
    if device().type != "cpu":
        stream = torch.accelerator.current_stream()
        stream.synchronize() if only_compute else torch.accelerator.synchronize()


def batches(workload: Workload, rank: int) -> Iterator[Batch]:
    """Yield the batches of a rank, without end."""
    generator = torch.Generator().manual_seed(SEED + rank)
    while True:
        yield workload.batch(generator)


def compare(gradients: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> tuple[str, float]:
    """Return the parameter with the largest gradient error, and this error: norm(difference) / norm(expected).

    The denominator is at least 1e-4 of the largest norm, because smaller gradients are rounding noise (as the bias of
    attention keys, whose exact gradient is zero). Raises `ConfigError` for missing or additional gradients.
    """
    differing = sorted(set(gradients) ^ set(expected))
    require(not differing, "missing or additional gradients", "none", differing)
    norms = {name: float(torch.linalg.vector_norm(each)) for name, each in expected.items()}
    floor = max(1e-4 * max(norms.values()), torch.finfo(torch.float32).tiny)

    def error(name: str) -> float:
        difference = gradients[name].detach().cpu().float() - expected[name]
        found = float(torch.linalg.vector_norm(difference)) / max(norms[name], floor)
        return math.inf if math.isnan(found) else found

    return max(((name, error(name)) for name in expected), key=lambda each: each[1])


def link() -> tuple[float, float]:
    """Measure an all-reduce of the default group: latency in microseconds, and rate in 1e6 bytes per second."""
    if dist.get_world_size() == 1:
        return 0.0, 0.0
    cost = calibrate(device=device()).cost
    return cost.alpha_s * 1e6, 1e-6 / cost.beta_s_per_byte
