"""From a trace of `torch.profiler` to a `MeasuredStep`: the events of each bucket are found by its name.

What is looked for in the trace (Chrome's format, as `export_chrome_trace` writes it, also gzipped):

| figure    | on the host (gloo)                          | with kernels in the trace (NCCL)                        |
|-----------|---------------------------------------------|---------------------------------------------------------|
| launch    | begin of the range `bucket N (...) launch`  | the NCCL kernel's begin                                 |
| start     | begin of `gloo:all_reduce`, the next in turn| the same                                                |
| finish    | end of that                                 | end of the NCCL kernel                                  |
| waited    | length of the ranges `bucket N (...) wait`  | from the end of earlier compute to the kernel's end     |
| backward  | the range `dp_compile::backward`            | from the first kernel launched in it to the last's end  |
| forward   | `Torch-Compiled Region` before the backward | kernels launched in them, first begin to last end       |
| optimizer | `Optimizer.step#...` after it               | the same                                                |
| follows   | ranges of updates, of parameters that go round, of a forward that waits   | the same                     |

What is left for the next forward is waited for behind the backward: the waits of a bucket are those until it is
launched the next time. They, and the updates between them, are no part of the forward that they are in.

A kernel belongs to the range in which the host launched it (`correlation`). gloo takes collectives up in the order in
which they were given to it, so the n-th launch has the n-th event.
"""

from __future__ import annotations

import gzip
import json
import os
from bisect import bisect_left, bisect_right
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from dp_compile.engine.observers import UPDATE
from dp_compile.errors import ConfigError
from dp_compile.insight.ranges import BACKWARD_RANGE, FOLLOWING, members_in_short, parse_range_name
from dp_compile.insight.step import Followed, MeasuredBucket, MeasuredStep, Step, typical_step, with_waited_link
from dp_compile.plan.backends import COLLECTIVE_KERNELS
from dp_compile.plan.buckets import BucketPlan
from dp_compile.plan.words import count

_HOW: Final = (
    "Record some steps that are compiled already under torch.profiler.profile(), of a module that replicate() took; "
    "not with passes=(), and not where torch's own reducer reduces."
)
_US: Final = 1e-6
_ON_GPU: Final = "gpu_user_annotation"
"""torch's own copies of our ranges, drawn above the kernels that were launched in them."""


def measured_step(trace: Mapping[str, Any] | str | os.PathLike[str], of: BucketPlan | Step) -> MeasuredStep:
    """The median one of all whole synchronised backwards in a trace of one rank; times in seconds.

    Args:
        trace: a file of `prof.export_chrome_trace`, gzipped if its name ends in `.gz`, or its content.
        of: the plan that the trace was recorded under, or a step with it.

    Raises:
        ConfigError: the file cannot be read or is no trace, holds none of our names, or is of another plan.
    """
    plan = of.plan if isinstance(of, Step) else of
    data = trace if isinstance(trace, Mapping) else _read(Path(trace))
    events = _events(data)
    backwards = [event for event in events if event.name == BACKWARD_RANGE]
    ranges = [event for event in events if parse_range_name(event.name) is not None]
    if not backwards or not ranges:
        raise ConfigError(f"the trace has no ranges named 'dp_compile::bucket ...'. {_HOW}")
    _check_plan(ranges, plan)
    timeline = _Timeline(events, plan)
    ends = [*(after.begin_us for _, after in pairwise(backwards)), float("inf")]
    starts = [float("-inf"), *(before.end_us for before in backwards)]
    steps = [
        _step(timeline, _Window(since_us, backward, until_us))
        for since_us, backward, until_us in zip(starts, backwards, ends, strict=False)
    ]
    whole = [step for step in steps if step is not None]
    if not whole:
        raise ConfigError(f"no backward in the trace has all {count(len(plan.buckets), 'bucket')} in it. {_HOW}")
    rank = int(data.get("distributedInfo", {}).get("rank", 0))
    source = f"trace of torch.profiler, median of {count(len(whole), 'backward')}"
    return replace(typical_step(whole), source=source, rank=rank)


def first_backward_us(trace: Mapping[str, Any]) -> float | None:
    """When the first of our backwards starts on a trace's clock, in microseconds; `None` if it has none."""
    return next((event.begin_us for event in _events(trace) if event.name == BACKWARD_RANGE), None)


def with_profile(step: Step, trace: str | os.PathLike[str]) -> Step:
    """The same step with what a trace measured.

    Raises:
        ConfigError: see `measured_step`.
    """
    return with_waited_link(replace(step, measured=measured_step(trace, step)))


@dataclass(frozen=True, slots=True)
class _Event:
    """A complete event of the trace. Times in microseconds, as everywhere in this format."""

    name: str
    category: str
    begin_us: float
    end_us: float
    thread: tuple[Any, Any]
    correlation: Any = None

    def holds(self, other: _Event) -> bool:
        return self.thread == other.thread and self.begin_us <= other.begin_us <= self.end_us


