"""A parameter averager, and optimizers that call one: post-local SGD, and outer SGD steps with averaged changes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.model_averaging import averagers

from dp_compile.averaging.exchange import Exchange, note_equal, parameters_in
from dp_compile.engine.guards import fingerprints
from dp_compile.errors import require, require_integer

with warnings.catch_warnings():  # its module uses the TorchScript that torch itself deprecates
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch.distributed.optim import PostLocalSGDOptimizer as TorchOptimizer


class PeriodicModelAverager(averagers.PeriodicModelAverager):
    """Averages parameters in every `period`-th call of `average_parameters`, from call number `warmup_steps` on.

    Arguments `period`, `warmup_steps=0` and `process_group=None` are torch's; the first call has number 0. Unlike
    torch's averager, it averages every parameter, in place, in its own dtype (`docs/algorithms.md`).
    """

    @cached_property
    def _exchange(self) -> Exchange:
        # Made on first use: torch's constructor is not overridden, so that its warnings name the user's line.
        schedule = {"averager": type(self).__name__, "period": self.period, "warmup_steps": self.warmup_steps}
        return Exchange(self.process_group, schedule)

    def average_parameters(self, params: Iterable[torch.Tensor] | Iterable[dict[str, Any]]) -> None:
        """Count a step, and average if an average is due. Every rank calls this after each optimizer step.

        Args:
            params: parameters or parameter groups. Each parameter is averaged once, in place, even without a gradient.

        Raises:
            DesyncError: on every rank, if parameters, steps or schedules differ, or if a rank misses the first call.
            CommunicationError: in a later call, a rank has not called within the group's time-out.
            ConfigError: `params` has other types, has no parameter, or has one that cannot be averaged.
        """
        is_due = self.step >= self.warmup_steps and (self.step - self.warmup_steps) % self.period == 0
        if is_due or not self._exchange.has_met:
            parameters = parameters_in(params)
            if not self._exchange.has_met:  # the first call compares what all ranks were given, due or not
                self._exchange.meet(parameters, self.step)
            if is_due:
                self._exchange.average(parameters, self.step)
                note_equal(parameters, self.process_group)
        self.step += 1


class PostLocalSGDOptimizer(TorchOptimizer):
    """Steps a local optimizer, then calls an averager: arXiv 1808.07217.

    Adds to torch's class: `step` takes a closure, and `param_groups` and `defaults` are always the local optimizer's,
    also after `load_state_dict`, so learning-rate schedulers keep working.

    `optim`: the local optimizer. `averager`: one of this package, or torch's.
    """

    _step_supports_amp_scaling = True
    """Makes torch's `GradScaler` call `step` even if gradients overflowed. Otherwise only that rank would skip the
    averaging, and ranks would average after different steps (pytorch#76282)."""

    def __init__(self, optim: torch.optim.Optimizer, averager: averagers.ModelAverager) -> None:
        self.optim, self.averager = optim, averager

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optim.param_groups

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.optim.defaults

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Run one step of the local optimizer, call the averager, and return the loss of `closure`.

        Under a `GradScaler`, a rank whose gradients are not finite skips the local step, but calls the averager."""
        # `GradScaler.step` sets both. Unscale as it does for other optimizers; no `grad_scale`: already unscaled.
        found_inf: torch.Tensor | None = getattr(self, "found_inf", None)
        scale: torch.Tensor | None = getattr(self, "grad_scale", None)
        loss = None
        if found_inf is None:
            loss = self.optim.step() if closure is None else self.optim.step(closure)
        elif not bool(found_inf):
            for parameter in parameters_in(self.param_groups) if scale is not None else ():
                if parameter.grad is not None and scale is not None:
                    parameter.grad.div_(scale.to(parameter.grad.device))
            self.optim.step()
        self.averager.average_parameters(self.param_groups)
        return loss


class OuterOptimizer(PostLocalSGDOptimizer):
    """A local optimizer and, each `every` steps, an outer SGD step with the average parameter change of all ranks.

    DiLoCo, arXiv 2311.08105. `outer` are the parameters after the last outer step, equal on all ranks:

        delta = mean over ranks of (outer - parameters)
        velocity = momentum * velocity + delta
        outer -= outer_lr * (delta + momentum * velocity if nesterov else velocity)
        parameters = outer                      # with outer_lr=1 and momentum=0: the average of the parameters

    Args:
        optim: the local optimizer. Its parameters must be equal on all ranks; the first step compares them.
        every: local steps between averagings, >= 1.
        outer_lr: learning rate of the outer SGD, > 0.
        momentum: momentum of the outer SGD, >= 0; 0 needs no memory for velocities.
        nesterov: use Nesterov momentum.
        process_group: the ranks whose changes are averaged; `None`: the default group.

    Raises:
        ConfigError: an option is not allowed, or a parameter cannot be averaged.
    """

    def __init__(
        self,
        optim: torch.optim.Optimizer,
        every: int,
        outer_lr: float = 0.7,
        momentum: float = 0.9,
        nesterov: bool = True,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        require_integer("'every'", every, 1)
        require(outer_lr > 0 and momentum >= 0, "outer_lr and momentum", "> 0 and >= 0", (outer_lr, momentum))
        options = {"every": every, "outer_lr": outer_lr, "momentum": momentum, "nesterov": nesterov}
        self._outer = _OuterStep(process_group, parameters_in(optim.param_groups), **options)
        super().__init__(optim, self._outer)

    def state_dict(self) -> dict[str, Any]:
        """Return the local optimizer's state, which differs by rank, and `step` and `outer`, equal on all ranks."""
        local: dict[str, Any] = super().state_dict()  # type: ignore[no-untyped-call]
        return local | {"outer": {"parameters": self._outer.outer, "velocities": self._outer.velocities}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a `state_dict()`. Without `outer`, the outer optimizer starts from the current parameters.

        Raises:
            ConfigError: `outer` does not match the parameters; nothing was loaded.
        """
        outer, local = state_dict.get("outer"), {key: value for key, value in state_dict.items() if key != "outer"}
        if outer is not None:
            self._outer.check(parameters_in(self.param_groups), outer)
        super().load_state_dict(local)  # type: ignore[no-untyped-call]
        self._outer.load(parameters_in(self.param_groups), outer)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters to the local and the outer optimizer. Every rank calls this, between the same two steps."""
        super().add_param_group(param_group)  # type: ignore[no-untyped-call]
        self._outer.add(parameters_in(self.param_groups))


class _OuterStep(averagers.ModelAverager):
    """The SGD of an `OuterOptimizer`, as an averager. `outer` and `velocities` are in the order of the parameters."""

    def __init__(
        self, process_group: dist.ProcessGroup | None, parameters: Sequence[torch.Tensor], **options: Any
    ) -> None:
        super().__init__(process_group)
        self._options = options
        self.every, self.outer_lr = options["every"], options["outer_lr"]
        self.momentum, self.nesterov = options["momentum"], options["nesterov"]
        self.outer: list[torch.Tensor] = []
        self.velocities: list[torch.Tensor] = []
        self.add(parameters)

    @cached_property
    def _exchange(self) -> Exchange:
        return Exchange(self.process_group, self._options)

    def add(self, parameters: Sequence[torch.Tensor]) -> None:
        """Append to `outer` the current values of the `parameters` that it does not have yet."""
        added = [parameter.detach().clone() for parameter in parameters[len(self.outer) :]]
        self.outer += added
        self.velocities += [torch.zeros_like(each) for each in added] if self.momentum else []
        self.__dict__.pop("_exchange", None)  # the next step compares ranks again

    def check(self, parameters: Sequence[torch.Tensor], state: dict[str, Any]) -> None:
        """Raise a `ConfigError` if the number or the shapes of tensors in a state do not match `parameters`."""
        for name, ours in (("parameters", parameters), ("velocities", parameters if self.momentum else ())):
            theirs = state[name]
            shapes = ([None if each is None else list(each.shape) for each in two] for two in zip_longest(ours, theirs))
            wrong = [f"tensor {at}: {there}, here {here}" for at, (here, there) in enumerate(shapes) if here != there]
            require(not wrong, f"outer {name} of state_dict", "of the same shapes as this optimizer's", wrong[:1])

    def load(self, parameters: Sequence[torch.Tensor], state: dict[str, Any] | None) -> None:
        self.outer, self.velocities = [], []
        self.add(parameters)
        if state is None:
            return
        ours, theirs = [*self.outer, *self.velocities], [*state["parameters"], *state["velocities"]]
        for tensor, value in zip(ours, theirs, strict=True):
            tensor.copy_(value)

    @torch.no_grad()
    def average_parameters(self, params: Any) -> None:
        given = parameters_in(params)
        parameters = [parameter.detach() for parameter in given]
        if not self._exchange.has_met:
            # Only changes are averaged, so an initial difference between ranks would persist.
            start = [int(each) for each in fingerprints(self.outer)]
            self._exchange.meet(parameters, self.step, outer_parameters=start)
        if (self.step + 1) % self.every == 0:
            deltas = [outer - parameter for outer, parameter in zip(self.outer, parameters, strict=True)]
            self._exchange.average(deltas, self.step)
            for place, (outer, parameter, delta) in enumerate(zip(self.outer, parameters, deltas, strict=True)):
                if self.momentum:
                    velocity = self.velocities[place].mul_(self.momentum).add_(delta)
                    delta = delta.add_(velocity, alpha=self.momentum) if self.nesterov else velocity
                parameter.copy_(outer.add_(delta, alpha=-self.outer_lr))
            note_equal(given, self.process_group)
        self.step += 1
