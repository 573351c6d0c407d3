"""One optimizer of one module, and optimizer steps over some of the parameters: shared by the parts of an `Update`."""

from __future__ import annotations

import contextlib
import itertools
import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
from torch import nn
from torch.amp import GradScaler

from dp_compile._torch import autograd
from dp_compile.errors import ConfigError, ReductionError, require
from dp_compile.replica.replica import Replica

_REFUSED: Final = {
    torch.optim.LBFGS: "evaluates the model again in its step()",
    torch.optim.SparseAdam: "needs sparse gradients, with which no backward is captured",
}


def check_kind(optimizer: Any) -> None:
    """Raise if `optimizer` is not an optimizer, or cannot step in any backward."""
    kind, name = type(optimizer), type(optimizer).__name__
    require(isinstance(optimizer, torch.optim.Optimizer), "optimizer", "a torch.optim.Optimizer", kind)
    if why := next((why for refused, why in _REFUSED.items() if issubclass(kind, refused)), ""):
        raise ConfigError(f"{name} cannot update in the backward: it {why}. Use another, or none in the backward.")
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ConfigError(f"{name}(differentiable=True) cannot update in the backward. Pass differentiable=False.")


class Setup:
    """Weak references to a module and its optimizer. `find_replica()` is `None` if the module is not replicated.

    `given_scaler`: as passed to `in_backward`. `scaler`: the same, but `None` if disabled.
    `updated`: indices in the module of the parameters that were updated since the last `step()`.
    `failed`: why parameters are partially updated; empty if they are not.
    `covered`: indices in the module of the optimizer's parameters, in the optimizer's order, frozen ones included.
    """

    def __init__(
        self, replica: Replica, optimizer: torch.optim.Optimizer, max_norm: float | None, scaler: GradScaler | None
    ) -> None:
        self.find_replica, self.find_optimizer = weakref.ref(replica), weakref.ref(optimizer)
        self.max_norm, self.given_scaler = max_norm, scaler
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self.place = {id(parameter): index for index, parameter in enumerate(replica.parameters)}
        self.updated: set[int] = set()
        self.failed = ""
        self.covered: tuple[int, ...] = ()
        self._parameters: list[nn.Parameter] = []
        self._group_of: dict[int, int] = {}

    @property
    def replica(self) -> Replica:
        replica = self.find_replica()
        assert replica is not None
        return replica

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        optimizer = self.find_optimizer()
        assert optimizer is not None
        return optimizer

    @property
    def looks_at_all(self) -> bool:
        """Whether clipping or a scaler needs all gradients of a backward before the first update."""
        return self.max_norm is not None or self.scaler is not None

    def indices(self) -> tuple[int, ...]:
        """Return the indices of the module's trainable parameters that the optimizer has now."""
        parameters, groups = self.replica.parameters, self.optimizer.param_groups
        now = [parameter for group in groups for parameter in group["params"]]
        if len(now) != len(self._parameters) or not all(map(operator.is_, now, self._parameters)):
            self._parameters = now
            self._group_of = {id(each): number for number, group in enumerate(groups) for each in group["params"]}
            self.covered = tuple(self.place[id(each)] for each in now if id(each) in self.place)
        return tuple(index for index in self.covered if parameters[index].requires_grad)

    @contextlib.contextmanager
    def only(
        self,
        parameters: Sequence[nn.Parameter],
        gradients: Sequence[torch.Tensor | None],
        given: Sequence[nn.Parameter] | None = None,
        *,
        options: Sequence[dict[str, Any]] = (),
    ) -> Iterator[torch.optim.Optimizer]:
        """Restrict the optimizer to `parameters`, in their groups, with `gradients`; set `.grad` to `None` on exit.

        `given`: tensors that replace the parameters, such as pieces. `options`: the groups' options for this step,
        from `options_of`; by default the current options.
        """
        optimizer, given = self.optimizer, parameters if given is None else given
        groups = optimizer.param_groups
        chosen = [list[nn.Parameter]() for _ in groups]
        for parameter, each in zip(parameters, given, strict=True):
            chosen[self._group_of[id(parameter)]].append(each)
        # Groups added later have no entry in `options`.
        narrowed: Iterator[tuple[Any, ...]] = itertools.zip_longest(groups, options, chosen, fillvalue={})
        optimizer.param_groups = [{**group, **then, "params": some} for group, then, some in narrowed if some]
        try:
            for each, gradient in zip(given, gradients, strict=True):
                each.grad = gradient
            yield optimizer
        finally:
            optimizer.param_groups = groups
            for each in given:
                each.grad = None


def options_of(optimizer: torch.optim.Optimizer, of: Callable[[Any], Any]) -> tuple[dict[str, Any], ...]:
    """Return the options of each parameter group, with `of` applied to each value: `copied`, or `noted` to compare."""
    groups = optimizer.param_groups
    return tuple({name: of(value) for name, value in group.items() if name != "params"} for group in groups)


def copied(value: Any) -> Any:
    """Return a tensor as a clone, because a scheduler writes to a learning rate in place; any other value as it is."""
    return value.clone() if isinstance(value, torch.Tensor) else value


def noted(value: Any) -> Any:
    """Return a tensor's identity and version counter; any other value as it is."""
    return (id(value), autograd.version_of(value)) if isinstance(value, torch.Tensor) else value


def what_changed(before: Sequence[dict[str, Any]], optimizer: torch.optim.Optimizer) -> str:
    """Describe the first option that changed since `before`; else return "". New groups and options are ignored."""
    for number, (then, now) in enumerate(zip(before, options_of(optimizer, noted), strict=False)):
        for name in then:
            if name not in now or then[name] != now[name]:
                return f"{name} of parameter group {number} changed"
    return ""


def check_in_place(replica: Replica, indices: Sequence[int], parameters: Sequence[torch.Tensor]) -> None:
    """Raise if compiled code passes a copy of a parameter instead of the parameter's memory."""
    for index, parameter in zip(indices, parameters, strict=True):
        if replica.parameters[index].data_ptr() != parameter.data_ptr():
            raise ReductionError(
                f"the compiler has a copy of {replica.name_list(indices)}, which it would write back over the "
                "update. Use the optimizer without in_backward(), or an uncompiled backward."
            )
