"""From the options of a module to the dtype in which it computes: what is cast where, and what stays as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from dp_compile._torch import autograd
from dp_compile._torch.dtensors import is_dtensor
from dp_compile.config import ReplicateConfig
from dp_compile.engine.module_names import class_name, fully_qualified
from dp_compile.engine.precision import ATTRIBUTE, CastSite, Forwards, Precision, cast_all
from dp_compile.errors import ConfigError, ModuleError
from dp_compile.modules.forward_hooks import Installed
from dp_compile.modules.selection import Selection
from dp_compile.modules.units import modules_named


def make_precision(target: Selection, config: ReplicateConfig) -> Precision | None:
    """How a module computes; `None`: as it is.

    Raises:
        ConfigError: `full_precision_modules` names what the module does not have, or leaves nothing.
        ModuleError: the policy has nothing to cast, or cannot reach all of it.
    """
    for name in ("full_precision_modules", "full_precision_in_eval"):  # not in the config: mp_policy is no part of it
        if getattr(config, name) and config.param_dtype is None and config.buffer_dtype is None:
            raise ConfigError(
                f"{name} is an exception from param_dtype or buffer_dtype, and neither is given. Pass one of them in "
                "ReplicateConfig, or mp_policy=MixedPrecisionPolicy(param_dtype=...)."
            )
    if not config.casts:
        return None
    module, full = target.module, _full_precision(target.module, config)
    kept = {id(below) for each in full for below in each.modules()}
    if "forward" in vars(module):
        raise ModuleError(
            f"the forward of {class_name(module)} was set on the object itself, as accelerate does: a mixed precision "
            "policy would not act in it. Call replicate() before that."
        )
    places = _Places(target, kept)
    chosen = {id(parameter) for parameter in (*target.trainable.values(), *target.frozen.values())}
    parameters = places.of(chosen, buffers=False) if config.param_dtype is not None else ()
    if config.param_dtype is not None:
        _check_something_to_cast(target, parameters, config)
        _check_not_shared(target, config.param_dtype)
    chosen = {id(buffer) for buffer in target.buffers.values()}
    buffers = places.of(chosen, buffers=True) if config.buffer_dtype is not None else ()
    return Precision(
        param_dtype=config.param_dtype,
        buffer_dtype=config.buffer_dtype,
        output_dtype=config.output_dtype,
        cast_inputs=config.cast_forward_inputs and config.param_dtype is not None,
        full_in_eval=config.full_precision_in_eval,
        parameters=parameters,
        buffers=buffers,
        full=tuple(full),
    )


def install_precision(module: nn.Module, precision: Precision | None) -> None:
    """Let a module compute so from now on."""
    if precision is None:
        return
    take_precision_off(module)
    vars(module)[ATTRIBUTE] = precision
    for each in precision.full:
        own = next((p.dtype for p in each.parameters() if p.is_floating_point()), torch.float32)
        if precision.param_dtype not in (None, own):
            up = _CastInputs(precision.param_dtype, own, precision.forwards)
            precision.hooks.append(each.register_forward_pre_hook(up, with_kwargs=True))
            precision.hooks.append(each.register_forward_hook(_CastOutputsBack(up)))
    precision.full = ()


def take_precision_off(module: nn.Module) -> None:
    """Let a module compute as it is again."""
    precision = vars(module).pop(ATTRIBUTE, None)
    if precision is not None:
        precision.forget()
        for handle in precision.hooks:
            handle.remove()


def precision_of(module: nn.Module) -> Precision | None:
    """How a module computes, if not as it is."""
    found: Precision | None = vars(module).get(ATTRIBUTE)
    return found


class _CastInputs(Installed):
    """In front of a module in full precision: floating inputs in the dtype of the others become its own."""

    def __init__(self, around: torch.dtype | None, own: torch.dtype, forwards: Forwards) -> None:
        self.around, self.own, self.forwards = around, own, forwards
        self.casts_back = False

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        dtypes = [each.dtype for each in autograd.tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        # An embedding is given no floating input, and what is behind it has to find its own dtype as well.
        from_none = self.forwards.count > 0 and not any(dtype.is_floating_point for dtype in dtypes)
        self.casts_back = self.around in dtypes or from_none
        cast: tuple[tuple[Any, ...], dict[str, Any]] = autograd.tree_map_only(torch.Tensor, self._cast, (args, kwargs))
        return cast

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.own) if tensor.dtype == self.around else tensor


class _CastOutputsBack(Installed):
    """Behind it: what comes out is as what is around it, so that the modules behind it find their own dtype."""

    def __init__(self, inputs: _CastInputs) -> None:
        self.inputs = inputs

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return cast_all(output, self.inputs.around) if self.inputs.casts_back else output


def _full_precision(module: nn.Module, config: ReplicateConfig) -> list[nn.Module]:
    """The outermost modules that the options leave in their own dtype.

    Raises:
        ConfigError: a name is not one of the module's.
    """
    found: list[nn.Module] = []
    below: set[int] = set()
    for each in modules_named(module, config.full_precision_modules, "full_precision_modules").values():
        if id(each) not in below:
            found.append(each)
            below.update(map(id, each.modules()))
    return found


class _Places:
    """Where the tensors of a module stand."""

    def __init__(self, target: Selection, kept: set[int]) -> None:
        left_alone = {id(below) for each in target.left_alone for below in each.modules()}
        self.owners: list[tuple[tuple[str, ...], nn.Module]] = [
            (tuple(name.split(".")) if name else (), owner)
            for name, owner in target.module.named_modules()
            if id(owner) not in kept | left_alone
        ]

    def of(self, chosen: set[int], *, buffers: bool) -> tuple[tuple[CastSite, ...], ...]:
        """The places of floating tensors among the chosen, those of one tensor together."""
        found: dict[int, list[CastSite]] = {}
        for path, owner in self.owners:
            for name, tensor in _own(owner, buffers=buffers):
                if id(tensor) in chosen and tensor.is_floating_point() and _is_plain(tensor):
                    _check_not_renormalised(owner, path, name)
                    found.setdefault(id(tensor), []).append((path, owner if path else None, name))
        return tuple(map(tuple, found.values()))


def _own(owner: nn.Module, *, buffers: bool) -> Iterator[tuple[str, torch.Tensor]]:
    named: Callable[..., Iterable[tuple[str, torch.Tensor]]] = (
        owner.named_buffers if buffers else owner.named_parameters
    )
    yield from named(recurse=False, remove_duplicate=False)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Not one of a class that keeps its values in a form of its own, as frozen quantised weights do."""
    data = tensor.data
    return (
        type(data) is torch.Tensor or isinstance(data, nn.Parameter) or autograd.is_fake(tensor) or is_dtensor(tensor)
    )


