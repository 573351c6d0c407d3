"""What an all-reduce costs: a straight line in the bytes, from public figures of a link or fitted to measurements.

Units: `_s` seconds, `_us` microseconds, `busbw` bytes per second in the meaning of nccl-tests (time of a large
all-reduce = 2(n-1)/n * nbytes / busbw), `busbw_gb_s` the same in 1e9 bytes per second.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from dp_compile.errors import ConfigError, is_number, require
from dp_compile.plan.backends import Backend
from dp_compile.plan.reduction import BETWEEN, INSIDE


def check_number(name: str, value: object, *, zero_allowed: bool) -> None:
    """An error unless `value` is a finite number above zero (or zero, if that is allowed)."""
    is_allowed = is_number(value) and (0 < value < math.inf or (zero_allowed and value == 0))
    require(is_allowed, name, f"a finite number {'>=' if zero_allowed else '>'} 0", value)


@dataclass(frozen=True, slots=True)
class AllReduceCost:
    """`alpha_s + beta_s_per_byte * nbytes` seconds: what one all-reduce costs on one group.

    On two levels of network also what one costs `inside` a node and `between` nodes. Inside, that is a reduce-scatter
    and an all-gather, or what the backend has in their place.

    Raises:
        ConfigError: a value is negative or not finite.
    """

    alpha_s: float
    beta_s_per_byte: float
    inside: AllReduceCost | None = None
    between: AllReduceCost | None = None

    def __post_init__(self) -> None:
        for name in ("alpha_s", "beta_s_per_byte"):
            check_number(name, getattr(self, name), zero_allowed=True)

    def seconds(self, nbytes: float) -> float:
        return self.alpha_s + self.beta_s_per_byte * nbytes

    def on(self, link: str) -> AllReduceCost:
        """What one costs on the link of a stage; on the whole group if that is not known."""
        return {INSIDE: self.inside, BETWEEN: self.between}.get(link) or self

    def scaled(self, factor: float, latency: float = 1.0) -> AllReduceCost:
        """The cost on a network that is `factor` times as slow as believed, and its latency `latency` times more."""
        levels = [None if each is None else each.scaled(factor, latency) for each in (self.inside, self.between)]
        return AllReduceCost(self.alpha_s * factor * latency, self.beta_s_per_byte * factor, *levels)

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> AllReduceCost:
        """What `dataclasses.asdict` made of one."""
        levels = {name: AllReduceCost.from_dict(data[name]) for name in (INSIDE, BETWEEN) if data.get(name) is not None}
        return AllReduceCost(**{**data, **levels})

    def __str__(self) -> str:
        rate = f"{1e-9 / self.beta_s_per_byte:.4g} GB/s" if self.beta_s_per_byte else "no time per byte"
        line = f"{self.alpha_s * 1e6:.4g} us + nbytes / ({rate})"
        if self.inside is None or self.between is None:
            return line
        return f"{line}; on two levels {self.inside} inside a node and {self.between} between nodes"


# --- before anything was measured -----------------------------------------------------------------------------------


def ring(n: int) -> int:
    """How many hops follow each other in an all-reduce over n ranks: n-1 of a reduce-scatter, n-1 of an all-gather.

    Source: Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms, JPDC 2009.
    """
    return 2 * (n - 1)


def ring_or_tree(n: int) -> int:
    """The same where libraries choose by the size: the tree where latency counts, the ring where bytes do. A line that
    is below both, most where they meet, and that no rank more makes faster.

    Source of the tree: Sanders, Speck, Traeff, Two-tree algorithms for full bandwidth broadcast, reduction and scan,
    2009.
    """
    return 2 * (n - 1).bit_length()


LAUNCH_US: Final = 8.4
"""What a collective costs once, however many hops it takes: in NCCL's tuning table for its `Simple` protocol."""


@dataclass(frozen=True, slots=True)
class Link:
    """One kind of link. `alpha_us` is the latency of one hop, `busbw_gb_s` in 1e9 bytes per second and direction."""

    alpha_us: float
    busbw_gb_s: float

    def cost(self, n: int, *, hops: Callable[[int], int] = ring, launch_us: float = LAUNCH_US) -> AllReduceCost:
        """What an all-reduce over n ranks costs when every hop is this link: 2(n-1)/n of the bytes are sent."""
        alpha_s = launch_us * 1e-6 + self.alpha_us * 1e-6 * hops(n)
        return AllReduceCost(alpha_s, 2 * (n - 1) / (self.busbw_gb_s * 1e9 * n))


