"""What a step would take if something were different."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from graphs import bucket_key
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import dp_compile
from dp_compile.insight.observe import step_of
from dp_compile.insight.prediction import (
    NO_COST,
    STRATEGIES,
    Prediction,
    Scenario,
    extrapolated,
    in_plan_order,
    predict,
)
from dp_compile.insight.step import MeasuredStep, Step, planned_buckets
from dp_compile.plan.backends import NCCL
from dp_compile.plan.buckets import UNUSED_FLAGS, BucketPlan, GradientSpec, Layout
from dp_compile.plan.cost import EITHER, AllReduceCost
from dp_compile.plan.links import LINKS
from dp_compile.plan.ready_times import MEASURED, Product, ReadyTimes
from dp_compile.plan.strategies import plan_optimal

KEY = bucket_key("", "avg", "float32", "cuda")
LAYOUT = Layout(64)
COST = AllReduceCost(20e-6, 1e-10)


def spec(index: int, numel: int, dtype: str = "float32", name: str = "") -> GradientSpec:
    shape = (numel, 1)
    return GradientSpec(index, name or f"p{index}", shape, (1, 1), 4, KEY._replace(dtype=dtype))


def step(
    numels: list[int],
    *,
    cost: AllReduceCost = COST,
    backward_s: float | None = 0.01,
    world_size: int = 8,
    dtypes: tuple[str, ...] = ("float32",),
    per_bucket: int = 2,
) -> Step:
    """Parameters that are ready one after the other, the last first, a few to a bucket."""
    specs = [spec(index, numel, dtypes[index % len(dtypes)]) for index, numel in enumerate(numels)]
    flags = GradientSpec(len(specs), UNUSED_FLAGS, (len(specs),), (1,), 4, specs[0].key)
    ordered = in_plan_order([*specs, flags])
    buckets = []
    for key in dict.fromkeys(each.key for each in ordered):
        mine = [each for each in ordered if each.key == key]
        buckets += [LAYOUT.bucket(key, mine[at : at + per_bucket], "so said") for at in range(0, len(mine), per_bucket)]
    shares = {each.index: (place + 1) / len(ordered) for place, each in enumerate(ordered)}
    return Step(
        mode="python hooks",
        strategy="fixed",
        world_size=world_size,
        backend=NCCL,
        device="cuda",
        plan=BucketPlan(tuple(buckets)),
        ready=ReadyTimes(shares, backward_s, "stated"),
        cost=cost,
        cost_source="stated",
    )


seconds = st.floats(1e-6, 1e-2)
steps = st.builds(
    step,
    st.lists(st.integers(1, 10**7), min_size=1, max_size=12),
    cost=st.builds(AllReduceCost, seconds, st.floats(1e-12, 1e-8)),
    backward_s=st.none() | st.floats(1e-5, 1.0),
    world_size=st.sampled_from((2, 8, 64)),
    dtypes=st.sampled_from((("float32",), ("float32", "bfloat16"))),
    per_bucket=st.integers(1, 4),
)
strategies = st.sampled_from(STRATEGIES)


# --- what always holds ----------------------------------------------------------------------------------------------


@given(steps)
def test_without_a_wish_it_is_the_step(given_step: Step) -> None:
    predicted = predict(given_step, Scenario())
    assert predicted.plan is given_step.plan
    assert list(predicted.buckets) == planned_buckets(given_step)
    assert predicted.cost == given_step.cost
    assert predicted.communication_s == given_step.communication_s
    assert predicted.exposed_s == pytest.approx(
        max(0.0, predicted.buckets[-1].finish_s - given_step.backward_s), abs=1e-12
    )


@given(steps, strategies, st.sampled_from((None, 1, 2, 8, 16, 1024)), st.sampled_from((None, "bfloat16", "float32")))
def test_no_prediction_beats_the_bound(
    given_step: Step, strategy: str, world_size: int | None, dtype: str | None
) -> None:
    predicted = predict(given_step, Scenario(strategy=strategy, world_size=world_size, gradient_dtype=dtype))
    assert predicted.makespan_s >= predicted.bound_s * (1 - 1e-9)
    assert predicted.makespan_s >= predicted.backward_s == given_step.backward_s
    assert {each.index for each in predicted.plan.gradients} == {each.index for each in given_step.plan.gradients}


@given(steps, strategies)
def test_one_rank_reduces_nothing(given_step: Step, strategy: str) -> None:
    predicted = predict(given_step, Scenario(world_size=1, strategy=strategy, link="infiniband-ndr"))
    assert predicted.cost == NO_COST
    assert predicted.communication_s == predicted.exposed_s == 0.0
    assert predicted.ratio == 1.0


@given(steps, st.floats(1.0, 100.0), st.floats(1.0, 8.0))
def test_a_faster_network_is_never_later(given_step: Step, busbw_gb_s: float, faster: float) -> None:
    """With the same buckets never. Planned anew, never by more than what the plan is above its bound: it is the best
    for the worst case of a band of speeds, which need not be the best at the speed in its middle."""

    def at(strategy: str, bandwidth: float) -> Prediction:
        return predict(given_step, Scenario(strategy=strategy, busbw_gb_s=bandwidth))

    for strategy in ("as planned", "fixed"):
        assert at(strategy, busbw_gb_s * faster).makespan_s <= at(strategy, busbw_gb_s).makespan_s * (1 + 1e-9)
    fast, slow = at("optimal", busbw_gb_s * faster), at("optimal", busbw_gb_s)
    assert fast.makespan_s <= slow.makespan_s * fast.ratio * (1 + 1e-9)


@given(steps, st.floats(1.0, 10.0))
def test_a_longer_backward_hides_more(given_step: Step, scale: float) -> None:
    short, long = (predict(given_step, Scenario(compute_scale=each)) for each in (1.0, scale))
    assert long.backward_s == pytest.approx(short.backward_s * scale)
    assert long.makespan_s >= short.makespan_s * (1 - 1e-9)
    assert long.makespan_s <= short.makespan_s * scale * (1 + 1e-9)


@given(st.sampled_from(LINKS), st.integers(2, 20_000), st.integers(2, 20_000))
def test_extrapolation_finds_the_link_again(link: Any, known: int, wanted: int) -> None:
    costs = [link.cost(ranks, formula=EITHER) for ranks in (known, wanted)]
    found = extrapolated(costs[0], from_ranks=known, to_ranks=wanted)
    assert dataclasses.astuple(found)[:2] == pytest.approx(dataclasses.astuple(costs[1])[:2], rel=1e-9, abs=0)


@given(st.sampled_from(LINKS), st.integers(1, 5_000), st.integers(1, 5_000))
def test_more_ranks_are_never_predicted_faster(link: Any, ranks: int, more: int) -> None:
    """A choice of the algorithm by the ranks made 64 faster than 8."""
    few, many = (link.cost(each, formula=EITHER) for each in (ranks, ranks + more))
    assert (few.alpha_s, few.beta_s_per_byte) <= (many.alpha_s, many.beta_s_per_byte)
    assert few.beta_s_per_byte <= many.beta_s_per_byte


# --- one wish at a time ---------------------------------------------------------------------------------------------

STEP = step([1_000_000, 500_000, 250_000, 250_000])
"""2, 1, 1 and 2 MB and flags of 4 elements in 3 buckets; a byte takes 0.1 ns."""


def test_the_numbers_by_hand() -> None:
    """Ready at 2, 4, 6, 8 and, the flags, 10 ms; 2 MB take 0.2 ms + 20 us, 6 MB 0.62 ms, 16 bytes 20 us."""
    predicted = predict(STEP, Scenario())
    assert [bucket.finish_s for bucket in predicted.buckets] == pytest.approx([0.00422, 0.00862, 0.0100200016])
    assert predicted.communication_s == pytest.approx(0.00086, rel=1e-4)
    assert predicted.exposed_s == pytest.approx(20.0016e-6)
    assert predicted.ratio == pytest.approx(1.0)
    assert predicted.gradient_nbytes == 8_000_000
    assert predicted.padding_nbytes == 16
    assert predicted.step_s is None


def test_gradients_in_half_precision() -> None:
    predicted = predict(STEP, Scenario(gradient_dtype="bfloat16"))
    assert predicted.gradient_nbytes == 4_000_000
    assert {(bucket.key.dtype, bucket.key.reduction.wire) for bucket in predicted.plan.buckets} == {
        ("float32", "bfloat16")
    }
    assert [len(bucket.members) for bucket in predicted.plan.buckets] == [2, 2, 1]
    assert predicted.backward_s == 0.01


def test_two_dtypes_on_one_wire() -> None:
    """Buckets are of one dtype before the wire and on it, as what reduces them has to give each its own dtype back."""
    mixed = step([1000, 1000, 1000, 1000], dtypes=("float32", "bfloat16"))
    predicted = predict(mixed, Scenario(gradient_dtype="float32", strategy="fixed"))
    assert [bucket.key.reduction.wire for bucket in predicted.plan.buckets] == ["float32", None]
    assert predicted.gradient_nbytes == 16_000


def test_integers_keep_their_dtype() -> None:
    odd = step([1000, 1000], dtypes=("int32",))
    assert predict(odd, Scenario(gradient_dtype="bfloat16")).plan == odd.plan


def test_buckets_of_a_size() -> None:
    one = predict(STEP, Scenario(bucket_cap_mb=math.inf, strategy="fixed"))
    assert len(one.plan.buckets) == 2  # torch's first bucket is 1 MiB
    assert one.strategy == "fixed"
    assert predict(STEP, Scenario(bucket_cap_mb=0.1)).plan != one.plan
    assert all(member.offset is None for member in _members(predict(STEP, Scenario(strategy="coalesced")).plan))


def test_flat_again_after_coalesced() -> None:
    coalesced = dataclasses.replace(STEP, strategy="coalesced", plan=predict(STEP, Scenario(strategy="coalesced")).plan)
    assert all(member.offset is not None for member in _members(predict(coalesced, Scenario(strategy="optimal")).plan))


def _members(plan: BucketPlan) -> list[Any]:
    return [member for bucket in plan.buckets for member in bucket.members]


def test_links_and_latencies() -> None:
    named = predict(STEP, Scenario(world_size=64, link="infiniband-ndr"))
    assert named.cost.alpha_s == pytest.approx((8.4 + 12 * 14) * 1e-6)  # a tree of 64: 6 up, 6 down
    assert named.cost.beta_s_per_byte * 50e9 == pytest.approx(2 * 63 / 64)
    assert named.basis.startswith("infiniband-ndr, nominal, not measured, as a ring or a double binary")
    late = predict(STEP, Scenario(world_size=64, link="infiniband-ndr", latency_us=5))
    assert (late.cost.alpha_s, late.cost.beta_s_per_byte) == (pytest.approx(5e-6), named.cost.beta_s_per_byte)
    wide = predict(STEP, Scenario(busbw_gb_s=100))
    assert wide.cost.alpha_s == 20e-6
    assert wide.cost.beta_s_per_byte * 100e9 == pytest.approx(2 * 7 / 8)
    given = AllReduceCost(1e-6, 1e-12)
    assert predict(STEP, Scenario(world_size=64, cost=given)).cost == given


def test_other_ranks_of_an_unknown_link() -> None:
    """Of 20 us on 8 ranks 8.4 are the launch, the rest is 6 hops; on 4 ranks there are 4."""
    predicted = predict(STEP, Scenario(world_size=4))
    assert predicted.cost.alpha_s == pytest.approx((8.4 + 11.6 * 4 / 6) * 1e-6)
    assert predicted.cost.beta_s_per_byte / 1e-10 == pytest.approx((2 * 3 / 4) / (2 * 7 / 8))
    assert predicted.basis.startswith("the step's cost on 8 ranks, stated, taken to other ranks as if it were a ring")


def test_one_rank_knows_no_link() -> None:
    alone = dataclasses.replace(STEP, world_size=1)
    with pytest.raises(dp_compile.ConfigError, match=r"nothing is known of its link. Give Scenario.link"):
        predict(alone, Scenario(world_size=2))
    assert predict(alone, Scenario(world_size=2, latency_us=10, busbw_gb_s=10)).cost.alpha_s == pytest.approx(10e-6)
    with pytest.raises(dp_compile.ConfigError, match="from_ranks must be >= 2"):
        extrapolated(STEP.cost, from_ranks=1, to_ranks=2)


def test_an_assumed_backward_does_not_move_with_the_link() -> None:
    unknown = dataclasses.replace(STEP, ready=dataclasses.replace(STEP.ready, backward_s=None))
    predicted = predict(unknown, Scenario(busbw_gb_s=1.0, strategy="optimal"))
    assert predicted.backward_s == unknown.backward_s == pytest.approx(8_000_016 * 1e-10)
    assert predicted.basis.endswith("the backward as long as the step's communication, assumed")


def test_the_whole_step() -> None:
    measured = MeasuredStep(0.012, (), "clock", forward_s=0.005, optimizer_s=0.001)
    whole = dataclasses.replace(STEP, measured=measured)
    assert predict(whole, Scenario(compute_scale=2)).step_s == pytest.approx(0.010 + 0.02002 + 0.001, rel=1e-4)
    half = dataclasses.replace(STEP, measured=dataclasses.replace(measured, optimizer_s=None))
    assert predict(half, Scenario()).step_s is None


def test_pieces_stay_pieces() -> None:
    (one,) = [each for each in STEP.plan.gradients if each.index == 0]
    pieces = LAYOUT.bucket(KEY, [one, one], "pieces", {0: (0, 250_000), 1: (250_000, 1_000_000)})
    cut = dataclasses.replace(
        STEP,
        plan=BucketPlan((*STEP.plan.buckets[:1], pieces)),
        ready=dataclasses.replace(STEP.ready, products={0: Product(0.2, 0.01)}),
    )
    predicted = predict(cut, Scenario(gradient_dtype="float16"))
    assert [member.rows for member in predicted.plan.buckets[1].members] == [(0, 250_000), (250_000, 1_000_000)]
    assert predicted.gradient_nbytes == 2 * (1_000_000 + 500_000)


def test_what_a_scenario_is_called() -> None:
    assert str(Scenario()) == "as it is"
    assert str(Scenario(world_size=64, strategy="optimal")) == "world_size 64, strategy optimal"
    assert str(Scenario(world_size=64, label="more ranks")) == "more ranks"


@pytest.mark.usefixtures("fake_group")
def test_planning_a_real_step_anew_changes_nothing() -> None:
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 128), nn.Tanh(), nn.Linear(128, 4))
    dp_compile.replicate(model, config=dp_compile.ReplicateConfig(backend="aot_eager"))
    torch.compile(model, backend="aot_eager")(torch.randn(5, 64)).sum().backward()
    seen = step_of(model)
    assert predict(seen, Scenario(strategy="optimal")).plan == seen.plan
    measured = dataclasses.replace(seen, ready=dataclasses.replace(seen.ready, backward_s=0.001, basis=MEASURED))
    layout = Layout(64)
    planned = plan_optimal(in_plan_order(seen.plan.gradients), seen.cost, measured.ready, layout)
    assert predict(measured, Scenario(strategy="optimal")).plan == planned.plan


# --- what is not allowed --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wishes", "message"),
    [
        ({"world_size": 0}, r"Scenario.world_size must be an integer >= 1, got 0"),
        ({"world_size": 2.0}, r"Scenario.world_size must be an integer >= 1, got 2.0"),
        ({"world_size": True}, r"Scenario.world_size must be an integer >= 1, got True"),
        ({"link": "string"}, r"link must be one of nvlink4, .*, got 'string'"),
        ({"cost": 3.0}, r"Scenario.cost must be an AllReduceCost, got float"),
        ({"cost": NO_COST, "link": "loopback"}, r"give it or Scenario.link, not both"),
        ({"cost": NO_COST, "latency_us": 1}, r"give it or Scenario.latency_us, not both"),
        ({"latency_us": -1}, r"Scenario.latency_us must be >= 0, got -1"),
        ({"latency_us": math.nan}, r"Scenario.latency_us must be a finite number"),
        ({"busbw_gb_s": 0}, r"Scenario.busbw_gb_s must be > 0, got 0"),
        ({"busbw_gb_s": "fast"}, r"Scenario.busbw_gb_s must be a finite number, got 'fast'"),
        ({"compute_scale": 0}, r"Scenario.compute_scale must be > 0"),
        ({"gradient_dtype": "int8"}, r"Scenario.gradient_dtype must be one of bfloat16, float16, float32, got 'int8'"),
        ({"strategy": "best"}, r"Scenario.strategy must be one of as planned, optimal, coalesced, fixed, got 'best'"),
        ({"strategy": "ddp"}, r"'ddp' cannot be planned from a step alone: torch's rule needs the parameters"),
        ({"strategy": "per_module"}, r"'per_module' cannot be planned from a step alone: a policy needs the module"),
        ({"strategy": "explicit"}, r"'explicit' cannot be planned from a step alone: it needs a plan file"),
        ({"strategy": "optimal", "bucket_cap_mb": 25}, r"belongs to strategy 'fixed', but that is 'optimal'"),
        ({"bucket_cap_mb": -1}, r"bucket_cap_mb must be > 0, got -1"),
    ],
)
def test_refuses(wishes: dict[str, Any], message: str) -> None:
    with pytest.raises(dp_compile.ConfigError, match=message):
        Scenario(**wishes)
