"""Measured backwards: which launch and which wait belong to which bucket, what is kept, what is refused and why."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from graphs import bucket_key
from torch import nn

import dp_compile
from dp_compile._torch import compiler, distributed
from dp_compile.engine.bucket_events import BucketEvents
from dp_compile.engine.launch_clock import BLOCKED_S, LaunchClock
from dp_compile.engine.observers import Audience, BackwardListener
from dp_compile.insight.observe import step_of
from dp_compile.insight.step import MeasuredBucket, MeasuredStep, typical_step
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

    def launch(self, module: int, bucket: int) -> contextlib.AbstractContextManager[None]:
        self.heard.append(f"launch {module}.{bucket}")
        return contextlib.nullcontext()

    def wait(self, module: int, bucket: int) -> contextlib.AbstractContextManager[None]:
        self.heard.append(f"wait {module}.{bucket}")
        return contextlib.nullcontext()


def bucket_of(*numels: int, apart: bool = False) -> Bucket:
    gradients = [GradientSpec(i, f"g{i}", (numel,), (1,), 4, KEY) for i, numel in enumerate(numels)]
    return Layout(1, frozenset(g.name for g in gradients) if apart else frozenset()).bucket(KEY, gradients, "")


@pytest.mark.usefixtures("fake_group")
class TestWhichBucket:
    def listen(self, buckets: list[Bucket]) -> tuple[Notes, BucketEvents]:
        notes = Notes()
        return notes, BucketEvents([BucketPlan(tuple(buckets))], Audience((notes,)))

    def test_waits_out_of_order(self) -> None:
        notes, events = self.listen([bucket_of(4), bucket_of(5)])
        launch, wait = torch.ops._c10d_functional.all_reduce, torch.ops._c10d_functional.wait_tensor
        with events:
            one, two = launch(torch.ones(4), "sum", name()), launch(torch.ones(5), "sum", name())
            wait(two)
            wait(one)
        assert notes.heard == ["launch 0.0", "launch 0.1", "wait 0.1", "wait 0.0"]

    def test_in_place_and_grouped(self) -> None:
        """Inductor launches in place; a grouped collective has a wait for each tensor."""
        notes, events = self.listen([bucket_of(4), bucket_of(2, 3, apart=True)])
        ops = torch.ops._c10d_functional
        with events:
            flat = ops.all_reduce_(torch.ones(4), "sum", name())
            apart = ops.all_reduce_coalesced_([torch.ones(2), torch.ones(3)], "sum", name())
            for each in (flat, *apart):
                ops.wait_tensor(each)
        assert notes.heard == ["launch 0.0", "launch 0.1", "wait 0.0", "wait 0.1", "wait 0.1"]

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


def test_a_wait_that_returns_at_once_says_nothing_about_the_finish() -> None:
    clock = LaunchClock(torch.device("cpu"))
    for bucket in (0, 1):
        with clock.launch(0, bucket):
            pass
    with clock.wait(0, 1):
        while clock._waits == [] and LaunchClock(torch.device("cpu")).start_s_after(clock) < 20 * BLOCKED_S:
            pass
    with clock.wait(0, 0):
        pass
    clock.__exit__(None)
    buckets = clock.buckets(2)
    assert buckets is not None
    (first, second), seen = buckets, clock.result()
    assert second.finish_s == pytest.approx(second.wait_s + second.waited_s)
    assert second.waited_s > BLOCKED_S
    assert seen is not None
    assert seen.launch_s == (first.launch_s, second.launch_s)
    assert seen.backward_s == second.wait_s <= first.wait_s
    assert clock.buckets(3) is None


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
def test_hooks_that_run_eagerly_are_measured_too() -> None:
    model = dp_compile.replicate(mlp(), config=CONFIG, bucket_cap_mb=0.0004)
    run = torch.compile(model, backend="aot_eager")
    train(model, run, 1)
    with torch.autograd.set_detect_anomaly(True, check_nan=False), dp_compile.measure(model) as measurement:
        train(model, run, 3)
    assert measurement.step is not None
    assert len(measurement.backwards) == 3
    assert len(measurement.step.buckets) == len(step_of(model).plan.buckets) > 1


def comm_hook(model: nn.Module) -> Iterator[None]:
    assert isinstance(model, dp_compile.ReplicatedModule)
    model.register_comm_hook(None, as_it_is)
    train(model, model, 2)
    yield
    train(model, model, 1)


def as_it_is(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Reduces nothing; the fake group's futures hold nothing."""
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def without_passes(model: nn.Module) -> Iterator[None]:
    run = torch.compile(model, backend="aot_eager")
    train(model, run, 2)
    yield
    train(model, run, 1)


def two_modules(model: nn.Module) -> Iterator[None]:
    other = dp_compile.replicate(mlp(), config=CONFIG)
    run = torch.compile(nn.Sequential(model, other), backend="aot_eager")
    train(other, run, 2)
    yield
    train(other, run, 1)


def no_backward(model: nn.Module) -> Iterator[None]:
    train(model, torch.compile(model, backend="aot_eager"), 2)
    yield


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize(
    ("scenario", "options", "reason"),
    [
        (comm_hook, {}, "1 backward: torch's C\\+\\+ reducer reduces it"),
        (without_passes, {"passes": ()}, "1 backward: no pass makes buckets"),
        (two_modules, {}, "1 backward: it is of several replicated modules"),
        (no_backward, {}, "no synchronised backward has ended inside the block"),
    ],
)
def test_nothing_to_measure_is_a_warning(
    scenario: Any, options: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = dp_compile.replicate(mlp(), config=CONFIG, **options)
    steps = scenario(model)
    next(steps)
    caplog.clear()
    with dp_compile.measure(model) as measurement:
        next(steps, None)
    assert measurement.step is None
    assert step_of(model).measured is None
    assert re.match(reason, measurement.why_not)
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


def test_the_typical_step() -> None:
    def step(launch_s: float, finish_s: float | None, step_s: float | None) -> MeasuredStep:
        bucket = MeasuredBucket(launch_s, finish_s, 0.5, wait_s=2 * launch_s)
        return MeasuredStep(3 * launch_s, (bucket,), "clock", 1, step_s=step_s)

    fast, middle, slow = step(1.0, 4.0, 9.0), step(2.0, None, 11.0), step(4.0, 6.0, None)
    assert typical_step([slow, fast, middle]) == dataclasses.replace(middle, step_s=6.0 + (6.0 + 5.0) / 2)
    assert typical_step([fast, slow]) == fast


def test_a_typical_step_is_longer_than_its_backward() -> None:
    """The median backward is the last one, whose step is not known, and the others' steps are shorter."""
    known = [MeasuredStep(seconds, (), "clock", step_s=seconds + 0.5) for seconds in (1.0, 2.0, 9.0)]
    last = MeasuredStep(4.0, (), "clock")
    assert typical_step([known[0], known[1], last]).step_s == 2.5
    assert typical_step([known[0], last, known[2]]).step_s == 4.5
