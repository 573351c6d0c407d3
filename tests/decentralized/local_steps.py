"""A small model whose ranks mix their parameters, and D-PSGD in NumPy beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import dp_compile
from dp_compile.decentralized import decentralize

AOT = dp_compile.ReplicateConfig(backend="aot_eager")
SMALL_MB = 1e-4
"""Buckets of about one layer."""

Make = Callable[[Any], torch.optim.Optimizer]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def mlp(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3, bias=False), nn.Tanh(), nn.Linear(3, 2)).to(dtype)


def batch(step: int, rank: int, width: int = 5) -> np.ndarray:
    return np.random.default_rng(1000 * step + rank).standard_normal((4, width))


def mine(step: int, dtype: torch.dtype = torch.float32, width: int = 5) -> torch.Tensor:
    return torch.tensor(batch(step, dist.get_rank(), width), dtype=dtype)


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="aot_eager")


def decentral(model: nn.Module, topology: Any = "ring", optimizer: Any = adamw, **options: Any) -> nn.Module:
    return decentralize(
        model, topology=topology, optimizer=optimizer, **{"bucket_size_in_mb": SMALL_MB, "config": AOT} | options
    )


def values(model: nn.Module) -> list[torch.Tensor]:
    return [each.detach().clone() for each in model.parameters()]


def train(model: nn.Module, run: Any, steps: range) -> None:
    for step in steps:
        run(mine(step, next(model.parameters()).dtype)).square().mean().backward()
        assert all(each.grad is None for each in model.parameters())


def by_formula(
    start: list[np.ndarray], matrix: Callable[[int], np.ndarray], world_size: int, steps: int, **sgd: float
) -> Iterator[list[np.ndarray]]:
    """After each step the parameters of all ranks, stacked: x(t + 1) = W(t) x(t) - update(gradient at x(t)).

    The update is SGD's with momentum and weight decay, which sees the mixed parameters.
    """
    x = [np.stack([each] * world_size) for each in start]
    velocity = [np.zeros_like(each) for each in x]
    for step in range(steps):
        found = [gradients([each[rank] for each in x], batch(step, rank)) for rank in range(world_size)]
        for place in range(len(x)):
            gradient = np.stack([found[rank][place] for rank in range(world_size)])
            x[place] = np.tensordot(matrix(step), x[place], 1)
            gradient = gradient + sgd["weight_decay"] * x[place]
            velocity[place] = gradient if step == 0 else sgd["momentum"] * velocity[place] + gradient
            x[place] = x[place] - sgd["lr"] * velocity[place]
        yield x


def gradients(parameters: list[np.ndarray], x: np.ndarray) -> list[np.ndarray]:
    """Of the mean of the squares of `mlp`'s outputs."""
    w1, b1, w2, w3, b3 = parameters
    first = np.tanh(x @ w1.T + b1)
    second = np.tanh(first @ w2.T)
    out = second @ w3.T + b3
    d_out = 2 * out / out.size
    d_second = (d_out @ w3) * (1 - second**2)
    d_first = (d_second @ w2) * (1 - first**2)
    return [d_first.T @ x, d_first.sum(0), d_second.T @ first, d_out.T @ second, d_out.sum(0)]
