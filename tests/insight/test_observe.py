"""What is read off a module: the report and the step agree, nothing is measured unasked, and what logs announce."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo import utils as dynamo_utils

import dp_compile
from dp_compile.engine import calibration
from dp_compile.engine.bucket_events import BucketEvents
from dp_compile.engine.calibration import calibrated
from dp_compile.modules.replicated_module import replica_of
from dp_compile.plan.cost import AllReduceCost

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


# --- measured when asked for ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("fake_group")
def test_nothing_is_measured_unasked() -> None:
    """No clock is made, and no mode sees the ops of compiled code."""
    model = mlp()
    with (
        mock.patch("dp_compile.engine.launch_clock.LaunchClock.__init__", side_effect=AssertionError) as clock,
        mock.patch.object(BucketEvents, "__torch_dispatch__", side_effect=AssertionError) as mode,
    ):
        train(model, 5)
    clock.assert_not_called()
    mode.assert_not_called()
    assert dp_compile.step_of(model).measured is None
    assert str(dp_compile.explain(model)).startswith("Estimated, not measured: ")
    assert " ms" not in str(dp_compile.report(model))


@pytest.mark.usefixtures("fake_group")
def test_report_and_explain_give_the_same_backward() -> None:
    model = mlp()
    train(model, 2)
    with dp_compile.measure(model):
        train(model, 3)
    step, report = dp_compile.step_of(model), str(dp_compile.report(model))
    assert step.measured is not None
    (shown,) = re.findall(r"^backward: (\S+) ms", report, re.MULTILINE)
    assert float(shown) == pytest.approx(step.measured.backward_s * 1e3, rel=0.01)
    assert "measured on rank 0" in str(dp_compile.explain(model)).splitlines()[0]


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
    with dp_compile.measure(model) as measurement:
        train(model, 3, run)
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
    train(model, 3)
    assert not dp_compile.step_of(model).deferred
    (said,) = [each.message for each in caplog.records if "its hooks run eagerly" in each.message]
    assert "look_at_it" in said
    with dp_compile.measure(model) as measurement:
        train(model, 2)
    assert measurement.step is not None
    assert len(measurement.step.buckets) == len(dp_compile.step_of(model).plan.buckets)


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


# --- what was silent ------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("fake_group")
def test_a_warm_up_says_how_far_it_is(caplog: pytest.LogCaptureFixture) -> None:
    model = mlp()
    run = torch.compile(model, backend="aot_eager")
    batches = [torch.ones(4, 8)]
    with caplog.at_level(logging.INFO, "dp_compile.warmup"):
        record = dp_compile.warmup(run, batches, lambda x: run(x).sum(), gradients_kept=False)
    said = [each.message for each in caplog.records if each.name == "dp_compile.warmup"]
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
