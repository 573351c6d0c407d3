"""One optimizer of one module, and its steps over some of its parameters: what the parts of an `Update` share."""

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
    torch.optim.SparseAdam: "needs sparse gradients, which are not reduced",
}


def check_kind(optimizer: Any) -> None:
    """Refuse what is no optimizer, or cannot step in the backward at all."""
    kind = type(optimizer)
    require(isinstance(optimizer, torch.optim.Optimizer), "optimizer", "a torch.optim.Optimizer", kind)
    if kind in _REFUSED:
        raise ConfigError(f"{kind.__name__} cannot update in the backward: it {_REFUSED[kind]}. Use it as it is.")
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ConfigError(f"{kind.__name__}(differentiable=True) cannot update in the backward. Use it as it is.")


class Setup:
    """Keeps neither the module nor the optimizer alive; without `find_replica()` it is not replicated any more.

    `given_scaler`: as given to `in_backward`; `scaler` is `None` where that is not enabled.
    `updated`: the parameters that were updated since the last `step()`, by their places in the module.
    `failed`: why parameters are updated in part; empty if they are not.
    `covered`: the places in the module of those that the optimizer has, in its order; frozen ones too.
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
        """Whether something is computed from all gradients before the first update."""
        return self.max_norm is not None or self.scaler is not None

    def indices(self) -> tuple[int, ...]:
        """The trainable parameters of the module that the optimizer has now."""
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
        """Inside, the optimizer has these parameters only, each in its own group and with its gradient; afterwards they
        have none.

        `given`: what it has in their place, as pieces of them. `options`: what `options_of` returned for the groups
        when the step was due; else they are as they are now.
        """
        optimizer, given = self.optimizer, parameters if given is None else given
        groups = optimizer.param_groups
        chosen = [list[nn.Parameter]() for _ in groups]
        for parameter, each in zip(parameters, given, strict=True):
            chosen[self._group_of[id(parameter)]].append(each)
        # Groups that were added later have no options.
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
    """The options of each group, each as `of` gives it: `copied`, or `noted` to be compared later."""
    groups = optimizer.param_groups
    return tuple({name: of(value) for name, value in group.items() if name != "params"} for group in groups)


def copied(value: Any) -> Any:
    """A learning rate may be in a tensor, which a scheduler writes to."""
    return value.clone() if isinstance(value, torch.Tensor) else value


def noted(value: Any) -> Any:
    """Of a tensor, which one it is and how often it was written to."""
    return (id(value), autograd.version_of(value)) if isinstance(value, torch.Tensor) else value


def what_changed(before: Sequence[dict[str, Any]], optimizer: torch.optim.Optimizer) -> str:
    """The first option that is not what it was when `noted`, in words; what came later did not change."""
    for number, (then, now) in enumerate(zip(before, options_of(optimizer, noted), strict=False)):
        for name in then:
            if name not in now or then[name] != now[name]:
                return f"{name} of parameter group {number} changed"
    return ""


def check_in_place(replica: Replica, indices: Sequence[int], parameters: Sequence[torch.Tensor]) -> None:
    """Refuse parameters whose memory is not the one that compiled code has for them."""
    for index, parameter in zip(indices, parameters, strict=True):
        if replica.parameters[index].data_ptr() != parameter.data_ptr():
            raise ReductionError(
                f"the compiler has a copy of {replica.name_list(indices)}, which it would write back over the "
                "update. Use the optimizer without in_backward(), or an uncompiled backward."
            )
