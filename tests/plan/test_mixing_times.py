"""Steps in which ranks mix parameters: by hand where that can be done, and what holds for all."""

from __future__ import annotations

import random

import pytest

from dp_compile.plan.mixing_times import MixedStep, SentBucket, mixed_step
from dp_compile.plan.topologies import Edge, Topology, metropolis, random_matchings, topology


def by_hand(edge: Edge, nbytes: float) -> float:
    """A byte a second, and a second for each rank but one."""
    return nbytes + len(edge.ranks) - 1


def test_what_travels_behind_compute_costs_nothing() -> None:
    buckets = [SentBucket(1, 1.0, 0.5), SentBucket(2, 4.0)]
    found = mixed_step(topology("one-peer-exp", 8), buckets, forward_s=4, backward_s=4, seconds=by_hand)
    assert found == pytest.approx((8.5, 8.5, 5))


def test_what_takes_longer_is_waited_for() -> None:
    """One bucket is sent when it was updated, and waited for there: 10 s on the wire and 0.5 s between them."""
    found = mixed_step(topology("ring", 4), [SentBucket(9, 2.0, 0.5)], forward_s=1, backward_s=2, seconds=by_hand)
    assert found == pytest.approx((10.5, 3.5, 10))


def test_buckets_take_turns_on_the_network() -> None:
    """By hand: the first is sent at 0 and there at 3, the second at 1.5 and there at 6; the next first leaves at 6."""
    buckets = [SentBucket(2, 0.0), SentBucket(2, 1.0, 0.5)]
    found = mixed_step(topology("complete", 2), buckets, forward_s=1, backward_s=1, seconds=by_hand)
    assert found == pytest.approx((6, 2.5, 6))


def test_a_slow_edge_holds_up_those_that_meet_it_later() -> None:
    """Ranks 0 and 1 are slow with each other, in every other step; 2 and 3 hear of it through them."""
    apart = (Edge((0, 1), 0.5), Edge((2, 3), 0.5))
    across = (Edge((0, 2), 0.5), Edge((1, 3), 0.5))

    def seconds(edge: Edge, nbytes: float) -> float:
        return {0.5: 1.0, 0.4: 20.0}[edge.weight]

    def of(*steps: tuple[Edge, ...]) -> MixedStep:
        topology = Topology("slow", 4, steps)
        return mixed_step(topology, [SentBucket(1, 1.0)], forward_s=1, backward_s=1, seconds=seconds)

    first, last = ((Edge((0, 1), one), Edge((2, 3), other)) for one, other in ((0.4, 0.5), (0.5, 0.4)))
    # A step whose bytes travel for 20 s takes as long, others 2 s, in which they compute.
    assert of(apart, across) == pytest.approx((2, 2, 1))
    assert of(first, across) == pytest.approx(((20 + 2) / 2, 2, 21 / 2))
    # No rank has two slow edges in four steps, but ranks 2 and 3 wait for 0 and 1 before they start theirs: those send
    # what takes 1 s as soon as their own has arrived.
    assert of(first, across, last, across) == pytest.approx(((20 + 1 + 20 + 1) / 4, 2, 23 / 4))


def test_a_rank_alone_waits_for_nobody() -> None:
    alone = Topology("alone", 2, (tuple(Edge((rank,), 1.0) for rank in range(2)),))
    found = mixed_step(alone, [SentBucket(9, 1.0)], forward_s=1, backward_s=1, seconds=by_hand)
    assert found == pytest.approx((2, 2, 0))


@pytest.mark.parametrize("seed", range(8))
def test_never_faster_than_compute_or_network(seed: int) -> None:
    """And never slower than both after each other."""
    draw = random.Random(seed)
    chosen = draw.choice([random_matchings(9, seed), metropolis(5, [(0, n) for n in range(1, 5)]), topology("ring", 8)])
    ready = sorted(draw.uniform(0, 5) for _ in range(4))
    buckets = [SentBucket(draw.uniform(0, 4), each, draw.uniform(0, 0.3)) for each in ready]
    step_s, compute_s, communication_s = mixed_step(chosen, buckets, forward_s=2, backward_s=5, seconds=by_hand)
    assert max(compute_s, communication_s) - 1e-9 <= step_s
    longest = sum(by_hand(Edge((0, 1), 0.5), each.nbytes) for each in buckets)
    assert step_s <= compute_s + longest + 1e-9
