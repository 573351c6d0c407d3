"""Which neighbours share a bucket: the partition of gradients in launch order that finishes first. Pure numbers.

The model: one network that carries one bucket at a time. A bucket starts when its last member is ready and the
bucket before it has finished, and lasts alpha + beta * bytes (`AllReduceCost`). Buckets of different keys (group,
reduce op, dtype, device) share the network, never a bucket. A bucket is launched where its last member stands.

Source: MG-WFBP (arXiv 1912.09268) for the model. The programme here needs linear time, see `_OneKey`.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Final, NamedTuple

from dp_compile.cost_model import AllReduceCost, check_number

MAX_ROUNDS: Final = 4
SLACK: Final = 1e-12
"""Times that differ by this share are the same time: sums of floats in another order."""

Buckets = tuple[tuple[int, ...], ...]
"""Positions of gradients, bucket by bucket in launch order, ascending in each."""


@dataclass(frozen=True, slots=True)
class ReadyGradient:
    """A gradient, or a piece of one, at its place in launch order.

    `ready_s` is when it is ready on the compute stream without communication. `produced_s` is how long its producer
    takes, if that could hand out pieces one after the other; zero: it appears as a whole. Piece `piece` of `pieces`.

    Raises:
        ConfigError: a time or a size is negative or not finite.
    """

    nbytes: int
    ready_s: float
    key: Hashable = None
    produced_s: float = 0.0
    piece: int = 0
    pieces: int = 1

    def __post_init__(self) -> None:
        for name in ("nbytes", "ready_s", "produced_s"):
            check_number(name, getattr(self, name), zero_allowed=True)


class Launch(NamedTuple):
    """One bucket on the network; times in seconds after the start of the backward."""

    ready_s: float
    start_s: float
    finish_s: float


class Job(NamedTuple):
    """A bucket as the network sees it: the position of its last member, when it may start, how long it lasts."""

    position: int
    ready_s: float
    seconds: float


def release_times(gradients: Sequence[ReadyGradient]) -> list[float]:
    """When each gradient can be launched: launches keep their order, so never before an earlier one is ready."""
    return list(accumulate((gradient.ready_s for gradient in gradients), max))


def jobs_of(gradients: Sequence[ReadyGradient], buckets: Buckets, cost: AllReduceCost) -> list[Job]:
    released = release_times(gradients)
    return [
        Job(bucket[-1], released[bucket[-1]], cost.seconds(sum(gradients[position].nbytes for position in bucket)))
        for bucket in buckets
    ]


def launches(jobs: Sequence[Job], *, slower: float = 1.0) -> Iterator[Launch]:
    """What the network does, if it is `slower` times as slow as the jobs say."""
    free = 0.0
    for job in jobs:
        start = max(job.ready_s, free)
        free = start + job.seconds * slower
        yield Launch(job.ready_s, start, free)


def finish_time(jobs: Sequence[Job], *, slower: float = 1.0) -> float:
    """When the last bucket has arrived, in seconds after the start of the backward."""
    free = 0.0
    for job in jobs:
        free = max(job.ready_s, free) + job.seconds * slower
    return free


def fixed_partition(gradients: Sequence[ReadyGradient], *, cap_nbytes: float, first_cap_nbytes: float) -> Buckets:
    """A bucket is closed when it holds its cap: the rule of torch's DDP, as in `plan.plan_buckets`."""
    filling: dict[Hashable, list[int]] = {}
    filled: dict[Hashable, int] = defaultdict(int)
    past_first: set[Hashable] = set()
    closed: list[tuple[int, ...]] = []
    for position, gradient in enumerate(gradients):
        key = gradient.key
        filling.setdefault(key, []).append(position)
        filled[key] += gradient.nbytes
        if filled[key] >= (cap_nbytes if key in past_first else first_cap_nbytes):
            closed.append(tuple(filling.pop(key)))
            past_first.add(key)
            del filled[key]
    return _in_launch_order([*closed, *map(tuple, filling.values())])


def optimal_partition(gradients: Sequence[ReadyGradient], *, cost: AllReduceCost, backward_s: float = 0.0) -> Buckets:
    """The buckets whose last one finishes first, and of those with this finish few buckets.

    To finish within `backward_s` is as good as to finish first, for the step cannot end earlier.

    One key: exact, with the least number of buckets. Several keys: one key after the other exactly, the buckets of
    the others held still, until nothing gets better, from two starting orders. That is a local optimum;
    tests/test_partition.py compares it with brute force.
    """
    check_number("backward_s", backward_s, zero_allowed=True)
    if not gradients:
        return ()
    problem = _Keys(gradients, cost)
    best = min((problem.descend(order) for order in problem.orders()), key=problem.finish)
    return problem.thinned(best, max(problem.finish(best), backward_s))


