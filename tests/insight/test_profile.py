"""A trace of torch.profiler: the names of our collectives in it, and what is read off it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from graphs import bucket_key
from steps import step_of_buckets
from torch import nn

import dp_compile
from dp_compile.cli.main import main
from dp_compile.insight.observe import step_of
from dp_compile.insight.profile import measured_step, with_profile
from dp_compile.insight.ranges import BACKWARD_RANGE, BackwardRanges
from dp_compile.insight.step import MeasuredBucket, MeasuredStep
from dp_compile.plan.buckets import UNUSED_FLAGS, Bucket, BucketPlan, GradientSpec, Layout
from dp_compile.testing.ranks import Ranks

KEY = bucket_key("", "sum", "float32", "cpu")


def bucket_of(*names: str) -> Bucket:
    return Layout(1).bucket(KEY, [GradientSpec(i, name, (4,), (1,), 4, KEY) for i, name in enumerate(names)], "")


PLAN = BucketPlan((bucket_of("b.weight", "b.bias"), bucket_of("a.weight", UNUSED_FLAGS)))
LAUNCHES = [f"{BackwardRanges([PLAN])._name(0, number)} launch" for number in (0, 1)]
WAITS = [f"{BackwardRanges([PLAN])._name(0, number)} wait" for number in (0, 1)]


# --- names --------------------------------------------------------------------------------------------------------


def names_in_a_profile(*models: nn.Module, eager: bool = False, times: int = 1) -> list[str]:
    run = torch.compile(nn.Sequential(*models), backend="aot_eager")
    for _ in range(2):
        run(torch.ones(2, 4)).sum().backward()
    with torch.autograd.set_detect_anomaly(eager, check_nan=False):
        output = run(torch.ones(2, 4)).sum()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            output.backward()
    events = sorted(profile.events(), key=lambda event: event.time_range.start)
    return [event.name for event in events if event.name.endswith((" launch", " wait")) or event.name == BACKWARD_RANGE]


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize("eager", [False, True])
def test_collectives_carry_the_name_of_their_bucket(eager: bool) -> None:
    torch._dynamo.reset()
    config = dp_compile.ReplicateConfig(backend="aot_eager", bucket_cap_mb=0.0001)
    model = dp_compile.replicate(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4)), config=config)
    assert names_in_a_profile(model, eager=eager) == [
        BACKWARD_RANGE,
        "dp_compile::bucket 0 (1.bias .. +1) launch",
        "dp_compile::bucket 1 (0.bias .. +1) launch",
        "dp_compile::bucket 0 (1.bias .. +1) wait",
        "dp_compile::bucket 1 (0.bias .. +1) wait",
    ]


# --- a trace that was written down ----------------------------------------------------------------------------------


def event(name: str, begin_us: float, length_us: float, thread: int = 1, **more: Any) -> dict[str, Any]:
    return {"ph": "X", "name": name, "pid": 0, "tid": thread, "ts": begin_us, "dur": length_us, **more}


def on_host(start_us: float, longer_us: float = 0.0) -> list[dict[str, Any]]:
    """A step on two threads of gloo: somebody else's all-reduce takes its turn between our two."""
    at = start_us
    return [
        event("Torch-Compiled Region: 0/0", at, 100),
        event("CompiledFunction", at + 10, 80),
        event(BACKWARD_RANGE, at + 200, 500 + longer_us),
        event(LAUNCHES[0], at + 250, 20),
        event("c10d::allreduce_", at + 255, 10),
        event("gloo:all_reduce", at + 262, 100, thread=7),
        event("c10d::allreduce_", at + 280, 10),
        event("gloo:all_reduce", at + 285, 5, thread=8),
        event(LAUNCHES[1], at + 300, 20),
        event("c10d::allreduce_", at + 305, 10),
        event("gloo:all_reduce", at + 370, 300 + longer_us, thread=7),
        event(WAITS[0], at + 400, 5),
        event(WAITS[1], at + 420, 260 + longer_us),
        event("Optimizer.step#SGD.step", at + 800, 40),
        event("Torch-Compiled Region: 1/0", at + 810, 20),
    ]


