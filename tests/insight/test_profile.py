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
from dp_compile.engine.ranges import LAUNCH, WAIT, members_in_short
from dp_compile.insight.observe import step_of
from dp_compile.insight.profile import measured_step, with_profile
from dp_compile.insight.step import MeasuredStep
from dp_compile.plan.buckets import UNUSED_FLAGS, Bucket, BucketPlan, GradientSpec, Layout
from dp_compile.replication.module import replica_of
from dp_compile.testing.ranks import Ranks

KEY = bucket_key("", "sum", "float32", "cpu")


def bucket_of(*names: str) -> Bucket:
    return Layout(1).bucket([GradientSpec(i, name, (4,), (1,), 4, KEY) for i, name in enumerate(names)])


PLAN = BucketPlan((bucket_of("b.weight", "b.bias"), bucket_of("a.weight", UNUSED_FLAGS)))
MODULE = "dp_compile::module 4"
BACKWARD_RANGE = f"{MODULE} backward"
LAUNCHES, WAITS = (
    [f"{MODULE} bucket {number} ({members_in_short(each)}) {what}" for number, each in enumerate(PLAN.buckets)]
    for what in (LAUNCH, WAIT)
)


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize("eager", [False, True])
def test_collectives_carry_the_name_of_their_bucket(eager: bool) -> None:
    torch._dynamo.reset()
    config = dp_compile.ReplicateConfig(backend="aot_eager", bucket_cap_mb=0.0001)
    model = dp_compile.replicate(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4)), config=config)
    run = torch.compile(model, backend="aot_eager")
    for _ in range(2):
        run(torch.ones(2, 4)).sum().backward()
    with torch.autograd.set_detect_anomaly(eager, check_nan=False):
        output = run(torch.ones(2, 4)).sum()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            output.backward()
    names = [event.name for event in sorted(profile.events(), key=lambda event: event.time_range.start)]
    prefix = f"dp_compile::module {replica_of(model).module.number}"
    assert [name.removeprefix(prefix) for name in names if name.startswith(prefix)] == [
        " backward",
        " bucket 0 (1.bias .. +1) launch",
        " bucket 1 (0.bias .. +1) launch",
        " bucket 0 (1.bias .. +1) wait",
        " bucket 1 (0.bias .. +1) wait",
    ]


# --- a trace that was written down ----------------------------------------------------------------------------------


def event(name: str, begin_us: float, length_us: float, thread: int = 1, **more: Any) -> dict[str, Any]:
    return {"ph": "X", "name": name, "pid": 0, "tid": thread, "ts": begin_us, "dur": length_us, **more}


def on_host(at: float, longer_us: float = 0.0) -> list[dict[str, Any]]:
    """A step on two threads of gloo: an all-reduce of another module takes its turn between our two."""
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


def trace_of(*events: dict[str, Any]) -> dict[str, Any]:
    return {"traceEvents": [{"ph": "M", "name": "process_name"}, *events], "distributedInfo": {"rank": 3}}


def check(step: MeasuredStep, backward_us: float, buckets_us: list[list[float]], *others_us: float) -> None:
    """Of each bucket: launch, finish, waited, start and wait; then forward, optimizer and step."""
    assert step.rank == 3
    found = [step.backward_s, *(time for each in step.buckets for time in dataclasses.astuple(each))]
    found += [step.forward_s, step.optimizer_s, *([] if len(others_us) == 2 else [step.step_s])]
    expected = [backward_us, *(time for each in buckets_us for time in each), *others_us]
    assert found == pytest.approx([time * 1e-6 for time in expected])


