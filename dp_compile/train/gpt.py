"""A decoder-only transformer with the blocks of GPT-2 (Radford et al. 2019): learned positions, a tied embedding."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTConfig:
    """Sizes of a `GPT`. `context` is the longest sequence in tokens."""

    vocabulary: int = 256
    context: int = 128
    width: int = 128
    layers: int = 4
    heads: int = 4


class Attention(nn.Module):
    """Causal self-attention: `[batch, time, width]` to the same shape."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.project = nn.Linear(config.width, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, time, width = x.shape
        query, key, value = (
            part.view(batch, time, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(x).split(width, dim=2)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.project(mixed.transpose(1, 2).reshape(batch, time, width))


class Block(nn.Module):
    """Attention and a two-layer perceptron, each after a norm and with a residual connection."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm_2 = nn.LayerNorm(config.width)
        self.expand = nn.Linear(config.width, 4 * config.width)
        self.project = nn.Linear(4 * config.width, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.project(F.gelu(self.expand(self.norm_2(x)), approximate="tanh"))


class GPT(nn.Module):
    """Tokens `int64[batch, time]` to next-token logits `[batch, time, vocabulary]`."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.token = nn.Embedding(config.vocabulary, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        for name, parameter in self.named_parameters():
            if name.endswith("project.weight"):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * config.layers))
        self.head.weight = self.token.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
