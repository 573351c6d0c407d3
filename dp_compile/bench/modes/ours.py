"""`dp_compile.replicate` under `torch.compile`: the default, each strategy, and what measurement can add."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import nn

from dp_compile.bench.contract import Batch, Facts, Mode, Trainer, Workload
from dp_compile.bench.modes.loop import Loop, build, cap_mb_of, place, trainable
from dp_compile.config import ReplicateConfig
from dp_compile.engine.calibration import calibrate
from dp_compile.insight.observe import report, step_of
from dp_compile.modules.replicate import replicate

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
        model = build(workload)
        loop = Loop(workload, trainable(model), self._replicated(model))
        return _OurLoop(loop, model, is_fixed=self.has_fixed_plan)

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

    @property
    def has_fixed_plan(self) -> bool:
        """Whether the plan is the same in every run, for it hangs on nothing that is measured."""
        return not self.measured and self.replan_after is None


@dataclass(frozen=True, slots=True)
class _OurLoop:
    """A loop that can tell what became of its reductions."""

    loop: Loop
    model: nn.Module
    is_fixed: bool

    def step(self, batch: Batch) -> None:
        self.loop.step(batch)

    def gradients(self, batch: Batch) -> Mapping[str, torch.Tensor]:
        return self.loop.gradients(batch)

    def facts(self) -> Facts:
        seen, captures = step_of(self.model), [each for each in report(self.model).captures if each.synced]
        shares = (
            (seen.ready.of_member(member), member.nbytes) for bucket in seen.plan.buckets for member in bucket.members
        )
        facts = replace(self.loop.facts(), ready=tuple(shares))
        if not self.is_fixed or not captures:
            return facts
        last = captures[-1]
        copied = sum(each.nbytes for each in last.placements if each.copied is not None)
        return replace(
            facts,
            collectives=last.collectives,
            reduced_nbytes=seen.plan.nbytes,
            copied_nbytes=None if last.cached else copied,  # nobody looks at gradients in code from a cache
            captures=len(captures),
        )


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
