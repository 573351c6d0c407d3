"""`dp_compile.replicate` under `torch.compile`: the default, each strategy, what measurement can add, other wires."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dp_compile.bench.contract import PROBE_LR, Batch, Facts, Mode, Trainer, Workload
from dp_compile.bench.modes.loop import Loop, as_plain, build, cap_mb_of, place, trainable
from dp_compile.config import ReplicateConfig
from dp_compile.engine.calibration import calibrate
from dp_compile.engine.comm_hook import HookFunction
from dp_compile.engine.hook_state import HookState
from dp_compile.engine.quantized_hook import QuantizedHook
from dp_compile.errors import ConfigError
from dp_compile.insight.observe import report, step_of
from dp_compile.modules.replicate import replicate
from dp_compile.modules.replicated_module import register_comm_hook
from dp_compile.optim.crossing import synchronize
from dp_compile.optim.in_backward import in_backward
from dp_compile.train import tensor_parallel
from dp_compile.train.gpt import GPT

REPLAN_AFTER: Final = 3
"""Backwards measured by `ours:replan`. The one after them compiles again: warm up for three steps more than this."""

NEVER_REACHED: Final = 1e9
"""A bound for the norm of gradients: what clipping costs, and the gradients of everybody else."""


@dataclass(frozen=True, slots=True)
class Ours:
    """`torch.compile(dp_compile.replicate(model))`, as the README has it.

    `per_module` takes the outermost items of the model's lists for units: its blocks. `measured` plans with the cost
    that `calibrate()` finds before the first step; `replan_after` measures some backwards and plans once more.
    Gradients travel in `wire`, or as the comm hook that `hook` makes sends them, with its state; `ranks_inside` of them
    are in a node, and what is beyond goes over a second level of network. `tolerance`: of gradients, for what is lost
    on the way. `dtensors`: parameters are DTensors, in a mesh with one rank for tensor parallel: what it costs to have
    them, with nothing to send for it; only the workloads that are a GPT. `updates` are in the `backward`, or left for
    the next `forward`; else behind the backward. With `shard` each rank updates a part and clips by the norm of all:
    what is left for the next forward are the all-gathers.
    """

    name: str
    strategy: str | None = None
    cap_mb: float | None = None
    replan_after: int | None = None
    measured: bool = False
    wire: torch.dtype | None = None
    hook: Callable[[], tuple[Any, HookFunction]] | None = None
    ranks_inside: int | None = None
    dtensors: bool = False
    tolerance: float = 0.0
    updates: str | None = None
    shard: bool = False
    is_bound: bool = False
    backend: str = "inductor"

    def why_not(self) -> str | None:
        return None

    def prepare(self, workload: Workload) -> Trainer:
        model = build(workload)
        mesh = self._mesh()
        if self.dtensors:
            if not isinstance(model, GPT):
                raise ConfigError(f"mode '{self.name}' spreads the layers of a GPT, which '{workload.name}' is not.")
            mesh = tensor_parallel.mesh_of(dist.get_world_size(), 1, place())
            tensor_parallel.parallelize(model, mesh["tp"])
            mesh = mesh["dp"]
        loop = Loop(workload, trainable(model), self._replicated(model, mesh))
        if self.updates is None:
            return _OurLoop(loop, model, self.tolerance, is_fixed=self.has_fixed_plan)
        crosses = self.updates == "forward"
        max_norm = NEVER_REACHED if self.shard else None
        in_backward(model, loop.optimizer, max_norm, overlap_forward=crosses, shard=self.shard)
        kind = _CrossingLoop if crosses else _UpdatingLoop
        return kind(loop, model, self.tolerance, is_fixed=self.has_fixed_plan)

    def _replicated(self, model: nn.Module, mesh: DeviceMesh | None) -> Callable[..., torch.Tensor]:
        mp_policy = None
        if self.wire is not None:
            from torch.distributed.fsdp import MixedPrecisionPolicy  # it loads all of FSDP

            mp_policy = MixedPrecisionPolicy(reduce_dtype=self.wire)
        config = ReplicateConfig(
            strategy=self.strategy,
            bucket_cap_mb=self.cap_mb,
            replan_after=self.replan_after,
            cost=calibrate(device=place()).cost if self.measured else None,
            backend=self.backend,
            mp_policy=mp_policy,
        )
        policy = _is_block if self.strategy == "per_module" else None
        replicate(model, config=config, bucket_policy=policy, device_mesh=mesh)
        if self.hook is not None:
            register_comm_hook(model, *self.hook())
        return torch.compile(model, backend="dp_compile" if self.updates == "forward" else self.backend)

    def _mesh(self) -> DeviceMesh | None:
        if self.ranks_inside is None:
            return None
        ranks = dist.get_world_size()
        if ranks % self.ranks_inside:
            raise ConfigError(f"mode '{self.name}': {ranks} ranks do not fill nodes with {self.ranks_inside} each.")
        shape = ranks // self.ranks_inside, self.ranks_inside
        return init_device_mesh(place().type, shape, mesh_dim_names=("between", "inside"))

    @property
    def has_fixed_plan(self) -> bool:
        """Whether the plan is the same in every run, for it hangs on nothing that is measured."""
        return not self.measured and self.replan_after is None


@dataclass(frozen=True, slots=True)
class _OurLoop:
    """A loop that can tell what became of its reductions."""

    loop: Loop
    model: nn.Module
    tolerance: float
    is_fixed: bool

    def step(self, batch: Batch) -> None:
        self.loop.step(batch)

    def gradients(self, batch: Batch) -> Mapping[str, torch.Tensor]:
        return {name: tensor_parallel.whole(each) for name, each in self.loop.gradients(batch).items()}

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


class _UpdatingLoop(_OurLoop):
    """One whose backward keeps no gradients: they are read off a plain step that is taken back."""

    def gradients(self, batch: Batch) -> Mapping[str, torch.Tensor]:
        optimizer, parameters = self.loop.optimizer, trainable(self.model)
        before = {name: each.detach().clone() for name, each in parameters.items()}
        with as_plain(optimizer, self.loop.workload.rule):
            self.loop.step(batch)
        after = {name: each.detach() for name, each in self.model.named_parameters()}
        found = {name: (each - after[name]) / PROBE_LR for name, each in before.items()}
        for name, each in before.items():
            after[name].copy_(each)
        optimizer.state.clear()
        return found


class _CrossingLoop(_UpdatingLoop):
    """One whose steps leave something to the next."""

    def arrive(self) -> None:
        synchronize(self.model)


def _is_block(name: str, module: nn.Module) -> bool:
    """Whether a module is an item of a list that lies in no other list, by its fully qualified name."""
    *outer, own = name.split(".")
    return own.isdigit() and not any(part.isdigit() for part in outer)


def _bf16_hook() -> tuple[None, HookFunction]:
    return None, bf16_compress_hook


def _int8_hook() -> tuple[HookState, HookFunction]:
    return HookState(), QuantizedHook()


_BF16: Final = 0.02
"""Four roundings to eight bits, of 0.004 at most, and in between the sum."""
_INT8: Final = 0.06
"""Two roundings to a step that is 1/127 of the largest number of a block. Where that is far above all others, as of a
gradient with few rows, the others lose most; a gradient that is not averaged is 0.1 to above 1 away."""

KINDS: Final = (
    Ours("ours"),
    Ours("ours:fixed", "fixed"),
    Ours("ours:ddp", "ddp"),
    Ours("ours:per_module", "per_module"),
    Ours("ours:coalesced", "coalesced"),
    Ours("ours:replan", replan_after=REPLAN_AFTER),
    Ours("ours:calibrated", measured=True),
    Ours("ours:bf16", wire=torch.bfloat16, tolerance=_BF16),
    Ours("ours:bf16_hook", hook=_bf16_hook, tolerance=_BF16),
    Ours("ours:int8", hook=_int8_hook, tolerance=_INT8),
    Ours("ours:two_levels", ranks_inside=2),
    Ours("ours:dtensors", dtensors=True),
    Ours("ours:in_backward", updates="backward"),
    Ours("ours:crossing", updates="forward"),
    Ours("ours:sharded", updates="backward", shard=True),
    Ours("ours:sharded_crossing", updates="forward", shard=True),
)


def with_cap(kind: Ours, argument: str) -> Mode:
    """The same with another bucket cap, in MiB."""
    return replace(kind, name=f"{kind.name}:{argument}", cap_mb=cap_mb_of(argument, kind.name))
