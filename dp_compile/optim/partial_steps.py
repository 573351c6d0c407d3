"""Steps of an optimizer over some of its parameters, as if it had no others."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, Final

import torch
from torch import nn

from dp_compile.engine.gradients import dense_strides
from dp_compile.engine.replica import Replica
from dp_compile.errors import ConfigError, ReductionError

_ALIGNMENT: Final = 16
_REFUSED: Final = {
    torch.optim.LBFGS: "evaluates the model again in its step()",
    torch.optim.SparseAdam: "needs sparse gradients, which are not reduced",
}


def check_kind(optimizer: Any) -> None:
    """Whether an optimizer can step in the backward at all.

    Raises:
        ConfigError: it cannot, or is none.
    """
    kind = type(optimizer)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"optimizer must be a torch.optim.Optimizer, got {kind.__name__}.")
    if kind in _REFUSED:
        raise ConfigError(f"{kind.__name__} cannot update in the backward: it {_REFUSED[kind]}. Use it as it is.")
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ConfigError(f"{kind.__name__}(differentiable=True) cannot update in the backward. Use it as it is.")


class PartialSteps:
    """Of one optimizer, for several choices of parameters."""

    def __init__(self) -> None:
        self._chosen: dict[Hashable, list[list[nn.Parameter]]] = {}
        """For each choice the parameters of each group."""

    def forget(self) -> None:
        """The optimizer's groups hold other parameters now."""
        self._chosen = {}

    @contextlib.contextmanager
    def only(
        self,
        optimizer: torch.optim.Optimizer,
        choice: Hashable,
        parameters: Sequence[nn.Parameter],
        *,
        keep_gradients: bool = False,
        options: Sequence[dict[str, Any]] = (),
    ) -> Iterator[None]:
        """Inside, an optimizer has these parameters only, in their own groups; afterwards they have no gradient,
        unless that is kept.

        Args:
            choice: the same for the same parameters.
            options: what `options_of` said of the groups when the step was due; else they are as they are now.
        """
        groups = optimizer.param_groups
        before = [(group, dict(group)) for group in groups]
        if choice not in self._chosen:
            chosen = {id(parameter) for parameter in parameters}
            self._chosen[choice] = [[each for each in group["params"] if id(each) in chosen] for group in groups]
        try:
            for group, then in zip(groups, options, strict=False):  # later groups came later
                group.update(then)
            for group, some in zip(groups, self._chosen[choice], strict=True):
                group["params"] = some
            optimizer.param_groups = [group for group in groups if group["params"]]
            yield
        finally:
            optimizer.param_groups = groups
            for group, now in before:
                group.update(now)
            for parameter in () if keep_gradients else parameters:
                parameter.grad = None


def options_of(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], ...]:
    """The options of each group as they are: a learning rate in a tensor too, which a scheduler writes to."""
    return tuple(
        {
            name: value.clone() if isinstance(value, torch.Tensor) else value
            for name, value in group.items()
            if name != "params"
        }
        for group in optimizer.param_groups
    )


def clip(parameters: Sequence[nn.Parameter], max_norm: float) -> torch.Tensor:
    """One norm, whichever way the gradients came: a sum's order may depend on how they lie in memory."""
    for parameter in parameters:
        grad = parameter.grad
        if grad is not None and (grad.stride() != dense_strides(parameter) or grad.data_ptr() % _ALIGNMENT):
            parameter.grad = torch.empty_strided(
                grad.shape, dense_strides(parameter), dtype=grad.dtype, device=grad.device
            ).copy_(grad)
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm)


def check_in_place(replica: Replica, indices: Sequence[int], parameters: Sequence[torch.Tensor]) -> None:
    """Compare the memory of parameters with what compiled code has for them.

    Raises:
        ReductionError: it is another one.
    """
    for index, parameter in zip(indices, parameters, strict=True):
        if replica.parameters[index].data_ptr() != parameter.data_ptr():
            raise ReductionError(
                f"the compiler has a copy of {replica.name_list(indices)}, which it would write back over the "
                "update. Use the optimizer without in_backward(), or an uncompiled backward."
            )
