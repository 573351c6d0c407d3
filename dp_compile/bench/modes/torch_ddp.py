"""torch's own data parallelism with its C++ reducer: `DistributedDataParallel`, eager and compiled, and `replicate`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dp_compile._torch import distributed, dynamo
from dp_compile.bench.contract import Mode, Trainer, Workload
from dp_compile.bench.modes.loop import cap_mb_of, loop_around, place
from dp_compile.errors import ConfigError

TUNED: Final = {"gradient_as_bucket_view": True, "static_graph": True, "batched_grad_copy": True}


@dataclass(frozen=True, slots=True)
class TorchDDP:
    """`DistributedDataParallel`, run eagerly, with torch's default buckets or those of `cap_mb`.

    `tuned` is what the docstring of DDP in torch 2.13 offers for loops that set gradients to `None`: gradients that
    are views of their bucket, copied there in one call for each bucket, and a graph that is declared static.
    """

    name: str
    cap_mb: float | None = None
    tuned: bool = False
    is_bound: bool = False

    def why_not(self) -> str | None:
        missing = set(TUNED if self.tuned else ()) - set(inspect.signature(DistributedDataParallel).parameters)
        if missing:
            return f"torch {torch.__version__} has no {', '.join(sorted(missing))} in DDP; torch 2.13 has."
        return None

    def prepare(self, workload: Workload) -> Trainer:
        return loop_around(workload, lambda model: wrap(model, self.cap_mb, **(TUNED if self.tuned else {})))


@dataclass(frozen=True, slots=True)
class CompiledDDP:
    """`torch.compile(DistributedDataParallel(model))`, as torch's notes on DDP recommend.

    With `split`, the default, DDPOptimizer breaks the graph where buckets end, so that the backward of each part
    starts its all-reduce; without it the model is one graph, and all gradients are there at the end. Source:
    https://docs.pytorch.org/docs/stable/notes/ddp.html. Sets `torch._dynamo.config.optimize_ddp` for the process.
    """

    name: str
    cap_mb: float | None = None
    split: bool = True
    is_bound: bool = False
    backend: str = "inductor"

    def why_not(self) -> str | None:
        return None

    def prepare(self, workload: Workload) -> Trainer:
        dynamo.configure_process({"optimize_ddp": "ddp_optimizer" if self.split else "no_optimization"})
        return loop_around(workload, lambda model: torch.compile(wrap(model, self.cap_mb), backend=self.backend))


@dataclass(frozen=True, slots=True)
class ComposableReplicate:
    """torch's composable `replicate`: the same reducer, in hooks of the module's forward.

    `compiled` is `torch.compile` of it, as torch's own test does it (test_replicate_with_compiler.py).
    """

    name: str
    cap_mb: float | None = None
    compiled: bool = False
    is_bound: bool = False
    backend: str = "inductor"

    def why_not(self) -> str | None:
        return None

    def prepare(self, workload: Workload) -> Trainer:
        return loop_around(workload, self._replicated)

    def _replicated(self, model: nn.Module) -> Callable[..., torch.Tensor]:
        options = {} if self.cap_mb is None else {"bucket_cap_mb": self.cap_mb}
        distributed.composable_replicate(model, device_id=place(), **options)
        return torch.compile(model, backend=self.backend) if self.compiled else model


def wrap(model: nn.Module, cap_mb: float | None, **options: Any) -> DistributedDataParallel:
    """torch's DDP around a model. A cap that is given counts for the first bucket too, else that is 1 MiB."""
    device = place()
    ids = None if device.type == "cpu" else [device]
    return DistributedDataParallel(model, device_ids=ids, bucket_cap_mb=cap_mb, **options)


KINDS: Final = (
    TorchDDP("ddp"),
    TorchDDP("ddp_tuned", tuned=True),
    CompiledDDP("ddp_compiled"),
    CompiledDDP("ddp_compiled_whole", split=False),
    ComposableReplicate("replicate"),
    ComposableReplicate("replicate_compiled", compiled=True),
)


def with_cap(kind: TorchDDP | CompiledDDP | ComposableReplicate, argument: str) -> Mode:
    """The same with another bucket cap, in MiB.

    Raises:
        ConfigError: it is less than DDPOptimizer takes.
    """
    if isinstance(kind, CompiledDDP) and kind.split and cap_mb_of(argument, kind.name) < 1:
        raise ConfigError(f"mode '{kind.name}:{argument}': DDPOptimizer takes no cap below its first bucket's, 1 MiB.")
    return replace(kind, name=f"{kind.name}:{argument}", cap_mb=cap_mb_of(argument, kind.name))
