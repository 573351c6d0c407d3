"""Explanations on one screen, and predictions for other ranks, links and dtypes: their figures are the timeline's."""

import dataclasses
import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest
import torch
from expecttest import assert_expected_inline
from graphs import bucket_key
from hypothesis import given, settings
from hypothesis import strategies as st
from parity import AOT
from steps import measured_like, step_of_buckets, two_level_step
from torch import nn

import dp_compile
from dp_compile.cli.main import main
from dp_compile.insight.explain import MOST_ADVICE, SMALLEST_GAIN, Explanation
from dp_compile.insight.observe import step_of
from dp_compile.insight.predict import extrapolated, predict, replanned
from dp_compile.insight.step import MeasuredBucket, MeasuredStep, Step, planned_buckets
from dp_compile.insight.timeline import NETWORK, events_of, timeline_picture, timeline_trace
from dp_compile.passes.result import PeakMemory, Refusal
from dp_compile.plan.backends import NCCL
from dp_compile.plan.buckets import UNUSED_FLAGS, BucketPlan, GradientSpec, bucket_of, plan_buckets
from dp_compile.plan.cost import LINKS, AllReduceCost, ring_or_tree
from dp_compile.plan.planner import ESTIMATED, ReadyTimes, assumed_times
from dp_compile.plan.words import WIDTH
from dp_compile.replica.record import CaptureRecord, Placement

KEY = bucket_key("", "sum", "float32", "cuda")
MB = 2**20


