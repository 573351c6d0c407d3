"""The plan by which gradients are averaged, and what changes it: comm hooks, divide factors, sharded gradients."""

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
from dp_compile.errors import require
from dp_compile.plan.buckets import ALIGNMENT_BYTES, BucketPlan, GradientSpec, Layout
from dp_compile.plan.planner import PlanResult, assumed_times, plan_fixed, plan_optimal, plan_per_module
from dp_compile.plan.reduction import Averaging
from dp_compile.replica.gradients import gradient_specs
from dp_compile.replica.group import Group
from dp_compile.replica.replica import PlanState, Replica, warn
from dp_compile.replica.store_channel import check_consistent_in_call, propagate_errors
from dp_compile.replica.supported import (
    AVERAGING,
    CALLED_HOOK,
    COMM_HOOK,
    DIVIDE_FACTOR,
    FUNCTIONAL_HOOK,
    HOOK_OF_VALUES,
    check_supported,
)

logger = logging.getLogger("dp_compile.comm_hook")


def make_plan(
    gradients: Sequence[GradientSpec], group: Group, config: ReplicateConfig, units: frozenset[str] | None
) -> tuple[BucketPlan, PlanState]:
    """The plan of a module, as far as it can be known before the first backward.

    `units`: the modules at whose ends buckets end, by fully qualified name; `None`: no policy was given. Raises a
    ConfigError where options contradict each other.
    """
    ready, layout = assumed_times(gradients), Layout(ALIGNMENT_BYTES)
    strategy = config.chosen_strategy(has_policy=units is not None)
    if units is not None:
        planned = plan_per_module(gradients, partial(_unit_of, units), layout)
    elif config.bucket_cap_mb is not None:
        planned = plan_fixed(gradients, config.bucket_cap_mb, layout)
    else:
        planned = plan_optimal(gradients, config.cost or group.cost, ready, layout)
    awaits = strategy == "optimal"
    return planned.plan, PlanState(
        ready=ready, strategy=strategy, certificate=planned.certificate, awaits_graph=awaits,
        layout=layout if awaits else None, units=units,
    )  # fmt: skip


def _unit_of(units: Collection[str], parameter: str) -> str:
    """The innermost unit around a parameter, by fully qualified name."""
    parts = parameter.split(".")
    around = (".".join(parts[:end]) for end in range(len(parts) - 1, 0, -1))
    return next((name for name in around if name in units), "")


def average_by(replica: Replica, averaging: Averaging) -> None:
    """Average otherwise from now on. Only between backwards, and on every rank. The buckets stay, with all that was
    measured of backwards, unless gradients get another size."""
    was = replica.group.averaging
    # A plan takes long to make, and the divisor alone, which may be another one in each step, changes none.
    same_plan = replace(was, divide_by=averaging.divide_by, given=averaging.given) == averaging
    _reduce_by(replica, replace(replica.group, averaging=averaging), replans=not same_plan)
    replica.config = replace(replica.config, gradient_divide_factor=averaging.divide_by)


def scatter(replica: Replica, names: frozenset[str]) -> None:
    """Let each rank keep only a part of the reduced gradients of these parameters. As `average_by`."""
    _reduce_by(replica, replace(replica.group, scattered=names), replans=True)
    replica.after.scattered = frozenset(index for index, name in enumerate(replica.names) if name in names)


def _reduce_by(replica: Replica, group: Group, *, replans: bool) -> None:
    gradients = gradient_specs(replica.parameters, replica.names, group, replica.module.sparse)
    now = replica.planning
    plan, new = make_plan(gradients, group, replica.config, now.units) if replans else (replica.plan, now)
    now.layout, replica.group = new.layout, group
    if not replans or _keeps_buckets(replica.plan, gradients):
        replica.adopt(PlanResult(replica.plan.with_keys_of(gradients), now.certificate), now.ready)
    else:
        now.awaits_graph = new.awaits_graph
        replica.adopt(PlanResult(plan, new.certificate), new.ready)


def _keeps_buckets(plan: BucketPlan, gradients: Sequence[GradientSpec]) -> bool:
    """Whether the buckets of a plan can stay what they are when its gradients are reduced in another way."""
    new = {gradient.index: gradient for gradient in gradients}
    for was in plan.gradients:
        now = new[was.index]
        # The members of a scattered bucket lie in another way.
        if was.itemsize != now.itemsize or was.key.reduction.is_scattered != now.key.reduction.is_scattered:
            return False
    return all(len({new[member.gradient.index].key for member in bucket.members}) == 1 for bucket in plan.buckets)


def set_gradient_divide_factor(replica: Replica, name: str, factor: float) -> None:
    """See `ReplicatedModule.set_gradient_divide_factor`. `name`: of the module's class."""
    with propagate_errors(replica, "set_gradient_divide_factor()"):
        is_number = isinstance(factor, (int, float)) and not isinstance(factor, bool)
        require(is_number and 0 < factor < math.inf, "gradient_divide_factor", "a finite number > 0", factor)
        check_supported(replica, (AVERAGING, DIVIDE_FACTOR), module=name)
    check_consistent_in_call(replica, {"gradient divide factor": float(factor)}, "set_gradient_divide_factor()")
    averaging = replica.group.averaging
    if averaging.divide_by != factor:
        given = averaging.given or averaging.divide_by is not None
        average_by(replica, replace(averaging, divide_by=float(factor), given=given))


def register_comm_hook(replica: Replica, name: str, state: Any, function: HookFunction) -> None:
    """See `ReplicatedModule.register_comm_hook`. `name`: of the module's class."""
    with propagate_errors(replica, "register_comm_hook()"):
        check_supported(replica, (AVERAGING, COMM_HOOK), module=name)
        hook = make_comm_hook(state, function, replica.group.process_group, replica.group.backend)
        kinds = [FUNCTIONAL_HOOK] if hook.memory is not None else [CALLED_HOOK] if hook.is_called else []
        kinds += [HOOK_OF_VALUES] if hook.averaging.hook is not None else []
        check_supported(replica, tuple(kinds), added=f"comm hook {hook.name}", module=name)
    replica.planning.comm_hook = hook
    try:
        if hook.memory is not None:
            assert isinstance(hook.function, FunctionalHook)
            hook.memory.bind(hook.function, replica.names, replica.parameters)
        check_consistent_in_call(replica, {"comm hook": hook.statement}, "register_comm_hook()")
    except BaseException:
        replica.planning.comm_hook = None
        if hook.memory is not None:
            hook.memory.unbind()
        raise
    average_by(replica, hook.averaging)
    if hook.is_called:
        what = "it is called with each bucket by hooks that run eagerly, backwards are not captured"
        warn(logger, "%s has comm hook %s: %s: %s.", name, hook.name, what, hook.why_called)
