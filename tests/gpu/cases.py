"""Models whose backward is generated for a GPU: the smallest ones that have what a property is about."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import functional as F

from dp_compile.train.gpt import GPT, GPTConfig

Subject = tuple[nn.Module, torch.Tensor]
Results = dict[str, dict[str, Any]]
"""What `generate.py` writes down, by the case's name."""


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
        backwards: so many, each adds to the gradients of those before.
        nodes: on two levels of network, the ranks in so many nodes; 1: one level.
    """

    make: Callable[[], Subject]
    dtype: torch.dtype = torch.float32
    config: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    backwards: int = 1
    nodes: int = 1


def _capped(nbytes: int) -> dict[str, Any]:
    return {"bucket_cap_mb": nbytes / 2**20}


WIRE = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
HALF = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
PADDED = {"shape_padding": True, "force_shape_pad": True}

SMALL = MappingProxyType(
    {
        "mlp": Case(mlp, config=_capped(31_457)),
        "odd": Case(odd, config=_capped(200)),
        "embedding-bf16": Case(embedding, dtype=torch.bfloat16),
        "kept": Case(tied, config=_capped(2_000), backwards=2),
        "unused": Case(unused, config=_capped(2_000)),
        "wire-bf16": Case(mlp, config={**_capped(15_000), "mp_policy": WIRE}),
        "policy-bf16": Case(mlp, config={**_capped(15_000), "mp_policy": HALF}),
        "two-level": Case(mlp, config=_capped(31_457), nodes=2),
        "padded": Case(padded, settings=PADDED),
    }
)
LARGE = MappingProxyType(
    {
        "gpt": Case(gpt, config=_capped(60_000)),
        "residual": Case(residual),
    }
)
