"""The contract between the parts of the benchmark: a workload, and a mode that trains it."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from dp_compile.errors import ConfigError, require

Batch = tuple[torch.Tensor, ...]

SEED: Final = 20_261  # of the weights with which every mode starts
# Large, so that rounding of the parameters hardly changes a gradient that is computed from their difference.
PROBE_LR: Final = 64.0


class Rule(NamedTuple):
    """What makes an optimizer of parameters, and options with which a step is plain.

    A plain step moves parameters by `PROBE_LR` times their gradient, to a part in 1e4 of it.
    """

    optimizer: Callable[..., torch.optim.Optimizer]
    plain: Mapping[str, Any]


SGD: Final = Rule(partial(torch.optim.SGD, momentum=0.9), {"lr": PROBE_LR, "momentum": 0.0})
# AdamW adds `eps` to the root of the mean square, which is at most about 1 here and so does not count.
_PLAIN_ADAMW: Final = {"lr": PROBE_LR * 1e4, "eps": 1e4, "betas": (0.0, 0.0), "weight_decay": 0.0}
ADAMW: Final = Rule(partial(torch.optim.AdamW, fused=True), _PLAIN_ADAMW)


@dataclass(frozen=True, slots=True)
class Workload:
    """A model, its batches and its loss.

    `build` makes the model on CPU, in float32; the same weights after the same `torch.manual_seed`. `batch`: of a rank,
    from a generator that the caller has seeded for that rank. `loss` calls the model, or what a mode made of it, on a
    batch; a scalar. `tolerance`: the largest error of a gradient (`workers.compare`). Kernels with another order of
    summation mostly stay far below 0.01; a gradient that was not averaged is 0.1 to above 1.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    loss: Callable[[Callable[..., torch.Tensor], Batch], torch.Tensor]
    lr: float = 0.01
    rule: Rule = SGD
    tolerance: float = 0.01


class Trainer:
    """One rank of a mode, ready to train.

    A trainer `defers` if communication that a step launches overlaps the next step. Its timed steps follow an untimed
    one, so that they share the network with the communication of their predecessor, as in training; and `wait` keeps it
    out of the turns of other modes.
    """

    defers = False

    def step(self, batch: Batch) -> None:
        """Forward, backward, reductions, optimizer, `zero_grad(set_to_none=True)`. On a GPU only enqueued."""

    def gradients(self, batch: Batch) -> Mapping[str, torch.Tensor]:
        """The reduced gradients of a batch by the workload's parameter names; parameters stay as they are."""
        return {}

    def wait(self) -> None:
        """Wait for the communication in flight."""

    def counts(self) -> Mapping[str, int]:
        """Counts of one backward that are equal in every run of the same code; a larger one is a regression."""
        return {}


class Mode(NamedTuple):
    """A way to train data parallel, or a bound (`is_bound`): gradients of a bound are not compared.

    `prepare` builds a workload's model and what reduces its gradients; the default process group exists. If it has an
    argument `cap_mb`, that can be given in the mode's name.
    """

    name: str
    prepare: Callable[..., Trainer]
    is_bound: bool = False

    def takes(self, option: str) -> bool:
        return option in inspect.signature(self.prepare).parameters


def imported(name: str, kind: type[Any]) -> Any:
    """The result of calling a user's function, named `package.module:function`; it has to be a `kind`."""
    module, _, function = name.rpartition(":")
    try:
        found = getattr(importlib.import_module(module), function)()
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"{name!r} cannot be made: {type(error).__name__}: {error}") from error
    require(isinstance(found, kind), f"what {name!r} returns", f"a {kind.__name__} of dp_compile.bench", type(found))
    return found