class _Keys:
    """The problem of all keys, solved one key at a time."""

    def __init__(self, gradients: Sequence[ReadyGradient], cost: AllReduceCost) -> None:
        self.gradients = gradients
        self.cost = cost
        self.released = release_times(gradients)
        self.positions: dict[Hashable, list[int]] = defaultdict(list)
        for position, gradient in enumerate(gradients):
            self.positions[gradient.key].append(position)

    def orders(self) -> list[list[Hashable]]:
        """Largest key first, and smallest first."""
        size = {key: sum(self.gradients[p].nbytes for p in positions) for key, positions in self.positions.items()}
        keys = sorted(size, key=lambda key: -size[key])
        return [keys, keys[::-1]] if len(keys) > 1 else [keys]

    def finish(self, buckets: Buckets) -> float:
        return finish_time(jobs_of(self.gradients, buckets, self.cost))

    def descend(self, order: Sequence[Hashable]) -> Buckets:
        best: Buckets = ()
        finish = float("inf")
        for _ in range(MAX_ROUNDS if len(order) > 1 else 1):
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
            buckets = self._replaced(buckets, key, lambda solver: solver.fewest(deadline_s * (1 + SLACK)))
        return buckets

    def _replaced(self, buckets: Buckets, key: Hashable, solve: Callable[[_OneKey], Buckets]) -> Buckets:
        others = tuple(bucket for bucket in buckets if self.gradients[bucket[0]].key != key)
        jobs = tuple(jobs_of(self.gradients, others, self.cost))
        released = [self.released[position] for position in self.positions[key]]
        sizes = [self.gradients[position].nbytes for position in self.positions[key]]
        solver = _OneKey(self.positions[key], released, list(accumulate(sizes, initial=0)), self.cost, jobs)
        return _in_launch_order([*others, *solve(solver)])


@dataclass(frozen=True, slots=True)
class _OneKey:
    """The problem of one key while the buckets of other keys are fixed jobs.

    Its gradients stand at `positions` and can be launched at `released`; `taken[k]` are the bytes of the first k.
    """

    positions: Sequence[int]
    released: Sequence[float]
    taken: Sequence[int]
    cost: AllReduceCost
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
            deadline_s -= self.cost.seconds(self.taken[last] - self.taken[cuts[-1]])
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
            start = deadline_s - self.cost.seconds(self.taken[last] - self.taken[cut])
            if start < start_at_least:
                break
            if finishes[cut] + jobs_s <= start:
                widest = cut
        return widest

    def _table(self) -> tuple[list[float], list[int]]:
        """The earliest finish of every prefix, and where the last bucket of the prefix starts.

        finish(k) = alpha + beta * bytes(..k) + min over i < k of [max(free(i), r_k) - beta * bytes(..i)], where free(i)
        is when the network has sent the prefix i and all other keys' jobs since. free grows with i and r with k, so
        of all i with free(i) <= r_k only the last, `low`, counts, now and later; the others are all shifted alike by
        jobs, so the least of free(i) - beta * bytes(..i) among them is kept in a deque. Each i enters and leaves once.
        """
        alpha, beta = self.cost.alpha_s, self.cost.beta_s_per_byte
        taken = self.taken
        finishes, starts = [0.0], [0]
        shifted = [0.0]  # free(i) - shift
        shift, low = 0.0, 0
        window: deque[int] = deque()
        waiting = deque(self.others)
        for count, (position, ready_s) in enumerate(zip(self.positions, self.released, strict=True), start=1):
            while waiting and waiting[0].position < position:
                job = waiting.popleft()
                low = _last_free(shifted, low, job.ready_s - shift)
                shifted[low] = max(shifted[low], job.ready_s - shift)
                shift += job.seconds
            low = _last_free(shifted, low, ready_s - shift)
            while window and window[0] <= low:
                window.popleft()
            start, base = low, max(shifted[low] + shift, ready_s) - beta * taken[low]
            if window and (rest := shifted[window[0]] + shift - beta * taken[window[0]]) < base:
                start, base = window[0], rest
            finish = base + alpha + beta * taken[count]
            finishes.append(finish)
            starts.append(start)
            shifted.append(finish - shift)
            key = shifted[count] - beta * taken[count]
            while window and shifted[window[-1]] - beta * taken[window[-1]] > key:
                window.pop()
            window.append(count)
        return finishes, starts

    def _cut(self, cuts: Sequence[int]) -> Buckets:
        ascending = cuts[::-1]
        return tuple(tuple(self.positions[start:stop]) for start, stop in pairwise(ascending))


def _last_free(times: Sequence[float], low: int, ready_s: float) -> int:
    """The last index from `low` on whose time is not after `ready_s`; at least `low`."""
    while low + 1 < len(times) and times[low + 1] <= ready_s:
        low += 1
    return low


def _in_launch_order(buckets: Sequence[tuple[int, ...]]) -> Buckets:
    return tuple(sorted(buckets, key=lambda bucket: bucket[-1]))


def split_large(gradients: Sequence[ReadyGradient], *, above_nbytes: int) -> tuple[ReadyGradient, ...]:
    """Cut each gradient of more than `above_nbytes` into pieces of equal bytes, none larger than that.

    A piece is ready when its share of `produced_s` is over. With `produced_s == 0` all pieces are ready together, and
    then pieces never finish earlier than the whole: moving them all into the bucket of the first one delays nothing
    and saves latencies. So this helps only where the producer itself can be cut.

    Raises:
        ConfigError: the limit is not positive.
    """
    check_number("above_nbytes", above_nbytes, zero_allowed=False)
    return tuple(piece for gradient in gradients for piece in _pieces(gradient, -(-gradient.nbytes // above_nbytes)))


def _pieces(gradient: ReadyGradient, count: int) -> Iterator[ReadyGradient]:
    if count <= 1 or gradient.pieces > 1:
        yield gradient
        return
    for piece in range(count):
        first, last = gradient.nbytes * piece // count, gradient.nbytes * (piece + 1) // count
        ready_s = max(0.0, gradient.ready_s - gradient.produced_s * (count - 1 - piece) / count)
        yield replace(gradient, nbytes=last - first, ready_s=ready_s, piece=piece, pieces=count)
