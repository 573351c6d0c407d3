"""What a reduction costs: its stages on one link or two, their timeline, its bound, and partitions for it."""

from __future__ import annotations

import pytest

from dp_compile.plan.backends import NCCL
from dp_compile.plan.cost import AllReduceCost, Link, with_levels
from dp_compile.plan.network import (
    Job,
    Leg,
    ReadyGradient,
    finish_time,
    launches,
    legs_of,
    release_time_bound,
)
from dp_compile.plan.planner import robust_partition
from dp_compile.plan.reduction import (
    BETWEEN,
    INSIDE,
    WHOLE,
    Averaging,
    Levels,
)

LEVELS = Levels("in", "out", ((0, 1), (2, 3)))
TWO = Averaging().reduction("all", NCCL, 4, "float32", LEVELS)
COST = AllReduceCost(9.0, 9.0, inside=AllReduceCost(0.2, 0.02), between=AllReduceCost(0.5, 0.1))
CLOSE = 1e-9


# --- one bucket -----------------------------------------------------------------------------------------------------


def test_two_levels_cost_their_three_stages() -> None:
    """Four nodes of eight: rings of eight inside, rings of four between for an eighth of the bytes."""
    fast, slow = Link("fast", 2.0, 400.0), Link("slow", 10.0, 50.0)
    cost = with_levels(AllReduceCost(1.0, 1.0), fast, slow, ranks_inside=8, nodes=4)
    levels = Levels("", "", tuple(tuple(range(8 * node, 8 * node + 8)) for node in range(4)))
    reduction = Averaging().reduction("", NCCL, 32, "float32", levels)
    nbytes = 2**30
    legs = legs_of([reduction.loads(nbytes)], cost)
    half_inside = 8.4e-6 + 7 * (2e-6 + nbytes / 8 / 400e9)
    all_between = 8.4e-6 + 2 * 3 * (10e-6 + nbytes / 8 / 4 / 50e9)
    assert [leg.link for leg in legs] == [INSIDE, BETWEEN, INSIDE]
    assert [leg.seconds for leg in legs] == pytest.approx([half_inside, all_between, half_inside], rel=1e-12)


# --- several buckets ------------------------------------------------------------------------------------------------


def test_the_two_links_carry_stages_beside_each_other() -> None:
    """By hand, with 1 s a leg: the second stage of a bucket goes beside the first one of the next.

    inside   0 1 2     0 1 2
    between    0 1 2
    """
    jobs = [Job(number, float(number), (Leg(INSIDE, 1.0), Leg(BETWEEN, 1.0), Leg(INSIDE, 1.0))) for number in range(3)]
    found = [
        [(stage.link, stage.start_s, stage.finish_s) for stage in each.stages]
        for each in launches(jobs, backward_s=2.0)
    ]
    assert found == [
        [(INSIDE, 0.0, 1.0), (BETWEEN, 1.0, 2.0), (INSIDE, 3.0, 4.0)],
        [(INSIDE, 1.0, 2.0), (BETWEEN, 2.0, 3.0), (INSIDE, 4.0, 5.0)],
        [(INSIDE, 2.0, 3.0), (BETWEEN, 3.0, 4.0), (INSIDE, 5.0, 6.0)],
    ]
    assert finish_time(jobs, backward_s=2.0) == 6.0
    # From 2 to 4 compute waits for the first two stages of the last bucket, then for what is gathered.
    assert [each.waited_s for each in launches(jobs, backward_s=2.0)] == [0.0, 1.0, 3.0]
    # In a row they would take nine.
    assert sum(job.seconds for job in jobs) == 9.0


def test_who_launches_a_stage_waits_for_the_one_before_and_compute_with_it() -> None:
    """The first stage of the first bucket takes longer than compute needs to come to the second bucket."""
    jobs = [
        Job(0, 0.0, (Leg(INSIDE, 5.0), Leg(BETWEEN, 1.0), Leg(INSIDE, 1.0))),
        Job(1, 1.0, (Leg(WHOLE, 1.0),)),
        Job(2, 3.0, (Leg(WHOLE, 1.0),)),
    ]
    first, second, third = launches(jobs, backward_s=4.0)
    assert (second.ready_s, second.start_s) == (1.0, 5.0)
    # The second stage is launched behind bucket 1 and waits until 5; compute goes on from 1 there.
    assert third.ready_s == 3.0 + 4.0
    assert [stage.start_s for stage in first.stages] == [0.0, 6.0, 8.0]
    assert first.waited_s + second.waited_s + third.waited_s == pytest.approx(finish_time(jobs, backward_s=4.0) - 4.0)


# --- partitions and the bound ---------------------------------------------------------------------------------------


def test_certificates_say_what_is_proven() -> None:
    one = [ReadyGradient(50, float(place)) for place in range(4)]
    several = [ReadyGradient(50, place + 1.0, loads=TWO.loads(50)) for place in range(4)]
    proven, tried = (robust_partition(each, cost=COST, backward_s=4.0)[1] for each in (one, several))
    assert (proven.exact, tried.exact) == (True, False)
    assert "that was tried" not in proven.chosen
    assert "the best that was tried: each has several stages" in tried.chosen
    assert tried.bound_s <= tried.makespan_s


# --- the bound ------------------------------------------------------------------------------------------------------


def bound_of(
    given: list[tuple[float, int]], backward_s: float, keys: str = "", cost: AllReduceCost | None = None
) -> float:
    gradients = [
        ReadyGradient(nbytes, ready, key) for (ready, nbytes), key in zip(given, keys or "a" * len(given), strict=True)
    ]
    return release_time_bound(gradients, cost=cost or AllReduceCost(0.5, 0.1), backward_s=backward_s)


def test_the_bound_by_hand() -> None:
    assert bound_of([], 3.0) == 3.0
    assert bound_of([(1.0, 10), (2.0, 1)], 2.0) == pytest.approx(1.0 + 0.5 + 1.1)
    assert bound_of([(1.0, 10), (9.0, 1)], 2.0) == pytest.approx(9.0 + 0.5 + 0.1)
    assert bound_of([(1.0, 10), (2.0, 1)], 2.0, keys="ab") == pytest.approx(3.1)
    assert bound_of([(1.0, 1), (2.0, 1)], 99.0) == 99.0
