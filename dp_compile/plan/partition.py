"""Which gradients share a bucket: the partition, in launch order, whose last bucket finishes first. Pure numbers.

The model is that of `network`. Source: MG-WFBP (arXiv 1912.09268), which solves it for one link in quadratic time; here
a prefix is solved in constant time on average, see `_OneKey`.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Final

from dp_compile.plan.cost import AllReduceCost, check_number
from dp_compile.plan.network import (
    Buckets,
    Job,
    Leg,
    ReadyGradient,
    finish_time,
    in_launch_order,
    jobs_of,
    release_times,
    weights_of,
)
from dp_compile.plan.reduction import WHOLE

MAX_ROUNDS: Final = 4
MANY: Final = 4000
"""From so many gradients on, several keys are solved from one starting order and in two rounds, to save time."""

SLACK: Final = 1e-10
"""Times that differ by this share are the same time: sums of floats in another order."""


def optimal_partition(gradients: Sequence[ReadyGradient], *, cost: AllReduceCost, backward_s: float = 0.0) -> Buckets:
    """The buckets whose last one finishes first, and of those with this finish few buckets.

    To finish within `backward_s` is as good as to finish first, for the step cannot end earlier.

    One key: exact, with the least number of buckets. Several keys: one key after the other exactly, the buckets of
    the others held still, until nothing gets better, from two starting orders. That is a local optimum;
    tests/plan/test_partition.py compares it with brute force.

    Reductions of several stages: as if all stages of a bucket were one; of that, one bucket for each key and one for
    each gradient the one that ends first by `network.launches`. Not exact: tests/plan/test_stage_costs.py has the
    distance to brute force.
    """
    check_number("backward_s", backward_s, zero_allowed=True)
    if not gradients:
        return ()
    problem = _Keys(gradients, cost)
    best = problem.best()
    thinned = problem.thinned(best, max(problem.finish(best), backward_s))
    if all(len(gradient.stages) == 1 for gradient in gradients):
        return thinned

    def value(buckets: Buckets) -> tuple[float, int]:
        finish_s = finish_time(jobs_of(gradients, buckets, cost), backward_s=backward_s)
        return max(finish_s, backward_s), len(buckets)

    together = in_launch_order([tuple(positions) for positions in problem.positions.values()])
    return min(best, thinned, together, tuple((place,) for place in range(len(gradients))), key=value)


def earliest_partition(gradients: Sequence[ReadyGradient], *, cost: AllReduceCost) -> Buckets:
    """As `optimal_partition`, but each bucket as early as it can be, not as few as possible: room for delays.

    Several stages count as one.
    """
    return _Keys(gradients, cost).best() if gradients else ()


class _Keys:
    """The problem of all keys, solved one key at a time, with all stages of a bucket as one."""

    def __init__(self, gradients: Sequence[ReadyGradient], cost: AllReduceCost) -> None:
        self.gradients = gradients
        self.released = release_times(gradients)
        self.sizes: list[float] = []
        """Seconds that each gradient adds to its bucket."""
        self.latency: dict[Hashable, float] = {}
        self.positions: dict[Hashable, list[int]] = defaultdict(list)
        for position, gradient in enumerate(gradients):
            self.positions[gradient.key].append(position)
            self.latency[gradient.key], seconds = weights_of(gradient.stages, cost)
            self.sizes.append(seconds)

    def orders(self) -> list[list[Hashable]]:
        """Largest key first, and smallest first."""
        size = {key: self._transfer_s(positions) for key, positions in self.positions.items()}
        keys = sorted(size, key=lambda key: -size[key])
        return [keys, keys[::-1]] if len(keys) > 1 and len(self.sizes) < MANY else [keys]

    def finish(self, buckets: Buckets) -> float:
        return finish_time(self._jobs(buckets))

    def _transfer_s(self, positions: Sequence[int]) -> float:
        return sum(map(self.sizes.__getitem__, positions))

    def _jobs(self, buckets: Buckets) -> tuple[Job, ...]:
        """As `network.jobs_of`, with what is computed only once here, and all stages as one."""
        return tuple(
            Job(bucket[-1], self.released[bucket[-1]], (Leg(WHOLE, self._latency(bucket) + self._transfer_s(bucket)),))
            for bucket in buckets
        )

    def _latency(self, bucket: Sequence[int]) -> float:
        return self.latency[self.gradients[bucket[0]].key]

    def best(self) -> Buckets:
        return min((self.descend(order) for order in self.orders()), key=self.finish)

    def descend(self, order: Sequence[Hashable]) -> Buckets:
        best: Buckets = ()
        finish = float("inf")
        most = MAX_ROUNDS if len(self.sizes) < MANY else 2
        for _ in range(most if len(order) > 1 else 1):
            buckets = best
            for key in order:
                buckets = self._replaced(buckets, key, _OneKey.earliest)
            if self.finish(buckets) >= finish * (1 - SLACK):
                break
            best, finish = buckets, self.finish(buckets)
        return best

    def thinned(self, buckets: Buckets, deadline_s: float) -> Buckets:
        """Fewer buckets that still finish by the deadline."""
        for key in self.positions:
            fewer = self._replaced(buckets, key, lambda solver: solver.fewest(deadline_s * (1 + SLACK)))
            if len(fewer) < len(buckets) and self.finish(fewer) <= deadline_s * (1 + 2 * SLACK):
                buckets = fewer
        return buckets

    def _replaced(self, buckets: Buckets, key: Hashable, solve: Callable[[_OneKey], Buckets]) -> Buckets:
        others = tuple(bucket for bucket in buckets if self.gradients[bucket[0]].key != key)
        released = [self.released[position] for position in self.positions[key]]
        sizes = map(self.sizes.__getitem__, self.positions[key])
        solver = _OneKey(
            self.positions[key], released, list(accumulate(sizes, initial=0.0)), self.latency[key], self._jobs(others)
        )
        return in_launch_order([*others, *solve(solver)])


@dataclass(frozen=True, slots=True)
class _OneKey:
    """The problem of one key while the buckets of other keys are fixed jobs.

    Its gradients stand at `positions` and can be launched at `released`; `taken[k]` is how long the first k take on the
    network without the `latency` of a bucket.
    """

    positions: Sequence[int]
    released: Sequence[float]
    taken: Sequence[float]
    latency: float
    others: tuple[Job, ...]

    def earliest(self) -> Buckets:
        """Every bucket, not only the last, finishes as early as the ones before it allow."""
        _, starts = self._table()
        cuts = [len(self.positions)]
        while cuts[-1]:
            cuts.append(starts[cuts[-1]])
        return self._cut(cuts)

    def fewest(self, deadline_s: float) -> Buckets:
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

    def _cut(self, cuts: Sequence[int]) -> Buckets:
        ascending = cuts[::-1]
        return tuple(tuple(self.positions[start:stop]) for start, stop in pairwise(ascending))


def _last_free(times: Sequence[float], low: int, ready_s: float) -> int:
    """The last index from `low` on whose time is not after `ready_s`; at least `low`."""
    while low + 1 < len(times) and times[low + 1] <= ready_s:
        low += 1
    return low
