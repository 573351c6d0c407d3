"""A step as a list of events; as a trace and a picture; and the command that writes them."""

from __future__ import annotations

import dataclasses
import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

from expecttest import assert_expected_inline
from steps import measured_like, step_of_buckets, two_level_step

from dp_compile.cli.main import main
from dp_compile.insight.step import MeasuredBucket, MeasuredStep
from dp_compile.insight.timeline import NETWORK, events_of, timeline_picture, timeline_trace
from dp_compile.plan.planner import ESTIMATED

STEP = step_of_buckets(3)


def test_the_measured_view() -> None:
    """The second is launched while the first is on the network, and compute waits for the third twice as long."""
    buckets = MeasuredBucket(0.003, 0.008, 0.0), MeasuredBucket(0.007, 0.011, 0.0), MeasuredBucket(0.012, 0.02, 0.006)
    seen = MeasuredStep(0.02, buckets, "stated", forward_s=0.005, optimizer_s=0.001)
    events = [event for event in events_of(dataclasses.replace(STEP, measured=seen)) if event.view == "measured"]
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


def test_two_links_have_a_lane_each() -> None:
    lanes = {event.lane for event in events_of(two_level_step(2))}
    assert {"network inside", "network between"} < lanes
    assert NETWORK not in lanes


def test_pictures_are_xml_inside_their_frame() -> None:
    root = ElementTree.fromstring(timeline_picture(measured_like(step_of_buckets(500))))
    for each in root.iter():
        if each.tag.endswith("rect") and "x" in each.attrib:
            assert 0 <= float(each.attrib["x"]) <= float(each.attrib["x"]) + float(each.attrib["width"]) <= 1000


def test_assumed_times_have_no_milliseconds() -> None:
    step = dataclasses.replace(STEP, ready=dataclasses.replace(STEP.ready, backward_s=None, basis=ESTIMATED))
    assert not re.search(r"\d ms\b", timeline_picture(step))
    assert "times assumed" in str(timeline_trace(step)["traceEvents"])


def test_the_command(tmp_path: Path) -> None:
    file, step = tmp_path / "step.json", measured_like(STEP)
    file.write_text(step.to_json())
    files: dict[str, Any] = {"a.svg": timeline_picture(step)}
    files["a.json"] = json.dumps(timeline_trace(step))
    assert main(["timeline", str(file), *(part for name in files for part in ("-o", str(tmp_path / name)))]) == 0
    assert {name: (tmp_path / name).read_text() for name in files} == files
    events = json.loads(files["a.json"])["traceEvents"]  # what the format's document asks of those that we use
    assert all(each["ph"] == "M" or (each["ph"] == "X" and each["ts"] >= 0 <= each["dur"]) for each in events)
    assert sum(each["name"].startswith("bucket ") for each in events) == 2 * 3
