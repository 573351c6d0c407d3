"""The first backwards of every module are timed unasked, so that what is said of a step rests on what it was.

Costs a few microseconds for each op that compiled code calls in `FIRST` backwards (3.5 ms of a step of 41 ms with 2,000
small parameters), and next to nothing from then on. On CPUs only: on a GPU it takes events on a stream, and CUDA graphs
may be recorded in just these steps; there `measure()` is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final
from weakref import WeakKeyDictionary

import torch.distributed as dist

from dp_compile.engine.launch_clock import LaunchClock
from dp_compile.engine.observers import Backward, Observer
from dp_compile.engine.replica import Replica
from dp_compile.insight.clocked import measured_steps
from dp_compile.insight.step import MeasuredStep, typical_step

FIRST: Final = 10
"""Backwards, not counting those in which code is compiled."""

SOURCE: Final = "measured in the first steps"


@dataclass(slots=True)
class _Timed:
    """`plan_since`: after how many synchronised backwards the plan was made that they ran under."""

    plan_since: int
    rank: int
    clocks: list[LaunchClock] = field(default_factory=list)


class FirstSteps(Observer):
    """Listens to the first backwards of each plan of each module."""

    def __init__(self) -> None:
        self._timed: WeakKeyDictionary[Replica, _Timed] = WeakKeyDictionary()

    def backward(self, begun: Backward) -> LaunchClock | None:
        if begun.untold or len(begun.replicas) > 1:
            return None
        (replica,) = begun.replicas
        timed, since = self._timed.get(replica), replica.revisions.settled_after
        if timed is None or timed.plan_since != since:
            if replica.device.type != "cpu" or replica.is_mixed:
                return None
            timed = self._timed[replica] = _Timed(since, dist.get_rank())
        if len(timed.clocks) >= FIRST or replica.rehearses:
            return None
        clocks = timed.clocks

        def note(clock: LaunchClock) -> None:
            if not clock.voided and len(clocks) < FIRST:
                clocks.append(clock)

        return LaunchClock(replica.device, note)

    def seen(self, replica: Replica) -> MeasuredStep | None:
        """What they were like under the plan of today; `None` if there was none yet."""
        timed = self._timed.get(replica)
        if timed is None or timed.plan_since != replica.revisions.settled_after:
            return None
        steps = measured_steps(timed.clocks, replica, SOURCE, timed.rank)
        return typical_step(steps) if steps else None


observer: Final = FirstSteps()
