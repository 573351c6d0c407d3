"""How gradients are put into buckets, in launch order. Pure numbers.

| a bucket ends                                                              | function          | asked for by    |
|----------------------------------------------------------------------------|-------------------|-----------------|
| where the predicted end of the step is earliest, also if speeds are off 2x | `plan_optimal`    | by default      |
| at a size, as in torch's DDP                                               | `plan_fixed`      | `bucket_cap_mb` |
| where the module that a policy names ends                                  | `plan_per_module` | `bucket_policy` |
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise, product
from typing import Final

from dp_compile.plan.buckets import (
    UNUSED_FLAGS,
    BucketPlan,
    GradientSpec,
    Layout,
    Member,
    Partition,
    in_launch_order,
    partition_by_size,
    plan_buckets,
)
from dp_compile.plan.cost import AllReduceCost
from dp_compile.plan.network import (
    Job,
    Leg,
    ReadyGradient,
    finish_time,
    jobs_of,
    release_time_bound,
    release_times,
    weights_of,
)
from dp_compile.plan.ready_times import ReadyTimes, backward_seconds, ready_gradients
from dp_compile.plan.reduction import WHOLE
from dp_compile.plan.words import BYTES_PER_MB

ERROR_BAND: Final = (1.0, 0.5**0.5, 2**0.5, 0.5, 2.0)
"""How much slower the network may be, compared with the backward, than was believed; the belief itself first."""

LATENCIES: Final = (1.0, 2.0, 5.0, 8.0)
"""Candidates are also made as if latencies were so many times as long: fewer buckets, spread over the backward."""

CAPS_MB: Final = (1.0, 5.0, 25.0)
FIRST_CAP_MB: Final = 1.0
"""The cap of the first bucket of each key, as of torch's DDP: communication starts early."""

MAX_ROUNDS: Final = 4
SLACK: Final = 1e-10
"""Times that differ by this share are the same time: sums of floats in another order."""


@dataclass(frozen=True, slots=True)
class Certificate:
    """What a plan was predicted to reach when it was made, in seconds after the start of the backward.

    `makespan_s`: when backward and communication are over. `bound_s`: no partition can be earlier. `worst_ratio`:
    the largest makespan over bound in `ERROR_BAND`. `crosses`: reductions may end under the next forward, which is in
    makespan and bound.
    """

    cost: AllReduceCost
    makespan_s: float
    bound_s: float
    worst_ratio: float
    crosses: bool = False

    @property
    def ratio(self) -> float:
        return self.makespan_s / self.bound_s if self.bound_s else 1.0

    @property
    def promise(self) -> str:
        """How far the end is from the best there can be, for people."""
        best = f"{percent_above(self.ratio)} the best any plan could do"
        off = f"with speeds off by {min(ERROR_BAND):g}x to {max(ERROR_BAND):g}x"
        halves = "of backward and next forward " if self.crosses else ""
        return f"{halves}{best}, at most {percent_above(self.worst_ratio)} {off}"


def percent_above(ratio: float) -> str:
    """A ratio to the best there can be, for people: `28% above`; of 1 `less than 0.1% above`."""
    above = ratio - 1
    return (
        "less than 0.1% above" if above < 0.0005 else f"{above:.1%} above" if above < 0.0995 else f"{above:.0%} above"
    )


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan, and what it was predicted to reach if it was made from a cost."""

    plan: BucketPlan
    certificate: Certificate | None = None


def plan_fixed(gradients: Sequence[GradientSpec], cap_mb: float, layout: Layout) -> Planned:
    """Buckets by size in MiB, closed as torch's DDP closes them; `math.inf`: one after the first of each key."""
    first_cap_mb = min(FIRST_CAP_MB, cap_mb)
    return Planned(plan_buckets(gradients, bucket_cap_mb=cap_mb, first_bucket_cap_mb=first_cap_mb, layout=layout))


def plan_per_module(gradients: Sequence[GradientSpec], unit_of: Callable[[str], str], layout: Layout) -> Planned:
    """One bucket, for each key, for each stretch of gradients of one unit.

    `gradients` are in launch order; `unit_of` maps a parameter's fully qualified name to that of its unit, a module.
    """
    units = {gradient.name: unit_of(gradient.name) for gradient in gradients if gradient.name != UNUSED_FLAGS}
    units[UNUSED_FLAGS] = list(units.values())[-1]
    buckets = []
    for _, stretch in groupby(gradients, key=lambda gradient: units[gradient.name]):
        members = list(stretch)
        for key in dict.fromkeys(gradient.key for gradient in members):
            buckets.append(layout.bucket([gradient for gradient in members if gradient.key == key]))
    return Planned(BucketPlan(tuple(buckets)))


