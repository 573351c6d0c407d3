"""What a test suite says of a training, once: how model, batches, loss and optimizer are made, how it is replicated."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dp_compile.config import ReplicateConfig
from dp_compile.errors import ConfigError
from dp_compile.insight.rehearsal import LossFn, default_loss
from dp_compile.modules.units import BucketPolicy
from dp_compile.passes.result import GraphPass
from dp_compile.plan.buckets import BucketPlan

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """SGD with momentum: parameters move by what the gradients are, not by their signs as with Adam."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A training that tests look at. A frozen value: `dataclasses.replace` makes another one.

    `assert_same_training` pickles it, so its functions have to stand in a module, and so does the class of a pass.

    Args:
        make_model: called after torch's seed is set to `seed`.
        make_batch: the batch of a rank and a step, by position: values should differ by both, shapes need not.
        loss_fn: `loss_fn(model, batch)` is the scalar loss; without it as for `rehearsal.default_loss`.
        make_optimizer: of the parameters; without it SGD with a learning rate of 0.1 and momentum 0.9.
        config: of `replicate`, and so are the following three. `backend` is not read: each check is given its own.
        bucket_policy: which modules are units of buckets.
        plan: a plan, or the path of a plan file.
        passes: passes over the captured backward instead of the default ones.
        seed: of torch's random numbers.
        make_mesh: for a model that is spread over ranks, as by tensor parallel: the slice of its mesh to replicate
            over, made before the model. For `backward_of` only.

    Raises:
        ConfigError: something that should be a function is none, or `config` no `ReplicateConfig`.
    """

    make_model: Callable[[], nn.Module]
    make_batch: Callable[[int, int], Any]
    loss_fn: LossFn = default_loss
    make_optimizer: MakeOptimizer = sgd
    config: ReplicateConfig = field(default_factory=ReplicateConfig)
    bucket_policy: BucketPolicy | None = None
    plan: BucketPlan | str | os.PathLike[str] | None = None
    passes: tuple[GraphPass, ...] | None = None
    seed: int = 0
    make_mesh: Callable[[], DeviceMesh] | None = None

    def __post_init__(self) -> None:
        optional = () if self.make_mesh is None else ("make_mesh",)
        for name in ("make_model", "make_batch", "loss_fn", "make_optimizer", *optional):
            value = getattr(self, name)
            if not callable(value) or (name == "make_model" and isinstance(value, nn.Module)):
                hint = " A module is not enough: each check makes its own." if isinstance(value, nn.Module) else ""
                raise ConfigError(f"Training.{name} must be a function, got {type(value).__name__}.{hint}")
        if not isinstance(self.config, ReplicateConfig):
            raise ConfigError(f"Training.config must be a ReplicateConfig, got {type(self.config).__name__}.")
        if self.passes is not None and not isinstance(self.passes, tuple):
            raise ConfigError(f"Training.passes must be a tuple of passes, or None, got {type(self.passes).__name__}.")

    @property
    def wishes(self) -> dict[str, Any]:
        """What `replicate` takes beside the config."""
        return {"bucket_policy": self.bucket_policy, "plan": self.plan, "passes": self.passes}

    def fields(self) -> dict[str, Any]:
        """Its parts by name."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def model(self) -> nn.Module:
        """A new model with the values that the seed gives it.

        Raises:
            ConfigError: `make_model` returns no module.
        """
        torch.manual_seed(self.seed)
        model = self.make_model()
        if not isinstance(model, nn.Module):
            raise ConfigError(f"Training.make_model must return an nn.Module, got {type(model).__name__}.")
        return model
