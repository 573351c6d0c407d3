"""Measured steps from a trace of `torch.profiler` (Chrome's format). Our ranges are found by name.

| figure    | on the host (gloo)                         | with kernels in the trace (NCCL)                     |
|-----------|--------------------------------------------|------------------------------------------------------|
| launch    | begin of the range `bucket N (...) launch` | the NCCL kernel's begin                              |
| finish    | end of the n-th `gloo:all_reduce`          | end of the NCCL kernel                               |
| waited    | length of the ranges `bucket N (...) wait` | from the end of earlier compute to the kernel's end  |
| backward  | the range `backward`                       | from the first kernel launched in it to the last one |
| forward   | `Torch-Compiled Region` before a backward  | kernels launched in each, first begin to last end    |
| optimizer | `Optimizer.step#...` after a backward      | the same                                             |

A kernel belongs to the range in which the host launched it (`correlation`). gloo processes collectives in launch order,
so the n-th launch has the n-th event. A bucket's waits are those before its next launch.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import re
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final, NamedTuple

from torch.profiler import profile

from dp_compile._torch import autograd
from dp_compile.engine.ranges import BACKWARD, COMPILE, FORWARD, GATHER, LAUNCH, UPDATE, members_in_short
from dp_compile.errors import ConfigError
from dp_compile.insight.step import Followed, MeasuredBucket, MeasuredStep, Step, typical_step
from dp_compile.plan.backends import COLLECTIVE_KERNELS
from dp_compile.plan.buckets import BucketPlan
from dp_compile.plan.words import count

COMPILED_IN_IT: Final = "code was compiled"
IN_FLIGHT: Final = "updates were in flight when the block ended"
_HOW: Final = "Under torch.profiler.profile(), record some steps of a replicated module after its code was compiled."
_US: Final = 1e-6
_ON_GPU: Final = "gpu_user_annotation"  # torch's copies of our ranges on the GPU's timeline
_RANGE: Final = re.compile(r"dp_compile::modules? ([\d, ]+) (?:bucket (\d+) \((.*)\) )?(\w+)")
_KERNELS: Final = ("kernel", "gpu_memcpy", "gpu_memset")
_CALLS: Final = ("cuda_runtime", "cuda_driver")
_REGION, _OPTIMIZER = "Torch-Compiled Region", "Optimizer.step#"
# Prefixes of the host events that are read. A trace has an event for each op.
_NAMED: Final = ("dp_compile::module", "gloo:", "c10d::allreduce", _REGION, _OPTIMIZER)


def measured_step(trace: Mapping[str, Any] | str | os.PathLike[str], of: BucketPlan | Step) -> MeasuredStep:
    """Return the median of all complete synchronised backwards in a trace of one rank, times in seconds.

    Args:
        trace: a file of `prof.export_chrome_trace`, gzipped if its name ends in `.gz`, or its parsed content.
        of: the plan of the recorded run, or a step with this plan.

    Raises:
        ConfigError: the file cannot be read or is not a trace, it has no complete backward of this plan, or several
            modules have this plan.
    """
    plan = of.plan if isinstance(of, Step) else of
    data = trace if isinstance(trace, Mapping) else _read(Path(trace))
    steps, skipped = measured_steps(_events(data), plan)
    if not steps:
        if not skipped:
            raise ConfigError(f"the trace has no ranges named 'dp_compile::module ...'. {_HOW}")
        reasons = "; ".join(f"{count(times, 'backward')}: {reason}" for reason, times in skipped.items())
        raise ConfigError(f"no backward in the trace has all {count(len(plan.buckets), 'bucket')} ({reasons}). {_HOW}")
    rank = int(data.get("distributedInfo", {}).get("rank", 0))
    source = f"trace of torch.profiler, median of {count(len(steps), 'backward')}"
    return replace(typical_step(steps), source=source, rank=rank)


def measured_steps(
    events: Iterable[Event], plan: BucketPlan, module: int | None = None, *, in_flight: bool = False
) -> tuple[list[MeasuredStep], Counter[str]]:
    """Return the backwards of a module in a trace, in order, and the reasons why others were not measured.

    `module`: its number in the trace; `None`: the module with the plan's buckets, a `ConfigError` if several have them.
    `in_flight`: updates deferred by the last backward were pending at the end of the trace.
    """
    in_order = sorted(events, key=lambda event: (event.begin_us, -event.end_us))  # outer ranges before inner ones
    ranges = list(_ranges(in_order))
    expected = {(number, members_in_short(bucket)) for number, bucket in enumerate(plan.buckets)}
    buckets = defaultdict[int, set[tuple[int, str]]](set)
    for each in ranges:
        for number in each.modules:
            buckets[number].update([each.bucket] if each.bucket else [])
    fitting = [number for number, seen in buckets.items() if seen and seen <= expected] if module is None else [module]
    if len(fitting) > 1:
        raise ConfigError(f"modules {fitting} in the trace all have this plan. Profile a loop with only one.")
    backwards = [each for each in ranges if each.what == BACKWARD and (not fitting or each.modules.issuperset(fitting))]
    timeline = _Timeline(in_order, [each for each in ranges if each.modules == set(fitting)], len(plan.buckets))
    steps, skipped, since_us = list[MeasuredStep](), Counter[str](), -math.inf
    for each, after in zip_longest(backwards, backwards[1:]):
        until_us = math.inf if after is None else after.event.begin_us
        inside = [other for other in timeline.ranges if each.event.spans(other.event)]
        step, why_not = None, "not every bucket was launched and waited for in the trace; did a CUDA graph run?"
        if len(each.modules) > 1:
            why_not = "of several replicated modules, whose compute cannot be separated"
        elif after is None and in_flight:
            why_not = IN_FLIGHT
        elif any(other.what == COMPILE for other in inside):
            why_not = COMPILED_IN_IT
        elif not fitting or not {other.bucket for other in inside if other.bucket} <= expected:
            why_not = "of another plan or module"
        else:
            step = timeline.step(each.event, since_us, until_us)
        since_us = each.event.end_us
        if step is None:
            skipped[why_not] += 1
        else:
            steps.append(step)
    return steps, skipped


class Event(NamedTuple):
    """A complete event of the trace (phase `X`), times in microseconds."""

    name: str
    category: str
    begin_us: float
    end_us: float
    thread: object
    correlation: Any = None

    def spans(self, other: Event) -> bool:
        return self.begin_us <= other.begin_us <= self.end_us

    def holds(self, other: Event) -> bool:
        return self.thread == other.thread and self.spans(other)


class _Range(NamedTuple):
    """A range of this package. `bucket`: number and abbreviated members, `None` if the range is of no bucket."""

    event: Event
    modules: frozenset[int]
    what: str
    bucket: tuple[int, str] | None


def _ranges(events: Iterable[Event]) -> Iterator[_Range]:
    for event in events:
        if (found := _RANGE.fullmatch(event.name)) is not None:
            modules, bucket, members, what = found.groups()
            of = None if bucket is None else (int(bucket), members)
            yield _Range(event, frozenset(map(int, modules.split(", "))), what, of)


class _Timeline:
    def __init__(self, events: Sequence[Event], ranges: Sequence[_Range], buckets: int) -> None:
        self.ranges, self._buckets = ranges, buckets
        kernels = {e.correlation: e for e in events if e.category in _KERNELS}
        self._kernels = [
            (e, kernels[e.correlation]) for e in events if e.category in _CALLS and e.correlation in kernels
        ]
        self._called_us = [call.begin_us for call, _ in self._kernels]
        self._of_buckets = [(each.event, each.bucket[0], each.what == LAUNCH) for each in ranges if each.bucket]
        self._follows = [(each.what, each.event) for each in ranges if each.what in (UPDATE, GATHER, FORWARD)]
        self._optimizer = _outermost(e for e in events if e.name.startswith(_OPTIMIZER))
        inside = [e for e in events if e.name.startswith(_REGION)]
        self._compiled = _outermost(e for e in inside if not any(each.holds(e) for each in self._optimizer))
        self._gloo = self._gloo_events(events)

    def step(self, backward: Event, since_us: float, until_us: float) -> MeasuredStep | None:
        """Return one backward with its forward and optimizer. `None` if a bucket is missing, as at a trace's edges."""
        begin_us, end_us = self._limits(backward, any_thread=True)
        launches, waits = defaultdict[int, list[Event]](list), defaultdict[int, list[Event]](list)
        for event, bucket, is_launch in self._of_buckets:
            if event.begin_us >= backward.begin_us and (is_launch or len(launches[bucket]) == 1):
                (launches if is_launch else waits)[bucket].append(event)
        buckets = []
        for number in range(self._buckets):
            launch = [event for event in launches[number] if event.begin_us <= backward.end_us]
            if len(launch) != 1 or not waits[number]:
                return None
            buckets.append(self._bucket(backward, begin_us, launch[0], waits[number]))
        forward = [e for e in self._compiled if since_us <= e.begin_us < backward.begin_us]
        forward_s = self._seconds(forward)
        if forward_s is not None:  # without the updates inside of it, and the waits for them
            inner = [event for event, _, is_launch in self._of_buckets if not is_launch]
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
            follows=tuple(Followed(what, *((us - begin_us) * _US for us in limits)) for what, *limits in follows),
        )

    def _bucket(self, backward: Event, zero_us: float, launch: Event, waits: Sequence[Event]) -> MeasuredBucket:
        on_gpu = [kernel for kernel in self._kernels_in(launch) if _communicates(kernel)]
        if on_gpu:  # compute is idle from the end of the last kernel launched before the wait
            begin_us, end_us = min(e.begin_us for e in on_gpu), max(e.end_us for e in on_gpu)
            before = self._kernels_in(backward._replace(end_us=waits[0].begin_us), any_thread=True)
            idle_us = max((e.end_us for e in before if not _communicates(e)), default=zero_us)
            times_us: list[float | None] = [begin_us, end_us, zero_us + max(0.0, end_us - idle_us), begin_us, idle_us]
        else:
            flight, waited_us = self._gloo.get(launch.begin_us), sum(wait.end_us - wait.begin_us for wait in waits)
            network_us = (None, None) if flight is None else (flight.end_us, flight.begin_us)
            times_us = [launch.begin_us, network_us[0], zero_us + waited_us, network_us[1], waits[0].begin_us]
        times_s: list[Any] = [None if each is None else (each - zero_us) * _US for each in times_us]
        return MeasuredBucket(*times_s)

    def _kernels_in(self, span: Event, *, any_thread: bool = False) -> list[Event]:
        """Return the kernels launched in a range. `any_thread`: eager backwards launch from the device's thread."""
        first, last = bisect_left(self._called_us, span.begin_us), bisect_right(self._called_us, span.end_us)
        return [kernel for call, kernel in self._kernels[first:last] if any_thread or span.holds(call)]

    def _seconds(self, spans: Sequence[Event]) -> float | None:
        """Return the total duration of ranges, on the GPU if they launched kernels."""
        limits = [self._limits(span) for span in spans]
        return sum(end_us - begin_us for begin_us, end_us in limits) * _US if limits else None

    def _limits(self, span: Event, *, any_thread: bool = False) -> tuple[float, float]:
        kernels = self._kernels_in(span, any_thread=any_thread) or [span]
        return min(kernel.begin_us for kernel in kernels), max(kernel.end_us for kernel in kernels)

    def _gloo_events(self, events: Sequence[Event]) -> dict[float, Event]:
        """Return gloo's event for each of our launches, by its begin. Other collectives consume their own events."""
        queue = deque(e for e in events if e.name.startswith("gloo:") and "all_reduce" in e.name)
        launches = [event for event, _, is_launch in self._of_buckets if is_launch]
        begins_us = [launch.begin_us for launch in launches]
        found: dict[float, Event] = {}
        for call in (e for e in events if e.name == "c10d::allreduce_"):
            while queue and queue[0].begin_us < call.begin_us:
                queue.popleft()  # launched before the trace began
            if not queue:
                break
            flight, place = queue.popleft(), bisect_right(begins_us, call.begin_us) - 1
            if place >= 0 and launches[place].holds(call):
                found[launches[place].begin_us] = flight
        return found


