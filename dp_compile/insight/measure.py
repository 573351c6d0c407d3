"""Measure some steps of a replicated module: when each bucket is launched and how long compute waits for it."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Final

import torch.distributed as dist
from torch import nn

from dp_compile.engine.events import Backward, LaunchClock, Observer, observers_of
from dp_compile.engine.replica import Replica
from dp_compile.errors import ModuleError
from dp_compile.insight.observe import measured
from dp_compile.insight.step import Followed, MeasuredBucket, MeasuredStep, format_ms, typical_step
from dp_compile.plan.buckets import BucketPlan
from dp_compile.plan.words import count
from dp_compile.replication.module import replica_of

logger = logging.getLogger("dp_compile.measuring")

SOURCE: Final = "measured by dp_compile.measure()"
SEVERAL_MODULES: Final = "it is of several replicated modules, whose compute cannot be separated"


@dataclass(eq=False, slots=True)
class Measurement:
    """The result of `measure`, complete when its block ends.

    `step`: the one with the median backward, `None` if none was measured. `backwards`: each of them, in order.
    `not_measured`: why synchronised backwards in the block were not measured, and how many.
    """

    step: MeasuredStep | None = None
    backwards: tuple[MeasuredStep, ...] = ()
    not_measured: Counter[str] = field(default_factory=Counter)

    @property
    def why_not(self) -> str:
        """Why some backwards were not measured; empty if all were."""
        reasons = [f"{count(times, 'backward')}: {reason}" for reason, times in self.not_measured.items()]
        if not reasons and self.step is None:
            return "no synchronised backward has ended inside the block"
        return "; ".join(reasons)

    def __str__(self) -> str:
        if self.step is None:
            return f"nothing was measured: {self.why_not}"
        step = self.step
        later = sum(step.is_after(bucket.wait_s) for bucket in step.buckets)
        waited_s, buckets = step.exposed_s - step.exposed_later_s, count(len(step.buckets) - later, "bucket")
        text = f"{step.source}: backward {format_ms(step.backward_s)}, of it {format_ms(waited_s)} waits for {buckets}"
        text += f" and {format_ms(step.updates_s)} updates" if step.updates_s else ""
        text += f"; after it {format_ms(step.exposed_later_s)} for {count(later, 'bucket')}" if later else ""
        text += f" and {format_ms(step.gather_s)} for all-gathers of parameters" if step.gather_s else ""
        return f"{text}; not measured: {self.why_not}" if self.why_not else text


@contextlib.contextmanager
def measure(module: nn.Module) -> Iterator[Measurement]:
    """Measure this rank's synchronised backwards inside the block; train about five steps there.

    Afterwards `step_of(module).measured` is the one with the median backward. Times are the host's for parameters on
    the CPU, the stream's on a GPU. Nothing is compiled again and no other rank is asked, so one rank may measure alone.
    A backward counts from the call of its captured code until all has arrived. What an optimizer defers to the next
    forward is measured there, if that is in the block. Backwards are measured that are captured and compiled already,
    or reduced by eager hooks. If none was, a warning says why, and `step_of(module).measured` stays as it was.

    Raises:
        ModuleError: the module is not replicated, reduces no gradient, or is being measured already.
    """
    replica, measurement = replica_of(module), Measurement()
    if not replica.state.reduces_gradients:
        raise ModuleError("measure() times reductions; no gradient of this module is reduced. Use torch.profiler.")
    if any(isinstance(each, _Recording) for each in observers_of(replica)):
        raise ModuleError("this module is being measured already. Leave the other measure() block first.")
    recording = _Recording(replica)
    observers_of(replica).append(recording)
    try:
        yield measurement
    finally:
        observers_of(replica).remove(recording)
        _conclude(measurement, replica, recording)


@dataclass(eq=False, slots=True)
class _Recording(Observer):
    """Clocks of the backwards of one module with the plan of each, and why others were not timed."""

    replica: Replica
    clocks: list[tuple[BucketPlan, LaunchClock]] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)

    def backward(self, begun: Backward) -> LaunchClock | None:
        why_not = SEVERAL_MODULES if len(begun.replicas) > 1 else begun.untold
        if why_not:
            self.skipped[why_not] += 1
            return None
        return LaunchClock(self.replica.device, self._note)

    def _note(self, clock: LaunchClock) -> None:
        if clock.voided:
            self.skipped[clock.voided] += 1
        else:
            self.clocks.append((self.replica.plan, clock))


def _conclude(measurement: Measurement, replica: Replica, recording: _Recording) -> None:
    """Read the clocks, at the end of the block: reading those of a GPU stops the host."""
    not_measured = measurement.not_measured
    not_measured += recording.skipped
    clocks = [clock for plan, clock in recording.clocks if plan.for_code() == replica.plan.for_code()]
    not_measured["a new plan was made after it"] += len(recording.clocks) - len(clocks)
    steps = measured_steps(clocks, replica)
    in_flight = bool(clocks) and replica.has_in_flight()
    not_measured["updates of it were in flight when the block ended"] += in_flight
    not_measured["not every bucket was seen, is it a CUDA graph?"] += len(clocks) - in_flight - len(steps)
    measurement.not_measured = +not_measured
    if steps:
        measurement.backwards, measurement.step = tuple(steps), typical_step(steps)
        measured[replica] = measurement.step
        logger.info("%s", measurement)
    else:
        logger.warning("%s", measurement)


def measured_steps(clocks: Sequence[LaunchClock], replica: Replica) -> list[MeasuredStep]:
    """Those of consecutive backwards under the current plan in which every bucket was seen and all has arrived."""
    starts = [clock.start_s_after(clocks[0]) for clock in clocks]
    lasted = [*(after - before for before, after in pairwise(starts)), None]
    steps: list[MeasuredStep] = []
    complete = len(clocks) - (bool(clocks) and replica.has_in_flight())  # the last clock has not seen all
    for clock, step_s in list(zip(clocks, lasted, strict=False))[:complete]:
        timed = clock.buckets(len(replica.plan.buckets))
        if timed is not None:
            buckets = tuple(
                MeasuredBucket(each.launch_s, each.finish_s, each.waited_s, None, each.wait_s) for each in timed
            )
            follows = tuple(Followed(*each) for each in clock.follows())
            steps.append(MeasuredStep(clock.backward_s(), buckets, "", dist.get_rank(), step_s=step_s, follows=follows))
    source = f"{SOURCE}, median of {count(len(steps), 'backward')}"
    return [replace(step, source=source) for step in steps]
