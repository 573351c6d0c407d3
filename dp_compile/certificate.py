"""The partition that is best in the worst case when speeds are believed wrongly, and what it promises. Pure numbers."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from dp_compile.config import BYTES_PER_MB
from dp_compile.cost_model import AllReduceCost, release_time_bound
from dp_compile.partition import MANY, SLACK, earliest_partition, optimal_partition
from dp_compile.timeline import (
    Buckets,
    Job,
    ReadyGradient,
    finish_time,
    fixed_partition,
    jobs_of,
    launches,
    release_times,
)

ERROR_BAND: Final = (1.0, 0.5**0.5, 2**0.5, 0.5, 2.0)
"""How much slower the network may be, compared with the backward, than was believed; the belief itself first."""

MEASURED_BAND: Final = (1.0, 0.9, 1.1)
"""The same for speeds that were measured: what is left is noise."""

PIECES_GAIN: Final = 0.005
"""Pieces are taken if they make the worst case better by more than this share. Below it the model is not that exact."""

LATENCIES: Final = (1.0, 2.0, 4.0, 8.0)
"""Candidates are also made as if latencies were so many times as long: fewer buckets, spread over the backward."""

CAPS_MB: Final = (1.0, 5.0, 25.0)
FIRST_CAP_MB: Final = 1.0


@dataclass(frozen=True, slots=True)
class Certificate:
    """What a partition promises, all in seconds after the start of the backward.

    `makespan_s`: when backward and communication are over. `bound_s`: no partition can be earlier. `worst_ratio`:
    the largest makespan over bound in `band`. `reasons`: for each bucket, why it ends where it ends.
    """

    strategy: str
    cost: AllReduceCost
    backward_s: float
    makespan_s: float
    bound_s: float
    worst_ratio: float
    band: tuple[float, ...]
    reasons: tuple[str, ...]

    @property
    def ratio(self) -> float:
        return self.makespan_s / self.bound_s if self.bound_s else 1.0

    def __str__(self) -> str:
        lines = [
            f"{self.strategy}: {len(self.reasons)} buckets, all-reduce = {self.cost}",
            f"backward {_ms(self.backward_s)}, predicted end {_ms(self.makespan_s)}, bound {_ms(self.bound_s)}, "
            f"ratio {self.ratio:.4f}, at most {self.worst_ratio:.4f} with speeds off by "
            f"{min(self.band):g}x to {max(self.band):g}x",
        ]
        return "\n".join([*lines, *(f"  {number:>3}  {reason}" for number, reason in enumerate(self.reasons))])


@dataclass(frozen=True, slots=True)
class Choice:
    """A partition of `gradients` (pieces, where a large gradient was cut) with its certificate."""

    gradients: tuple[ReadyGradient, ...]
    buckets: Buckets
    certificate: Certificate


@dataclass(frozen=True, slots=True)
class Cut:
    """All gradients in launch order, some of them in pieces, and how long it takes to put those together again.

    That is counted as if it were done at the very end.
    """

    gradients: tuple[ReadyGradient, ...]
    assembly_s: float


@dataclass(frozen=True, slots=True)
class _Candidate:
    strategy: str
    gradients: tuple[ReadyGradient, ...]
    buckets: Buckets
    jobs: tuple[Job, ...]


def certify(
    gradients: Sequence[ReadyGradient],
    buckets: Buckets,
    *,
    cost: AllReduceCost,
    backward_s: float,
    strategy: str,
    band: tuple[float, ...] = ERROR_BAND,
    assembly_s: float = 0.0,
) -> Certificate:
    """What given buckets promise. `assembly_s`: how long it takes at the end to put pieces together."""
    jobs = jobs_of(gradients, buckets, cost)
    return Certificate(
        strategy,
        cost,
        backward_s,
        max(backward_s, finish_time(jobs)) + assembly_s,
        _bound(gradients, cost, backward_s),
        worst_ratio(jobs, _bounds(gradients, cost, backward_s, band), backward_s, band, assembly_s),
        band,
        tuple(_reasons(gradients, buckets, jobs)),
    )


def robust_partition(
    gradients: Sequence[ReadyGradient],
    *,
    cost: AllReduceCost,
    backward_s: float,
    band: tuple[float, ...] = ERROR_BAND,
) -> Choice:
    """Of the optimal partitions for each speed in `band` and of fixed caps, the one with the least worst ratio.

    Equal ones: the fewest buckets, then the optimal one at the believed speed. The price: where latency matters most,
    it ends some percent later than the optimum if the belief was right (docs/plan_table.md).

    Args:
        gradients: in launch order.
        cost: of the collective that carries a bucket.
        backward_s: how long the backward takes without communication.
        band: how much slower the network may be, compared with the backward, than was believed.

    Raises:
        ConfigError: a number is not allowed.
    """
    whole = tuple(gradients)
    candidates = list(_candidates(whole, cost, backward_s, band))
    bounds = _bounds(whole, cost, backward_s, band)
    ratios = [worst_ratio(candidate.jobs, bounds, backward_s, band) for candidate in candidates]
    least = min(ratios) * (1 + SLACK)
    equal = [candidate for candidate, ratio in zip(candidates, ratios, strict=True) if ratio <= least]
    best = min(equal, key=lambda candidate: len(candidate.buckets))
    certificate = certify(
        best.gradients, best.buckets, cost=cost, backward_s=backward_s, strategy=f"robust ({best.strategy})", band=band
    )
    return Choice(best.gradients, best.buckets, certificate)


def robust_with_pieces(
    gradients: Sequence[ReadyGradient],
    cuts: Sequence[Cut],
    *,
    cost: AllReduceCost,
    backward_s: float,
    band: tuple[float, ...] = ERROR_BAND,
) -> Choice:
    """As `robust_partition`; of one of `cuts` instead, if its worst case is better by more than `PIECES_GAIN`.

    All are measured against the bounds of the whole gradients, and the pieces' assembly is counted.

    Args:
        gradients: in launch order.
        cuts: the same gradients, some in pieces.
        cost: of the collective that carries a bucket.
        backward_s: how long the backward takes without communication.
        band: how much slower the network may be, compared with the backward, than was believed.
    """
    bounds = _bounds(gradients, cost, backward_s, band)

    def worst(choice: Choice, assembly_s: float) -> float:
        return worst_ratio(jobs_of(choice.gradients, choice.buckets, cost), bounds, backward_s, band, assembly_s)

    best = robust_partition(gradients, cost=cost, backward_s=backward_s, band=band)
    least = worst(best, 0.0) * (1 - PIECES_GAIN)
    for cut in cuts:
        choice = robust_partition(cut.gradients, cost=cost, backward_s=backward_s, band=band)
        if (found := worst(choice, cut.assembly_s)) < least:
            best, least = _with_assembly(choice, cut.assembly_s), found
    return best


def _with_assembly(choice: Choice, assembly_s: float) -> Choice:
    told = choice.certificate
    certificate = certify(
        choice.gradients,
        choice.buckets,
        cost=told.cost,
        backward_s=told.backward_s,
        strategy=f"{told.strategy}, one gradient in pieces",
        band=told.band,
        assembly_s=assembly_s,
    )
    return Choice(choice.gradients, choice.buckets, certificate)


def worst_ratio(
    jobs: Sequence[Job],
    bounds: Sequence[float],
    backward_s: float,
    band: Sequence[float] = ERROR_BAND,
    assembly_s: float = 0.0,
) -> float:
    """The largest makespan over bound when the network is slower or faster than the jobs say.

    Args:
        jobs: the buckets at the believed speed.
        bounds: the bound for each speed in `band`.
        backward_s: how long the backward takes.
        band: the speeds.
        assembly_s: how long it takes at the end to put pieces together.
    """
    makespans = [max(backward_s, finish_time(jobs, slower=slower)) + assembly_s for slower in band]
    return max(makespan / bound if bound else 1.0 for makespan, bound in zip(makespans, bounds, strict=True))


def _candidates(
    gradients: tuple[ReadyGradient, ...], cost: AllReduceCost, backward_s: float, band: Sequence[float]
) -> Iterator[_Candidate]:
    found: dict[Buckets, str] = {}
    for slower in band:
        buckets = optimal_partition(gradients, cost=cost.scaled(slower), backward_s=backward_s)
        found.setdefault(buckets, f"optimal for a network {slower:.2g}x as slow" if slower != 1 else "optimal")
    for latency, slower in itertools.product(LATENCIES if len(gradients) < MANY else LATENCIES[2:3], band):
        assumed = AllReduceCost(cost.alpha_s * slower * latency, cost.beta_s_per_byte * slower)
        buckets = earliest_partition(gradients, cost=assumed)
        found.setdefault(buckets, f"earliest for a network {slower:.2g}x as slow, latency {latency:g}x")
    for cap_mb in CAPS_MB:
        first = min(cap_mb, FIRST_CAP_MB) * BYTES_PER_MB
        buckets = fixed_partition(gradients, cap_nbytes=cap_mb * BYTES_PER_MB, first_cap_nbytes=first)
        found.setdefault(buckets, f"fixed cap of {cap_mb:g} MiB")
    for buckets, strategy in found.items():
        yield _Candidate(strategy, gradients, buckets, tuple(jobs_of(gradients, buckets, cost)))


def _bound(gradients: Sequence[ReadyGradient], cost: AllReduceCost, backward_s: float) -> float:
    return release_time_bound(
        release_times(gradients),
        [gradient.nbytes for gradient in gradients],
        cost=cost,
        backward_s=backward_s,
        keys=[gradient.key for gradient in gradients],
    )


def _bounds(
    gradients: Sequence[ReadyGradient], cost: AllReduceCost, backward_s: float, band: Sequence[float]
) -> list[float]:
    return [_bound(gradients, cost.scaled(slower), backward_s) for slower in band]


def _reasons(gradients: Sequence[ReadyGradient], buckets: Buckets, jobs: Sequence[Job]) -> Iterator[str]:
    """One sentence for each bucket, each a fact of the predicted timeline."""
    released = release_times(gradients)
    following = _first_of_next(gradients, buckets)
    idle_s = 0.0
    for bucket, launch in zip(buckets, launches(jobs), strict=True):
        then = following.get(bucket)
        if then is None:
            yield f"it holds the last gradient of its key, starts at {_ms(launch.start_s)}"
        elif released[then] > launch.start_s:
            yield (
                f"closing later would start it at {_ms(released[then])} instead of {_ms(launch.start_s)}, "
                f"when the network is idle since {_ms(idle_s)}"
            )
        else:
            yield f"the network is busy until {_ms(idle_s)}: it would start no sooner if it closed earlier"
        idle_s = launch.finish_s


def _first_of_next(gradients: Sequence[ReadyGradient], buckets: Buckets) -> dict[tuple[int, ...], int]:
    """For each bucket but the last of its key, the first member of the key's next bucket."""
    following: dict[tuple[int, ...], int] = {}
    previous: dict[Hashable, tuple[int, ...]] = {}
    for bucket in buckets:
        key = gradients[bucket[0]].key
        if key in previous:
            following[previous[key]] = bucket[0]
        previous[key] = bucket
    return following


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"
