"""The plan of a module's reductions, and how comm hooks, divide factors and sharded optimizers change this plan."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from dp_compile.comm_hooks.comm_hook import HookFunction, make_comm_hook
from dp_compile.comm_hooks.functional import FunctionalHook
from dp_compile.config import ReplicateConfig
from dp_compile.errors import is_number, require
from dp_compile.plan.buckets import BucketPlan, GradientSpec
from dp_compile.plan.planner import PlanResult, assumed_times, plan_fixed, plan_optimal, plan_per_module
from dp_compile.replica import supported
from dp_compile.replica.gradients import gradient_specs
from dp_compile.replica.group import Group
from dp_compile.replica.replica import PlanState, Replica, warn
from dp_compile.replica.store_channel import check_consistent_in_call, propagate_errors

logger = logging.getLogger("dp_compile.comm_hook")


def make_plan(
    gradients: Sequence[GradientSpec], group: Group, config: ReplicateConfig, units: frozenset[str] | None
) -> tuple[BucketPlan, PlanState]:
    """Return the plan of a module before its first backward. Raises a ConfigError if options contradict each other.

    `units`: fully qualified names of the modules at whose ends buckets end; `None`: no `bucket_policy` was given.
    """
    ready = assumed_times(gradients)
    strategy = config.chosen_strategy(has_policy=units is not None)
    if units is not None:
        planned = plan_per_module(gradients, partial(_unit_of, units))
    elif config.bucket_cap_mb is not None:
        planned = plan_fixed(gradients, config.bucket_cap_mb)
    else:
        planned = plan_optimal(gradients, config.cost or group.cost, ready)
    return planned.plan, PlanState(
        ready=ready, strategy=strategy, certificate=planned.certificate, awaits_graph=strategy == "optimal", units=units
    )


def _unit_of(units: Collection[str], parameter: str) -> str:
    """Return which of `units`, names of modules, is the innermost that contains a parameter, empty if none does."""
    parts = parameter.split(".")
    around = (".".join(parts[:end]) for end in range(len(parts) - 1, 0, -1))
    return next((name for name in around if name in units), "")


def scatter(replica: Replica, names: frozenset[str]) -> None:
    """Reduce-scatter the gradients of these parameters from now on. Call it on every rank, between backwards."""
    _replan(replica, replace(replica.group, scattered=names))
    replica.after.scattered = frozenset(index for index, name in enumerate(replica.names) if name in names)


def _replan(replica: Replica, group: Group) -> None:
    """Set the replica's group, in which the way to average has changed, and compute a new plan."""
    gradients = gradient_specs(replica.parameters, replica.names, group, replica.module.sparse)
    plan, planning = make_plan(gradients, group, replica.config, replica.planning.units)
    replica.group = group
    replica.planning.awaits_graph = planning.awaits_graph
    replica.adopt(PlanResult(plan, planning.certificate), planning.ready)


def keep_buckets(replica: Replica, group: Group) -> None:
    """Set the group, in which the divisor has changed, and keep the buckets. Call it on every rank, between backwards.

    Planning is slow, and a new divisor, perhaps one in each step, does not change the buckets.
    """
    gradients = gradient_specs(replica.parameters, replica.names, group, replica.module.sparse)
    replica.group = group  # only now: the line above raises for an invalid divisor
    planned = PlanResult(replica.plan.with_keys_of(gradients), replica.planning.certificate)
    replica.adopt(planned, replica.planning.ready)


def set_gradient_divide_factor(replica: Replica, name: str, factor: float) -> None:
    """See `ReplicatedModule.set_gradient_divide_factor`. `name`: the module's class, for error texts."""
    with propagate_errors(replica, "set_gradient_divide_factor()"):
        is_factor = is_number(factor) and 0 < factor < math.inf
        require(is_factor, "gradient_divide_factor", "a finite number > 0", factor)
        supported.check_supported(replica, (supported.AVERAGING, supported.DIVIDE_FACTOR), module=name)
    check_consistent_in_call(replica, {"gradient divide factor": float(factor)}, "set_gradient_divide_factor()")
    averaging = replica.group.averaging
    if averaging.divide_by != factor:
        given = averaging.given or averaging.divide_by is not None
        averaging = replace(averaging, divide_by=float(factor), given=given)
        keep_buckets(replica, replace(replica.group, averaging=averaging))
        replica.config = replace(replica.config, gradient_divide_factor=float(factor))


def register_comm_hook(replica: Replica, name: str, state: Any, function: HookFunction) -> None:
    """See `ReplicatedModule.register_comm_hook`. `name`: the module's class, for error texts."""
    with propagate_errors(replica, "register_comm_hook()"):
        supported.check_supported(replica, (supported.AVERAGING, supported.COMM_HOOK), module=name)
        hook = make_comm_hook(state, function, replica.group.process_group, replica.group.backend)
        kinds = [supported.FUNCTIONAL_HOOK] * (hook.memory is not None) + [supported.CALLED_HOOK] * hook.is_called
        kinds += [supported.HOOK_OF_VALUES] * (hook.averaging.hook is not None)
        supported.check_supported(replica, tuple(kinds), added=f"comm hook {hook.name}", module=name)
        if isinstance(hook.function, FunctionalHook):
            hook.state.prepare(hook.function, replica.names, replica.parameters)
    check_consistent_in_call(replica, {"comm hook": hook.statement}, "register_comm_hook()")
    if hook.memory is not None:
        hook.memory.is_used = True
    replica.planning.comm_hook = hook
    _replan(replica, replace(replica.group, averaging=hook.averaging))
    if hook.is_called:
        what = "eager hooks call it with each bucket, so backwards are not captured"
        warn(logger, "%s has comm hook %s: %s. Reason: %s.", name, hook.name, what, hook.why_called)
