"""Models whose backward is generated for a GPU: the smallest ones that have what a property is about."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import functional as F

from dp_compile.train.gpt import GPT, GPTConfig

Subject = tuple[nn.Module, torch.Tensor]
Results = dict[str, dict[str, Any]]
"""What `generate.py` and `cubins.py` write down, by the case's name."""


class Tied(nn.Module):
    """An embedding whose weight is the last layer's too, and a parameter that nobody uses."""

    def __init__(self, unused: bool = False) -> None:
        super().__init__()
        self.words, self.body = nn.Embedding(97, 24), nn.Linear(24, 24)
        self.head = nn.Linear(24, 97, bias=False)
        self.head.weight = self.words.weight
        if unused:
            self.aside = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(F.gelu(self.body(self.words(x))))
        return out


class Residual(nn.Module):
    """Convolutions whose weights lie channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(16, 16, 3, padding=1, bias=False) for _ in range(2))
        self.norm, self.head = nn.BatchNorm2d(16), nn.Linear(16, 96)
        for layer in (self.first, self.second):  # `Module.to` does not take fake parameters
            layer.weight = nn.Parameter(layer.weight.detach().contiguous(memory_format=torch.channels_last))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head((x + self.second(F.relu(self.norm(self.first(x))))).mean((2, 3)))
        return out


class TwoKeys(nn.Module):
    """Gradients of two dtypes: they are never in one bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.full = nn.Linear(32, 32, dtype=torch.bfloat16), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.full(self.low(x.bfloat16()).float())
        return out


class InHalf(nn.Module):
    """float32 parameters that compute in bfloat16, as under autocast or a policy; autocast wants a real GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = x.bfloat16()
        for layer in self.layers:
            out = F.gelu(F.linear(out, layer.weight.bfloat16(), layer.bias.bfloat16()))
        return out


def in_half() -> Subject:
    return InHalf(), torch.randn(8, 64)


def two_keys() -> Subject:
    return TwoKeys(), torch.randn(8, 32)


def mlp() -> Subject:
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.GELU()))), torch.randn(8, 64)


def embedding() -> Subject:
    return nn.Sequential(nn.Embedding(97, 24), nn.Linear(24, 5)), torch.randint(0, 97, (2, 11))


def odd() -> Subject:
    layers = (layer for _ in range(2) for layer in (nn.Linear(6, 3), nn.GELU(), nn.LayerNorm(3), nn.Linear(3, 6)))
    return nn.Sequential(*layers), torch.randn(7, 6)


def padded() -> Subject:
    return nn.Sequential(nn.Linear(65, 63), nn.GELU(), nn.Linear(63, 65)), torch.randn(64, 65)


def tied() -> Subject:
    return Tied(), torch.randint(0, 97, (2, 11))


def unused() -> Subject:
    return Tied(unused=True), torch.randint(0, 97, (2, 11))


def norms() -> Subject:
    """So many rows that reductions over both dimensions pay together: `mix_order_reduction`."""
    layers = nn.Linear(256, 256), nn.LayerNorm(256), nn.GELU(), nn.Linear(256, 256)
    return nn.Sequential(*layers), torch.randn(32768, 256)


def residual() -> Subject:
    return Residual(), torch.randn(2, 16, 8, 8).to(memory_format=torch.channels_last)


def gpt() -> Subject:
    config = GPTConfig(vocabulary=512, context=32, width=64, layers=1, heads=2)
    return GPT(config), torch.randint(0, 512, (2, 32))


@dataclass(frozen=True)
class Case:
    """What is generated, and how.

    Args:
        make: the model and a batch.
        dtype: of its parameters.
        config: options of `ReplicateConfig`.
        settings: of Inductor, by their names in torch's config.
        reduce_op: `avg` as with NCCL, `sum` as with backends that cannot average.
        backwards: so many.
        keeps: whether each adds to the gradients of those before.
        runs: whether the code is run too, in the interpreter, beside eager CPU code.
        plants: whether faults are planted in the code, each of which has to be found.
        mix_order_reduction: torch's default, which our compile switches off.
        flash: attention by the flash kernel, which no CPU has.
        nodes: on two levels of network, the ranks in so many nodes; 1: one level.
        hook: a communication hook of torch's, registered as with its DDP.
        every_day: or at night only, if it is small.
    """

    make: Callable[[], Subject]
    dtype: torch.dtype = torch.float32
    config: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    reduce_op: str = "avg"
    backwards: int = 1
    keeps: bool = True
    runs: bool = True
    plants: bool = False
    mix_order_reduction: bool = False
    flash: bool = False
    nodes: int = 1
    hook: Callable[..., Any] | None = None
    every_day: bool = True


def _capped(nbytes: int) -> dict[str, Any]:
    return {"bucket_cap_mb": nbytes / 2**20}


WIRE = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
HALF = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
PADDED = {"shape_padding": True, "force_shape_pad": True}

SMALL = MappingProxyType(
    {
        "mlp": Case(mlp, config=_capped(31_457), plants=True),
        "sum": Case(mlp, config=_capped(31_457), reduce_op="sum", every_day=False),
        "bf16": Case(mlp, dtype=torch.bfloat16, config=_capped(15_000), every_day=False),
        "odd": Case(odd, config=_capped(200)),
        "tied": Case(tied, config=_capped(2_000), every_day=False),
        "embedding-bf16": Case(embedding, dtype=torch.bfloat16),
        "kept": Case(tied, config=_capped(2_000), backwards=2),
        "unused": Case(unused, config=_capped(2_000)),
        "two-keys-bf16": Case(two_keys, every_day=False),
        "wire-bf16": Case(mlp, config={**_capped(15_000), "mp_policy": WIRE}),
        "cast-bf16": Case(in_half, config={**_capped(15_000), "mp_policy": WIRE}, every_day=False),
        "policy-bf16": Case(mlp, config={**_capped(15_000), "mp_policy": HALF}, every_day=False),
        "hook-float16": Case(tied, config=_capped(2_000), hook=default_hooks.fp16_compress_hook, every_day=False),
        "lives-on": Case(tied, config={**_capped(2_000), "gradient_as_bucket_view": True}, backwards=2, keeps=False),
        "two-level": Case(mlp, config=_capped(31_457), nodes=2, plants=True),
        "two-level-hook-bf16": Case(
            odd, config=_capped(200), nodes=2, hook=default_hooks.bf16_compress_hook, every_day=False
        ),
        "padded": Case(padded, settings=PADDED),
        "mixed": Case(norms, runs=False, mix_order_reduction=True),
        "not-mixed": Case(norms, runs=False),
    }
)
LARGE = MappingProxyType(
    {
        "gpt": Case(gpt, config=_capped(60_000)),
        "gpt-flash": Case(gpt, config=_capped(60_000), runs=False, flash=True),
        "gpt-flash-bf16": Case(gpt, dtype=torch.bfloat16, config=_capped(30_000), runs=False, flash=True),
        "gpt-two-level": Case(gpt, config=_capped(60_000), nodes=2),
        "residual": Case(residual),
        "residual-two-level": Case(residual, nodes=2),
    }
)
