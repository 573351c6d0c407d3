"""Plan files on the command line: shown, compared, checked; and what is said of files that are none."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from expecttest import assert_expected_inline
from graphs import bucket_key
from hypothesis import given
from hypothesis import strategies as st

import dp_compile
from dp_compile.cli.main import main
from dp_compile.insight.plan_file import differences, problems, reach, read_plan
from dp_compile.insight.step import Step, planned_buckets
from dp_compile.plan.backends import GLOO
from dp_compile.plan.buckets import UNUSED_FLAGS, BucketPlan, GradientSpec, Layout
from dp_compile.plan.cost import AllReduceCost
from dp_compile.plan.ready_times import ReadyTimes
from dp_compile.plan.strategies import plan_to_json

KEY = bucket_key("", "sum", "float32", "cpu")
NAMES = ("head.weight", "b.bias", "b.weight", "a.weight", UNUSED_FLAGS)
SPECS = {
    name: GradientSpec(index, name, (256, 64), (64, 1), 4, KEY)
    if "weight" in name
    else GradientSpec(index, name, (8,), (1,), 4, KEY)
    for index, name in enumerate(NAMES)
}


def plan(*buckets: str) -> BucketPlan:
    """Buckets by the first letters of their members, `h` in two pieces as `1` and `2`."""
    named = {
        "h": "head.weight",
        "1": "head.weight",
        "2": "head.weight",
        "x": "b.bias",
        "b": "b.weight",
        "a": "a.weight",
    }
    rows = {"1": (0, 100), "2": (100, 256)}
    made = []
    for letters in buckets:
        specs = [SPECS[named.get(letter, UNUSED_FLAGS)] for letter in letters]
        places = {position: rows[letter] for position, letter in enumerate(letters) if letter in rows}
        made.append(Layout(64).bucket(KEY, specs, "why", places))
    return BucketPlan(tuple(made))


PLAN = plan("hx", "baf")
STEP = Step(
    mode="python hooks",
    strategy="optimal",
    world_size=2,
    backend=GLOO,
    device="cpu",
    plan=PLAN,
    ready=ReadyTimes({0: 0.2, 1: 0.3, 2: 0.6}, 0.001, "stated"),
    cost=AllReduceCost(1e-4, 1e-9),
    cost_source="stated",
)


def written(path: Path, content: BucketPlan | str) -> str:
    path.write_text(content if isinstance(content, str) else plan_to_json(content))
    return str(path)


# --- what is different ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (plan("hx", "baf"), []),
        (
            plan("h", "xbaf"),
            ["from bucket 0 to bucket 1: 1 gradient, 32 B: b.bias", "bucket 0 ends with head.weight, not with b.bias"],
        ),
        (plan("hx", "abf"), ["bucket 1: a.weight comes before b.weight"]),
        (plan("baf", "hx"), ["launch order: 0 -> 1, 1 -> 0"]),
        (
            plan("hx", "b", "af"),
            [
                "2 buckets -> 3",
                "from bucket 1 to a new one, 1 in the second: 1 gradient, 64.0 KiB: b.weight",
            ],
        ),
        (
            plan("1", "2x", "baf"),
            [
                "only in the first: head.weight",
                "only in the second: head.weight[0:100], head.weight[100:256]",
                "2 buckets -> 3",
            ],
        ),
        (replace(plan("hx", "baf"), folds_scale=False), ["folds_scale: True -> False"]),
    ],
)
def test_what_is_different(other: BucketPlan, expected: list[str]) -> None:
    assert list(differences(PLAN, other)) == expected


def test_other_descriptions_and_memory() -> None:
    data = json.loads(plan_to_json(PLAN))
    data["buckets"][0]["members"][0]["offset"] = None
    data["buckets"][1]["members"][0]["gradient"]["shape"] = [64, 256]
    found = list(differences(PLAN, read_plan(json.dumps(data))))
    assert found[0].startswith(
        "b.weight: float32[256, 64] strides [64, 1] cpu sum times 0.5, index 2 -> float32[64, 256]"
    )
    assert found[1:] == ["now apart, in memory of their own: head.weight"]


@given(st.permutations("hxbaf"), st.sets(st.integers(1, 4)), st.permutations("hxbaf"), st.sets(st.integers(1, 4)))
def test_no_difference_means_the_same_buckets(
    first: list[str], cuts: set[int], second: list[str], other_cuts: set[int]
) -> None:
    def cut(letters: list[str], places: set[int]) -> list[str]:
        ends = [0, *sorted(places), len(letters)]
        return ["".join(letters[start:end]) for start, end in pairwise(ends)]

    one, two = cut(first, cuts), cut(second, other_cuts)
    assert (not list(differences(plan(*one), plan(*two)))) == (one == two)
    assert not list(problems(plan(*one)))


# --- whether it makes sense -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        (plan("hx", "baf"), []),
        (plan("1", "2x", "baf"), []),
        (plan("hx", "baxf"), ["b.bias is in the plan 2 times"]),
        (plan("1x", "baf"), ["the pieces of head.weight overlap or miss rows of its 256: [(0, 100)]"]),
        (plan("1h", "2x", "baf"), ["head.weight is in the plan 3 times"]),
        (BucketPlan(()), ["the plan has no buckets"]),
    ],
)
def test_what_is_wrong(wrong: BucketPlan, expected: list[str]) -> None:
    assert list(problems(wrong)) == expected


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("itemsize", 2, "head.weight is sent in float32, 4 bytes an element, but the file says 2"),
        ("index", 2, "b.weight, head.weight have the same index, 2"),
        ("stride", [1], "head.weight has shape [256, 64] and strides [1], which is no tensor"),
    ],
)
def test_wrong_sizes(field: str, value: object, expected: str) -> None:
    data = json.loads(plan_to_json(PLAN))
    data["buckets"][0]["members"][0]["gradient"][field] = value
    assert list(problems(read_plan(json.dumps(data)))) == [expected]


def test_what_a_plan_reaches() -> None:
    one = plan("hxbaf")
    reached = reach(one, STEP)
    assert reached.end_s == pytest.approx(planned_buckets(replace(STEP, plan=one))[-1].finish_s)
    assert reached.own_s == pytest.approx(planned_buckets(STEP)[-1].finish_s)
    assert reached.bound_s <= min(reached.own_s, reached.end_s)
    assert not reached.assumed
    assert reach(one, replace(STEP, ready=replace(STEP.ready, backward_s=None))).assumed


def test_a_plan_of_another_model() -> None:
    other = replace(SPECS["a.weight"], shape=(64, 256), stride=(256, 1))
    wrong = BucketPlan((Layout(64).bucket(KEY, [SPECS["head.weight"], other], "why"),))
    with pytest.raises(
        dp_compile.ConfigError, match=r"a.weight is float32\[64, 256\] in the plan file, float32\[256, 64"
    ):
        reach(wrong, STEP)
    with pytest.raises(dp_compile.ConfigError, match=r"the plan file misses: a.weight"):
        reach(plan("hx", "bf"), STEP)


# --- the command ------------------------------------------------------------------------------------------------------


def test_show_and_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, step_file = written(tmp_path / "plan.json", PLAN), written(tmp_path / "step.json", STEP.to_json())
    assert main(["plan", "show", file]) == 0
    assert main(["plan", "check", file, "--step", step_file]) == 0
    assert_expected_inline(
        capsys.readouterr().out,
        """\
