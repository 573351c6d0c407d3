"""The partition that finishes first against brute force, the robust one against its rivals."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from dp_compile.plan.backends import NCCL
from dp_compile.plan.buckets import Partition, partition_by_size
from dp_compile.plan.cost import AllReduceCost
from dp_compile.plan.network import ReadyGradient, finish_time, jobs_of, release_time_bound, release_times
from dp_compile.plan.planner import (
    CAPS_MB,
    ERROR_BAND,
    FIRST_CAP_MB,
    certify,
    earliest_partition,
    optimal_partition,
    robust_partition,
)
from dp_compile.plan.reduction import Averaging, Levels
from dp_compile.plan.words import BYTES_PER_MB

CLOSE = 1e-9

costs = st.builds(
    AllReduceCost,
    st.sampled_from([0.0, 0.1, 1.0, 3.0]) | st.floats(0, 10),
    st.sampled_from([0.0, 0.01, 0.05, 0.2]) | st.floats(0, 1),
)


@st.composite
def gradient_lists(draw: st.DrawFn, most: int = 10, keys: int = 1) -> list[ReadyGradient]:
    """Ready times mostly grow, with ties and the odd step back; sizes from nothing to huge."""
    now, gradients = 0.0, []
    for _ in range(draw(st.integers(1, most))):
        now += draw(st.sampled_from([0.0, 0.0, 1.0]) | st.floats(0, 5))
        ready = max(0.0, now - draw(st.sampled_from([0.0, 0.0, 0.0, 2.0])))
        nbytes = draw(st.sampled_from([0, 1, 5, 50]) | st.integers(1, 100))
        gradients.append(ReadyGradient(nbytes, ready, draw(st.integers(0, keys - 1))))
    return gradients


def finish(gradients: Sequence[ReadyGradient], partition: Partition, cost: AllReduceCost) -> float:
    return finish_time(jobs_of(gradients, partition, cost))


def all_partitions(gradients: Sequence[ReadyGradient]) -> Iterator[Partition]:
    """All 2**(n-1) ways to cut each key."""

    def cuts(positions: Sequence[int]) -> Iterator[Partition]:
        for where in itertools.product((False, True), repeat=len(positions) - 1):
            edges = [0, *(place for place, cut in enumerate(where, start=1) if cut), len(positions)]
            yield tuple(tuple(positions[start:stop]) for start, stop in itertools.pairwise(edges))

    keys = {gradient.key for gradient in gradients}
    of_key = [[position for position, gradient in enumerate(gradients) if gradient.key == key] for key in keys]
    for parts in itertools.product(*(list(cuts(positions)) for positions in of_key)):
        yield tuple(sorted(itertools.chain(*parts), key=lambda bucket: bucket[-1]))


def brute_force(
    gradients: Sequence[ReadyGradient], cost: AllReduceCost, backward_s: float = 0.0
) -> tuple[float, range]:
    """The earliest finish, and the least numbers of buckets that reach it (or the end of the backward).

    More than one number only where finishes differ by so little that it is a matter of rounding.
    """
    results = [(finish(gradients, partition, cost), len(partition)) for partition in all_partitions(gradients)]
    earliest = min(results)[0]
    deadline = max(earliest, backward_s)
    least, most = (min(count for end, count in results if end <= deadline * slack) for slack in (1 + CLOSE, 1 + 1e-13))
    return earliest, range(least, most + 1)


def check_partition(gradients: Sequence[ReadyGradient], partition: Partition) -> None:
    """Every gradient once, no bucket mixes keys, ascending inside, launched by last member."""
    assert sorted(itertools.chain(*partition)) == list(range(len(gradients)))
    assert all(len({gradients[position].key for position in bucket}) == 1 for bucket in partition)
    assert all(list(bucket) == sorted(bucket) for bucket in partition)
    assert [bucket[-1] for bucket in partition] == sorted(bucket[-1] for bucket in partition)


@given(gradient_lists(most=9), costs, st.just(0.0) | st.floats(0, 100))
@settings(max_examples=300)
def test_one_key_equals_brute_force(gradients: list[ReadyGradient], cost: AllReduceCost, backward_s: float) -> None:
    """The earliest end with the fewest buckets; within the backward any end is as good."""
    partition = optimal_partition(gradients, cost=cost, backward_s=backward_s)
    check_partition(gradients, partition)
    earliest, fewest = brute_force(gradients, cost, backward_s)
    end = max(finish(gradients, partition, cost), backward_s)
    assert end <= max(earliest, backward_s) * (1 + CLOSE)
    assert len(partition) in fewest
    assert end >= release_time_bound(gradients, cost=cost, backward_s=backward_s) * (1 - CLOSE)


@given(gradient_lists(most=7, keys=3), costs)
@settings(max_examples=150)
def test_several_keys_stay_near_brute_force(gradients: list[ReadyGradient], cost: AllReduceCost) -> None:
    """A local optimum: over 99.9% of random cases are exact; none was worse than by 2%."""
    partition = optimal_partition(gradients, cost=cost)
    check_partition(gradients, partition)
    ours, earliest = finish(gradients, partition, cost), brute_force(gradients, cost)[0]
    assert earliest * (1 - CLOSE) <= ours <= earliest * 1.05


def test_small_cases_by_hand() -> None:
    cost = AllReduceCost(1.0, 1.0)
    assert optimal_partition([], cost=cost) == ()
    # Ready together: one latency. Far apart: one each, the first is sent while the second is made.
    assert optimal_partition([ReadyGradient(1, 1.0), ReadyGradient(1, 1.0)], cost=cost) == ((0, 1),)
    late = [ReadyGradient(1, 1.0), ReadyGradient(1, 9.0)]
    assert optimal_partition(late, cost=cost) == ((0,), (1,))
    # The same, but all of it is over before the backward is: one bucket.
    assert optimal_partition(late, cost=cost, backward_s=12.0) == ((0, 1),)
    # A gradient is not launched before the ones in front of it are ready.
    assert release_times([ReadyGradient(1, 5.0), ReadyGradient(1, 3.0)]) == [5.0, 5.0]


@given(gradient_lists(most=10, keys=2), costs, st.floats(0, 60))
@settings(max_examples=200)
def test_no_candidate_is_better_in_the_worst_case(
    gradients: list[ReadyGradient], cost: AllReduceCost, backward_s: float
) -> None:
    partition, certificate = robust_partition(gradients, cost=cost, backward_s=backward_s)
    check_partition(gradients, partition)
    assert certificate.makespan_s >= certificate.bound_s * (1 - CLOSE)
    assert certificate.worst_ratio >= certificate.ratio * (1 - CLOSE)
    keys, sizes = zip(*((gradient.key, gradient.nbytes) for gradient in gradients), strict=True)
    rivals = [partition_by_size(keys, sizes, cap * BYTES_PER_MB, FIRST_CAP_MB * BYTES_PER_MB) for cap in CAPS_MB]
    for slower in ERROR_BAND:
        rivals.append(optimal_partition(gradients, cost=cost.scaled(slower), backward_s=backward_s))
        rivals.append(earliest_partition(gradients, cost=cost.scaled(slower)))
    for rival in rivals:
        other = certify(gradients, rival, cost=cost, backward_s=backward_s)
        assert certificate.worst_ratio <= other.worst_ratio * (1 + CLOSE)


def test_ten_thousand_gradients_are_planned() -> None:
    """No recursion, no cubic time; and every gradient lies in a bucket, once."""
    gradients = [ReadyGradient((place * 7919) % 10**6, place * 1e-5, 0) for place in range(10_000)]
    partition, _ = robust_partition(gradients, cost=AllReduceCost(3e-5, 1e-11), backward_s=0.1)
    assert sorted(place for bucket in partition for place in bucket) == list(range(10_000))


def test_no_certificate_is_below_its_bound() -> None:
    two = Averaging().reduction("all", NCCL, 4, "float32", Levels("in", "out", ((0, 1), (2, 3))))
    cost = AllReduceCost(9.0, 9.0, inside=AllReduceCost(0.2, 0.02), between=AllReduceCost(0.5, 0.1))
    one = [ReadyGradient(50, float(place)) for place in range(4)]
    several = [ReadyGradient(50, place + 1.0, loads=two.loads(50)) for place in range(4)]
    proven, tried = (robust_partition(each, cost=cost, backward_s=4.0)[1] for each in (one, several))
    for certificate in (proven, tried):
        assert certificate.bound_s <= certificate.makespan_s
