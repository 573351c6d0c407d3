"""A step as a list of events, an SVG picture and a trace for Perfetto.

Two views on one axis: `planned` is the prediction of `step.planned_buckets`, `measured` the measurement of one rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from textwrap import wrap
from typing import Any, Final, NamedTuple

from dp_compile.engine.ranges import GATHER
from dp_compile.insight.explain import Explanation
from dp_compile.insight.step import MeasuredStep, Step, gathers_under_the_forward, planned_buckets
from dp_compile.plan.network import links_of
from dp_compile.plan.reduction import BETWEEN, INSIDE, WHOLE
from dp_compile.plan.words import format_bytes

PLANNED, MEASURED = "planned", "measured"
COMPUTE, EXPOSED, NETWORK = "compute", "exposed", "network"
LINK_LANES: Final = {INSIDE: "network inside", BETWEEN: "network between"}
LANES: Final = (COMPUTE, EXPOSED, NETWORK, *LINK_LANES.values())  # from top to bottom


class Event(NamedTuple):
    """A bar of the timeline, in a lane of a view; times in seconds after the start of the backward."""

    view: str
    lane: str
    name: str
    start_s: float
    end_s: float
    bucket: int | None = None  # number in the plan
    launch_s: float | None = None  # before `start_s` if the network was busy


def events_of(step: Step) -> list[Event]:
    """Return the events of the planned view, and of the measured view if the step was measured."""
    events = list(_planned(step))
    return events if step.measured is None else [*events, *_measured(step, step.measured)]


def _planned(step: Step) -> Iterator[Event]:
    buckets, exposed = planned_buckets(step), []
    several = len(links_of(gradient.loads for gradient in step.plan.gradients)) > 1
    for number, each in enumerate(buckets):
        for link, start_s, finish_s, waited_s in each.stages or ((WHOLE, *each[1:4]),):
            lanes = [lane for name, lane in LINK_LANES.items() if link in (name, WHOLE)] if several else [NETWORK]
            yield from (
                Event(PLANNED, lane, f"bucket {number}", start_s, finish_s, number, each.ready_s) for lane in lanes
            )
            exposed += [(finish_s - waited_s, finish_s)] * (waited_s > 0)
    stalls, backward_s, end_s = _joined(exposed), step.backward_s, step.end_s
    if step.left:  # waits for these buckets delay the next forward, all other waits the backward
        early_s = sum(each.waited_s for number, each in enumerate(buckets) if number not in step.left)
        yield Event(PLANNED, COMPUTE, "next forward", backward_s + early_s, end_s + step.forward_s)
        backward_s += early_s
    elif step.gathers_late:
        gathers = gathers_under_the_forward(step)
        stalls += [(each.finish_s - each.waited_s, each.finish_s) for each in gathers if each.waited_s]
        start_s = end_s - step.gather_wait_s
        yield Event(PLANNED, COMPUTE, "next forward", start_s, end_s + step.forward_s)
    elif step.gather_s:
        stalls.append((end_s - step.gather_s, end_s))
        yield Event(PLANNED, NETWORK, "all-gather of parameters", end_s - step.gather_s, end_s)
    if not step.left:  # a stall between two stages of a bucket lengthens the backward
        for stall_s, until_s in stalls:
            backward_s += until_s - stall_s if stall_s < backward_s else 0.0
    yield Event(PLANNED, COMPUTE, "backward", 0.0, backward_s)
    yield from (Event(PLANNED, EXPOSED, EXPOSED, *stall) for stall in stalls)


def _measured(step: Step, seen: MeasuredStep) -> Iterator[Event]:
    exposed = []
    for number, each in enumerate(seen.buckets):
        start_s, end_s, name = each.start_s, each.finish_s, f"bucket {number}"
        if start_s is None or end_s is None:
            start_s, end_s, name = each.launch_s, each.launch_s, f"{name}, its end was not seen"
        yield Event(MEASURED, NETWORK, name, start_s, end_s, number, each.launch_s)
        if each.waited_s:
            until_s = each.wait_s + each.waited_s if each.finish_s is None else each.finish_s
            exposed.append((until_s - each.waited_s, until_s))
    if seen.forward_s:
        yield Event(MEASURED, COMPUTE, "forward", -seen.forward_s, 0.0)
    yield Event(MEASURED, COMPUTE, "backward", 0.0, seen.backward_s)
    forward = seen.next_forward
    if step.has_two_halves and forward is not None:
        yield Event(MEASURED, COMPUTE, "next forward", forward.start_s, forward.end_s)
    gathers = [(start_s, end_s) for what, start_s, end_s in seen.follows if what == GATHER and seen.is_after(start_s)]
    yield from (Event(MEASURED, NETWORK, "all-gather of parameters", *each) for each in gathers)
    yield from (Event(MEASURED, EXPOSED, EXPOSED, *each) for each in _joined([*exposed, *gathers]))
    if seen.optimizer_s:
        start_s = seen.backward_s if step.has_two_halves else max([seen.backward_s, *(end for _, end in gathers)])
        yield Event(MEASURED, COMPUTE, "optimizer", start_s, start_s + seen.optimizer_s)


def _joined(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the spans in order of their start, with touching or overlapping spans merged."""
    joined: list[tuple[float, float]] = []
    for start_s, end_s in sorted(spans):
        if joined and start_s <= joined[-1][1] + 1e-12:
            joined[-1] = joined[-1][0], max(joined[-1][1], end_s)
        else:
            joined.append((start_s, end_s))
    return joined