def gradient(index, name, numel, key=KEY):
    shape = (numel // 256, 256) if numel % 256 == 0 else (numel,)
    return GradientSpec(index, name, shape, (256, 1) if len(shape) == 2 else (1,), 4, key)


GRADIENTS = (
    gradient(3, "blocks.1.weight", 8 * MB),
    gradient(2, "blocks.1.bias", 100),
    gradient(1, "blocks.0.weight", 8 * MB),
    gradient(0, "token.weight", 2 * MB),
    gradient(4, UNUSED_FLAGS, 4),
)
PLAN = plan_buckets(GRADIENTS, bucket_cap_mb=30, first_bucket_cap_mb=30, alignment_bytes=64)


def step(backward_s, **changes):
    """Three gradients of 32, 32 and 8 MiB at 10 GB/s: 3.4 + 3.4 + 0.8 ms, in three buckets."""
    made = Step(
        mode="dp_compile",
        strategy="fixed",
        world_size=8,
        backend=NCCL,
        device="cuda",
        plan=PLAN,
        ready=ReadyTimes({3: 0.4, 2: 0.4, 1: 0.9, 0: 1.0}, backward_s, "measured" if backward_s else ESTIMATED),
        cost=AllReduceCost(5e-5, 1e-10),
        cost_source="measured on this group",
        capture=CaptureRecord(
            hooks=4,
            reductions=5,
            completed=0,
            collectives=3,
            graphs=1,
            cached=False,
            refusals=(Refusal("all_reduce_1", "not a gradient"),),
            memory=PeakMemory(300 * MB, 400 * MB),
            placements=(Placement("token.weight", 8 * MB, True), Placement("blocks.0.weight", 32 * MB, False)),
        ),
        backwards=(("captured", 5),),
    )
    return replace(made, **changes)


def measured(end_s, waited_s):
    times_s = (0.01 * (number + 1) for number in range(len(waited_s)))
    buckets = tuple(MeasuredBucket(at_s, None, each, None, at_s) for at_s, each in zip(times_s, waited_s, strict=True))
    return MeasuredStep(end_s, buckets, "profiler, median of 5 steps", rank=1)


def check_screen(text):
    lines = text.splitlines()
    assert max(map(len, lines)) <= WIDTH == 80
    assert len(lines) <= 55


def test_a_compute_bound_step_that_was_measured():
    text = str(Explanation(step(0.040, measured=measured(0.0425, (0.0, 0.0005, 0.001)))))
    check_screen(text)
    assert_expected_inline(
        text,
        """\
Compute-bound: 1.50 ms exposed of 42.5 ms, measured on rank 1.
  8 ranks, nccl on cuda, dp_compile, fixed: 3 buckets, 4 gradients, 72.0 MiB;
    backwards: 5 captured
  predicted end of backward and communication 40.9 ms, at best 40.9 ms (1.000);
    exposed 0.889 ms
  compute 40.0 ms, communication 7.70 ms
  measured: compute 41.0 ms, exposed 1.50 ms (profiler, median of 5 steps);
    predicted end -3.8%
  backward: measured
  link: an all-reduce takes 50 us + nbytes / (10 GB/s), measured on this group
  captured backward: 4 gradients + 1 status word -> 3 collectives, 1 graph
    refused all_reduce_1: not a gradient
    simulated peak memory: 300.0 MiB, with torch's DDP 400.0 MiB
    computed in their buckets: 80.0% of 40.0 MiB
    copied 1 gradient, 8.0 MiB: token.weight

Buckets in launch order, n gradients each (in ms; only 'waited' is measured)
#      size  n  ready  start   end  exposed  waited  why
0  32.0 MiB  1   16.0   16.0  19.4        0       0  hidden
1  32.0 MiB  2   36.0   36.0  39.4        0   0.500  hidden
2   8.0 MiB  1   40.0   40.0  40.9    0.889    1.00  waits for token.weight

Advice, each alone, with its predicted gain:
  1.0%, 0.419 ms: mp_policy, reduce_dtype=bfloat16: fewer bytes, other rounding""",
    )


def test_the_first_line_says_that_nothing_was_measured():
    """An assumed backward is never stated as a fact: its times are percent."""
    explained = Explanation(step(None))
    text = str(explained)
    assert text.startswith("Estimated, not measured: ")
    assert " ms" not in text
    assert (explained.bound_by, explained.exposed_s) == ("not known", pytest.approx(step(None).exposed_s))
    assert str(Explanation(step(0.004))).startswith("Estimated, not measured: communication-bound")


@settings(max_examples=60)
@given(
    cap_mb=st.sampled_from([0.01, 1.0, 30.0]),
    backward_ms=st.sampled_from([None, 0.0, 1.0, 50.0]),
    alpha_us=st.sampled_from([0.0, 50.0]),
)
def test_the_figures_are_those_of_the_timeline(cap_mb, backward_ms, alpha_us):
    plan = plan_buckets(GRADIENTS, bucket_cap_mb=cap_mb, first_bucket_cap_mb=cap_mb, alignment_bytes=64)
    ready = replace(assumed_times(GRADIENTS), backward_s=None if backward_ms is None else backward_ms / 1e3)
    seen = step(1.0, plan=plan, ready=ready, cost=AllReduceCost(alpha_us * 1e-6, 1e-10))
    explained, planned = Explanation(seen), planned_buckets(seen)
    assert explained.exposed_s == pytest.approx(sum(bucket.waited_s for bucket in planned))
    assert explained.end_s == pytest.approx(seen.backward_s + explained.exposed_s)
    assert [bucket.planned for bucket in explained.buckets] == planned
    assert explained.bound_s <= explained.end_s * (1 + 1e-9)
    assert len(explained.advice) <= MOST_ADVICE
    assert all(each.gain_s > 0 and SMALLEST_GAIN < each.share <= 1 for each in explained.advice)
    assert max(map(len, str(explained).splitlines())) <= WIDTH


def test_advice_that_can_be_followed():
    """One bucket for everything is ready at the end: other buckets hide most of it."""
    one = BucketPlan((bucket_of(GRADIENTS),))
    advice = {each.change: each.gain_s for each in Explanation(step(0.040, plan=one)).advice}
    assert max(gain_s for change, gain_s in advice.items() if "bucket" in change) > 0.004
    nominal = Explanation(step(None, plan=one, cost_source="nominal for nccl, not measured")).advice
    assert [each.at_most for each in nominal if "calibrate" in each.change] == [True]
    alone = Explanation(step(0.004, world_size=1))
    assert (alone.end_s, alone.exposed_s, alone.advice) == (None, None, ())
    assert "there is one rank" in " ".join(str(alone).split())


def test_the_command(tmp_path, capsys):
    file = tmp_path / "step.json"
    file.write_text(step(0.004).to_json())
    assert main(["explain", str(file), "--buckets"]) == 0
    assert capsys.readouterr().out == f"{Explanation(step(0.004)).text(verbose=True)}\n"
    file.write_text(file.read_text().replace('"version": 6', '"version": 7'))
    assert main(["explain", str(file)]) == 2
    assert "has version 7, but this release reads 6" in capsys.readouterr().err


@pytest.mark.usefixtures("fake_group")
def test_explains_a_module():
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 128), nn.Tanh(), nn.Linear(128, 4))
    dp_compile.replicate(model, config=AOT)
    with pytest.raises(dp_compile.UnsupportedModuleError, match="Run a forward and a backward first"):
        dp_compile.explain(model)
    compiled = torch.compile(model, backend="aot_eager")
    for _ in range(2):
        compiled(torch.randn(5, 64)).sum().backward()
    explained, seen = dp_compile.explain(model), step_of(model)
    check_screen(str(explained))
    assert str(explained).startswith("Estimated, not measured: ")
    assert str(explained) == str(Explanation(Step.from_json(seen.to_json())))
    assert all(name in explained.text(verbose=True) for name, _ in model.named_parameters())
    assert (seen.ready.basis, seen.plan) == (ESTIMATED, dp_compile.report(model).plan)
    assert seen.cost_source == "nominal for fake, not measured"
    # A new plan of a real step is the same.
    assert replanned(seen).plan == seen.plan
    timed = replace(seen, ready=replace(seen.ready, backward_s=0.001, basis="measured"))
    assert predict(timed, link="ethernet-25").plan.gradients == seen.plan.gradients


