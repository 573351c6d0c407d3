"""Simulation of the network for given buckets, and a lower bound for all plans. Pure numbers.

The model: a link carries one stage at a time, in launch order (`reduction.launch_order`). The first stage of a bucket
is launched when its last member is ready. A later stage is launched when the previous one has ended, and compute waits
for that. On two network levels, last stages are launched after all compute, the links inside and between nodes work
concurrently, and a stage over the whole group needs both. Gradients of different keys (reduction, dtype, device) share
the network, but never a bucket.

Source: the model of MG-WFBP (arXiv 1912.09268), which has one link and one stage.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from dp_compile.plan.buckets import Partition
from dp_compile.plan.cost import AllReduceCost
from dp_compile.plan.reduction import BETWEEN, INSIDE, WHOLE, Load, is_handed_back_at_the_end, launch_order


@dataclass(frozen=True, slots=True)
class ReadyGradient:
    """A gradient in launch order. `ready_s`: when it is ready on the compute stream, without communication.

    `loads`: traffic of the gradient in each stage of its reduction; empty: one all-reduce of all its bytes.
    """

    nbytes: int
    ready_s: float
    key: Hashable = None
    loads: tuple[Load, ...] = ()

    @property
    def stages(self) -> tuple[Load, ...]:
        return self.loads or (Load(WHOLE, 2, self.nbytes),)


class Leg(NamedTuple):
    """A stage of a bucket: its link and its duration."""

    link: str
    seconds: float


class Job(NamedTuple):
    """The reduction of a bucket: its earliest start and its stages."""

    ready_s: float
    legs: tuple[Leg, ...]

    @property
    def seconds(self) -> float:
        """Total duration of the stages."""
        return sum(leg.seconds for leg in self.legs)


class Carried(NamedTuple):
    """When a link carries a stage, in seconds after the start of the backward.
    `waited_s`: how long compute stalls for the stage, also after the backward."""

    link: str
    start_s: float
    finish_s: float
    waited_s: float = 0.0


class Launch(NamedTuple):
    """When the network carries a bucket, in seconds after the start of the backward.

    `needed_s`: when the next forward reads its parameters, if its reduction may overlap the forward; else `None`.
    """

    ready_s: float
    start_s: float
    finish_s: float
    waited_s: float = 0.0
    stages: tuple[Carried, ...] = ()
    needed_s: float | None = None


def legs_of(members: Sequence[Sequence[Load]], cost: AllReduceCost) -> tuple[Leg, ...]:
    """Return a bucket's stages from the traffic of each member. A stage of two phases takes as long as an all-reduce
    of its bytes on its link, a stage of one phase half as long."""
    return tuple(
        Leg(stage[0].link, stage[0].phases / 2 * cost.on(stage[0].link).seconds(sum(load.nbytes for load in stage)))
        for stage in zip(*members, strict=True)
    )


def links_of(loads: Iterable[Sequence[Load]]) -> tuple[str, ...]:
    """Return the links that these loads use, each of which carries one stage at a time."""
    return (INSIDE, BETWEEN) if any(load.link != WHOLE for each in loads for load in each) else (WHOLE,)


def release_times(gradients: Sequence[ReadyGradient]) -> list[float]:
    """Return when each gradient can be launched: in order, so not before all earlier ones are ready."""
    return list(accumulate((gradient.ready_s for gradient in gradients), max))


def jobs_of(gradients: Sequence[ReadyGradient], partition: Partition, cost: AllReduceCost) -> list[Job]:
    """Return a `Job` for each bucket of a partition."""
    released = release_times(gradients)
    return [
        Job(released[bucket[-1]], legs_of([gradients[each].stages for each in bucket], cost)) for bucket in partition
    ]


def launches(jobs: Sequence[Job], *, slower: float = 1.0, backward_s: float = 0.0) -> Iterator[Launch]:
    """Simulate a network that is `slower` times as slow as the jobs say; yield the launch of each job. The backward
    computes for `backward_s`, at least until the last job may start."""
    free = dict.fromkeys((INSIDE, BETWEEN), 0.0)
    ready = [job.ready_s for job in jobs]
    carried: list[list[Carried]] = [[] for _ in jobs]
    clock = stalled = 0.0

    def wait_for(bucket: int) -> None:
        nonlocal clock, stalled
        stage = carried[bucket][-1]
        waited_s = max(0.0, stage.finish_s - clock)
        carried[bucket][-1] = stage._replace(waited_s=waited_s)
        clock, stalled = max(clock, stage.finish_s), stalled + waited_s

    for bucket, stage in launch_order([job.legs for job in jobs]):
        link, seconds = jobs[bucket].legs[stage]
        if stage == 0:
            clock = ready[bucket] = max(clock, jobs[bucket].ready_s + stalled)
        elif stage == len(jobs[bucket].legs) - 1 and is_handed_back_at_the_end(jobs[bucket].legs):
            clock = max(clock, backward_s + stalled)
        if stage:
            wait_for(bucket)
        lanes = (INSIDE, BETWEEN) if link == WHOLE else (link,)
        start = max(clock, *(free[lane] for lane in lanes))
        carried[bucket].append(Carried(link, start, start + seconds * slower))
        free |= dict.fromkeys(lanes, carried[bucket][-1].finish_s)
    clock = max(clock, backward_s + stalled)
    for bucket, stages in enumerate(carried):
        wait_for(bucket)
        waited_s = sum(stage.waited_s for stage in stages)
        yield Launch(ready[bucket], stages[0].start_s, stages[-1].finish_s, waited_s, tuple(stages))


def finish_time(jobs: Sequence[Job], *, slower: float = 1.0, backward_s: float = 0.0) -> float:
    """Return when the last bucket, and compute that stalled for stages, ends, in seconds after the backward's start."""
    if any(len(job.legs) > 1 for job in jobs):
        timeline = list(launches(jobs, slower=slower, backward_s=backward_s))
        arrived_s = max(launch.finish_s for launch in timeline)
        return max(arrived_s, backward_s + sum(launch.waited_s for launch in timeline))
    free = 0.0  # one stage each: as `launches`, but a faster loop, because the planner calls this very often
    for job in jobs:
        free = max(job.ready_s, free) + job.legs[0].seconds * slower
    return free


