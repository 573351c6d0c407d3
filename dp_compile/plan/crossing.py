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

from dp_compile.plan.buckets import PACKED, UNUSED_FLAGS, Bucket, Layout, plan_buckets
from dp_compile.plan.cost import AllReduceCost
from dp_compile.plan.network import legs_of
from dp_compile.plan.ready_times import ReadyTimes, backward_seconds
from dp_compile.plan.strategies import Planned
from dp_compile.plan.words import BYTES_PER_MB

FORWARD_SHARE: Final = 0.5
"""How long a forward takes, as a share of its backward: one product for each two of the backward."""

PARTS: Final = (4, 6, 8, 12, 16, 24, 32)
"""Into how many buckets of about one size gradients are divided, each tried."""

SPEEDS: Final = (1.0, 0.5, 0.7, 1.4, 2.0)
"""How many times as long as believed the network may take, beside the backward."""


def plan_crossing(planned: Planned, times: ReadyTimes, cost: AllReduceCost, layout: Layout | None) -> Planned:
    """The same gradients for a step whose reductions may end under the next forward.

    The flags get a bucket of their own, the first: they are known when the backward begins, and it waits for them.

    What is taken is the best in the worst case, over networks half to twice as fast as believed.

    Args:
        planned: for a step whose reductions end in the backward.
        times: when gradients are ready.
        cost: what a collective costs.
        layout: how gradients lie in their buckets; `None`: buckets stay as they are, only their order changes.
    """
    flags = planned.plan.flags
    gradients = [each for each in planned.plan.gradients if each.name != UNUSED_FLAGS]
    if not gradients or any(len(each.key.reduction.stages) != 1 for each in gradients):
        return planned  # These end in the backward anyway.
    members = [member for bucket in planned.plan.buckets for member in bucket.members]
    backward_s = backward_seconds(members, times, cost)
    candidates = [tuple(_without_flags(planned.plan.buckets))]
    total = sum(each.nbytes for each in gradients)
    for parts in PARTS if layout is not None and total else ():
        cap_mb = total / parts / BYTES_PER_MB
        candidates.append(
            plan_buckets(gradients, bucket_cap_mb=cap_mb, first_bucket_cap_mb=cap_mb, layout=layout or PACKED).buckets
        )
    orders = [
        in_order_of_need(jobs, slower)
        for jobs in (tuple(Job.of(bucket, times, cost, backward_s) for bucket in each) for each in candidates)
        for slower in SPEEDS
    ]
    best = min(orders, key=lambda order: (worst_ratio(order, backward_s), len(order)))
    first = (layout or PACKED).bucket(flags.key, [flags], "known at the start, and the end of the backward waits for it")
    return Planned(replace(planned.plan, buckets=(first, *(job.bucket for job in best))))


class Job(NamedTuple):
    """A bucket on the network; times in seconds after the start of the backward.

    `needed_s`: when the next forward reads the first of its parameters, if it has not waited.
    """

    bucket: Bucket
    ready_s: float
    needed_s: float
    seconds: float

    @staticmethod
    def of(bucket: Bucket, times: ReadyTimes, cost: AllReduceCost, backward_s: float) -> Job:
        last = max(times.of_member(member) for member in bucket.members)
        seconds = sum(leg.seconds for leg in legs_of([member.loads for member in bucket.members], cost))
        return Job(bucket, backward_s * last, backward_s * (1 + FORWARD_SHARE * (1 - last)), seconds)


def in_order_of_need(jobs: Sequence[Job], slower: float = 1.0) -> tuple[Job, ...]:
    """Jobs as the network takes them: whenever it is free, of those that are ready the one that is read first.

    Args:
        jobs: in any order.
        slower: how many times as long as believed the network takes.
    """
    waiting, now_s, order = list(jobs), 0.0, list[Job]()
    while waiting:
        now_s = max(now_s, min(job.ready_s for job in waiting))
        ready = [job for job in waiting if job.ready_s <= now_s]
        job = min(ready, key=lambda each: each.needed_s)  # of equal ones the first: the same on every rank
        waiting.remove(job)
        order.append(job)
        now_s += job.seconds * slower
    return tuple(order)


def step_seconds(order: Sequence[Job], backward_s: float, slower: float = 1.0) -> float:
    """How long a backward and the next forward take if the network takes jobs in this order."""
    free_s = late_s = 0.0
    for job in order:
        free_s = max(free_s, job.ready_s) + job.seconds * slower
        late_s = max(late_s, free_s - job.needed_s)
    return backward_s * (1 + FORWARD_SHARE) + late_s


def worst_ratio(order: Sequence[Job], backward_s: float) -> float:
    """The largest step, over the bound that no order can be below, of all `SPEEDS`."""
    bounds = {slower: max(backward_s * (1 + FORWARD_SHARE), slower * sum(job.seconds for job in order)) for slower in SPEEDS}
    return max(step_seconds(order, backward_s, slower) / (bound or 1.0) for slower, bound in bounds.items())


def _without_flags(buckets: Sequence[Bucket]) -> Iterator[Bucket]:
    for bucket in buckets:
        members = tuple(member for member in bucket.members if member.gradient.name != UNUSED_FLAGS)
        if members:
            yield replace(bucket, members=members)