@dataclass(frozen=True, slots=True)
class _Window:
    """One backward, from the end of the one before it to the begin of the next."""

    since_us: float
    backward: _Event
    until_us: float


class _Timeline:
    """A trace's events by kind."""

    def __init__(self, events: Sequence[_Event], plan: BucketPlan) -> None:
        self.plan = plan
        kernels = {e.correlation: e for e in events if e.category in ("kernel", "gpu_memcpy", "gpu_memset")}
        self._kernels = [
            (e, kernels[e.correlation])
            for e in events
            if e.category in ("cuda_runtime", "cuda_driver") and e.correlation in kernels
        ]
        self._called_us = [call.begin_us for call, _ in self._kernels]
        self.ranges = [(name, e) for e in events if (name := parse_range_name(e.name)) is not None]
        kinds = {name: what for what, name in FOLLOWING.items()}
        self.follows = [(kinds[e.name], e) for e in events if e.name in kinds]
        self.optimizer = _outermost(e for e in events if e.name.startswith("Optimizer.step#"))
        inside = [e for e in events if e.name.startswith("Torch-Compiled Region")]
        self.compiled = _outermost(e for e in inside if not any(each.holds(e) for each in self.optimizer))
        self.gloo = _gloo_events(events)

    def kernels_in(self, span: _Event) -> list[_Event]:
        """What the host launched on a GPU in a range."""
        first, behind = bisect_left(self._called_us, span.begin_us), bisect_right(self._called_us, span.end_us)
        return [kernel for call, kernel in self._kernels[first:behind] if span.holds(call)]

    def seconds(self, spans: Sequence[_Event]) -> float | None:
        """How long ranges took together, on the GPU if there is one."""
        lengths = [self.limits(span) for span in spans]
        return sum(end - begin for begin, end in lengths) * _US if lengths else None

    def between(self, spans: Sequence[_Event]) -> float:
        """How long waits and updates inside of ranges took, in seconds."""
        inner = [e for name, e in self.ranges if name.kind == "wait"] + [e for w, e in self.follows if w == UPDATE]
        limits = [self.limits(each) for each in inner if any(span.holds(each) for span in spans)]
        return sum(end_us - begin_us for begin_us, end_us in limits) * _US

    def limits(self, span: _Event) -> tuple[float, float]:
        kernels = self.kernels_in(span)
        if not kernels:
            return span.begin_us, span.end_us
        return min(kernel.begin_us for kernel in kernels), max(kernel.end_us for kernel in kernels)


def _step(timeline: _Timeline, window: _Window) -> MeasuredStep | None:
    """One backward; `None` if a bucket is missing, as at the edges of a trace."""
    backward = window.backward
    launches, waits = defaultdict[int, list[_Event]](list), defaultdict[int, list[_Event]](list)
    for name, event in timeline.ranges:
        if name.kind == "launch" and event.begin_us >= backward.begin_us:
            launches[name.bucket].append(event)
        elif name.kind == "wait" and event.begin_us >= backward.begin_us and len(launches[name.bucket]) == 1:
            waits[name.bucket].append(event)
    buckets: list[MeasuredBucket] = []
    for number in range(len(timeline.plan.buckets)):
        launch = [event for event in launches[number] if event.begin_us <= backward.end_us]
        if len(launch) != 1 or not waits[number]:
            return None
        buckets.append(_bucket(timeline, backward, launch[0], waits[number]))
    begin_us, end_us = timeline.limits(backward)
    forward = [e for e in timeline.compiled if window.since_us <= e.begin_us < backward.begin_us]
    forward_s = timeline.seconds(forward)
    optimizer = [e for e in timeline.optimizer if backward.end_us <= e.begin_us < window.until_us]
    return MeasuredStep(
        backward_s=(end_us - begin_us) * _US,
        buckets=tuple(buckets),
        source="",
        forward_s=None if forward_s is None else forward_s - timeline.between(forward),
        optimizer_s=timeline.seconds(optimizer),
        step_s=None if window.until_us == float("inf") else (window.until_us - backward.begin_us) * _US,
        follows=tuple(
            Followed(what, *((each_us - begin_us) * _US for each_us in timeline.limits(event)))
            for what, event in timeline.follows
            if backward.begin_us <= event.begin_us < window.until_us
        ),
    )


def _bucket(timeline: _Timeline, backward: _Event, launch: _Event, waits: Sequence[_Event]) -> MeasuredBucket:
    zero_us, _ = timeline.limits(backward)
    on_gpu = [kernel for kernel in timeline.kernels_in(launch) if _communicates(kernel)]
    if on_gpu:
        return _on_gpu(timeline, backward, on_gpu, waits[0])
    flight = timeline.gloo.get(launch.begin_us)
    return MeasuredBucket(
        launch_s=(launch.begin_us - zero_us) * _US,
        finish_s=None if flight is None else (flight.end_us - zero_us) * _US,
        waited_s=sum(wait.end_us - wait.begin_us for wait in waits) * _US,
        start_s=None if flight is None else (flight.begin_us - zero_us) * _US,
        wait_s=(waits[0].begin_us - zero_us) * _US,
    )


