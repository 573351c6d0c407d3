"""Modes of the benchmark: data-parallel training by this package and by its peers, and lower bounds on step time."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel

import dp_compile
from dp_compile._torch import distributed, dynamo, inductor
from dp_compile.bench.contract import PROBE_LR, SEED, Batch, Mode, Trainer, Workload, imported
from dp_compile.config import DEFAULT_CAP_MB, ReplicateConfig
from dp_compile.errors import require
from dp_compile.fx.collectives import ALL_REDUCE, WAIT
from dp_compile.optim import in_backward, synchronize
from dp_compile.plan.reduction import Averaging
from dp_compile.plan.words import BYTES_PER_MB

# torchtitan's settings for automatic bucketing in SimpleFSDP (torchtitan/experiments/simple_fsdp/backend.py).
OVERLAPPED: Final[dict[str, Any]] = {
    "aten_distributed_optimizations.enable_overlap_scheduling": True,
    "aten_distributed_optimizations.collective_bucketing": True,
    "aten_distributed_optimizations.insert_overlap_deps": True,
    "allow_buffer_reuse": False,
    "reorder_for_peak_memory": False,
    "reorder_for_compute_comm_overlap": False,
}
BUCKETED: Final[dict[str, Any]] = {"bucket_all_reduces_fx": "all"}
_FUSED: Final[dict[str, Any]] = {"_fuse_ddp_communication_passes": ["fuse_ddp_with_concat_op", "schedule_comm_wait"]}


# --- the loop that modes share --------------------------------------------------------------------------------------


def device() -> torch.device:
    """Return this process's accelerator if the default process group works on it, else the CPU.

    With gloo the result is the CPU: gloo accepts GPU tensors too, but copies them through the CPU.
    """
    kind = distributed.working_device(None) if dist.is_initialized() else "cpu"
    return torch.device(kind, torch.accelerator.current_device_index()) if kind != "cpu" else torch.device(kind)


def build(workload: Workload) -> nn.Module:
    """Return the workload's model in training mode on `device()`, with equal weights in every mode and rank."""
    torch.manual_seed(SEED)
    return workload.build().to(device()).train()


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: each for name, each in model.named_parameters() if each.requires_grad}


class Loop(Trainer):
    """Training loop: forward, backward, the workload's optimizer, gradients set to `None`.

    `wrap` takes the model and returns what runs its forward. `backward` computes the reduced gradients of a loss.
    """

    def __init__(
        self,
        workload: Workload,
        wrap: Callable[[nn.Module], Callable[..., torch.Tensor]],
        backward: Callable[[torch.Tensor], None] = torch.Tensor.backward,
    ) -> None:
        self.workload, self.model, self._device = workload, build(workload), device()
        self._call, self._backward = wrap(self.model), backward
        self.optimizer = workload.rule.optimizer(trainable(self.model).values(), lr=workload.lr)

    def step(self, batch: Batch) -> None:
        placed = tuple(each.to(self._device, non_blocking=True) for each in batch)
        self._backward(self.workload.loss(self._call, placed))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def gradients(self, batch: Batch) -> Mapping[str, torch.Tensor]:
        """Compute gradients from how an SGD step changes parameters; undo the step. Some modes keep no gradients."""
        before = {name: each.detach().clone() for name, each in trainable(self.model).items()}
        groups = [(group, dict(group)) for group in self.optimizer.param_groups]
        for group, _ in groups:
            group |= self.workload.rule.plain
        self.step(batch)
        for group, given in groups:
            group |= given
        after = {name: each.detach() for name, each in self.model.named_parameters()}
        found = {name: (each - after[name]) / PROBE_LR for name, each in before.items()}
        for name, each in before.items():
            after[name].copy_(each)
        self.optimizer.state.clear()
        return found


# --- this package ---------------------------------------------------------------------------------------------------


