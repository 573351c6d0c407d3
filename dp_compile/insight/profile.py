"""From a trace of `torch.profiler` (Chrome's format) to a `MeasuredStep`: events of buckets are found by their names.

| figure    | on the host (gloo)                         | with kernels in the trace (NCCL)                     |
|-----------|--------------------------------------------|------------------------------------------------------|
| launch    | begin of the range `bucket N (...) launch` | the NCCL kernel's begin                              |
| finish    | end of the n-th `gloo:all_reduce`          | end of the NCCL kernel                               |
| waited    | length of the ranges `bucket N (...) wait` | from the end of earlier compute to the kernel's end  |
| backward  | the range `dp_compile::backward`           | from the first kernel launched in it to the last one |
| forward   | `Torch-Compiled Region` before it          | kernels launched in them, first begin to last end    |
| optimizer | `Optimizer.step#...` after it              | the same                                             |

A kernel belongs to the range in which the host launched it (`correlation`). gloo takes collectives in the order in
which they were given to it, so the n-th launch has the n-th event. Waits of a bucket are those until its next launch.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import re
from bisect import bisect_left, bisect_right
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from dp_compile.engine.events import UPDATE
from dp_compile.errors import ConfigError
from dp_compile.insight.ranges import BACKWARD_RANGE, FOLLOWING, members_in_short
from dp_compile.insight.step import Followed, MeasuredBucket, MeasuredStep, Step, typical_step
from dp_compile.plan.backends import COLLECTIVE_KERNELS
from dp_compile.plan.buckets import BucketPlan
from dp_compile.plan.words import count

_HOW: Final = (
    "Record some steps that are compiled already under torch.profiler.profile(), of a module that replicate() took."
)
_US: Final = 1e-6
_ON_GPU: Final = "gpu_user_annotation"
"""torch's copies of our ranges, drawn above the kernels that were launched in them."""
_RANGE: Final = re.compile(r"dp_compile::(module \d+ )?bucket (\d+) \((.*)\) (launch|wait)")


def measured_step(trace: Mapping[str, Any] | str | os.PathLike[str], of: BucketPlan | Step) -> MeasuredStep:
    """The median one of all whole synchronised backwards in a trace of one rank; times in seconds.

    Args:
        trace: a file of `prof.export_chrome_trace`, gzipped if its name ends in `.gz`, or its content.
        of: the plan that the trace was recorded under, or a step with it.

    Raises:
        ConfigError: the file cannot be read or is no trace, has none of our ranges, or is of another plan.
    """
    plan = of.plan if isinstance(of, Step) else of
    data = trace if isinstance(trace, Mapping) else _read(Path(trace))
    timeline = _Timeline(_events(data), plan)
    backwards = [event for event in timeline.events if event.name == BACKWARD_RANGE]
    if not backwards or not timeline.ranges:
        raise ConfigError(f"the trace has no ranges named 'dp_compile::bucket ...'. {_HOW}")
    _check_plan(timeline.ranges, plan)
    edges_us = [-math.inf, *(backward.end_us for backward in backwards[:-1])]
    until_us = [*(backward.begin_us for backward in backwards[1:]), math.inf]
    steps = [timeline.step(*each) for each in zip(backwards, edges_us, until_us, strict=True)]
    whole = [step for step in steps if step is not None]
    if not whole:
        raise ConfigError(f"no backward in the trace has all {count(len(plan.buckets), 'bucket')} in it. {_HOW}")
    source = f"trace of torch.profiler, median of {count(len(whole), 'backward')}"
    return replace(typical_step(whole), source=source, rank=int(data.get("distributedInfo", {}).get("rank", 0)))


def with_profile(step: Step, trace: str | os.PathLike[str]) -> Step:
    """The same step with what a trace measured.

    Raises:
        ConfigError: see `measured_step`.
    """
    return replace(step, measured=measured_step(trace, step))


class _Event(NamedTuple):
    """A complete event of the trace, times in microseconds."""

    name: str
    category: str
    begin_us: float
    end_us: float
    thread: tuple[Any, Any]
    correlation: Any = None

    def holds(self, other: _Event) -> bool:
        return self.thread == other.thread and self.begin_us <= other.begin_us <= self.end_us


