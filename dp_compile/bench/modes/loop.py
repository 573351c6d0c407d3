"""The training loop that modes share."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import nn

from dp_compile._torch import distributed
from dp_compile.bench.contract import PROBE_LR, SEED, Batch, Trainer, Workload


def device() -> torch.device:
    """This process's accelerator if the default process group works on it, else the CPU.

    gloo takes tensors of a GPU too, by way of the CPU; a suite that asks for gloo does not want that timed.
    """
    kind = distributed.working_device(None) if dist.is_initialized() else "cpu"
    return torch.device(kind, torch.accelerator.current_device_index()) if kind != "cpu" else torch.device(kind)


def build(workload: Workload) -> nn.Module:
    """The workload's model with the same weights in every mode and rank, on the device, in training mode."""
    torch.manual_seed(SEED)
    return workload.build().to(device()).train()


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """By name."""
    return {name: each for name, each in model.named_parameters() if each.requires_grad}


class Loop(Trainer):
    """Forward, backward, the workload's optimizer, gradients set to `None`.

    Args:
        wrap: makes of the workload's model what the forward calls.
        backward: computes the reduced gradients of a loss in `.grad`.
    """

    def __init__(
        self,
        workload: Workload,
        wrap: Callable[[nn.Module], Callable[..., torch.Tensor]],
        backward: Callable[[torch.Tensor], None] = torch.Tensor.backward,
    ) -> None:
        self.workload, self.model, self._device = workload, build(workload), device()
        self._call, self._backward = wrap(self.model), backward
        self.optimizer = workload.rule.optimizer(trainable(self.model).values(), lr=workload.lr)

    def step(self, batch: Batch) -> None:
        placed = tuple(each.to(self._device, non_blocking=True) for each in batch)
        self._backward(self.workload.loss(self._call, placed))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def gradients(self, batch: Batch) -> Mapping[str, torch.Tensor]:
        """From the parameters before and after one plain step, which is taken back: some modes keep no gradients."""
        before = {name: each.detach().clone() for name, each in trainable(self.model).items()}
        groups = [(group, dict(group)) for group in self.optimizer.param_groups]
        for group, _ in groups:
            group |= self.workload.rule.plain
        self.step(batch)
        for group, given in groups:
            group |= given
        after = {name: each.detach() for name, each in self.model.named_parameters()}
        found = {name: (each - after[name]) / PROBE_LR for name, each in before.items()}
        for name, each in before.items():
            after[name].copy_(each)
        self.optimizer.state.clear()
        return found
