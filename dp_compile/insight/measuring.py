"""Measure some steps of a replicated module: when each bucket is launched, how long is waited for it."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch.distributed as dist
from torch import nn

from dp_compile.decentralized.module import mixing_of
from dp_compile.engine.launch_clock import LaunchClock
from dp_compile.engine.observers import Backward, Observer
from dp_compile.engine.replica import Replica
from dp_compile.errors import ModuleError
from dp_compile.insight.clocked import measured_steps, source_of
from dp_compile.insight.exchanges import ExchangeClock
from dp_compile.insight.replica_step import remember_measured
from dp_compile.insight.step import MeasuredStep, typical_step
from dp_compile.modules.replicated_module import replica_of
from dp_compile.plan.buckets import BucketPlan
from dp_compile.plan.words import count

logger = logging.getLogger("dp_compile.measuring")

SOURCE: Final = "measured by dp_compile.measure()"
SEVERAL_MODULES: Final = "it is of several replicated modules, and nothing tells whose compute is whose"


@dataclass(eq=False, slots=True)
class Measurement:
    """What `measure` saw; complete when its block is left.

    `step`: the one with the median backward, `None` if none was measured. `backwards`: each of them, in order.
    `not_measured`: why synchronised backwards inside the block were not measured, and how many.
    """

    step: MeasuredStep | None = None
    backwards: tuple[MeasuredStep, ...] = ()
    not_measured: Counter[str] = field(default_factory=Counter)

    @property
    def why_not(self) -> str:
        """Why some backwards were not measured, in words; empty if all were."""
        reasons = [f"{count(times, 'backward')}: {reason}" for reason, times in self.not_measured.items()]
        if not reasons and self.step is None:
            return "no synchronised backward has ended inside the block"
        return "; ".join(reasons)

    def __str__(self) -> str:
        if self.step is None:
            return f"nothing was measured: {self.why_not}"
        left_out = f"; not measured: {self.why_not}" if self.why_not else ""
        step = self.step
        behind = sum(step.is_behind(bucket.wait_s) for bucket in step.buckets)
        waited_s, buckets = step.exposed_s - step.exposed_later_s, count(len(step.buckets) - behind, "bucket")
        times = f"backward {_ms(step.backward_s)}, of which {_ms(waited_s)} waited for {buckets}"
        times += f" and {_ms(step.updates_s)} updates" if step.updates_s else ""
        times += f"; behind it {_ms(step.exposed_later_s)} for {count(behind, 'bucket')}" if behind else ""
        round_s = f"parameters go round behind it in {_ms(step.gather_s)}"
        if step.next_forward is not None:
            round_s = f"the next forward waits {_ms(step.gather_s)} for parameters that go round"
        times += f"; {round_s}" if step.gather_s else ""
        return f"{step.source}: {times}{left_out}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


@contextlib.contextmanager
def measure(module: nn.Module) -> Iterator[Measurement]:
    """Measure this rank's synchronised backwards inside; train a few steps there, five say.

    Before → after: `step_of(module).measured` is the one with the median backward. Times are the host's where
    parameters are on the CPU, the stream's on a GPU. Nothing is compiled anew and nothing is asked of other ranks, so
    one rank may measure alone. A backward is timed from where its captured code is called to where everything has
    arrived: finding that code, for which torch walks the autograd graph, is not in it. What an optimizer left for the
    next forward is measured there, if that is in the block. Measured are backwards that are
    captured and compiled already, in pieces too, and those that hooks reduce eagerly; of a decentralized module all
    that compile nothing, with its exchanges. If none is measured that is a warning with the reason, and
    `step_of(module).measured` stays. Without it the first backwards on a CPU are kept there.

    Raises:
        ModuleError: the module is not replicated, or is being measured already.
    """
    replica, measurement = replica_of(module), Measurement()
    listeners: list[Any] = mixing_of(module).mixer.listeners if replica.is_mixed else replica.observers
    if any(isinstance(each, (_Recording, ExchangeClock)) for each in listeners):
        raise ModuleError("this module is being measured already. Leave the other measure() block first.")
    recording = ExchangeClock(replica) if replica.is_mixed else _Recording(replica)
    listeners.append(recording)
    try:
        yield measurement
    finally:
        listeners.remove(recording)
        if isinstance(recording, ExchangeClock):
            measurement.not_measured += recording.skipped
            _remember(measurement, replica, recording.steps(source_of(SOURCE, len(recording.backwards))))
        else:
            _conclude(measurement, replica, recording)


@dataclass(eq=False, slots=True)
class _Recording(Observer):
    """Times the backwards of one module: their clocks with the plan of each, and why others were not timed.

    Clocks are read at the end: reading a GPU's stops the host.
    """

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
    measurement.not_measured += recording.skipped
    clocks = [clock for plan, clock in recording.clocks if plan.for_code() == replica.plan.for_code()]
    measurement.not_measured["the plan was made anew after it"] += len(recording.clocks) - len(clocks)
    steps = measured_steps(clocks, replica, SOURCE, dist.get_rank())
    in_flight = bool(clocks) and replica.has_in_flight()
    ended = clocks[: len(clocks) - in_flight]
    unseen = sum(clock.buckets(len(replica.plan.buckets)) is None for clock in ended)
    measurement.not_measured["updates of it were in flight when the block ended"] += in_flight
    measurement.not_measured["not every bucket was seen, is it a CUDA graph?"] += unseen
    _remember(measurement, replica, steps)


def _remember(measurement: Measurement, replica: Replica, steps: Sequence[MeasuredStep]) -> None:
    measurement.not_measured = +measurement.not_measured
    if not steps:
        logger.warning("%s", measurement)
        return
    measurement.backwards = tuple(steps)
    measurement.step = typical_step(steps)
    remember_measured(replica, measurement.step)
    logger.info("%s", measurement)
