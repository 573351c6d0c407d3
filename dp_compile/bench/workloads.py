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
from dp_compile.errors import ConfigError
from dp_compile.train.gpt import GPT, GPTConfig

XLM_R_VOCABULARY: Final = 250_002
ADAMW_LR: Final = 0.001
"""torch's default."""


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions around a residual."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        sizes = ((inputs, width, 1, 1), (width, width, 3, stride), (width, 4 * width, 1, 1))
        self.body = nn.Sequential(*(layer for each in sizes for layer in (*_convolution(*each), nn.ReLU())))
        del self.body[-1]
        self.shortcut = nn.Sequential(*(_convolution(inputs, 4 * width, 1, stride) if inputs != 4 * width else ()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = (self.body(x) + self.shortcut(x)).relu()
        return out


def _convolution(inputs: int, outputs: int, size: int, stride: int) -> tuple[nn.Module, nn.Module]:
    conv = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)
    return conv, nn.BatchNorm2d(outputs)


def resnet(stages: tuple[int, ...], width: int, classes: int) -> nn.Module:
    """Images `[batch, 3, height, width]` to logits; weights of convolutions in channels-last order.

    `stages`: bottlenecks in each. `width`: channels of the first stage's 3x3 convolutions, twice as many in each
    further stage. Source: He et al. 2016 (arXiv 1512.03385), table 1 and figure 5.
    """
    layers: list[nn.Module] = [*_convolution(3, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    inputs = width
    for stage, blocks in enumerate(stages):
        for block in range(blocks):
            layers.append(Bottleneck(inputs, width << stage, 2 if stage and not block else 1))
            inputs = 4 * (width << stage)
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))
    for parameter in model.parameters():
        if parameter.dim() == 4:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
    return model


class ManySmall(nn.Module):
    """Linear layers with bias around residuals, `[batch, width]` to the same: `tensors` parameters, little compute."""

    def __init__(self, tensors: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(tensors // 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x


class BagOfWords(nn.Module):
    """Tokens `int64[batch, time]` to logits: mean of embeddings, two layers. Nearly all bytes are one parameter."""

    def __init__(self, vocabulary: int, width: int, classes: int) -> None:
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


def _gpt(name: str, config: GPTConfig, sequences: int, length: int) -> Workload:
    def batch(generator: torch.Generator) -> Batch:
        tokens = torch.randint(0, config.vocabulary, (sequences, length + 1), generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    return Workload(name, partial(GPT, config), batch, cross_entropy)


def _resnet(name: str, stages: tuple[int, ...], width: int, images: int, edge: int, classes: int) -> Workload:
    def batch(generator: torch.Generator) -> Batch:
        made = torch.randn(images, 3, edge, edge, generator=generator).contiguous(memory_format=torch.channels_last)
        return made, torch.randint(0, classes, (images,), generator=generator)

    # Rounding each of the first weights once changes gradients by 3 %; a compiled model rounds more often.
    return Workload(name, partial(resnet, stages, width, classes), batch, cross_entropy, tolerance=0.12)


def _many_small(name: str, tensors: int, width: int) -> Workload:
    def batch(generator: torch.Generator) -> Batch:
        return torch.randn(8, width, generator=generator), torch.randint(0, width, (8,), generator=generator)

    return Workload(name, partial(ManySmall, tensors, width), batch, cross_entropy)


def _embedding(name: str, vocabulary: int, width: int, sequences: int, length: int, classes: int = 16) -> Workload:
    def batch(generator: torch.Generator) -> Batch:
        tokens = torch.randint(0, vocabulary, (sequences, length), generator=generator)
        return tokens, torch.randint(0, classes, (sequences,), generator=generator)

    return Workload(name, partial(BagOfWords, vocabulary, width, classes), batch, cross_entropy)


_ALL: Final = (
    # 52.8 MiB of gradients.
    _gpt("gpt-6l", GPTConfig(vocabulary=8192, context=128, width=384, layers=6, heads=6), 4, 128),
    _gpt("gpt-4l", GPTConfig(), 8, 128),
    _resnet("resnet50", (3, 4, 6, 3), 64, 4, 224, 1000),
    _many_small("many-small", 1000, 64),
    _many_small("many-small-150", 150, 64),
    _embedding("huge-embedding", XLM_R_VOCABULARY, 128, 32, 64),
    _gpt("tiny-gpt", GPTConfig(vocabulary=32, context=16, width=16, layers=1, heads=2), 2, 8),
    _resnet("tiny-resnet", (1, 1), 8, 2, 32, 10),
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
        found: Any = imported(name, Workload)
        return found  # type: ignore[no-any-return]
    raise ConfigError(
        f"unknown workload {name!r}. Built in: {', '.join(WORKLOADS)}, each also as 'NAME:adamw'. Your own: "
        "'package.module:function'."
    )
