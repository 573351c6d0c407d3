"""One truth of a step: what is timed unasked, what `calibrate` found, and that nothing assumed looks measured."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import re
from collections.abc import Iterator
from typing import Any
from unittest import mock

import hypothesis
import pytest
import torch
import torch.distributed as dist
from hypothesis import strategies as st
from steps import step_of_buckets, two_level_step
from torch import nn
from torch._dynamo import utils as dynamo_utils

import dp_compile
from dp_compile.engine import calibration
from dp_compile.engine.bucket_events import BucketEvents
from dp_compile.engine.calibration import calibrated
from dp_compile.insight.explanation import explanation_of
from dp_compile.insight.explanation.exposure import slowest_part
from dp_compile.insight.first_steps import FIRST, observer
from dp_compile.insight.step import DECENTRALIZED, MeasuredBucket, MeasuredStep, Step, planned_buckets, with_waited_link
from dp_compile.insight.timelines import timeline_page, timeline_picture, timeline_trace
from dp_compile.insight.timelines.events import MOST_LAYERS, timeline_of
from dp_compile.modules.replicated_module import replica_of
from dp_compile.plan.buckets import BucketPlan
from dp_compile.plan.cost import AllReduceCost
from dp_compile.plan.ready_times import ESTIMATED, ModelCollective, ReadyTimes

CONFIG = dp_compile.ReplicateConfig(backend="aot_eager")


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


def mlp() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    return dp_compile.replicate(model, config=CONFIG)


def train(model: nn.Module, times: int, run: Any = None, batch: int = 4) -> None:
    run = run or torch.compile(model, backend="aot_eager")
    for _ in range(times):
        model.zero_grad()
        run(torch.ones(batch, 8)).sum().backward()


# --- timed unasked ------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("fake_group")
def test_report_and_explain_say_the_same_backward() -> None:
    model = mlp()
    train(model, 1)
    assert "not known, nobody has timed the backward" in str(dp_compile.explain(model))
    assert " ms" not in str(dp_compile.report(model))
    train(model, 3)
    step, report = dp_compile.step_of(model), str(dp_compile.report(model))
    assert step.measured is not None
    assert "measured in the first steps, median of" in step.measured.source
    (said,) = re.findall(r"^backward: (\S+) ms", report, re.MULTILINE)
    assert float(said) == pytest.approx(step.measured.backward_s * 1e3, rel=0.01)
    text = str(dp_compile.explain(model))
    assert text.count("(taken)") == 1
    assert "Compute-bound" in text or "Communication-bound" in text


@pytest.mark.usefixtures("fake_group")
def test_only_the_first_ones_and_none_that_compiles() -> None:
    model = mlp()
    run = torch.compile(model, backend="aot_eager")
    train(model, FIRST, run)  # the first one compiles
    replica = replica_of(model)
    assert len(observer._timed[replica].clocks) == FIRST - 1
    train(model, 5, run)
    assert len(observer._timed[replica].clocks) == FIRST
    with mock.patch("dp_compile.insight.first_steps.LaunchClock") as made:
        train(model, 1, run)
    made.assert_not_called()
    with dp_compile.measure(model):
        train(model, 2, run)
    measured = dp_compile.step_of(model).measured
    assert measured is not None
    assert measured.source.startswith("measured by dp_compile.measure()")


@pytest.mark.usefixtures("fake_group")
def test_ops_are_listened_to_without_dynamo_around_each() -> None:
    """torch wraps what a mode does with an op in what takes longer than the op: a backward would seem twice as long."""
    dispatch = BucketEvents.__torch_dispatch__
    assert inspect.unwrap(dispatch) is dispatch
    assert not hasattr(dispatch, "_torchdynamo_disable")
    model = mlp()
    run = torch.compile(model, backend="aot_eager")
    train(model, 2, run)
    dynamo_utils.counters.clear()
    train(model, 3, run)
    assert len(observer._timed[replica_of(model)].clocks) >= 3
    assert not dynamo_utils.counters["frames"]  # Dynamo is off there anyway


@pytest.mark.usefixtures("fake_group")
def test_a_new_plan_starts_anew() -> None:
    config = dp_compile.ReplicateConfig(backend="aot_eager", replan_after=2)
    model = dp_compile.replicate(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), config=config)
    run = torch.compile(model, backend="aot_eager")
    train(model, 3, run)
    before = list(observer._timed[replica_of(model)].clocks)
    train(model, 3, run)
    assert before
    assert not set(map(id, before)) & set(map(id, observer._timed[replica_of(model)].clocks))


class Breaks(nn.Module):
    """Its backward breaks: a hook on an activation looks at a number."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.one(x)
        if y.requires_grad:
            y.register_hook(look_at_it)
        return self.two(y)


