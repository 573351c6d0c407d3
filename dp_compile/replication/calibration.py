"""Measured cost of an all-reduce on a group and on the two levels of its network, with a cache.

`calibrate` returns the cost for `ReplicateConfig(cost=...)`. Without this option `remembered_cost` measures and rounds
it to powers of 2: measurements vary, but the same machines should have the same plan in every run.
"""

from __future__ import annotations

import getpass
import json
import logging
import math
import os
import platform
import socket
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dp_compile._torch import distributed
from dp_compile.config import REMEMBERED, link_source
from dp_compile.errors import ConfigError
from dp_compile.passes.reduction import launch_stage
from dp_compile.plan.cost import AllReduceCost, CostFit, fit
from dp_compile.plan.reduction import ALL_REDUCE, BETWEEN, EXCHANGE, INSIDE, Stage
from dp_compile.replica import store_channel
from dp_compile.replica.group import Group, group_on, resolve_group
from dp_compile.replica.replica import Replica

logger = logging.getLogger("dp_compile.calibration")

SIZES: Final = tuple(2**exponent for exponent in range(10, 25, 2))  # bytes of the sweep: 1 KiB to 16 MiB
SWEEPS: Final = 3  # at most: other load can make small messages slower than large ones, so that no line fits
LEAST_NBYTES: Final = 2**18  # smaller messages give no bandwidth: other load adds more than their own time
WORST_SPREAD: Final = 1.0  # a fit above this `CostFit.spread` is not used: load may move its values to other bins

_links: Final[WeakKeyDictionary[dist.ProcessGroup, dict[str, AllReduceCost | None]]] = WeakKeyDictionary()
"""The results of `remembered_cost`, by device type."""


def calibrate(
    process_group: dist.ProcessGroup | None = None,
    *,
    device: torch.device | str | None = None,
    device_mesh: DeviceMesh | None = None,
) -> CostFit:
    """Measure latency and bandwidth of all-reduces of 1 KiB to 16 MiB. Every rank of the group must call it.

    For each size the slowest rank's time counts. Every rank fits the same numbers, so all ranks return the same cost.
    It is in seconds and seconds per byte. Pass it to the planner: `ReplicateConfig(cost=calibrate().cost)`.

    On two levels of network the result also has the costs of the stages inside a node and of the all-reduce between
    nodes. `CostFit.residual` is that of the worst fit.

    Args:
        process_group: the group to measure; the default group if not given.
        device: the device of the data; the current accelerator if the group has a backend for it, else the CPU.
        device_mesh: alternative to `process_group`, as for `replicate`. Two dimensions are two levels.

    Raises:
        DesyncError: a rank of the group has not called it within the time-out of the group; the text names the rank.
        ConfigError: no process group is initialised, the group has one rank, or the times do not grow with the size in
            any of three sweeps.
    """
    resolved = resolve_group(process_group, device_mesh)
    if resolved.world_size < 2:
        raise ConfigError("calibration needs a group of at least 2 ranks; with one there is nothing to measure.")
    group = resolved.process_group
    device = torch.device(distributed.working_device(group) if device is None else device)
    on_device = group_on(group, device.type)
    # Without this, a missing rank would cause a time-out of a collective, whose error does not name the rank.
    store_channel.check_consistent_in_call(on_device, {}, "calibrate()")
    return _Sweep(replace(on_device, levels=resolved.levels), device, 7, statistics.median).fit()


