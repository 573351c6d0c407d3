"""A model as you might have one, and how it is trained."""

import torch
from torch import nn
from torch.nn import functional as F


def make_model() -> nn.Module:
    return nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(512, 512), nn.GELU())))


def make_batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(64, 512, generator=generator), torch.randn(64, 512, generator=generator)


def loss_fn(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    inputs, targets = batch
    return F.mse_loss(model(inputs), targets)