FIRST_PID: Final = 5_000_001  # above Linux's maximum (4,194,304), so a trace can be merged with torch.profiler's


def timeline_trace(step: Step) -> dict[str, Any]:
    """Return data in Chrome's trace event format, for ui.perfetto.dev. Processes are views, threads are lanes."""
    events, trace = events_of(step), []
    zero_s = min(event.start_s for event in events)
    for pid, view in enumerate(dict.fromkeys(event.view for event in events), FIRST_PID):
        name = f"dp_compile {view}" + ("" if step.is_timed else ", times assumed")
        trace.append({"name": "process_name", "ph": "M", "pid": pid, "tid": 0, "args": {"name": name}})
        for tid, lane in enumerate(LANES):
            if any((event.view, event.lane) == (view, lane) for event in events):
                for what, shown in (("thread_name", {"name": lane}), ("thread_sort_index", {"sort_index": tid})):
                    trace.append({"name": what, "ph": "M", "pid": pid, "tid": tid, "args": shown})
        for event in (event for event in events if event.view == view):
            args: dict[str, Any] = {}
            if event.bucket is not None and event.launch_s is not None:
                bucket, launched_us = step.plan.buckets[event.bucket], _us(event.launch_s - zero_s)
                args = {"bytes": bucket.nbytes, "key": str(bucket.key), "launched_us": launched_us}
                args["members"] = [member.gradient.name for member in bucket.members]
            times = {"ts": _us(event.start_s - zero_s), "dur": _us(event.end_s - event.start_s)}
            place = {"ph": "X", "cat": "dp_compile", "pid": pid, "tid": LANES.index(event.lane)}
            trace.append({"name": event.name} | place | times | {"args": args})
    summary = list(Explanation(step).summary())
    return {"displayTimeUnit": "ms", "otherData": {"dp_compile": summary}, "traceEvents": trace}


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)


_WIDTH, _LEFT, _RIGHT, _BAR, _LINE = 1000.0, 130.0, 980.0, 24.0, 17.0
_INK, _DIM, _RULE = "#1b1f24", "#59636e", "#d9dee3"
_COLOURS: Final = {COMPUTE: "#5c6670", EXPOSED: "#bf4b00"}


