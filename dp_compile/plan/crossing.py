"""Buckets whose reductions may end under the next forward: the network works on what is needed first. Pure.

A step has two halves. In the backward gradients become ready from the last layer to the first; the next forward reads
parameters from the first to the last. In the order in which gradients are ready, as is best if all has to end in the
backward, the first layer is updated last, and the forward waits for everything. So of the buckets that are ready the
one that is read first goes first (earliest deadline first); what is read late travels under the forward.

    step = backward + forward + what the forward waits        >=  max(backward + forward, communication)

Source: earliest deadline first, Horn 1974, optimal for jobs with release times that can be interrupted; a bucket
cannot, so small ones are tried too. The forward is taken to be half as long as the backward, and to read in the
opposite order of that in which gradients become ready.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from dp_compile.plan.buckets import UNUSED_FLAGS, Bucket, BucketPlan, GradientSpec, Layout, plan_buckets
from dp_compile.plan.cost import AllReduceCost
from dp_compile.plan.network import legs_of
from dp_compile.plan.ready_times import ReadyTimes, backward_seconds
from dp_compile.plan.strategies import Planned
from dp_compile.plan.words import BYTES_PER_MB

FORWARD_SHARE: Final = 0.5
"""How long a forward takes, as a share of its backward: one product for each two of the backward."""

PARTS: Final = (4, 6, 8, 12, 16, 24, 32)
"""Into how many buckets of about one size gradients are divided, each tried."""

FLAGS_REASON: Final = "flags, which the end of the backward waits for"


def plan_crossing(planned: Planned, times: ReadyTimes, cost: AllReduceCost, layout: Layout | None) -> Planned:
    """The same gradients for a step whose reductions may end under the next forward.

    The flags get a bucket of their own, the first: they are known when the backward begins, and it waits for them.

    Args:
        planned: for a step whose reductions end in the backward.
        times: when gradients are ready.
        cost: what a collective costs.
        layout: how gradients lie in their buckets; `None`: buckets stay as they are, only their order changes.
    """
    flags = planned.plan.flags
    gradients = [each for each in planned.plan.gradients if each.name != UNUSED_FLAGS]
    if any(len(each.key.reduction.stages) != 1 for each in gradients):
        return planned  # These end in the backward anyway.
    members = [member for bucket in planned.plan.buckets for member in bucket.members]
    backward_s = backward_seconds(members, times, cost)
    candidates = [tuple(_without_flags(planned.plan.buckets))]
    total = sum(each.nbytes for each in gradients)
    for parts in PARTS if layout is not None and total else ():
        cap_mb = total / parts / BYTES_PER_MB
        candidates.append(
            plan_buckets(gradients, bucket_cap_mb=cap_mb, first_bucket_cap_mb=cap_mb, layout=layout or Layout(1)).buckets
        )
    orders = [in_order_of_need(each, times, cost, backward_s) for each in candidates]
    best = min(orders, key=lambda order: (step_seconds(order, times, cost, backward_s), len(order)))
    first = _alone(flags, layout)
    return Planned(replace(planned.plan, buckets=(first, *best)))


def in_order_of_need(
    buckets: Sequence[Bucket], times: ReadyTimes, cost: AllReduceCost, backward_s: float
) -> tuple[Bucket, ...]:
    """Buckets as the network takes them: whenever it is free, of those that are ready the one that is read first."""
    waiting = [_Job.of(bucket, times, cost, backward_s) for bucket in buckets]
    now_s, order = 0.0, list[Bucket]()
    while waiting:
        now_s = max(now_s, min(job.ready_s for job in waiting))
        ready = [job for job in waiting if job.ready_s <= now_s]
        job = min(ready, key=lambda each: each.needed_s)  # the first of equal ones: the same on every rank
        waiting.remove(job)
        order.append(job.bucket)
        now_s += job.seconds
    return tuple(order)


def step_seconds(
    buckets: Sequence[Bucket], times: ReadyTimes, cost: AllReduceCost, backward_s: float
) -> float:
    """How long a backward and the next forward take with buckets in launch order."""
    free_s, arrivals = 0.0, list[tuple[float, float]]()
    for bucket in buckets:
        job = _Job.of(bucket, times, cost, backward_s)
        free_s = max(free_s, job.ready_s) + job.seconds
        arrivals.append((job.needed_s, free_s))
    late_s = 0.0
    for needed_s, arrived_s in sorted(arrivals):
        late_s = max(late_s, arrived_s - needed_s)
    return backward_s * (1 + FORWARD_SHARE) + late_s


class _Job(NamedTuple):
    """A bucket; times in seconds after the start of the backward. `needed_s`: when the next forward reads it."""

    bucket: Bucket
    ready_s: float
    needed_s: float
    seconds: float

    @staticmethod
    def of(bucket: Bucket, times: ReadyTimes, cost: AllReduceCost, backward_s: float) -> _Job:
        shares = [times.of_member(member) for member in bucket.members]
        needed_s = backward_s * (1 + FORWARD_SHARE * (1 - max(shares)))
        seconds = sum(leg.seconds for leg in legs_of([member.loads for member in bucket.members], cost))
        return _Job(bucket, backward_s * max(shares), needed_s, seconds)


def _without_flags(buckets: Sequence[Bucket]) -> Iterator[Bucket]:
    for bucket in buckets:
        members = tuple(member for member in bucket.members if member.gradient.name != UNUSED_FLAGS)
        if members:
            yield replace(bucket, members=members)


def _alone(flags: GradientSpec, layout: Layout | None) -> Bucket:
    return (layout or Layout(1)).bucket(flags.key, [flags], FLAGS_REASON)


def crosses(plan: BucketPlan) -> bool:
    """Whether a plan is one of `plan_crossing`."""
    return plan.buckets[0].reason == FLAGS_REASON