def expected(longer_us: float = 0.0) -> MeasuredStep:
    buckets = (
        MeasuredBucket(50e-6, 162e-6, 5e-6, start_s=62e-6, wait_s=200e-6),
        MeasuredBucket(100e-6, (470 + longer_us) * 1e-6, (260 + longer_us) * 1e-6, start_s=170e-6, wait_s=220e-6),
    )
    return MeasuredStep((500 + longer_us) * 1e-6, buckets, "", 3, 100e-6, 40e-6, 1000e-6)


def rounded(step: MeasuredStep) -> list[Any]:
    def plain(value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return [plain(each) for each in value]
        return round(value, 9) if value else value

    return [plain(each) for each in dataclasses.astuple(dataclasses.replace(step, source=""))]


def trace_of(*events: dict[str, Any]) -> dict[str, Any]:
    return {"traceEvents": [{"ph": "M", "name": "process_name"}, *events], "distributedInfo": {"rank": 3}}


def test_the_median_of_three_steps() -> None:
    steps = [each for number, longer in enumerate((0, 20, 90)) for each in on_host(1000 * number, longer)]
    step = measured_step(trace_of(*steps), PLAN)
    assert step.source == "trace of torch.profiler, median of 3 backwards"
    behind_us = (500 + 480) / 2  # of the two whose next backward is there
    assert rounded(step) == rounded(dataclasses.replace(expected(20), step_s=(520 + behind_us) * 1e-6))
    assert step.exposed_s == pytest.approx(285e-6)


def test_a_step_at_the_edge_does_not_count() -> None:
    """The trace begins in the middle of a backward, while gloo is at work on what was launched before."""
    cut = [each for each in on_host(0) if each["ts"] >= 380 or each["name"] == BACKWARD_RANGE]
    late = event("gloo:all_reduce", 370, 300, thread=7)
    whole = [*on_host(1000), event(BACKWARD_RANGE, 2200, 1)]
    step = measured_step(trace_of(late, *cut, *whole), PLAN)
    assert step.source == "trace of torch.profiler, median of 1 backward"
    assert rounded(step) == rounded(expected())


NCCL_KERNEL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
SPIN_KERNEL = "at::cuda::(anonymous namespace)::spin_kernel(long)"


def on_gpu(collective: str) -> list[dict[str, Any]]:
    """Launched by the host within 70 us; the GPU works until 900. What torch draws above kernels is not ours."""

    def kernel(name: str, called_us: float, begin_us: float, length_us: float, number: int) -> list[dict[str, Any]]:
        correlation = {"args": {"correlation": number}}
        call = event("cudaLaunchKernel", called_us, 1, cat="cuda_runtime", **correlation)
        return [call, event(name, begin_us, length_us, thread=20, cat="kernel", **correlation)]

    return [
        event("Torch-Compiled Region: 0/0", 0, 8),
        *kernel("forward", 2, 50, 50, 1),
        event(BACKWARD_RANGE, 10, 70, cat="user_annotation"),
        event(BACKWARD_RANGE, 100, 800, cat="gpu_user_annotation"),
        *kernel("mm", 12, 100, 200, 2),
        event(LAUNCHES[0], 20, 5),
        event(LAUNCHES[0], 300, 100, cat="gpu_user_annotation"),
        *kernel(collective, 22, 300, 100, 3),
        *kernel("mm", 30, 300, 300, 4),
        event(LAUNCHES[1], 40, 5),
        *kernel(collective, 42, 600, 250, 5),
        event(WAITS[0], 50, 2),
        event(WAITS[1], 60, 2),
        *kernel("copy", 70, 850, 50, 6),
        event("Optimizer.step#SGD.step", 90, 10),
        *kernel("adam", 95, 900, 30, 7),
    ]


@pytest.mark.parametrize("collective", [NCCL_KERNEL, SPIN_KERNEL])
def test_kernels_count_where_there_are_some(collective: str) -> None:
    """Those of NCCL, and those with which the bench plays a network."""
    step = measured_step(trace_of(*on_gpu(collective)), PLAN)
    buckets = (
        MeasuredBucket(200e-6, 300e-6, 0.0, start_s=200e-6, wait_s=500e-6),
        MeasuredBucket(500e-6, 750e-6, 250e-6, start_s=500e-6, wait_s=500e-6),
    )
    assert rounded(step) == rounded(MeasuredStep(800e-6, buckets, "", 3, 50e-6, 30e-6))


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([], "no ranges named 'dp_compile::bucket ...'. Record some steps that are compiled already"),
        (on_host(0)[:-6], "no backward in the trace has all 2 buckets"),
        (
            [*on_host(0), event("dp_compile::bucket 1 (c.bias) launch", 9, 1)],
            "its bucket 1 is c.bias, the plan's is a.weight",
        ),
        (
            [event(BACKWARD_RANGE, 0, 1), event("dp_compile::module 0 bucket 0 (c) wait", 0, 1)],
            "several replicated modules",
        ),
    ],
)
def test_refuses_a_trace_that_does_not_fit(events: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(dp_compile.ConfigError) as error:
        measured_step(trace_of(*events), PLAN)
    assert message in str(error.value)


# --- a trace of two real ranks ----------------------------------------------------------------------------------------


def profile_some_steps(directory: str) -> tuple[MeasuredStep, int]:
    torch._dynamo.reset()
    config = dp_compile.ReplicateConfig(backend="aot_eager", bucket_cap_mb=0.01)
    model = dp_compile.replicate(nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))), config=config)
    run, optimizer = torch.compile(model, backend="aot_eager"), torch.optim.SGD(model.parameters())

    def step() -> None:
        run(torch.ones(2, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(torch.ones(3))  # somebody else's, on the same queue

    for _ in range(2):
        step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(3):
            step()
    path = f"{directory}/trace{dist.get_rank()}.json.gz"
    profile.export_chrome_trace(path)
    explained = with_profile(step_of(model), path)
    measured = explained.measured
    assert measured is not None
    return measured, len(step_of(model).plan.buckets)


def test_two_ranks(ranks2: Ranks, tmp_path: Path) -> None:
    for rank, (step, buckets) in enumerate(ranks2.run(profile_some_steps, str(tmp_path))):
        assert (step.rank, len(step.buckets), buckets) == (rank, 3, 3)
        assert step.source == "trace of torch.profiler, median of 3 backwards"
        assert step.forward_s is not None
        assert step.optimizer_s is not None
        assert step.step_s is not None
        assert min(step.forward_s, step.optimizer_s) > 0
        assert step.backward_s < step.step_s
        for bucket in step.buckets:
            assert bucket.start_s is not None
            assert bucket.finish_s is not None
            assert bucket.wait_s is not None
            assert 0 < bucket.launch_s < bucket.start_s < bucket.finish_s < step.backward_s
            assert bucket.launch_s < bucket.wait_s


# --- in the commands ----------------------------------------------------------------------------------------------


def test_the_commands_take_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = step_of_buckets(2)
    step = dataclasses.replace(step, plan=PLAN, ready=dataclasses.replace(step.ready, shares={}))
    step_file, trace_file, picture = tmp_path / "step.json", tmp_path / "trace.json", tmp_path / "step.svg"
    step_file.write_text(step.to_json())
    trace_file.write_text(json.dumps(trace_of(*on_host(1000.0))))
    assert main(["explain", str(step_file), "--profile", str(trace_file)]) == 0
    assert "median of 1 backward" in " ".join(capsys.readouterr().out.split())
    assert main(["timeline", str(step_file), "-o", str(picture), "--profile", str(trace_file)]) == 0
    assert "trace of torch.profiler, median of 1 backward" in picture.read_text()
    trace_file.write_text(json.dumps(trace_of(event("mm", 0.0, 1.0))))
    assert main(["explain", str(step_file), "--profile", str(trace_file)]) == 2
    assert "no ranges named 'dp_compile::bucket ...'" in capsys.readouterr().err
