"""Inspection of a replicated module: a report as text, its step as data, and measurements of its steps."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

from dp_compile._torch import autograd, distributed
from dp_compile.errors import UnsupportedModuleError
from dp_compile.insight.explain import Explanation
from dp_compile.insight.profile import events_of, measured_steps
from dp_compile.insight.step import NOMINAL, MeasuredStep, Step, typical_step
from dp_compile.passes.memory import KEPT_FROM_NBYTES
from dp_compile.plan.buckets import BucketPlan
from dp_compile.plan.words import count, format_bytes, in_columns
from dp_compile.replica.record import CaptureRecord
from dp_compile.replica.replica import Replica, warn
from dp_compile.replication.module import is_replicated, replica_of, unwrap

logger = logging.getLogger("dp_compile.measuring")

_measured: Final[WeakKeyDictionary[Replica, MeasuredStep]] = WeakKeyDictionary()  # latest result of `measure()`


@dataclass(frozen=True, slots=True)
class Report:
    """The state of one replicated module: its plan, its captures, and counts of its backwards by kind of reduction.

    `updates`: optimizers that update in the backward, with their savings. `why_not_captured`: the reason if a comm hook
    is called with each bucket. `notes`: a `gradient_divide_factor`, the measured backward, bucket memory that persists
    between backwards, the cost from which the plan was made.
    """

    mode: str
    world_size: int
    plan: BucketPlan
    captures: tuple[CaptureRecord, ...] = ()
    backwards: Mapping[str, int] = field(default_factory=dict)
    updates: str = ""
    why_not_captured: str = ""
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        head = f"mode: {self.mode}, {count(self.world_size, 'rank')}"
        if not self.plan.buckets:
            return f"{head}; it does not count its backwards"
        ways = ", ".join(f"{count} {way}" for way, count in self.backwards.items()) or "none yet"
        lines = [f"{head}; backwards: {ways}", self.updates, self.why_not_captured, *self.notes, str(self.plan)]
        lines += [f"captured backward {number}: {record}" for number, record in enumerate(self.captures)]
        return in_columns("\n".join(filter(None, lines)))


def report(module: nn.Module) -> Report:
    """Return the plan of a replicated module, its captures, and counts of its backwards.

    If torch's own DDP reduces the gradients (`ddp_python_hook=False`), the report has only mode and world size.

    Raises:
        UnsupportedModuleError: the module is not replicated.
    """
    if distributed.is_reduced_by_torch(inner := unwrap(module)) and not is_replicated(module):
        return Report("torch's own DDP (ddp_python_hook=False)", distributed.ranks_of_torch_ddp(inner), BucketPlan(()))
    replica = replica_of(module)
    hook, seen, divide_by = replica.called_hook, _measured.get(replica), replica.group.averaging.divide_by
    notes = [] if divide_by is None else [f"gradients divided by {divide_by:g}"]
    notes += [] if seen is None else [f"backward: {seen}, on rank {seen.rank}"]
    if (memory := replica.state.bucket_memory).kept:
        which = f" above {format_bytes(KEPT_FROM_NBYTES)}, which malloc would allocate again each time"
        kept = f"{format_bytes(memory.nbytes)} of {count(memory.buckets, 'bucket')}"
        notes.append(f"memory that backwards use again: {kept}{'' if replica.plan.keeps_memory else which}")
    if (certificate := replica.planning.certificate) is not None:
        asked = f"{replica.planning.strategy} plan for an all-reduce that takes {certificate.cost}"
        notes.append(f"{asked}; explain() has the predicted end and what it assumes of the backward")
    return Report(
        replica.mode,
        replica.group.world_size,
        replica.plan,
        tuple(replica.history.captures.values()),
        dict(replica.history.backwards),
        updates="\n".join(filter(None, (each.describe() for each in replica.after.updates if each.is_alive))),
        why_not_captured="" if hook is None else f"comm hook {hook.name} is called with each bucket: {hook.why_called}",
        notes=tuple(notes),
    )


def step_of(module: nn.Module) -> Step:
    """Return a module's latest step: its plan, ready times and link, and what was captured and measured last.

    Raises:
        UnsupportedModuleError: the module is not replicated, reduces no gradient, or has run no synchronised backward.
    """
    replica = replica_of(module)
    if not replica.state.reduces_gradients:
        raise UnsupportedModuleError("no gradient of this module is reduced: there is nothing to explain.")
    if not replica.history.synced_backwards:
        raise UnsupportedModuleError(
            "no synchronised backward of this module has run. Run a forward and a backward first, outside of "
            "no_sync(). Those of dp_compile.warmup() do not count."
        )
    group, given = replica.group, replica.config.cost
    found = f"{NOMINAL} for {group.backend}, not measured"
    found = found if group.measured is None else "measured, rounded to powers of two"
    return Step(
        mode=replica.mode,
        strategy=replica.planning.strategy,
        world_size=group.world_size,
        backend=group.backend,
        device=replica.device.type,
        plan=replica.plan,
        ready=replica.planning.ready,
        cost=given or group.cost,
        cost_source=found if given is None else "given in the config",
        capture=next(reversed(replica.history.captures.values()), None),
        backwards=tuple(replica.history.backwards.items()),
        measured=_measured.get(replica),
        optimizers=tuple(
            record for each in replica.after.updates if each.is_alive and (record := each.record()) is not None
        ),
    )


def explain(module: nn.Module) -> Explanation:
    """Return an explanation to print: what bounds the step, which buckets are exposed and why, and advice.

    Figures are predictions from the plan, with those of `measure()` if it was used. The first line tells whether
    anything was measured.

    Raises:
        UnsupportedModuleError: the module is not replicated, reduces no gradient, or has run no synchronised backward.
    """
    return Explanation(step_of(module))


@dataclass(eq=False, slots=True)
class Measurement:
    """The result of `measure`, complete when its `with` block ends.

    `step`: the measured step with the median backward, `None` if there is none. `backwards`: all measured steps in
    order. `not_measured`: counts of synchronised backwards that were not measured, by reason.
    """

    step: MeasuredStep | None = None
    backwards: tuple[MeasuredStep, ...] = ()
    not_measured: Counter[str] = field(default_factory=Counter)

    @property
    def why_not(self) -> str:
        """The reasons why some backwards were not measured, empty if all were measured."""
        reasons = [f"{count(times, 'backward')}: {reason}" for reason, times in self.not_measured.items()]
        if not reasons and self.step is None:
            return "no synchronised backward has ended inside the block"
        return "; ".join(reasons)

    def __str__(self) -> str:
        if self.step is None:
            return f"nothing was measured: {self.why_not}"
        return f"{self.step}; not measured: {self.why_not}" if self.why_not else str(self.step)


@contextlib.contextmanager
def measure(module: nn.Module) -> Iterator[Measurement]:
    """Measure this rank's synchronised backwards inside the block with torch.profiler; train about five steps there.

    Yields a `Measurement`. Afterwards `step_of(module).measured` is the step with the median backward. Times are host
    times for parameters on the CPU and kernel times on a GPU, including the profiler's overhead. Nothing is recompiled
    and no communication is added, so one rank may measure alone. Updates deferred to the next forward are measured if
    it is in the block. Not measured: a backward that compiles, and one of several replicated modules.
    If none was measured, a warning gives the reason, and `step_of(module).measured` does not change.

    Raises:
        UnsupportedModuleError: the module is not replicated, reduces no gradient, or a profiler records already.
    """
    replica, measurement = replica_of(module), Measurement()
    if not replica.state.reduces_gradients:
        raise UnsupportedModuleError(
            "no gradient of this module is reduced, so measure() has nothing to time. Use torch.profiler."
        )
    if autograd.profiler_is_on():
        raise UnsupportedModuleError(
            "torch.profiler is active already, in another measure() block or in your code; a process can run only one. "
            "Leave its block first, or read its trace: dp_compile.insight.profile.measured_step(file, step_of(model))."
        )
    on_gpu = replica.device.type == "cuda"
    with profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * on_gpu]) as recorded:
        yield measurement
    steps, measurement.not_measured = measured_steps(
        events_of(recorded), replica.plan, replica.module.number, in_flight=replica.has_in_flight()
    )
    if not steps:
        warn(logger, "%s", measurement)
        return
    source = f"measured by dp_compile.measure(), median of {count(len(steps), 'backward')}"
    measurement.backwards = tuple(replace(step, source=source, rank=dist.get_rank()) for step in steps)
    measurement.step = _measured[replica] = typical_step(measurement.backwards)
    logger.info("%s", measurement)
