"""Explanations: what they say on one screen, that the figures are those of the timeline, files, every mode."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from expecttest import assert_expected_inline
from graphs import bucket_key
from hypothesis import given, settings
from hypothesis import strategies as st
from steps import step_of_buckets, two_level_step
from torch import nn

import dp_compile
from dp_compile.cli.main import main
from dp_compile.engine.record import Placement
from dp_compile.insight.explanation import Explanation, explanation_of
from dp_compile.insight.explanation.advice import SMALLEST_GAIN, advice_for, wire_that_does_not_pay
from dp_compile.insight.explanation.text import WIDTH, format_ms, percent
from dp_compile.insight.observe import step_of
from dp_compile.insight.prediction import Scenario, predict
from dp_compile.insight.step import MeasuredBucket, MeasuredStep, Step, planned_buckets
from dp_compile.passes.result import PeakMemory, Refusal
from dp_compile.plan.backends import GLOO, NCCL
from dp_compile.plan.buckets import UNUSED_FLAGS, BucketKey, BucketPlan, GradientSpec, Layout, plan_buckets
from dp_compile.plan.cost import AllReduceCost
from dp_compile.plan.ready_times import ESTIMATED, MEASURED, ReadyTimes, assumed_times
from dp_compile.testing.ranks import Ranks

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
        ready=ReadyTimes({3: 0.4, 2: 0.4, 1: 0.9, 0: 1.0}, backward_s, MEASURED if backward_s else ESTIMATED),
        cost=AllReduceCost(5e-5, 1e-10),
        cost_source="measured on this group",
        memory=PeakMemory(300 * MB, "mm", 400 * MB),
        placements=(
            Placement("token.weight", 8 * MB, "it is used elsewhere"),
            Placement("blocks.0.weight", 32 * MB, None),
        ),
        refusals=(Refusal("all_reduce_1", "not a gradient"),),
        backwards=(("captured", 5),),
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def measured(end_s: float, waited_s: tuple[float, ...]) -> MeasuredStep:
    buckets = tuple(MeasuredBucket(0.01 * (number + 1), None, each) for number, each in enumerate(waited_s))
    return MeasuredStep(end_s, buckets, "profiler, median of 5 steps", rank=1)


def check_screen(text: str) -> None:
    lines = text.splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert next(number for number, line in enumerate(lines) if line.startswith("Buckets")) <= 45


# --- the text ---------------------------------------------------------------------------------------------------------


def test_a_communication_bound_step() -> None:
    text = str(explanation_of(step(0.004)))
    check_screen(text)
    assert_expected_inline(
        text,
        """\
Communication-bound: communication would take 7.70 ms if nothing overlapped, the backward takes 4.00 ms.
  8 ranks, nccl on cuda, python hooks, fixed: 3 buckets, 4 gradients, 72.0 MiB; backwards: 5 captured
  backward: measured, the slowest rank's; ready times: measured, the slowest rank's
  link: an all-reduce takes 50 us + nbytes / (10 GB/s), measured on this group

  times in ms                                      predicted
  backward, compute alone                               4.00
  communication if nothing overlapped                   7.70
  exposed: compute stands still for communication       5.30
  end of backward and communication                     9.30
  best possible end, whatever the buckets               9.20
  end over the best possible end                       1.011

Compute: 2.00 ms, 50% of the backward, lie between blocks.1.bias and blocks.0.weight, estimated.
Exposed: 5.30 ms, 69% of the communication, lie behind the end of the backward (predicted).
  bucket 1, 3.41 ms: it could start at 3.60 ms, but the network carries earlier buckets until 5.01 ms (2
    gradients, 32.0 MiB, the largest blocks.0.weight).
  bucket 0, 1.01 ms: it starts at 1.60 ms because blocks.1.weight is ready last (1 gradient, 32.0 MiB).
  bucket 2, 0.889 ms: it could start at 4.00 ms, but the network carries earlier buckets until 8.41 ms (1
    gradient, 8.0 MiB).
  The network does not rest from bucket 0 on: 3 buckets, 72.0 MiB, from 1.60 ms, when blocks.1.weight is
    ready.
  No plan can hide 5.20 ms of it; 0.100 ms are due to where this plan's buckets end.

Peak memory of the backward, simulated: 300.0 MiB; as torch's DDP 400.0 MiB (-25.0%).
Copies: 8.0 MiB of 40.0 MiB are copied to where they are reduced.
  1 gradient, 8.0 MiB, token.weight: it is used elsewhere
