"""One training as a value: how model, batches, loss and optimizer are made, and how the model is replicated."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from dp_compile.config import ReplicateConfig
from dp_compile.errors import UnsupportedModuleError, require
from dp_compile.replication.selection import BucketPolicy


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """With momentum. Its update is linear in the gradient, so that a wrong gradient is seen in the parameter."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A training that tests look at. It is pickled, so its functions have to be defined at the top of a module.

    Args:
        make_model: called after torch's seed is set to `seed`.
        make_batch: the batch of a rank and a step, by position: values should differ by both, shapes need not.
        loss_fn: `loss_fn(model, batch)` is the scalar loss.
        make_optimizer: of the parameters; without it SGD with a learning rate of 0.1 and momentum 0.9.
        config: of `replicate`, as is the following one. `backend` is not read: each check has an argument for it.
        bucket_policy: which modules share buckets.
    """

    make_model: Callable[[], nn.Module]
    make_batch: Callable[[int, int], Any]
    loss_fn: Callable[[nn.Module, Any], torch.Tensor]
    make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = sgd
    config: ReplicateConfig = field(default_factory=ReplicateConfig)
    bucket_policy: BucketPolicy | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("make_model", "make_batch", "loss_fn", "make_optimizer"):
            value = getattr(self, name)
            is_function = callable(value) and not (name == "make_model" and isinstance(value, nn.Module))
            require(is_function, f"Training.{name}", "a function, which each check calls", type(value))

    @property
    def options(self) -> dict[str, Any]:
        return {"bucket_policy": self.bucket_policy}

    def model(self) -> nn.Module:
        torch.manual_seed(self.seed)
        return self.make_model()

    def loss(self, called: Any, batch: Any) -> torch.Tensor:
        loss = self.loss_fn(called, batch)
        if isinstance(loss, torch.Tensor) and loss.dim() == 0 and loss.requires_grad:
            return loss
        got = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise UnsupportedModuleError(f"loss_fn must return a scalar that requires a gradient, got {got}.")
