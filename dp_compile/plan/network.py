"""What the network does with given buckets: stages, finish, buckets of a fixed size. Pure numbers.

The model: a link carries one stage at a time, in the order in which they are launched (`reduction.launch_order`). A
bucket's first stage is launched where its last member stands; who launches one that follows waits for the one before,
and compute with it; last stages are launched when all is computed. On two levels of network the links inside nodes and
between them carry stages beside each other, and a stage over the whole group needs both. A stage lasts as `legs_of`
says. Buckets of different keys (reduction, dtype, device) share the network, never a bucket.

Source: the model of MG-WFBP (arXiv 1912.09268), which has one link and one stage.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from dp_compile.plan.cost import AllReduceCost, check_number
from dp_compile.plan.reduction import BETWEEN, INSIDE, WHOLE, Load, is_handed_back_at_the_end, launch_order

Buckets = tuple[tuple[int, ...], ...]
"""Positions of gradients, bucket by bucket in launch order, ascending in each."""


@dataclass(frozen=True, slots=True)
class ReadyGradient:
    """A gradient at its place in launch order.

    `ready_s` is when it is ready on the compute stream without communication.
    `loads`: what each stage of its reduction carries of it; without them an all-reduce of all its bytes.

    Raises:
        ConfigError: a time or a size is negative or not finite.
    """

    nbytes: int
    ready_s: float
    key: Hashable = None
    loads: tuple[Load, ...] = ()

    def __post_init__(self) -> None:
        for name in ("nbytes", "ready_s"):
            check_number(name, getattr(self, name), zero_allowed=True)

    @property
    def stages(self) -> tuple[Load, ...]:
        return self.loads or (Load(WHOLE, 2, self.nbytes),)


class Leg(NamedTuple):
    """A stage of a bucket as the network sees it: on which link, for how long."""

    link: str
    seconds: float


class Carried(NamedTuple):
    """A stage on the network: on which link, and when, in seconds after the start of the backward.

    `waited_s`: how long compute stands still for it, behind its own end too.
    """

    link: str
    start_s: float
    finish_s: float
    waited_s: float = 0.0


class Launch(NamedTuple):
    """One bucket on the network; times as in `Carried`."""

    ready_s: float
    start_s: float
    finish_s: float
    waited_s: float = 0.0
    stages: tuple[Carried, ...] = ()


class Job(NamedTuple):
    """A bucket as the network sees it: the position of its last member, when it may start, its stages."""

    position: int
    ready_s: float
    legs: tuple[Leg, ...]

    @property
    def seconds(self) -> float:
        """All stages one after the other."""
        return sum(leg.seconds for leg in self.legs)


def legs_of(buckets_loads: Sequence[Sequence[Load]], cost: AllReduceCost) -> tuple[Leg, ...]:
    """What the stages of a bucket take, from what they carry of each of its gradients: the cost of a reduction.

    A stage of two phases takes as long as an all-reduce of its bytes on its link, one of one phase half of that.
    """
    return tuple(
        Leg(link, phases / 2 * cost.on(link).seconds(sum(load.nbytes for load in stage)))
        for stage in zip(*buckets_loads, strict=True)
        for link, phases, _ in stage[:1]
    )


def links_of(loads: Iterable[Sequence[Load]]) -> tuple[str, ...]:
    """The links that carry one thing at a time: one, or two on two levels of network."""
    levels = any(load.link != WHOLE for each in loads for load in each)
    return (INSIDE, BETWEEN) if levels else (WHOLE,)


def is_on(stage: Load | Leg, link: str) -> bool:
    """Whether a stage keeps a link busy: one over the whole group keeps all of them."""
    return stage.link in (link, WHOLE)


def release_times(gradients: Sequence[ReadyGradient]) -> list[float]:
    """When each gradient can be launched: launches keep their order, so never before an earlier one is ready."""
    return list(accumulate((gradient.ready_s for gradient in gradients), max))


def jobs_of(gradients: Sequence[ReadyGradient], buckets: Buckets, cost: AllReduceCost) -> list[Job]:
    """The buckets as the network sees them."""
    released = release_times(gradients)
    return [
        Job(bucket[-1], released[bucket[-1]], legs_of([gradients[each].stages for each in bucket], cost))
        for bucket in buckets
    ]


def launches(jobs: Sequence[Job], *, slower: float = 1.0, backward_s: float = 0.0) -> Iterator[Launch]:
    """What the network does, if it is `slower` times as slow as the jobs say.

    `backward_s`: how long the backward computes, at least until the last job may start.
    """
    free = dict.fromkeys((INSIDE, BETWEEN), 0.0)
    ready = [job.ready_s for job in jobs]
    carried: list[list[Carried]] = [[] for _ in jobs]
    clock = stalled = 0.0

    def wait_for(bucket: int) -> None:
        nonlocal clock, stalled
        stage = carried[bucket][-1]
        if stage.finish_s > clock:
            carried[bucket][-1] = stage._replace(waited_s=stage.finish_s - clock)
            stalled += stage.finish_s - clock
            clock = stage.finish_s

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
    """When the last bucket has arrived, in seconds after the start of the backward; and compute that had to wait."""
    if any(len(job.legs) > 1 for job in jobs):
        timeline = list(launches(jobs, slower=slower, backward_s=backward_s))
        arrived_s = max(launch.finish_s for launch in timeline)
        return max(arrived_s, backward_s + sum(launch.waited_s for launch in timeline))
    free = 0.0
    for job in jobs:
        free = max(job.ready_s, free) + job.legs[0].seconds * slower
    return free


def release_time_bound(gradients: Sequence[ReadyGradient], *, cost: AllReduceCost, backward_s: float) -> float:
    """No plan can finish earlier than this, in seconds after the start of the backward.

    max(backward, max over k of r_k + alpha + beta * bytes of all gradients that are ready at r_k or later): those
    cannot be on the wire before r_k, and at least one collective carries them. Gradients of different keys never share
    a collective, so alpha counts once for each key among them. On two levels of network that holds for each link,
    with the latencies of what stands before and behind; and each gradient has to go through all its stages.

    Source: release-time bound of a single machine; design.md, section 5.
    """
    check_number("backward_s", backward_s, zero_allowed=True)
    bound = backward_s
    latest_first = sorted(gradients, key=lambda gradient: gradient.ready_s, reverse=True)
    for link in links_of(gradient.stages for gradient in gradients):
        sent, latencies, before, behind = 0.0, dict[Hashable, float](), float("inf"), float("inf")
        for gradient in latest_first:
            stages = gradient.stages
            on_link = [place for place, stage in enumerate(stages) if is_on(stage, link)]
            sent += sum(_transfer_s(stages[place], cost) for place in on_link)
            if gradient.key not in latencies:
                seconds = [_latency_s(stage, cost) for stage in stages]
                latencies[gradient.key] = sum(seconds[place] for place in on_link)
                if on_link:
                    before = min(before, sum(seconds[: on_link[0]]))
                    behind = min(behind, sum(seconds[on_link[-1] + 1 :]))
            if on_link:
                bound = max(bound, gradient.ready_s + before + sum(latencies.values()) + sent + behind)
            bound = max(bound, gradient.ready_s + sum(weights_of(stages, cost)))
    return bound


def weights_of(loads: Sequence[Load], cost: AllReduceCost) -> tuple[float, float]:
    """What stages in a row cost a bucket as latencies, once, and what this gradient adds to that, in seconds."""
    latency_s = transfer_s = 0.0
    for link, phases, nbytes in loads:
        line = cost.on(link)
        latency_s += phases / 2 * line.alpha_s
        transfer_s += phases / 2 * line.beta_s_per_byte * nbytes
    return latency_s, transfer_s


def _latency_s(stage: Load, cost: AllReduceCost) -> float:
    return stage.phases / 2 * cost.on(stage.link).alpha_s


def _transfer_s(stage: Load, cost: AllReduceCost) -> float:
    return stage.phases / 2 * cost.on(stage.link).beta_s_per_byte * stage.nbytes


def fixed_partition(gradients: Sequence[ReadyGradient], *, cap_nbytes: float, first_cap_nbytes: float) -> Buckets:
    """A bucket is closed when it holds its cap: the rule of torch's DDP, as in `plan.plan_buckets`."""
    filling: dict[Hashable, list[int]] = {}
    filled: dict[Hashable, int] = defaultdict(int)
    past_first: set[Hashable] = set()
    closed: list[tuple[int, ...]] = []
    for position, gradient in enumerate(gradients):
        key = gradient.key
        filling.setdefault(key, []).append(position)
        filled[key] += gradient.nbytes
        if filled[key] >= (cap_nbytes if key in past_first else first_cap_nbytes):
            closed.append(tuple(filling.pop(key)))
            past_first.add(key)
            del filled[key]
    return in_launch_order([*closed, *map(tuple, filling.values())])


def in_launch_order(buckets: Sequence[tuple[int, ...]]) -> Buckets:
    """By the position of the last member."""
    return tuple(sorted(buckets, key=lambda bucket: bucket[-1]))
