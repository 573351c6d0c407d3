"""From a user's wishes and a module to a plan: which strategy, which units, which file."""

from __future__ import annotations

import logging
import math
import os
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

from torch import nn

from dp_compile._torch import distributed
from dp_compile.config import ReplicateConfig
from dp_compile.engine.group import Group
from dp_compile.engine.replica import Revision
from dp_compile.errors import ConfigError
from dp_compile.modules.selection import Selection
from dp_compile.modules.units import BucketPolicy, units_of
from dp_compile.plan.buckets import BucketPlan, GradientSpec, Layout, plan_single
from dp_compile.plan.cost import AllReduceCost
from dp_compile.plan.ready_times import ReadyTimes, assumed_times, in_ready_order
from dp_compile.plan.strategies import (
    Coalesced,
    Fixed,
    Optimal,
    Planned,
    Strategy,
    Wanted,
    check_complete,
    check_grouped,
    nominal_cost,
    on_cheaper_levels,
    plan_ddp,
    plan_explicit,
    plan_per_module,
    plan_to_json,
)
from dp_compile.plan.words import BYTES_PER_MB

logger = logging.getLogger("dp_compile.replicate")
DDP_FIRST_BYTES: Final = 2**20
"""The cap of torch's first bucket (`torch.distributed._DEFAULT_FIRST_BUCKET_BYTES`)."""

