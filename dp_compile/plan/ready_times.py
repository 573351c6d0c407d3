"""When gradients become ready in a backward: assumed, estimated from a graph, or measured. Pure numbers."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, NamedTuple

import numpy as np

from dp_compile.plan.buckets import BucketPlan, GradientSpec, Member
from dp_compile.plan.cost import AllReduceCost
from dp_compile.plan.network import ReadyGradient, weights_of

ASSUMED: Final = "assumed, not measured: the backward takes as long as the communication, work is as the elements"
ESTIMATED: Final = "assumed: the backward takes as long as the communication; work is estimated from the captured graph"
MEASURED: Final = "ready times are measured, the slowest rank's count"


class ModelCollective(NamedTuple):
    """A collective that the model's own backward waits for, as those of tensor parallel.

    `collective`: torch's name of it, as `all_reduce`. `ranks`: of its group. `nbytes`: of its input or its output, the
    larger one. `start`, `end`: the shares of the backward after which it is launched, and after which compute goes on.
    """

    collective: str
    ranks: int
    nbytes: int
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class ReadyTimes:
    """When each gradient is ready, as a share of the backward without the reductions of gradients.

    `shares` by the gradient's index; one that is not listed is ready at the end. `backward_s` is the length of that
    backward in seconds, `None` if it was not measured. `collectives` of the model are part of these times.
    """

    shares: Mapping[int, float]
    backward_s: float | None
    basis: str
    collectives: tuple[ModelCollective, ...] = ()

    def of(self, gradient: GradientSpec) -> float:
        return self.shares.get(gradient.index, 1.0)

    def to_json(self) -> str:
        data = {"shares": list(self.shares.items()), "backward_s": self.backward_s, "basis": self.basis}
        return json.dumps(data | {"collectives": self.collectives})

    @staticmethod
    def from_json(text: str) -> ReadyTimes:
        """What `to_json` wrote; the same floats on every machine."""
        data = json.loads(text)
        collectives = tuple(ModelCollective(*each) for each in data["collectives"])
        shares = {int(index): float(share) for index, share in data["shares"]}
        backward_s = data["backward_s"]
        return ReadyTimes(shares, None if backward_s is None else float(backward_s), data["basis"], collectives)


def assumed_times(gradients: Sequence[GradientSpec]) -> ReadyTimes:
    """From the parameters alone, in the given order: work is as the elements of everything but vectors.

    Exact for dense layers, which take 4 FLOPs for each token and element.
    """
    work = [gradient.numel if len(gradient.shape) > 1 else 0 for gradient in gradients]
    total = sum(work) or 1
    shares = {gradient.index: done / total for gradient, done in zip(gradients, accumulate(work), strict=True)}
    return ReadyTimes(shares, None, ASSUMED)


@dataclass(frozen=True, slots=True)
class Launches:
    """When one rank launched each bucket in one backward, and when all compute was done, in seconds."""

    launch_s: tuple[float, ...]
    backward_s: float


def typical(seen: Sequence[Launches]) -> Launches:
    """The median of several backwards of one rank."""
    return Launches(
        tuple(statistics.median(times) for times in zip(*(each.launch_s for each in seen), strict=True)),
        statistics.median(each.backward_s for each in seen),
    )


def slowest(ranks: Sequence[Launches]) -> Launches:
    """A collective starts when the last rank has launched it."""
    return Launches(
        tuple(max(times) for times in zip(*(each.launch_s for each in ranks), strict=True)),
        max(each.backward_s for each in ranks),
    )


def measured_times(plan: BucketPlan, launches: Launches, before: ReadyTimes) -> ReadyTimes:
    """Ready times that fit the measured launches of `plan`.

    Between the launches of two buckets, gradients and the model's collectives are spread as in `before`.
    """
    shares: dict[int, float] = {}
    start, start_before = 0.0, 0.0
    launched = [(0.0, 0.0)]
    for bucket, launch_s in zip(plan.buckets, launches.launch_s, strict=True):
        believed = [before.of(member.gradient) for member in bucket.members]
        end, end_before = max(start, min(1.0, launch_s / launches.backward_s)), max(start_before, *believed)
        for member, share in zip(bucket.members, believed, strict=True):
            passed = (max(share, start_before) - start_before) / (end_before - start_before or 1.0)
            shares[member.gradient.index] = start + (end - start) * passed if end_before > start_before else end
        start, start_before = end, end_before
        launched.append((end_before, end))
    believed_at, seen_at = zip(*launched, (1.0, 1.0), strict=True)

    def moved(share: float) -> float:
        return float(np.interp(share, believed_at, seen_at))

    collectives = tuple(each._replace(start=moved(each.start), end=moved(each.end)) for each in before.collectives)
    return ReadyTimes(shares, launches.backward_s, MEASURED, collectives)


def backward_seconds(members: Iterable[Member], times: ReadyTimes, cost: AllReduceCost) -> float:
    """How long the backward computes: as believed, else as long as the gradients take on the network."""
    if times.backward_s is not None:
        return times.backward_s
    return sum(weights_of(member.loads, cost)[1] for member in members)


def ready_gradients(members: Iterable[Member], times: ReadyTimes, backward_s: float) -> list[ReadyGradient]:
    """Members at their times, for the network."""
    return [
        ReadyGradient(each.nbytes, backward_s * times.of(each.gradient), each.gradient.key, loads=each.loads)
        for each in members
    ]
