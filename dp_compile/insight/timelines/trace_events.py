"""The timeline in Chrome's trace event format, which Perfetto and chrome://tracing read.

Source: "Trace Event Format", Google, the JSON object form. Planned and measured are a process each; compute, exposed
time, the critical path and every network lane a thread with complete events (`X`). Buckets that wait for the network
overlap, so they are asynchronous events (`b`, `e`), which viewers stack.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from dp_compile.errors import ConfigError
from dp_compile.insight.timelines.events import MEASURED, Phase, Timeline, Transfer, View, facts
from dp_compile.plan.cost import check_number
from dp_compile.plan.words import format_bytes

FIRST_PID: Final = 5_000_001
"""Above any process id that Linux gives (4,194,304): our lanes never mix with those of a trace they are merged into."""
_COMPUTE, _EXPOSED, _CRITICAL, _SENDS, _NETWORK = 1, 2, 3, 4, 10
_CATEGORY: Final = "dp_compile"

Event = dict[str, Any]


def trace_events(
    timeline: Timeline, *, into: Mapping[str, Any] | None = None, backward_at_us: float | None = None
) -> dict[str, Any]:
    """The trace as plain data for JSON.

    Args:
        timeline: what is written.
        into: a trace, of torch.profiler say, whose events are kept and get ours beside them.
        backward_at_us: when the backward starts on the clock of `into`, in us. Without it our first event stands
            where the first one of `into` does; without `into`, at zero.

    Raises:
        ConfigError: `into` is not a trace, or `backward_at_us` not a time.
    """
    if backward_at_us is not None:
        check_number("backward_at_us", backward_at_us, zero_allowed=True)
    else:
        backward_at_us = _first_us(into) - timeline.start_s * 1e6
    kept = [] if into is None else list(_events_of(into))
    ours = [event for number in range(len(timeline.views)) for event in _view(timeline, number, backward_at_us)]
    about = {"dp_compile": {fact.label: fact.value for fact in facts(timeline)}}
    head = {"displayTimeUnit": "ms", "otherData": about} if into is None else {**into, **about}
    return {**head, "traceEvents": kept + ours}


def _first_us(into: Mapping[str, Any] | None) -> float:
    if into is None:
        return 0.0
    return min((float(event["ts"]) for event in _events_of(into) if event.get("ph") == "X"), default=0.0)


def _events_of(trace: Mapping[str, Any]) -> list[Event]:
    events = trace.get("traceEvents") if isinstance(trace, Mapping) else None
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise ConfigError("not a trace: it has no list of traceEvents. Give a file that torch.profiler exported.")
    return events


def _view(timeline: Timeline, number: int, zero_us: float) -> Iterator[Event]:
    view, pid = timeline.views[number], FIRST_PID + number
    yield from _names(timeline, view, pid)

    def complete(tid: int, name: str, start_s: float, end_s: float, args: Mapping[str, Any]) -> Event:
        at_us, end_us = _us(zero_us, start_s), _us(zero_us, end_s)
        event = {"name": name, "cat": _CATEGORY, "ph": "X", "ts": at_us, "dur": round(end_us - at_us, 3)}
        return event | {"pid": pid, "tid": tid, "args": dict(args)}

    for name, start_s, end_s, _ in _compute(view):
        yield complete(_COMPUTE, name, start_s, end_s, {"from": view.source} if name == "backward" else {})
    for sent in view.sends:
        yield complete(_SENDS, sent.name, sent.start_s, sent.end_s, {})
    for start_s, end_s in view.exposed:
        yield complete(_EXPOSED, "exposed", start_s, end_s, {})
    if view.critical is not None:
        until = {"until": view.critical_member} if view.critical_member else {}
        yield complete(_CRITICAL, "compute", *view.critical, until)
    for each in view.boxes:
        args = _args(timeline, view, each)
        end_s = each.start_s if each.finish_s is None else each.finish_s
        yield complete(_NETWORK + each.lane, f"bucket {each.bucket}", each.start_s, end_s, args)
        if each.critical:
            yield complete(_CRITICAL, f"bucket {each.bucket}", each.start_s, end_s, {})
    for each in view.transfers:
        if each.start_s > each.launch_s:
            yield from _waiting(each, pid, zero_us)


def _compute(view: View) -> Iterator[Phase]:
    if view.forward_s:
        yield Phase("forward", -view.forward_s, 0.0)
    yield Phase("backward", 0.0, view.backward_s)
    yield from view.computing[1:]
    if view.optimizer:
        yield Phase("optimizer", *view.optimizer)


def _names(timeline: Timeline, view: View, pid: int) -> Iterator[Event]:
    threads = {_COMPUTE: "compute", _EXPOSED: "exposed", _CRITICAL: "critical path"}
    threads |= {_SENDS: "model sends"} if view.sends else {}
    threads |= {_NETWORK + lane: name for lane, name in enumerate(timeline.lanes)}
    assumed = "" if view.assumed_s is None else ", times assumed"
    yield {
        "name": "process_name",
        "ph": "M",
        "pid": pid,
        "tid": 0,
        "args": {"name": f"dp_compile {view.name}{assumed}"},
    }
    yield {"name": "process_sort_index", "ph": "M", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
    for tid, name in threads.items():
        yield {"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
        yield {"name": "thread_sort_index", "ph": "M", "pid": pid, "tid": tid, "args": {"sort_index": tid}}


def _waiting(each: Transfer, pid: int, zero_us: float) -> Iterator[Event]:
    # One name for all: viewers give each name a lane of its own.
    shared: Event = {"name": "waiting", "cat": f"{_CATEGORY} waiting", "pid": pid, "tid": 0}
    shared |= {"id2": {"local": str(each.bucket)}}
    yield shared | {"ph": "b", "ts": _us(zero_us, each.launch_s), "args": {"bucket": each.bucket}}
    yield shared | {"ph": "e", "ts": _us(zero_us, each.start_s)}


def _us(zero_us: float, seconds: float) -> float:
    """To the nanosecond."""
    return round(zero_us + seconds * 1e6, 3)


def _args(timeline: Timeline, view: View, each: Transfer) -> dict[str, Any]:
    bucket = timeline.step.plan.buckets[each.bucket]
    args: dict[str, Any] = {
        "bytes": bucket.nbytes,
        "size": format_bytes(bucket.nbytes),
        "key": str(bucket.key),
        "launched_us" if view.name == MEASURED else "ready_us": _us(0.0, each.launch_s),
        "exposed_us": _us(0.0, each.exposed_s),
        "critical": each.critical,
        "ends here because": bucket.reason,
        "members": [member.label for member in bucket.members],
    }
    return args | ({"end": "not seen"} if each.finish_s is None else {})
