"""One step of a replicated module as data: its plan with its inputs, the capture, the measurement.

Explanations, timelines and predictions read only a `Step`, here or on another machine. Times are seconds,
those of buckets after the start of the backward. Without `measured` every time is an estimate.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import accumulate, pairwise
from typing import Any, Final, NamedTuple

from dp_compile.engine.ranges import FORWARD, GATHER, UPDATE
from dp_compile.errors import ConfigError
from dp_compile.passes.result import PeakMemory, Refusal
from dp_compile.plan import crossing
from dp_compile.plan.backends import Backend
from dp_compile.plan.buckets import UNUSED_FLAGS, BucketPlan
from dp_compile.plan.cost import AllReduceCost
from dp_compile.plan.network import Job, Launch, ReadyGradient, jobs_of, launches, release_time_bound
from dp_compile.plan.planner import ReadyTimes, backward_seconds, ready_gradients
from dp_compile.replica.record import OVERLAP_FORWARD, SHARDED, CaptureRecord, OptimizerRecord, Placement

STEP_VERSION: Final = 6
NOMINAL: Final = "nominal"  # prefix of `cost_source` if the link was not measured
# Bytes per element, by dtype.
BYTES: Final = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8, "complex64": 8, "complex128": 16}


def format_ms(seconds: float) -> str:
    """Format as milliseconds with three significant digits: `12.3 ms`."""
    ms = seconds * 1e3
    digits = "0" if abs(ms) < 5e-7 else f"{ms:,.0f}" if abs(ms) >= 99.95 else f"{ms:#.3g}"
    return f"{digits if abs(ms) < 5e-7 or abs(ms) >= 1e-4 else '<0.0001'} ms"


@dataclass(frozen=True, slots=True)
class MeasuredBucket:
    """One bucket in one measured backward."""

    launch_s: float
    finish_s: float | None  # end on the network; `None`: not shown by the source; at the latest when the last wait ends
    waited_s: float  # duration of compute's waits for it
    start_s: float | None  # start on the network, `None` as `finish_s`
    wait_s: float  # start of the first wait


class Followed(NamedTuple):
    """Recorded work after reductions, in the backward or later: `update`, `gather`, `forward` (`engine/ranges.py`)."""

    what: str
    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s

    def holds(self, moment_s: float) -> bool:
        return self.start_s <= moment_s <= self.end_s


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """The measurement of one rank's backward."""

    backward_s: float  # with waits, without communication deferred to the next forward
    buckets: tuple[MeasuredBucket, ...]  # in the order of the plan
    source: str  # method of measurement
    rank: int = 0
    forward_s: float | None = None  # `None`: the source does not show it
    optimizer_s: float | None = None  # `None`: the source does not show it
    follows: tuple[Followed, ...] = ()  # updates, all-gathers, and the next forward that waits for them

    def __str__(self) -> str:
        updates = f", updates {format_ms(self.updates_s)}" if self.updates_s else ""
        later_s = self.exposed_later_s + self.gather_s
        later = f", {format_ms(later_s)} of it after the backward" if later_s else ""
        exposed = f"exposed {format_ms(self.exposed_s + self.gather_s)}{later}"
        return f"compute {format_ms(self.compute_s)}{updates}, {exposed} ({self.source})"

    def is_after(self, moment_s: float) -> bool:
        return moment_s >= self.backward_s

    def _lasted(self, what: str, *, after: bool) -> float:
        """Return the total duration of the recorded work `what`, in the backward or `after` it."""
        return sum(each.seconds for each in self.follows if each.what == what and self.is_after(each.start_s) == after)

    @property
    def exposed_s(self) -> float:
        """The time for which compute waited for reductions, in the backward and the next forward."""
        return sum(bucket.waited_s for bucket in self.buckets)

    @property
    def exposed_later_s(self) -> float:
        """The part of `exposed_s` after the backward."""
        return sum(bucket.waited_s for bucket in self.buckets if self.is_after(bucket.wait_s))

    @property
    def updates_s(self) -> float:
        """The duration of updates in the backward."""
        return self._lasted(UPDATE, after=False)

    @property
    def gather_s(self) -> float:
        """The duration of all-gathers of parameters after the backward, or of the next forward's waits for them."""
        return self._lasted(GATHER, after=True)

    @property
    def compute_s(self) -> float:
        """The duration of the backward without waits and updates."""
        return max(0.0, self.backward_s - (self.exposed_s - self.exposed_later_s) - self.updates_s)

    @property
    def next_forward(self) -> Followed | None:
        """After the backward, the first recorded forward whose code waits for updates; `None` without one."""
        return next((each for each in self.follows if each.what == FORWARD and self.is_after(each.start_s)), None)

    @property
    def next_forward_s(self) -> float | None:
        """The duration of `next_forward` without waits, updates and all-gathers."""
        if (forward := self.next_forward) is None:
            return None
        inside = [each.seconds for each in self.follows if each.what != FORWARD and forward.holds(each.start_s)]
        inside += [each.waited_s for each in self.buckets if forward.holds(each.wait_s)]
        return max(0.0, forward.seconds - sum(inside))

    @property
    def end_s(self) -> float:
        """The end of the backward and of later updates and all-gathers, without the next forward."""
        return self.backward_s + self._lasted(UPDATE, after=True) + self.gather_s