LINKS: Final[Mapping[str, Link]] = {
    "nvlink4": Link(3.4, 450.0),  # H100 SXM, 18 links of 25 GB/s a direction (vendor: 900 GB/s in both)
    "infiniband-ndr": Link(14.0, 50.0),  # one port of 400 Gb/s a rank
    "infiniband-hdr": Link(14.0, 25.0),
    "ethernet-100": Link(14.0, 12.5),  # one port of 100 Gb/s a rank, RoCE
    "ethernet-25": Link(14.0, 3.125),
    "pcie4-x16": Link(5.7, 31.5),  # 16 GT/s, 16 lanes, 128b/130b
    "loopback": Link(200.0, 1.0),  # gloo over TCP; two ranks on two idle cores took 240 to 310 us: calibrate
}
"""Presets: nominal. A node whose rings use k ports has up to k times the port's figure. Latencies of a hop as in NCCL's
tuning table (src/graph/tuning.cc, ring, Simple protocol)."""


def link(name: str) -> Link:
    """A preset by its name."""
    require(name in LINKS, "link", f"one of {', '.join(LINKS)}", name)
    return LINKS[name]


def with_levels(whole: AllReduceCost, inside: Link, between: Link, *, ranks_inside: int, nodes: int) -> AllReduceCost:
    """`whole`, the cost of an all-reduce over all ranks on one level, with what it costs on each of two levels: every
    hop is the link `inside` a node, or `between` nodes, of which each rank has one.
    """
    twice_us = 2 * LAUNCH_US  # a reduce-scatter, and later an all-gather
    return replace(whole, inside=inside.cost(ranks_inside, launch_us=twice_us), between=between.cost(nodes))


def nominal_cost(backend: Backend, world_size: int, ranks_inside: int | None = None) -> AllReduceCost:
    """What to plan with before anything was measured: the backend's nominal links, up to eight ranks those of a node.

    `ranks_inside`: of a node, where the network has two levels.
    """
    inside, between = link(backend.inside), link(backend.between)
    hops = ring if inside is between else ring_or_tree
    if ranks_inside is not None:
        whole = between.cost(world_size, hops=hops)
        return with_levels(whole, inside, between, ranks_inside=ranks_inside, nodes=world_size // ranks_inside)
    return (inside if world_size <= 8 else between).cost(world_size, hops=hops)


# --- from measurements ----------------------------------------------------------------------------------------------


class CostFit(NamedTuple):
    """A cost fitted to measurements. `residual` is the mean of |fitted - measured| / measured over the sizes."""

    cost: AllReduceCost
    residual: float
    spread: float = 0.0
    """By how much the median of the largest message is above its shortest time, over the latter."""


_GROWTH: Final = 1.1
"""The largest message has to take so many times as long as the quickest one."""


def fit(samples: Iterable[tuple[int, float]]) -> CostFit:
    """The line through the smallest and the largest message, from `(nbytes, seconds)` samples of two sizes or more.

    Several samples of a size count as their median; the smallest message takes no longer than a larger one. Buckets are
    large, so the largest message fixes the bandwidth. Those between do not count: a network whose rate is limited by a
    token bucket (tc-tbf(8), cloud machines) sends the first 64 to 256 KiB at once, and the line with the least
    deviation from all sizes has 1 GB/s on a network of 0.025.

    Raises:
        ConfigError: the largest message is not slower than the others.
    """
    times: dict[int, list[float]] = defaultdict(list)
    for nbytes, seconds in samples:
        times[nbytes].append(seconds)
    y = {size: statistics.median(times[size]) for size in sorted(times)}
    smallest, largest, latency_s = min(y), max(y), min(y.values())
    if y[largest] < _GROWTH * latency_s:
        raise ConfigError("the times do not grow with the size, so there is no bandwidth. Measure larger sizes.")
    slope = min((y[largest] - latency_s) / (largest - smallest), y[largest] / largest)  # no latency below zero
    cost = AllReduceCost(y[largest] - slope * largest, slope)
    return CostFit(cost, statistics.fmean(abs(cost.seconds(size) / taken - 1) for size, taken in y.items()))
