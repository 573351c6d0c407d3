"""Plans: which gradients share a bucket, by policy, cost or size; a plan is plain, stable data."""

import dataclasses
import json
import math

import pytest
import torch.distributed as dist
from graphs import bucket_key
from hypothesis import given
from hypothesis import strategies as st
from on_ranks import on_ranks
from torch import nn

import dp_compile
from dp_compile.config import ReplicateConfig
from dp_compile.plan.buckets import PACKED, UNUSED_FLAGS, BucketPlan, GradientSpec, bucket_of, plan_buckets
from dp_compile.plan.cost import AllReduceCost
from dp_compile.plan.words import BYTES_PER_MB
from dp_compile.replication.calibration import calibrate

FLOAT32 = bucket_key("0", "sum", "float32", "cpu")


def gradient(index, numel, key=FLOAT32):
    itemsize = 4 if key.dtype == "float32" else 2
    return GradientSpec(index, f"p{index}", (numel,), (1,), itemsize, key)


def plan_of(gradients, cap, first_cap):
    """Caps in bytes."""
    caps = {"bucket_cap_mb": cap / BYTES_PER_MB, "first_bucket_cap_mb": first_cap / BYTES_PER_MB}
    return plan_buckets(gradients, **caps, alignment_bytes=PACKED)


def indices(plan):
    return [[member.gradient.index for member in bucket.members] for bucket in plan.buckets]


@pytest.mark.parametrize(
    ("numels", "alignment", "offsets", "padding"),
    [
        ([3, 20, 1, 16], 1, [0, 3, 23, 24], 0),
        ([3, 20, 1, 16], 64, [0, 16, 36, 48], 96),
        ([1] * 9, 64, list(range(9)), 0),  # numbers need no more than their own size
    ],
)
def test_members_start_at_multiples(numels, alignment, offsets, padding):
    gradients = [gradient(index, numel) for index, numel in enumerate(numels)]
    bucket = bucket_of(gradients, alignment)
    assert [member.offset for member in bucket.members] == offsets
    assert bucket.padding_nbytes == padding
    assert bucket.nbytes == 4 * sum(numels)
    assert bucket.numel * 4 == bucket.nbytes + bucket.padding_nbytes


KEYS = st.builds(
    bucket_key, st.sampled_from("01"), st.just("sum"), st.sampled_from(["float32", "bfloat16"]), st.just("cpu")
)
SIZES_AND_KEYS = st.lists(st.tuples(st.integers(0, 40), KEYS), max_size=25)
CAPS = st.one_of(st.integers(1, 200), st.just(math.inf))


@given(SIZES_AND_KEYS, CAPS, CAPS)
def test_what_holds_of_every_plan(sizes, cap, first_cap):
    gradients = [gradient(index, numel, key) for index, (numel, key) in enumerate(sizes)]
    plan = plan_of(gradients, cap, first_cap)
    assert sorted(spec.index for spec in plan.gradients) == list(range(len(gradients)))
    assert plan.nbytes == sum(spec.nbytes for spec in gradients)
    seen = {}
    for bucket in plan.buckets:
        assert {member.gradient.key for member in bucket.members} == {bucket.key}
        members = [member.gradient.index for member in bucket.members]
        assert members == sorted(members)
        assert members[0] > seen.get(bucket.key, -1)
        limit = cap if bucket.key in seen else first_cap
        assert sum(member.gradient.nbytes for member in bucket.members[:-1]) < limit
        seen[bucket.key] = members[-1]
        if bucket.nbytes < limit:
            assert members[-1] == max(spec.index for spec in gradients if spec.key == bucket.key)
        ends = [member.offset + member.gradient.numel for member in bucket.members]
        assert [member.offset for member in bucket.members] == [0, *ends[:-1]]
    last_members = [bucket.members[-1].gradient.index for bucket in plan.buckets]
    assert last_members == sorted(last_members)


@given(SIZES_AND_KEYS, CAPS, CAPS)
def test_a_plan_is_plain_data_with_a_stable_signature(sizes, cap, first_cap):
    gradients = [gradient(index, numel, key) for index, (numel, key) in enumerate(sizes)]
    plan = plan_of(gradients, cap, first_cap)
    again = BucketPlan.from_dict(json.loads(json.dumps(plan.to_dict())))
    assert [spec.name for spec in again.gradients] == [spec.name for spec in plan.gradients]
    assert again.signature() == plan.signature()
    renamed = [
        dataclasses.replace(spec, key=bucket_key(f"other {stage.group}", "sum", spec.key.dtype, spec.key.device))
        for spec in gradients
        for stage in spec.key.reduction.stages
    ]
    assert plan_of(renamed, cap, first_cap).signature() == plan.signature()


def test_the_signature_sees_every_change():
    before = [gradient(0, 4), gradient(1, 4), gradient(2, 4)]
    changes = [
        {"name": "other"},
        {"shape": (2, 2), "stride": (2, 1)},
        {"stride": (2,)},
        {"key": bucket_key("0", "sum", "float32", "cpu", scale=0.25)},
        {"key": FLOAT32._replace(device="cuda")},
    ]
    plans = [plan_of([dataclasses.replace(before[0], **change), *before[1:]], 1, 1) for change in changes]
    plans += [plan_of(before, *caps) for caps in [(1, 1), (32, 1), (32, 32), (64, 64)]]
    plans += [BucketPlan((bucket_of([gradient(0, 5), gradient(1, 16)], alignment),)) for alignment in (1, 64)]
    assert len({plan.signature() for plan in plans}) == len(plans)


def test_flags_never_cost_a_collective():
    """The last gradient fills its bucket exactly; the flags go with it all the same."""
    flags = dataclasses.replace(gradient(2, 2), name=UNUSED_FLAGS)
    assert indices(plan_of([gradient(1, 256), gradient(0, 256), flags], 1024, 1024)) == [[1], [0, 2]]


@pytest.mark.usefixtures("fake_group")
def test_optimal_is_the_default_and_makes_a_promise():
    layers = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 64), nn.Linear(64, 16), nn.Linear(16, 50))
    config = ReplicateConfig(cost=AllReduceCost(1e-6, 1e-9))
    model = dp_compile.replicate(layers, config=config)
    report = dp_compile.report(model)
    assert len(report.plan.buckets) > 1
    assert {each.name for each in report.plan.gradients} == {UNUSED_FLAGS, *dict(model.named_parameters())}
    assert report.notes[-1].startswith("optimal plan for an all-reduce that takes 1 us + ")
    assert " ".join(report.notes[-1].split()) in " ".join(str(report).split())
    assert all(each not in str(report) for each in ("%", " ms"))
    assert max(map(len, str(report).splitlines())) <= 80
    with pytest.raises(dp_compile.ConfigError, match="bucket_policy and cost exclude each other"):
        dp_compile.replicate(dp_compile.unreplicate(model), bucket_policy={nn.Linear}, config=config)


@pytest.mark.usefixtures("fake_group")
@on_ranks("ranks")
def test_all_ranks_calibrate_to_the_same_cost():
    fitted, found = calibrate(), [None] * dist.get_world_size()
    dist.all_gather_object(found, fitted)
    assert set(map(repr, found)) == {repr(fitted)}
    assert fitted.cost.beta_s_per_byte > 0
    with pytest.raises(dp_compile.ConfigError, match="at least 2 ranks"):
        calibrate(dist.new_group([dist.get_rank()], use_local_synchronization=True))
