"""`dp_compile.replicate` under `torch.compile`: the default, updates in the backward or deferred, sharded updates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn

import dp_compile
from dp_compile.bench.contract import Mode, Trainer, Workload
from dp_compile.bench.modes.loop import Loop
from dp_compile.config import ReplicateConfig
from dp_compile.optim import in_backward, synchronize

NEVER_REACHED: Final = 1e9
"""A bound for the norm of gradients: the cost of clipping is measured, gradients are those of other modes."""


@dataclass(frozen=True, slots=True)
class Ours(Mode):
    """`torch.compile(dp_compile.replicate(model))`, as the README has it.

    `updates`: `""` by the optimizer after the backward, `"backward"` by `in_backward`, `"forward"` the same with
    `overlap_forward=True`. With `shard` each rank updates a part, clipped by the norm of all gradients.
    """

    name: str
    updates: str = ""
    shard: bool = False
    cap_mb: float | None = None
    backend: str = "inductor"

    def prepare(self, workload: Workload) -> Trainer:
        defers = self.updates == "forward"

        def wrap(model: nn.Module) -> Callable[..., torch.Tensor]:
            dp_compile.replicate(model, config=ReplicateConfig(bucket_cap_mb=self.cap_mb, backend=self.backend))
            return torch.compile(model, backend="dp_compile" if defers else self.backend)

        loop = _Replicated(workload, wrap)
        loop.defers = defers
        if self.updates:
            max_norm = NEVER_REACHED if self.shard else None
            in_backward(loop.model, loop.optimizer, max_norm, overlap_forward=defers, shard=self.shard)
        return loop


class _Replicated(Loop):
    def wait(self) -> None:
        synchronize(self.model)

    def counts(self) -> Mapping[str, int]:
        report = dp_compile.report(self.model)
        if not report.captures:
            return {}
        last = report.captures[-1]
        counts = {"graphs": len(report.captures), "collectives": last.collectives, "bytes": report.plan.nbytes}
        if not last.cached:  # placements of gradients are not known of code from a cache
            counts["copied bytes"] = sum(each.nbytes for each in last.placements if each.is_copied)
        return counts


KINDS: Final = (
    Ours("ours"),
    Ours("ours:in_backward", "backward"),
    Ours("ours:crossing", "forward"),
    Ours("ours:sharded", "backward", shard=True),
    Ours("ours:sharded_crossing", "forward", shard=True),
)
