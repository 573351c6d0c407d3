"""Faults for `planted_campaign.py`, planted into this package by the processes that it measures. `PLANT` says which."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import fx

from dp_compile.bench.contract import Batch, Mode, Trainer, Workload
from dp_compile.bench.modes.ours import Ours
from dp_compile.bench.workloads import cross_entropy
from dp_compile.fx.collectives import is_collective, waits_of
from dp_compile.passes import DEFAULT_PASSES, lowering
from dp_compile.passes.result import PassResult
from dp_compile.plan.buckets import BucketPlan, Layout
from dp_compile.plan.strategies import Planned
from dp_compile.train.gpt import GPT, GPTConfig


@dataclass(frozen=True)
class WaitsAtOnce:
    """Each wait stands right behind its launch."""

    name: ClassVar[str] = "waits-at-once"
    realises_plan: ClassVar[bool] = False

    def __call__(self, graph: fx.Graph, plans: Sequence[BucketPlan]) -> PassResult:
        for launch in list(filter(is_collective, graph.nodes)):
            for wait in waits_of(launch):
                launch.append(wait)
        return PassResult(changed=True)


def wait_early() -> None:
    # The package's attribute of that name is the function.
    module = importlib.import_module("dp_compile.modules.replicate")
    module.DEFAULT_PASSES = (*DEFAULT_PASSES, WaitsAtOnce())  # type: ignore[attr-defined]


def one_bucket_more() -> None:
    """The largest bucket of the default plan comes in two halves."""
    planning = importlib.import_module("dp_compile.modules.planning")
    made = planning.plan_optimal

    def plan(gradients: Any, cost: Any, times: Any, layout: Any, **options: Any) -> Planned:
        planned: Planned = made(gradients, cost, times, layout, **options)
        return replace(planned, plan=halved(planned.plan, layout))

    planning.plan_optimal = plan  # type: ignore[attr-defined]


def halved(plan: BucketPlan, layout: Layout) -> BucketPlan:
    buckets = list(plan.buckets)
    largest = max(buckets, key=lambda bucket: len(bucket.members))
    gradients = [member.gradient for member in largest.members]
    half, at = len(gradients) // 2, buckets.index(largest)
    parts = (gradients[:half], gradients[half:])
    buckets[at : at + 1] = [layout.bucket(largest.key, part, largest.reason) for part in parts]
    return replace(plan, buckets=tuple(buckets))


def copy_put_back() -> None:
    """Code generation takes no gradient's memory for a part of the bucket: each is computed elsewhere and copied."""
    lowering._can_be_moved = lambda gradient, part: False


PLANTS: dict[str, Callable[[], None]] = {
    "": lambda: None,
    "a wait moved early": wait_early,
    "a bucket too many": one_bucket_more,
    "a copy put back": copy_put_back,
}


@dataclass(frozen=True, slots=True)
class Planted(Mode):
    """`ours` in a process that has the fault."""

    name: str = "planted:ours"

    def prepare(self, workload: Workload) -> Trainer:
        PLANTS[os.environ.get("PLANT", "")]()
        return Ours("ours").prepare(workload)


def ours() -> Mode:
    return Planted()


def small_gpt() -> Workload:
    """A step of some 30 ms, so that a run takes a minute."""
    config = GPTConfig(vocabulary=1024, context=64, width=128, layers=3, heads=4)
    return Workload("planted:small_gpt", partial(GPT, config), batch, cross_entropy)


def batch(generator: torch.Generator) -> Batch:
    tokens = torch.randint(0, 1024, (4, 65), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