def look_at_it(grad: torch.Tensor) -> None:
    torch._dynamo.graph_break()


@pytest.mark.usefixtures("fake_group")
def test_a_backward_that_breaks_is_measured_and_the_log_says_what_broke_it(caplog: pytest.LogCaptureFixture) -> None:
    model = dp_compile.replicate(Breaks(), config=CONFIG)
    train(model, 3)
    step = dp_compile.step_of(model)
    assert not step.deferred
    assert step.measured is not None
    assert len(step.measured.buckets) == len(step.plan.buckets)
    (said,) = [each.message for each in caplog.records if "its hooks run eagerly" in each.message]
    assert "look_at_it" in said
    with dp_compile.measure(model) as measurement:
        train(model, 2)
    assert measurement.step is not None


# --- what an all-reduce costs ---------------------------------------------------------------------------------------


@pytest.fixture
def known() -> Iterator[AllReduceCost]:
    cost = AllReduceCost(1e-3, 2e-9)
    assert dist.group.WORLD is not None
    calibration._known[dist.group.WORLD] = {"cpu": cost}
    yield cost
    calibration._known.clear()


@pytest.mark.usefixtures("fake_group")
def test_a_sweep_that_shows_no_bandwidth_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that does other things: one sweep in which small messages took as long as large ones is no result."""
    sweeps: list[int] = []

    def seconds(nbytes: int, *_: object) -> float:
        sweeps.append(nbytes)
        return 1e-3 if sweeps.count(nbytes) <= busy else 1e-4 + 1e-8 * nbytes

    monkeypatch.setattr(calibration, "_seconds", seconds)
    monkeypatch.setattr(calibration, "_known", {})
    busy = 1
    cost = calibration.calibrate().cost
    assert cost.beta_s_per_byte > 0
    assert len(sweeps) == 2 * len(calibration.SIZES)
    sweeps.clear()
    busy = calibration.SWEEPS
    with pytest.raises(
        dp_compile.ConfigError,
        match=r"1,024 to 16,777,216 bytes took 1 to 1 ms, not more for more bytes, in 3 sweeps\. Calibrate again when",
    ):
        calibration.calibrate()
    assert len(sweeps) == 3 * len(calibration.SIZES)


@pytest.mark.usefixtures("fake_group")
def test_what_calibrate_found_is_said_and_not_planned_with(known: AllReduceCost) -> None:
    assert dist.group.WORLD is not None
    model = mlp()
    train(model, 1)
    step = dp_compile.step_of(model)
    assert (step.cost, step.cost_source) == (known, "measured by calibrate()")
    replica = replica_of(model)
    assert replica.certificate is not None
    assert replica.certificate.cost != known
    assert calibrated(dist.group.WORLD, torch.device("cuda"), with_levels=False) is None
    assert calibrated(dist.group.WORLD, torch.device("cpu"), with_levels=True) is None


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
    text = str(explanation_of(known))
    assert text.count("(taken)") == 0
    assert "later than measured" in text
    assert "cost=dp_compile.calibrate().cost (measures the link)" in text  # plans know nothing of it
    fitted = str(explanation_of(with_waited_link(seen_on(step, 2.0))))
    assert fitted.count("(taken)") == 2
    assert "than measured" not in fitted


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


@pytest.mark.usefixtures("fake_group")
def test_predictions_rest_on_waits_until_somebody_calibrates(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp()
    train(model, 4)
    nominal = dp_compile.step_of(model)  # this group waits for nothing
    assert nominal.cost_source == "nominal for fake, not measured"
    monkeypatch.setattr(observer, "seen", lambda _: seen_on(nominal, 3.0).measured)
    step = dp_compile.step_of(model)
    assert step.cost_source == "by what steps waited, for late ranks too"
    assert step.cost.alpha_s == pytest.approx(3 * nominal.cost.alpha_s)
    text = str(dp_compile.explain(model))
    assert text.count("(taken)") == 3  # compute, what is exposed, and the end: the network was fitted to them
    assert "the end is predicted" not in text
    monkeypatch.setattr(calibration, "_known", {dist.group.WORLD: {"cpu": AllReduceCost(1e-3, 2e-9)}})
    assert dp_compile.step_of(model).cost_source == "measured by calibrate()"


# --- what is assumed, and what is slow ------------------------------------------------------------------------------


def assumed(step: Step) -> Step:
    return dataclasses.replace(step, ready=dataclasses.replace(step.ready, backward_s=None, basis=ESTIMATED))


def test_an_assumed_timeline_has_no_milliseconds_and_is_hatched() -> None:
    step = assumed(step_of_buckets(5))
    page, picture = timeline_page(step), timeline_picture(step)
    assert not re.search(r"\d ms\b", page.split("<script>")[0])
    assert not re.search(r"\d ms\b", picture)
    assert "url(#assumed)" in picture
    assert '"assumed":true' in page
    assert "url(#assumed)" not in timeline_picture(step_of_buckets(5))
    assert "times assumed" in str(timeline_trace(step)["traceEvents"])
    text = str(explanation_of(step))
    assert not re.search(r"\d ms\b", text.split("Exposed")[1])
    assert "in % of the backward" in text


def test_layers_fill_the_compute_and_are_few() -> None:
    step = step_of_buckets(40, per_bucket=5)
    (view,) = timeline_of(step).views
    assert 1 < len(view.layers) <= MOST_LAYERS
    assert view.layers[0].start_s == 0
    assert view.layers[-1].end_s == pytest.approx(view.backward_s)
    assert all(one.end_s == other.start_s for one, other in zip(view.layers, view.layers[1:], strict=False))
    assert view.layers[0].name == "blocks.39 .. blocks.37"
    few = timeline_of(step_of_buckets(2)).views[0].layers
    assert [each.name for each in few] == [
        "blocks.1.attention.out", "blocks.1.attention.qkv", "blocks.0.mlp.shrink", "blocks.0.mlp.expand",
        "blocks.0.attention.out", "blocks.0.attention.qkv",
    ]  # fmt: skip


def test_the_slow_part_is_named_from_launches_if_they_were_measured() -> None:
    step = dataclasses.replace(step_of_buckets(4, per_bucket=1), measured=None)
    even = dataclasses.replace(step, ready=ReadyTimes({index: 1 - index / 4 for index in range(4)}, 0.1, "stated"))
    names = [bucket.members[0].gradient.name for bucket in even.plan.buckets]
    slow = slowest_part(dataclasses.replace(even, ready=ReadyTimes({3: 0.1, 2: 0.8, 1: 0.9, 0: 1.0}, 0.1, "stated")))
    assert slow is not None
    assert (slow.after, slow.before, slow.measured) == (names[0], names[1], False)
    assert slow.share == pytest.approx(0.7)
    launched = [MeasuredBucket(at_s, None, 0.0) for at_s in (0.01, 0.02, 0.09, 0.1)]
    seen = slowest_part(dataclasses.replace(even, measured=MeasuredStep(0.1, tuple(launched), "stated", 3)))
    assert seen is not None
    assert (seen.after, seen.before, seen.measured) == (names[1], names[2], True)
    assert seen.share == pytest.approx(0.7)
    text = str(explanation_of(dataclasses.replace(even, measured=MeasuredStep(0.1, tuple(launched), "stated", 3))))
    line = " ".join(text.split())
    assert f"Compute: 70.0 ms, 70% of the backward, lie between {names[1]} and {names[2]}, measured on rank 3." in line


def test_what_the_model_sends_has_a_lane() -> None:
    step = step_of_buckets(2)
    sent = tuple(ModelCollective("all_reduce", 4, 2**20, at, at + 0.05) for at in (0.2, 0.6))
    step = dataclasses.replace(step, ready=dataclasses.replace(step.ready, collectives=sent))
    assert Step.from_json(step.to_json()) == step
    (view,) = timeline_of(step).views
    assert [each.name for each in view.sends] == ["all_reduce 1.0 MiB, 4 ranks"] * 2
    assert [each.start_s for each in view.sends] == pytest.approx([0.2 * step.backward_s, 0.6 * step.backward_s])
    assert "model sends" in timeline_picture(step)
    assert '["model sends",[["all_reduce 1.0 MiB, 4 ranks",' in timeline_page(step)
    events = timeline_trace(step)["traceEvents"]
    (lane,) = [each["tid"] for each in events if each["args"].get("name") == "model sends"]
    assert sum(each["tid"] == lane and each["ph"] == "X" for each in events) == 2
    text = " ".join(str(explanation_of(step)).split())
    said = (
        "Beside reductions of gradients the backward sends 2 all_reduces over 4 ranks, 2.0 MiB: 10% of it, estimated."
    )
    assert said in text
    alone = step_of_buckets(2)
    for drawn in (timeline_picture(alone), timeline_page(alone).split("<script>")[1], str(timeline_trace(alone))):
        assert "model sends" not in drawn


def test_slow_compute_stands_among_what_would_help() -> None:
    """Of a step that computes longer than it communicates, buckets are the smaller matter."""
    names = [each.name for each in step_of_buckets(4, per_bucket=1).plan.gradients]
    step = dataclasses.replace(
        step_of_buckets(4, per_bucket=1), ready=ReadyTimes({3: 0.1, 2: 0.8, 1: 0.9, 0: 1.0}, 0.1, "")
    )
    (half,) = [each for each in explanation_of(step).advice if each.change.startswith("half the compute")]
    assert half.change == f"half the compute between {names[0]} and {names[1]}"
    assert half.gain_s == pytest.approx(0.035, abs=0.001)  # 70 ms of 100 are there, and the last bucket is exposed
    first = dataclasses.replace(step, ready=ReadyTimes({3: 0.7, 2: 0.8, 1: 0.9, 0: 1.0}, 0.1, ""))
    assert f"half the compute before {names[0]} is ready" in [each.change for each in explanation_of(first).advice]
    communication_bound = dataclasses.replace(step, ready=ReadyTimes({3: 0.1, 2: 0.8}, 0.01, ""))
    assert not [each for each in explanation_of(communication_bound).advice if "half the compute" in each.change]


# --- what was silent ------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("fake_group")
def test_a_warm_up_says_how_far_it_is(caplog: pytest.LogCaptureFixture) -> None:
    model, said = mlp(), []
    run = torch.compile(model, backend="aot_eager")
    batches = [torch.ones(4, 8)]
    with caplog.at_level(logging.INFO, "dp_compile.warmup"):
        record = dp_compile.warmup(run, batches, lambda x: run(x).sum(), gradients_kept=False, progress=said.append)
    assert said == [each.message for each in caplog.records if each.name == "dp_compile.warmup"]
    assert said[0].startswith("warm-up, round 1: backward 1 of ")
    assert sum(int(re.findall(r"compiled (\d+) graph", line)[0]) for line in said) == record.graphs


@pytest.mark.usefixtures("fake_group")
def test_a_late_compilation_is_said(caplog: pytest.LogCaptureFixture) -> None:
    model = mlp()
    run = torch.compile(model, backend="aot_eager")
    train(model, 12, run)
    assert not [each for each in caplog.records if "compiled anew" in each.message]
    train(model, 1, run, batch=6)
    (said,) = [each.message for each in caplog.records if "compiled anew" in each.message]
    assert said.startswith("synchronised backward 13 was compiled anew: the step took ")
    train(model, 2, run, batch=6)
    assert sum("compiled anew" in each.message for each in caplog.records) == 1


@pytest.mark.usefixtures("fake_group")
def test_after_a_warm_up_every_compilation_is_said(caplog: pytest.LogCaptureFixture) -> None:
    model = mlp()
    run = torch.compile(model, backend="aot_eager")
    dp_compile.warmup(run, [torch.ones(4, 8)], lambda x: run(x).sum(), accumulation=False, gradients_kept=False)
    train(model, 2, run)
    assert not [each for each in caplog.records if "compiled anew" in each.message]
    train(model, 1, run, batch=6)
    assert [each for each in caplog.records if "synchronised backward 3 was compiled anew" in each.message]