class _Range(NamedTuple):
    """A launch or a wait of a bucket. `of_several`: of one of several modules in a backward."""

    event: _Event
    of_several: bool
    bucket: int
    members: str
    is_launch: bool


class _Timeline:
    """A trace's events by kind."""

    def __init__(self, events: Sequence[_Event], plan: BucketPlan) -> None:
        self.events, self.buckets = events, len(plan.buckets)
        kernels = {e.correlation: e for e in events if e.category in ("kernel", "gpu_memcpy", "gpu_memset")}
        calls = (e for e in events if e.category in ("cuda_runtime", "cuda_driver") and e.correlation in kernels)
        self._kernels = [(e, kernels[e.correlation]) for e in calls]
        self._called_us = [call.begin_us for call, _ in self._kernels]
        named = [(e, found) for e in events if (found := _RANGE.fullmatch(e.name)) is not None]
        self.ranges = [_Range(e, bool(m[1]), int(m[2]), m[3], m[4] == "launch") for e, m in named]
        kinds = {name: what for what, name in FOLLOWING.items()}
        self._follows = [(kinds[e.name], e) for e in events if e.name in kinds]
        self._optimizer = _outermost(e for e in events if e.name.startswith("Optimizer.step#"))
        inside = [e for e in events if e.name.startswith("Torch-Compiled Region")]
        self._compiled = _outermost(e for e in inside if not any(each.holds(e) for each in self._optimizer))
        self._gloo = self._gloo_events()

    def step(self, backward: _Event, since_us: float, until_us: float) -> MeasuredStep | None:
        """One backward, with what is around it; `None` if a bucket is missing, as at the edges of a trace."""
        launches, waits = defaultdict[int, list[_Event]](list), defaultdict[int, list[_Event]](list)
        for event, _, bucket, _, is_launch in self.ranges:
            if event.begin_us >= backward.begin_us and (is_launch or len(launches[bucket]) == 1):
                (launches if is_launch else waits)[bucket].append(event)
        buckets = []
        for number in range(self.buckets):
            launch = [event for event in launches[number] if event.begin_us <= backward.end_us]
            if len(launch) != 1 or not waits[number]:
                return None
            buckets.append(self._bucket(backward, launch[0], waits[number]))
        begin_us, end_us = self._limits(backward)
        forward = [e for e in self._compiled if since_us <= e.begin_us < backward.begin_us]
        forward_s = self._seconds(forward)
        if forward_s is not None:  # waits for updates, and these, are no part of the forward that they are in
            inner = [each.event for each in self.ranges if not each.is_launch]
            inner += [e for what, e in self._follows if what == UPDATE]
            forward_s -= self._seconds([e for e in inner if any(span.holds(e) for span in forward)]) or 0.0
        follows = [(what, *self._limits(e)) for what, e in self._follows if backward.begin_us <= e.begin_us < until_us]
        optimizer = [e for e in self._optimizer if backward.end_us <= e.begin_us < until_us]
        return MeasuredStep(
            backward_s=(end_us - begin_us) * _US,
            buckets=tuple(buckets),
            source="",
            forward_s=forward_s,
            optimizer_s=self._seconds(optimizer),
            step_s=None if until_us == math.inf else (until_us - backward.begin_us) * _US,
            follows=tuple(Followed(what, *((us - begin_us) * _US for us in limits)) for what, *limits in follows),
        )

    def _bucket(self, backward: _Event, launch: _Event, waits: Sequence[_Event]) -> MeasuredBucket:
        zero_us, _ = self._limits(backward)
        on_gpu = [kernel for kernel in self._kernels_in(launch) if _communicates(kernel)]
        if on_gpu:  # compute stands still from the end of what the host gave it before the wait
            begin_us, end_us = min(e.begin_us for e in on_gpu), max(e.end_us for e in on_gpu)
            before = self._kernels_in(backward._replace(end_us=waits[0].begin_us))
            idle_us = max((e.end_us for e in before if not _communicates(e)), default=zero_us)
            times_us = (begin_us, end_us, zero_us + max(0.0, end_us - idle_us), begin_us, idle_us)
        else:
            flight, waited_us = self._gloo.get(launch.begin_us), sum(wait.end_us - wait.begin_us for wait in waits)
            end_us, begin_us = (math.inf, math.inf) if flight is None else (flight.end_us, flight.begin_us)
            times_us = (launch.begin_us, end_us, zero_us + waited_us, begin_us, waits[0].begin_us)
        launch_s, finish_s, waited_s, start_s, wait_s = ((each - zero_us) * _US for each in times_us)
        if finish_s == math.inf:
            return MeasuredBucket(launch_s, None, waited_s, None, wait_s)
        return MeasuredBucket(launch_s, finish_s, waited_s, start_s, wait_s)

    def _kernels_in(self, span: _Event) -> list[_Event]:
        """What the host launched on a GPU in a range."""
        first, last = bisect_left(self._called_us, span.begin_us), bisect_right(self._called_us, span.end_us)
        return [kernel for call, kernel in self._kernels[first:last] if span.holds(call)]

    def _seconds(self, spans: Sequence[_Event]) -> float | None:
        """How long ranges took together, on the GPU if there is one."""
        limits = [self._limits(span) for span in spans]
        return sum(end_us - begin_us for begin_us, end_us in limits) * _US if limits else None

    def _limits(self, span: _Event) -> tuple[float, float]:
        kernels = self._kernels_in(span) or [span]
        return min(kernel.begin_us for kernel in kernels), max(kernel.end_us for kernel in kernels)

    def _gloo_events(self) -> dict[float, _Event]:
        """By the begin of one of our launch ranges, when gloo worked on it. Collectives of others take their turn."""
        queue = deque(e for e in self.events if e.name.startswith("gloo:") and "all_reduce" in e.name)
        launches = [each.event for each in self.ranges if each.is_launch]
        begins_us = [launch.begin_us for launch in launches]
        found: dict[float, _Event] = {}
        for call in (e for e in self.events if e.name == "c10d::allreduce_"):
            while queue and queue[0].begin_us < call.begin_us:
                queue.popleft()  # was given to gloo before the trace began
            if not queue:
                break
            flight, place = queue.popleft(), bisect_right(begins_us, call.begin_us) - 1
            if place >= 0 and launches[place].holds(call):
                found[launches[place].begin_us] = flight
        return found


