"""All that explains one step: what was planned, from what, what came of it, what was measured. Pure data, JSON.

`step_of` (observe.py) reads it off a replicated module; explanations, timelines, dumps and predictions start from it,
on this machine or on another one.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, Final

from dp_compile.engine.record import Placement
from dp_compile.errors import ConfigError
from dp_compile.passes.result import PeakMemory, Refusal
from dp_compile.plan.buckets import BucketPlan
from dp_compile.plan.cost import AllReduceCost
from dp_compile.plan.network import Carried, Job, ReadyGradient, jobs_of, launches, links_of, release_time_bound
from dp_compile.plan.ready_times import ReadyTimes, backward_seconds, ready_gradients

STEP_VERSION: Final = 1
DECENTRALIZED: Final = "decentralized"
"""The mode of a step whose buckets are of parameters, which ranks mix; no gradient is reduced."""


@dataclass(frozen=True, slots=True)
class MeasuredBucket:
    """One bucket in one measured backward, in seconds after its start.

    Of a decentralized module `launch_s` is before that: in the step before it was sent to the ranks of `edge`, this one
    too. At `sent_s` it was sent to those of `next_edge`, for the step behind it.

    `finish_s`: when the collective was over, or the host had waited for it; `None` if the source cannot tell.
    `waited_s`: how long compute stood still for it. `start_s`: when the network began with it, `wait_s`: when compute
    came to its first wait; `None` if the source cannot tell. Without `finish_s` it was over between launch and wait.
    """

    launch_s: float
    finish_s: float | None
    waited_s: float
    start_s: float | None = None
    wait_s: float | None = None
    edge: tuple[int, ...] = ()
    sent_s: float | None = None
    next_edge: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """What was measured of one rank's backward, in seconds; `buckets` in the order of the plan.

    `backward_s`: until everything was there, waiting included. `source`: how it was measured, for people.
    `forward_s`, `optimizer_s`: `None` if the source does not show them. `step_s`: from the start of one backward to the
    start of the next, all that the loop does included; `None` if fewer than two were measured.
    """

    backward_s: float
    buckets: tuple[MeasuredBucket, ...]
    source: str
    rank: int = 0
    forward_s: float | None = None
    optimizer_s: float | None = None
    step_s: float | None = None

    @property
    def exposed_s(self) -> float:
        """How long compute stood still for communication."""
        return sum(bucket.waited_s for bucket in self.buckets)


def typical_step(steps: Sequence[MeasuredStep]) -> MeasuredStep:
    """Of steps of one rank under one plan, at least one: the one whose backward is the median, the shorter of two.

    One real backward, so that its figures fit together: medians of each bucket would add up to another backward. How
    long forward, optimizer and the whole step take are medians of those that know it.
    """
    backwards = sorted(steps, key=lambda step: step.backward_s)
    return replace(
        backwards[(len(steps) - 1) // 2],
        forward_s=_median_known([step.forward_s for step in steps]),
        optimizer_s=_median_known([step.optimizer_s for step in steps]),
        step_s=_median_known([step.step_s for step in steps]),
    )


def _median_known(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a replicated module. Without `measured` all times are predictions.

    Args:
        mode: what reduces, for people, as in `Report.mode`.
        strategy: where buckets end: a name of `config.STRATEGIES`.
        world_size: ranks.
        backend: of the process group: `nccl`, `gloo`, `fake`.
        device: type of the parameters' device.
        plan: the buckets.
        ready: the ready times that the plan was made from.
        cost: what one collective costs, as the plan was made or would be judged.
        cost_source: where `cost` is from, for people.
        memory: the simulated peak of the captured backward.
        placements: where gradients were computed.
        refusals: what passes left alone.
        backwards: how many backwards took which way.
        measured: what was measured, if anything was.
        deferred: all reductions stand at the end of the backward, as in `CaptureRecord`.
        why_deferred: what is in the way, for people.
    """

    mode: str
    strategy: str
    world_size: int
    backend: str
    device: str
    plan: BucketPlan
    ready: ReadyTimes
    cost: AllReduceCost
    cost_source: str
    memory: PeakMemory | None = None
    placements: tuple[Placement, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    backwards: tuple[tuple[str, int], ...] = ()
    measured: MeasuredStep | None = None
    deferred: bool = False
    why_deferred: str = ""

    @property
    def communication_s(self) -> float:
        """How long the stages of the plan's buckets take, one after the other."""
        return sum(job.seconds for job in self.jobs())

    @property
    def backward_s(self) -> float:
        """How long the backward computes: as believed, else as long as the gradients take on the network."""
        members = (member for bucket in self.plan.buckets for member in bucket.members)
        return backward_seconds(members, self.ready, self.cost)

    @property
    def ranks_inside(self) -> int:
        """Ranks of a node, where some bucket is reduced on two levels of network; else 1."""
        return max((bucket.key.reduction.ranks_inside for bucket in self.plan.buckets), default=1)

    @property
    def links(self) -> tuple[str, ...]:
        """What carries stages beside each other: one link, or on two levels of network those inside and between."""
        return links_of(member.loads for bucket in self.plan.buckets for member in bucket.members)

    def ready_members(self) -> list[list[ReadyGradient]]:
        """The members of each bucket, with when they are ready, in seconds after the start of the backward."""
        backward_s = self.backward_s  # every gradient's bytes are added up for it
        return [ready_gradients(bucket.members, self.ready, backward_s) for bucket in self.plan.buckets]

    def bound_s(self) -> float:
        """When backward and communication could be over at the earliest: `release_time_bound`, in the plan's pieces."""
        gradients = [member for bucket in self.ready_members() for member in bucket]
        return release_time_bound(gradients, cost=self.cost, backward_s=self.backward_s)

    def jobs(self) -> list[Job]:
        """The buckets as the network sees them. If reductions are deferred, all are ready when the backward ends."""
        members = [member for bucket in self.ready_members() for member in bucket]
        if self.deferred:
            members = [replace(member, ready_s=max(member.ready_s, self.backward_s)) for member in members]
        ends = list(accumulate(len(bucket.members) for bucket in self.plan.buckets))
        buckets = tuple(tuple(range(start, end)) for start, end in pairwise([0, *ends]))
        return jobs_of(members, buckets, self.cost)

    def to_json(self) -> str:
        return json.dumps({"version": STEP_VERSION} | _plain(self))

    @staticmethod
    def from_json(text: str) -> Step:
        """What `to_json` wrote.

        Raises:
            ConfigError: not JSON, of another version, or a field is missing, unknown or not allowed.
        """
        try:
            data = dict(json.loads(text))
            version = data.pop("version")
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"not a step file of dp_compile: {error!r}.") from error
        if version != STEP_VERSION:
            raise ConfigError(f"the step file is of version {version!r}, readable is {STEP_VERSION}. Save it anew.")
        try:
            return _step(data)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"not a step file of dp_compile: {error!r}.") from error


