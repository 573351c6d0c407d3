"""Is a module still the one that was replicated? Parameters may be replaced, added, unfrozen or moved later.

A captured backward is looked at when its graph or the tensors in it are new (`hooks.check_gradients_have_hooks`,
`compilation`); every other backward before it runs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Final

from torch import nn

from dp_compile.engine.module_names import fully_qualified
from dp_compile.engine.replica import Replica, owners
from dp_compile.errors import ReductionError

_FROZEN: Final = (
    "It was frozen (requires_grad=False) when replicate() was called, so it has no hook. Unfreeze before replicate()."
)
_REPLACED: Final = (
    "The parameter was replaced after replicate() was called, so the new one has no hook. Copy values into the old one "
    "(parameter.data.copy_()), or replace it before replicate()."
)
_ADDED: Final = (
    "The parameter was added after replicate() was called, so it has no hook. Add it before replicate(), or call "
    "unreplicate() and replicate() again."
)


def check_intact(replica: Replica) -> None:
    """Compare the module with what was replicated.

    Raises:
        ReductionError: a parameter was replaced, added, unfrozen or moved.
    """
    if not replica.config.check_reductions:
        return
    check_not_moved(replica)
    _refuse(_FROZEN, [name for name, parameter in replica.frozen if parameter.requires_grad])
    _refuse(_REPLACED, [name for name, _ in _strangers(replica)])
    _refuse(_ADDED, [name for name, _ in _added(replica)])


def check_not_moved(replica: Replica) -> None:
    """Compare dtypes and devices with those of the plan.

    Raises:
        ReductionError: a parameter has another dtype, or is on another type of device.
    """
    for gradient in replica.plan.gradients:
        if gradient.index == len(replica.parameters):
            continue
        parameter = replica.parameters[gradient.index]
        dtype, device = str(parameter.dtype.to_real()).removeprefix("torch."), parameter.device.type
        if (dtype, device) != (gradient.key.dtype, gradient.key.device):
            change = (
                f"{gradient.name} is on {device}, it was on {gradient.key.device}"
                if device != gradient.key.device
                else f"{gradient.name} is {dtype}, it was {gradient.key.dtype}"
            )
            raise ReductionError(
                f"{change} when replicate() was called. Move or convert the module before replicate(), or call "
                "unreplicate(), change it, and call replicate() again."
            )


def refuse_unreduced(replica: Replica, accumulated: Collection[object]) -> None:
    """Refuse gradients of the module that no hook reduces.

    Args:
        accumulated: tensors that get a gradient and have no hook of the replica.

    Raises:
        ReductionError: one of them was frozen when the module was replicated, or replaced a parameter since, or was
            added since.
    """
    present = set(map(id, accumulated))
    _refuse(_FROZEN, [name for name, parameter in replica.frozen if id(parameter) in present])
    _refuse(_REPLACED, [name for name, parameter in _strangers(replica) if id(parameter) in present])
    _refuse(_ADDED, [name for name, parameter in _added(replica) if id(parameter) in present])


def _refuse(why: str, names: Sequence[str]) -> None:
    if names:
        raise ReductionError(f"not reduced: {', '.join(names[:8])}. {why}")


def _strangers(replica: Replica) -> Iterator[tuple[str, nn.Parameter]]:
    """Trainable parameters that stand where others stood when the module was replicated."""
    known = _known(replica)
    for place in replica.parameter_places:
        parameter = place.find()
        if parameter is not None and parameter.requires_grad and id(parameter) not in known:
            yield place.name, parameter


def _added(replica: Replica) -> Iterator[tuple[str, nn.Parameter]]:
    """Trainable parameters under new names, as adapters bring them. Not those that somebody else keeps in step."""
    outline, known = replica.outline, _known(replica)
    root = outline.root()
    left_alone = {id(module) for each in outline.left_alone for module in each.modules()}
    for prefix, owner in () if root is None else root.named_modules():
        for attribute, parameter in () if id(owner) in left_alone else owner.named_parameters(recurse=False):
            name = fully_qualified(f"{prefix}.{attribute}" if prefix else attribute)
            is_new = name not in outline.names and id(parameter) not in known
            if is_new and parameter.requires_grad and owners.find(parameter) is None:
                yield name, parameter


def _known(replica: Replica) -> set[int]:
    return {id(parameter) for parameter in (*replica.parameters, *(parameter for _, parameter in replica.frozen))}