def _check_not_renormalised(owner: nn.Module, path: tuple[str, ...], name: str) -> None:
    if name == "weight" and getattr(owner, "max_norm", None) is not None:
        raise ModuleError(
            f"{fully_qualified('.'.join((*path, name)))} is changed by its module's forward (max_norm), which mixed "
            "precision would lose: it is a cast there. Name the module in full_precision_modules."
        )


def _check_something_to_cast(
    target: Selection, parameters: tuple[tuple[CastSite, ...], ...], config: ReplicateConfig
) -> None:
    if parameters:
        return
    if any(each.is_floating_point() for each in (*target.trainable.values(), *target.frozen.values())):
        raise ConfigError(
            f"full_precision_modules leaves no parameter of {class_name(target.module)} to param_dtype="
            f"{config.param_dtype}. Leave out one of the two."
        )
    raise ModuleError(
        f"{class_name(target.module)} has no floating parameter that param_dtype={config.param_dtype} could cast. "
        "Leave the policy out."
    )


def _check_not_shared(target: Selection, dtype: torch.dtype) -> None:
    """A parameter of an ignored module that another one has too: half of its uses would be cast."""
    left_alone = {id(parameter) for each in target.left_alone for parameter in each.parameters()}
    inside = {id(below) for each in target.left_alone for below in each.modules()}
    for prefix, owner in target.module.named_modules() if left_alone else ():
        for name, parameter in () if id(owner) in inside else _own(owner, buffers=False):
            if id(parameter) in left_alone and parameter.is_floating_point() and parameter.dtype != dtype:
                raise ModuleError(
                    f"{fully_qualified(f'{prefix}.{name}')} is shared with an ignored module: it would be cast to "
                    f"{dtype} in one of them only. Ignore both, or none."
                )
