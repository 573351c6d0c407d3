"""torch's ways: DDP, eager and compiled, its Python reducer, collectives in the graph; and `decent_dp` from PyPI."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel

from dp_compile._torch import distributed, dynamo, inductor
from dp_compile.bench.contract import PROBE_LR, Batch, Mode, Trainer, Workload
from dp_compile.bench.modes.loop import Loop, build, device, trainable
from dp_compile.config import DEFAULT_CAP_MB
from dp_compile.errors import require
from dp_compile.fx.collectives import ALL_REDUCE, WAIT
from dp_compile.plan.reduction import Averaging

# What torchtitan sets for SimpleFSDP's automatic bucketing (torchtitan/experiments/simple_fsdp/backend.py).
OVERLAPPED: Final[Mapping[str, Any]] = {
    "aten_distributed_optimizations.enable_overlap_scheduling": True,
    "aten_distributed_optimizations.collective_bucketing": True,
    "aten_distributed_optimizations.insert_overlap_deps": True,
    "allow_buffer_reuse": False,
    "reorder_for_peak_memory": False,
    "reorder_for_compute_comm_overlap": False,
}
BUCKETED: Final[Mapping[str, Any]] = {"bucket_all_reduces_fx": "all"}
_FUSED: Final[Mapping[str, Any]] = {"_fuse_ddp_communication_passes": ["fuse_ddp_with_concat_op", "schedule_comm_wait"]}


def wrap(model: nn.Module, cap_mb: float | None, **options: Any) -> DistributedDataParallel:
    ids = None if device().type == "cpu" else [device()]
    return DistributedDataParallel(model, device_ids=ids, bucket_cap_mb=cap_mb, **options)


@dataclass(frozen=True, slots=True)
class DDP(Mode):
    """`DistributedDataParallel` with torch's default buckets or those of `cap_mb`.

    Args:
        compiled: `torch.compile` of it; `DDPOptimizer` breaks the graph where buckets end.
        python_reducer: torch's experimental reducer in its place: hooks that compiled autograd traces, fused by
            Inductor's `ddp_fusion` and followed by its pass that delays waits.
    """

    name: str
    compiled: bool = False
    python_reducer: bool = False
    cap_mb: float | None = None
    backend: str = "inductor"

    def prepare(self, workload: Workload) -> Trainer:
        if not self.compiled:
            return Loop(workload, lambda model: wrap(model, self.cap_mb))
        dynamo.configure_process({"optimize_ddp": "python_reducer" if self.python_reducer else "ddp_optimizer"})
        if self.python_reducer:
            inductor.configure_process(_FUSED)
        return Loop(
            workload,
            lambda model: torch.compile(wrap(model, self.cap_mb), backend=self.backend),
            self._captured_backward if self.python_reducer else torch.Tensor.backward,
        )

    def _captured_backward(self, loss: torch.Tensor) -> None:
        with dynamo.CaptureBackward(partial(torch.compile, backend=self.backend)):
            loss.backward()


@dataclass(frozen=True, slots=True)
class Functional(Mode):
    """`torch.compile` of a model whose parameters reduce their gradient in their own backward: one graph with all.

    SimpleFSDP's data parallelism with `mode="replicate"` (arXiv 2411.00284) on plain tensors: each parameter passes
    through a function that is the identity in the forward and an all-reduce in the backward. Inductor schedules the
    overlap on a GPU; on a CPU, where that fails because it asks Triton for bandwidths (torch 2.13), it makes buckets.
    """

    name: str
    backend: str = "inductor"

    def prepare(self, workload: Workload) -> Trainer:
        inductor.configure_process(OVERLAPPED if torch.cuda.is_available() else BUCKETED)
        return Loop(
            workload, lambda model: torch.compile(_ReducedInBackward(model), backend=self.backend, fullgraph=True)
        )


class _ReducedInBackward(nn.Module):
    """Calls a model with views of its parameters whose gradients are averaged over the default group."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        assert dist.group.WORLD is not None
        name, backend = distributed.group_name(dist.group.WORLD), distributed.backend_of(None, device().type)
        reduction = Averaging().reduction(name, backend, dist.get_world_size(), "float32")
        (stage,) = reduction.stages
        self.constants = reduction.scale, stage.reduce_op, stage.group

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        reduced = {
            name: _Reduced.apply(each, *self.constants)  # type: ignore[no-untyped-call]
            for name, each in self.model.named_parameters()
            if each.requires_grad
        }
        out: torch.Tensor = functional_call(self.model, reduced, inputs)
        return out


class _Reduced(torch.autograd.Function):
    """A view of a parameter; its gradient is averaged."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, *constants: Any) -> torch.Tensor:
        ctx.constants = constants
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (gradient,) = gradients
        scale, *stage = ctx.constants
        return WAIT(ALL_REDUCE(gradient if scale == 1.0 else gradient * scale, *stage)), None, None, None


@dataclass(frozen=True, slots=True)
class DecentDP(Mode):
    """`decent_dp` (arXiv 2410.11998, `pip install --no-deps decent-dp loguru`), eager and with 25 MB buckets.

    Each rank takes a local step and averages parameters with its neighbours during the next one. That is another
    algorithm: only the average over all ranks after the first step is that of DDP. So its `gradients` follow from that
    average, after one plain step of a copy of the model.
    """

    name: str = "decent_dp"

    def prepare(self, workload: Workload) -> Trainer:
        is_alone = dist.get_world_size() < 2 or distributed.backend_of(None, "cpu").simulated
        require(not is_alone, "mode 'decent_dp'", "on 2 real ranks or more: it averages with neighbours", "one")
        import_module("loguru").logger.disable("decent_dp")  # it logs each bucket to stderr by default
        return _Neighbours(workload)


class _Neighbours(Trainer):
    """The trainer: the optimizer runs in hooks of the backward, a bucket at a time."""

    defers = True

    def __init__(self, workload: Workload) -> None:
        self._workload, self._model = workload, build(workload)
        self._wrapped = self._wrap(self._model, partial(workload.rule.optimizer, lr=workload.lr))

    def step(self, batch: Batch) -> None:
        self._loss(self._wrapped, batch).backward()

    def wait(self) -> None:
        for work in self._wrapped._comm_ops:
            if work is not None:
                work.wait()

    def gradients(self, batch: Batch) -> Mapping[str, torch.Tensor]:
        probe = copy.deepcopy(self._model)
        parameters = trainable(probe)
        before = {name: each.detach().clone() for name, each in parameters.items()}
        wrapped = self._wrap(probe, partial(self._workload.rule.optimizer, **self._workload.rule.plain))
        self._loss(wrapped, batch).backward()
        with torch.no_grad():
            self._loss(wrapped, batch)  # the second forward takes the first step
            wrapped.global_avg(will_revert=False)
        return {name: (before[name] - each.detach()) / PROBE_LR for name, each in parameters.items()}

    def _wrap(self, model: nn.Module, make: Callable[..., torch.optim.Optimizer]) -> Any:
        kind = import_module("decent_dp.ddp").DecentralizedDataParallel
        return kind(model, optim_fn=lambda named: make([each for _, each in named]), topology="complete")

    def _loss(self, call: Any, batch: Batch) -> torch.Tensor:
        return self._workload.loss(call, tuple(each.to(device(), non_blocking=True) for each in batch))


KINDS: Final = (
    DDP("ddp"),
    DDP("ddp_compiled", compiled=True),
    DDP("python_reducer", compiled=True, python_reducer=True, cap_mb=DEFAULT_CAP_MB),
    Functional("functional"),
    DecentDP(),
)