def _communicates(kernel: _Event) -> bool:
    return any(part in kernel.name.lower() for part in COLLECTIVE_KERNELS)


def _outermost(spans: Iterable[_Event]) -> list[_Event]:
    """Ranges that are not inside another one; given by their begin."""
    kept: list[_Event] = []
    for span in spans:
        if not any(each.holds(span) for each in kept[-8:]):
            kept.append(span)
    return kept


def _check_plan(ranges: Sequence[_Range], plan: BucketPlan) -> None:
    """The names in the trace have to be those of the plan."""
    if any(each.of_several for each in ranges):
        raise ConfigError(
            "the backwards in the trace are of several replicated modules, whose compute cannot be separated. Profile "
            "a loop with one of them."
        )
    expected = {number: members_in_short(bucket) for number, bucket in enumerate(plan.buckets)}
    if other := next((each for each in ranges if expected.get(each.bucket) != each.members), None):
        raise ConfigError(
            f"the trace is of another plan: its bucket {other.bucket} is {other.members}, the plan's is "
            f"{expected.get(other.bucket, 'not there')}. Give the plan that was in use then; plans change in the first "
            "backward, so profile after that."
        )


def _events(data: Mapping[str, Any]) -> list[_Event]:
    """Complete events by their begin; of equal ones the longer first."""
    found = []
    try:
        for each in data["traceEvents"]:
            if each.get("ph") == "X" and each.get("cat") != _ON_GPU:
                begin_us, thread = float(each["ts"]), (each.get("pid"), each.get("tid"))
                end_us, correlation = begin_us + float(each.get("dur", 0.0)), each.get("args", {}).get("correlation")
                found.append(_Event(str(each["name"]), str(each.get("cat", "")), begin_us, end_us, thread, correlation))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ConfigError(f"not a trace of torch.profiler: {error!r}. Give a file of export_chrome_trace.") from error
    return sorted(found, key=lambda event: (event.begin_us, -event.end_us))


def _read(path: Path) -> Any:
    try:
        raw = path.read_bytes()
        return json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)
    except (OSError, EOFError, ValueError) as error:
        raise ConfigError(f"cannot read {path} as a trace of torch.profiler: {error}.") from error
