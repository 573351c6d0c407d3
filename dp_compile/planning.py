"""From a user's wishes and a module to a plan: which strategy, which units, which file."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from torch import nn

from dp_compile.config import ReplicateConfig
from dp_compile.errors import ConfigError
from dp_compile.plan import BucketPlan, GradientSpec, Layout, plan_single
from dp_compile.replica import Group
from dp_compile.strategies import (
    Planned,
    check_grouped,
    nominal_cost,
    plan_coalesced,
    plan_explicit,
    plan_fixed,
    plan_optimal,
    plan_per_module,
    plan_to_json,
)

BucketPolicy = Callable[[str, nn.Module], bool] | Collection[type[nn.Module]]
"""Which modules are units of buckets, as FSDP's wrap policies: a function of name and module, or a set of classes."""

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


def make_plan(module: nn.Module, gradients: Sequence[GradientSpec], group: Group, request: PlanRequest) -> Planned:
    """The plan of a module.

    Raises:
        ConfigError: options contradict each other, the policy returns something else than documented, or the plan
            file does not fit the module, or the group's backend lacks a collective that the plan needs.
    """
    planned = _plan(module, gradients, group, request)
    check_grouped(planned.plan, group.backend)
    return planned


def _plan(module: nn.Module, gradients: Sequence[GradientSpec], group: Group, request: PlanRequest) -> Planned:
    config = request.config
    strategy = config.chosen_strategy(has_policy=request.bucket_policy is not None, has_plan=request.plan is not None)
    if not request.bucketed:
        return Planned(plan_single(gradients))
    layout = Layout(config.alignment_bytes, _kept_apart(module) if group.backend == "nccl" else frozenset())
    if request.bucket_policy is not None:
        return plan_per_module(gradients, _unit_of(module, request.bucket_policy), layout)
    if request.plan is not None:
        return plan_explicit(gradients, _plan_text(request.plan), layout)
    if strategy == "fixed":
        return plan_fixed(gradients, config, layout)
    make = plan_coalesced if strategy == "coalesced" else plan_optimal
    return make(gradients, config.cost or nominal_cost(group.backend, group.world_size), layout)


def _kept_apart(module: nn.Module) -> frozenset[str]:
    """Parameters whose gradient would have to be copied into a bucket, by fully qualified name.

    For NCCL only: gloo's grouped collective copies everything into a buffer of its own.
    """
    weights = {id(each.weight) for each in module.modules() if isinstance(each, CONVOLUTIONS)}
    return frozenset(name for name, parameter in module.named_parameters() if id(parameter) in weights)


def _unit_of(module: nn.Module, policy: BucketPolicy) -> Callable[[str], str]:
    """The innermost module that a policy names around a parameter, by fully qualified name."""
    if not callable(policy):
        kinds = tuple(policy)
        if not kinds or not all(isinstance(kind, type) and issubclass(kind, nn.Module) for kind in kinds):
            raise ConfigError(f"bucket_policy must be a function or a set of module classes, got {policy!r}.")
        units = {name for name, submodule in module.named_modules() if isinstance(submodule, kinds)}
    else:
        answers = {name: policy(name, submodule) for name, submodule in module.named_modules()}
        odd = [name for name, answer in answers.items() if not isinstance(answer, bool)]
        if odd:
            raise ConfigError(f"bucket_policy must return True or False, returned {answers[odd[0]]!r} for '{odd[0]}'.")
        units = {name for name, answer in answers.items() if answer}

    def unit_of(parameter: str) -> str:
        around = parameter
        while "." in around:
            around = around.rpartition(".")[0]
            if around in units:
                return around
        return ""

    return unit_of


def _plan_text(plan: BucketPlan | str | os.PathLike[str]) -> str:
    if isinstance(plan, BucketPlan):
        return plan_to_json(plan)
    try:
        return Path(plan).read_text()
    except (OSError, TypeError) as error:
        raise ConfigError(f"plan must be a BucketPlan or the path of a plan file, got {plan!r}: {error}.") from error
