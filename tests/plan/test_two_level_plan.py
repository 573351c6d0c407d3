"""Stages of a reduction on two levels of network: what they are, in which order they are launched, what is padded."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dp_compile.plan.backends import GLOO, NCCL
from dp_compile.plan.buckets import PACKED, BucketKey, BucketPlan, GradientSpec, plan_buckets, plan_single
from dp_compile.plan.cost import LINKS, nominal_cost, with_levels
from dp_compile.plan.network import legs_of
from dp_compile.plan.reduction import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BETWEEN,
    INSIDE,
    Averaging,
    Levels,
    Stage,
    launch_order,
)

LEVELS = Levels("in", "out", ((0, 1, 2), (3, 4, 5)))


def levels(count: int) -> list[Stage]:
    """So many stages, the last of them over another link."""
    return [*([Stage(ALL_REDUCE, "out", link=BETWEEN)] * (count - 1)), Stage(ALL_GATHER, "in", link=INSIDE)]


@given(st.lists(st.sampled_from([1, 2, 3, 4]), max_size=6))
def test_each_stage_once_and_in_its_order(stages: list[int]) -> None:
    order = list(launch_order([levels(count) for count in stages]))
    assert sorted(order) == [(bucket, stage) for bucket, count in enumerate(stages) for stage in range(count)]
    for bucket, count in enumerate(stages):
        assert [stage for each, stage in order if each == bucket] == list(range(count))
    firsts = [bucket for bucket, stage in order if stage == 0]
    assert firsts == list(range(len(stages)))
    lasts = [bucket for bucket, stage in order if stage and stage == stages[bucket] - 1]
    assert order[len(order) - len(lasts) :] == [(bucket, stages[bucket] - 1) for bucket in lasts]


def test_over_one_link_the_last_stage_is_one_bucket_late_too() -> None:
    two = Averaging(hook="a hook", rounds=(ALL_TO_ALL, ALL_GATHER)).reduction("0", GLOO, 3, "float32").stages
    assert two == (Stage(ALL_TO_ALL, "0", parts=3), Stage(ALL_GATHER, "0", parts=3))
    assert list(launch_order([two, two, levels(1)])) == [(0, 0), (1, 0), (0, 1), (2, 0), (1, 1)]


def specs(levels: Levels | None, *numels: int) -> list[GradientSpec]:
    key = BucketKey(Averaging().reduction("all", GLOO, 6, "float32", levels), "float32", "cpu")
    return [GradientSpec(index, f"p{index}", (numel,), (1,), 4, key) for index, numel in enumerate(numels)]


def test_a_bucket_divides_into_parts_of_16_elements() -> None:
    """So that each rank's part starts at 16 bytes, whatever is sent: NCCL is slow where it does not."""
    plan = plan_buckets(specs(LEVELS, 4, 48, 49), bucket_cap_mb=16 / 2**20, first_bucket_cap_mb=16 / 2**20)
    assert [bucket.numel for bucket in plan.buckets] == [48, 48, 96]
    assert [bucket.padding_nbytes for bucket in plan.buckets] == [176, 0, 188]
    assert [bucket.tensor_numels for bucket in plan_single(specs(LEVELS, 0)).buckets] == [(0,)]
    assert [bucket.tensor_numels for bucket in plan_single(specs(None, 49)).buckets] == [(49,)]
    apart = PACKED.__class__(1, frozenset({"p0"}))
    assert apart.bucket(specs(LEVELS, 4)[0].key, specs(LEVELS, 4), "").tensor_numels == (48,)


def test_plans_are_data_and_those_of_one_level_are_what_they_were() -> None:
    two, one = (BucketPlan(plan_single(specs(levels, 4)).buckets) for levels in (LEVELS, None))
    assert BucketPlan.from_dict(two.to_dict()).to_dict() == two.to_dict()
    assert BucketPlan.from_dict(two.to_dict()).buckets[0].tensor_numels == (48,)
    assert two.signature() != one.signature()
    (bucket,) = one.to_dict()["buckets"]
    assert bucket["key"]["reduction"]["stages"] == [{"op": "all_reduce", "group": "", "reduce_op": "sum"}]
    assert str(two.buckets[0].key) == "float32 cpu sum, two levels with 3 ranks in a node"


# --- what it costs --------------------------------------------------------------------------------------------------


def test_what_is_assumed_before_anything_was_measured() -> None:
    link_of = {link.name: link for link in LINKS}
    flat, two = nominal_cost(NCCL, 32), nominal_cost(NCCL, 32, 8)
    links = link_of["nvlink4"], link_of["infiniband-ndr"]
    assert two == with_levels(flat, *links, ranks_inside=8, nodes=4)
    # A slow link between nodes is what two levels are for.
    levels = Levels("", "", tuple(tuple(range(8)) for _ in range(4)))
    stages = legs_of([Averaging().reduction("", NCCL, 32, "float32", levels).loads(2**30)], two)
    assert sum(stage.seconds for stage in stages) < 0.5 * flat.seconds(2**30)
    loopback = link_of["loopback"]
    flat = loopback.cost(4)
    assert nominal_cost(GLOO, 4, 2) == with_levels(flat, loopback, loopback, ranks_inside=2, nodes=2)