Left alone by the passes: 1 node
  all_reduce_1: not a gradient

What would help, each alone (predicted, of 9.30 ms until backward and communication are over)
      3.55 ms   38%  double the batch on each rank: so much less time per sample
      3.50 ms   38%  reduce_dtype=torch.bfloat16, same buckets: fewer bytes, other rounding
      3.50 ms   38%  twice the bandwidth between ranks: a limit of the link
    0.0750 ms  0.8%  half the latency of a collective, 25 us instead of 50: a limit of the link
    0.0500 ms  0.5%  bucket_cap_mb=math.inf: 2 buckets instead of 3

Buckets in launch order (all float32 cuda sum; times in ms, predicted)
  #     bytes  gradients  ready  launch  finish  exposed  ready last
  0  32.0 MiB          1   1.60    1.60    5.01     1.01  blocks.1.weight
  1  32.0 MiB          2   3.60    5.01    8.41     3.41  blocks.0.weight
  2   8.0 MiB          1   4.00    8.41    9.30    0.889  token.weight""",
    )


def test_a_compute_bound_step_that_was_measured() -> None:
    text = str(explanation_of(step(0.040, measured=measured(0.0425, (0.0, 0.0005, 0.001)))))
    check_screen(text)
    assert_expected_inline(
        text,
        """\
Compute-bound: the backward takes 40.0 ms, communication would take 7.70 ms if nothing overlapped.
  8 ranks, nccl on cuda, python hooks, fixed: 3 buckets, 4 gradients, 72.0 MiB; backwards: 5 captured
  backward: measured, the slowest rank's; ready times: measured, the slowest rank's
  link: an all-reduce takes 50 us + nbytes / (10 GB/s), measured on this group

  times in ms                                      predicted  measured
  backward, compute alone                               40.0      41.0
  communication if nothing overlapped                   7.70         -
  exposed: compute stands still for communication      0.889      1.50
  end of backward and communication                     40.9      42.5
  best possible end, whatever the buckets               40.9         -
  end over the best possible end                       1.000     1.039

Compute: 9.76 ms, 24% of the backward, lie before blocks.1.weight is ready, measured on rank 1.
Exposed: 0.889 ms, 12% of the communication, lie behind the end of the backward (predicted).
  bucket 2, 0.889 ms: it starts at 40.0 ms because token.weight is ready last (1 gradient, 8.0 MiB).
  No plan can hide 0.889 ms of it; 0 ms are due to where this plan's buckets end.
Measured on rank 1 (profiler, median of 5 steps): compute stood still for 1.50 ms, most of it 1.00 ms for
  bucket 2, 0.500 ms for bucket 1; the end is predicted 3.8% earlier than measured.

Peak memory of the backward, simulated: 300.0 MiB; as torch's DDP 400.0 MiB (-25.0%).
Copies: 8.0 MiB of 40.0 MiB are copied to where they are reduced.
  1 gradient, 8.0 MiB, token.weight: it is used elsewhere
Left alone by the passes: 1 node
  all_reduce_1: not a gradient

What would help, each alone (predicted, of 40.9 ms until backward and communication are over)
     4.88 ms   12%  half the compute before blocks.1.weight is ready
    0.444 ms  1.1%  double the batch on each rank: so much less time per sample
    0.419 ms  1.0%  reduce_dtype=torch.bfloat16, same buckets: fewer bytes, other rounding
    0.419 ms  1.0%  twice the bandwidth between ranks: a limit of the link

Buckets in launch order (all float32 cuda sum; times in ms, predicted, then measured)
  #     bytes  gradients  ready  launch  finish  exposed  launch  finish  waited  ready last
  0  32.0 MiB          1   16.0    16.0    19.4   hidden    10.0       -       0  blocks.1.weight
  1  32.0 MiB          2   36.0    36.0    39.4   hidden    20.0       -   0.500  blocks.0.weight
  2   8.0 MiB          1   40.0    40.0    40.9    0.889    30.0       -    1.00  token.weight""",
    )


def test_an_assumed_backward_is_never_stated_as_a_fact() -> None:
    text = str(explanation_of(step(None)))
    check_screen(text)
    assert "not known, nobody has timed the backward" in text
    assert "predicted" not in text
    assert text.count("assumed") >= 4


def test_a_measured_step_stands_for_a_backward_that_nobody_timed() -> None:
    """40 ms, 4 of them waiting: it computes for 36."""
    explained = explanation_of(step(None, measured=measured(0.040, (0.0, 0.001, 0.003))))
    assert explained.backward_s == pytest.approx(0.036)
    assert (explained.bound_by, explained.backward_from) == ("compute", "measured on rank 1")
    assert explained.measured is not None
    assert explained.measured.exposed_s == pytest.approx(0.004)


def test_every_bucket_with_its_members() -> None:
    text = explanation_of(step(0.004)).text(verbose=True)
    assert_expected_inline(
        text[text.index("Members") :],
        """\
