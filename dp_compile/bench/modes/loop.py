"""The training loop that modes share: where a model is, how a batch goes through it, and what its gradients are."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Final

import torch
import torch.distributed as dist
from torch import nn

from dp_compile._torch import distributed, dynamo
from dp_compile.bench.contract import Batch, Facts, Rule, Workload
from dp_compile.errors import ConfigError

SEED: Final = 0
"""Of the weights: the same in every mode and on every rank, before anybody broadcasts them."""


def place() -> torch.device:
    """This process's accelerator if the default process group works on it, else the CPU.

    gloo would take tensors of a GPU too, by way of the CPU; nobody who asks for gloo wants that timed.
    """
    kind = distributed.working_device(None) if dist.is_initialized() else "cpu"
    return torch.device(kind, torch.accelerator.current_device_index()) if kind != "cpu" else torch.device(kind)


def build(workload: Workload) -> nn.Module:
    """The workload's model with its weights, in its place, in training mode.

    Dynamo leaves a model with `torch.nn`'s recurrent layers to eager unless it is told otherwise. Here it is, in every
    mode, for the process: without it all compiled modes would be the eager one.
    """
    dynamo.configure_process({"allow_rnn": True})  # torch's recurrent layers are left out by default
    torch.manual_seed(SEED)
    return workload.build().to(place()).train()


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """By the workload's own names; take them before something wraps the model."""
    return {name: each for name, each in model.named_parameters() if each.requires_grad}


def backward(loss: torch.Tensor) -> None:
    """The plain one."""
    loss.backward()


class Loop:
    """Forward, backward, the workload's optimizer, gradients set to `None`.

    Args:
        workload: what is trained.
        parameters: what the optimizer moves, by the workload's own names.
        call: the model, or what a mode made of it.
        backward: how the gradients of a loss come into `.grad`, reduced.
    """

    def __init__(
        self,
        workload: Workload,
        parameters: Mapping[str, nn.Parameter],
        call: Callable[..., torch.Tensor],
        backward: Callable[[torch.Tensor], None] = backward,
    ) -> None:
        self.workload, self._parameters, self._call, self._reduced_backward = workload, parameters, call, backward
        self._place = place()
        self._backwards_s: list[float] = []
        self.optimizer = workload.rule.optimizer(parameters.values(), lr=workload.lr)

    def step(self, batch: Batch) -> None:
        self.forward_backward(batch)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def gradients(self, batch: Batch) -> Mapping[str, torch.Tensor]:
        self.forward_backward(batch)
        found = {name: each.grad.clone() for name, each in self._parameters.items() if each.grad is not None}
        self.optimizer.zero_grad(set_to_none=True)
        return found

    def facts(self) -> Facts:
        """On a GPU a backward is only enqueued, so that its time is not known."""
        known = self._backwards_s and self._place.type == "cpu"
        return Facts(backward_s=statistics.median(self._backwards_s) if known else None)

    def forward_backward(self, batch: Batch) -> None:
        """A batch as far as gradients; the backward is timed."""
        placed = tuple(each.to(self._place, non_blocking=True) for each in batch)
        loss = self.workload.loss(self._call, placed)
        start = time.perf_counter()
        self._reduced_backward(loss)
        self._backwards_s.append(time.perf_counter() - start)


@contextlib.contextmanager
def as_plain(optimizer: torch.optim.Optimizer, rule: Rule) -> Iterator[None]:
    """Inside, a step moves parameters by `PROBE_LR` times their gradient.

    SGD remembers afterwards what it did before; AdamW, this gradient.
    """
    before = [(group, dict(group)) for group in optimizer.param_groups]
    try:
        for group, _ in before:
            group |= rule.plain
        yield
    finally:
        for group, given in before:
            group |= given


def loop_around(
    workload: Workload,
    wrap: Callable[[nn.Module], Callable[..., torch.Tensor]],
    backward: Callable[[torch.Tensor], None] = backward,
) -> Loop:
    """The loop that trains what `wrap` makes of the workload's model. Names are those from before it is wrapped."""
    model = build(workload)
    parameters = trainable(model)
    return Loop(workload, parameters, wrap(model), backward)


def cap_mb_of(argument: str, mode: str) -> float:
    """A bucket cap in MiB from a mode's name, `5` in `ddp:5`.

    Raises:
        ConfigError: it is no number above zero.
    """
    try:
        cap_mb = float(argument)
    except ValueError:
        cap_mb = 0.0
    if not 0 < cap_mb < float("inf"):
        raise ConfigError(
            f"mode '{mode}:{argument}': what follows '{mode}:' must be a number of MiB > 0, as in '{mode}:5'."
        )
    return cap_mb
