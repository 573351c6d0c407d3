"""What a step would take if ranks mixed parameters with few neighbours, and how fast they would agree. Predictions."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Final

from dp_compile.insight.prediction import LINK_INSIDE, Prediction, Scenario, in_plan_order
from dp_compile.insight.step import DECENTRALIZED, Step
from dp_compile.plan.buckets import UNUSED_FLAGS, GradientSpec, plan_buckets
from dp_compile.plan.cost import EITHER, AllReduceCost
from dp_compile.plan.links import link
from dp_compile.plan.mixing_times import MixedStep, SentBucket, mixed_step
from dp_compile.plan.reduction import ALL_REDUCE, Reduction, Stage
from dp_compile.plan.topologies import Edge, SpectralGap, topology

BUCKET_MB: Final = 25.0
"""MiB of parameters at which a bucket is closed: as `decentralize()` has it by default."""
FORWARD_OF_BACKWARD: Final = 0.5
"""What a forward is taken to last of its backward, where nobody knows: a product in place of two."""
_ITEMSIZE: Final = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}

OnOther = Callable[[Scenario], AllReduceCost]
"""What a collective costs on a group of so many ranks."""


@dataclass(frozen=True, slots=True)
class Mixed:
    """A prediction for one topology.

    Args:
        scenario: what was asked.
        topology: its name.
        world_size: ranks.
        period: steps until the edges repeat.
        ranks_of_an_edge: of the largest.
        buckets: of parameters.
        nbytes: of all of them.
        times: of a step.
        all_reduce_s: what a step takes in whose backward gradients are reduced over all ranks.
        gap: how much nearer ranks come in a period.
        told: what of a step was assumed or left out, for people; empty if nothing.
    """

    scenario: Scenario
    topology: str
    world_size: int
    period: int
    ranks_of_an_edge: int
    buckets: int
    nbytes: int
    times: MixedStep
    all_reduce_s: float
    gap: SpectralGap
    told: str

    @property
    def exposed_s(self) -> float:
        """How long a step waits for neighbours."""
        waited_s = self.times.step_s - self.times.compute_s
        return waited_s if waited_s > 1e-9 * self.times.step_s else 0.0  # what is left of adding up

    @property
    def halved_after(self) -> float:
        """Steps until ranks are half as far from their average, at most; with the gap's lower end."""
        if self.gap.low == 1:
            return self.period
        return self.period * math.log(0.5) / math.log1p(-self.gap.low) if self.gap.low else math.inf


def mixed(
    step: Step,
    name: str,
    scenario: Scenario,
    *,
    reduced: Prediction,
    cost_on: OnOther,
    forward_s: float | None = None,
) -> Mixed:
    """What `step` would take if its ranks mixed parameters over a topology.

    An edge inside a node has the scenario's `link_inside`, others its link, each rank one of its own. Gradients'
    dtype and strategy do not count: buckets are of parameters, as `decentralize()` makes them.

    Args:
        step: as for `predict`.
        name: of the topology.
        scenario: ranks, link, length of compute; `ranks_inside` are on a node.
        reduced: the same step with gradients that are reduced.
        cost_on: what a collective costs.
        forward_s: how long the forward is, if the step does not know.

    Raises:
        ConfigError: no such topology, not for so many ranks, or nothing is known of the link.
    """
    world_size, inside = scenario.world_size or step.world_size, scenario.ranks_inside or 1
    chosen = topology(name, world_size, inside)
    flat = replace(scenario, ranks_inside=1, link_inside=None, strategy=None, bucket_cap_mb=None, gradient_dtype=None)

    @cache
    def cost_of(ranks: int, in_a_node: bool) -> AllReduceCost:
        if in_a_node:
            return link(scenario.link_inside or LINK_INSIDE).cost(ranks, formula=EITHER)
        return cost_on(replace(flat, world_size=ranks))

    def seconds(edge: Edge, nbytes: float) -> float:
        in_a_node = edge.ranks[0] // inside == edge.ranks[-1] // inside
        return cost_of(len(edge.ranks), in_a_node).seconds(nbytes)

    buckets, scale = parameter_buckets(step), scenario.compute_scale
    forward_s, optimizer_s, told = _around(step, forward_s)
    sizes = [sum(map(_nbytes, bucket)) for bucket in buckets]
    backward_s = step.backward_s * scale
    sent = [
        SentBucket(nbytes, backward_s * max(map(step.ready.of, bucket)), optimizer_s * nbytes / sum(sizes))
        for bucket, nbytes in zip(buckets, sizes, strict=True)
    ]
    return Mixed(
        scenario,
        name,
        world_size,
        chosen.period,
        max(len(edge.ranks) for edges in chosen.steps for edge in edges),
        len(buckets),
        sum(sizes),
        mixed_step(chosen, sent, forward_s=forward_s * scale, backward_s=backward_s, seconds=seconds),
        forward_s * scale + reduced.makespan_s + optimizer_s,
        chosen.spectral_gap(),
        told,
    )


def parameter_buckets(step: Step) -> list[list[GradientSpec]]:
    """The parameters of each bucket, as `decentralize()` closes them, in the order in which they are sent."""
    if step.mode == DECENTRALIZED:
        return [[member.gradient for member in bucket.members] for bucket in step.plan.buckets]
    given = [each for each in in_plan_order(step.plan.gradients) if each.name != UNUSED_FLAGS]
    reduction = Reduction((Stage(ALL_REDUCE, "", "sum"),), 1.0)
    own = [
        replace(each, key=each.key._replace(reduction=reduction), itemsize=_nbytes(each) // max(1, each.numel), sent=())
        for each in given
    ]
    plan = plan_buckets(own, bucket_cap_mb=BUCKET_MB, first_bucket_cap_mb=BUCKET_MB)
    return [[member.gradient for member in bucket.members] for bucket in plan.buckets]


def _nbytes(gradient: GradientSpec) -> int:
    """Of the parameter: it travels in its own dtype, whatever its gradient travels in."""
    return gradient.numel * _ITEMSIZE.get(gradient.key.dtype, gradient.itemsize)


def _around(step: Step, forward_s: float | None) -> tuple[float, float, str]:
    """Forward and optimizer, in seconds, and where that is from."""
    measured = step.measured
    optimizer_s = None if measured is None else measured.optimizer_s
    forward_s = measured.forward_s if measured is not None and measured.forward_s is not None else forward_s
    told = []
    if forward_s is None:
        forward_s = FORWARD_OF_BACKWARD * step.backward_s
        told.append(f"the forward {FORWARD_OF_BACKWARD:g} times as long as the backward, assumed")
    told += [] if optimizer_s is not None else ["the optimizer not counted"]
    return forward_s, optimizer_s or 0.0, ", ".join(told)