Members, and why a bucket ends where it ends (times as believed when it was planned)
  bucket 0: reached the first cap of 30 MiB
    blocks.1.weight
  bucket 1: reached the cap of 30 MiB
    blocks.1.bias, blocks.0.weight
  bucket 2: last of its key
    token.weight, <unused-parameter flags>""",
    )


def test_many_buckets_are_folded_and_none_is_lost() -> None:
    gradients = [gradient(index, f"layers.{index}.weight", 2560) for index in range(300)]
    plan = plan_buckets(gradients, bucket_cap_mb=0.001, first_bucket_cap_mb=0.001, layout=Layout(64))
    explained = explanation_of(step(0.1, plan=plan, ready=replace(assumed_times(gradients), backward_s=0.1)))
    short, long = str(explained), explained.text(verbose=True)
    check_screen(short)
    assert len(short.splitlines()) < 70
    assert "buckets more" in short
    assert "buckets more" not in long
    assert all(f"layers.{index}.weight" in long for index in range(300))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0123456, "12.3 ms"), (0.0041, "4.10 ms"), (1.2345, "1234 ms"), (0.0, "0 ms"), (2e-6, "0.00200 ms")],
)
def test_times_have_three_digits(seconds: float, text: str) -> None:
    assert format_ms(seconds) == text


def test_shares() -> None:
    assert [percent(share) for share in (0.004, 0.0994, 0.0996, 1.0)] == ["0.4%", "9.9%", "10%", "100%"]


# --- the figures ------------------------------------------------------------------------------------------------------

GRADIENT = st.builds(
    lambda numel, half: (numel, "bfloat16" if half else "float32"), st.integers(1, 5_000_000), st.booleans()
)


@settings(max_examples=60)
@given(
    sizes=st.lists(GRADIENT, min_size=1, max_size=8),
    cap_mb=st.sampled_from([0.01, 1.0, 30.0]),
    backward_ms=st.sampled_from([None, 0.0, 1.0, 50.0]),
    alpha_us=st.sampled_from([0.0, 50.0]),
    deferred=st.booleans(),
)
def test_the_figures_are_those_of_the_timeline(
    sizes: list[tuple[int, str]], cap_mb: float, backward_ms: float | None, alpha_us: float, deferred: bool
) -> None:
    gradients = [
        gradient(index, f"p{index}", numel, KEY._replace(dtype=dtype)) for index, (numel, dtype) in enumerate(sizes)
    ]
    plan = plan_buckets(gradients, bucket_cap_mb=cap_mb, first_bucket_cap_mb=cap_mb, layout=Layout(64))
    ready = replace(assumed_times(gradients), backward_s=None if backward_ms is None else backward_ms / 1e3)
    seen = step(1.0, plan=plan, ready=ready, cost=AllReduceCost(alpha_us * 1e-6, 1e-10), deferred=deferred)
    explained, planned = explanation_of(seen), planned_buckets(seen)
    assert explained.exposed_s == pytest.approx(sum(bucket.exposed_s for bucket in planned))
    assert explained.end_s == pytest.approx(seen.backward_s + explained.exposed_s)
    assert [bucket.planned for bucket in explained.buckets] == planned
    assert explained.bound_s <= explained.end_s * (1 + 1e-9)
    assert explained.ratio is None or explained.ratio == pytest.approx(explained.end_s / explained.bound_s)
    gains = [advice.gain_s for advice in explained.advice]
    shares = [advice.share for advice in explained.advice]
    assert all(gain > 0 for gain in gains)
    assert shares == sorted(shares, reverse=True)
    assert all(SMALLEST_GAIN < share <= 1 for share in shares)
    assert Explanation.from_json(explained.to_json()) == explained
    assert max(map(len, str(explained).splitlines())) <= WIDTH


def test_which_gradient_lets_a_bucket_go() -> None:
    """Launches keep their order: the second bucket waits for the first one's gradient."""
    late = ReadyTimes({3: 1.0, 2: 0.1, 1: 0.2, 0: 0.3}, 0.010, "stated")
    buckets = explanation_of(step(0.010, ready=late)).buckets
    assert [(bucket.released_by, bucket.released_in) for bucket in buckets[:2]] == [("blocks.1.weight", 0)] * 2


