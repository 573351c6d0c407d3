"""Workloads: a GPT, ResNet-50, many small layers, one large embedding; `tiny-gpt` is for tests.

Batches are small and sequences short, because a step takes up to seconds on one CPU core. Parameters, and therefore
communication, have real sizes. No model has dropout, because gradients of modes are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Final

import torch
from torch import nn
from torch.nn import functional as F

from dp_compile.bench.contract import ADAMW, Batch, Workload, imported
from dp_compile.errors import require
from dp_compile.train.gpt import GPT, GPTConfig

XLM_R_VOCABULARY: Final = 250_002


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions with a residual connection."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        sizes = ((inputs, width, 1, 1), (width, width, 3, stride), (width, 4 * width, 1, 1))
        self.body = nn.Sequential(*(layer for each in sizes for layer in (*_convolution(*each), nn.ReLU())))
        del self.body[-1]
        self.shortcut = nn.Sequential(*(_convolution(inputs, 4 * width, 1, stride) if inputs != 4 * width else ()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.body(x) + self.shortcut(x)).relu()


def _convolution(inputs: int, outputs: int, size: int, stride: int) -> tuple[nn.Module, nn.Module]:
    conv = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)
    return conv, nn.BatchNorm2d(outputs)


def resnet(stages: tuple[int, ...], width: int, classes: int) -> nn.Module:
    """Return a ResNet from images `[batch, 3, height, width]` to logits; convolution weights are channels-last.

    `stages`: number of bottlenecks per stage. `width`: channels of the first stage's 3x3 convolutions, doubled in each
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
    """Residual linear layers, `[batch, width]` to `[batch, width]`: `tensors` parameters, little compute."""

    def __init__(self, tensors: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(tensors // 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x


class BagOfWords(nn.Module):
    """Tokens `int64[batch, time]` to logits: mean of embeddings, two layers. The embedding has nearly all bytes."""

    def __init__(self, vocabulary: int, width: int, classes: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.hidden = nn.Linear(width, 4 * width)
        self.head = nn.Linear(4 * width, classes)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.hidden(self.token(tokens).mean(1)).relu())


def cross_entropy(call: Callable[..., torch.Tensor], batch: Batch) -> torch.Tensor:
    """Return the loss of a batch `(inputs, targets)`. Logits have one more dimension than targets, the last one."""
    inputs, targets = batch
    return F.cross_entropy(call(inputs).flatten(0, -2), targets.flatten())


def _gpt(name: str, config: GPTConfig, sequences: int, length: int) -> Workload:
    def batch(generator: torch.Generator) -> Batch:
        tokens = torch.randint(0, config.vocabulary, (sequences, length + 1), generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    return Workload(name, partial(GPT, config), batch, cross_entropy)


def _classifier(
    name: str, build: Callable[[], nn.Module], inputs: Callable[..., torch.Tensor], classes: int
) -> Workload:
    """Return a classification workload. `inputs` draws a batch of inputs from a generator."""

    def batch(generator: torch.Generator) -> Batch:
        made = inputs(generator=generator)
        return made, torch.randint(0, classes, (len(made),), generator=generator)

    return Workload(name, build, batch, cross_entropy)


def _images(generator: torch.Generator) -> torch.Tensor:
    return torch.randn(4, 3, 224, 224, generator=generator).contiguous(memory_format=torch.channels_last)


_vectors = partial(torch.randn, 8, 64)
_texts = partial(torch.randint, 0, XLM_R_VOCABULARY, (32, 64))
_ALL: Final = (
    # 52.8 MiB of gradients
    _gpt("gpt-6l", GPTConfig(vocabulary=8192, context=128, width=384, layers=6, heads=6), 4, 128),
    _gpt("gpt-4l", GPTConfig(), 8, 128),
    # tolerance: rounding the initial weights once changes gradients by 3 %, and a compiled model rounds more often
    replace(_classifier("resnet50", partial(resnet, (3, 4, 6, 3), 64, 1000), _images, 1000), tolerance=0.12),
    _classifier("many-small", partial(ManySmall, 1000, 64), _vectors, 64),
    _classifier("many-small-150", partial(ManySmall, 150, 64), _vectors, 64),
    _classifier("huge-embedding", partial(BagOfWords, XLM_R_VOCABULARY, 128, 16), _texts, 16),
    _gpt("tiny-gpt", GPTConfig(vocabulary=32, context=16, width=16, layers=1, heads=2), 2, 8),
)
WORKLOADS: Final[Mapping[str, Workload]] = {each.name: each for each in _ALL}


def workload(name: str) -> Workload:
    """Return a workload of `WORKLOADS` with SGD (`NAME:adamw`: fused AdamW), or a user's `package.module:function`."""
    base, _, argument = name.rpartition(":")
    if name in WORKLOADS:
        return WORKLOADS[name]
    if base in WORKLOADS and argument == "adamw":
        return replace(WORKLOADS[base], name=name, lr=0.001, rule=ADAMW)  # torch's default learning rate
    known = f"one of {', '.join(WORKLOADS)}, each also as 'NAME:adamw', or 'package.module:function'"
    require(bool(base) and base not in WORKLOADS, "a workload", known, name)
    return imported(name, Workload)
