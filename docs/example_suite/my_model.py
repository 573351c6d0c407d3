"""A model as you might have one, and how it is trained."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

WORDS, LENGTH = 1000, 32


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.expand, self.project = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.project(F.gelu(self.expand(self.norm(x))))


class MyModel(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.words(words)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def small_model() -> MyModel:
    return MyModel(width=32, layers=2)


def real_model() -> MyModel:
    return MyModel(width=1024, layers=8)


def make_batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    words = torch.randint(WORDS, (8, LENGTH + 1), generator=generator)
    return words[:, :-1], words[:, 1:]


def loss_fn(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    words, following = batch
    return F.cross_entropy(model(words).flatten(0, 1), following.flatten())
