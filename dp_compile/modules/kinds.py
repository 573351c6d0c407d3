"""Different reductions for parts of one model: which parameters travel in which dtype, or are reduced by a hook."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

import torch
from torch import nn

from dp_compile._torch import distributed
from dp_compile.config import ReplicateConfig
from dp_compile.engine.module_names import class_name, fully_qualified
from dp_compile.errors import ConfigError, ModuleError
from dp_compile.modules.units import BucketPolicy, modules_named, units_of

_POLICY: Final = ("param_dtype", "output_dtype", "cast_forward_inputs")
"""The options that FSDP2's policy has."""


def with_names(config: ReplicateConfig, module: nn.Module, left_alone: Collection[nn.Module]) -> ReplicateConfig:
    """The same options; where they mean parts of a module by policies, by the names that those give.

    A policy can hold modules, and ranks cannot compare two of them.

    Args:
        module: the whole. Where a policy names it too, its answer is that of `reduce_dtype`.
        left_alone: modules that are not replicated.

    Raises:
        ConfigError: a policy names nothing, or something that contradicts another option.
    """

    def names_of(given: Any, option: str) -> tuple[Any, ...]:
        if isinstance(given, (str, type)):
            return (given,)
        names = units_of(module, given, left_alone, option=option)
        if not names:
            raise ConfigError(f"{option} has a policy that names no module of {class_name(module)}: {given!r}.")
        return tuple(sorted(names))

    whole: dict[str, Any] = {}
    wires: list[tuple[Any, torch.dtype | None]] = []
    for given, dtype in config.wire_exceptions:
        for name in names_of(given, "reduce_dtypes"):
            if name == "":
                whole.setdefault("reduce_dtype", dtype)
                if whole["reduce_dtype"] != dtype or config.wire_dtype not in (None, dtype):
                    raise ConfigError(
                        f"reduce_dtypes has a policy that names the module itself, with {dtype}, and another option "
                        "says otherwise. Leave out one."
                    )
            else:
                wires.append((name, dtype))
    full = [name for given in config.full_precision_modules for name in names_of(given, "full_precision_modules")]
    if "" in full:
        raise ConfigError(
            f"full_precision_modules has a policy that names the module itself: that leaves no parameter to "
            f"param_dtype={config.param_dtype}. Leave out one of the two."
        )
    return replace(config, reduce_dtypes=tuple(wires), full_precision_modules=tuple(full), **whole)


def wires_of(module: nn.Module, names: Iterable[str], config: ReplicateConfig) -> dict[str, str | None]:
    """The dtypes in which parameters travel that `reduce_dtypes` makes exceptions, by fully qualified name.

    Args:
        names: of the parameters that are reduced; a tied one by one of its names.

    Raises:
        ConfigError: a name is not one of the module's, or two entries speak of the same module.
        ModuleError: a parameter belongs to modules of different kinds.
    """
    units: dict[str, torch.dtype | None] = {}
    disputed: dict[str, None] = {}
    modules_named(module, [given for given, _ in config.wire_exceptions], "reduce_dtypes")  # all that are not there
    for given, dtype in config.wire_exceptions:
        for name in modules_named(module, (given,), "reduce_dtypes"):
            if units.setdefault(name, dtype) != dtype:
                disputed |= {f"'{name}' is {units[name]} and {dtype}": None}
    inside = {
        f"'{name}' is {dtype}, '{outer}' around it is {units[outer]}": None
        for name, dtype in units.items()
        for outer in units
        if name.startswith(f"{outer}.") and units[outer] != dtype
    }
    if complaints := disputed | inside:
        raise ConfigError(
            f"reduce_dtypes says two things of the same parameters: {'; '.join(complaints)}. Leave out one."
        )
    kinds = {name: str(dtype).removeprefix("torch.") if dtype else None for name, dtype in units.items()}
    members = members_of(module, names, units, "reduce_dtypes", tell_apart=kinds)
    return {name: kinds[unit] for name, unit in members.items()}


def members_of(
    module: nn.Module,
    names: Iterable[str],
    units: Collection[str],
    option: str,
    tell_apart: Mapping[str, object] | None = None,
) -> dict[str, str]:
    """The parameters among `names` that lie in some of the units, each with one of those.

    Args:
        tell_apart: the kind of each unit; `None`: all are alike.

    Raises:
        ModuleError: a tied parameter is in units of different kinds, or in one and outside of all.
    """
    places: dict[int, list[tuple[str, str | None]]] = {}
    for prefix, owner in module.named_modules():
        for name, parameter in owner.named_parameters(recurse=False):
            full = fully_qualified(f"{prefix}.{name}" if prefix else name)
            around = [unit for unit in units if not unit or full.startswith(f"{unit}.")]
            places.setdefault(id(parameter), []).append((full, max(around, key=len, default=None)))

    def kind(unit: str | None) -> object:
        return None if unit is None else ("" if tell_apart is None else tell_apart[unit],)

    wanted = set(names)
    reduced = [each for each in places.values() if any(name in wanted for name, _ in each)]
    shared = [each for each in reduced if len({kind(unit) for _, unit in each}) > 1]
    if shared:
        said = "; ".join(" = ".join(name for name, _ in each) for each in shared)
        raise ModuleError(
            f"{option} means one of the places of a shared parameter only, which is reduced once: {said}. Name the "
            "modules of all its places, or of none."
        )
    found = ((name, unit) for each in reduced for name, unit in each if name in wanted)
    return {name: unit for name, unit in found if unit is not None}


