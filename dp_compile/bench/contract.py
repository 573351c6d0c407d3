"""What the parts of the benchmark know of each other: a workload, and a mode that trains it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol, runtime_checkable

import torch
from torch import nn

Batch = tuple[torch.Tensor, ...]


PROBE_LR: Final = 64.0
"""High, so that what rounding of the parameters does to a gradient that is read off them is small."""


@dataclass(frozen=True, slots=True)
class Rule:
    """How a gradient moves parameters.

    Args:
        kind: of optimizer.
        options: of its constructor, beside the learning rate.
        plain: options with which a step moves parameters by `PROBE_LR` times their gradient, to a part in 1e4 of it.
    """

    kind: type[torch.optim.Optimizer]
    options: Mapping[str, Any]
    plain: Mapping[str, Any]

    def optimizer(self, parameters: Iterable[torch.Tensor], **changes: Any) -> torch.optim.Optimizer:
        """Over these parameters; `changes` to the options, the learning rate `lr` for one."""
        make: Callable[..., torch.optim.Optimizer] = self.kind
        return make(parameters, **{**self.options, **changes})


SGD: Final = Rule(torch.optim.SGD, {"momentum": 0.9}, {"lr": PROBE_LR, "momentum": 0.0})
LARGE_EPS: Final = 1e4
"""Beside it AdamW's root of the mean square, of gradients around 1 or smaller, is nothing."""
ADAMW: Final = Rule(
    torch.optim.AdamW,
    {"fused": True},
    {"lr": PROBE_LR * LARGE_EPS, "eps": LARGE_EPS, "betas": (0.0, 0.0), "weight_decay": 0.0},
)


@dataclass(frozen=True, slots=True)
class Workload:
    """A model with real shapes and what it is trained on.

    Args:
        name: as in suite files.
        build: makes the model on CPU, in float32; the same weights after the same `torch.manual_seed`.
        batch: the batch of a rank, from a generator that the caller has seeded for that rank.
        loss: calls the model, or what a mode made of it, on a batch; a scalar.
        lr: of the optimizer of every mode.
        rule: its kind and options; SGD with momentum 0.9.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    loss: Callable[[Callable[..., torch.Tensor], Batch], torch.Tensor]
    lr: float = 0.01
    rule: Rule = SGD


@dataclass(frozen=True, slots=True)
class Facts:
    """What a trainer knows of itself after some steps, beside their times. `None`: not known, or not the same each run.

    Args:
        backward_s: median seconds of a backward, on this rank.
        collectives: in a backward.
        reduced_nbytes: bytes in them.
        copied_nbytes: bytes of gradients that were copied into their bucket.
        captures: backwards that were captured and compiled so far.
        ready: of each gradient the share of the backward after which it is there, and its bytes.
    """

    backward_s: float | None = None
    collectives: int | None = None
    reduced_nbytes: int | None = None
    copied_nbytes: int | None = None
    captures: int | None = None
    ready: tuple[tuple[float, int], ...] = ()

    def counts(self) -> dict[str, int]:
        """What two runs of the same code have in common to the last digit, by name."""
        given = {
            "collectives": self.collectives,
            "reduced_nbytes": self.reduced_nbytes,
            "copied_nbytes": self.copied_nbytes,
            "captures": self.captures,
        }
        return {name: value for name, value in given.items() if value is not None}


class Trainer(Protocol):
    """One rank of a mode, ready to train."""

    def step(self, batch: Batch) -> None:
        """Forward, backward, reductions, optimizer, `zero_grad(set_to_none=True)`. On a GPU only enqueued."""

    def gradients(self, batch: Batch) -> Mapping[str, torch.Tensor]:
        """The reduced gradients of a batch by the workload's own parameter names; parameters stay as they are."""


@runtime_checkable
class Explained(Protocol):
    """A trainer may have this too."""

    def facts(self) -> Facts: ...


@runtime_checkable
class Coarse(Protocol):
    """A trainer may have this too."""

    @property
    def tolerance(self) -> float:
        """How far gradients may be off at least, of their norm, as what is sent was rounded."""


@runtime_checkable
class Crossing(Protocol):
    """A trainer may have this too: what a step sends travels while the next one computes.

    Such a step is timed behind one that is not, so that it finds on the wire what it finds in training, and not what
    had the turns of other modes to arrive. Nothing of it is on the wire in their turns.
    """

    def arrive(self) -> None:
        """Wait for what was sent; the next step finds it as if it had waited."""


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
