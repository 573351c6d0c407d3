"""The partition that is best in the worst case when speeds are believed wrongly, and what it promises. Pure numbers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from dp_compile.plan.cost import AllReduceCost
from dp_compile.plan.network import (
    Buckets,
    Job,
    ReadyGradient,
    finish_time,
    fixed_partition,
    jobs_of,
    release_time_bound,
)
from dp_compile.plan.partition import MANY, SLACK, earliest_partition, optimal_partition
from dp_compile.plan.words import BYTES_PER_MB

ERROR_BAND: Final = (1.0, 0.5**0.5, 2**0.5, 0.5, 2.0)
"""How much slower the network may be, compared with the backward, than was believed; the belief itself first."""

MEASURED_BAND: Final = (1.0, 0.9, 1.1)
"""The same for speeds that were measured: what is left is noise."""

LATENCIES: Final = (1.0, 2.0, 4.0, 8.0)
"""Candidates are also made as if latencies were so many times as long: fewer buckets, spread over the backward."""

CAPS_MB: Final = (1.0, 5.0, 25.0)
FIRST_CAP_MB: Final = 1.0
"""The cap of the first bucket of each key, as of torch's DDP: communication starts early."""


@dataclass(frozen=True, slots=True)
class Certificate:
    """What a partition promises, all in seconds after the start of the backward.

    `makespan_s`: when backward and communication are over. `bound_s`: no partition can be earlier. `worst_ratio`:
    the largest makespan over bound in `band`. `exact`: that reductions have one stage each; where they have several,
    plans are the best of those that were tried. `crosses`: reductions may end under the next forward, which is in
    makespan and bound (`plan/crossing.py`).
    """

    cost: AllReduceCost
    backward_s: float
    makespan_s: float
    bound_s: float
    worst_ratio: float
    band: tuple[float, ...]
    exact: bool = True
    crosses: bool = False

    @property
    def ratio(self) -> float:
        return self.makespan_s / self.bound_s if self.bound_s else 1.0

    @property
    def chosen(self) -> str:
        """What the buckets are good for, for people."""
        good = f"good even if network or compute are {max(self.band):g}x off"
        return good if self.exact else f"{good}, the best that was tried: each has several stages"

    @property
    def promise(self) -> str:
        """How far the end is from the best there can be, for people."""
        best = f"{percent_above(self.ratio)} the best any plan could do"
        off = f"with speeds off by {min(self.band):g}x to {max(self.band):g}x"
        halves = "of backward and next forward " if self.crosses else ""
        return f"{halves}{best}, at most {percent_above(self.worst_ratio)} {off}"


def certify(
    gradients: Sequence[ReadyGradient],
    buckets: Buckets,
    *,
    cost: AllReduceCost,
    backward_s: float,
    band: tuple[float, ...] = ERROR_BAND,
) -> Certificate:
    """What given buckets promise."""
    jobs = jobs_of(gradients, buckets, cost)
    return Certificate(
        cost,
        backward_s,
        _ends(jobs, backward_s, (1.0,))[0],
        release_time_bound(gradients, cost=cost, backward_s=backward_s),
        worst_ratio(jobs, _bounds(gradients, cost, backward_s, band), backward_s, band),
        band,
        _one_stage_each(gradients),
    )


def robust_partition(
    gradients: Sequence[ReadyGradient],
    *,
    cost: AllReduceCost,
    backward_s: float,
    band: tuple[float, ...] = ERROR_BAND,
) -> tuple[Buckets, Certificate]:
    """Of the optimal partitions for each speed in `band` and of fixed caps, the one with the least worst ratio.

    Equal ones: the fewest buckets, then the optimal one at the believed speed. The price: where latency matters most,
    it ends some percent later than the optimum if the belief was right (tests/plan/robust_table.py).

    Args:
        gradients: in launch order.
        cost: of the collective that carries a bucket.
        backward_s: how long the backward takes without communication.
        band: how much slower the network may be, compared with the backward, than was believed.

    Raises:
        ConfigError: a number is not allowed.
    """
    whole = tuple(gradients)
    bounds = _bounds(whole, cost, backward_s, band)
    ratios = {
        buckets: worst_ratio(jobs_of(whole, buckets, cost), bounds, backward_s, band)
        for buckets in dict.fromkeys(_candidates(whole, cost, backward_s, band))
    }
    least = min(ratios.values()) * (1 + SLACK)
    best = min((buckets for buckets, ratio in ratios.items() if ratio <= least), key=len)
    return best, certify(whole, best, cost=cost, backward_s=backward_s, band=band)


def _ends(jobs: Sequence[Job], backward_s: float, band: Sequence[float]) -> list[float]:
    return [max(backward_s, finish_time(jobs, slower=slower, backward_s=backward_s)) for slower in band]


def worst_ratio(
    jobs: Sequence[Job],
    bounds: Sequence[float],
    backward_s: float,
    band: Sequence[float] = ERROR_BAND,
) -> float:
    """The largest makespan over bound when the network is slower or faster than the jobs say.

    Args:
        jobs: the buckets at the believed speed.
        bounds: the bound for each speed in `band`.
        backward_s: how long the backward takes.
        band: the speeds.
    """
    makespans = _ends(jobs, backward_s, band)
    return max(makespan / bound if bound else 1.0 for makespan, bound in zip(makespans, bounds, strict=True))


def _candidates(
    gradients: tuple[ReadyGradient, ...], cost: AllReduceCost, backward_s: float, band: Sequence[float]
) -> Iterator[Buckets]:
    for slower in band:
        yield optimal_partition(gradients, cost=cost.scaled(slower), backward_s=backward_s)
    for latency, slower in itertools.product(LATENCIES if len(gradients) < MANY else LATENCIES[2:3], band):
        yield earliest_partition(gradients, cost=cost.scaled(slower, latency))
    for cap_mb in CAPS_MB:
        first = min(cap_mb, FIRST_CAP_MB) * BYTES_PER_MB
        yield fixed_partition(gradients, cap_nbytes=cap_mb * BYTES_PER_MB, first_cap_nbytes=first)


def _one_stage_each(gradients: Sequence[ReadyGradient]) -> bool:
    return all(len(gradient.stages) == 1 for gradient in gradients)


def _bounds(
    gradients: Sequence[ReadyGradient], cost: AllReduceCost, backward_s: float, band: Sequence[float]
) -> list[float]:
    return [release_time_bound(gradients, cost=cost.scaled(slower), backward_s=backward_s) for slower in band]


def percent_above(ratio: float) -> str:
    """A ratio to the best there can be, for people: `28% above`; `no more than 0.1% above` is what 1 is written as."""
    above = ratio - 1
    return (
        f"{above:.0%} above" if above >= 0.0995 else f"{above:.1%} above" if above >= 0.0005 else "less than 0.1% above"
    )
