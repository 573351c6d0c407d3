"""What a step would take on other ranks, links and dtypes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from steps import step_of_buckets, two_level_step
from torch import nn

import dp_compile
from dp_compile.insight.observe import step_of
from dp_compile.insight.predict import extrapolated, predict, replanned
from dp_compile.insight.step import Step
from dp_compile.plan.cost import LINKS, AllReduceCost, ring_or_tree


def made(buckets: int, cost: AllReduceCost, backward_s: float | None, ranks: int, strategy: str) -> Step:
    step = step_of_buckets(buckets)
    ready = dataclasses.replace(step.ready, backward_s=backward_s)
    return dataclasses.replace(step, cost=cost, ready=ready, world_size=ranks, strategy=strategy)


steps = st.builds(
    made,
    st.integers(1, 6),
    st.builds(AllReduceCost, st.floats(1e-6, 1e-2), st.floats(1e-12, 1e-8)),
    st.none() | st.floats(1e-5, 1.0),
    st.sampled_from((2, 8, 64)),
    st.sampled_from(("fixed", "optimal")),
)


@given(steps, st.sampled_from((None, 1, 2, 16, 1024)), st.sampled_from((None, "bfloat16", "float32")))
def test_no_prediction_beats_the_bound(step: Step, ranks: int | None, dtype: str | None) -> None:
    same = predict(step)
    assert (same.step.plan, same.communication_s, same.end_s) == (step.plan, step.communication_s, step.end_s)
    predicted = predict(step, ranks=ranks, dtype=dtype)
    assert predicted.end_s >= predicted.bound_s * (1 - 1e-9)
    assert predicted.end_s >= predicted.backward_s == step.backward_s
    assert {each.index for each in predicted.step.plan.gradients} == {each.index for each in step.plan.gradients}
    assert ranks != 1 or predicted.communication_s == predicted.exposed_s == 0


@given(st.sampled_from(LINKS), st.integers(2, 20_000), st.integers(2, 20_000))
def test_extrapolation_finds_the_link_again(link: Any, known: int, wanted: int) -> None:
    costs = [link.cost(ranks, formula=ring_or_tree) for ranks in (known, wanted)]
    found = extrapolated(costs[0], from_ranks=known, to_ranks=wanted)
    assert dataclasses.astuple(found)[:2] == pytest.approx(dataclasses.astuple(costs[1])[:2], rel=1e-9, abs=0)


STEP = dataclasses.replace(step_of_buckets(3), strategy="fixed")


def test_gradients_in_half_precision() -> None:
    predicted = predict(STEP, dtype="bfloat16")
    assert [sum(each.nbytes for each in step.plan.gradients) for step in (STEP, predicted.step)] == [
        STEP.plan.nbytes,
        STEP.plan.nbytes // 2,
    ]
    assert {each.key.reduction.wire for each in predicted.step.plan.buckets} == {"bfloat16"}
    assert [len(bucket.members) for bucket in predicted.step.plan.buckets] == [4, 4, 4]
    assert predicted.backward_s == STEP.backward_s


def test_two_levels_keep_the_size_of_their_nodes() -> None:
    levels = two_level_step(3)
    more = predict(levels, ranks=64).step.cost
    assert more.inside == levels.cost.inside
    assert more.between is not None
    assert levels.cost.between is not None
    assert more.between.alpha_s > levels.cost.between.alpha_s
    named = predict(levels, ranks=64, link="ethernet-25")
    assert named.basis.startswith("link: nvlink4 inside nodes of 8, ethernet-25 between them, nominal")
    with pytest.raises(dp_compile.ConfigError, match="12 ranks do not fill two nodes or more of 8"):
        predict(levels, ranks=12)


@pytest.mark.usefixtures("fake_group")
def test_a_new_plan_of_a_real_step_is_the_same() -> None:
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 128), nn.Tanh(), nn.Linear(128, 4))
    dp_compile.replicate(model, config=dp_compile.ReplicateConfig(backend="aot_eager"))
    torch.compile(model, backend="aot_eager")(torch.randn(5, 64)).sum().backward()
    seen = step_of(model)
    assert replanned(seen).plan == seen.plan
    measured = dataclasses.replace(seen, ready=dataclasses.replace(seen.ready, backward_s=0.001, basis="measured"))
    assert predict(measured, link="ethernet-25").step.plan.gradients == seen.plan.gradients


def test_refuses() -> None:
    alone = dataclasses.replace(STEP, world_size=1)
    for step, changes, message in (
        (STEP, {"ranks": 0}, "ranks must be an integer >= 1, got 0"),
        (STEP, {"link": "string"}, r"link must be one of nvlink4, .*, got 'string'"),
        (alone, {"ranks": 2}, "the step ran on 1 rank, so the cost on 2 is not known"),
    ):
        with pytest.raises(dp_compile.ConfigError, match=message):
            predict(step, **changes)
    assert predict(alone, ranks=2, link="loopback").communication_s > 0