def _communicates(kernel: Event) -> bool:
    return any(part in kernel.name.lower() for part in COLLECTIVE_KERNELS)


def _outermost(spans: Iterable[Event]) -> list[Event]:
    """Return the ranges that are not inside another one. `spans` is sorted by begin."""
    kept: list[Event] = []
    for span in spans:
        if not any(each.holds(span) for each in kept[-8:]):
            kept.append(span)
    return kept


def events_of(recorded: profile) -> Iterator[Event]:
    """Yield the events of a profiler in this process."""
    found = autograd.recorded_events(recorded, lambda name: name.startswith(_NAMED))
    for name, category, begin_ns, end_ns, thread, correlation in found:
        if category != _ON_GPU:
            yield Event(name, category, begin_ns / 1e3, end_ns / 1e3, thread, correlation)


def _events(data: Mapping[str, Any]) -> list[Event]:
    found = []
    try:
        for each in data["traceEvents"]:
            category = each.get("cat", "")
            if each.get("ph") != "X" or category == _ON_GPU:
                continue
            if category in (*_KERNELS, *_CALLS) or each["name"].startswith(_NAMED):
                begin_us, thread = float(each["ts"]), (each.get("pid"), each.get("tid"))
                end_us, correlation = begin_us + float(each.get("dur", 0.0)), each.get("args", {}).get("correlation")
                found.append(Event(each["name"], category, begin_us, end_us, thread, correlation))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ConfigError(f"not a trace of torch.profiler: {error!r}. Give a file of export_chrome_trace.") from error
    return found


def _read(path: Path) -> Any:
    try:
        raw = path.read_bytes()
        return json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)
    except (OSError, EOFError, ValueError) as error:
        raise ConfigError(f"cannot read {path} as a trace of torch.profiler: {error}.") from error
