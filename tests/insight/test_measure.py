"""Measured backwards and traces of torch.profiler: launches and waits by bucket; what is kept, refused and why."""

import dataclasses
import gzip
import inspect
import json
import re
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from graphs import bucket_key
from on_ranks import on_ranks
from steps import step_of_buckets
from torch import nn
from torch._dynamo import utils as dynamo_utils

import dp_compile
from dp_compile._torch import compiler, distributed, dynamo
from dp_compile.cli.main import main
from dp_compile.engine.ranges import LAUNCH, WAIT, BucketRanges, members_in_short
from dp_compile.insight.explain import SHORTEST_S, Explanation
from dp_compile.insight.observe import step_of
from dp_compile.insight.predict import predict
from dp_compile.insight.profile import COMPILED_IN_IT, IN_FLIGHT, measured_step
from dp_compile.insight.step import Step
from dp_compile.plan.buckets import UNUSED_FLAGS, BucketPlan, GradientSpec
from dp_compile.plan.buckets import bucket_of as bucket_with
from dp_compile.replication.module import replica_of

CONFIG = dp_compile.ReplicateConfig(backend="aot_eager", bucket_cap_mb=0.0004)
in_a_group = pytest.mark.usefixtures("fake_group")


def made(config=CONFIG, backend="aot_eager"):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(8, 8), nn.Tanh())))
    dp_compile.replicate(model, config=config)
    return model, torch.compile(model, backend=backend)


def train(model, run, times, batch=4):
    for _ in range(times):
        model.zero_grad()
        run(torch.ones(batch, 8)).sum().backward()


@in_a_group
def test_code_that_draws_random_numbers_once_more():
    """As code of activation checkpointing does, by a higher order op: torch refuses those in a mode by default."""
    key, group = bucket_key("", "sum", "float32", "cpu"), dist.group.WORLD
    bucket = bucket_with([GradientSpec(0, "g0", (4,), (1,), 4, key)])
    replica = SimpleNamespace(plan=BucketPlan((bucket,)), module=SimpleNamespace(number=7))
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
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.nightly)])
def test_a_step_is_measured(backend):
    model, run = made(dataclasses.replace(CONFIG, backend=backend))
    train(model, run, 2)
    captures, graphs = compiler.captures(), compiler.compiled_graphs()
    with dp_compile.measure(model) as measurement:
        train(model, run, 4)
    assert (compiler.captures(), compiler.compiled_graphs()) == (captures, graphs)
    step = step_of(model).measured
    assert step == measurement.step
    assert (len(measurement.backwards), measurement.why_not) == (4, "")
    assert len(step.buckets) == len(step_of(model).plan.buckets) > 1
    assert step.source == "measured by dp_compile.measure(), median of 4 backwards"
    for each in measurement.backwards:
        launches = [bucket.launch_s for bucket in each.buckets]
        assert launches == sorted(launches)
        for bucket in each.buckets:
            assert 0 < bucket.launch_s < bucket.wait_s < bucket.wait_s + bucket.waited_s <= each.backward_s


@in_a_group
def test_what_is_not_measured_has_a_reason(caplog):
    model, run = made()
    with dp_compile.measure(model) as measurement:
        pass
    assert measurement.step is None
    assert f"dp_compile, rank 0: nothing was measured: {measurement.why_not}\n" in caplog.text
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


@on_ranks("ranks2")
def test_one_rank_measures_alone():
    model, run = made()
    if dist.get_rank() == 1:
        return train(model, run, 8)
    with dp_compile.measure(model) as measurement:
        train(model, run, 8)
    step = measurement.step
    assert (measurement.not_measured, len(step.buckets)) == ({COMPILED_IN_IT: 1}, 2)
    assert 0 < step.exposed_s < step.backward_s
    for bucket in step.buckets:
        assert 0 < bucket.launch_s < bucket.start_s < bucket.finish_s < step.backward_s


@in_a_group
def test_nothing_is_measured_unasked():
    """No mode sees the ops of compiled code."""
    model, run = made()
    with mock.patch.object(BucketRanges, "__torch_dispatch__", side_effect=AssertionError) as mode:
        train(model, run, 5)
    mode.assert_not_called()
    assert dp_compile.step_of(model).measured is None
    assert str(dp_compile.explain(model)).startswith("Estimated, not measured: ")
    assert " ms" not in str(dp_compile.report(model))


@in_a_group
def test_ops_are_measured_without_dynamo_around_each():
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
def test_a_late_compilation_is_said(caplog):
    model, run = made()
    train(model, run, 12)
    assert "compiled new code" not in caplog.text
    train(model, run, 3, batch=6)
    (said,) = [each.message for each in caplog.records if "compiled new code" in each.message]
    assert said.startswith("dp_compile, rank 0: synchronised backward 13 compiled new code, which added ")


WAYS = {
    "whole": {},
    "crossing": {"overlap_forward": True},
    "sharded": {"shard": True},
    "sharded crossing": {"shard": True, "overlap_forward": True},
}


