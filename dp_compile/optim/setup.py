"""One optimizer of one module, and how it is to step: what the parts of an `Update` share."""

from __future__ import annotations

import operator
import weakref
from collections import Counter

import torch
from torch import nn
from torch.amp import GradScaler

from dp_compile.engine.replica import Replica
from dp_compile.optim.partial_steps import PartialSteps


class Setup:
    """Keeps neither the module nor the optimizer alive.

    Attributes:
        max_norm: as given to `in_backward`.
        given_scaler: the same; `scaler` is `None` where that is not enabled.
        steps: the optimizer's steps over some parameters.
        updated: the parameters that were updated since the last `step()`, by their places in the module.
        parameters: all of the optimizer, as they were last seen.
        covered: the places in the module of those that it has, in the optimizer's order; frozen ones too.
        alone: those of them of which no other parameter has the memory: else it matters which is updated first.
    """

    def __init__(
        self, replica: Replica, optimizer: torch.optim.Optimizer, max_norm: float | None, scaler: GradScaler | None
    ) -> None:
        self._replica, self._optimizer = weakref.ref(replica), weakref.ref(optimizer)
        self.max_norm, self.given_scaler = max_norm, scaler
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self.steps = PartialSteps()
        self.updated: set[int] = set()
        self.parameters: list[nn.Parameter] = []
        self.covered: tuple[int, ...] = ()
        self.alone: frozenset[int] = frozenset()

    @property
    def replica_if_alive(self) -> Replica | None:
        """`None` once the module is not replicated any more."""
        return self._replica()

    @property
    def is_alive(self) -> bool:
        return self._optimizer() is not None

    @property
    def replica(self) -> Replica:
        replica = self._replica()
        assert replica is not None
        return replica

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        optimizer = self._optimizer()
        assert optimizer is not None
        return optimizer

    @property
    def looks_at_all(self) -> bool:
        """Whether something is computed from all gradients before the first update."""
        return self.max_norm is not None or self.scaler is not None

    def indices(self) -> tuple[int, ...]:
        """The trainable parameters of the module that the optimizer has now."""
        parameters = self.replica.parameters
        now = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        if len(now) != len(self.parameters) or not all(map(operator.is_, now, self.parameters)):
            place = {id(parameter): index for index, parameter in enumerate(parameters)}
            self.parameters = now
            self.steps = PartialSteps()
            self.covered = tuple(place[id(each)] for each in now if id(each) in place)
            at = Counter(each.data_ptr() for each in now if each.numel())
            self.alone = frozenset(index for index in self.covered if at[parameters[index].data_ptr()] <= 1)
        return tuple(index for index in self.covered if parameters[index].requires_grad)

    def sizes(self) -> dict[int, int]:
        """Bytes of each parameter that it covers, and so of its gradient."""
        parameters, _ = self.replica.parameters, self.indices()
        return {index: parameters[index].numel() * parameters[index].element_size() for index in self.covered}