def plan_optimal(
    gradients: Sequence[GradientSpec],
    cost: AllReduceCost,
    times: ReadyTimes,
    layout: Layout,
) -> Planned:
    """The partition that is best in the worst case: over speeds off by 0.5x to 2x.

    The plan must be the same on every rank, so all of them pass the same times. A backward whose length is not known
    is taken to be as long as the communication: the case in which the buckets matter most.

    `gradients` may be in any order; equally ready ones are launched in it.
    """
    ordered = sorted(gradients, key=times.of)
    members = [Member(gradient, 0) for gradient in ordered]  # where they lie does not count
    backward_s = backward_seconds(members, times, cost)
    partition, certificate = robust_partition(
        ready_gradients(members, times, backward_s), cost=cost, backward_s=backward_s
    )
    buckets = [layout.bucket([ordered[position] for position in bucket]) for bucket in partition]
    return Planned(BucketPlan(tuple(buckets)), certificate)


# --- the best in the worst case -------------------------------------------------------------------------------------


def robust_partition(
    gradients: Sequence[ReadyGradient], *, cost: AllReduceCost, backward_s: float
) -> tuple[Partition, Certificate]:
    """Of the optimal partitions for each speed in `ERROR_BAND` and of fixed caps, the one with the least worst ratio.

    Equal ones: the fewest buckets, then the optimal one at the believed speed. The price: where latency matters most,
    it ends some percent later than the optimum if the belief was right (tests/plan/robust_table.py).

    `gradients` are in launch order; `backward_s`: how long the backward takes without communication.
    """
    bounds = _bounds(gradients, cost, backward_s)
    promised = {
        partition: certify(gradients, partition, cost=cost, backward_s=backward_s, bounds=bounds)
        for partition in dict.fromkeys(_candidates(gradients, cost, backward_s))
    }
    least = min(certificate.worst_ratio for certificate in promised.values()) * (1 + SLACK)
    best = min((each for each, certificate in promised.items() if certificate.worst_ratio <= least), key=len)
    return best, promised[best]


def certify(
    gradients: Sequence[ReadyGradient],
    partition: Partition,
    *,
    cost: AllReduceCost,
    backward_s: float,
    bounds: Sequence[float] | None = None,
) -> Certificate:
    """What a given partition is predicted to reach. `bounds`: by speed, if they are known."""
    bounds = bounds or _bounds(gradients, cost, backward_s)
    jobs = jobs_of(gradients, partition, cost)
    ends = [max(backward_s, finish_time(jobs, slower=slower, backward_s=backward_s)) for slower in ERROR_BAND]
    worst = max(end / bound if bound else 1.0 for end, bound in zip(ends, bounds, strict=True))
    return Certificate(cost, ends[0], bounds[0], worst)


def _candidates(gradients: Sequence[ReadyGradient], cost: AllReduceCost, backward_s: float) -> Iterator[Partition]:
    for slower in ERROR_BAND:
        yield optimal_partition(gradients, cost=cost.scaled(slower), backward_s=backward_s)
    for latency, slower in product(LATENCIES, ERROR_BAND):
        yield earliest_partition(gradients, cost=cost.scaled(slower, latency))
    keys, sizes = [gradient.key for gradient in gradients], [gradient.nbytes for gradient in gradients]
    for cap_mb in CAPS_MB:
        yield partition_by_size(keys, sizes, cap_mb * BYTES_PER_MB, min(cap_mb, FIRST_CAP_MB) * BYTES_PER_MB)


def _bounds(gradients: Sequence[ReadyGradient], cost: AllReduceCost, backward_s: float) -> list[float]:
    return [release_time_bound(gradients, cost=cost.scaled(slower), backward_s=backward_s) for slower in ERROR_BAND]


# --- the earliest end -----------------------------------------------------------------------------------------------


