"""From a module's policy to the dtype in which it computes: which parameters are cast, and which stay as they are."""

from __future__ import annotations

import torch
from torch import nn

from dp_compile._torch import autograd
from dp_compile._torch.dtensors import is_dtensor
from dp_compile.config import ReplicateConfig
from dp_compile.engine.module_names import class_name, fully_qualified
from dp_compile.engine.precision import ATTRIBUTE, CastSite, Precision
from dp_compile.errors import ModuleError
from dp_compile.replication.selection import Selection


def make_precision(target: Selection, config: ReplicateConfig) -> Precision | None:
    """How a module computes; `None`: as it is.

    Raises:
        ModuleError: the policy has nothing to cast, or cannot reach all of it.
    """
    policy = config.mp_policy
    if policy is None or not config.casts:
        return None
    if "forward" in vars(target.module):
        raise ModuleError(
            f"the forward of {class_name(target.module)} was set on the object itself, as accelerate does: a mixed "
            "precision policy would not act in it. Call replicate() before that."
        )
    places: tuple[tuple[CastSite, ...], ...] = ()
    if policy.param_dtype is not None:
        places = _places(target, policy.param_dtype)
        if not places:
            raise ModuleError(
                f"{class_name(target.module)} has no floating parameter that param_dtype={policy.param_dtype} could "
                "cast. Leave the policy out."
            )
    cast_inputs = policy.cast_forward_inputs and policy.param_dtype is not None
    return Precision(policy.param_dtype, policy.output_dtype, cast_inputs, places)


def install_precision(module: nn.Module, precision: Precision | None) -> None:
    """Let a module compute so from now on."""
    if precision is not None:
        take_precision_off(module)
        vars(module)[ATTRIBUTE] = precision


def take_precision_off(module: nn.Module) -> None:
    """Let a module compute as it is again."""
    precision = vars(module).pop(ATTRIBUTE, None)
    if precision is not None:
        precision.forget()


def precision_of(module: nn.Module) -> Precision | None:
    """How a module computes, if not as it is."""
    found: Precision | None = vars(module).get(ATTRIBUTE)
    return found


def _places(target: Selection, dtype: torch.dtype) -> tuple[tuple[CastSite, ...], ...]:
    """The places of the module's floating parameters, those of a tied one together."""
    chosen = {id(parameter) for parameter in (*target.trainable.values(), *target.frozen.values())}
    below = {id(inner) for each in target.left_alone for inner in each.modules()}
    left_alone = {id(parameter) for each in target.left_alone for parameter in each.parameters()}
    found: dict[int, list[CastSite]] = {}
    for prefix, owner in target.module.named_modules():
        if id(owner) in below:
            continue
        for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            if not parameter.is_floating_point():
                continue
            full = fully_qualified(f"{prefix}.{name}" if prefix else name)
            if id(parameter) in left_alone and parameter.dtype != dtype:  # half of its uses would be cast
                raise ModuleError(
                    f"{full} is shared with an ignored module: it would be cast to {dtype} in one of them only. Ignore "
                    "both, or none."
                )
            # Not one of a class that keeps its values in another form, as frozen quantised weights do.
            plain = type(parameter.data) is torch.Tensor or isinstance(parameter.data, nn.Parameter)
            if id(parameter) not in chosen or not (plain or autograd.is_fake(parameter) or is_dtensor(parameter)):
                continue
            if name == "weight" and getattr(owner, "max_norm", None) is not None and parameter.dtype != dtype:
                raise ModuleError(
                    f"{full} is changed by its module's forward (max_norm), which mixed precision would lose: it is a "
                    "cast there. Call replicate() first on that module, without param_dtype."
                )
            place = (tuple(prefix.split(".")) if prefix else (), owner if prefix else None, name)
            found.setdefault(id(parameter), []).append(place)
    return tuple(map(tuple, found.values()))