@given(
    buckets=st.integers(1, 6),
    cost=st.builds(AllReduceCost, st.floats(1e-6, 1e-2), st.floats(1e-12, 1e-8)),
    backward_s=st.none() | st.floats(1e-5, 1.0),
    strategy=st.sampled_from(("fixed", "optimal")),
    ranks=st.sampled_from((None, 1, 2, 16, 1024)),
    dtype=st.sampled_from((None, "bfloat16", "float32")),
)
def test_no_prediction_beats_the_bound(buckets, cost, backward_s, strategy, ranks, dtype):
    step = replace(step_of_buckets(buckets), cost=cost, strategy=strategy)
    step = replace(step, ready=replace(step.ready, backward_s=backward_s))
    same = predict(step)
    assert (same.plan, same.communication_s, same.end_s) == (step.plan, step.communication_s, step.end_s)
    predicted = predict(step, ranks=ranks, dtype=dtype)
    assert predicted.end_s >= predicted.bound_s * (1 - 1e-9)
    assert predicted.end_s >= predicted.backward_s == step.backward_s
    assert {each.index for each in predicted.plan.gradients} == {each.index for each in step.plan.gradients}
    assert ranks != 1 or predicted.communication_s == predicted.exposed_s == 0


@given(st.sampled_from([*LINKS.values()]), st.integers(2, 20_000), st.integers(2, 20_000))
def test_extrapolation_finds_the_link_again(link, known, wanted):
    costs = [link.cost(ranks, hops=ring_or_tree) for ranks in (known, wanted)]
    found = extrapolated(costs[0], from_ranks=known, to_ranks=wanted)
    assert dataclasses.astuple(found)[:2] == pytest.approx(dataclasses.astuple(costs[1])[:2], rel=1e-9, abs=0)


STEP = replace(step_of_buckets(3), strategy="fixed")


def test_gradients_in_half_precision():
    predicted = predict(STEP, dtype="bfloat16")
    assert predicted.plan.nbytes == STEP.plan.nbytes // 2
    assert {each.key.reduction.wire for each in predicted.plan.buckets} == {"bfloat16"}
    assert [len(bucket.members) for bucket in predicted.plan.buckets] == [4, 4, 4]
    assert predicted.backward_s == STEP.backward_s


