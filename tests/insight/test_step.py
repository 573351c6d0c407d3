"""What explains a step: read off a module, to JSON and back, on a predicted timeline."""

from __future__ import annotations

import dataclasses
import json

import hypothesis
import pytest
import torch
from graphs import bucket_key
from hypothesis import strategies as st
from steps import step_of_buckets, two_level_step
from torch import nn

import dp_compile
from dp_compile.engine.record import Placement
from dp_compile.insight.explain import explanation_of
from dp_compile.insight.observe import step_of
from dp_compile.insight.step import DECENTRALIZED, MeasuredBucket, MeasuredStep, Step, planned_buckets, with_waited_link
from dp_compile.passes.result import PeakMemory, Refusal
from dp_compile.plan.backends import FAKE, GLOO
from dp_compile.plan.buckets import BucketPlan, GradientSpec, Layout
from dp_compile.plan.cost import AllReduceCost
from dp_compile.plan.ready_times import ESTIMATED, ReadyTimes
from dp_compile.plan.reduction import WHOLE

KEY = bucket_key("", "sum", "float32", "cpu")
ONE, TWO = (
    GradientSpec(index, name, (25_000, 10), (10, 1), 4, KEY) for index, name in enumerate(("one.weight", "two.weight"))
)
LAYOUT = Layout(64)
STEP = Step(
    mode="python hooks",
    strategy="optimal",
    world_size=2,
    backend=GLOO,
    device="cpu",
    plan=BucketPlan((LAYOUT.bucket(KEY, [TWO], "why"), LAYOUT.bucket(KEY, [ONE], "because"))),
    ready=ReadyTimes({1: 0.5, 0: 1.0}, 0.010, "stated"),
    cost=AllReduceCost(0.001, 1e-9),
    cost_source="stated",
    memory=PeakMemory(10, "mm", 20),
    placements=(Placement("one.weight", 4, None),),
    refusals=(Refusal("node", "reason"),),
    backwards=(("captured", 3),),
    measured=MeasuredStep(0.02, (MeasuredBucket(0.001, None, 0.0), MeasuredBucket(0.002, 0.003, 0.004)), "clock"),
)


def test_the_predicted_timeline() -> None:
    """Each bucket is 1 MB: 1 ms and 1 ms. The second is launched when the backward ends."""
    times = [[round(second, 6) for second in bucket[:4]] for bucket in planned_buckets(STEP)]
    assert times == [[0.005, 0.005, 0.007, 0.0], [0.010, 0.010, 0.012, 0.002]]
    assert [stage.link for bucket in planned_buckets(STEP) for stage in bucket.stages] == [WHOLE] * 2
    assert STEP.communication_s == pytest.approx(0.004)


def test_a_busy_network_and_an_unknown_backward() -> None:
    """The backward is then taken to be as long as the bytes need, 2 ms, if it was not measured: 16 ms of compute."""
    assert dataclasses.replace(STEP, ready=dataclasses.replace(STEP.ready, backward_s=None)).backward_s == 0.016
    step = dataclasses.replace(STEP, measured=None, ready=dataclasses.replace(STEP.ready, backward_s=None))
    assert step.backward_s == pytest.approx(0.002)
    assert planned_buckets(step)[1][:4] == pytest.approx((0.002, 0.003, 0.005, 0.002))


def test_to_json_and_back() -> None:
    assert Step.from_json(STEP.to_json()) == STEP
    bare = dataclasses.replace(STEP, memory=None, measured=None, placements=(), refusals=())
    assert Step.from_json(bare.to_json()) == bare


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 7}, "version 7, readable is 3"),
        ({"surplus": 1}, "not a step file"),
        ({"cost": {"alpha_s": -1.0, "beta_s_per_byte": 0.0}}, "alpha_s must be >= 0"),
        ({"plan": {"version": 9}}, "the plan is of version 9"),
        ({"measured": {"buckets": 3}}, "not a step file"),
    ],
)
def test_refuses_other_files(change: dict[str, object], message: str) -> None:
    with pytest.raises(dp_compile.ConfigError, match=message):
        Step.from_json(json.dumps(json.loads(STEP.to_json()) | change))