def optimal_partition(gradients: Sequence[ReadyGradient], *, cost: AllReduceCost, backward_s: float = 0.0) -> Partition:
    """The buckets whose last one finishes first, and of those with this finish few buckets.

    To finish within `backward_s` is as good as to finish first, for the step cannot end earlier.

    One key: exact, with the least number of buckets. Several keys: one key after the other exactly, the buckets of
    the others held still, until nothing gets better, from two starting orders. That is a local optimum;
    tests/plan/test_planner.py compares it with brute force.

    Reductions of several stages: as if all stages of a bucket were one; of that, one bucket for each key and one for
    each gradient the one that ends first by `network.launches`. Not exact.
    """
    if not gradients:
        return ()
    problem = _Problem(gradients, cost)
    best = problem.best()
    thinned = problem.thinned(best, max(problem.finish(best), backward_s))
    if all(len(gradient.stages) == 1 for gradient in gradients):
        return thinned

    def value(partition: Partition) -> tuple[float, int]:
        finish_s = finish_time(jobs_of(gradients, partition, cost), backward_s=backward_s)
        return max(finish_s, backward_s), len(partition)

    together = in_launch_order([tuple(positions) for positions in problem.positions.values()])
    return min(best, thinned, together, tuple((place,) for place in range(len(gradients))), key=value)


def earliest_partition(gradients: Sequence[ReadyGradient], *, cost: AllReduceCost) -> Partition:
    """As `optimal_partition`, but each bucket as early as it can be, not as few as possible: room for delays.

    Several stages count as one.
    """
    return _Problem(gradients, cost).best() if gradients else ()


class _Problem:
    """Gradients of all keys, solved one key at a time, with all stages of a bucket as one."""

    def __init__(self, gradients: Sequence[ReadyGradient], cost: AllReduceCost) -> None:
        self.keys = [gradient.key for gradient in gradients]
        self.released = release_times(gradients)
        self.sizes: list[float] = []
        """Seconds that each gradient adds to its bucket."""
        self.latency: dict[Hashable, float] = {}
        self.positions: dict[Hashable, list[int]] = defaultdict(list)
        for position, gradient in enumerate(gradients):
            self.positions[gradient.key].append(position)
            self.latency[gradient.key], seconds = weights_of(gradient.stages, cost)
            self.sizes.append(seconds)

    def best(self) -> Partition:
        """From the largest key first and from the smallest first."""
        taken = {key: sum(map(self.sizes.__getitem__, positions)) for key, positions in self.positions.items()}
        order = sorted(taken, key=lambda key: -taken[key])
        return min(map(self._descend, [order, order[::-1]] if len(order) > 1 else [order]), key=self.finish)

    def thinned(self, partition: Partition, deadline_s: float) -> Partition:
        """Fewer buckets that still finish by the deadline."""
        for key in self.positions:
            fewer = self._replaced(partition, key, deadline_s * (1 + SLACK))
            if len(fewer) < len(partition) and self.finish(fewer) <= deadline_s * (1 + 2 * SLACK):
                partition = fewer
        return partition

    def finish(self, partition: Partition) -> float:
        return finish_time(self._jobs(partition))

    def _descend(self, order: Sequence[Hashable]) -> Partition:
        best: Partition = ()
        finish = float("inf")
        for _ in range(MAX_ROUNDS if len(order) > 1 else 1):
            partition = best
            for key in order:
                partition = self._replaced(partition, key)
            if self.finish(partition) >= finish * (1 - SLACK):
                break
            best, finish = partition, self.finish(partition)
        return best

    def _replaced(self, partition: Partition, key: Hashable, deadline_s: float | None = None) -> Partition:
        """Other buckets of one key: as early as can be, or the fewest that finish by a deadline."""
        others = tuple(bucket for bucket in partition if self.keys[bucket[0]] != key)
        positions = self.positions[key]
        taken = list(accumulate(map(self.sizes.__getitem__, positions), initial=0.0))
        released = [self.released[position] for position in positions]
        solver = _OneKey(positions, released, taken, self.latency[key], self._jobs(others))
        return in_launch_order([*others, *(solver.earliest() if deadline_s is None else solver.fewest(deadline_s))])

    def _jobs(self, partition: Partition) -> tuple[Job, ...]:
        """As `network.jobs_of`, with what is computed only once here, and all stages as one."""
        return tuple(
            Job(bucket[-1], self.released[bucket[-1]], (Leg(WHOLE, self.latency[self.keys[bucket[0]]] + seconds),))
            for bucket in partition
            for seconds in (sum(map(self.sizes.__getitem__, bucket)),)
        )


