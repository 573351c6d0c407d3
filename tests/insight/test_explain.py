"""Explanations: one screen of 80 columns, figures that are those of the timeline, at most three pieces of advice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from expecttest import assert_expected_inline
from graphs import bucket_key
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import dp_compile
from dp_compile.cli.main import main
from dp_compile.engine.record import Placement
from dp_compile.insight.explain import MOST_ADVICE, SMALLEST_GAIN, WIDTH, advice_for, explanation_of
from dp_compile.insight.observe import step_of
from dp_compile.insight.step import MeasuredBucket, MeasuredStep, Step, planned_buckets
from dp_compile.passes.result import PeakMemory, Refusal
from dp_compile.plan.backends import NCCL
from dp_compile.plan.buckets import UNUSED_FLAGS, BucketKey, BucketPlan, GradientSpec, Layout, plan_buckets
from dp_compile.plan.cost import AllReduceCost
from dp_compile.plan.planner import ESTIMATED, ReadyTimes, assumed_times

KEY = bucket_key("", "sum", "float32", "cuda")
MB = 2**20


def gradient(index: int, name: str, numel: int, key: BucketKey = KEY) -> GradientSpec:
    shape = (numel // 256, 256) if numel % 256 == 0 else (numel,)
    return GradientSpec(index, name, shape, (256, 1) if len(shape) == 2 else (1,), 4, key)


GRADIENTS = (
    gradient(3, "blocks.1.weight", 8 * MB),
    gradient(2, "blocks.1.bias", 100),
    gradient(1, "blocks.0.weight", 8 * MB),
    gradient(0, "token.weight", 2 * MB),
    gradient(4, UNUSED_FLAGS, 4),
)
PLAN = plan_buckets(GRADIENTS, bucket_cap_mb=30, first_bucket_cap_mb=30, layout=Layout(64))


def step(backward_s: float | None, **changes: object) -> Step:
    """Three gradients of 32, 32 and 8 MiB at 10 GB/s: 3.4 + 3.4 + 0.8 ms, in three buckets."""
    made = Step(
        mode="python hooks",
        strategy="fixed",
        world_size=8,
        backend=NCCL,
        device="cuda",
        plan=PLAN,
        ready=ReadyTimes({3: 0.4, 2: 0.4, 1: 0.9, 0: 1.0}, backward_s, "measured" if backward_s else ESTIMATED),
        cost=AllReduceCost(5e-5, 1e-10),
        cost_source="measured on this group",
        memory=PeakMemory(300 * MB, 400 * MB),
        placements=(
            Placement("token.weight", 8 * MB, True),
            Placement("blocks.0.weight", 32 * MB, False),
        ),
        refusals=(Refusal("all_reduce_1", "not a gradient"),),
        backwards=(("captured", 5),),
    )
    return replace(made, **changes)


def measured(end_s: float, waited_s: tuple[float, ...]) -> MeasuredStep:
    buckets = tuple(MeasuredBucket(0.01 * (number + 1), None, each) for number, each in enumerate(waited_s))
    return MeasuredStep(end_s, buckets, "profiler, median of 5 steps", rank=1)


def check_screen(text: str) -> None:
    lines = text.splitlines()
    assert max(map(len, lines)) <= WIDTH == 80
    assert len(lines) <= 55


# --- the text -------------------------------------------------------------------------------------------------------


def test_a_compute_bound_step_that_was_measured() -> None:
    text = str(explanation_of(step(0.040, measured=measured(0.0425, (0.0, 0.0005, 0.001)))))
    check_screen(text)
    assert_expected_inline(
        text,
        """\
Compute-bound: 1.50 ms exposed of 42.5 ms, measured on rank 1.
  8 ranks, nccl on cuda, python hooks, fixed: 3 buckets, 4 gradients, 72.0 MiB,
    5 captured
  predicted end of backward and communication 40.9 ms, at best 40.9 ms (1.000);
    exposed 0.889 ms
  compute 40.0 ms, communication 7.70 ms
  measured: compute 41.0 ms, exposed 1.50 ms (profiler, median of 5 steps);
    predicted end -3.8%
  backward: measured
  link: an all-reduce takes 50 us + nbytes / (10 GB/s), measured on this group
  peak memory of the backward, simulated: 300.0 MiB; as torch's DDP 400.0 MiB
  copied into buckets: 8.0 MiB of 40.0 MiB
  passes left 1 node alone; all_reduce_1: not a gradient