def units_named(
    module: nn.Module, given: BucketPolicy | Collection[type[nn.Module] | str], option: str
) -> frozenset[str]:
    """Modules by fully qualified name: given by classes and names, or by a policy as for buckets.

    Raises:
        ConfigError: a name is not one of the module's, or nothing is named.
    """
    if isinstance(given, (str, type)):
        given = (given,)
    plain = not distributed.is_wrap_policy(given) and not callable(given) and isinstance(given, Collection)
    names = frozenset(modules_named(module, given, option)) if plain else units_of(module, given, option=option)  # type: ignore[arg-type]
    if not names:
        raise ConfigError(f"{option} names no module of {class_name(module)}. Give classes, names or a policy.")
    return names


def options_by_module(module: nn.Module, policy: Any, ignored: Collection[nn.Module]) -> dict[str, Any]:
    """What torch's `CustomPolicy` says of precision, as options: of the whole, and of the modules that it names.

    Raises:
        ConfigError: it gives something else than `mp_policy`, or a policy that cannot be that of a part.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy

    names = {each: fully_qualified(name) for name, each in module.named_modules()}
    places = {name: each for each, name in names.items()}
    units: dict[str, Any] = {}
    try:
        found = distributed.run_wrap_policy(policy, module, set(ignored))
    except ValueError as error:
        raise ConfigError(f"mp_policy: {error}") from error
    for each, given in found.items():
        name = names[each]
        if set(given) != {"mp_policy"} or not isinstance(given["mp_policy"], MixedPrecisionPolicy):
            raise ConfigError(
                f"mp_policy must give {{'mp_policy': MixedPrecisionPolicy(...)}} for a module or False, got {given!r} "
                f"for '{name}'."
            )
        units[name] = given["mp_policy"]
    whole = units.pop("", None) or MixedPrecisionPolicy()
    odd = [
        f"'{name}' with {each!r}"
        for name, each in units.items()
        if each.param_dtype not in (None, whole.param_dtype)
        or each.output_dtype is not None
        or each.cast_forward_inputs is not whole.cast_forward_inputs
    ]
    if odd:
        raise ConfigError(
            f"mp_policy: parts of a module compute in its param_dtype, {whole.param_dtype}, or in their own, and "
            f"return what they compute, of inputs that are cast as those of the whole; got {', '.join(odd)}."
        )
    full = [name for name, each in units.items() if each.param_dtype is None and whole.param_dtype is not None]
    overridden = [
        f"'{name}' in '{outer}'"
        for name in units
        for outer in full
        if name not in full and name.startswith(f"{outer}.")
    ]
    if overridden:
        raise ConfigError(
            f"mp_policy: a part computes in its own dtype with all below it, and {', '.join(overridden)} would not. "
            "Leave out one of each."
        )
    wires = {name: _wire_of(each, places[name], ignored) for name, each in units.items()}
    options = options_of_policy(whole, module, ignored)
    return options | {"full_precision_modules": tuple(full), "reduce_dtypes": wires}


def options_of_policy(policy: Any, module: nn.Module, ignored: Collection[nn.Module]) -> dict[str, Any]:
    """What torch's `MixedPrecisionPolicy` says of a module, as options.

    Raises:
        ConfigError: it gives each parameter a dtype of its own.
    """
    wire = _wire_of(policy, module, ignored)
    is_said = policy.reduce_dtype is not None or wire != policy.param_dtype
    return {name: getattr(policy, name) for name in _POLICY} | {"reduce_dtype": wire if is_said else None}


def _wire_of(policy: Any, module: nn.Module, ignored: Collection[nn.Module]) -> torch.dtype | None:
    """The dtype in which gradients of a module travel under a policy; `None`: their own."""
    if distributed.is_by_parameter(policy):
        raise ConfigError(
            "mp_policy has a param_dtype_override_fn, by which FSDP2 casts each parameter to a dtype of its own. "
            "Name modules that compute in their own dtype instead: ReplicateConfig(full_precision_modules=...)."
        )
    left_alone = {inner for each in ignored for inner in each.modules()}
    own = (each for part in module.modules() if part not in left_alone for each in part.parameters(recurse=False))
    return distributed.reduce_dtype_of(policy, own)