plan: 2 buckets, 4 gradients, 192.1 KiB
    0    64.0 KiB     2 gradients  float32 cpu sum  head.weight .. b.bias  (why)
    1   128.0 KiB     2 gradients  float32 cpu sum  b.weight .. a.weight + flags  (why)
plan: 2 buckets, 4 gradients, 192.1 KiB; every gradient is in it once
it fits the step; predicted: end 1.23 ms, 0.231 ms exposed
bound 1.17 ms, ratio 1.056; the step's own plan ends at 1.23 ms
""",
    )
    assert main(["plan", "check", file, "--step", step_file, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["problems"] == []
    assert said["reach"]["end_s"] == pytest.approx(said["reach"]["own_s"])


def test_check_exits_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    twice, step_file = (
        written(tmp_path / "plan.json", plan("hx", "baxf")),
        written(tmp_path / "step.json", STEP.to_json()),
    )
    assert main(["plan", "check", twice]) == 1
    assert capsys.readouterr().out == "b.bias is in the plan 2 times\n"
    fewer = written(tmp_path / "fewer.json", plan("hx", "bf"))
    assert main(["plan", "check", fewer]) == 0
    assert main(["plan", "check", fewer, "--step", step_file]) == 1
    assert "the plan file misses: a.weight" in capsys.readouterr().out


def test_diff(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = written(tmp_path / "1.json", PLAN), written(tmp_path / "2.json", plan("h", "xbaf"))
    assert main(["plan", "diff", first, first]) == 0
    assert capsys.readouterr().out == "no difference\n"
    assert main(["plan", "diff", first, second]) == 1
    assert capsys.readouterr().out.startswith("from bucket 0 to bucket 1: 1 gradient, 32 B: b.bias\n")
    assert main(["plan", "diff", first, second, "--json"]) == 1
    assert len(json.loads(capsys.readouterr().out)["differences"]) == 2


def change(edit: Callable[[Any], object]) -> str:
    data = json.loads(plan_to_json(PLAN))
    edit(data)
    return json.dumps(data)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot read"),
        ("", "not a plan file"),
        ("[1]", "it is a list, not an object"),
        ("{}", "it has no 'version' and no 'buckets'"),
        (STEP.to_json(), "it is a step file: dp-compile explain"),
        (change(lambda data: data.update(version=9)), "version 9, readable is 2"),
        (change(lambda data: data.pop("folds_scale")), "not a plan file"),
        (change(lambda data: data.update(buckets=3)), "not a plan file"),
        (change(lambda data: data["buckets"][1].update(members=[])), "bucket 1 of the plan file is empty"),
        (change(lambda data: data["buckets"][1]["members"][0].update(rows=[1])), "not a plan file"),
        (change(lambda data: data["buckets"][1]["members"][0].update(offset="x")), "not a plan file"),
        (change(lambda data: data["buckets"][1]["members"][0]["gradient"].update(shape="big")), "not a plan file"),
        (change(lambda data: data["buckets"][1]["members"][0]["gradient"].update(surplus=1)), "not a plan file"),
    ],
)
@pytest.mark.parametrize("action", ["show", "check", "diff"])
def test_refuses_other_files(
    text: str | None, message: str, action: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(tmp_path / "plan.json") if text is None else written(tmp_path / "plan.json", text)
    assert main(["plan", action, file, *([file] if action == "diff" else [])]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert file in said
    assert said.count("\n") == 1
