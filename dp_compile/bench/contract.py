"""Interfaces of the benchmark: a workload, and a mode that trains it."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from dp_compile.errors import ConfigError, require

Batch = tuple[torch.Tensor, ...]

SEED: Final = 20_261  # of the initial weights and, plus the rank, of the batches; equal in every mode
# Large: gradients are computed from differences of parameters, and rounding of these must have little effect.
PROBE_LR: Final = 64.0


class Rule(NamedTuple):
    """An optimizer factory, and options (`plain`) that reduce its step to SGD with learning rate `PROBE_LR`."""

    optimizer: Callable[..., torch.optim.Optimizer]
    plain: Mapping[str, Any]  # a step subtracts `PROBE_LR` times the gradient, accurate to one part in 1e4


SGD: Final = Rule(partial(torch.optim.SGD, momentum=0.9), {"lr": PROBE_LR, "momentum": 0.0})
# AdamW divides by `eps` plus the root of the mean square, which is at most about 1 here: negligible against `eps`.
_PLAIN_ADAMW: Final = {"lr": PROBE_LR * 1e4, "eps": 1e4, "betas": (0.0, 0.0), "weight_decay": 0.0}
ADAMW: Final = Rule(partial(torch.optim.AdamW, fused=True), _PLAIN_ADAMW)


@dataclass(frozen=True, slots=True)
class Workload:
    """A model, its batches, its loss, and its optimizer: `rule` with learning rate `lr`.

    `build` returns the model on CPU in float32, with equal weights for equal `torch.manual_seed`. `batch` draws a
    rank's batch from a generator that the caller has seeded for the rank. `loss` calls the model (or a mode's wrapper
    of it) on a batch and returns the scalar loss. `tolerance`: the largest allowed error of a gradient
    (`workers.compare`). Rounding mostly causes errors far below 0.01; a missing average causes 0.1 to more than 1.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    loss: Callable[[Callable[..., torch.Tensor], Batch], torch.Tensor]
    lr: float = 0.01
    rule: Rule = SGD
    tolerance: float = 0.01


class Trainer:
    """A `Mode` on one rank: a model and its optimizer, ready to train.

    `defers`: whether communication that a step launches overlaps the next step. If so, an untimed step precedes the
    timed ones, so each timed step shares the network with its predecessor's communication, as in training. `wait`
    waits for this communication before another mode is timed.
    """

    defers = False

    def step(self, batch: Batch) -> None:
        """Run forward, backward, reductions, optimizer, `zero_grad(set_to_none=True)`. On a GPU, only enqueue them."""

    def gradients(self, batch: Batch) -> Mapping[str, torch.Tensor]:
        """Return a batch's reduced gradients by the workload's parameter names. Parameters do not change."""
        return {}

    def wait(self) -> None:
        """Wait for the communication in flight."""

    def counts(self) -> Mapping[str, int]:
        """Return counts of one backward that are equal in every run of the same code. An increase is a regression."""
        return {}


class Mode(NamedTuple):
    """A method of data-parallel training or, if `is_bound`, a lower bound on step time without gradients to compare.

    `prepare` takes a workload and returns its trainer; the default process group is initialised. A name like `ddp:5`
    sets the argument `cap_mb` of a built-in mode's `prepare`, if it has one (`modes.mode`).
    """

    name: str
    prepare: Callable[..., Trainer]
    is_bound: bool = False

    def takes(self, option: str) -> bool:
        return option in inspect.signature(self.prepare).parameters


def imported(name: str, kind: type[Any]) -> Any:
    """Call a user's function `package.module:function` and return its result, which must be a `kind`."""
    try:
        found = pkgutil.resolve_name(name)()
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"{name!r} cannot be imported and called: {type(error).__name__}: {error}") from error
    require(isinstance(found, kind), f"what {name!r} returns", f"a {kind.__name__} of dp_compile.bench", type(found))
    return found