def ours(
    workload: Workload, updates: str = "", shard: bool = False, cap_mb: float | None = None, backend: str = "inductor"
) -> Trainer:
    """`torch.compile(dp_compile.replicate(model))`, as in the README.

    `updates`: if empty, `optimizer.step()` updates parameters; if `"backward"` or `"forward"`, `in_backward` does, for
    `"forward"` with `overlap_forward=True`. `shard`: each rank updates a shard, and clips by the norm of all gradients.
    """
    defers = updates == "forward"

    def wrap(model: nn.Module) -> Callable[..., torch.Tensor]:
        dp_compile.replicate(model, bucket_cap_mb=cap_mb, config=ReplicateConfig(backend=backend))
        return torch.compile(model, backend="dp_compile" if defers else backend)

    loop = _Replicated(workload, wrap)
    loop.defers = defers
    if updates:
        max_norm = 1e9 if shard else None  # never reached: adds the cost of clipping without changing gradients
        in_backward(loop.model, loop.optimizer, max_norm, overlap_forward=defers, shard=shard)
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
        if not last.cached:  # code from a cache has no placements
            counts["copied bytes"] = sum(each.nbytes for each in last.placements if each.is_copied)
        return counts


# --- torch's modes, and `decent_dp` from PyPI -----------------------------------------------------------------------


def wrap(model: nn.Module, cap_mb: float | None, **options: Any) -> DistributedDataParallel:
    ids = None if device().type == "cpu" else [device()]
    return DistributedDataParallel(model, device_ids=ids, bucket_cap_mb=cap_mb, **options)


def ddp(workload: Workload, cap_mb: float | None = None) -> Trainer:
    """torch's `DistributedDataParallel` with buckets of `cap_mb` MiB; `None`: torch's default."""
    return Loop(workload, lambda model: wrap(model, cap_mb))


def ddp_compiled(workload: Workload, cap_mb: float | None = None, backend: str = "inductor") -> Trainer:
    """`torch.compile` of `DistributedDataParallel`. Dynamo's `DDPOptimizer` splits the graph at bucket boundaries."""
    dynamo.config.optimize_ddp = "ddp_optimizer"
    return Loop(workload, lambda model: torch.compile(wrap(model, cap_mb), backend=backend))


def python_reducer(workload: Workload, cap_mb: float = DEFAULT_CAP_MB, backend: str = "inductor") -> Trainer:
    """torch's experimental Python reducer: compiled autograd traces its hooks, then Inductor's `ddp_fusion` fuses the
    all-reduces and a pass delays their waits."""
    dynamo.config.optimize_ddp = "python_reducer"
    inductor.config.load_config(_FUSED)

    def captured_backward(loss: torch.Tensor) -> None:
        with dynamo.CaptureBackward(partial(torch.compile, backend=backend)):
            loss.backward()

    return Loop(workload, lambda model: torch.compile(wrap(model, cap_mb), backend=backend), captured_backward)


def functional(workload: Workload, backend: str = "inductor") -> Trainer:
    """`torch.compile` of a model with all-reduces in the backward of its parameters: one graph contains everything.

    This is SimpleFSDP's `mode="replicate"` (arXiv 2411.00284) on plain tensors. Each parameter passes through a
    function that is the identity in the forward and an all-reduce in the backward. Inductor schedules the overlap on a
    GPU. On a CPU that fails, because it queries Triton for bandwidths (torch 2.13): there Inductor only makes buckets.
    """
    inductor.config.load_config(OVERLAPPED if device().type == "cuda" else BUCKETED)
    return Loop(workload, lambda model: torch.compile(_ReducedInBackward(model), backend=backend, fullgraph=True))


