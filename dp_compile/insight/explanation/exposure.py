"""Where communication is not hidden, and which parameters it waits for: a step's buckets on its timeline. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from dp_compile.errors import ConfigError
from dp_compile.insight.step import MeasuredBucket, PlannedBucket, Step, planned_buckets
from dp_compile.plan.buckets import UNUSED_FLAGS, Bucket
from dp_compile.plan.ready_times import Launches, ReadyTimes, measured_times

SHORTEST_S = 1e-9
"""What is shorter is rounding."""


@dataclass(frozen=True, slots=True)
class ExplainedBucket:
    """One bucket as planned and as measured.

    Args:
        number: its place in the launch order, from 0.
        nbytes: of its gradients.
        gradients: how many it has, pieces counted each.
        key: what its gradients have in common: dtype, device, reduce op.
        members: fully qualified names, with rows for a piece.
        largest: the name of the member with most bytes.
        reason: why it ends where it ends.
        released_by: the gradient whose readiness lets it be launched. It may be in an earlier bucket: launches keep
            their order. Empty if all reductions are deferred to the end of the backward.
        released_in: the number of the bucket that has that gradient.
        planned: the predicted times; `None` if the timeline is not known.
        measured: the measured times, if there are any.
    """

    number: int
    nbytes: int
    gradients: int
    key: str
    members: tuple[str, ...]
    largest: str
    reason: str
    released_by: str
    released_in: int
    planned: PlannedBucket | None = None
    measured: MeasuredBucket | None = None


MOST: Final = 0.2
"""Of the backward: compute between two gradients that is worth a line."""


@dataclass(frozen=True, slots=True)
class SlowPart:
    """Where a large part of the compute is: behind the gradient `after` (none: from the start) until `before` is ready.

    `share`: of the backward. `measured`: between the launches of two buckets, else as the ready times are believed.
    """

    share: float
    after: str
    before: str
    measured: bool


def slowest_part(step: Step) -> SlowPart | None:
    """The longest stretch of compute without a new gradient; `None` if none takes `MOST` of the backward."""
    times = times_as_seen(step)
    measured = times is not step.ready
    gradients = {each.name: each for each in step.plan.gradients if each.name != UNUSED_FLAGS}
    longest, before, last = SlowPart(0.0, "", "", False), 0.0, ""
    for name, share in sorted(((name, times.of(each)) for name, each in gradients.items()), key=lambda each: each[1]):
        if share - before > longest.share:
            longest = SlowPart(share - before, last, name, measured)
        before, last = share, name
    return longest if longest.share >= MOST and len(gradients) > 1 else None


def times_as_seen(step: Step) -> ReadyTimes:
    """Ready times that fit the launches that were measured; the step's if there are none, or all came at the end.

    Where updates cross, launches come in the order of need and wait for each other: they say nothing of that.
    """
    measured = step.measured
    if measured is None or step.deferred or step.left:
        return step.ready
    if not measured.buckets or len(measured.buckets) != len(step.plan.buckets):
        return step.ready
    compute_s = measured.compute_s
    launches = [0.0]
    for number, each in enumerate(measured.buckets):
        waited_s = sum(
            other.waited_s for other in measured.buckets[:number] if (other.wait_s or math.inf) < each.launch_s
        )
        launches.append(max(launches[-1], each.launch_s - waited_s))
    if compute_s <= 0:
        return step.ready
    return measured_times(step.plan, Launches(tuple(launches[1:]), compute_s), step.ready)


def with_measured_backward(step: Step) -> Step:
    """The same step; if only a measured step tells how long the backward computes, that counts."""
    if step.ready.backward_s is not None or step.measured is None:
        return step
    return replace(step, ready=replace(step.ready, backward_s=step.measured.compute_s))


def why_no_timeline(step: Step) -> str | None:
    """Why the plan does not say when its buckets are reduced; `None` if it does."""
    if step.mode.startswith("torch's C++ reducer"):
        return (
            "torch's C++ reducer makes its own buckets, which are not seen; those below are what hooks would run. "
            "Compile the forward, and hooks reduce in a captured backward"
        )
    if not step.mode.startswith("python hooks"):
        return f"what reduces is not known ({step.mode})"
    if step.world_size == 1:
        return "there is one rank, so collectives bring nothing from elsewhere and there is nothing to hide"
    return None


def explained_buckets(step: Step) -> tuple[ExplainedBucket, ...]:
    """The buckets of a step, without times where no timeline is known.

    Raises:
        ConfigError: the measured buckets are not those of the plan.
    """
    buckets = step.plan.buckets
    planned: Sequence[PlannedBucket | None] = [None] * len(buckets)
    if why_no_timeline(step) is None:
        planned = planned_buckets(step)
    measured: Sequence[MeasuredBucket | None] = [None] * len(buckets)
    if step.measured is not None and step.measured.buckets:
        measured = step.measured.buckets
    if len(measured) != len(buckets):
        raise ConfigError(
            f"the plan has {len(buckets)} buckets, {len(measured)} were measured. Measure under the plan that is to "
            "be explained."
        )
    facts = zip(itertools.count(), buckets, _releases(step), planned, measured)
    return tuple(_explained(*each) for each in facts)


def _explained(
    number: int,
    bucket: Bucket,
    released: tuple[str, int],
    planned: PlannedBucket | None,
    measured: MeasuredBucket | None,
) -> ExplainedBucket:
    gradients = [member for member in bucket.members if member.gradient.name != UNUSED_FLAGS]
    return ExplainedBucket(
        number=number,
        nbytes=bucket.nbytes,
        gradients=len(gradients),
        key=str(bucket.key),
        members=tuple(member.label for member in bucket.members),
        largest=max(gradients or bucket.members, key=lambda member: member.nbytes).label,
        reason=bucket.reason,
        released_by=released[0],
        released_in=released[1],
        planned=planned,
        measured=measured,
    )


def _releases(step: Step) -> Iterator[tuple[str, int]]:
    """For each bucket, the gradient whose readiness lets it be launched, and which bucket has it.

    Of equally ready ones the largest of the own bucket, so that a weight is named before its bias or the flags.
    """
    latest_s, name, place = -1.0, "", 0
    for number, (bucket, times) in enumerate(zip(step.plan.buckets, step.ready_members(), strict=True)):
        own_s = max(each.ready_s for each in times)
        if own_s >= latest_s:
            last = [member for member, time in zip(bucket.members, times, strict=True) if time.ready_s == own_s]
            gradients = [member for member in last if member.gradient.name != UNUSED_FLAGS]
            largest = max(gradients or last, key=lambda member: member.nbytes)
            latest_s, name, place = own_s, largest.label, number
        yield ("", number) if step.deferred else (name, place)


def last_run(buckets: Sequence[ExplainedBucket]) -> tuple[ExplainedBucket, ...]:
    """The buckets at the end that the network carries without a rest: the step ends when they do.

    The first of them starts as soon as it may. Empty if times are not known.
    """
    run: list[ExplainedBucket] = []
    for bucket in reversed(buckets):
        if bucket.planned is None:
            return ()
        run.append(bucket)
        if bucket.planned.start_s <= bucket.planned.ready_s + SHORTEST_S:
            break
    return tuple(reversed(run))