def train_with(run, optimizer, times):
    for _ in range(times):
        run(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture(scope="module")
def seen(fake_group):
    """Each way once: compiled and dumped, then measured in three backwards."""
    found = {}
    for way, options in WAYS.items():
        smallest = dataclasses.replace(CONFIG, bucket_cap_mb=0.0002)
        model, run = made(smallest, "dp_compile" if "overlap_forward" in options else "aot_eager")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        dp_compile.optim.in_backward(model, optimizer, **options)
        shown = {}
        with (
            mock.patch.object(dynamo, "structured_trace_is_on", return_value=True),
            mock.patch.object(dynamo, "trace_artifact", lambda name, text, shown=shown: shown.update({name: text})),
        ):
            train_with(run, optimizer, 2)
        graphs = [name for name in shown if "# As torch prints it" in shown[name]]
        assert graphs == [*shown][1:-1]  # all but plan and code
        with dp_compile.measure(model) as measurement:
            train_with(run, optimizer, 3)
        step, report, explanation = step_of(model), dp_compile.report(model).updates, dp_compile.explain(model)
        text = " ".join(str(explanation).split())
        found[way] = step, step.measured, measurement, report, explanation, text
    return found


def test_what_crosses_is_waited_for_in_the_next_forward(seen):
    step, measured, measurement, report, explanation, text = seen["crossing"]
    assert measurement.not_measured == {IN_FLIGHT: 1}
    assert len(measurement.backwards) == 2
    later = {number for number, bucket in enumerate(measured.buckets) if measured.is_after(bucket.wait_s)}
    assert later == step.left == {*range(1, len(step.plan.buckets))}
    forward = measured.next_forward
    assert 0 < measured.next_forward_s < forward.seconds
    updates = [each for each in measured.follows if each.what == "update"]
    assert len(updates) == len(step.left) > 2
    assert measured.updates_s == 0
    for bucket, update in zip(sorted(b.wait_s or 0.0 for b in measured.buckets)[1:], updates, strict=True):
        assert forward.start_s < bucket < update.start_s < update.end_s < forward.end_s
    assert f"the last backward left {len(updates)} updates for the next forward, " in report
    left = f"{len(step.left)} of {len(step.plan.buckets)} buckets may end during the next forward"
    assert f"{left}; why not all: flags have to be known when the backward ends" in text
    exposed = [each for each in explanation.buckets if each.planned is not None and each.planned.waited_s > SHORTEST_S]
    assert all(each.why.startswith("next forward reads it at") for each in exposed if each.number in step.left)
    assert " of it after the backward" in str(measurement)


@pytest.mark.parametrize("way", ["whole", "sharded"])
def test_updates_and_all_gathers_are_no_compute(seen, way):
    step, measured, measurement, report, explanation, text = seen[way]
    assert not measurement.why_not
    updates = [each for each in measured.follows if each.what == "update"]
    assert len(updates) == 3  # of the buckets without flags
    assert 0 < measured.updates_s == pytest.approx(sum(each.seconds for each in updates))
    assert measured.compute_s == pytest.approx(measured.backward_s - measured.exposed_s - measured.updates_s)
    assert bool(measured.gather_s) == bool(step.gather_s) == (way == "sharded")
    if way == "sharded":
        assert measured.end_s == pytest.approx(measured.backward_s + measured.gather_s)
        assert explanation.exposed_s >= step.gather_s > 0
        assert "all-gathers of parameters" in text
        assert re.search(r"this one [\d,]+ of 216 elements, .* instead of .* \(computed", report)
    else:
        assert f"AdamW updates {4 * 216} B of parameters in the backward" in report


def test_all_gathers_are_waited_for_in_the_next_forward(seen):
    step, measured, measurement, report, explanation, _ = seen["sharded crossing"]
    assert measurement.not_measured == {IN_FLIGHT: 1}
    assert step.gathers_late
    assert not step.left
    forward = measured.next_forward
    gathers = [each for each in measured.follows if each.what == "gather"]
    launches, rounds = gathers[:3], gathers[3:]
    assert all(measured.backward_s < each.start_s < each.end_s < forward.start_s for each in launches)
    assert len(rounds) == 3
    assert all(forward.start_s < each.start_s < each.end_s < forward.end_s for each in rounds)
    assert measured.next_forward_s == pytest.approx(forward.seconds - sum(each.seconds for each in rounds))
    assert "the last backward left 3 all-gathers for the next forward, " in report
    assert explanation.end_s >= step.bound_s + step.forward_s
    waited = dataclasses.replace(step, optimizers=tuple(dataclasses.replace(e, stayed=False) for e in step.optimizers))
    assert not waited.gathers_late
    assert "step() waits for what AdamW defers" in " ".join(str(Explanation(waited)).split())


@pytest.mark.parametrize("way", WAYS)
def test_to_json_and_back(seen, way):
    step, *_, explanation, _ = seen[way]
    again = Step.from_json(step.to_json())
    assert (again.optimizers, again.measured, again.left) == (step.optimizers, step.measured, step.left)
    assert str(Explanation(again)) == str(explanation)
    assert predict(again).end_s == step.end_s


KEY = bucket_key("", "sum", "float32", "cpu")


def bucket_of(*names):
    return bucket_with([GradientSpec(i, name, (4,), (1,), 4, KEY) for i, name in enumerate(names)])


PLAN = BucketPlan((bucket_of("b.weight", "b.bias"), bucket_of("a.weight", UNUSED_FLAGS)))
MODULE = "dp_compile::module 4"
BACKWARD_RANGE = f"{MODULE} backward"
LAUNCHES, WAITS = (
    [f"{MODULE} bucket {number} ({members_in_short(each)}) {what}" for number, each in enumerate(PLAN.buckets)]
    for what in (LAUNCH, WAIT)
)


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize("eager", [False, True])
def test_collectives_carry_the_name_of_their_bucket(eager):
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


def event(name, begin_us, length_us, thread=1, **more):
    return {"ph": "X", "name": name, "pid": 0, "tid": thread, "ts": begin_us, "dur": length_us, **more}


def on_host(at, longer_us=0.0):
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


def trace_of(*events):
    return {"traceEvents": [{"ph": "M", "name": "process_name"}, *events], "distributedInfo": {"rank": 3}}


def check(step, backward_us, buckets_us, forward_us, optimizer_us):
    """Of each bucket: launch, finish, waited, start and wait."""
    assert step.rank == 3
    found = [step.backward_s, *(time for each in step.buckets for time in dataclasses.astuple(each))]
    found += [step.forward_s, step.optimizer_s]
    expected = [backward_us, *(time for each in buckets_us for time in each), forward_us, optimizer_us]
    assert found == pytest.approx([time * 1e-6 for time in expected])


def test_the_median_of_three_steps():
    """What begins in the middle of a backward, while gloo is at work on what was launched before, does not count."""
    cut = [each for each in on_host(0) if each["ts"] >= 380 or each["name"] == BACKWARD_RANGE]
    late = event("gloo:all_reduce", 370, 300, thread=7)
    steps = [each for number, longer in enumerate((0, 20, 90), 1) for each in on_host(1000 * number, longer)]
    step = measured_step(trace_of(late, *cut, *steps), PLAN)
    assert step.source == "trace of torch.profiler, median of 3 backwards"
    check(step, 520, [[50, 162, 5, 62, 200], [100, 490, 280, 170, 220]], 100, 40)
    assert step.exposed_s == pytest.approx(285e-6)


NCCL_KERNEL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
SPIN_KERNEL = "at::cuda::(anonymous namespace)::spin_kernel(long)"


def on_gpu(collective):
    """Launched by the host within 70 us; the GPU works until 900. What torch draws above kernels is not ours."""

    def kernel(name, called_us, begin_us, length_us, number):
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
def test_kernels_count_where_there_are_some(collective):
    """Those of NCCL, and those with which the bench simulates a network."""
    step = measured_step(trace_of(*on_gpu(collective)), PLAN)
    check(step, 800, [[200, 300, 0, 200, 500], [500, 750, 250, 500, 500]], 50, 30)


@pytest.mark.parametrize(
    ("events", "message"),
    [
        (on_host(0)[:-6], "1 backward: not every bucket was launched and waited for"),
        (
            [*on_host(0), event(f"{MODULE} bucket 1 (c.bias) launch", 9, 1)],
            "1 backward: of another plan or module",
        ),
        (
            [*on_host(0), *({**each, "name": each["name"].replace("module 4", "module 5")} for each in on_host(900))],
            r"modules \[4, 5\] in the trace all have this plan",
        ),
        (
            [*on_host(0), event("dp_compile::modules 4, 5 backward", 900, 1)][-1:],
            "1 backward: of several replicated modules",
        ),
    ],
)
def test_refuses_a_trace_that_does_not_fit(events, message):
    with pytest.raises(dp_compile.ConfigError, match=message):
        measured_step(trace_of(*events), PLAN)


def test_the_commands_take_a_trace(tmp_path, capsys):
    step = step_of_buckets(2)
    step = dataclasses.replace(step, plan=PLAN, ready=dataclasses.replace(step.ready, shares={}))
    step_file, trace_file, picture = (str(tmp_path / name) for name in ("step.json", "trace.json.gz", "step.svg"))
    Path(step_file).write_text(step.to_json())
    Path(trace_file).write_bytes(gzip.compress(json.dumps(trace_of(*on_host(1000.0))).encode()))
    assert main(["explain", step_file, "--profile", trace_file]) == 0
    assert "median of 1 backward" in " ".join(capsys.readouterr().out.split())
    assert main(["timeline", step_file, "-o", picture, "--profile", trace_file]) == 0
    assert "trace of torch.profiler, median of 1 backward" in Path(picture).read_text()
    plain_file = tmp_path / "trace.json"
    plain_file.write_text(json.dumps(trace_of(event("mm", 0.0, 1.0))))
    assert main(["explain", step_file, "--profile", str(plain_file)]) == 2
    assert "no ranges named 'dp_compile::module ...'" in capsys.readouterr().err