CONVOLUTIONS: Final = (
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d
)  # fmt: skip
"""Modules whose weight's gradient comes out of a kernel that allocates its result itself."""


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What the user said about the plan. `bucketed`: whether any pass will make buckets."""

    config: ReplicateConfig
    bucket_policy: BucketPolicy | None
    plan: BucketPlan | str | os.PathLike[str] | None
    bucketed: bool
    units: frozenset[str] | None = None
    """The modules that the policy names, by fully qualified name, once it was asked."""

    def of(self, target: Selection) -> PlanRequest:
        """The same of one module. It can be asked again as often as one likes, and holds no module, as a policy may."""
        if self.bucket_policy is None:
            return self
        units = units_of(target.module, self.bucket_policy, target.left_alone)
        _warn_of_frozen(target, units)
        return replace(self, bucket_policy=None, units=units)


def _warn_of_frozen(target: Selection, units: Collection[str]) -> None:
    """As FSDP does of modules that it wraps. What is frozen has no gradient: a bucket is smaller than it looks."""
    trainable = {_unit_of(units, name) for name in target.trainable}
    mixed: dict[str, list[str]] = {}
    for name in target.frozen:
        if (unit := _unit_of(units, name)) and unit in trainable:
            mixed.setdefault(unit, []).append(name)
    if mixed:
        logger.warning(
            "bucket_policy: units have frozen parameters beside trainable ones, and only these are in their buckets: "
            "%s.",
            "; ".join(f"{unit} ({', '.join(names)})" for unit, names in mixed.items()),
        )


@dataclass(frozen=True, slots=True)
class Planning:
    """A plan, and how to make it anew when more is known.

    `revise` makes a plan from ready times and, if it was measured, what a collective costs; it is pure. `revisions`
    are the occasions for it, in their order. `strategy`: a name of `config.STRATEGIES`, or of the user's
    own, or `single`: no pass makes buckets, each gradient is reduced for itself.
    """

    strategy: str
    planned: Planned
    ready: ReadyTimes
    revise: Callable[[ReadyTimes, AllReduceCost | None], Planned] | None = None
    revisions: tuple[Revision, ...] = ()


def make_plan(
    module: nn.Module,
    parameters: Sequence[nn.Parameter],
    gradients: Sequence[GradientSpec],
    group: Group,
    request: PlanRequest,
) -> Planning:
    """The plan of a module, as far as it can be known before the first backward.

    Raises:
        ConfigError: options contradict each other, the policy returns something else than documented, or the plan
            file does not fit the module, or the group's backend lacks a collective that the plan needs.
    """
    planning = _plan(module, parameters, gradients, group, request)
    check_grouped(planning.planned.plan, group.backend)
    revise, judged = planning.revise, partial(on_its_levels, group, request.config)

    def revise_and_judge(times: ReadyTimes, measured: AllReduceCost | None) -> Planned:
        assert revise is not None
        return judged(revise(times, measured), times, measured)

    planned = judged(planning.planned, planning.ready, None)
    return replace(planning, planned=planned, revise=None if revise is None else revise_and_judge)


def on_its_levels(
    group: Group, config: ReplicateConfig, planned: Planned, times: ReadyTimes, measured: AllReduceCost | None
) -> Planned:
    """A plan whose buckets are reduced on as many levels of network as `two_levels` asks for."""
    if group.levels is None or config.two_levels != "auto":
        return planned
    nominal = nominal_cost(group.backend, group.world_size, group.ranks_inside)
    return on_cheaper_levels(planned, group.name, config.cost or measured or nominal, times)


def _plan(
    module: nn.Module,
    parameters: Sequence[nn.Parameter],
    gradients: Sequence[GradientSpec],
    group: Group,
    request: PlanRequest,
) -> Planning:
    config, ready = request.config, assumed_times(gradients)
    strategy = config.chosen_strategy(has_policy=request.units is not None, has_plan=request.plan is not None)
    if not request.bucketed:
        return Planning("single", Planned(plan_single(gradients)), ready)
    if strategy == "ddp":
        return _as_ddp(parameters, gradients, config, ready)
    groups_well = group.backend.coalesces_in_place and group.levels is None
    layout = Layout(config.alignment_bytes, _kept_apart(module) if groups_well else frozenset())
    if request.units is not None:
        of_units = plan_per_module(gradients, partial(_unit_of, request.units), layout)
        return Planning(strategy, of_units, ready)
    if request.plan is not None:
        return Planning(strategy, plan_explicit(gradients, _plan_text(request.plan), layout), ready)
    value = config.own_strategy or _with_options(strategy, config)

    def revise(times: ReadyTimes, measured: AllReduceCost | None) -> Planned:
        nominal = nominal_cost(group.backend, group.world_size, group.ranks_inside)
        wanted = Wanted(gradients, times, measured or nominal, layout)
        planned = value.plan(wanted)
        if value is config.own_strategy:
            if not isinstance(planned, Planned):
                raise ConfigError(f"strategy '{value.name}' must return a Planned, got {type(planned).__name__}.")
            check_complete(planned.plan, wanted, value.name)
        return planned

    if not value.plans_anew:
        return Planning(value.name, revise(ready, None), ready)
    later = () if config.replan_after is None or group.world_size == 1 else (Revision.FROM_LAUNCHES,)
    return Planning(value.name, revise(ready, None), ready, revise, (Revision.FROM_GRAPH, *later))


def _with_options(strategy: str, config: ReplicateConfig) -> Strategy:
    if strategy == "fixed":
        return Fixed(*config.caps_mb())
    return {"optimal": Optimal, "coalesced": Coalesced}[strategy](config.cost, config.replan_after)


def _as_ddp(
    parameters: Sequence[nn.Parameter], gradients: Sequence[GradientSpec], config: ReplicateConfig, ready: ReadyTimes
) -> Planning:
    """torch's DDP: one bucket for each key at first, then buckets in the order in which gradients arrived.

    If it finds unused parameters it fills buckets in the parameters' order, and keeps them.
    Source: torch's `DistributedDataParallel._ddp_init_helper` and `Reducer::rebuild_buckets`.
    """
    cap_bytes = int(config.caps_mb()[0] * BYTES_PER_MB) if config.caps_mb()[0] < math.inf else sys.maxsize
    caps_bytes = [min(DDP_FIRST_BYTES, cap_bytes), cap_bytes] if config.bucket_cap_mb is None else [cap_bytes]

    def rebuilt(times: ReadyTimes, _: AllReduceCost | None) -> Planned:
        order = [gradient.index for gradient in in_ready_order(gradients, times) if gradient.index < len(parameters)]
        return plan_ddp(gradients, distributed.ddp_buckets([parameters[index] for index in order], caps_bytes, order))

    at_first = caps_bytes if config.unused == "find" else [sys.maxsize]
    planned = plan_ddp(gradients, distributed.ddp_buckets(parameters, at_first, [])[::-1])
    if config.unused == "find":
        return Planning("ddp", planned, ready)
    return Planning("ddp", planned, ready, rebuilt, (Revision.FROM_ARRIVALS,))


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


def _plan_text(plan: BucketPlan | str | os.PathLike[str]) -> str:
    if isinstance(plan, BucketPlan):
        return plan_to_json(plan)
    try:
        return Path(plan).read_text()
    except (OSError, TypeError) as error:
        raise ConfigError(f"plan must be a BucketPlan or the path of a plan file, got {plan!r}: {error}.") from error