def timeline_picture(step: Step) -> str:
    """Return a static SVG. The boxes of buckets have tooltips with their members."""
    events, y, parts = events_of(step), 12.0, []
    summary = Explanation(step).summary()
    for text in (line for each in summary for line in wrap(each, 150, subsequent_indent="    ")):
        y += _LINE
        parts.append(_text(16, y, text))
    y += _LINE
    legend = "A number is a bucket on the network. Exposed: compute waits for communication."
    parts.append(_text(16, y, legend, f' fill="{_DIM}"'))
    start_s, end_s = min(event.start_s for event in events), max(event.end_s for event in events)
    scale = (_RIGHT - _LEFT) / ((end_s - start_s) or 1.0)
    for view in dict.fromkeys(event.view for event in events):
        lanes = [lane for lane in LANES if any((event.view, event.lane) == (view, lane) for event in events)]
        top = y + 2 * _LINE
        bottom = top + 8 + (_BAR + 6) * len(lanes)
        parts.append(_text(16, top, view, ' font-weight="bold"'))
        for tick_s in _ticks(step, start_s, end_s):
            x = _LEFT + (tick_s - start_s) * scale
            parts.append(_text(x, top, step.time_text(tick_s), f' fill="{_DIM}" text-anchor="middle" font-size="11"'))
            parts.append(f'<path d="M{x:.1f} {top + 4:.1f}V{bottom:.1f}" stroke="{_RULE}"/>')
        for number, lane in enumerate(lanes):
            lane_y = top + 8 + (_BAR + 6) * number
            parts.append(_text(16, lane_y + 16, lane, f' fill="{_DIM}"'))
            for event in events:
                if (event.view, event.lane) == (view, lane):
                    parts += _box(step, event, _LEFT + (event.start_s - start_s) * scale, lane_y, scale)
        y = bottom
    height = y + 16
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH:.0f} {height:.0f}" width="{_WIDTH:.0f}"'
    head += f' height="{height:.0f}" font-family="Arial, sans-serif" font-size="12" role="img">'
    paper = f'<rect width="100%" height="100%" fill="#ffffff" stroke="{_RULE}"/>'
    return "\n".join([head, "<title>Timeline of a step</title>", paper, *parts, "</svg>", ""])


def _ticks(step: Step, start_s: float, end_s: float) -> list[float]:
    """Return at most nine times, at multiples of 1, 2 or 5 times a power of ten in the displayed unit."""
    unit_s = 1e-3 if step.is_timed else step.backward_s / 100
    least = (end_s - start_s) / unit_s / 8
    power = 10 ** math.floor(math.log10(least)) if least else 1.0
    size_s = next(each for each in (1, 2, 5, 10) if each * power >= least) * power * unit_s
    return [number * size_s for number in range(math.ceil(start_s / size_s), math.floor(end_s / size_s) + 1)]


def _text(x: float, y: float, content: str, more: str = "") -> str:
    fill = "" if "fill=" in more else f' fill="{_INK}"'
    return f'<text x="{x:.1f}" y="{y:.1f}"{fill}{more}>{escape(content)}</text>'


def _box(step: Step, event: Event, x: float, y: float, scale: float) -> Iterator[str]:
    width, about = (event.end_s - event.start_s) * scale, f"{event.name}, {step.time_text(event.end_s - event.start_s)}"
    short = event.name
    if event.bucket is not None and event.launch_s is not None:
        bucket = step.plan.buckets[event.bucket]
        short = str(event.bucket)
        members = ", ".join(member.gradient.name for member in bucket.members)
        about += f", {format_bytes(bucket.nbytes)}, launched at {step.time_text(event.launch_s)}: {members}"
    shown = max(width - (1 if width > 3 else 0), 0.8)  # one pixel between neighbours
    yield f'<rect x="{x:.1f}" y="{y:.1f}" width="{shown:.1f}" height="{_BAR:.0f}"'
    yield f' fill="{_COLOURS.get(event.lane, "#0067a3")}"><title>{escape(about)}</title></rect>'
    fitting = [text for text in (about.partition(":")[0], short) if len(text) * 6.6 < width - 6]
    for text in fitting[:1]:
        yield _text(x + width / 2, y + 16, text, ' fill="#ffffff" text-anchor="middle"')
