"""Measure when a backward launches its collectives, how long it waits for them, and when its compute is done."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import torch

from dp_compile.engine.observers import Backward, BackwardListener, Observer
from dp_compile.engine.replica import Replica, Revision
from dp_compile.plan.ready_times import Launches

BLOCKED_S: Final = 100e-6
"""A wait that takes longer found its collective not finished. One that did not block takes 5 to 40 us (measured)."""


class TimedBucket(NamedTuple):
    """One bucket in one backward, in seconds after its start.

    `waited_s`: how long its waits took, together. `finish_s`: the end of the last one that blocked; if none did, the
    collective was over at some time between `launch_s` and `wait_s`, and the answer is `None`.
    """

    launch_s: float
    wait_s: float
    waited_s: float
    finish_s: float | None


class LaunchClock(BackwardListener):
    """Notes when each bucket is launched and waited for, on the device's own clock. Listens to one backward, and to
    what follows it.

    Args:
        device: whose clock.
        then: called with the clock when the backward has ended without an exception.

    On a GPU a wait is measured on the stream: from where compute has come to it to where it may go on.
    """

    def __init__(self, device: torch.device, then: Callable[[LaunchClock], None] | None = None) -> None:
        self.voided = ""
        """Why it says nothing: what was told of the backward means nothing."""
        self._device = device
        self._then = then
        self._launches: list[Stamp] = []
        self._waits: list[_Wait] = []
        self._follows: list[tuple[str, Stamp, Stamp]] = []
        self._done: Stamp | None = None
        self._end: Stamp | None = None
        self._start = Stamp(device)

    def __exit__(self, *error: Any) -> None:
        self._end = Stamp(self._device)
        if self._then is not None and error[0] is None:
            self._then(self)

    @contextlib.contextmanager
    def launch(self, module: int, bucket: int) -> Iterator[None]:
        self._launches.append(Stamp(self._device))
        self._done = None
        yield

    @contextlib.contextmanager
    def wait(self, module: int, bucket: int) -> Iterator[None]:
        begin = Stamp(self._device)
        self._done = self._done or begin
        yield
        self._waits.append(_Wait(bucket, begin, Stamp(self._device)))

    @contextlib.contextmanager
    def follow(self, module: int, what: str) -> Iterator[None]:
        begin = Stamp(self._device)
        yield
        self._follows.append((what, begin, Stamp(self._device)))

    def void(self, why: str) -> None:
        self.voided = why

    def result(self) -> Launches | None:
        """Launches, and the first wait after the last one; `None` if nothing was launched and waited for.

        Stops the host until a GPU has come so far. Code that waits before it has launched everything looks slower than
        it is: what it waits for counts as compute.
        """
        if self._done is None or not self._launches:
            return None
        return Launches(
            tuple(stamp.seconds_after(self._start) for stamp in self._launches), self._done.seconds_after(self._start)
        )

    def start_s_after(self, earlier: LaunchClock) -> float:
        """How long after another backward this one started."""
        return self._start.seconds_after(earlier._start)

    def backward_s(self) -> float:
        """From the start to the end of the block."""
        assert self._end is not None
        return self._end.seconds_after(self._start)

    def follows(self) -> list[tuple[str, float, float]]:
        """What followed the reductions, in the order in which it ended: what, from when to when."""
        return [
            (what, begin.seconds_after(self._start), end.seconds_after(self._start))
            for what, begin, end in self._follows
        ]

    def launched(self) -> int:
        """How many buckets were launched."""
        return len(self._launches)

    def buckets(self, count: int) -> tuple[TimedBucket, ...] | None:
        """The buckets in the plan's order; `None` if not each of `count` was launched and waited for."""
        waits: dict[int, list[_Wait]] = {number: [] for number in range(count)}
        for wait in self._waits:
            waits[wait.bucket].append(wait)
        if len(self._launches) != count or not all(waits.values()):
            return None
        return tuple(self._timed(stamp, waits[number]) for number, stamp in enumerate(self._launches))

    def _timed(self, launch: Stamp, waits: list[_Wait]) -> TimedBucket:
        spans = [(w.begin.seconds_after(self._start), w.end.seconds_after(self._start)) for w in waits]
        return TimedBucket(
            launch.seconds_after(self._start),
            spans[0][0],
            sum(end - begin for begin, end in spans),
            max((end for begin, end in spans if end - begin > BLOCKED_S), default=None),
        )


class LaunchesForPlan(Observer):
    """Notes launches of a module's captured backwards for as long as its plan is to be made anew from them."""

    def __init__(self, of: weakref.ref[Replica]) -> None:
        self._of = of

    def backward(self, begun: Backward) -> LaunchClock | None:
        replica = self._of()
        if replica is None or not begun.captured or begun.untold or len(begun.replicas) > 1:
            return None
        return LaunchClock(replica.device, self._note) if replica.awaits(Revision.FROM_LAUNCHES) else None

    def _note(self, clock: LaunchClock) -> None:
        replica = self._of()
        if replica is not None and not clock.voided and (seen := clock.result()) is not None:
            replica.revisions.launches.append(seen)


class Stamp:
    """A moment on the host's clock, or on a GPU's stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._event: torch.Event | None = None
        self._time_s = time.perf_counter()
        if device.type != "cpu":
            self._event = torch.Event(device, enable_timing=True)
            self._event.record()

    def seconds_after(self, start: Stamp) -> float:
        if self._event is None or start._event is None:
            return self._time_s - start._time_s
        self._event.synchronize()
        return float(start._event.elapsed_time(self._event)) / 1e3


class _Wait(NamedTuple):
    bucket: int
    begin: Stamp
    end: Stamp
