"""From a user's options and a module to a plan."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial

from dp_compile.config import ReplicateConfig
from dp_compile.engine.group import Group
from dp_compile.plan.buckets import ALIGNMENT_BYTES, GradientSpec, Layout
from dp_compile.plan.planner import PlanResult, ReadyTimes, assumed_times, plan_fixed, plan_optimal, plan_per_module


@dataclass(frozen=True, slots=True)
class Planning:
    """A plan, and what it takes to make it again from the graph of the first synchronised backward.

    `layout`: how gradients lie in the buckets of that plan; `None`: this one is final. `strategy`: `optimal`, `fixed`
    or `per_module`.
    """

    strategy: str
    planned: PlanResult
    ready: ReadyTimes
    layout: Layout | None = None


def make_plan(
    gradients: Sequence[GradientSpec],
    group: Group,
    config: ReplicateConfig,
    units: Collection[str] | None,
) -> Planning:
    """The plan of a module, as far as it can be known before the first backward.

    Args:
        units: the modules at whose ends buckets end, by fully qualified name; `None`: no policy was given.

    Raises:
        ConfigError: options contradict each other.
    """
    ready = assumed_times(gradients)
    strategy = config.chosen_strategy(has_policy=units is not None)
    layout = Layout(ALIGNMENT_BYTES)
    if units is not None:
        return Planning(strategy, plan_per_module(gradients, partial(_unit_of, units), layout), ready)
    if config.bucket_cap_mb is not None:
        return Planning(strategy, plan_fixed(gradients, config.bucket_cap_mb, layout), ready)

    cost = config.cost or group.cost
    return Planning(strategy, plan_optimal(gradients, cost, ready, layout), ready, layout)


def _unit_of(units: Collection[str], parameter: str) -> str:
    """The innermost unit around a parameter, by fully qualified name."""
    around = parameter
    while "." in around:
        around = around.rpartition(".")[0]
        if around in units:
            return around
    return ""