@dataclass(frozen=True, slots=True)
class PlannedBucket:
    """One bucket on the predicted timeline, in seconds after the start of the backward.

    `exposed_s`: how long compute stands still for it, behind its end too. `stages`: when each is on the network.
    """

    ready_s: float
    start_s: float
    finish_s: float
    exposed_s: float
    stages: tuple[Carried, ...] = ()

    @staticmethod
    def from_dict(data: dict[str, Any]) -> PlannedBucket:
        """What `asdict` made of one."""
        return PlannedBucket(**data | {"stages": tuple(Carried(*each) for each in data.get("stages", ()))})


def planned_buckets(step: Step) -> list[PlannedBucket]:
    """The predicted timeline: a link carries one stage at a time, in the order of the launches.

    If reductions are deferred, every bucket is launched when the backward ends.

    Source: the model of `plan/network.py` (MG-WFBP, arXiv 1912.09268).
    """
    return [PlannedBucket(*launch) for launch in launches(step.jobs(), backward_s=step.backward_s)]


def _plain(step: Step) -> dict[str, Any]:
    data = {name: getattr(step, name) for name in ("mode", "strategy", "world_size", "backend", "device", "deferred")}
    data |= {"why_deferred": step.why_deferred}
    data |= {"plan": step.plan.to_dict(), "ready": json.loads(step.ready.to_json()), "cost": asdict(step.cost)}
    data |= {"cost_source": step.cost_source, "backwards": [list(each) for each in step.backwards]}
    data |= {"memory": None if step.memory is None else asdict(step.memory)}
    data |= {"placements": _all(step.placements), "refusals": _all(step.refusals)}
    return data | {"measured": None if step.measured is None else asdict(step.measured)}


def _all(records: Sequence[Placement] | Sequence[Refusal]) -> list[dict[str, Any]]:
    return [asdict(record) for record in records]


def _step(data: dict[str, Any]) -> Step:
    measured = data["measured"]
    if measured is not None:
        buckets = tuple(_measured_bucket(each) for each in measured["buckets"])
        measured = MeasuredStep(**measured | {"buckets": buckets})
    records: dict[str, Any] = {
        "plan": BucketPlan.from_dict(data["plan"]),
        "ready": ReadyTimes.from_json(json.dumps(data["ready"])),
        "cost": AllReduceCost.from_dict(data["cost"]),
        "memory": None if data["memory"] is None else PeakMemory(**data["memory"]),
        "placements": tuple(Placement(**each) for each in data["placements"]),
        "refusals": tuple(Refusal(**each) for each in data["refusals"]),
        "backwards": tuple((str(way), int(times)) for way, times in data["backwards"]),
        "measured": measured,
    }
    return Step(**data | records)


def _measured_bucket(data: dict[str, Any]) -> MeasuredBucket:
    edges = {name: tuple(map(int, data.get(name, ()))) for name in ("edge", "next_edge")}
    return MeasuredBucket(**data | edges)
