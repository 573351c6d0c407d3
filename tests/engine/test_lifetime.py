"""A replication lives as long as a module of what was replicated; what outlives it is an error, not local gradients."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from beside import AOT, Block, batch, compile_blocks, not_compiled
from torch import nn

import dp_compile
from dp_compile.engine.owners import owners
from dp_compile.errors import ReductionError
from dp_compile.testing.ranks import Ranks

WAYS: dict[str, Any] = {"compiled": compile_blocks, "not compiled": not_compiled}


def run_parts(way: str, cleared: bool) -> float:
    """The whole is gone, or its forward hooks are, and its parts train on: how far are the ranks apart?"""
    torch.manual_seed(0)
    backbone, head = Block(), Block()
    whole = dp_compile.replicate(nn.Sequential(backbone, head), config=AOT)
    WAYS[way](whole)
    if cleared:
        whole._forward_pre_hooks.clear()
    del whole
    gc.collect()
    optimizer = torch.optim.SGD([*backbone.parameters(), *head.parameters()], lr=0.1)
    for number in range(3):
        optimizer.zero_grad()
        head(backbone(batch(number))).square().mean().backward()
        optimizer.step()
    weight = backbone.layers[0].weight.detach().clone()
    dist.broadcast(weight, 0)
    return float((weight - backbone.layers[0].weight).abs().max())


@pytest.mark.parametrize(("way", "cleared"), [("compiled", False), ("compiled", True), ("not compiled", False)])
def test_parts_train_on_in_step(ranks: Ranks, way: str, cleared: bool) -> None:
    assert ranks.run(run_parts, way, cleared) == [0.0] * ranks.world_size


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize("compiled", [False, True])
def test_parameters_that_outlive_every_module(compiled: bool) -> None:
    model = dp_compile.replicate(nn.Sequential(nn.Linear(6, 6)), config=AOT)
    weight, bias = model[0].weight, model[0].bias
    replica = weakref.ref(next(iter(owners)))
    del model
    gc.collect()
    assert replica() is None

    def forward(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, weight, bias)

    run = torch.compile(forward, backend="aot_eager") if compiled else forward
    with pytest.raises(ReductionError, match=r"0\.(weight|bias) got a gradient that nobody reduces"):
        run(torch.ones(2, 6)).sum().backward()


def is_one_of(parts: list[nn.Module]) -> Callable[[str, nn.Module], bool]:
    return lambda _, part: part in parts


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize("policy", [False, True])
def test_a_replica_goes_with_its_modules(policy: bool) -> None:
    """Also if what the user gave holds the model."""
    model = Block()
    dp_compile.replicate(model, config=AOT, bucket_policy=is_one_of([model]) if policy else None)
    replica, weight = weakref.ref(next(iter(owners))), weakref.ref(model.layers[0].weight)
    with dp_compile.compiled_backward():
        model(torch.ones(2, 6)).sum().backward()
    del model
    gc.collect()
    assert (replica(), weight()) == (None, None)
