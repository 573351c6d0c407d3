"""A step as a list of events; as a trace, a picture and a page; and the command that writes them."""

from __future__ import annotations

import dataclasses
import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

from expecttest import assert_expected_inline
from graphs import bucket_key
from steps import LAYOUT, gradient, measured_like, step_of_buckets, two_level_step

from dp_compile.cli.main import main
from dp_compile.insight.step import MeasuredBucket, MeasuredStep, Step
from dp_compile.insight.timeline import EXPOSED, NETWORK, events_of, timeline_page, timeline_picture, timeline_trace
from dp_compile.plan.backends import GLOO
from dp_compile.plan.buckets import BucketPlan
from dp_compile.plan.cost import AllReduceCost
from dp_compile.plan.ready_times import ESTIMATED, ReadyTimes

KEY = bucket_key("", "sum", "float32", "cpu")
# Three gradients of 1 MB, ready after 2, 6 and 10 ms; a bucket takes 2 ms and 3 ms more for its megabyte.
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


def listed(step: Step, view: str = "planned") -> list[str]:
    return [
        f"{event.lane}: {event.name} {event.start_s * 1e3:.6g} to {event.end_s * 1e3:.6g} ms"
        + (f", launched at {event.launch_s * 1e3:.6g}" if event.launch_s is not None else "")
        for event in events_of(step)
        if event.view == view
    ]


# --- events ---------------------------------------------------------------------------------------------------------


def test_the_measured_view() -> None:
    """The second is launched while the first is on the network, and compute waits for the third twice as long."""
    buckets = MeasuredBucket(0.003, 0.008, 0.0), MeasuredBucket(0.007, 0.011, 0.0), MeasuredBucket(0.012, 0.02, 0.006)
    step = with_measured(STEP, *buckets)
    step = dataclasses.replace(step, measured=dataclasses.replace(step.measured, forward_s=0.005, optimizer_s=0.001))  # type: ignore[type-var]
    assert_expected_inline(
        "\n".join(listed(step, "measured")),
        """\
network: bucket 0 3 to 8 ms, launched at 3
network: bucket 1 8 to 11 ms, launched at 7
network: bucket 2 12 to 20 ms, launched at 12
compute: forward -5 to 0 ms
compute: backward 0 to 20 ms
exposed: exposed 14 to 20 ms
compute: optimizer 20 to 21 ms""",
    )


def test_waits_that_touch_are_one_and_ends_need_not_be_seen() -> None:
    step = with_measured(STEP, MeasuredBucket(0.0, 0.012, 0.002), MeasuredBucket(0.0, 0.016, 0.004))
    assert [line for line in listed(step, "measured") if line.startswith(EXPOSED)] == ["exposed: exposed 10 to 16 ms"]
    unseen = with_measured(STEP, *[MeasuredBucket(0.003, None, 0.001)] * 3)
    assert "network: bucket 0, its end was not seen 3 to 3 ms, launched at 3" in listed(unseen, "measured")
    assert not [line for line in listed(unseen, "measured") if line.startswith(EXPOSED)]


def test_two_links_have_a_lane_each() -> None:
    step = two_level_step(2)
    lanes = {event.lane for event in events_of(step)}
    assert {"network inside", "network between"} < lanes
    assert NETWORK not in lanes
    for number in (0, 1):
        assert len([event for event in events_of(step) if event.bucket == number]) >= 3


# --- a trace --------------------------------------------------------------------------------------------------------


def test_the_structure_of_traces() -> None:
    """What the format's document asks of the events that we use."""
    n_buckets = 500
    trace = timeline_trace(step_of_buckets(n_buckets, measured=True))
    for event in trace["traceEvents"]:
        assert event["ph"] in "XM"
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event["ph"] == "M" or (event["ts"] >= 0 and event["dur"] >= 0)
    json.dumps(trace, allow_nan=False)
    names = [event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"]
    assert names == ["dp_compile planned", "dp_compile measured"]
    assert sum(event["name"].startswith("bucket ") for event in trace["traceEvents"]) == 2 * n_buckets


# The viewer's marks for text and for numbers in an answer are "str" and 0.
# --- a picture and a page -------------------------------------------------------------------------------------------


def test_pictures_are_xml_inside_their_frame() -> None:
    root = ElementTree.fromstring(timeline_picture(measured_like(step_of_buckets(500))))
    for each in root.iter():
        if each.tag.endswith("rect") and "x" in each.attrib:
            assert 0 <= float(each.attrib["x"]) <= float(each.attrib["x"]) + float(each.attrib["width"]) <= 1000


def test_assumed_times_have_no_milliseconds() -> None:
    step = step_of_buckets(5)
    step = dataclasses.replace(step, ready=dataclasses.replace(step.ready, backward_s=None, basis=ESTIMATED))
    assert not re.search(r"\d ms\b", timeline_picture(step))
    assert not re.search(r"\d ms\b", timeline_page(step))
    assert "times assumed" in str(timeline_trace(step)["traceEvents"])


def test_the_page_is_the_picture_and_a_table_without_a_script() -> None:
    named = dataclasses.replace(GRADIENTS[0], name="<b>&.weight")
    plan = BucketPlan((*STEP.plan.buckets[:2], LAYOUT.bucket(KEY, [named], "</table>")))
    page = timeline_page(dataclasses.replace(measured_like(STEP), plan=plan))
    assert "<script" not in page
    assert "<b>" not in page
    assert page.count("</table>") == 1
    assert page.count("<tr>") == 1 + 3
    assert "http" not in page.replace("http-equiv", "").replace("http://www.w3.org/2000/svg", "")
    assert "<td>17.0 ms</td>" in page


# --- the command ----------------------------------------------------------------------------------------------------


def test_the_command(tmp_path: Path) -> None:
    file = tmp_path / "step.json"
    file.write_text(STEP.to_json())
    files: dict[str, Any] = {"a.svg": timeline_picture(STEP), "a.html": timeline_page(STEP)}
    files["a.json"] = json.dumps(timeline_trace(STEP))
    assert main(["timeline", str(file), *(part for name in files for part in ("-o", str(tmp_path / name)))]) == 0
    assert {name: (tmp_path / name).read_text() for name in files} == files
