"""Workloads: a GPT, ResNet-50, many small layers, one large embedding; `tiny-` variants are for tests.

A step of a real one takes up to seconds on one CPU core, so batches are small and sequences short; parameters, hence
communication, have real sizes. No model has dropout, because gradients of modes are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional as F

from dp_compile.bench.contract import ADAMW, Batch, Workload, imported
from dp_compile.bench.resnet import RESNET_50, resnet
from dp_compile.errors import ConfigError
from dp_compile.train.gpt import GPT, GPTConfig

XLM_R_VOCABULARY: Final = 250_002
ADAMW_LR: Final = 0.001
"""torch's default."""


class ManySmall(nn.Module):
    """Linear layers with bias around residuals, `[batch, width]` to the same: `tensors` parameters, little compute."""

    def __init__(self, *, tensors: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(tensors // 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x


class BagOfWords(nn.Module):
    """Tokens `int64[batch, time]` to logits: mean of embeddings, two layers. Nearly all bytes are one parameter."""

    def __init__(self, *, vocabulary: int, width: int, classes: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.hidden = nn.Linear(width, 4 * width)
        self.head = nn.Linear(4 * width, classes)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.hidden(self.token(tokens).mean(1)).relu())
        return logits


def cross_entropy(call: Callable[..., torch.Tensor], batch: Batch) -> torch.Tensor:
    """Of a batch `(inputs, targets)`: logits have one dimension more than targets, the last."""
    inputs, targets = batch
    return F.cross_entropy(call(inputs).flatten(0, -2), targets.flatten())


def _text(vocabulary: int, sequences: int, length: int, generator: torch.Generator) -> Batch:
    """Random tokens, and for each the next one."""
    tokens = torch.randint(0, vocabulary, (sequences, length + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _documents(vocabulary: int, sequences: int, length: int, classes: int, generator: torch.Generator) -> Batch:
    tokens = torch.randint(0, vocabulary, (sequences, length), generator=generator)
    return tokens, torch.randint(0, classes, (sequences,), generator=generator)


def _vectors(rows: int, width: int, generator: torch.Generator) -> Batch:
    return torch.randn(rows, width, generator=generator), torch.randint(0, width, (rows,), generator=generator)


def _images(count: int, edge: int, classes: int, generator: torch.Generator) -> Batch:
    images = torch.randn(count, 3, edge, edge, generator=generator).contiguous(memory_format=torch.channels_last)
    return images, torch.randint(0, classes, (count,), generator=generator)


def _workload(
    name: str, build: Callable[[], nn.Module], batch: Callable[..., Batch], *sizes: Any, tolerance: float = 0.01
) -> Workload:
    return Workload(name, build, partial(batch, *sizes), cross_entropy, tolerance=tolerance)


def _gpt(name: str, config: GPTConfig, sequences: int, length: int) -> Workload:
    return _workload(name, partial(GPT, config), _text, config.vocabulary, sequences, length)


def _many_small(name: str, tensors: int, width: int) -> Workload:
    return _workload(name, partial(ManySmall, tensors=tensors, width=width), _vectors, 8, width)


def _embedding(name: str, vocabulary: int, width: int, sequences: int, length: int) -> Workload:
    build = partial(BagOfWords, vocabulary=vocabulary, width=width, classes=16)
    return _workload(name, build, _documents, vocabulary, sequences, length, 16)


_ALL: Final = (
    # 52.8 MiB of gradients.
    _gpt("gpt-6l", GPTConfig(vocabulary=8192, context=128, width=384, layers=6, heads=6), 4, 128),
    _gpt("gpt-4l", GPTConfig(), 8, 128),
    # Rounding each of its first weights once changes its gradients by 3 %; a compiled model rounds more often.
    _workload("resnet50", partial(resnet, RESNET_50), _images, 4, 224, 1000, tolerance=0.12),
    _many_small("many-small", 1000, 64),
    _many_small("many-small-150", 150, 64),
    _embedding("huge-embedding", XLM_R_VOCABULARY, 128, 32, 64),
    _gpt("tiny-gpt", GPTConfig(vocabulary=32, context=16, width=16, layers=1, heads=2), 2, 8),
    _workload("tiny-resnet", partial(resnet, (1, 1), width=8, classes=10), _images, 2, 32, 10),
    _many_small("tiny-many-small", 6, 8),
    _embedding("tiny-embedding", 500, 16, 4, 8),
)
WORKLOADS: Final[Mapping[str, Workload]] = MappingProxyType({each.name: each for each in _ALL})


def workload(name: str) -> Workload:
    """One of `WORKLOADS`, with SGD, or with fused AdamW as `NAME:adamw`; or a user's, `package.module:function`.

    Raises:
        ConfigError: unknown, or the user's function does not return a workload.
    """
    base, _, argument = name.rpartition(":")
    if name in WORKLOADS:
        return WORKLOADS[name]
    if base in WORKLOADS and argument == "adamw":
        return replace(WORKLOADS[base], name=name, lr=ADAMW_LR, rule=ADAMW)
    if base and base not in WORKLOADS:
        found: Workload = imported(name, Workload)
        return found
    raise ConfigError(
        f"unknown workload {name!r}. Built in: {', '.join(WORKLOADS)}, each also as 'NAME:adamw'. Your own: "
        "'package.module:function'."
    )