def test_the_median_of_three_steps() -> None:
    """What begins in the middle of a backward, while gloo is at work on what was launched before, does not count."""
    cut = [each for each in on_host(0) if each["ts"] >= 380 or each["name"] == BACKWARD_RANGE]
    late = event("gloo:all_reduce", 370, 300, thread=7)
    steps = [each for number, longer in enumerate((0, 20, 90), 1) for each in on_host(1000 * number, longer)]
    step = measured_step(trace_of(late, *cut, *steps), PLAN)
    assert step.source == "trace of torch.profiler, median of 3 backwards"
    after_us = (500 + 480) / 2  # of the two whose next backward is there
    check(step, 520, [[50, 162, 5, 62, 200], [100, 490, 280, 170, 220]], 100, 40, 520 + after_us)
    assert step.exposed_s == pytest.approx(285e-6)


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
    """Those of NCCL, and those with which the bench simulates a network."""
    step = measured_step(trace_of(*on_gpu(collective)), PLAN)
    check(step, 800, [[200, 300, 0, 200, 500], [500, 750, 250, 500, 500]], 50, 30)


@pytest.mark.parametrize(
    ("events", "message"),
    [
        (on_host(0)[:-6], "1 backward: not every bucket was launched and waited for"),
        (
            [*on_host(0), event(f"{MODULE} bucket 1 (c.bias) launch", 9, 1)],
            "1 backward: it is of another plan or module",
        ),
        (
            [*on_host(0), *({**each, "name": each["name"].replace("module 4", "module 5")} for each in on_host(900))],
            r"modules \[4, 5\] of the trace have this plan",
        ),
        (
            [*on_host(0), event("dp_compile::modules 4, 5 backward", 900, 1)][-1:],
            "1 backward: it is of several replicated modules",
        ),
    ],
)
def test_refuses_a_trace_that_does_not_fit(events: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(dp_compile.ConfigError, match=message):
        measured_step(trace_of(*events), PLAN)


# --- a trace of two real ranks, and the commands --------------------------------------------------------------------


def profile_some_steps(directory: str) -> MeasuredStep | None:
    torch._dynamo.reset()
    config = dp_compile.ReplicateConfig(backend="aot_eager", bucket_cap_mb=0.01)
    model = dp_compile.replicate(nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))), config=config)
    run, optimizer = torch.compile(model, backend="aot_eager"), torch.optim.SGD(model.parameters())

    def steps(times: int) -> None:
        for _ in range(times):
            run(torch.ones(2, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            dist.all_reduce(torch.ones(3))  # not ours, on the same queue

    steps(2)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        steps(3)
    path = f"{directory}/trace{dist.get_rank()}.json.gz"
    profile.export_chrome_trace(path)
    return with_profile(step_of(model), path).measured


def test_two_ranks(ranks2: Ranks, tmp_path: Path) -> None:
    for rank, step in enumerate(ranks2.run(profile_some_steps, str(tmp_path))):
        assert (step.rank, len(step.buckets)) == (rank, 3)
        assert step.source == "trace of torch.profiler, median of 3 backwards"
        assert min(step.forward_s, step.optimizer_s) > 0
        assert step.backward_s < step.step_s
        for bucket in step.buckets:
            assert 0 < bucket.launch_s < bucket.start_s < bucket.finish_s < step.backward_s
            assert bucket.launch_s < bucket.wait_s


def test_the_commands_take_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = step_of_buckets(2)
    step = dataclasses.replace(step, plan=PLAN, ready=dataclasses.replace(step.ready, shares={}))
    step_file, trace_file, picture = (str(tmp_path / name) for name in ("step.json", "trace.json", "step.svg"))
    Path(step_file).write_text(step.to_json())
    Path(trace_file).write_text(json.dumps(trace_of(*on_host(1000.0))))
    assert main(["explain", step_file, "--profile", trace_file]) == 0
    assert "median of 1 backward" in " ".join(capsys.readouterr().out.split())
    assert main(["timeline", step_file, "-o", picture, "--profile", trace_file]) == 0
    assert "trace of torch.profiler, median of 1 backward" in Path(picture).read_text()
    Path(trace_file).write_text(json.dumps(trace_of(event("mm", 0.0, 1.0))))
    assert main(["explain", step_file, "--profile", trace_file]) == 2
    assert "no ranges named 'dp_compile::module ...'" in capsys.readouterr().err
