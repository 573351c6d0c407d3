"""Measured backwards: which launch and which wait belong to which bucket, what is kept, what is refused and why."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
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
from dp_compile.engine.ranges import BucketRanges
from dp_compile.insight.observe import step_of
from dp_compile.insight.profile import COMPILED_IN_IT
from dp_compile.insight.step import MeasuredStep, typical_step
from dp_compile.plan.buckets import BucketPlan, GradientSpec, Layout
from dp_compile.testing.ranks import Ranks

CONFIG = dp_compile.ReplicateConfig(backend="aot_eager", bucket_cap_mb=0.0004)
in_a_group = pytest.mark.usefixtures("fake_group")


def made(config: dp_compile.ReplicateConfig = CONFIG) -> tuple[nn.Module, Any]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(8, 8), nn.Tanh())))
    dp_compile.replicate(model, config=config)
    return model, torch.compile(model, backend="aot_eager")


def train(model: nn.Module, run: Any, times: int, batch: int = 4) -> None:
    for _ in range(times):
        model.zero_grad()
        run(torch.ones(batch, 8)).sum().backward()


@in_a_group
def test_code_that_draws_random_numbers_once_more() -> None:
    """As code of activation checkpointing does, by a higher order op: torch refuses those in a mode by default."""
    key, group = bucket_key("", "sum", "float32", "cpu"), dist.group.WORLD
    assert group is not None
    bucket = Layout(1).bucket([GradientSpec(0, "g0", (4,), (1,), 4, key)])
    replica: Any = SimpleNamespace(plan=BucketPlan((bucket,)), module=SimpleNamespace(number=7))
    again, state, ops = torch.ops.higher_order.run_with_rng_state, torch.get_rng_state(), torch.ops._c10d_functional
    with torch.profiler.profile() as profile, BucketRanges([replica]):
        ops.wait_tensor(ops.all_reduce(torch.ones(7), "sum", distributed.group_name(group)))  # of others
        with torch.profiler.record_function("ours"):
            pass
        drawn = again(state, torch.ops.aten.rand_like.default, torch.ones(4))
        ops.wait_tensor(ops.all_reduce(drawn, "sum", distributed.group_name(group)))
    torch.set_rng_state(state)
    torch.testing.assert_close(drawn, torch.rand(4), rtol=0, atol=0)
    events = sorted(profile.events(), key=lambda event: event.time_range.start)
    names = [each.name for each in events if each.name.startswith(("ours", "dp_compile::module"))]
    assert names == ["ours", "dp_compile::module 7 bucket 0 (g0) launch", "dp_compile::module 7 bucket 0 (g0) wait"]


@in_a_group
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_step_is_measured(backend: str) -> None:
    model, run = made(dp_compile.ReplicateConfig(backend=backend, bucket_cap_mb=0.0004))
    train(model, run, 2)
    captures, graphs = compiler.captures(), compiler.compiled_graphs()
    with dp_compile.measure(model) as measurement:
        train(model, run, 4)
    assert (compiler.captures(), compiler.compiled_graphs()) == (captures, graphs)
    step = step_of(model).measured
    assert step is not None
    assert step == measurement.step
    assert (len(measurement.backwards), measurement.why_not) == (4, "")
    assert len(step.buckets) == len(step_of(model).plan.buckets) > 1
    assert step.source == "measured by dp_compile.measure(), median of 4 backwards"
    assert step.step_s is not None
    assert step.step_s > step.backward_s
    for each in measurement.backwards:
        launches = [bucket.launch_s for bucket in each.buckets]
        assert launches == sorted(launches)
        for bucket in each.buckets:
            assert bucket.wait_s is not None
            assert 0 < bucket.launch_s < bucket.wait_s < bucket.wait_s + bucket.waited_s <= each.backward_s


@in_a_group
def test_what_is_not_measured_has_a_reason(caplog: pytest.LogCaptureFixture) -> None:
    model, run = made()
    with dp_compile.measure(model) as measurement:
        pass
    assert measurement.step is None
    assert f"nothing was measured: {measurement.why_not}" in [each.message for each in caplog.records]
    with dp_compile.measure(model) as measurement:
        train(model, run, 3)
        with dp_compile.no_sync(model):
            train(model, run, 1)
        with (
            pytest.raises(dp_compile.UnsupportedModuleError, match="profiler is active already"),
            dp_compile.measure(model),
        ):
            pass
    assert len(measurement.backwards) == 2
    assert measurement.why_not == f"1 backward: {COMPILED_IN_IT}"
    with pytest.raises(dp_compile.UnsupportedModuleError, match="replicate"), dp_compile.measure(nn.Linear(2, 2)):
        pass


def one_rank_measures() -> MeasuredStep | None:
    model, run = made(dp_compile.ReplicateConfig(backend="aot_eager", bucket_cap_mb=0.0004))
    if dist.get_rank() == 1:
        train(model, run, 8)
        return None
    with dp_compile.measure(model) as measurement:
        train(model, run, 8)
    assert measurement.not_measured == {COMPILED_IN_IT: 1}
    return measurement.step


def test_one_rank_measures_alone(ranks2: Ranks) -> None:
    step, _ = ranks2.run(one_rank_measures)
    assert len(step.buckets) == 2
    assert 0 < step.exposed_s < step.backward_s < step.step_s
    for bucket in step.buckets:
        assert 0 < bucket.launch_s < bucket.start_s < bucket.finish_s < step.backward_s


def test_a_typical_step_is_longer_than_its_backward() -> None:
    """The median backward is the last one, whose step is not known, and the others' steps are shorter."""
    known = [MeasuredStep(seconds, (), "clock", step_s=seconds + 0.5) for seconds in (1.0, 2.0, 9.0)]
    last = MeasuredStep(4.0, (), "clock")
    assert typical_step([known[0], known[1], last]).step_s == 2.5
    assert typical_step([known[0], last, known[2]]).step_s == 4.5


@in_a_group
def test_nothing_is_measured_unasked() -> None:
    """No mode sees the ops of compiled code."""
    model, run = made()
    with mock.patch.object(BucketRanges, "__torch_dispatch__", side_effect=AssertionError) as mode:
        train(model, run, 5)
    mode.assert_not_called()
    assert dp_compile.step_of(model).measured is None
    assert str(dp_compile.explain(model)).startswith("Estimated, not measured: ")
    assert " ms" not in str(dp_compile.report(model))


@in_a_group
def test_ops_are_measured_without_dynamo_around_each() -> None:
    """torch wraps what a mode does with an op in what takes longer than the op: a backward would seem twice as long."""
    dispatch = BucketRanges.__torch_dispatch__
    assert inspect.unwrap(dispatch) is dispatch
    assert not hasattr(dispatch, "_torchdynamo_disable")
    model, run = made()
    train(model, run, 2)
    dynamo_utils.counters.clear()
    with dp_compile.measure(model) as measurement:
        train(model, run, 3)
    assert len(measurement.backwards) == 3
    assert not dynamo_utils.counters["frames"]  # Dynamo is off there anyway


@in_a_group
def test_a_late_compilation_is_said(caplog: pytest.LogCaptureFixture) -> None:
    model, run = made()
    train(model, run, 12)
    assert "compiled new code" not in caplog.text
    train(model, run, 3, batch=6)
    (said,) = [each.message for each in caplog.records if "compiled new code" in each.message]
    assert said.startswith("synchronised backward 13 compiled new code, which added ")