Buckets in launch order, n gradients each (in ms; waited is measured)
#      size  n  ready  start   end  exposed  waited  why
0  32.0 MiB  1   16.0   16.0  19.4        0       0  hidden
1  32.0 MiB  2   36.0   36.0  39.4        0   0.500  hidden
2   8.0 MiB  1   40.0   40.0  40.9    0.889    1.00  waits for token.weight

Advice, each alone, with its predicted gain:
  1.0%, 0.419 ms: mp_policy, reduce_dtype=bfloat16: fewer bytes, other rounding""",
    )


def test_the_first_line_says_that_nothing_was_measured() -> None:
    """An assumed backward is never stated as a fact: its times are percent."""
    explained = explanation_of(step(None))
    text = str(explained)
    assert text.startswith("Estimated, not measured: ")
    assert " ms" not in text
    assert (explained.bound_by, explained.exposed_s) == ("not known", pytest.approx(step(None).exposed_s))
    assert str(explanation_of(step(0.004))).startswith("Estimated, not measured: communication-bound")


# --- the figures ----------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    cap_mb=st.sampled_from([0.01, 1.0, 30.0]),
    backward_ms=st.sampled_from([None, 0.0, 1.0, 50.0]),
    alpha_us=st.sampled_from([0.0, 50.0]),
)
def test_the_figures_are_those_of_the_timeline(cap_mb: float, backward_ms: float | None, alpha_us: float) -> None:
    plan = plan_buckets(GRADIENTS, bucket_cap_mb=cap_mb, first_bucket_cap_mb=cap_mb, layout=Layout(64))
    ready = replace(assumed_times(GRADIENTS), backward_s=None if backward_ms is None else backward_ms / 1e3)
    seen = step(1.0, plan=plan, ready=ready, cost=AllReduceCost(alpha_us * 1e-6, 1e-10))
    explained, planned = explanation_of(seen), planned_buckets(seen)
    assert explained.exposed_s == pytest.approx(sum(bucket.exposed_s for bucket in planned))
    assert explained.end_s == pytest.approx(seen.backward_s + explained.exposed_s)
    assert [bucket.planned for bucket in explained.buckets] == planned
    assert explained.bound_s <= explained.end_s * (1 + 1e-9)
    assert len(explained.advice) <= MOST_ADVICE
    assert all(each.gain_s > 0 and SMALLEST_GAIN < each.share <= 1 for each in explained.advice)
    assert max(map(len, str(explained).splitlines())) <= WIDTH


def test_advice_that_can_be_followed() -> None:
    """One bucket for everything is ready at the end: other buckets hide most of it."""
    one = BucketPlan((Layout(64).bucket(GRADIENTS),))
    advice = {each.change: each.gain_s for each in advice_for(step(0.040, plan=one))}
    assert max(gain_s for change, gain_s in advice.items() if "bucket" in change) > 0.004
    nominal = explanation_of(step(None, plan=one, cost_source="nominal for nccl, not measured")).advice
    assert [each.at_most for each in nominal if "calibrate" in each.change] == [True]
    alone = explanation_of(step(0.004, world_size=1))
    assert (alone.end_s, alone.exposed_s, alone.advice) == (None, None, ())
    assert "there is one rank" in " ".join(str(alone).split())


# --- the command, and a module --------------------------------------------------------------------------------------


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "step.json"
    file.write_text(step(0.004).to_json())
    assert main(["explain", str(file), "--buckets"]) == 0
    assert capsys.readouterr().out == f"{explanation_of(step(0.004)).text(verbose=True)}\n"
    file.write_text(file.read_text().replace('"version": 4', '"version": 7'))
    assert main(["explain", str(file)]) == 2
    assert "version 7 in place of 4" in capsys.readouterr().err


@pytest.mark.usefixtures("fake_group")
def test_explains_a_module() -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    dp_compile.replicate(model, config=dp_compile.ReplicateConfig(backend="aot_eager"))
    with pytest.raises(dp_compile.UnsupportedModuleError, match="nothing to explain yet"):
        dp_compile.explain(model)
    compiled = torch.compile(model, backend="aot_eager")
    for _ in range(2):
        compiled(torch.randn(5, 8)).sum().backward()
    explained, seen = dp_compile.explain(model), step_of(model)
    check_screen(str(explained))
    assert str(explained).startswith("Estimated, not measured: ")
    assert str(explained) == str(explanation_of(Step.from_json(seen.to_json())))
    assert all(name in explained.text(verbose=True) for name, _ in model.named_parameters())
    assert (seen.ready.basis, seen.plan) == (ESTIMATED, dp_compile.report(model).plan)
    assert seen.cost_source == "nominal for fake, not measured"