@dataclass(frozen=True, slots=True)
class _Sweep:
    group: Group
    device: torch.device
    repetitions: int  # of each size
    typical: Callable[[Sequence[float]], float]  # selects one of the repetitions' times
    limit_s: float = math.inf  # after this time, sizes above `LEAST_NBYTES` are skipped

    def fit(self) -> CostFit:
        """Return the cost of collectives on the group and on its levels. Raises `ConfigError` as `calibrate`."""
        group = self.group
        fits = [self._fit([Stage(ALL_REDUCE, group.name, "sum")])]
        if group.levels is not None:
            stages = group.levels.stages("sum", group.backend)
            fits += [self._fit([each for each in stages if each.link == link]) for link in (INSIDE, BETWEEN)]
        whole, *two = (found.cost for found in fits)
        cost = AllReduceCost(whole.alpha_s, whole.beta_s_per_byte, *two)
        return CostFit(cost, max(found.residual for found in fits), max(found.spread for found in fits))

    def _fit(self, stages: Sequence[Stage]) -> CostFit:
        parts = math.lcm(*(stage.parts for stage in stages))
        sizes = [-(-nbytes // (4 * parts)) * 4 * parts for nbytes in SIZES]
        samples: list[tuple[int, float]] = []
        for _ in range(SWEEPS):  # every rank fits the same samples, so all ranks stop after the same sweep
            spent_s = 0.0
            for nbytes in sizes:
                times = self._times_s(nbytes, stages)
                spread = statistics.median(times) / min(times) - 1
                slowest = torch.tensor([self.typical(times), spread], device=self.device)
                dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=self.group.process_group)
                taken_s, spread = slowest.tolist()
                samples.append((nbytes, taken_s))
                spent_s += (1 + self.repetitions) * taken_s
                if spent_s > self.limit_s and nbytes >= LEAST_NBYTES:
                    break
            with suppress(ConfigError):
                return fit(samples)._replace(spread=spread)
        times_ms = [taken * 1e3 for _, taken in samples]
        raise ConfigError(
            f"no bandwidth could be fitted: collectives of {sizes[0]:,} to {max(samples)[0]:,} bytes took "
            f"{min(times_ms):.3g} to {max(times_ms):.3g} ms in {SWEEPS} sweeps, and the time does not grow with "
            "the size. Calibrate again when nothing else runs on these machines."
        )

    def _times_s(self, nbytes: int, stages: Sequence[Stage]) -> list[float]:
        """Return for each repetition how long the stages took, one after the other."""
        data = torch.zeros(nbytes // 4, device=self.device)
        times = []
        for _ in range(1 + self.repetitions):
            dist.barrier(self.group.process_group)
            start = time.perf_counter()
            tensor = data
            for stage in stages:
                tensor, work = launch_stage(stage, tensor)
                assert work is not None
                work.wait()
                if stage.op == EXCHANGE:
                    tensor = tensor.view(stage.parts, -1).sum(0)
            if self.device.type != "cpu":
                torch.accelerator.synchronize(self.device)
            times.append(time.perf_counter() - start)
        return times[1:]


# --- cache ------------------------------------------------------------------------------------------------------------


def remembered_cost(replica: Replica) -> AllReduceCost | None:
    """Return the cost of collectives on a module's group, rounded to powers of two; `None` if the fit failed.

    Every rank must call it. It measures once for each combination of ranks, hosts, device and backend, in 0.2 to 0.4 s
    with gloo (from 90 Mbit/s to loopback, 2026-11-28). The cache is a file in the directory of torch's caches on rank
    0's host. See `config.link_source`.
    """
    group, device, known = replica.group, replica.device, _links.setdefault(replica.group.process_group, {})
    if device.type not in known:
        channel, topic = store_channel.channel_of(replica), partial(store_channel.unique_topic, replica)
        hosts = Counter(store_channel.all_gather_object(channel, topic("hosts"), socket.gethostname()))
        is_gpu, levels = device.type == "cuda", "" if group.levels is None else f", levels {group.levels.ranks_inside}"
        hardware = torch.cuda.get_device_name(device) if is_gpu else f"{platform.machine()} {os.cpu_count()}"
        key = f"{group.backend} on {hardware}, ranks by host {sorted(hosts.values())}{levels}"
        file, keeps = _file(), link_source() == REMEMBERED
        found = store_channel.broadcast_object(channel, topic("link"), _read(file).get(key) if keeps else None)
        if found is not None:
            known[device.type] = AllReduceCost.from_dict(found)
        else:
            known[device.type] = cost = _quick_cost(group, device)
            if cost is not None and keeps and dist.get_rank(group.process_group) == 0:
                _write(file, {**_read(file), key: asdict(cost)})
    return known[device.type]


def _quick_cost(group: Group, device: torch.device) -> AllReduceCost | None:
    """Return the cost that fits the shortest times, since other programs make times longer. Equal on every rank."""
    try:
        found = _Sweep(group, device, 5, min, limit_s=0.1).fit()
        if found.spread > WORST_SPREAD:
            raise ConfigError(f"repeated timings of one message size differ by {100 * found.spread:.0f} %")
        return _in_bins(found.cost)
    except ConfigError as error:
        logger.info("the cost of the link stays nominal: %s", error)
        return None


def _in_bins(cost: AllReduceCost) -> AllReduceCost:
    """Round latency (in microseconds) and bandwidth (in GB/s) to the nearest powers of two."""

    def to_power(value: float) -> float:
        return 2.0 ** round(math.log2(value))

    levels = [None if each is None else _in_bins(each) for each in (cost.inside, cost.between)]
    # A fitted latency near zero is noise: no collective takes less than a microsecond.
    alpha_us, busbw_gb_s = max(1.0, cost.alpha_s * 1e6), 1e-9 / cost.beta_s_per_byte
    return AllReduceCost(to_power(alpha_us) * 1e-6, 1e-9 / to_power(busbw_gb_s), *levels)


def _file() -> Path:
    directory = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if not directory:  # torch's default; torch's own function would load Dynamo
        user = "unknown"
        with suppress(KeyError, ImportError, OSError):
            user = getpass.getuser()
        directory = str(Path(tempfile.gettempdir(), f"torchinductor_{user}"))
    return Path(directory, "dp_compile_links.json")


def _read(file: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        if isinstance(found := json.loads(file.read_text()), dict):
            return found
    return {}


def _write(file: Path, content: Mapping[str, Any]) -> None:
    """Replace the file atomically, because other processes may read and write it. Ignores errors."""
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_name(f"{file.name}.{socket.gethostname()}.{os.getpid()}")
        temporary.write_text(json.dumps(content, indent=1))
        temporary.replace(file)
