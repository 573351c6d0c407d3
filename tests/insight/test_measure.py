"""Measured backwards: which launch and which wait belong to which bucket, what is kept, what is refused and why."""

from __future__ import annotations

import contextlib
import inspect
import logging
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from graphs import bucket_key
from torch import nn
from torch._dynamo import utils as dynamo_utils

import dp_compile
from dp_compile._torch import compiler, distributed
from dp_compile.engine import calibration
from dp_compile.engine.events import BackwardListener, BucketEvents, Listeners
from dp_compile.insight.observe import step_of
from dp_compile.insight.step import MeasuredStep, typical_step
from dp_compile.plan.buckets import Bucket, BucketPlan, GradientSpec, Layout
from dp_compile.testing.ranks import Ranks

CONFIG = dp_compile.ReplicateConfig(backend="aot_eager")
KEY = bucket_key("", "sum", "float32", "cpu")


def mlp(layers: int = 3, width: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.Tanh())))


def train(model: nn.Module, run: Any, times: int, batch: int = 4) -> None:
    for _ in range(times):
        model.zero_grad()
        run(torch.ones(batch, 8)).sum().backward()


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


# --- which bucket -------------------------------------------------------------------------------------------------


class Notes(BackwardListener):
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def during(self, what: str, module: int, bucket: int) -> contextlib.AbstractContextManager[None]:
        self.heard.append(f"{what} {module}.{bucket}")
        return contextlib.nullcontext()


def bucket_of(*numels: int, apart: bool = False) -> Bucket:
    gradients = [GradientSpec(i, f"g{i}", (numel,), (1,), 4, KEY) for i, numel in enumerate(numels)]
    return Layout(1, frozenset(g.name for g in gradients) if apart else frozenset()).bucket(KEY, gradients, "")


@pytest.mark.usefixtures("fake_group")
class TestWhichBucket:
    def listen(self, buckets: list[Bucket]) -> tuple[Notes, BucketEvents]:
        notes = Notes()
        return notes, BucketEvents([BucketPlan(tuple(buckets))], [Listeners((notes,))])

    def test_code_that_draws_random_numbers_once_more(self) -> None:
        """As code of activation checkpointing does, by a higher order op: torch refuses those in a mode by default."""
        notes, events = self.listen([bucket_of(4)])
        again, state = torch.ops.higher_order.run_with_rng_state, torch.get_rng_state()
        with events:
            drawn = again(state, torch.ops.aten.rand_like.default, torch.ones(4))
            ops = torch.ops._c10d_functional
            ops.wait_tensor(ops.all_reduce(drawn, "sum", name()))
        torch.set_rng_state(state)
        torch.testing.assert_close(drawn, torch.rand(4), rtol=0, atol=0)
        assert notes.heard == ["launch 0.0", "wait 0.0"]

    def test_collectives_of_others_are_left_alone(self) -> None:
        notes, events = self.listen([bucket_of(4)])
        ops = torch.ops._c10d_functional
        with events:
            for numel, heard in ((7, []), (4, ["launch 0.0", "wait 0.0"]), (4, [])):
                notes.heard.clear()
                ops.wait_tensor(ops.all_reduce(torch.ones(numel), "sum", name()))
                assert notes.heard == heard


def name() -> str:
    group = dist.group.WORLD
    assert group is not None
    return distributed.group_name(group)


# --- measure() ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize(
    ("backend", "options"),
    [
        ("aot_eager", {}),
        ("inductor", {"bucket_cap_mb": 0.0004}),
    ],
)
def test_a_step_is_measured(backend: Any, options: dict[str, Any]) -> None:
    config = dp_compile.ReplicateConfig(backend=backend, **options)
    model = dp_compile.replicate(mlp(), config=config)
    run = torch.compile(model, backend="aot_eager")
    train(model, run, 2)
    captures, graphs = compiler.captures(), compiler.compiled_graphs()
    with dp_compile.measure(model) as measurement:
        train(model, run, 4)
    assert (compiler.captures(), compiler.compiled_graphs()) == (captures, graphs)
    step = step_of(model).measured
    assert step is not None
    assert step == measurement.step
    assert (len(measurement.backwards), measurement.why_not) == (4, "")
    assert len(step.buckets) == len(step_of(model).plan.buckets)
    assert step.source == "measured by dp_compile.measure(), median of 4 backwards"
    assert step.step_s is not None
    assert step.step_s > step.backward_s
    for each in measurement.backwards:
        launches = [bucket.launch_s for bucket in each.buckets]
        assert launches == sorted(launches)
        for bucket in each.buckets:
            assert bucket.wait_s is not None
            assert 0 < bucket.launch_s < bucket.wait_s < bucket.wait_s + bucket.waited_s <= each.backward_s


@pytest.mark.usefixtures("fake_group")
def test_what_is_not_measured_has_a_reason() -> None:
    model = dp_compile.replicate(mlp(), config=CONFIG)
    run = torch.compile(model, backend="aot_eager")
    with dp_compile.measure(model) as measurement:
        train(model, run, 3)
        with dp_compile.no_sync(model):
            train(model, run, 1)
    assert len(measurement.backwards) == 2
    assert measurement.not_measured == {"code was compiled in it": 1}
    assert measurement.why_not == "1 backward: code was compiled in it"


