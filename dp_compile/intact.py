"""Is a module still the one that was replicated? Parameters may be replaced, unfrozen or moved afterwards.

A captured backward is looked at when its graph or the tensors in it are new (`hooks.check_gradients_have_hooks`,
`compilation`); every other backward before it runs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import nn

from dp_compile.errors import ReductionError
from dp_compile.replica import Replica


def check_intact(replica: Replica) -> None:
    """Compare the module with what was replicated.

    Raises:
        ReductionError: a parameter was replaced, unfrozen or moved.
    """
    if not replica.config.check_reductions:
        return
    check_not_moved(replica)
    refuse_unreduced(replica, [parameter for _, parameter in _strangers(replica)])
    refuse_unreduced(replica, [parameter for _, parameter in replica.frozen if parameter.requires_grad])


def check_not_moved(replica: Replica) -> None:
    """Compare dtypes and devices with those of the plan.

    Raises:
        ReductionError: a parameter has another dtype, or is on another type of device.
    """
    for gradient in replica.plan.gradients:
        if gradient.index == len(replica.parameters):
            continue
        parameter = replica.parameters[gradient.index]
        dtype, device = str(parameter.dtype).removeprefix("torch."), parameter.device.type
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
        ReductionError: one of them was frozen when the module was replicated, or replaced a parameter since.
    """
    present = set(map(id, accumulated))
    thawed = [name for name, parameter in replica.frozen if id(parameter) in present]
    if thawed:
        raise ReductionError(
            f"not reduced: {', '.join(thawed[:8])}. It was frozen (requires_grad=False) when replicate() was called, "
            "so it has no hook. Unfreeze before replicate()."
        )
    replaced = [name for name, parameter in _strangers(replica) if id(parameter) in present]
    if replaced:
        raise ReductionError(
            f"not reduced: {', '.join(replaced[:8])}. The parameter was replaced after replicate() was called, so the "
            "new one has no hook. Copy values into the old one (parameter.data.copy_()), or replace it before "
            "replicate()."
        )


def _strangers(replica: Replica) -> Iterator[tuple[str, nn.Parameter]]:
    """Trainable parameters that stand where others stood when the module was replicated."""
    known = {id(parameter) for parameter in (*replica.parameters, *(parameter for _, parameter in replica.frozen))}
    for place in replica.parameter_places:
        parameter = place.find()
        if parameter is not None and parameter.requires_grad and id(parameter) not in known:
            yield place.name, parameter
