"""All that explains one step: what was planned, from what, what came of it, what was measured. Pure data, JSON.

`step_of` (observe.py) reads it off a replicated module; explanations, timelines, dumps and predictions start from it,
on this machine or on another one.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from dp_compile.engine.record import Placement
from dp_compile.errors import ConfigError
from dp_compile.passes.result import PeakMemory, Refusal
from dp_compile.plan.buckets import BucketPlan
from dp_compile.plan.cost import AllReduceCost
from dp_compile.plan.network import Launch, ReadyGradient, jobs_of, launches
from dp_compile.plan.ready_times import ReadyTimes

STEP_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class MeasuredBucket:
    """One bucket in one measured backward, in seconds after its start.

    `finish_s`: when the collective was over, or the host had waited for it; `None` if the source cannot tell.
    `waited_s`: how long compute stood still for it. `start_s`: when the network began with it, `wait_s`: when compute
    came to its first wait; `None` if the source cannot tell. Without `finish_s` it was over between launch and wait.
    """

    launch_s: float
    finish_s: float | None
    waited_s: float
    start_s: float | None = None
    wait_s: float | None = None


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

    @property
    def communication_s(self) -> float:
        """How long the network carries the plan's buckets, if nothing else holds them up."""
        return sum(self.cost.seconds(bucket.nbytes) for bucket in self.plan.buckets)

    @property
    def backward_s(self) -> float:
        """How long the backward computes: as believed, else as long as the gradients take on the network."""
        if self.ready.backward_s is not None:
            return self.ready.backward_s
        return self.cost.beta_s_per_byte * self.plan.nbytes

    def ready_members(self) -> list[list[float]]:
        """When each member of each bucket is ready, in seconds after the start of the backward."""
        backward_s = self.backward_s  # every gradient's bytes are added up for it
        return [
            [backward_s * self.ready.of_member(member) for member in bucket.members] for bucket in self.plan.buckets
        ]

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

    `exposed_s`: how much of its time on the network lies behind the end of all compute.
    """

    ready_s: float
    start_s: float
    finish_s: float
    exposed_s: float


def planned_buckets(step: Step) -> list[PlannedBucket]:
    """The predicted timeline: one network that carries one bucket at a time, in the plan's order.

    If reductions are deferred, every bucket is launched when the backward ends.

    Source: the model of `timeline.py` (MG-WFBP, arXiv 1912.09268).
    """
    backward_s = step.backward_s
    return [_planned(launch, backward_s) for launch in _launches(step)]


def _planned(launch: Launch, backward_s: float) -> PlannedBucket:
    exposed_s = max(0.0, launch.finish_s - max(launch.start_s, backward_s))
    return PlannedBucket(launch.ready_s, launch.start_s, launch.finish_s, exposed_s)


def _launches(step: Step) -> list[Launch]:
    gradients: list[ReadyGradient] = []
    buckets: list[tuple[int, ...]] = []
    deferred_s = step.backward_s if step.deferred else 0.0
    for bucket, times in zip(step.plan.buckets, step.ready_members(), strict=True):
        buckets.append(tuple(range(len(gradients), len(gradients) + len(times))))
        for member, ready_s in zip(bucket.members, times, strict=True):
            gradients.append(ReadyGradient(member.nbytes, max(ready_s, deferred_s), bucket.key))
    return list(launches(jobs_of(gradients, tuple(buckets), step.cost)))


def _plain(step: Step) -> dict[str, Any]:
    data = {name: getattr(step, name) for name in ("mode", "strategy", "world_size", "backend", "device", "deferred")}
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
        buckets = tuple(MeasuredBucket(**each) for each in measured["buckets"])
        measured = MeasuredStep(**measured | {"buckets": buckets})
    records: dict[str, Any] = {
        "plan": BucketPlan.from_dict(data["plan"]),
        "ready": ReadyTimes.from_json(json.dumps(data["ready"])),
        "cost": AllReduceCost(**data["cost"]),
        "memory": None if data["memory"] is None else PeakMemory(**data["memory"]),
        "placements": tuple(Placement(**each) for each in data["placements"]),
        "refusals": tuple(Refusal(**each) for each in data["refusals"]),
        "backwards": tuple((str(way), int(times)) for way, times in data["backwards"]),
        "measured": measured,
    }
    return Step(**data | records)
