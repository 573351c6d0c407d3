"""The cost (duration) of an all-reduce, linear in its bytes: from public figures of a link, or fitted to measurements.

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
    """Raise `ConfigError` unless `value` is a finite number above zero, or zero if `zero_allowed`."""
    is_allowed = is_number(value) and (0 < value < math.inf or (zero_allowed and value == 0))
    require(is_allowed, name, f"a finite number {'>=' if zero_allowed else '>'} 0", value)


@dataclass(frozen=True, slots=True)
class AllReduceCost:
    """The cost of one all-reduce on one group: `alpha_s + beta_s_per_byte * nbytes` seconds.

    `inside`, `between`: on two network levels, the costs inside a node and between nodes. The first is for a
    reduce-scatter and an all-gather together, or for the collectives that the backend runs instead.

    Raises:
        ConfigError: a value is not a finite number >= 0.
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
        """Return the cost on one network level, `inside` or `between`; on the whole group if that is unknown."""
        return {INSIDE: self.inside, BETWEEN: self.between}.get(link) or self

    def scaled(self, factor: float, latency: float = 1.0) -> AllReduceCost:
        """Return the cost on a network that is `factor` times as slow; its latency is also multiplied by `latency`."""
        levels = [None if each is None else each.scaled(factor, latency) for each in (self.inside, self.between)]
        return AllReduceCost(self.alpha_s * factor * latency, self.beta_s_per_byte * factor, *levels)

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> AllReduceCost:
        """Return a cost from the result of `dataclasses.asdict`."""
        levels = {name: AllReduceCost.from_dict(data[name]) for name in (INSIDE, BETWEEN) if data.get(name) is not None}
        return AllReduceCost(**{**data, **levels})

    def __str__(self) -> str:
        rate = f"{1e-9 / self.beta_s_per_byte:.4g} GB/s" if self.beta_s_per_byte else "no time per byte"
        line = f"{self.alpha_s * 1e6:.4g} us + nbytes / ({rate})"
        if self.inside is None or self.between is None:
            return line
        return f"{line}; on two levels {self.inside} inside a node and {self.between} between nodes"


# --- before measurements --------------------------------------------------------------------------------------------


def ring(n: int) -> int:
    """Return the sequential hops of an all-reduce over n ranks: n-1 of a reduce-scatter and n-1 of an all-gather.

    Source: Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms, JPDC 2009.
    """
    return 2 * (n - 1)


def ring_or_tree(n: int) -> int:
    """Return the sequential hops of an all-reduce if a library chooses a tree for small and a ring for large messages.

    The linear cost is a lower bound of tree and ring, loosest where they cross, and never falls with n. Source:
    Sanders, Speck, Traeff, Two-tree algorithms for full bandwidth broadcast, reduction and scan, 2009.
    """
    return 2 * (n - 1).bit_length()


LAUNCH_US: Final = 8.4  # cost per collective, independent of hops: NCCL's tuning table, `Simple` protocol


@dataclass(frozen=True, slots=True)
class Link:
    """One kind of link. `alpha_us`: latency of one hop. `busbw_gb_s`: bandwidth in 1e9 bytes/s and direction."""

    alpha_us: float
    busbw_gb_s: float

    def cost(self, n: int, *, hops: Callable[[int], int] = ring, launch_us: float = LAUNCH_US) -> AllReduceCost:
        """Return the cost of an all-reduce over n ranks if every hop uses this link; 2(n-1)/n of the bytes are sent."""
        alpha_s = launch_us * 1e-6 + self.alpha_us * 1e-6 * hops(n)
        return AllReduceCost(alpha_s, 2 * (n - 1) / (self.busbw_gb_s * 1e9 * n))


LINKS: Final[Mapping[str, Link]] = {
    "nvlink4": Link(3.4, 450.0),  # H100 SXM, 18 links of 25 GB/s a direction (vendor: 900 GB/s in both)
    "infiniband-ndr": Link(14.0, 50.0),  # one port of 400 Gb/s a rank
    "infiniband-hdr": Link(14.0, 25.0),
    "ethernet-100": Link(14.0, 12.5),  # one port of 100 Gb/s a rank, RoCE
    "ethernet-25": Link(14.0, 3.125),
    "pcie4-x16": Link(5.7, 31.5),  # 16 GT/s, 16 lanes, 128b/130b
    "loopback": Link(200.0, 1.0),  # gloo over TCP; an all-reduce of 2 ranks on idle cores took 240 to 310 us: calibrate
}
"""Nominal presets. A node whose rings use k ports has up to k times the bandwidth of a port. The latencies of a hop,
except `loopback`'s, are from NCCL's tuning table (src/graph/tuning.cc, ring, Simple protocol)."""


def link(name: str) -> Link:
    """Return a preset by its name. Raise `ConfigError` for an unknown name."""
    require(name in LINKS, "link", f"one of {', '.join(LINKS)}", name)
    return LINKS[name]


def with_levels(whole: AllReduceCost, inside: Link, between: Link, *, ranks_inside: int, nodes: int) -> AllReduceCost:
    """Return `whole`, the one-level cost over all ranks, with its `inside` and `between` set. A hop inside a node uses
    the link `inside`. A hop between nodes uses the link `between`, of which each rank has its own."""
    twice_us = 2 * LAUNCH_US  # a reduce-scatter, and later an all-gather
    return replace(whole, inside=inside.cost(ranks_inside, launch_us=twice_us), between=between.cost(nodes))


def nominal_cost(backend: Backend, world_size: int, ranks_inside: int | None = None) -> AllReduceCost:
    """Return the cost to assume before any measurement, from the backend's nominal links.

    `ranks_inside`: ranks of a node on two network levels; `None`: one level, where up to eight ranks count as one node.
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
    spread: float = 0.0  # for the largest message: (median time - shortest time) / shortest time


_GROWTH: Final = 1.1  # the least ratio of the largest message's time to the shortest time of all


def fit(samples: Iterable[tuple[int, float]]) -> CostFit:
    """Fit a line through the smallest and the largest message, from `(nbytes, seconds)` samples of at least two sizes.

    Samples of one size count as their median, and the smallest message as no slower than the others. Buckets are large,
    so the largest message determines the bandwidth. Sizes in between are ignored: a network with a token-bucket rate
    limit (tc-tbf(8), cloud machines) sends the first 64 to 256 KiB at once, and a line fitted to all sizes would have
    1 GB/s on a network of 0.025 GB/s.

    Raises:
        ConfigError: the largest message takes less than 1.1 times as long as the fastest.
    """
    times: dict[int, list[float]] = defaultdict(list)
    for nbytes, seconds in samples:
        times[nbytes].append(seconds)
    y = {size: statistics.median(times[size]) for size in sorted(times)}
    smallest, largest, latency_s = min(y), max(y), min(y.values())
    if y[largest] < _GROWTH * latency_s:
        raise ConfigError("times hardly grow with the message size: cannot fit a bandwidth. Measure larger messages.")
    slope = min((y[largest] - latency_s) / (largest - smallest), y[largest] / largest)  # no latency below zero
    cost = AllReduceCost(y[largest] - slope * largest, slope)
    return CostFit(cost, statistics.fmean(abs(cost.seconds(size) / taken - 1) for size, taken in y.items()))
