"""What a step would take on other ranks, links and dtypes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from graphs import bucket_key
from hypothesis import given
from hypothesis import strategies as st
from steps import two_level_step
from torch import nn

import dp_compile
from dp_compile.insight.observe import step_of
from dp_compile.insight.predict import extrapolated, predict, replanned
from dp_compile.insight.step import Step
from dp_compile.plan.backends import NCCL
from dp_compile.plan.buckets import UNUSED_FLAGS, BucketPlan, GradientSpec, Layout
from dp_compile.plan.cost import LINKS, AllReduceCost, ring_or_tree
from dp_compile.plan.ready_times import MEASURED, ReadyTimes

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
    strategy: str = "fixed",
) -> Step:
    """Parameters that are ready one after the other, the last first, a few to a bucket."""
    specs = [spec(index, numel, dtypes[index % len(dtypes)]) for index, numel in enumerate(numels)]
    flags = GradientSpec(len(specs), UNUSED_FLAGS, (len(specs),), (1,), 4, specs[0].key)
    ordered = [*specs[::-1], flags]
    buckets = []
    for key in dict.fromkeys(each.key for each in ordered):
        mine = [each for each in ordered if each.key == key]
        buckets += [LAYOUT.bucket(key, mine[at : at + per_bucket], "given") for at in range(0, len(mine), per_bucket)]
    shares = {each.index: (place + 1) / len(ordered) for place, each in enumerate(ordered)}
    return Step(
        mode="python hooks",
        strategy=strategy,
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
    strategy=st.sampled_from(("fixed", "optimal")),
)


# --- what always holds ----------------------------------------------------------------------------------------------


@given(steps)
def test_without_a_change_it_is_the_step(given_step: Step) -> None:
    predicted = predict(given_step)
    assert predicted.step.plan is given_step.plan
    assert predicted.step.cost == given_step.cost
    assert (predicted.communication_s, predicted.end_s) == (given_step.communication_s, given_step.end_s)


@given(steps, st.sampled_from((None, 1, 2, 8, 16, 1024)), st.sampled_from((None, "bfloat16", "float32")))
def test_no_prediction_beats_the_bound(given_step: Step, ranks: int | None, dtype: str | None) -> None:
    predicted = predict(given_step, ranks=ranks, dtype=dtype)
    assert predicted.end_s >= predicted.bound_s * (1 - 1e-9)
    assert predicted.end_s >= predicted.backward_s == given_step.backward_s
    assert {each.index for each in predicted.step.plan.gradients} == {each.index for each in given_step.plan.gradients}


@given(steps)
def test_one_rank_reduces_nothing(given_step: Step) -> None:
    predicted = predict(given_step, ranks=1, link="infiniband-ndr")
    assert predicted.communication_s == predicted.exposed_s == 0.0
    assert predicted.end_s == predicted.bound_s


@given(st.sampled_from(LINKS), st.integers(2, 20_000), st.integers(2, 20_000))
def test_extrapolation_finds_the_link_again(link: Any, known: int, wanted: int) -> None:
    costs = [link.cost(ranks, formula=ring_or_tree) for ranks in (known, wanted)]
    found = extrapolated(costs[0], from_ranks=known, to_ranks=wanted)
    assert dataclasses.astuple(found)[:2] == pytest.approx(dataclasses.astuple(costs[1])[:2], rel=1e-9, abs=0)


# --- one change at a time -------------------------------------------------------------------------------------------

STEP = step([1_000_000, 500_000, 250_000, 250_000])
"""2, 1, 1 and 2 MB and flags of 4 elements in 3 buckets; a byte takes 0.1 ns."""


def nbytes_of(step: Step) -> int:
    return sum(each.nbytes for each in step.plan.gradients if each.name != UNUSED_FLAGS)


def test_the_numbers_by_hand() -> None:
    """Ready at 2, 4, 6, 8 and, the flags, 10 ms; 2 MB take 0.2 ms + 20 us, 6 MB 0.62 ms, 16 bytes 20 us."""
    predicted = predict(STEP)
    assert predicted.communication_s == pytest.approx(0.00086, rel=1e-4)
    assert predicted.exposed_s == pytest.approx(20.0016e-6)
    assert predicted.end_s == pytest.approx(predicted.bound_s)


def test_gradients_in_half_precision() -> None:
    predicted = predict(STEP, dtype="bfloat16")
    assert (nbytes_of(STEP), nbytes_of(predicted.step)) == (8_000_000, 4_000_000)
    assert {each.key.reduction.wire for each in predicted.step.plan.buckets} == {"bfloat16"}
    assert [len(bucket.members) for bucket in predicted.step.plan.buckets] == [2, 2, 1]
    assert predicted.backward_s == 0.01


def test_links() -> None:
    named = predict(STEP, ranks=64, link="infiniband-ndr")
    assert named.step.cost.alpha_s == pytest.approx((8.4 + 12 * 14) * 1e-6)  # a tree of 64: 6 up, 6 down
    assert named.step.cost.beta_s_per_byte * 50e9 == pytest.approx(2 * 63 / 64)
    assert named.basis == "infiniband-ndr, nominal, not measured; backward: stated"


def test_two_levels_keep_the_size_of_their_nodes() -> None:
    levels = two_level_step(3)
    more = predict(levels, ranks=64).step.cost
    assert more.inside == levels.cost.inside
    assert more.between is not None
    assert levels.cost.between is not None
    assert more.between.alpha_s > levels.cost.between.alpha_s
    named = predict(levels, ranks=64, link="ethernet-25")
    assert named.basis.startswith("nvlink4 inside nodes of 8, ethernet-25 between them, nominal")
    with pytest.raises(dp_compile.ConfigError, match="12 ranks do not fill two nodes or more of 8"):
        predict(levels, ranks=12)


@pytest.mark.usefixtures("fake_group")
def test_a_new_plan_of_a_real_step_is_the_same() -> None:
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 128), nn.Tanh(), nn.Linear(128, 4))
    dp_compile.replicate(model, config=dp_compile.ReplicateConfig(backend="aot_eager"))
    torch.compile(model, backend="aot_eager")(torch.randn(5, 64)).sum().backward()
    seen = step_of(model)
    assert replanned(seen).plan == seen.plan
    measured = dataclasses.replace(seen, ready=dataclasses.replace(seen.ready, backward_s=0.001, basis=MEASURED))
    assert predict(measured, link="ethernet-25").step.plan.gradients == seen.plan.gradients


# --- what is not allowed, and the command ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ranks": 0}, "ranks must be an integer >= 1, got 0"),
        ({"link": "string"}, r"link must be one of nvlink4, .*, got 'string'"),
    ],
)
def test_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(dp_compile.ConfigError, match=message):
        predict(STEP, **changes)


def test_refuses_steps_that_say_nothing() -> None:
    alone = dataclasses.replace(STEP, world_size=1)
    with pytest.raises(dp_compile.ConfigError, match="the step ran on 1 rank, so the cost on 2 is not known"):
        predict(alone, ranks=2)
    assert predict(alone, ranks=2, link="loopback").communication_s > 0
    with pytest.raises(dp_compile.ConfigError, match="from_ranks must be >= 2"):
        extrapolated(STEP.cost, from_ranks=1, to_ranks=2)