@pytest.mark.usefixtures("fake_group")
def test_nothing_to_measure_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    model = dp_compile.replicate(mlp(), config=CONFIG)
    train(model, torch.compile(model, backend="aot_eager"), 2)
    caplog.clear()
    with dp_compile.measure(model) as measurement:
        pass
    assert measurement.step is None
    assert step_of(model).measured is None
    assert measurement.why_not == "no synchronised backward has ended inside the block"
    (record,) = [each for each in caplog.records if each.name == "dp_compile.measuring"]
    assert (record.levelno, record.message) == (logging.WARNING, f"nothing was measured: {measurement.why_not}")


@pytest.mark.usefixtures("fake_group")
def test_refuses() -> None:
    with pytest.raises(dp_compile.ModuleError, match="replicate"), dp_compile.measure(mlp()):
        pass
    model = dp_compile.replicate(mlp(), config=CONFIG)
    with (
        dp_compile.measure(model),
        pytest.raises(dp_compile.ModuleError, match="being measured already"),
        dp_compile.measure(model),
    ):
        pass
    with dp_compile.measure(model):
        pass


def one_rank_measures() -> tuple[int, int, int]:
    torch._dynamo.reset()
    model = dp_compile.replicate(mlp(), config=dp_compile.ReplicateConfig(backend="aot_eager", replan_after=2))
    run = torch.compile(model, backend="aot_eager")
    if dist.get_rank() == 1:
        train(model, run, 8)
        return 0, 0, len(dp_compile.report(model).plan.buckets)
    with dp_compile.measure(model) as measurement:
        train(model, run, 8)
    assert measurement.step is not None
    skipped = measurement.not_measured.total()
    return len(measurement.backwards), skipped, len(dp_compile.report(model).plan.buckets)


def test_one_rank_measures_alone_and_a_new_plan_comes_in_between(ranks2: Ranks) -> None:
    """8 backwards: compiled in the first, and in the fourth if its plan differs."""
    (measured, skipped, buckets), (_, _, buckets_of_other) = ranks2.run(one_rank_measures)
    assert measured > 0
    assert measured + skipped == 8
    assert buckets == buckets_of_other


# --- the median ---------------------------------------------------------------------------------------------------


def test_a_typical_step_is_longer_than_its_backward() -> None:
    """The median backward is the last one, whose step is not known, and the others' steps are shorter."""
    known = [MeasuredStep(seconds, (), "clock", step_s=seconds + 0.5) for seconds in (1.0, 2.0, 9.0)]
    last = MeasuredStep(4.0, (), "clock")
    assert typical_step([known[0], known[1], last]).step_s == 2.5
    assert typical_step([known[0], last, known[2]]).step_s == 4.5


# --- measured when asked for, and what is logged ---------------------------------------------------------------


@pytest.mark.usefixtures("fake_group")
def test_nothing_is_measured_unasked() -> None:
    """No clock is made, and no mode sees the ops of compiled code."""
    model = dp_compile.replicate(mlp(), config=CONFIG)
    with (
        mock.patch("dp_compile.engine.events.LaunchClock.__init__", side_effect=AssertionError) as clock,
        mock.patch.object(BucketEvents, "__torch_dispatch__", side_effect=AssertionError) as mode,
    ):
        train(model, torch.compile(model, backend="aot_eager"), 5)
    clock.assert_not_called()
    mode.assert_not_called()
    assert dp_compile.step_of(model).measured is None
    assert str(dp_compile.explain(model)).startswith("Estimated, not measured: ")
    assert " ms" not in str(dp_compile.report(model))


@pytest.mark.usefixtures("fake_group")
def test_ops_are_listened_to_without_dynamo_around_each() -> None:
    """torch wraps what a mode does with an op in what takes longer than the op: a backward would seem twice as long."""
    dispatch = BucketEvents.__torch_dispatch__
    assert inspect.unwrap(dispatch) is dispatch
    assert not hasattr(dispatch, "_torchdynamo_disable")
    model = dp_compile.replicate(mlp(), config=CONFIG)
    run = torch.compile(model, backend="aot_eager")
    train(model, run, 2)
    dynamo_utils.counters.clear()
    with dp_compile.measure(model) as measurement:
        train(model, run, 3)
    assert len(measurement.backwards) == 3
    assert not dynamo_utils.counters["frames"]  # Dynamo is off there anyway


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
    train(model, torch.compile(model, backend="aot_eager"), 3)
    (said,) = [each.message for each in caplog.records if "its hooks run eagerly" in each.message]
    assert "look_at_it" in said
    with dp_compile.measure(model) as measurement:
        train(model, torch.compile(model, backend="aot_eager"), 2)
    assert measurement.step is not None
    assert len(measurement.step.buckets) == len(dp_compile.step_of(model).plan.buckets)


# --- what an all-reduce costs ---------------------------------------------------------------------------------------


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


# --- what was silent ------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("fake_group")
def test_a_late_compilation_is_said(caplog: pytest.LogCaptureFixture) -> None:
    model = dp_compile.replicate(mlp(), config=CONFIG)
    run = torch.compile(model, backend="aot_eager")
    train(model, run, 12)
    assert not [each for each in caplog.records if "compiled anew" in each.message]
    train(model, run, 1, batch=6)
    (said,) = [each.message for each in caplog.records if "compiled anew" in each.message]
    assert said.startswith("synchronised backward 13 was compiled anew: the step took ")
    train(model, run, 2, batch=6)
    assert sum("compiled anew" in each.message for each in caplog.records) == 1
