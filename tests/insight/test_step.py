"""A step and a report: read off a module, to JSON and back, on a predicted timeline, as text."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from expecttest import assert_expected_inline
from graphs import bucket_key
from torch import nn

import dp_compile
from dp_compile.engine.record import CaptureRecord, Placement
from dp_compile.insight.observe import step_of
from dp_compile.insight.report import Report
from dp_compile.insight.step import MeasuredBucket, MeasuredStep, Step, planned_buckets
from dp_compile.passes.result import PeakMemory, Refusal
from dp_compile.plan.backends import FAKE, GLOO
from dp_compile.plan.buckets import BucketPlan, GradientSpec, Layout, plan_single
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


def test_to_json_and_back() -> None:
    assert Step.from_json(STEP.to_json()) == STEP
    bare = dataclasses.replace(STEP, memory=None, measured=None, placements=(), refusals=())
    assert Step.from_json(bare.to_json()) == bare


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 7}, "version 7, readable is 3"),
        ({"measured": {"buckets": 3}}, "not a step file"),
    ],
)
def test_refuses_other_files(change: dict[str, object], message: str) -> None:
    with pytest.raises(dp_compile.ConfigError, match=message):
        Step.from_json(json.dumps(json.loads(STEP.to_json()) | change))


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


# --- the text of records and reports ------------------------------------------------------------------------------


def test_report() -> None:
    key = bucket_key("0", "avg", "bfloat16", "cuda")
    plan = plan_single([GradientSpec(0, "head.weight", (8, 4), (4, 1), 2, key)])
    captures = [
        CaptureRecord(hooks=4, reductions=5, completed=0, collectives=2, graphs=1, cached=False, synced=synced)
        for synced in (True, False)
    ]
    text = str(Report("python hooks", 8, plan, tuple(captures), {"captured": 12, "eager hooks": 1}))
    assert_expected_inline(
        text,
        """\
mode: python hooks, 8 ranks, backwards: 12 captured, 1 eager hooks
plan: 1 bucket, 1 gradient, 64 B
    0        64 B      1 gradient  bfloat16 cuda avg  head.weight  (no bucketing)
captured backward 0: 4 gradients + 1 flag word -> 2 collectives, 1 graph
captured backward 1: without synchronisation, 1 graph""",
    )
