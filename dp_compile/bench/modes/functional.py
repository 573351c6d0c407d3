"""Collectives in the graph, as SimpleFSDP's `replicate`, with the passes that Inductor has for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call

from dp_compile._torch import distributed, inductor
from dp_compile.bench.contract import Mode, Trainer, Workload
from dp_compile.bench.modes.loop import cap_mb_of, loop_around
from dp_compile.fx.collectives import ALL_REDUCE, WAIT
from dp_compile.plan.reduction import mean

# What torchtitan sets for SimpleFSDP's automatic bucketing (torchtitan/experiments/simple_fsdp/backend.py).
OVERLAPPED: Final = {
    "aten_distributed_optimizations.enable_overlap_scheduling": True,
    "aten_distributed_optimizations.collective_bucketing": True,
    "aten_distributed_optimizations.insert_overlap_deps": True,
    "allow_buffer_reuse": False,
    "reorder_for_peak_memory": False,
    "reorder_for_compute_comm_overlap": False,
}
BUCKETED: Final = {"bucket_all_reduces_fx": "all"}


@dataclass(frozen=True, slots=True)
class Functional:
    """`torch.compile` of a model whose parameters reduce their gradient in their own backward: one graph with all.

    SimpleFSDP's data parallelism with `mode="replicate"` (arXiv 2411.00284), in plain tensors: each parameter goes
    through a function that is nothing in the forward and an all-reduce in the backward. `settings` are Inductor's,
    set for the process: none (torch's defaults), `bucket_all_reduces_fx`, or overlap scheduling as torchtitan has it.
    """

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    is_bound: bool = False
    backend: str = "inductor"

    def why_not(self) -> str | None:
        if self.settings == OVERLAPPED and not torch.cuda.is_available():
            return (
                "Inductor's overlap scheduling estimates times from what Triton knows of a GPU; on a CPU it ends with "
                "an error (seen with torch 2.13)."
            )
        return None

    def prepare(self, workload: Workload) -> Trainer:
        inductor.configure_process(self.settings)
        return loop_around(
            workload, lambda model: torch.compile(_ReducedInBackward(model), backend=self.backend, fullgraph=True)
        )


class _ReducedInBackward(nn.Module):
    """Calls a model with stand-ins for its parameters whose gradients are averaged over the default group."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        assert dist.group.WORLD is not None
        group = distributed.group_name(dist.group.WORLD)
        self.reduction = mean(
            group, distributed.backend_of(None, distributed.working_device(None)), dist.get_world_size()
        )

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        (stage,) = self.reduction.stages
        constants = self.reduction.scale, stage.reduce_op, stage.group
        reduced = {
            name: _StandIn.apply(each, *constants)  # type: ignore[no-untyped-call]
            for name, each in self.model.named_parameters()
            if each.requires_grad
        }
        out: torch.Tensor = functional_call(self.model, reduced, inputs)
        return out


class _StandIn(torch.autograd.Function):
    """A view of a parameter; its gradient is averaged."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, *constants: Any) -> torch.Tensor:
        ctx.constants = constants
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (gradient,) = gradients
        scale, *stage = ctx.constants
        scaled = gradient if scale == 1.0 else gradient * scale
        return WAIT(ALL_REDUCE(scaled, *stage)), None, None, None


KINDS: Final = (
    Functional("functional"),
    Functional("functional_bucketed", BUCKETED),
    Functional("functional_overlap", OVERLAPPED),
)


def with_cap(kind: Functional, argument: str) -> Mode:
    """`functional_bucketed` with a cap in MiB instead of torch's 2,000."""
    cap = partial(_same_for_all, cap_mb_of(argument, kind.name))
    settings = {**kind.settings, "bucket_all_reduces_fx_bucket_size_determinator": cap}
    return replace(kind, name=f"{kind.name}:{argument}", settings=settings)


def _same_for_all(cap_mb: float, bucket: int) -> float:
    """No lambda: what is in Inductor's settings has to be picklable for its caches."""
    return cap_mb