def test_refuses_what_is_not_json() -> None:
    for text in ("", "[1]", "{}"):
        with pytest.raises(dp_compile.ConfigError, match="not a step file"):
            Step.from_json(text)


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize("options", [{}, {"bucket_cap_mb": 0.0001}])
def test_read_off_a_module(options: dict[str, float]) -> None:
    """Ready times come from the graph also where the plan needs none."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    dp_compile.replicate(model, config=dp_compile.ReplicateConfig(backend="aot_eager", **options))
    with pytest.raises(dp_compile.ModuleError, match="nothing to explain yet"):
        step_of(model)
    torch.compile(model, backend="aot_eager")(torch.randn(5, 8)).sum().backward()
    step = step_of(model)
    assert (step.strategy, step.backend, step.mode) == ("fixed" if options else "optimal", FAKE, "python hooks")
    assert step.ready.basis == ESTIMATED
    assert step.cost_source == "nominal for fake, not measured"
    assert step.plan == dp_compile.report(model).plan
    assert step.memory is not None
    assert len(planned_buckets(step)) == len(step.plan.buckets) > (1 if options else 0)


@pytest.mark.usefixtures("fake_group")
def test_says_where_the_cost_is_from() -> None:
    model, cost = nn.Linear(4, 4), AllReduceCost(1e-5, 1e-9)
    dp_compile.replicate(model, config=dp_compile.ReplicateConfig(backend="aot_eager", cost=cost))
    torch.compile(model, backend="aot_eager")(torch.randn(5, 4)).sum().backward()
    assert (step_of(model).cost, step_of(model).cost_source) == (cost, "given in the config")


# --- a link as slow as waits show ------------------------------------------------------------------------------------


def seen_on(step: Step, slower: float, ready: ReadyTimes | None = None) -> Step:
    """The step as a clock sees it on a network that is `slower` times as slow as its cost says.

    `ready`: when gradients really are ready, if that is not what the plan believes.
    """
    step = dataclasses.replace(step, cost_source=NOT_MEASURED)
    slow = dataclasses.replace(step, ready=ready or step.ready, cost=step.cost.scaled(slower))
    seen = [
        MeasuredBucket(each.ready_s, each.finish_s if each.exposed_s else None, each.exposed_s, wait_s=slow.backward_s)
        for each in planned_buckets(slow)
    ]
    end_s = max(slow.backward_s, *(each.finish_s or 0.0 for each in seen))
    return dataclasses.replace(step, measured=MeasuredStep(end_s, tuple(seen), "measured in the first steps"))


NOT_MEASURED = "nominal for gloo, not measured"


@hypothesis.given(n=st.integers(1, 9), slower=st.floats(0.02, 50.0))
def test_waits_say_how_slow_the_network_is(n: int, slower: float) -> None:
    step = seen_on(step_of_buckets(n), slower)
    known = with_waited_link(step)
    assert known.cost.alpha_s == pytest.approx(slower * step.cost.alpha_s)
    assert known.cost.beta_s_per_byte == pytest.approx(slower * step.cost.beta_s_per_byte)
    assert known.cost_source == "by what steps waited, for late ranks too"
    assert step.measured is not None
    assert max(each.finish_s for each in planned_buckets(known)) == pytest.approx(step.measured.backward_s)
    again = with_waited_link(seen_on(known, 1.0))  # of another measurement, as a trace of a step file is
    assert again.cost.alpha_s == pytest.approx(known.cost.alpha_s)


def test_what_was_over_in_time_is_a_bound() -> None:
    """One wait of the first bucket that the clock mistook, as of a rank that was not scheduled: others were over."""
    step = seen_on(step_of_buckets(4), 0.5)
    assert step.measured is not None
    first, *rest = step.measured.buckets
    hidden = tuple(dataclasses.replace(each, finish_s=None, waited_s=0.0) for each in rest)
    late = dataclasses.replace(first, finish_s=100 * step.backward_s, waited_s=1.0)
    known = with_waited_link(
        dataclasses.replace(step, measured=dataclasses.replace(step.measured, buckets=(late, *hidden)))
    )
    alone = dataclasses.replace(step, plan=BucketPlan(step.plan.buckets[:1]))
    alone = with_waited_link(dataclasses.replace(alone, measured=dataclasses.replace(step.measured, buckets=(late,))))
    assert known.cost.alpha_s < 2 * step.cost.alpha_s < 20 * step.cost.alpha_s < alone.cost.alpha_s


def test_ready_times_that_are_not_believed_leave_a_prediction() -> None:
    """All is there at 0.8 of what the plan believes: the network is known, the end still comes sooner than said."""
    step = step_of_buckets(5)
    shares = {index: 0.8 * share for index, share in step.ready.shares.items()}
    earlier = seen_on(step, 2.0, dataclasses.replace(step.ready, shares=shares))
    known = with_waited_link(earlier)
    assert known.cost.alpha_s == pytest.approx(2 * step.cost.alpha_s)
    text = " ".join(str(explanation_of(known)).split())
    assert "predicted end +" in text
    assert "cost=dp_compile.calibrate().cost (measures the link)" in text  # plans know nothing of it
    assert "predicted end +" not in " ".join(str(explanation_of(with_waited_link(seen_on(step, 2.0)))).split())


def test_waits_that_say_nothing_of_a_network() -> None:
    step = seen_on(step_of_buckets(3), 2.0)
    measured = step.measured
    assert measured is not None
    hidden = tuple(dataclasses.replace(each, finish_s=None, waited_s=0.0) for each in measured.buckets)
    before = tuple(dataclasses.replace(each, launch_s=1.0) for each in measured.buckets)  # another clock
    for buckets in (hidden, before, measured.buckets[:2]):
        other = dataclasses.replace(step, measured=dataclasses.replace(measured, buckets=buckets))
        assert with_waited_link(other) is other
    for changes in (
        {"measured": None},
        {"mode": DECENTRALIZED},
        {"world_size": 1},
        {"cost_source": "given in the config"},
    ):
        other = dataclasses.replace(step, **changes)
        assert with_waited_link(other) is other
    other = seen_on(two_level_step(3), 2.0)
    assert with_waited_link(other) is other
