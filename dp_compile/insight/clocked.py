"""From the clocks of some backwards to measured steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from dp_compile.engine.launch_clock import LaunchClock
from dp_compile.engine.replica import Replica
from dp_compile.insight.step import Followed, MeasuredBucket, MeasuredStep
from dp_compile.plan.buckets import BucketPlan
from dp_compile.plan.words import count


def measured_steps(clocks: Sequence[LaunchClock], replica: Replica, source: str, rank: int) -> list[MeasuredStep]:
    """Those of the backwards in which every bucket was seen, and what was left behind them has arrived.

    Args:
        clocks: of backwards one after the other, under the plan of today.
        replica: the module. If something of it is in flight, the last clock has not seen all.
        source: how they were measured, for people.
        rank: this one.
    """
    starts = [clock.start_s_after(clocks[0]) for clock in clocks]
    lasted = [*(after - before for before, after in pairwise(starts)), None]
    steps = [_step(clock, replica.plan, rank) for clock in clocks]
    if steps and replica.has_in_flight():
        steps[-1] = None
    source = source_of(source, sum(step is not None for step in steps))
    return [
        replace(step, source=source, step_s=step_s)
        for step, step_s in zip(steps, lasted[: len(steps)], strict=True)
        if step is not None
    ]


def source_of(source: str, backwards: int) -> str:
    return f"{source}, median of {count(backwards, 'backward')}"


def _step(clock: LaunchClock, plan: BucketPlan, rank: int) -> MeasuredStep | None:
    timed = clock.buckets(len(plan.buckets))
    if timed is None:
        return None
    buckets = tuple(MeasuredBucket(each.launch_s, each.finish_s, each.waited_s, wait_s=each.wait_s) for each in timed)
    follows = tuple(Followed(*each) for each in clock.follows())
    return MeasuredStep(clock.backward_s(), buckets, "", rank, follows=follows)
