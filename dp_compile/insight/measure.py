"""Measure some steps of a replicated module: when each bucket is launched and how long compute waits for it."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Final

import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

from dp_compile._torch import autograd
from dp_compile.errors import UnsupportedModuleError
from dp_compile.insight.observe import measured
from dp_compile.insight.profile import events_of, measured_steps
from dp_compile.insight.step import MeasuredStep, format_ms, typical_step
from dp_compile.plan.words import count
from dp_compile.replication.module import replica_of

logger = logging.getLogger("dp_compile.measuring")

SOURCE: Final = "measured by dp_compile.measure()"


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
    """Measure this rank's synchronised backwards inside the block with torch.profiler; train about five steps there.

    Afterwards `step_of(module).measured` is the one with the median backward. Times are the host's for parameters on
    the CPU, those of kernels on a GPU, and what the profiler costs is in them. Nothing is compiled again and no other
    rank is asked, so one rank may measure alone. What an optimizer defers to the next forward is measured there, if
    that is in the block. Backwards are measured that are captured and compiled already, or reduced by eager hooks. If
    none was, a warning says why, and `step_of(module).measured` stays as it was.

    Raises:
        UnsupportedModuleError: the module is not replicated, reduces no gradient, or a profiler records already.
    """
    replica, measurement = replica_of(module), Measurement()
    if not replica.state.reduces_gradients:
        raise UnsupportedModuleError(
            "measure() times reductions; no gradient of this module is reduced. Use torch.profiler."
        )
    if autograd.profiler_is_on():
        raise UnsupportedModuleError(
            "torch.profiler is active already, in another measure() block or in your code; a process can run only one. "
            "Leave its block first, or read its trace: dp_compile.insight.profile.with_profile(step_of(model), file)."
        )
    on_gpu = replica.device.type == "cuda"
    with profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * on_gpu]) as recorded:
        yield measurement
    steps, measurement.not_measured = measured_steps(
        events_of(recorded), replica.plan, replica.module.number, in_flight=replica.has_in_flight()
    )
    if not steps:
        logger.warning("%s", measurement)
        return
    source = f"{SOURCE}, median of {count(len(steps), 'backward')}"
    measurement.backwards = tuple(replace(step, source=source, rank=dist.get_rank()) for step in steps)
    measurement.step = measured[replica] = typical_step(measurement.backwards)
    logger.info("%s", measurement)
