"""The timeline as one HTML page that needs nothing else: no network, no fonts, no libraries.

Script and style lie beside this file, the times go into the page as JSON. The table at its end has the same content
for those who read it without a script or aloud.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import partial
from html import escape
from pathlib import Path
from typing import Any, Final

from dp_compile.insight.timelines.events import (
    MEASURED,
    Timeline,
    Transfer,
    View,
    critical_path_text,
    facts,
    summary,
)
from dp_compile.plan.buckets import Bucket, BucketKey
from dp_compile.plan.words import count, format_bytes

_HERE: Final = Path(__file__).parent
_LEGEND: Final = (
    ("compute", "compute"),
    ("waiting", "waiting for the network"),
    ("network", "on the network, hidden"),
    ("exposed", "exposed: compute waits"),
    ("critical", "critical path"),
    ("end", "end of the backward"),
)
_UNSEEN: Final = ("unseen", "launched, its end was not seen")
_ASSUMED: Final = ("assumed", "assumed: nobody has timed the backward, times are shares of it")
_BUTTONS: Final = (
    '<div class="controls"><button type="button" id="closer" aria-label="zoom in">+</button>'
    '<button type="button" id="farther" aria-label="zoom out">&minus;</button>'
    '<button type="button" id="whole">whole step</button></div>'
)
_HINT: Final = (
    "Point at a bucket for its members; click, or focus the chart and walk with the arrow keys, to keep them below. "
    "Wheel or + and - zoom, dragging or Page Up and Page Down moves, double click or 0 shows the whole step. "
    "A tick under compute: the last gradient of a bucket is ready."
)
_NO_SCRIPT: Final = "The chart is drawn by a script, which is switched off here. The table below has the same content."
_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def page(timeline: Timeline) -> str:
    """The whole page."""
    title = f"Timeline of a step: {count(len(timeline.step.plan.buckets), 'bucket')}"
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<link rel="icon" href="data:,">',
            f"<title>{escape(title)}</title>",
            f"<style>\n{(_HERE / 'page.css').read_text()}</style>\n</head>\n<body>\n<main>",
            f'<div class="bar"><h1>{escape(title)}</h1>{_BUTTONS}</div>',
            _facts(timeline),
            _legend(timeline),
            _chart(timeline),
            f'<noscript><p class="hint">{_NO_SCRIPT}</p></noscript>',
            f'<p class="hint">{_HINT}</p>',
            '<section class="selected" id="selected" aria-label="the chosen bucket" hidden></section>',
            '<div class="spoken" id="spoken" aria-live="polite"></div>',
            _table(timeline),
            '</main>\n<div class="tooltip" id="tooltip" role="tooltip" hidden></div>',
            f'<script type="application/json" id="data">{_json(timeline)}</script>',
            f"<script>\n{(_HERE / 'page.js').read_text()}</script>\n</body>\n</html>\n",
        ]
    )


def _facts(timeline: Timeline) -> str:
    lines = [f"<dt>{escape(fact.label)}</dt><dd>{escape(fact.value)}</dd>" for fact in facts(timeline)]
    return f'<dl class="facts">{"".join(lines)}</dl>'


def _legend(timeline: Timeline) -> str:
    unseen = any(each.finish_s is None for view in timeline.views for each in view.transfers)
    entries = [*_LEGEND, *((_UNSEEN,) if unseen else ()), *((_ASSUMED,) if timeline.assumed_s is not None else ())]
    lines = [f'<li><span class="swatch {name}"></span>{escape(text)}</li>' for name, text in entries]
    return f'<ul class="legend">{"".join(lines)}</ul>'


def _chart(timeline: Timeline) -> str:
    said = [f"{view.name}: {summary(view)}; critical path: {critical_path_text(view)}." for view in timeline.views]
    text = escape(" ".join(["Timeline of compute and of the buckets on the network.", *said]))
    return f'<figure><canvas id="chart" tabindex="0" role="img" aria-label="{text}"></canvas></figure>'


# --- data for the script ----------------------------------------------------------------------------------------


def _json(timeline: Timeline) -> str:
    """Times in ms, or in percent of a backward that nobody has timed.

    No `<` is left, so that no name can end the script element.
    """
    data = {
        "lanes": timeline.lanes,
        "assumed": timeline.assumed_s is not None,
        "start": _scaled(timeline.views[0], timeline.start_s),
        "end": _scaled(timeline.views[0], timeline.end_s),
        "buckets": [_bucket(bucket) for bucket in timeline.step.plan.buckets],
        "views": [_view(view) for view in timeline.views],
    }
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


def _scaled(view: View, seconds: float) -> float:
    """Milliseconds, to the nanosecond: shorter in the file, finer than any clock. Or percent of what is assumed."""
    return round(seconds * (1e3 if view.assumed_s is None else 100 / (view.assumed_s or 1.0)), 6)


def _bucket(bucket: Bucket) -> dict[str, Any]:
    return {
        "size": format_bytes(bucket.nbytes),
        "key": key_text(bucket.key),
        "reason": bucket.reason,
        "members": [[member.label, format_bytes(member.nbytes)] for member in bucket.members],
    }


def key_text(key: BucketKey) -> str:
    """What the members of a bucket have in common; the group's name is a rank's own affair."""
    return str(key)


def _view(view: View) -> dict[str, Any]:
    scaled = partial(_scaled, view)
    return {
        "name": view.name,
        "summary": f"critical path: {critical_path_text(view)}",
        "forward": scaled(view.forward_s or 0.0),
        "backward": scaled(view.backward_s),
        "computing": [[each.name, scaled(each.start_s), scaled(each.end_s)] for each in view.computing],
        "optimizer": None if view.optimizer is None else [scaled(each) for each in view.optimizer],
        "end": scaled(view.end_s),
        "rows": view.rows,
        "strips": [
            [name, [[each.name, scaled(each.start_s), scaled(each.end_s)] for each in layers]]
            for name, layers in view.strips
        ],
        "critical": None if view.critical is None else [scaled(each) for each in view.critical],
        "stalls": [[scaled(each) for each in interval] for interval in view.exposed],
        "transfers": [_transfer(view, each) for each in view.transfers],
        "boxes": [_transfer(view, each) for each in view.boxes],
    }


def _transfer(view: View, each: Transfer) -> list[float | None]:
    """In the order of the names in page.js."""
    finish = None if each.finish_s is None else _scaled(view, each.finish_s)
    times = [_scaled(view, each.launch_s), _scaled(view, each.start_s), finish, _scaled(view, each.exposed_s)]
    return [each.bucket, each.lane, *times, each.row, int(each.critical)]


# --- the table --------------------------------------------------------------------------------------------------


def _table(timeline: Timeline) -> str:
    heads = ["bucket", "bytes", "key"]
    for view in timeline.views:
        ready = "launched" if view.name == MEASURED else "ready"
        heads += [f"{view.name}: {ready}", "on the network", "finished", "exposed", "critical"]
    heads += ["members", "ends here because"]
    buckets = timeline.step.plan.buckets
    rows = [_row(timeline, number, bucket) for number, bucket in enumerate(buckets)]
    head = "".join(f'<th scope="col">{escape(text)}</th>' for text in heads)
    return (
        f"<details><summary>All buckets as a table ({len(buckets)})</summary>\n"
        f'<div class="scroll"><table class="all"><thead><tr>{head}</tr></thead>\n<tbody>\n'
        + "\n".join(rows)
        + "\n</tbody></table></div></details>"
    )


def _row(timeline: Timeline, number: int, bucket: Bucket) -> str:
    cells = [_cell(str(number), "n"), _cell(format_bytes(bucket.nbytes), "n"), _cell(key_text(bucket.key))]
    for view in timeline.views:
        cells += _times(view, view.transfers[number]) if number < len(view.transfers) else [_cell("")] * 5
    cells += [_cell(", ".join(_labels(bucket))), _cell(bucket.reason)]
    return f"<tr>{''.join(cells)}</tr>"


def _times(view: View, each: Transfer) -> list[str]:
    finish = "not seen" if each.finish_s is None else view.said(each.finish_s)
    times = [view.said(each.launch_s), view.said(each.start_s), finish, view.said(each.exposed_s)]
    return [*(_cell(text, "n") for text in times), _cell("yes" if each.critical else "")]


def _labels(bucket: Bucket) -> Iterable[str]:
    return (member.label for member in bucket.members)


def _cell(text: str, kind: str = "") -> str:
    return f'<td class="{kind}">{escape(text)}</td>' if kind else f"<td>{escape(text)}</td>"
