"""What the parts of the benchmark know of each other: a workload, and a mode that trains it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

Batch = tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class Workload:
    """A model with real shapes and what it is trained on.

    Args:
        name: as in suite files.
        build: makes the model on CPU, in float32; the same weights after the same `torch.manual_seed`.
        batch: the batch of a rank, from a generator that the caller has seeded for that rank.
        loss: calls the model, or what a mode made of it, on a batch; a scalar.
        lr: of SGD with momentum 0.9, the optimizer of every mode.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    loss: Callable[[Callable[..., torch.Tensor], Batch], torch.Tensor]
    lr: float = 0.01


class Trainer(Protocol):
    """One rank of a mode, ready to train."""

    def step(self, batch: Batch) -> None:
        """Forward, backward, reductions, optimizer, `zero_grad(set_to_none=True)`. On a GPU only enqueued."""

    def gradients(self, batch: Batch) -> Mapping[str, torch.Tensor]:
        """The reduced gradients of a batch by the workload's own parameter names; parameters stay as they are."""


class Mode(Protocol):
    """A way to train data parallel, or a bound that no way can beat: its gradients are not compared then."""

    @property
    def name(self) -> str: ...

    @property
    def is_bound(self) -> bool: ...

    def why_not(self) -> str | None:
        """Why it cannot run here, for people: a package that is missing, no GPU. `None`: it can."""

    def prepare(self, workload: Workload) -> Trainer:
        """Build the workload's model and whatever reduces its gradients. The default process group exists."""
