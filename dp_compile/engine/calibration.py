"""Measure what an all-reduce costs on a group."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from typing import Final

import torch
import torch.distributed as dist

from dp_compile._torch import distributed
from dp_compile.engine.agreement import Table, agree
from dp_compile.errors import ConfigError
from dp_compile.passes.reduction import EagerOps, finished, reduce_bucket
from dp_compile.plan.backends import PLAYED
from dp_compile.plan.buckets import BucketKey, GradientSpec, plan_single
from dp_compile.plan.cost import CostFit, fit
from dp_compile.plan.reduction import Averaging, Levels

SIZES: Final = tuple(2**exponent for exponent in range(10, 25, 2))
"""Bytes of the sweep: 1 KiB to 16 MiB."""

REPETITIONS: Final = 7

_calls: Counter[str] = Counter()


def calibrate(
    process_group: dist.ProcessGroup | None = None,
    *,
    device: torch.device | str | None = None,
    timeout_s: float = 300.0,
    levels: Levels | None = None,
) -> CostFit:
    """Measure latency and bandwidth of all-reduces of 1 KiB to 16 MiB; every rank of the group has to call it.

    The slowest rank's time counts for each size, and every rank fits the same numbers, so all get the same cost. Keep
    it: `CostFit.to_json`, `CostFit.from_json`. Use it: `ReplicateConfig(cost=calibrate().cost)`.

    Args:
        process_group: whose all-reduce to measure; the default group if not given.
        device: where the data is; the CPU, or the current GPU if the group is NCCL's.
        timeout_s: how long to wait until every rank has called it.
        levels: of the group: measure reductions by these, their stages one after the other.

    Raises:
        DesyncError: some rank of the group has not called it in time; the text names it.
        ConfigError: no process group is initialised, the group has one rank, or the times do not grow with the size.
    """
    if not dist.is_initialized():
        raise ConfigError("no process group is initialised. Call torch.distributed.init_process_group() first.")
    group = process_group if process_group is not None else dist.group.WORLD
    assert group is not None  # there is a default group
    if dist.get_world_size(group) < 2:
        raise ConfigError("calibration needs a group of at least 2 ranks; with one there is nothing to measure.")
    _meet(group, timeout_s)
    if device is None:
        device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    seconds = torch.tensor([_seconds(nbytes, group, torch.device(device), levels) for nbytes in SIZES], device=device)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX, group=group)
    return fit(zip(SIZES, seconds.tolist(), strict=True))


def _meet(group: dist.ProcessGroup, timeout_s: float) -> None:
    """Wait until all are there: a collective with a rank that never comes ends with an error that names nobody."""
    if dist.get_backend(group) in PLAYED:
        return
    name = distributed.group_name(group)
    _calls[name] += 1
    table = Table(distributed.default_store(), dist.get_rank(group), dist.get_world_size(group), timeout_s)
    agree(table, f"dp_compile.calibrate/{name}/{_calls[name]}", {}, call="calibrate()")


def _seconds(nbytes: int, group: dist.ProcessGroup | None, device: torch.device, levels: Levels | None) -> float:
    data = torch.zeros(nbytes // 4, device=device)
    averaging = Averaging().reduction("", dist.get_backend(group), dist.get_world_size(group), "float32", levels)
    key = BucketKey(averaging, "float32", device.type)
    (bucket,) = plan_single([GradientSpec(0, "", (data.numel(),), (1,), 4, key)]).buckets
    times = []
    for _ in range(1 + REPETITIONS):
        dist.barrier(group)
        start = time.perf_counter()
        if levels is None:
            dist.all_reduce(data, group=group)
        else:
            finished(reduce_bucket(bucket, EagerOps(bucket, [data], device)))
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])
