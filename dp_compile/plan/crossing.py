"""Launch order of buckets whose reductions may overlap the next forward: the most urgent first. Pure functions.

In the backward, gradients become ready from the last layer to the first. The next forward reads parameters from the
first layer to the last. Ready order is best if all reductions have to end in the backward. But in that order the first
layer is updated last, so the forward would wait for all buckets. Two kinds of orders are tried:

    next comes the ready bucket that is read first: good if the network is always busy
    some buckets in ready order, then all others in the order of their reads: the backward computes the gradients of the
    first layers sooner and, while these are reduced, products that only later launches need

    step = backward + forward + stalls of the forward         >=  max(backward + forward, communication)

Source: earliest deadline first, Horn 1974, optimal for preemptible jobs with release times. Buckets are not
preemptible, so small buckets are tried too. The forward is assumed to be half as long as the backward, and to read
parameters in reverse ready order.
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from dp_compile.plan.buckets import UNUSED_FLAGS, Bucket, bucket_of, plan_buckets
from dp_compile.plan.cost import AllReduceCost
from dp_compile.plan.network import Launch, legs_of
from dp_compile.plan.planner import Certificate, PlanResult, ReadyTimes, backward_seconds
from dp_compile.plan.words import BYTES_PER_MB

FORWARD_SHARE: Final = 0.5  # duration of a forward over its backward: one product for each two of the backward
PARTS: Final = (4, 6, 8, 12, 16, 24, 32)  # numbers of buckets of about equal size that are tried
SPLITS: Final = 8  # number of tried splits into buckets in ready order and, after them, buckets in read order
SPEEDS: Final = (1.0, 0.5, 0.7, 1.4, 2.0)  # network time over its estimate, for the same backward


def plan_crossing(
    planned: PlanResult, times: ReadyTimes, cost: AllReduceCost, *, cuts: bool, lanes: int = 1
) -> PlanResult:
    """Plan the same gradients for a step whose reductions may overlap the next forward.

    The flags get their own bucket, the first: they are known when the backward begins, and the backward waits for them.
    The plan has the best average over networks from half to twice the estimated speed; in the worst case every order is
    far from the bound. If `planned` has a certificate, so has the result, for backward and next forward together. If a
    reduction has several stages, returns `planned`. `cuts`: also try other partitions. `lanes`: as in `Backend`.
    """
    flags = [each for each in planned.plan.gradients if each.name == UNUSED_FLAGS]
    gradients = [each for each in planned.plan.gradients if each.name != UNUSED_FLAGS]
    if not gradients or any(len(each.key.reduction.stages) != 1 for each in gradients):
        return planned  # Reductions of several stages end in the backward.
    # The best order depends on the ratio of communication to compute, so a known duration of the backward has priority.
    backward_s = times.backward_s or times.nominal_s or backward_seconds(planned.plan.gradients, times, cost)
    kept = ([each for each in bucket.members if each.gradient.name != UNUSED_FLAGS] for bucket in planned.plan.buckets)
    candidates = [tuple(Bucket(tuple(each)) for each in kept if each)]
    total = sum(each.nbytes for each in gradients)
    for parts in PARTS if cuts and total else ():  # a gradient larger than a part gets its own bucket
        candidates.append(plan_buckets(gradients, bucket_cap_mb=total / parts / BYTES_PER_MB).buckets)
    orders = [
        jobs_of(order, times, cost, backward_s)
        for buckets in candidates
        for order in _orders(jobs_of(buckets, times, cost, backward_s), times, lanes)
    ]
    best = min(orders, key=lambda order: (sum(ratios(order, backward_s, lanes)), len(order)))
    first = [bucket_of(flags)] if flags else []  # a manual step may have none
    buckets, certificate = (*first, *(job.bucket for job in best)), planned.certificate
    if certificate is not None:
        ends_s, worst = step_seconds(best, backward_s, lanes=lanes), max(ratios(best, backward_s, lanes))
        certificate = Certificate(cost, ends_s, bound_seconds(best, backward_s), worst)
    return PlanResult(replace(planned.plan, buckets=buckets), certificate)


def _orders(jobs: Sequence[Job], times: ReadyTimes, lanes: int) -> dict[tuple[Bucket, ...], None]:
    """Return the launch orders of buckets to try, without duplicates; `jobs` are in ready order."""
    by_need = sorted(jobs, key=lambda job: job.needed_s)
    found = [in_order_of_need(jobs, slower, lanes) for slower in SPEEDS]
    for split in range(SPLITS):
        place = len(jobs) * split // SPLITS
        first, rest = jobs[:place], jobs[place:]
        if all(times.of(each.gradient) >= times.waits_from for job in rest for each in job.bucket.members):
            found.append((*first, *(job for job in by_need if job in rest)))
    return dict.fromkeys(tuple(job.bucket for job in order) for order in found)


def why_not_left(bucket: Bucket) -> str:
    """Return why the reduction of a bucket has to end in the backward; empty if it may end later."""
    reduction = bucket.key.reduction
    if reduction.hook is not None:
        return "a comm hook computes after its collectives"
    if len(reduction.stages) > 1:
        return "its reduction has several stages"
    if all(member.gradient.name == UNUSED_FLAGS for member in bucket.members):
        return "flags have to be known when the backward ends"
    return ""


class Job(NamedTuple):
    """The reduction of a bucket: two times in seconds after the start of the backward, and the duration `seconds`.

    `needed_s`: when the next forward first reads a parameter of the bucket, if compute did not stall before.
    """

    bucket: Bucket
    ready_s: float
    needed_s: float
    seconds: float


def jobs_of(
    order: Sequence[Bucket],
    times: ReadyTimes,
    cost: AllReduceCost,
    backward_s: float,
    *,
    forward_s: float | None = None,
    left: Container[Bucket] | None = None,
) -> tuple[Job, ...]:
    """Return the jobs of buckets launched in this order. `forward_s`: duration of the forward; `None`: assumed. `left`:
    buckets that may overlap the forward, which needs all others at its start; `None`: all may."""
    forward_s = backward_s * FORWARD_SHARE if forward_s is None else forward_s
    ready = times.launches([member.gradient for member in bucket.members] for bucket in order)
    jobs = []
    for share, bucket in zip(ready, order, strict=True):
        read = 1 - max(times.of(member.gradient) for member in bucket.members)
        needed_s = backward_s + (forward_s * read if left is None or bucket in left else 0.0)
        seconds = sum(leg.seconds for leg in legs_of([member.gradient.loads for member in bucket.members], cost))
        jobs.append(Job(bucket, backward_s * share, needed_s, seconds))
    return tuple(jobs)


def arrivals(order: Sequence[Job], lanes: int = 1) -> list[Launch]:
    """Return when each bucket is on the network, and how long compute stalls for it; buckets are in the given order."""
    late_s, found = 0.0, dict[int, Launch]()
    carried = enumerate(_carried(order, 1.0, lanes))
    for place, (job, start_s, finish_s) in sorted(carried, key=lambda each: each[1][0].needed_s):
        needed_s = job.needed_s + late_s
        found[place] = Launch(job.ready_s, start_s, finish_s, max(0.0, finish_s - needed_s), needed_s=needed_s)
        late_s += found[place].waited_s
    return [found[place] for place in range(len(order))]


def in_order_of_need(jobs: Sequence[Job], slower: float = 1.0, lanes: int = 1) -> tuple[Job, ...]:
    """Return jobs in the order of transfer: a free lane of the network takes the ready job that is read first."""
    return tuple(job for job, _, _ in _carried(jobs, slower, lanes, by_need=True))


def step_seconds(order: Sequence[Job], backward_s: float, slower: float = 1.0, lanes: int = 1) -> float:
    """Return the duration of a backward and the next forward if the network takes jobs in this order."""
    late_s = max((finish_s - job.needed_s for job, _, finish_s in _carried(order, slower, lanes)), default=0.0)
    return backward_s * (1 + FORWARD_SHARE) + max(0.0, late_s)


def ratios(order: Sequence[Job], backward_s: float, lanes: int = 1) -> list[float]:
    """Return the step time over its lower bound, for each network speed in `SPEEDS`."""
    scaled = ((order, backward_s, slower) for slower in SPEEDS)
    return [step_seconds(*each, lanes) / (bound_seconds(*each) or 1.0) for each in scaled]


def bound_seconds(jobs: Sequence[Job], backward_s: float, slower: float = 1.0) -> float:
    """Return a lower bound of backward and next forward, in any order: the longer of compute and communication."""
    return max(backward_s * (1 + FORWARD_SHARE), slower * sum(job.seconds for job in jobs))


def _carried(
    jobs: Sequence[Job], slower: float, lanes: int, *, by_need: bool = False
) -> list[tuple[Job, float, float]]:
    """Return jobs in start order, each with its start and end. Concurrent jobs have equal shares of the network."""
    waiting, started, now_s = list(jobs), list[tuple[Job, float]](), 0.0
    finish_s: dict[int, float] = {}
    under_way: dict[int, float] = {}  # by position in `started`: remaining time if alone on the network
    while waiting or under_way:
        candidates = (waiting if by_need else waiting[:1]) if len(under_way) < lanes else []
        if ready := [job for job in candidates if job.ready_s <= now_s]:
            job = min(ready, key=lambda each: each.needed_s)  # ties: the first, on every rank
            waiting.remove(job)
            under_way[len(started)] = job.seconds * slower
            started.append((job, now_s))
            continue
        share, start_s = len(under_way), now_s
        ends_s = now_s + share * min(under_way.values()) if under_way else math.inf
        now_s = min([ends_s, *(job.ready_s for job in candidates)])
        for place in under_way:
            under_way[place] -= (now_s - start_s) / share
        if now_s == ends_s:
            place = min(under_way, key=under_way.__getitem__)
            finish_s[place] = now_s
            del under_way[place]
    return [(job, start_s, finish_s[place]) for place, (job, start_s) in enumerate(started)]
