"""When gradients become ready in a backward: assumed, or estimated from a graph. Pure numbers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from dp_compile.plan.buckets import GradientSpec, Member
from dp_compile.plan.cost import AllReduceCost
from dp_compile.plan.network import ReadyGradient, weights_of

ASSUMED: Final = "assumed, not measured: the backward takes as long as the communication, work is as the elements"
ESTIMATED: Final = "assumed: the backward takes as long as the communication; work is estimated from the captured graph"


@dataclass(frozen=True, slots=True)
class ReadyTimes:
    """When each gradient is ready, as a share of the backward without the reductions of gradients.

    `shares` by the gradient's index; one that is not listed is ready at the end. `backward_s` is the length of that
    backward in seconds, `None` if it is not known.
    """

    shares: Mapping[int, float]
    backward_s: float | None
    basis: str

    def of(self, gradient: GradientSpec) -> float:
        return self.shares.get(gradient.index, 1.0)

    def to_json(self) -> str:
        return json.dumps({"shares": list(self.shares.items()), "backward_s": self.backward_s, "basis": self.basis})

    @staticmethod
    def from_json(text: str) -> ReadyTimes:
        """What `to_json` wrote; the same floats on every machine."""
        data = json.loads(text)
        shares = {int(index): float(share) for index, share in data["shares"]}
        backward_s = data["backward_s"]
        return ReadyTimes(shares, None if backward_s is None else float(backward_s), data["basis"])


def assumed_times(gradients: Sequence[GradientSpec]) -> ReadyTimes:
    """From the parameters alone, in the given order: work is as the elements of everything but vectors.

    Exact for dense layers, which take 4 FLOPs for each token and element.
    """
    work = [gradient.numel if len(gradient.shape) > 1 else 0 for gradient in gradients]
    total = sum(work) or 1
    shares = {gradient.index: done / total for gradient, done in zip(gradients, accumulate(work), strict=True)}
    return ReadyTimes(shares, None, ASSUMED)


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
