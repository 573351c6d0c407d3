"""From a user's options and a module to a plan."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from torch import nn

from dp_compile.config import ReplicateConfig
from dp_compile.engine.group import Group
from dp_compile.engine.replica import Revision
from dp_compile.plan.buckets import ALIGNMENT_BYTES, GradientSpec, Layout, plan_single
from dp_compile.plan.cost import nominal_cost
from dp_compile.plan.planner import Planned, plan_fixed, plan_optimal, plan_per_module
from dp_compile.plan.ready_times import ReadyTimes, assumed_times
from dp_compile.replication.selection import Selection
from dp_compile.replication.units import BucketPolicy, units_of

CONVOLUTIONS: Final = (
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d
)  # fmt: skip
"""Modules whose weight's gradient comes out of a kernel that allocates its result itself."""


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What the user asked of the plan. `bucketed`: whether any pass will make buckets."""

    config: ReplicateConfig
    bucket_policy: BucketPolicy | None
    bucketed: bool
    units: frozenset[str] | None = None
    """The modules that the policy names, by fully qualified name, once it was asked."""

    def of(self, target: Selection) -> PlanRequest:
        """The same of one module. It can be asked again as often as one likes, and holds no module, as a policy may."""
        if self.bucket_policy is None:
            return self
        return replace(self, bucket_policy=None, units=units_of(target.module, self.bucket_policy, target.left_alone))


@dataclass(frozen=True, slots=True)
class Planning:
    """A plan, and what it takes to make it again when more is known.

    `layout` and `revisions`: how gradients lie in the buckets of a plan that is made again, and its occasions, in
    their order. `strategy`: `optimal`, `fixed`, `per_module`; or `single`: no pass makes buckets, each gradient is
    reduced by itself.
    """

    strategy: str
    planned: Planned
    ready: ReadyTimes
    layout: Layout | None = None
    revisions: tuple[Revision, ...] = ()


def make_plan(module: nn.Module, gradients: Sequence[GradientSpec], group: Group, request: PlanRequest) -> Planning:
    """The plan of a module, as far as it can be known before the first backward.

    Raises:
        ConfigError: options contradict each other.
    """
    config, ready = request.config, assumed_times(gradients)
    strategy = config.chosen_strategy(has_policy=request.units is not None)
    if not request.bucketed:
        return Planning("single", Planned(plan_single(gradients)), ready)
    groups_well = group.backend.coalesces_in_place and group.levels is None
    layout = Layout(ALIGNMENT_BYTES, _kept_apart(module) if groups_well else frozenset())
    if request.units is not None:
        return Planning(strategy, plan_per_module(gradients, partial(_unit_of, request.units), layout), ready)
    if config.bucket_cap_mb is not None:
        return Planning(strategy, plan_fixed(gradients, config.bucket_cap_mb, layout), ready)

    cost = config.cost or nominal_cost(group.backend, group.world_size, group.ranks_inside)
    later = () if config.replan_after is None or group.world_size == 1 else (Revision.FROM_LAUNCHES,)
    planned = plan_optimal(gradients, cost, ready, layout)
    return Planning(strategy, planned, ready, layout, (Revision.FROM_GRAPH, *later))


def _kept_apart(module: nn.Module) -> frozenset[str]:
    """Parameters whose gradient would have to be copied into a bucket, by fully qualified name.

    For NCCL only: gloo's grouped collective copies everything into a buffer of its own.
    """
    weights = {id(each.weight) for each in module.modules() if isinstance(each, CONVOLUTIONS)}
    return frozenset(name for name, parameter in module.named_parameters() if id(parameter) in weights)


def _unit_of(units: Collection[str], parameter: str) -> str:
    """The innermost unit around a parameter, by fully qualified name."""
    around = parameter
    while "." in around:
        around = around.rpartition(".")[0]
        if around in units:
            return around
    return ""