def test_reductions_at_the_end_of_the_backward() -> None:
    explained = explanation_of(step(0.040, deferred=True))
    assert explained.exposed_s == pytest.approx(explained.communication_s)
    assert "starts at 40.0 ms, when the backward ends, as all reductions do" in str(explained)
    assert any("without graph breaks" in advice.change for advice in explained.advice)


def test_advice_that_can_be_followed() -> None:
    """One bucket for everything is ready at the end: other buckets hide most of it."""
    one = BucketPlan((Layout(64).bucket(KEY, GRADIENTS, "stated"),))
    advice = explanation_of(step(0.040, plan=one)).advice
    buckets = next(each for each in advice if "instead of 1" in each.change)
    assert buckets.gain_s > 0.004
    assert not any("calibrate" in each.change or "replan_after" in each.change for each in advice)
    nominal = explanation_of(step(None, plan=one, cost_source="nominal for nccl, not measured")).advice
    assert [each.at_most for each in nominal if "calibrate" in each.change and "replan_after" in each.change] == [True]


def test_no_timeline() -> None:
    for changes, why in (
        ({"mode": "torch's C++ reducer"}, "makes its own buckets"),
        ({"mode": "not decided, no backward yet"}, "what reduces is not known"),
        ({"world_size": 1}, "there is one rank"),
    ):
        explained = explanation_of(step(0.004, **changes))
        assert (explained.end_s, explained.exposed_s, explained.ratio, explained.advice) == (None, None, None, ())
        assert why in str(explained)
        check_screen(str(explained))


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not an explanation"),
        ("[]", "not an explanation"),
        (json.dumps({"version": 7}), "version 7, readable is 1"),
        (json.dumps({"version": 1}), "not an explanation"),
        (json.dumps(json.loads(explanation_of(step(0.004)).to_json()) | {"surplus": 1}), "surplus"),
        (json.dumps(json.loads(explanation_of(step(0.004)).to_json()) | {"buckets": 3}), "not an explanation"),
    ],
)
def test_refuses_other_files(text: str, message: str) -> None:
    with pytest.raises(dp_compile.ConfigError, match=message):
        Explanation.from_json(text)


def test_refuses_a_measurement_of_another_plan() -> None:
    with pytest.raises(dp_compile.ConfigError, match="the plan has 3 buckets, 2 were measured"):
        explanation_of(step(0.004, measured=measured(0.1, (0.0, 0.0))))


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "step.json"
    file.write_text(step(0.004).to_json())
    assert main(["explain", str(file)]) == 0
    assert capsys.readouterr().out == f"{explanation_of(step(0.004))}\n"
    assert main(["explain", str(file), "--buckets"]) == 0
    assert "Members" in capsys.readouterr().out
    assert main(["explain", str(file), "--json"]) == 0
    assert Explanation.from_json(capsys.readouterr().out) == explanation_of(step(0.004))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot read"),
        ("\0\xff", "not a step file"),
        ("{}", "not a step file"),
        (json.dumps(PLAN.to_dict()), "a plan file: dp-compile plan show"),
        (explanation_of(step(0.004)).to_json(), "an explanation"),
        (json.dumps(json.loads(step(0.004).to_json()) | {"version": 9}), "version 9, readable is 2"),
        (step(0.004, measured=measured(0.1, (0.0,))).to_json(), "3 buckets, 1 were measured"),
    ],
)
def test_the_command_refuses(
    text: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "step.json"
    if text is not None:
        file.write_text(text)
    assert main(["explain", str(file)]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert str(file) in said
    assert said.count("\n") == 1


# --- of a module ------------------------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """Gradients of two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(self.first(x).bfloat16())
        return out.float()


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"strategy": "coalesced"},
        {"strategy": "ddp"},
        {"bucket_cap_mb": 0.0001},
        {"passes": ()},
    ],
    ids=str,
)
def test_explains_a_module(options: dict[str, object]) -> None:
    model, passes = Mixed(), {name: options[name] for name in ("passes",) if name in options}
    config = {name: value for name, value in options.items() if name != "passes"}
    dp_compile.replicate(model, config=dp_compile.ReplicateConfig(backend="aot_eager", **config), **passes)  # type: ignore[arg-type]
    with pytest.raises(dp_compile.ModuleError, match="nothing to explain yet"):
        dp_compile.explain(model)
    compiled = torch.compile(model, backend="aot_eager")
    for _ in range(2):
        compiled(torch.randn(5, 8)).sum().backward()
    explained = dp_compile.explain(model)
    check_screen(str(explained))
    assert explained == explanation_of(Step.from_json(step_of(model).to_json()))
    assert explained.gradients == 4
    assert {bucket.key.split()[0] for bucket in explained.buckets} >= {"float32", "bfloat16"}
    assert all(name in explained.text(verbose=True) for name, _ in model.named_parameters())
    assert explained.end_s is not None
    assert step_of(model).deferred == ("passes" in options)