class _ReducedInBackward(nn.Module):
    """Calls a model with views of its parameters. The backward averages gradients of the views over all ranks."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        name, backend = distributed.group_name(distributed.default_group()), distributed.backend_of(None, device().type)
        reduction = Averaging().reduction(name, backend, dist.get_world_size(), "float32")
        (stage,) = reduction.stages
        self.constants = reduction.scale, stage.reduce_op, stage.group

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        reduced = {
            name: _Reduced.apply(each, *self.constants)  # type: ignore[no-untyped-call]
            for name, each in self.model.named_parameters()
            if each.requires_grad
        }
        return functional_call(self.model, reduced, inputs)


class _Reduced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, *constants: Any) -> torch.Tensor:
        ctx.constants = constants
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (gradient,) = gradients
        scale, *stage = ctx.constants
        return WAIT(ALL_REDUCE(gradient if scale == 1.0 else gradient * scale, *stage)), None, None, None


def decent_dp(workload: Workload) -> Trainer:
    """The package `decent_dp` (arXiv 2410.11998, `pip install --no-deps decent-dp loguru`), eager, with 25 MB buckets.

    Each rank takes a local step and averages parameters with its neighbours during the next step. This algorithm equals
    DDP only in the average over all ranks after the first step. So the trainer computes its `gradients` from the
    change of that average in one SGD step of a copy of the model.
    """
    is_alone = dist.get_world_size() < 2 or distributed.backend_of(None, "cpu").simulated
    require(not is_alone, "mode 'decent_dp'", "run on 2 or more real ranks, to have neighbours", "one")
    import_module("loguru").logger.disable("decent_dp")  # it logs each bucket to stderr by default
    return _Neighbours(workload)


class _Neighbours(Trainer):
    """Trains with the package `decent_dp`, which runs the optimizer per bucket, in hooks of the backward."""

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


# --- bounds ---------------------------------------------------------------------------------------------------------


def compute(workload: Workload, backend: str = "inductor") -> Trainer:
    """`torch.compile` without communication. Packaged suites with one rank take ratios to its step time."""
    return Loop(workload, lambda model: torch.compile(model, backend=backend))


class _AllReduces(Trainer):
    """All-reduces of as many bytes as a model's gradients have, `cap_mb` MiB in each, all launched at the start."""

    def __init__(self, model: nn.Module, cap_mb: float) -> None:
        count = sum(each.nbytes for each in trainable(model).values()) // 4
        zeros = torch.zeros(count, device=device())  # their sums stay zero
        self._buffers = zeros.split(max(1, int(cap_mb * BYTES_PER_MB) // 4))

    def around(self, compute: Callable[[], None]) -> None:
        works: list[Any] = [dist.all_reduce(each, async_op=True) for each in self._buffers]
        compute()
        for work in works:
            work.wait()

    def step(self, batch: Batch) -> None:
        self.around(lambda: None)


def comm(workload: Workload, cap_mb: float = DEFAULT_CAP_MB) -> Trainer:
    """All-reduces of as many bytes as the gradients have, without compute."""
    return _AllReduces(build(workload), cap_mb)


def oracle(workload: Workload, cap_mb: float = DEFAULT_CAP_MB, backend: str = "inductor") -> Trainer:
    """Compiled forward, launch of all-reduces of as many bytes as the gradients, compiled backward, wait, optimizer.

    No schedule can launch all-reduces earlier. Step time includes CPU time that communication takes from the backward.
    """
    loop = Loop(workload, lambda model: torch.compile(model, backend=backend), lambda loss: around(loss.backward))
    around = _AllReduces(loop.model, cap_mb).around
    return loop


# --- by name --------------------------------------------------------------------------------------------------------

_ALL: Final = (
    Mode("ours", ours),
    Mode("ours:in_backward", partial(ours, updates="backward")),
    Mode("ours:crossing", partial(ours, updates="forward")),
    Mode("ours:sharded", partial(ours, updates="backward", shard=True)),
    Mode("ours:sharded_crossing", partial(ours, updates="forward", shard=True)),
    Mode("ddp", ddp),
    Mode("ddp_compiled", ddp_compiled),
    Mode("python_reducer", python_reducer),
    Mode("functional", functional),
    Mode("decent_dp", decent_dp),
    Mode("compute", compute, is_bound=True),
    Mode("comm", comm, is_bound=True),
    Mode("oracle", oracle, is_bound=True),
)
MODES: Final[Mapping[str, Mode]] = {each.name: each for each in _ALL}


def mode(name: str) -> Mode:
    """Return a mode by name: one of `MODES`, `NAME:MIB` with that bucket cap, or a user's `package.module:function`."""
    base, _, argument = name.rpartition(":")
    if name in MODES:
        return MODES[name]
    if base.split(":")[0] in MODES:
        least = 1.0 if base == "ddp_compiled" else 0.0
        cap_mb = float(argument) if re.fullmatch(r"\d+(\.\d*)?", argument) else 0.0
        has_cap = base in MODES and MODES[base].takes("cap_mb") and cap_mb > 0 and cap_mb >= least
        require(has_cap, "NAME:MIB", "a mode with a bucket cap and MiB > 0 (ddp_compiled: >= 1)", name)
        return MODES[base]._replace(name=name, prepare=partial(MODES[base].prepare, cap_mb=cap_mb))
    known = f"one of {', '.join(MODES)}, 'NAME:MIB' for those with a bucket cap, or 'package.module:function'"
    require(bool(base), "a mode", known, name)
    return imported(name, Mode)