def weights_of(loads: Iterable[Load], cost: AllReduceCost) -> tuple[float, float]:
    """Return latency and transfer time of these loads, in seconds. All gradients of a bucket share one latency."""
    latency_s = transfer_s = 0.0
    for link, phases, nbytes in loads:
        line = cost.on(link)
        latency_s += phases / 2 * line.alpha_s
        transfer_s += phases / 2 * line.beta_s_per_byte * nbytes
    return latency_s, transfer_s


def release_time_bound(gradients: Sequence[ReadyGradient], *, cost: AllReduceCost, backward_s: float) -> float:
    """Return a time before which no plan can finish, in seconds after the start of the backward.

    max(backward, max over k of r_k + alpha + beta * bytes of all gradients that are ready at r_k or later): these
    gradients cannot be on the wire before r_k, and at least one collective carries them. Gradients of different keys
    never share a collective, so alpha counts once per key. On two network levels this holds for each link, with the
    latencies of the stages before and after it. Each gradient also passes through all its stages.

    Source: release-time bound of a single machine.
    """
    bound = max([backward_s, *(gradient.ready_s + sum(weights_of(gradient.stages, cost)) for gradient in gradients)])
    latest_first = sorted(gradients, key=lambda gradient: gradient.ready_s, reverse=True)
    for link in links_of(gradient.stages for gradient in gradients):
        sent, latencies, before, after = 0.0, dict[Hashable, float](), math.inf, math.inf
        for gradient in latest_first:
            stages = gradient.stages
            on_link = [place for place, stage in enumerate(stages) if stage.link in (link, WHOLE)]
            latency_s, transfer_s = weights_of((stages[place] for place in on_link), cost)
            sent += transfer_s
            if gradient.key not in latencies:
                latencies[gradient.key] = latency_s
                before = min(before, weights_of(stages[: on_link[0]], cost)[0])
                after = min(after, weights_of(stages[on_link[-1] + 1 :], cost)[0])
            bound = max(bound, gradient.ready_s + before + sum(latencies.values()) + sent + after)
    return bound