@dataclass(frozen=True, slots=True)
class _OneKey:
    """The problem of one key while the buckets of other keys are fixed jobs.

    Its gradients stand at `positions` and can be launched at `released`; `taken[k]` is how long the first k take on the
    network without the `latency` of a bucket.

    Source: MG-WFBP (arXiv 1912.09268), which solves it for one link in quadratic time; here a prefix is solved in
    constant time on average, see `_table`.
    """

    positions: Sequence[int]
    released: Sequence[float]
    taken: Sequence[float]
    latency: float
    others: tuple[Job, ...]

    def earliest(self) -> Partition:
        """Every bucket, not only the last, finishes as early as the ones before it allow."""
        _, starts = self._table()
        cuts = [len(self.positions)]
        while cuts[-1]:
            cuts.append(starts[cuts[-1]])
        return self._cut(cuts)

    def fewest(self, deadline_s: float) -> Partition:
        """From the last bucket to the first, each takes in as much as its deadline allows.

        Without other keys that is a least number of buckets: if a prefix can meet its deadline, every shorter prefix
        can meet its own, which is earlier by the bytes taken out, with no more buckets (take them out of the schedule).
        """
        finishes, _ = self._table()
        waiting = list(self.others)
        cuts = [len(self.positions)]
        while last := cuts[-1]:
            while waiting and waiting[-1].position > self.positions[last - 1]:
                deadline_s -= waiting.pop().seconds
            cuts.append(self._widest(last, deadline_s, finishes, waiting))
            deadline_s -= self.latency + self.taken[last] - self.taken[cuts[-1]]
        return self._cut(cuts)

    def _widest(self, last: int, deadline_s: float, finishes: Sequence[float], waiting: Sequence[Job]) -> int:
        """Where a bucket that ends with the gradient before `last` by the deadline can start at the earliest.

        The prefix before it, and the jobs in `waiting` between the two, have to be through when it starts.
        """
        widest, index, jobs_s = last - 1, len(waiting), 0.0
        start_at_least = self.released[last - 1]
        for cut in range(last - 1, -1, -1):
            while index and (not cut or waiting[index - 1].position > self.positions[cut - 1]):
                index -= 1
                jobs_s += waiting[index].seconds
                start_at_least = max(start_at_least, waiting[index].ready_s + jobs_s)
            start = deadline_s - (self.latency + self.taken[last] - self.taken[cut])
            if start < start_at_least:
                break
            if finishes[cut] + jobs_s <= start:
                widest = cut
        return widest

    def _table(self) -> tuple[list[float], list[int]]:
        """The earliest finish of every prefix, and where the last bucket of the prefix starts.

        finish(k) = latency + taken(k) + min over i < k of [max(free(i), r_k) - taken(i)], where free(i)
        is when the network has sent the prefix i and all other keys' jobs since. free grows with i and r with k, so
        of all i with free(i) <= r_k only the last, `low`, counts, now and later. Of the others only the first counts:
        jobs shift them all alike, and from one to the next free grows by at least what is taken between, for a bucket
        that ends later starts no earlier. So there are two choices for each k.
        """
        taken = self.taken
        finishes, starts = [0.0], [0]
        shifted = [0.0]  # free(i) - shift
        shift, low = 0.0, 0
        waiting = deque(self.others)
        for count, (position, ready_s) in enumerate(zip(self.positions, self.released, strict=True), start=1):
            while waiting and waiting[0].position < position:
                job = waiting.popleft()
                low = _last_free(shifted, low, job.ready_s - shift)
                shifted[low] = max(shifted[low], job.ready_s - shift)
                shift += job.seconds
            low = _last_free(shifted, low, ready_s - shift)
            start, base = low, max(shifted[low] + shift, ready_s) - taken[low]
            if low + 1 < count and (later := shifted[low + 1] + shift - taken[low + 1]) < base:
                start, base = low + 1, later
            finishes.append(base + self.latency + taken[count])
            starts.append(start)
            shifted.append(finishes[-1] - shift)
        return finishes, starts

    def _cut(self, cuts: Sequence[int]) -> Partition:
        return tuple(tuple(self.positions[start:stop]) for start, stop in pairwise(cuts[::-1]))


def _last_free(times: Sequence[float], low: int, ready_s: float) -> int:
    """The last index from `low` on whose time is not after `ready_s`; at least `low`."""
    while low + 1 < len(times) and times[low + 1] <= ready_s:
        low += 1
    return low
