"""Measure what an all-reduce costs on a group, and on the two levels of its network."""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Final
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dp_compile._torch import distributed
from dp_compile.engine.group import group_on, resolve_group
from dp_compile.engine.plan_sync import agree, table_of
from dp_compile.errors import ConfigError
from dp_compile.passes.reduction import launch_stage
from dp_compile.plan.cost import AllReduceCost, CostFit, TimesDoNotGrow, fit
from dp_compile.plan.reduction import ALL_REDUCE, BETWEEN, EXCHANGE, INSIDE, Levels, Stage

SIZES: Final = tuple(2**exponent for exponent in range(10, 25, 2))
"""Bytes of the sweep: 1 KiB to 16 MiB."""

REPETITIONS: Final = 7

SWEEPS: Final = 3
"""So often, at most: what else a machine does can hide that small messages are sooner than large ones."""

_calls: Counter[str] = Counter()
_known: WeakKeyDictionary[dist.ProcessGroup, dict[str, AllReduceCost]] = WeakKeyDictionary()
"""What was measured, by the type of device."""


def calibrate(
    process_group: dist.ProcessGroup | None = None,
    *,
    device: torch.device | str | None = None,
    device_mesh: DeviceMesh | None = None,
    levels: Levels | None = None,
) -> CostFit:
    """Measure latency and bandwidth of all-reduces of 1 KiB to 16 MiB; every rank of the group has to call it.

    The slowest rank's time counts for each size, and every rank fits the same numbers, so all get the same cost.
    Plan with it: `ReplicateConfig(cost=calibrate().cost)`. `explain`, `report` and step files take it from then on for
    modules of this group whose config has none.

    On two levels of network the cost says also what an all-reduce takes between nodes, and inside a node what the
    stages there take; `CostFit.residual` is that of the worst fit.

    Args:
        process_group: whose all-reduce to measure; the default group if not given.
        device: where the data is; the current accelerator if the group has a backend for it, else the CPU.
        device_mesh: in the place of `process_group`, as `replicate` takes it; with two dimensions there are two levels.
        levels: those of `process_group`, if they are known already.

    Raises:
        DesyncError: some rank of the group has not called it within the time-out of the group; the text names it.
        ConfigError: no process group is initialised, the group has one rank, or the times do not grow with the size in
            any of three sweeps.
    """
    resolved = resolve_group(process_group, device_mesh)
    if resolved.world_size < 2:
        raise ConfigError("calibration needs a group of at least 2 ranks; with one there is nothing to measure.")
    group, levels = resolved.process_group, levels or resolved.levels
    device = torch.device(distributed.working_device(group) if device is None else device)
    on_device = group_on(group, device.type)
    _calls[resolved.name] += 1
    # A collective with a rank that never comes would end with an error that names no rank.
    agree(
        table_of(on_device, device), f"dp_compile.calibrate/{resolved.name}/{_calls[resolved.name]}", {},
        call="calibrate()",
    )  # fmt: skip
    on_link = partial(_fit, group=group, device=device)
    fits = [on_link([Stage(ALL_REDUCE, resolved.name, "sum")])]
    if levels is not None:
        stages = levels.stages("sum", on_device.backend)
        fits += [on_link([each for each in stages if each.link == link]) for link in (INSIDE, BETWEEN)]
    whole, *two = (found.cost for found in fits)
    cost = AllReduceCost(whole.alpha_s, whole.beta_s_per_byte, *two)
    _known.setdefault(group, {})[device.type] = cost
    return CostFit(cost, residual=max(found.residual for found in fits))


def calibrated(group: dist.ProcessGroup, device: torch.device, *, with_levels: bool) -> AllReduceCost | None:
    """What `calibrate` measured last on a group, if it did; on two levels of network only if it measured those.

    For what is said of a step. A plan is made from a cost that the config has, so that nothing depends on what else
    the process did before.
    """
    cost = _known.get(group, {}).get(device.type)
    return None if cost is None or (with_levels and cost.inside is None) else cost


def _fit(stages: Sequence[Stage], group: dist.ProcessGroup, device: torch.device) -> CostFit:
    parts = math.lcm(*(stage.parts for stage in stages))
    sizes = [-(-nbytes // (4 * parts)) * 4 * parts for nbytes in SIZES]
    samples: list[tuple[int, float]] = []
    for _ in range(SWEEPS):  # every rank fits the same samples, so all of them stop or go on
        seconds = torch.tensor([_seconds(nbytes, stages, group, device) for nbytes in sizes], device=device)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX, group=group)
        samples += zip(sizes, seconds.tolist(), strict=True)
        with suppress(TimesDoNotGrow):
            return fit(samples)
    times_ms = [taken * 1e3 for _, taken in samples]
    raise ConfigError(
        f"calibrate() found no bandwidth: all-reduces of {sizes[0]:,} to {sizes[-1]:,} bytes took "
        f"{min(times_ms):.3g} to {max(times_ms):.3g} ms, not more for more bytes, in {SWEEPS} sweeps. Calibrate again "
        f"when nothing else runs on these machines."
    )


def _seconds(nbytes: int, stages: Sequence[Stage], group: dist.ProcessGroup, device: torch.device) -> float:
    """How long stages take one after the other."""
    data = torch.zeros(nbytes // 4, device=device)
    times = []
    for _ in range(1 + REPETITIONS):
        dist.barrier(group)
        start = time.perf_counter()
        tensor = data
        for stage in stages:
            launched = launch_stage(stage, [tensor])
            launched.work.wait()
            (tensor,) = launched.tensors
            if stage.op == EXCHANGE:
                tensor = tensor.view(stage.parts, -1).sum(0)
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])