def _on_gpu(timeline: _Timeline, backward: _Event, collective: Sequence[_Event], wait: _Event) -> MeasuredBucket:
    """Compute stands still from the end of what the host gave it before the wait to the end of the collective."""
    zero_us, _ = timeline.limits(backward)
    begin_us, end_us = min(e.begin_us for e in collective), max(e.end_us for e in collective)
    before = replace(backward, end_us=wait.begin_us)
    compute = [kernel for kernel in timeline.kernels_in(before) if not _communicates(kernel)]
    idle_us = max((kernel.end_us for kernel in compute), default=zero_us)
    return MeasuredBucket(
        launch_s=(begin_us - zero_us) * _US,
        finish_s=(end_us - zero_us) * _US,
        waited_s=max(0.0, end_us - idle_us) * _US,
        start_s=(begin_us - zero_us) * _US,
        wait_s=(idle_us - zero_us) * _US,
    )


def _communicates(kernel: _Event) -> bool:
    return any(part in kernel.name.lower() for part in COLLECTIVE_KERNELS)


def _gloo_events(events: Sequence[_Event]) -> dict[float, _Event]:
    """By the begin of one of our launch ranges, when gloo worked on what was launched there.

    All all-reduces of the process go through one queue for each group; those of others take their turn too.
    """
    queue = deque(e for e in events if e.name.startswith("gloo:") and "all_reduce" in e.name)
    launches = [e for e in events if (name := parse_range_name(e.name)) is not None and name.kind == "launch"]
    begins_us = [launch.begin_us for launch in launches]
    found: dict[float, _Event] = {}
    for call in (e for e in events if e.name in ("c10d::allreduce_", "c10d::allreduce_coalesced_")):
        while queue and queue[0].begin_us < call.begin_us:
            queue.popleft()  # was given to gloo before the trace began
        if not queue:
            break
        flight, place = queue.popleft(), bisect_right(begins_us, call.begin_us) - 1
        if place >= 0 and launches[place].holds(call):
            found[launches[place].begin_us] = flight
    return found


def _outermost(spans: Iterator[_Event]) -> list[_Event]:
    """Ranges that are not inside another one; given by their begin."""
    kept: list[_Event] = []
    for span in spans:
        if not any(each.holds(span) for each in kept[-8:]):
            kept.append(span)
    return kept


def _check_plan(ranges: Sequence[_Event], plan: BucketPlan) -> None:
    """The names in the trace have to be those of the plan."""
    names = [name for e in ranges if (name := parse_range_name(e.name)) is not None]
    if any(name.module is not None for name in names):
        raise ConfigError(
            "the backwards in the trace are of several replicated modules, and nothing tells whose compute is whose. "
            "Profile a loop with one of them."
        )
    expected = {number: members_in_short(bucket) for number, bucket in enumerate(plan.buckets)}
    other = [name for name in names if expected.get(name.bucket) != name.members]
    if not other:
        return
    if any(name.bucket not in expected for name in names):
        what = f"it has {count(1 + max(name.bucket for name in names), 'bucket')}, the plan has {len(expected)}"
    else:
        what = f"its bucket {other[0].bucket} is {other[0].members}, the plan's is {expected[other[0].bucket]}"
    raise ConfigError(
        f"the trace is of another plan: {what}. Give the plan that was in use then; a plan is made anew in the first "
        "backward and after replan_after more, so profile after that."
    )


def _events(data: Mapping[str, Any]) -> list[_Event]:
    """Complete events by their begin; of equal ones the longer first."""
    try:
        found = [_event(each) for each in data["traceEvents"] if each.get("ph") == "X" and each.get("cat") != _ON_GPU]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ConfigError(f"not a trace of torch.profiler: {error!r}. Give a file of export_chrome_trace.") from error
    return sorted(found, key=lambda event: (event.begin_us, -event.end_us))


def _event(each: Mapping[str, Any]) -> _Event:
    begin_us = float(each["ts"])
    return _Event(
        name=str(each["name"]),
        category=str(each.get("cat", "")),
        begin_us=begin_us,
        end_us=begin_us + float(each.get("dur", 0.0)),
        thread=(each.get("pid"), each.get("tid")),
        correlation=each.get("args", {}).get("correlation"),
    )


def _read(path: Path) -> Mapping[str, Any]:
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        data = json.loads(raw)
    except (OSError, EOFError, ValueError) as error:
        raise ConfigError(f"cannot read {path} as a trace of torch.profiler: {error}.") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} is not a trace of torch.profiler. Give a file of export_chrome_trace.")
    return data