def typical_step(steps: Sequence[MeasuredStep]) -> MeasuredStep:
    """Return the step with the median backward (the lower one), of one or more steps of one rank under one plan.

    It is one real backward, because medians of each bucket would not add up to a backward. Times of forward and
    optimizer are medians of the steps that have them.
    """

    def median(values: Sequence[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return statistics.median(known) if known else None

    typical = sorted(steps, key=lambda step: step.backward_s)[(len(steps) - 1) // 2]
    return replace(
        typical,
        forward_s=median([step.forward_s for step in steps]),
        optimizer_s=median([step.optimizer_s for step in steps]),
    )


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a replicated module."""

    mode: str  # kind of reduction
    strategy: str  # of bucketing
    world_size: int
    backend: Backend
    device: str
    plan: BucketPlan
    ready: ReadyTimes  # input of `plan`
    cost: AllReduceCost  # of one collective, for planning and prediction
    cost_source: str
    capture: CaptureRecord | None = None  # of the latest captured backward
    backwards: tuple[tuple[str, int], ...] = ()  # counts by kind of reduction
    measured: MeasuredStep | None = None
    optimizers: tuple[OptimizerRecord, ...] = ()  # that update in the backward

    @property
    def is_timed(self) -> bool:
        """Whether the length of the backward was measured or given. If not, it is assumed, and times are relative."""
        return self.ready.backward_s is not None or self.measured is not None

    @property
    def left(self) -> frozenset[int]:
        """The indices of the buckets whose reductions may end during the next forward."""
        deferring = (each for each in self.optimizers if each.way == OVERLAP_FORWARD and each.stayed is not False)
        return frozenset(number for each in deferring for number in each.left if number < len(self.plan.buckets))

    @property
    def gathers_late(self) -> bool:
        """Whether updated parameters are all-gathered during the next forward."""
        return any(each.left and each.stayed is not False for each in self._sharded())

    @property
    def has_two_halves(self) -> bool:
        """Whether communication of this step may end during the next forward."""
        return bool(self.left) or self.gathers_late

    def time_text(self, seconds: float) -> str:
        """Format in milliseconds, or in percent of the backward if its length is assumed."""
        if self.is_timed:
            return format_ms(seconds)
        return f"{100 * seconds / self.backward_s:.1f}%" if self.backward_s else "0%"

    def _sharded(self) -> list[OptimizerRecord]:
        return [each for each in self.optimizers if each.way == SHARDED and self.world_size > 1]

    @property
    def backward_s(self) -> float:
        """The compute time of the backward: given or measured, otherwise assumed equal to that of its communication."""
        if self.ready.backward_s is None and self.measured is not None:
            return self.measured.compute_s
        return backward_seconds(self.plan.gradients, self.ready, self.cost)

    @property
    def forward_s(self) -> float:
        """The compute time of the next forward: measured, otherwise an assumed share of the backward."""
        return self.backward_s * (crossing.FORWARD_SHARE if self.forward_share is None else self.forward_share)

    @property
    def forward_share(self) -> float | None:
        """The compute time of a forward as a share of its backward, `None` if it was not measured."""
        if (seen := self.measured) is None or not seen.compute_s:
            return None
        forward_s = seen.forward_s if seen.next_forward_s is None else seen.next_forward_s
        return None if forward_s is None else forward_s / seen.compute_s

    @property
    def communication_s(self) -> float:
        """The duration of all collectives in sequence: stages of buckets, and all-gathers of updated parameters."""
        return sum(job.seconds for job in self.jobs()) + self.gather_s

    @property
    def gather_s(self) -> float:
        """The duration of all-gathers of parameters, 0 without a sharded optimizer."""
        return self._gather_s(sum(bucket.key.reduction.is_scattered for bucket in self.plan.buckets))

    def _gather_s(self, collectives: int) -> float:
        """Return the duration of `collectives` all-gathers per optimizer, each half as long as an all-reduce."""
        each_s, nbytes = collectives * self.cost.alpha_s, [each.nbytes for each in self._sharded()]
        return (len(nbytes) * each_s + self.cost.beta_s_per_byte * sum(nbytes)) / 2

    @property
    def gather_wait_s(self) -> float:
        """The predicted time for which compute waits for all-gathers."""
        if not self.gathers_late:
            return self.gather_s
        return sum(each.waited_s for each in gathers_under_the_forward(self))

    @property
    def end_s(self) -> float:
        """The predicted end of the backward and its communication, less compute of a next forward that overlaps it."""
        buckets = planned_buckets(self)
        if self.left:
            return self.backward_s + sum(bucket.waited_s for bucket in buckets)
        return max([self.backward_s, *(bucket.finish_s for bucket in buckets)]) + self.gather_wait_s

    @property
    def exposed_s(self) -> float:
        """The predicted time for which compute waits for communication."""
        return self.end_s - self.backward_s

    @property
    def bound_s(self) -> float:
        """A lower bound of `end_s` for any plan: `release_time_bound`, then the all-gathers.

        If communication may overlap the next forward: the longer of all compute and communication, less that forward.
        """
        if self.has_two_halves:
            return max(self.backward_s, self.communication_s - self.forward_s)
        gradients = [gradient for bucket in self.ready_gradients() for gradient in bucket]
        return release_time_bound(gradients, cost=self.cost, backward_s=self.backward_s) + self._gather_s(1)

    def ready_gradients(self) -> list[list[ReadyGradient]]:
        """Return the gradients of each bucket with their ready times, in seconds after the start of the backward."""
        found, backward_s, left = [], self.backward_s, self.left  # computed once: each loops over all gradients
        for bucket in self.plan.buckets:
            # With deferred buckets the flags are launched first: they are known when a captured backward begins.
            gradients = [member.gradient for member in bucket.members]
            are_flags = all(each.name == UNUSED_FLAGS for each in gradients)
            found.append(ready_gradients(gradients, self.ready, 0.0 if left and are_flags else backward_s))
        return found

    def jobs(self) -> list[Job]:
        """Return the buckets as jobs of the network model."""
        gradients = [gradient for bucket in self.ready_gradients() for gradient in bucket]
        ends = accumulate((len(bucket.members) for bucket in self.plan.buckets), initial=0)
        buckets = tuple(tuple(range(start, end)) for start, end in pairwise(ends))
        return jobs_of(gradients, buckets, self.cost)

    def to_json(self) -> str:
        data: dict[str, Any] = {each.name: getattr(self, each.name) for each in fields(self)}
        data |= {"version": STEP_VERSION, "plan": self.plan.to_dict(), "ready": json.loads(self.ready.to_json())}
        return json.dumps(data, default=asdict)

    @staticmethod
    def from_json(text: str) -> Step:
        """Read the text of `to_json`. Raises `ConfigError` if the text is of another version or no step."""
        try:
            data = dict(json.loads(text))
            if (version := data.pop("version")) == STEP_VERSION:
                return Step(**data | {name: read(data[name]) for name, read in _READERS.items()})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError("not a step file of dp_compile. Save one with step_of(model).to_json().") from error
        raise ConfigError(
            f"this step file has version {version!r}, but this release reads {STEP_VERSION}. Save it again with "
            "step_of(model).to_json()."
        )


def _capture(given: dict[str, Any]) -> CaptureRecord:
    memory = given["memory"] and PeakMemory(**given["memory"])
    refusals = tuple(Refusal(**each) for each in given["refusals"])
    placements = tuple(Placement(**each) for each in given["placements"])
    return CaptureRecord(**given | {"memory": memory, "refusals": refusals, "placements": placements})


def _measured(given: dict[str, Any]) -> MeasuredStep:
    buckets, follows = given["buckets"], tuple(Followed(*each) for each in given["follows"])
    return MeasuredStep(**given | {"buckets": tuple(MeasuredBucket(**each) for each in buckets), "follows": follows})


_READERS: Final[Mapping[str, Callable[[Any], Any]]] = {  # converters from JSON, by field
    "backend": lambda given: Backend(**given),
    "plan": BucketPlan.from_dict,
    "ready": lambda given: ReadyTimes.from_json(json.dumps(given)),
    "cost": AllReduceCost.from_dict,
    "capture": lambda given: given and _capture(given),
    "backwards": lambda given: tuple((str(way), int(times)) for way, times in given),
    "measured": lambda given: given and _measured(given),
    "optimizers": lambda given: tuple(OptimizerRecord(**each | {"left": tuple(each["left"])}) for each in given),
}


def planned_buckets(step: Step) -> list[Launch]:
    """Return the predicted timeline of the buckets: a link carries one stage at a time, in launch order.

    Buckets that may end during the next forward share the link, as many at a time as the backend has lanes. The next
    forward starts immediately; updates take no time. Models: `plan/network.py` (MG-WFBP, arXiv 1912.09268) and
    `plan/crossing.py`.
    """
    left = step.left
    if not left:
        return list(launches(step.jobs(), backward_s=step.backward_s))
    buckets = step.plan.buckets
    given = buckets, step.ready, step.cost, step.backward_s
    jobs = crossing.jobs_of(*given, forward_s=step.forward_s, left=[buckets[number] for number in left])
    found = crossing.arrivals(jobs, step.backend.lanes)
    return [each if number in left else each._replace(needed_s=None) for number, each in enumerate(found)]


def gathers_under_the_forward(step: Step) -> list[Launch]:
    """Return all-gathers that start after all reductions, in the order in which the next forward reads parameters."""
    from_s = max([step.backward_s, *(bucket.finish_s for bucket in planned_buckets(step))])
    jobs = []
    for bucket in step.plan.buckets:
        if bucket.key.reduction.is_scattered:
            nbytes = sum(member.gradient.numel * BYTES.get(bucket.key.dtype, 4) for member in bucket.members)
            read = 1 - max(step.ready.of(member.gradient) for member in bucket.members)
            jobs.append(crossing.Job(bucket, from_s, from_s + step.forward_s * read, step.cost.seconds(nbytes) / 2))
    return crossing.arrivals(crossing.in_order_of_need(jobs))