def test_two_levels_keep_the_size_of_their_nodes():
    levels = two_level_step(3)
    more = predict(levels, ranks=64).cost
    assert more.inside == levels.cost.inside
    assert more.between.alpha_s > levels.cost.between.alpha_s
    named = predict(levels, ranks=64, link="ethernet-25")
    assert named.cost_source.startswith("nvlink4 inside nodes of 8, ethernet-25 between them, nominal")
    with pytest.raises(dp_compile.ConfigError, match=r"ranks must be a multiple of 8 .*, got 12"):
        predict(levels, ranks=12)


def test_refuses():
    alone = replace(STEP, world_size=1)
    for step, changes, message in (
        (STEP, {"ranks": 0}, "ranks must be an integer >= 1, got 0"),
        (STEP, {"link": "string"}, r"link must be one of nvlink4, .*, got 'string'"),
        (alone, {"ranks": 2}, "the step ran on 1 rank, so the cost on 2 ranks is not known"),
    ):
        with pytest.raises(dp_compile.ConfigError, match=message):
            predict(step, **changes)
    assert predict(alone, ranks=2, link="loopback").communication_s > 0


THREE_BUCKETS = step_of_buckets(3)


def test_the_measured_view():
    """The second is launched while the first is on the network, and compute waits for the third twice as long."""
    times_s = (0.003, 0.008, 0.0, 0.003, 0.009), (0.007, 0.011, 0.0, 0.008, 0.011), (0.012, 0.02, 0.006, 0.012, 0.014)
    seen = MeasuredStep(0.02, tuple(MeasuredBucket(*each) for each in times_s), "stated", 0, 0.005, 0.001)
    events = [each for each in events_of(replace(THREE_BUCKETS, measured=seen)) if each.view == "measured"]
    lines = [f"{each.lane}: {each.name} {each.start_s * 1e3:.6g} to {each.end_s * 1e3:.6g} ms" for each in events]
    assert_expected_inline(
        "\n".join(lines),
        """\
network: bucket 0 3 to 8 ms
network: bucket 1 8 to 11 ms
network: bucket 2 12 to 20 ms
compute: forward -5 to 0 ms
compute: backward 0 to 20 ms
exposed: exposed 14 to 20 ms
compute: optimizer 20 to 21 ms""",
    )


def test_two_links_have_a_lane_each():
    lanes = {event.lane for event in events_of(two_level_step(2))}
    assert {"network inside", "network between"} < lanes
    assert NETWORK not in lanes


def test_pictures_are_xml_inside_their_frame():
    root = ElementTree.fromstring(timeline_picture(measured_like(step_of_buckets(500))))
    for each in root.iter():
        if each.tag.endswith("rect") and "x" in each.attrib:
            assert 0 <= float(each.attrib["x"]) <= float(each.attrib["x"]) + float(each.attrib["width"]) <= 1000


def test_assumed_times_have_no_milliseconds():
    step = replace(THREE_BUCKETS, ready=replace(THREE_BUCKETS.ready, backward_s=None, basis=ESTIMATED))
    assert not re.search(r"\d ms\b", timeline_picture(step))
    assert "times assumed" in str(timeline_trace(step)["traceEvents"])


def test_the_timeline_command(tmp_path):
    file, step = tmp_path / "step.json", measured_like(THREE_BUCKETS)
    file.write_text(step.to_json())
    files = {"a.svg": timeline_picture(step), "a.json": json.dumps(timeline_trace(step))}
    assert main(["timeline", str(file), *(part for name in files for part in ("-o", str(tmp_path / name)))]) == 0
    assert {name: (tmp_path / name).read_text() for name in files} == files
    events = json.loads(files["a.json"])["traceEvents"]  # what the format's document asks of those that we use
    assert all(each["ph"] == "M" or (each["ph"] == "X" and each["ts"] >= 0 <= each["dur"]) for each in events)
    assert sum(each["name"].startswith("bucket ") for each in events) == 2 * 3