def explain_under_torchs_reducer() -> str:
    model = nn.Linear(4, 4)
    dp_compile.replicate(model, config=dp_compile.ReplicateConfig(ddp_python_hook=False))
    model(torch.ones(2, 4)).sum().backward()
    return str(dp_compile.explain(model))


def test_explains_a_module_under_torchs_reducer(ranks2: Ranks) -> None:
    for text in ranks2.run(explain_under_torchs_reducer):
        check_screen(text)
        assert "No timeline: torch's C++ reducer makes its own buckets" in text


def test_who_reads_only_the_first_lines_sees_no_stack_trace(tmp_path: Path) -> None:
    file = tmp_path / "step.json"
    file.write_text(step(0.004).to_json())
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-m", "dp_compile", "explain", str(file)]
    ended = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, text=True)
    os.close(write_end)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.usefixtures("fake_group")
def test_a_module_that_is_not_replicated() -> None:
    with pytest.raises(dp_compile.ModuleError):
        dp_compile.explain(nn.Linear(2, 2))


def test_fields_are_documented() -> None:
    documented = (Explanation.__doc__ or "").partition("Args:")[2]
    assert all(f"{field.name}: " in documented for field in dataclasses.fields(Explanation))


# --- a cheaper wire, other levels of network ------------------------------------------------------------------------


def changes(step: Step) -> dict[str, float]:
    return {each.change.partition(":")[0].partition(",")[0]: each.gain_s for each in advice_for(step)}


def test_a_cheaper_wire_where_bytes_are_exposed_and_why_not_elsewhere() -> None:
    exposed = step_of_buckets(6)
    after = predict(exposed, Scenario(gradient_dtype="bfloat16"))
    gain_s = predict(exposed, Scenario()).makespan_s - after.makespan_s
    assert changes(exposed)["reduce_dtype=torch.bfloat16"] == pytest.approx(gain_s)
    assert not list(wire_that_does_not_pay(exposed))
    hidden = replace(exposed, cost=exposed.cost.scaled(1e-9))
    assert "reduce_dtype=torch.bfloat16" not in changes(hidden)
    (why,) = explanation_of(hidden).notes
    assert why == (
        "A cheaper wire (reduce_dtype=torch.bfloat16) is predicted to gain nothing: all communication is hidden."
    ) or why.endswith("what is exposed is latency, not bytes.")
    late = two_level_step(4)
    assert list(wire_that_does_not_pay(late)) == [
        "A cheaper wire (reduce_dtype=torch.bfloat16) is predicted to gain nothing: what is exposed is latency, not "
        "bytes."
    ]


def test_two_levels_are_advised_where_nodes_could_be_known_and_never_as_measured() -> None:
    many = replace(step_of_buckets(6), world_size=32)
    (change,) = [each.change for each in advice_for(many) if "device_mesh" in each.change]
    assert change.startswith("a device_mesh of two dimensions, 4 nodes x 8 ranks")
    assert change.endswith("nvlink4 inside (nominal, not measured)")
    for other in (replace(many, world_size=8), replace(many, world_size=12), replace(many, backend=GLOO)):
        assert not [each for each in advice_for(other) if "device_mesh" in each.change]


def test_one_level_for_small_buckets_is_advised_where_there_are_two() -> None:
    slow_inside = two_level_step(6)
    cost = AllReduceCost(1e-4, 1e-11, AllReduceCost(3e-3, 0.0), AllReduceCost(1e-4, 1e-11))
    assert changes(replace(slow_inside, cost=cost))['two_levels="auto"'] > 0
    assert 'two_levels="auto"' not in changes(slow_inside)
