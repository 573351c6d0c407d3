"""`dp_compile.replicate` under `torch.compile`: the default, each strategy, and what measurement can add."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import nn

from dp_compile.bench.contract import Mode, Trainer, Workload
from dp_compile.bench.modes.loop import cap_mb_of, loop_around, place
from dp_compile.calibration import calibrate
from dp_compile.config import ReplicateConfig
from dp_compile.replicate import replicate

REPLAN_AFTER: Final = 3
"""Backwards measured by `ours:replan`. The one after them compiles again: warm up for three steps more than this."""


@dataclass(frozen=True, slots=True)
class Ours:
    """`torch.compile(dp_compile.replicate(model))`, as the README has it.

    `per_module` takes the outermost items of the model's lists for units: its blocks. `measured` plans with the cost
    that `calibrate()` finds before the first step; `replan_after` measures some backwards and plans once more.
    """

    name: str
    strategy: str | None = None
    cap_mb: float | None = None
    replan_after: int | None = None
    measured: bool = False
    is_bound: bool = False
    backend: str = "inductor"

    def why_not(self) -> str | None:
        return None

    def prepare(self, workload: Workload) -> Trainer:
        return loop_around(workload, self._replicated)

    def _replicated(self, model: nn.Module) -> Callable[..., torch.Tensor]:
        config = ReplicateConfig(
            strategy=self.strategy,
            bucket_cap_mb=self.cap_mb,
            replan_after=self.replan_after,
            cost=calibrate(device=place()).cost if self.measured else None,
            backend=self.backend,
        )
        replicate(model, config=config, bucket_policy=_is_block if self.strategy == "per_module" else None)
        return torch.compile(model, backend=self.backend)


def _is_block(name: str, module: nn.Module) -> bool:
    """Whether a module is an item of a list that lies in no other list, by its fully qualified name."""
    *outer, own = name.split(".")
    return own.isdigit() and not any(part.isdigit() for part in outer)


KINDS: Final = (
    Ours("ours"),
    Ours("ours:fixed", "fixed"),
    Ours("ours:ddp", "ddp"),
    Ours("ours:per_module", "per_module"),
    Ours("ours:coalesced", "coalesced"),
    Ours("ours:replan", replan_after=REPLAN_AFTER),
    Ours("ours:calibrated", measured=True),
)


def with_cap(kind: Ours, argument: str) -> Mode:
    """The same with another bucket cap, in MiB."""
    return replace(kind, name=f"{kind.name}:{argument}", cap_mb=cap_mb_of(argument, kind.name))
