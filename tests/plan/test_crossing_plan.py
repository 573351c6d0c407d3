"""In which order buckets are launched whose reductions may end under the next forward."""

from __future__ import annotations

import itertools

import pytest
from graphs import bucket_key
from hypothesis import given
from hypothesis import strategies as st

from dp_compile.plan.buckets import PACKED, UNUSED_FLAGS, BucketPlan, GradientSpec, plan_buckets
from dp_compile.plan.cost import AllReduceCost
from dp_compile.plan.crossing import Job, arrivals, in_order_of_need, plan_crossing, step_seconds, worst_ratio
from dp_compile.plan.network import ReadyGradient
from dp_compile.plan.planner import PlanResult, ReadyTimes, certify

KEY = bucket_key("0", "sum", "float32", "cpu")
SECOND_A_BYTE = AllReduceCost(0.0, 1.0)


def gradient(index: int, nbytes: int, name: str = "") -> GradientSpec:
    return GradientSpec(index, name or f"p{index}", (nbytes // 4,), (1,), 4, KEY)


def planned(sizes: list[int], cap: int = 1) -> PlanResult:
    """Gradients in the order in which they are ready, then the flags; a bucket ends at `cap` bytes."""
    every = [gradient(index, size) for index, size in enumerate(sizes)]
    every.append(gradient(len(sizes), 4, UNUSED_FLAGS))
    return PlanResult(plan_buckets(every, bucket_cap_mb=cap / 2**20, first_bucket_cap_mb=cap / 2**20))


def times(shares: list[float], backward_s: float) -> ReadyTimes:
    return ReadyTimes(dict(enumerate(shares)), backward_s, "said")


def members(plan: BucketPlan) -> list[list[int]]:
    return [[member.gradient.index for member in bucket.members] for bucket in plan.buckets]


def jobs_of(sizes: list[int], shares: list[float], backward_s: float) -> list[Job]:
    said = times(shares, backward_s)
    buckets = [PACKED.bucket([gradient(index, size)]) for index, size in enumerate(sizes)]
    return [Job.of(bucket, said, SECOND_A_BYTE, backward_s) for bucket in buckets]


def test_what_is_read_first_goes_first_and_the_flags_alone_before_all() -> None:
    """Each takes 40 s, and they are ready after 25, 50, 75 and 100: the second is sent behind the third and fourth."""
    plan = plan_crossing(planned([40] * 4), times([0.25, 0.5, 0.75, 1.0], 100.0), SECOND_A_BYTE, None).plan
    assert members(plan) == [[4], [0], [2], [3], [1]]
    assert plan.flags.name == UNUSED_FLAGS


def test_buckets_are_cut_smaller_where_that_pays() -> None:
    """One bucket could only be sent at the end of the backward."""
    one, said = planned([40] * 8, cap=10**6), times([each / 8 for each in range(1, 9)], 320.0)
    assert len(one.plan.buckets) == 1
    kept, cut = (plan_crossing(one, said, SECOND_A_BYTE, layout).plan for layout in (None, PACKED))
    assert (len(kept.buckets), len(cut.buckets)) == (2, 9)
    assert sorted(index for bucket in members(cut) for index in bucket) == [*range(9)]


def test_who_waits_for_whom_by_hand() -> None:
    """Read at 100, 110 and 140 s; there at 120, 160 and 164 s: after the first wait of 20 s the others shift by it."""
    jobs = [
        Job(PACKED.bucket([gradient(index, 4)]), ready_s, needed_s, seconds)
        for index, (ready_s, needed_s, seconds) in enumerate(
            [(80.0, 100.0, 40.0), (90.0, 110.0, 40.0), (0.0, 140.0, 4.0)]
        )
    ]
    found = [(each.start_s, each.finish_s, each.needed_s, each.waited_s) for each in arrivals(jobs)]
    assert found == [(80.0, 120.0, 100.0, 20.0), (120.0, 160.0, 130.0, 30.0), (160.0, 164.0, 190.0, 0.0)]


@given(data=st.data(), lanes=st.integers(1, 2))
def test_waits_add_up_to_the_step(data: st.DataObject, lanes: int) -> None:
    """`step_seconds` goes by the latest of all, `arrivals` by what each wait adds."""
    sizes = data.draw(st.lists(st.integers(1, 15).map(lambda each: 4 * each), min_size=1, max_size=6))
    shares = data.draw(st.lists(st.floats(0.05, 1.0), min_size=len(sizes), max_size=len(sizes)))
    jobs, backward_s = jobs_of(sizes, shares, float(sum(sizes))), float(sum(sizes))
    waited_s = sum(each.waited_s for each in arrivals(jobs, lanes=lanes))
    assert backward_s * 1.5 + waited_s == pytest.approx(step_seconds(jobs, backward_s, lanes=lanes))


def test_what_a_plan_for_two_halves_promises() -> None:
    """The bound is all compute, 150 s, or all communication."""
    said = times([0.25, 0.5, 0.75, 1.0], 100.0)
    for nbytes, bound_s in ((4, 150.0), (40, 160.004)):
        one = planned([nbytes] * 4)
        before = certify(
            [ReadyGradient(nbytes, 25.0 * each, KEY) for each in range(1, 5)],
            ((0,), (1,), (2,), (3,)),
            cost=SECOND_A_BYTE,
            backward_s=100.0,
        )
        found = plan_crossing(one._replace(certificate=before), said, SECOND_A_BYTE, None)
        promise = found.certificate
        assert promise is not None
        assert promise.crosses
        assert promise.bound_s == pytest.approx(bound_s, rel=1e-3)
        assert 1.0 <= promise.ratio <= promise.worst_ratio
        assert promise.promise.startswith("of backward and next forward ")
    assert plan_crossing(planned([4]), said, SECOND_A_BYTE, None).certificate is None


SIZES = st.lists(st.integers(1, 15).map(lambda each: 4 * each), min_size=1, max_size=6)


@given(sizes=SIZES, share=st.sampled_from([0.3, 1.0, 3.0]), data=st.data())
def test_close_to_the_best_of_all_orders(sizes: list[int], share: float, data: st.DataObject) -> None:
    """Earliest deadline first is the best order if a job can be interrupted; else it loses at most one job."""
    shares = sorted(data.draw(st.lists(st.floats(0.05, 1.0), min_size=len(sizes), max_size=len(sizes))))
    backward_s = sum(sizes) * share
    jobs = jobs_of(sizes, shares, backward_s)
    best = min(step_seconds(order, backward_s) for order in itertools.permutations(jobs))
    found = step_seconds(in_order_of_need(jobs), backward_s)
    assert best - 1e-9 <= found <= best + max(sizes) + 1e-9


@given(sizes=SIZES, data=st.data())
def test_what_is_chosen_is_never_worse_than_what_was_given(sizes: list[int], data: st.DataObject) -> None:
    shares = sorted(data.draw(st.lists(st.floats(0.05, 1.0), min_size=len(sizes), max_size=len(sizes))))
    backward_s = float(sum(sizes))
    said, before = times(shares, backward_s), planned(sizes)
    plan = plan_crossing(before, said, SECOND_A_BYTE, PACKED).plan
    now, then = (
        worst_ratio([Job.of(bucket, said, SECOND_A_BYTE, backward_s) for bucket in buckets], backward_s)
        for buckets in (plan.buckets[1:], [PACKED.bucket([each]) for each in before.plan.gradients[:-1]])
    )
    assert now <= then + 1e-9
