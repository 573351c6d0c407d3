"""How gradients are put into buckets. Pure.

| a bucket ends                                                              | function          | asked for by    |
|----------------------------------------------------------------------------|-------------------|-----------------|
| where the predicted end of the step is earliest, also if speeds are off 2x | `plan_optimal`    | by default      |
| at a size, as in torch's DDP                                               | `plan_fixed`      | `bucket_cap_mb` |
| where the module that a policy names ends                                  | `plan_per_module` | `bucket_policy` |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from dp_compile.plan.backends import Backend
from dp_compile.plan.buckets import UNUSED_FLAGS, BucketPlan, GradientSpec, Layout, Member, plan_buckets
from dp_compile.plan.certificate import ERROR_BAND, FIRST_CAP_MB, MEASURED_BAND, Certificate, robust_partition
from dp_compile.plan.cost import AllReduceCost, ring, ring_or_tree
from dp_compile.plan.links import link, with_levels
from dp_compile.plan.ready_times import ReadyTimes, backward_seconds, in_ready_order, ready_gradients

RANKS_OF_A_NODE: Final = 8


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan, and what it promises if it was made from a cost."""

    plan: BucketPlan
    certificate: Certificate | None = None


def plan_fixed(gradients: Sequence[GradientSpec], cap_mb: float, layout: Layout) -> Planned:
    """Buckets by size in MiB, closed as torch's DDP closes them; `math.inf`: one after the first of each key."""
    first_cap_mb = min(FIRST_CAP_MB, cap_mb)
    return Planned(plan_buckets(gradients, bucket_cap_mb=cap_mb, first_bucket_cap_mb=first_cap_mb, layout=layout))


def plan_per_module(gradients: Sequence[GradientSpec], unit_of: Callable[[str], str], layout: Layout) -> Planned:
    """One bucket, for each key, for each stretch of gradients of one unit.

    Args:
        gradients: in launch order.
        unit_of: the unit (a module's fully qualified name) of a parameter's fully qualified name.
        layout: how gradients lie in their buckets.
    """
    last = [gradient for gradient in gradients if gradient.name != UNUSED_FLAGS][-1]
    units = {gradient.name: unit_of(gradient.name) for gradient in gradients if gradient.name != UNUSED_FLAGS}
    units[UNUSED_FLAGS] = units[last.name]
    buckets = []
    for unit, stretch in groupby(gradients, key=lambda gradient: units[gradient.name]):
        members = list(stretch)
        for key in dict.fromkeys(gradient.key for gradient in members):
            of_key = [gradient for gradient in members if gradient.key == key]
            buckets.append(layout.bucket(key, of_key, f"end of {unit or 'the outermost module'}"))
    return Planned(BucketPlan(tuple(buckets)))


def plan_optimal(
    gradients: Sequence[GradientSpec],
    cost: AllReduceCost,
    times: ReadyTimes,
    layout: Layout,
    *,
    band: tuple[float, ...] | None = None,
) -> Planned:
    """The partition that is best in the worst case: over speeds off by 0.5x to 2x, by 0.9x to 1.1x if measured.

    The plan must be the same on every rank, so all of them pass the same times. Until the backward is measured it is
    taken to be as long as the communication: the case in which the buckets matter most.

    Args:
        gradients: in any order; equally ready ones are launched in it.
        cost: what one collective costs on the group.
        times: when the gradients are ready.
        layout: how gradients lie in their buckets.
        band: how far off speeds may be; `None`: as above.
    """
    ordered = in_ready_order(gradients, times)
    members = [Member(gradient, None) for gradient in ordered]
    backward_s = backward_seconds(members, times, cost)
    partition, certificate = robust_partition(
        ready_gradients(members, times, backward_s),
        cost=cost,
        backward_s=backward_s,
        band=band or (ERROR_BAND if times.backward_s is None else MEASURED_BAND),
    )
    last = {ordered[bucket[0]].key: bucket for bucket in partition}.values()
    buckets = [
        layout.bucket(
            ordered[bucket[0]].key,
            [ordered[position] for position in bucket],
            "the last bucket" if bucket in last else "by the predicted end of the backward",
        )
        for bucket in partition
    ]
    return Planned(BucketPlan(tuple(buckets)), certificate)


def nominal_cost(backend: Backend, world_size: int, ranks_inside: int | None = None) -> AllReduceCost:
    """What to plan with before anything was measured: the backend's nominal links.

    `ranks_inside`: of a node, where the network has two levels.
    """
    inside, between, formula = link(backend.inside), link(backend.between), ring_or_tree if backend.has_nodes else ring
    if ranks_inside is not None:
        whole = between.cost(world_size, formula=formula)
        return with_levels(whole, inside, between, ranks_inside=ranks_inside, nodes=world_size // ranks_inside)
    return (inside if world_size <= RANKS_OF_A_NODE else between).cost(world_size, formula=formula)
