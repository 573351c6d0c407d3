"""From a user's options and a module to a plan."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from torch import nn

from dp_compile.config import ReplicateConfig
from dp_compile.engine.group import Group
from dp_compile.passes.result import GraphPass
from dp_compile.plan.buckets import ALIGNMENT_BYTES, GradientSpec, Layout, plan_single
from dp_compile.plan.planner import Planned, plan_fixed, plan_optimal, plan_per_module
from dp_compile.plan.ready_times import ReadyTimes, assumed_times

CONVOLUTIONS: Final = (
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d
)  # fmt: skip
"""Modules whose weight's gradient comes out of a kernel that allocates its result itself."""


@dataclass(frozen=True, slots=True)
class Planning:
    """A plan, and what it takes to make it again from the graph of the first synchronised backward.

    `layout`: how gradients lie in the buckets of that plan; `None`: this one is final. `strategy`: `optimal`, `fixed`,
    `per_module`; or `single`: no pass makes buckets, each gradient is reduced by itself.
    """

    strategy: str
    planned: Planned
    ready: ReadyTimes
    layout: Layout | None = None


def make_plan(
    module: nn.Module,
    gradients: Sequence[GradientSpec],
    group: Group,
    config: ReplicateConfig,
    passes: Sequence[GraphPass],
    units: Collection[str] | None,
) -> Planning:
    """The plan of a module, as far as it can be known before the first backward.

    Args:
        passes: that may realise it.
        units: the modules at whose ends buckets end, by fully qualified name; `None`: no policy was given.

    Raises:
        ConfigError: options contradict each other.
    """
    ready = assumed_times(gradients)
    strategy = config.chosen_strategy(has_policy=units is not None)
    if not any(each.realises_plan for each in passes):
        return Planning("single", Planned(plan_single(gradients)), ready)
    groups_well = group.backend.coalesces_in_place and group.levels is None
    layout = Layout(ALIGNMENT_BYTES, _kept_apart(module) if groups_well else frozenset())
    if units is not None:
        return Planning(strategy, plan_per_module(gradients, partial(_unit_of, units), layout), ready)
    if config.bucket_cap_mb is not None:
        return Planning(strategy, plan_fixed(gradients, config.bucket_cap_mb, layout), ready)

    cost = config.cost or group.cost
    return Planning(strategy, plan_optimal(gradients, cost, ready, layout), ready, layout)


def _kept_apart(module: nn.Module) -> frozenset[str]:
    """Parameters whose gradient would have to be copied into a bucket, by fully qualified name.

    For NCCL only: gloo's grouped collective copies everything into one buffer.
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
