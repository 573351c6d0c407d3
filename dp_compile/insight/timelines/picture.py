"""The timeline as one static SVG for documents: the page's chart with explicit colours, on a white card.

What a hover shows in the page stands below the chart: a line for each bucket, or for those that matter most.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import Final, NamedTuple

from dp_compile.insight.timelines import svg
from dp_compile.insight.timelines.events import (
    Interval,
    Layer,
    Timeline,
    Transfer,
    View,
    critical_path_text,
    facts,
    span_of_members,
)
from dp_compile.plan.buckets import Bucket
from dp_compile.plan.words import count, format_bytes

_WIDTH: Final = 1000.0
_LEFT: Final = 150.0
"""Where the time axis starts; lane names stand before it."""
_RIGHT: Final = _WIDTH - 24.0
_MARGIN: Final = 20.0
_LINE: Final = 17.0
_BAR: Final = 24.0
_ROW: Final = 13.0
_MOST_ROWS: Final = 6
_LISTED: Final = 12
_NARROW: Final = 5
"""Pixels below which a box is not worth an edge of its own."""
_LONGEST: Final = 132
"""Characters of one line."""
_TIMES: Final = ("ready", "start", "end", "exposed")
_CHARACTER: Final = 6.6
"""Pixels; a little more than a character of the 12 px font takes on average."""
_DIM, _RULE, _PAPER, _BAND = "#59636e", "#d9dee3", "#ffffff", "#f8ebe3"
_COMPUTE, _NETWORK, _EXPOSED, _WAITING, _EDGE = "#5c6670", "#0067a3", "#bf4b00", "#e4e9ee", "#8b96a1"
_FONT: Final = "'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif"


class _Box(NamedTuple):
    left: float
    right: float
    colour: str
    texts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Axis:
    """Pixels for seconds."""

    start_s: float
    end_s: float
    assumed_s: float | None = None

    def x(self, seconds: float) -> float:
        return _LEFT + (seconds - self.start_s) / ((self.end_s - self.start_s) or 1.0) * (_RIGHT - _LEFT)

    def ticks(self) -> Iterator[tuple[float, str]]:
        """Round times with their labels, about eight."""
        whole, unit = (1e-3, " ms") if self.assumed_s is None else ((self.assumed_s or 1.0) / 100, "%")
        span_ms = (self.end_s - self.start_s) / whole or 1.0
        power = 10 ** math.floor(math.log10(span_ms / 8))
        step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= span_ms / 8)
        digits = max(0, -math.floor(math.log10(step) + 1e-9))
        first = math.ceil(self.start_s / whole / step - 1e-9)
        for number in range(first, math.floor(self.end_s / whole / step + 1e-9) + 1):
            yield number * step * whole, f"{number * step:.{digits}f}{unit}"


def picture(timeline: Timeline) -> str:
    """The whole SVG document."""
    axis = _Axis(timeline.start_s, timeline.end_s, timeline.assumed_s)
    y = _MARGIN + _LINE
    parts: list[str] = []
    for fact in facts(timeline):
        lines = wrap(fact.value, 125) or [""]
        parts.append(svg.text(_MARGIN, y, fact.label, colour=_DIM))
        parts += [svg.text(_LEFT - 36, y + _LINE * number, line) for number, line in enumerate(lines)]
        y += _LINE * len(lines)
    parts += _legend(y + 6, timeline.assumed_s is not None)
    y += 34
    parts += [svg.text(axis.x(at_s), y, label, colour=_DIM, anchor="middle") for at_s, label in axis.ticks()]
    for view in timeline.views:
        drawn, y = _view(timeline, view, axis, y + 12)
        parts += drawn
    listed, y = _list(timeline, y + 16)
    return _document([*parts, *listed], y)


_HATCH: Final = (
    '<defs><pattern id="assumed" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    f'<rect width="2.5" height="7" fill="{_PAPER}" fill-opacity="0.45"/></pattern></defs>'
)
"""Over what nobody has measured."""


def _document(parts: Sequence[str], height: float) -> str:
    hatch = [_HATCH] if any("url(#assumed)" in part for part in parts) else []
    size = f'width="{_WIDTH:.0f}" height="{height:.0f}" viewBox="0 0 {_WIDTH:.0f} {height:.0f}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{_FONT}" font-size="12" role="img">'
    card = f'<rect x="0.5" y="0.5" width="{_WIDTH - 1:.0f}" height="{height - 1:.0f}" rx="6" '
    card += f'fill="{_PAPER}" stroke="{_RULE}"/>'
    return "\n".join([head, "<title>Timeline of a step</title>", *hatch, card, *parts, "</svg>", ""])


# --- one view ---------------------------------------------------------------------------------------------------


def _view(timeline: Timeline, view: View, axis: _Axis, top: float) -> tuple[list[str], float]:
    """What is drawn for a view whose title stands below `top`, and where it ends."""
    parts = [svg.text(_MARGIN, top + 12, view.name, bold=True)]
    parts.append(svg.text(_MARGIN + 70, top + 12, _clipped(f"critical path: {critical_path_text(view)}"), colour=_DIM))
    compute = top + 36
    strips = compute + _BAR + 8
    queue = strips + (_ROW + 6) * len(view.strips)
    depth = _ROW * min(view.rows, _MOST_ROWS)
    networks = [queue + depth + (7 if depth else 0) + (_BAR + 7) * lane for lane in range(len(timeline.lanes))]
    bottom = (networks[-1] if networks else queue) + _BAR + 5
    parts += _background(view, axis, compute - 16, compute, bottom)
    parts += _lane_name(compute, "compute")
    parts += _boxes(_compute_boxes(view, axis), compute, view)
    parts += _ticks(view, axis, compute + _BAR)
    for number, (name, layers) in enumerate(view.strips):
        parts += _strip(view, axis, strips + (_ROW + 6) * number, name, layers)
    if view.rows:
        parts += _lane_name(queue - 5, "waiting" if view.rows <= _MOST_ROWS else f"waiting, up to {view.rows}")
        parts += _queue(view, axis, queue, depth)
    for lane, (name, y) in enumerate(zip(timeline.lanes, networks, strict=True)):
        parts += _lane_name(y, name)
        parts += _boxes(_joined(_network_boxes(timeline, view, axis, lane)), y, view)
        parts += _unseen(view, axis, lane, y)
    parts += _critical(view, axis, compute + _BAR, networks)
    return parts, bottom + 14


def _lane_name(top: float, name: str) -> list[str]:
    return [svg.text(_MARGIN, top + _BAR / 2 + 4, name, colour=_DIM)]


def _background(view: View, axis: _Axis, top: float, compute: float, bottom: float) -> list[str]:
    """Exposed time as bands with their length, then the grid and the end of the backward."""
    parts = []
    for each in view.exposed:
        left, right = axis.x(each.start_s), axis.x(each.end_s)
        parts.append(svg.rect(left, top, right - left, bottom - top, _BAND))
        text = f"{view.said(each.end_s - each.start_s)} exposed"
        half = len(text) * _CHARACTER / 2
        if len(view.exposed) == 1 or 2 * half < right - left:
            middle = min((left + right) / 2, _RIGHT - half)
            parts.append(svg.text(middle, top + 12, text, colour=_EXPOSED, anchor="middle"))
    parts += [svg.line(axis.x(at_s), compute, axis.x(at_s), bottom, _RULE) for at_s, _ in axis.ticks()]
    end = axis.x(view.backward_s)
    return [*parts, svg.line(end, compute - 5, end, bottom, svg.INK, dashed=True)]


def _compute_boxes(view: View, axis: _Axis) -> Iterator[_Box]:
    def box(start_s: float, end_s: float, colour: str, name: str, seconds: float) -> _Box:
        texts = (f"{name} {view.said(seconds)}", name) if name else ()
        return _Box(axis.x(start_s), axis.x(end_s), colour, texts)

    if view.forward_s:
        yield box(-view.forward_s, 0.0, _COMPUTE, "forward", view.forward_s)
    for name, start_s, end_s, _ in view.computing:
        stalls = [Interval(max(each.start_s, start_s), min(each.end_s, end_s)) for each in view.exposed]
        stalls = [each for each in stalls if each.start_s < each.end_s]
        starts, ends = [start_s, *(each.end_s for each in stalls)], [*(each.start_s for each in stalls), end_s]
        computes = [(start, end) for start, end in zip(starts, ends, strict=True) if end > start]
        longest = max(computes, key=lambda each: each[1] - each[0], default=None)
        total_s = sum(end - start for start, end in computes)
        for each in computes:
            yield box(*each, _COMPUTE, name if each == longest else "", total_s)
        for stall in stalls:
            yield box(*stall, _EXPOSED, "waits", stall.end_s - stall.start_s)
    if view.optimizer:
        yield box(*view.optimizer, _COMPUTE, "optimizer", view.optimizer.end_s - view.optimizer.start_s)


def _strip(view: View, axis: _Axis, top: float, name: str, layers: Sequence[Layer]) -> Iterator[str]:
    """What compute is of, in two shades in turns; a name where there is room."""
    yield svg.text(_MARGIN, top + _ROW / 2 + 4, name, colour=_DIM)
    for number, each in enumerate(layers):
        left, right = axis.x(each.start_s), axis.x(each.end_s)
        yield svg.rect(left, top, max(right - left, 0.8), _ROW, (_RULE, _WAITING)[number % 2])
        texts = (f"{each.name} {view.said(each.end_s - each.start_s)}", each.name, each.name.rpartition(".")[2])
        text = next((text for text in texts if len(text) * _CHARACTER < right - left - 4), None)
        if text:
            yield svg.text((left + right) / 2, top + _ROW - 3, text, anchor="middle", size=10)


def _ticks(view: View, axis: _Axis, top: float) -> Iterator[str]:
    """When buckets are ready; ticks keep a distance."""
    last = -math.inf
    for x in sorted(axis.x(each.launch_s) for each in view.transfers):
        if x - last >= 3:
            yield svg.line(x, top, x, top + 5, _DIM)
            last = x


def _queue(view: View, axis: _Axis, top: float, depth: float) -> Iterator[str]:
    waiting = [each for each in view.transfers if each.start_s > each.launch_s]
    if view.rows > _MOST_ROWS:
        yield _depth(view, waiting, axis, top, depth)
        return
    for each in waiting:
        left, right = axis.x(each.launch_s), axis.x(each.start_s)
        y = top + each.row * _ROW
        yield svg.rect(left, y, max(right - left, 1.0), _ROW - 2, _WAITING, _EDGE)
        if right - left > 24:
            yield svg.text((left + right) / 2, y + 9, str(each.bucket), anchor="middle", size=10)


def _depth(view: View, waiting: Sequence[Transfer], axis: _Axis, top: float, depth: float) -> str:
    """How many wait, as an area; one point for each pixel that something changes in."""
    changes = sorted([(each.launch_s, 1) for each in waiting] + [(each.start_s, -1) for each in waiting])
    points, level = {axis.x(changes[0][0]): 0}, 0
    for at_s, change in changes:
        level += change
        points[round(axis.x(at_s))] = level
    bottom, most = top + depth, view.rows
    area = [(x, bottom - level / most * depth) for x, level in points.items()]
    return svg.polygon([(area[0][0], bottom), *area], _WAITING, _EDGE)


def _network_boxes(timeline: Timeline, view: View, axis: _Axis, lane: int) -> Iterator[_Box]:
    marks = [each.launch_s for each in view.transfers if each.lane == lane and each.finish_s is None]
    for each in view.boxes:
        if each.lane != lane or each.finish_s is None:
            continue
        nbytes = format_bytes(timeline.step.plan.buckets[each.bucket].nbytes)
        short = f"{each.bucket}: {nbytes}"
        texts: tuple[str, ...] = (f"{short}, {view.said(each.finish_s - each.start_s)}", short, str(each.bucket))
        if any(each.start_s < mark_s < each.finish_s for mark_s in marks):
            texts = ()  # A triangle would lie on it.
        turn = each.finish_s if each.exposed is None else max(each.start_s, each.exposed.start_s)
        hidden, shown = turn - each.start_s, each.finish_s - turn
        if hidden > 0 or not shown:
            yield _Box(axis.x(each.start_s), axis.x(turn), _NETWORK, texts if hidden >= shown else ())
        if shown:
            yield _Box(axis.x(turn), axis.x(each.finish_s), _EXPOSED, texts if hidden < shown else ())


def _joined(boxes: Iterator[_Box]) -> Iterator[_Box]:
    """Boxes too narrow to be seen apart become one with their neighbour of the same colour."""
    held: _Box | None = None
    for box in boxes:
        narrow = held is not None and box.right - box.left < _NARROW and box.left - held.right < 0.5
        if held is not None and narrow and held.colour == box.colour and not held.texts:
            held = held._replace(right=box.right)
            continue
        if held is not None:
            yield held
        held = box if box.right - box.left >= _NARROW else box._replace(texts=())
    if held is not None:
        yield held


def _boxes(boxes: Iterator[_Box], top: float, view: View) -> Iterator[str]:
    for left, right, colour, texts in boxes:
        wide = max(right - left - (1 if right - left > 4 else 0), 0.8)
        yield svg.rect(left, top, wide, _BAR, colour)
        if view.assumed_s is not None:
            yield svg.rect(left, top, wide, _BAR, "url(#assumed)")
        text = next((text for text in texts if len(text) * _CHARACTER < wide - 6), None)
        if text:
            yield svg.text(left + wide / 2, top + _BAR / 2 + 4, text, colour=_PAPER, anchor="middle")


def _unseen(view: View, axis: _Axis, lane: int, top: float) -> Iterator[str]:
    """A triangle where a bucket was launched whose end nobody saw."""
    for each in view.transfers:
        if each.lane == lane and each.finish_s is None:
            x = axis.x(each.launch_s)
            yield svg.polygon([(x, top), (x + 8, top + _BAR / 2), (x, top + _BAR)], _NETWORK)


def _critical(view: View, axis: _Axis, compute_bottom: float, networks: Sequence[float]) -> Iterator[str]:
    if view.critical is None:
        return
    left, right = (axis.x(each) for each in view.critical)
    yield svg.rect(left, compute_bottom - 1, right - left, 3, svg.INK)
    path = [each for each in view.boxes if each.critical and each.finish_s is not None]
    if path:
        end = networks[path[0].lane] + 1
        yield svg.rect(axis.x(path[0].launch_s) - 1.5, compute_bottom - 1, 3, end - compute_bottom + 1, svg.INK)
    boxes = (_Box(axis.x(each.start_s), axis.x(each.finish_s or 0.0), str(each.lane)) for each in path)
    for box in _joined(boxes):
        yield svg.rect(box.left, networks[int(box.colour)] - 2, max(box.right - box.left, 1.0), 3, svg.INK)


# --- legend and list --------------------------------------------------------------------------------------------


def _legend(top: float, is_assumed: bool) -> Iterator[str]:
    x = _MARGIN
    entries = (
        (_COMPUTE, "compute"),
        (_WAITING, "waiting for the network"),
        (_NETWORK, "on the network, hidden"),
        (_EXPOSED, "exposed: compute waits"),
    )
    for colour, text in entries:
        yield svg.rect(x, top - 9, 20, 11, colour, _EDGE if colour == _WAITING else "")
        yield svg.text(x + 26, top, text)
        x += 26 + len(text) * _CHARACTER + 14
    yield svg.rect(x, top - 5, 20, 3, svg.INK)
    yield svg.text(x + 26, top, "critical path")
    x += 26 + 13 * _CHARACTER + 14
    yield svg.line(x, top - 12, x, top + 4, svg.INK, dashed=True)
    yield svg.text(x + 8, top, "end of the backward")
    if is_assumed:
        for colour in (_COMPUTE, "url(#assumed)"):
            yield svg.rect(_MARGIN, top + 6, 20, 11, colour)
        yield svg.text(_MARGIN + 26, top + 15, "assumed: nobody has timed the backward, times are shares of it")


def _list(timeline: Timeline, top: float) -> tuple[list[str], float]:
    """What does not fit into the boxes: bytes and times of a bucket, below them members and reason."""
    buckets = timeline.step.plan.buckets
    chosen = sorted(sorted(range(len(buckets)), key=lambda number: -_weight(timeline, number))[:_LISTED])
    parts = list(_list_head(timeline, top))
    y = top + _LINE + 4
    for number in chosen:
        parts += _list_entry(timeline, number, y + _LINE)
        lines = _about(timeline.step.plan.buckets[number])
        parts += [
            svg.text(_MARGIN + 56, y + (place + 2) * _LINE - 2, each, colour=_DIM) for place, each in enumerate(lines)
        ]
        y += (1 + len(lines)) * _LINE + 3
    note = "A tick under compute: the last gradient of a bucket is ready."
    if len(chosen) < len(buckets):
        note += f" Listed are {len(chosen)} of {len(buckets)} buckets, those with the most exposed time."
    parts.append(svg.text(_MARGIN, y + _LINE + 4, note, colour=_DIM))
    return parts, y + 2 * _LINE + 6


def _columns(timeline: Timeline) -> list[float]:
    """Right ends of the columns: bucket, bytes, then four times for each view."""
    times = [_MARGIN + 215 + 88 * number for number in range(4 * len(timeline.views))]
    return [_MARGIN + 40, _MARGIN + 115, *times]


def _list_head(timeline: Timeline, top: float) -> Iterator[str]:
    columns = _columns(timeline)
    for number, view in enumerate(timeline.views):
        yield svg.text(columns[2 + 4 * number], top, view.name, anchor="end", bold=True)
    names = ["bucket", "bytes", *(_TIMES * len(timeline.views))]
    for x, name in zip(columns, names, strict=True):
        yield svg.text(x, top + _LINE, name, colour=_DIM, anchor="end")


def _list_entry(timeline: Timeline, number: int, y: float) -> Iterator[str]:
    bucket = timeline.step.plan.buckets[number]
    cells = [str(number), format_bytes(bucket.nbytes)]
    for view in timeline.views:
        cells += _times(view, view.transfers[number]) if number < len(view.transfers) else [""] * len(_TIMES)
    for x, cell in zip(_columns(timeline), cells, strict=True):
        yield svg.text(x, y, cell, anchor="end")


def _about(bucket: Bucket) -> list[str]:
    """Members and the reason, in at most two lines."""
    members = f"{span_of_members(bucket)} ({count(len(bucket.members), 'member')})"
    lines = wrap(f"{members}; {bucket.reason}", _LONGEST)
    return [*lines[:1], *(_clipped(" ".join(lines[1:])) for _ in lines[1:2])]


def _times(view: View, each: Transfer) -> list[str]:
    finish = "not seen" if each.finish_s is None else view.said(each.finish_s)
    return [view.said(each.launch_s), view.said(each.start_s), finish, view.said(each.exposed_s)]


def _clipped(content: str) -> str:
    return content if len(content) <= _LONGEST else f"{content[: _LONGEST - 1]}…"


def _weight(timeline: Timeline, number: int) -> float:
    """How much a bucket is worth a line: its exposed time, then its bytes."""
    exposed = sum(view.transfers[number].exposed_s for view in timeline.views if number < len(view.transfers))
    return exposed + timeline.step.plan.buckets[number].nbytes * 1e-18
