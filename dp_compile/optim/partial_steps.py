"""Steps of an optimizer over some of its parameters, as if it had no others."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from torch import nn

from dp_compile._torch import autograd
from dp_compile.engine.gradients import dense_strides
from dp_compile.engine.replica import Replica
from dp_compile.errors import ConfigError, ReductionError, require

_ALIGNMENT: Final = 16
_NUMBERS: Final = (bool, int, float, str)
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
    require(isinstance(optimizer, torch.optim.Optimizer), "optimizer", "a torch.optim.Optimizer", kind)
    if kind in _REFUSED:
        raise ConfigError(f"{kind.__name__} cannot update in the backward: it {_REFUSED[kind]}. Use it as it is.")
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ConfigError(f"{kind.__name__}(differentiable=True) cannot update in the backward. Use it as it is.")


class PartialSteps:
    """Steps of one optimizer over some of its parameters."""

    def __init__(self) -> None:
        self._groups: list[tuple[int, int]] = []
        self._group_of: dict[int, int] = {}

    def _find_groups(self, groups: Sequence[dict[str, Any]]) -> None:
        """A group may have been added, also while an update is in flight."""
        now = [(id(group["params"]), len(group["params"])) for group in groups]
        if now != self._groups:
            self._groups = now
            self._group_of = {id(each): number for number, group in enumerate(groups) for each in group["params"]}

    @contextlib.contextmanager
    def only(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[nn.Parameter],
        given: Sequence[nn.Parameter] | None = None,
        *,
        options: Sequence[dict[str, Any]] = (),
    ) -> Iterator[None]:
        """Inside, an optimizer has these of its parameters only, in their own groups; afterwards they have no gradient.

        Args:
            parameters: of the optimizer.
            given: what it has in their place, as pieces of them.
            options: what `options_of` returned for the groups when the step was due; else they are as they are now.

        Raises:
            ReductionError: the step changed something of a group of which it had some parameters only.
        """
        groups, given = optimizer.param_groups, parameters if given is None else given
        self._find_groups(groups)
        now, chosen = [dict(group) for group in groups], [list[nn.Parameter]() for _ in groups]
        for parameter, each in zip(parameters, given, strict=True):
            chosen[self._group_of[id(parameter)]].append(each)
        try:
            for group, then in zip(groups, options, strict=False):  # groups that were added later have none
                group.update(then)
            for group, some in zip(groups, chosen, strict=True):
                group["params"] = some
            optimizer.param_groups = [group for group in groups if group["params"]]
            before = [dict(group) for group in groups]
            yield
            noted = [_changes(then, group) for then, group in zip(before, groups, strict=True)]
        finally:
            optimizer.param_groups = groups
            for group, then in zip(groups, now, strict=True):
                group.update(then)
            for each in given:
                each.grad = None
        for group, some, found in zip(groups, chosen, noted, strict=True):
            if found and len(some) < sum(each.requires_grad for each in group["params"]):
                raise ReductionError(
                    f"{type(optimizer).__name__}.step() changed {', '.join(map(repr, found))} of a parameter group, "
                    "but it updates the group in several steps here, of some parameters each. Use an optimizer that "
                    "keeps what it counts or estimates for each parameter, in its state."
                )
            group.update(found)


def _changes(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """What a step wrote to a group: an optimizer may count its steps there."""
    return {
        name: value
        for name, value in now.items()
        if name != "params" and (name not in before or _is_other(before[name], value))
    }


def _is_other(before: Any, now: Any) -> bool:
    return before is not now and not (type(before) is type(now) and type(now) in _NUMBERS and before == now)


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


def options_to_compare(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], ...]:
    """The options of each group, to be compared later; of a tensor, how often it was written to."""
    return tuple(
        {name: (value, _writes(value)) for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    )


def what_changed(before: Sequence[dict[str, Any]], optimizer: torch.optim.Optimizer) -> str:
    """The first option that is not what `options_to_compare` found, in words; what came later did not change."""
    for number, (then, group) in enumerate(zip(before, optimizer.param_groups, strict=False)):
        for name, (value, writes) in then.items():
            now = group.get(name)
            same = now is value or (not isinstance(now, torch.Tensor) and now == value)
            if not same or _writes(now) != writes:
                return f"{name} of parameter group {number} changed"
    return ""


def _writes(value: object) -> int:
    return autograd.version_of(value) if isinstance(value, torch.Tensor) else 0


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
