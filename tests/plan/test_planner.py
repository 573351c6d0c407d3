"""The partition that finishes first, and the robust one, against brute force."""

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
    robust_partition,
)
from dp_compile.plan.reduction import Averaging, Levels
from dp_compile.plan.words import BYTES_PER_MB

CLOSE = 1e-9
MOST_OFF = 1.05
"""Of 1,500 random cases with two keys 6 were not the best in the worst case, by 3.2 % at most; with one key none."""

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


def check_partition(gradients: Sequence[ReadyGradient], partition: Partition) -> None:
    """Every gradient once, no bucket mixes keys, ascending inside, launched by last member."""
    assert sorted(itertools.chain(*partition)) == list(range(len(gradients)))
    assert all(len({gradients[position].key for position in bucket}) == 1 for bucket in partition)
    assert all(list(bucket) == sorted(bucket) for bucket in partition)
    assert [bucket[-1] for bucket in partition] == sorted(bucket[-1] for bucket in partition)


@given(gradient_lists(most=8), costs)
@settings(max_examples=150)
def test_one_key_ends_as_early_as_by_brute_force(gradients: list[ReadyGradient], cost: AllReduceCost) -> None:
    partition = earliest_partition(gradients, cost=cost)
    check_partition(gradients, partition)
    end = finish(gradients, partition, cost)
    earliest = min(finish(gradients, each, cost) for each in all_partitions(gradients))
    assert end <= earliest * (1 + CLOSE)
    assert end >= release_time_bound(gradients, cost=cost, backward_s=0.0) * (1 - CLOSE)


def test_small_cases_by_hand() -> None:
    cost = AllReduceCost(1.0, 1.0)
    assert earliest_partition([], cost=cost) == ()
    # Ready together: one latency. Far apart: one each, the first is sent while the second is made.
    assert earliest_partition([ReadyGradient(1, 1.0), ReadyGradient(1, 1.0)], cost=cost) == ((0, 1),)
    late = [ReadyGradient(1, 1.0), ReadyGradient(1, 9.0)]
    assert earliest_partition(late, cost=cost) == ((0,), (1,))
    # Of two keys that are ready together each has a bucket, and the next ones of each key their own.
    assert earliest_partition([ReadyGradient(1, at, key) for at in (1.0, 9.0) for key in "ab"], cost=cost) == (
        (0,), (1,), (2,), (3,),
    )  # fmt: skip
    # All of it is over before the backward is, at any speed: one bucket for each key.
    at_ease = [ReadyGradient(1, at, key) for at in (1.0, 9.0) for key in "ab"]
    assert robust_partition(at_ease, cost=cost, backward_s=90.0)[0] == ((0, 2), (1, 3))
    # The first two can be one without a later end at any speed; the third cannot, as the last would wait for it.
    times = [ReadyGradient(nbytes, at) for nbytes, at in ((1, 2.0), (5, 4.0), (5, 6.0), (2, 11.0))]
    assert robust_partition(times, cost=cost, backward_s=11.0)[0] == ((0, 1), (2,), (3,))
    # A gradient is not launched before the ones in front of it are ready.
    assert release_times([ReadyGradient(1, 5.0), ReadyGradient(1, 3.0)]) == [5.0, 5.0]


@given(gradient_lists(most=6, keys=2), costs, st.floats(0, 60))
@settings(max_examples=80)
def test_the_robust_one_is_near_brute_force(
    gradients: list[ReadyGradient], cost: AllReduceCost, backward_s: float
) -> None:
    """And no worse than any fixed cap, or the earliest at any speed."""
    partition, certificate = robust_partition(gradients, cost=cost, backward_s=backward_s)
    check_partition(gradients, partition)
    assert certificate.makespan_s >= certificate.bound_s * (1 - CLOSE)
    assert certificate.worst_ratio >= certificate.ratio * (1 - CLOSE)
    keys, sizes = zip(*((gradient.key, gradient.nbytes) for gradient in gradients), strict=True)
    rivals = [partition_by_size(keys, sizes, cap * BYTES_PER_MB, FIRST_CAP_MB * BYTES_PER_MB) for cap in CAPS_MB]
    rivals += [earliest_partition(gradients, cost=cost.scaled(slower)) for slower in ERROR_BAND]
    for rival in rivals:
        assert certificate.worst_ratio <= certify(gradients, rival, cost=cost, backward_s=backward_s).worst_ratio * (
            1 + CLOSE
        )
    every = (certify(gradients, each, cost=cost, backward_s=backward_s) for each in all_partitions(gradients))
    assert certificate.worst_ratio <= min(each.worst_ratio for each in every) * MOST_OFF


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
