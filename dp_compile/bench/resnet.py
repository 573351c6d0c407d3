"""Residual networks of bottlenecks, in one file. Source: He et al. 2016 (arXiv 1512.03385), table 1 and figure 5."""

from __future__ import annotations

from typing import Final

import torch
from torch import nn

RESNET_50: Final = (3, 4, 6, 3)
"""Bottlenecks in each stage of ResNet-50."""


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


def resnet(stages: tuple[int, ...], *, width: int = 64, classes: int = 1000) -> nn.Module:
    """Images `[batch, 3, height, width]` to logits; weights of convolutions in channels-last order.

    Args:
        stages: bottlenecks in each stage, `RESNET_50` for ResNet-50.
        width: channels of the first stage's 3x3 convolutions, twice as many in each further stage.
        classes: how many logits.
    """
    layers: list[nn.Module] = [*_convolution(3, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    inputs = width
    for stage, blocks in enumerate(stages):
        for block in range(blocks):
            layers.append(Bottleneck(inputs, width << stage, 2 if stage and not block else 1))
            inputs = 4 * (width << stage)
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes)]
    model = nn.Sequential(*layers)
    for parameter in model.parameters():
        if parameter.dim() == 4:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
    return model
