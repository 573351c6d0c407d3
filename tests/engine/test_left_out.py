"""Errors on every rank in the step in which it happens: a parameter that is left out, a gradient that is not finite."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from parity import AOT, batch, compile_whole, mlp, not_compiled
from torch import nn

import dp_compile
from dp_compile.errors import ReductionError
from dp_compile.testing.ranks import Ranks

WAYS: dict[str, Any] = {"captured": compile_whole, "not compiled": not_compiled}


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.common, self.often = mlp(), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, often: bool = True) -> torch.Tensor:
        x = self.common(x)
        return self.often(x) if often else x


def run_left_out(way: str, by: str) -> str:
    """In the second step all ranks, or the last one, leave a part out."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = dp_compile.replicate(Branches(), config=AOT)
    run, error = WAYS[way](model), ""
    try:
        for number in range(2):
            model.zero_grad()
            leaves_out = number == 1 and (by == "all" or dist.get_rank() == dist.get_world_size() - 1)
            run(batch(number), not leaves_out).square().mean().backward()
    except ReductionError as found:
        error = str(found)
    dp_compile.unreplicate(model)
    return error


@pytest.mark.parametrize("by", ["all", "one"])
@pytest.mark.parametrize("way", WAYS)
def test_it_is_named_on_every_rank(ranks: Ranks, way: str, by: str) -> None:
    found = ranks.run(run_left_out, way, by)
    for rank, error in enumerate(found):
        here = by == "all" or rank == len(found) - 1
        where = "this rank" if here else f"rank {len(found) - 1}"
        assert f"without a gradient on {where}: often.weight, often.bias" in error


# --- not finite ------------------------------------------------------------------------------------------------------


class Root(nn.Module):
    """The gradient of a square root at zero is infinite, though the loss is not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) + (self.scale * x).abs().sqrt()


def run_nan(value: float, way: str, checked: bool, factor: float = 1.0) -> str:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = dp_compile.replicate(Root(), config=dp_compile.ReplicateConfig(backend="aot_eager", check_nan=checked))
    call = model if way == "not compiled" else torch.compile(model, backend="aot_eager")
    x = torch.ones(2, 4)
    call(x).sum().backward()
    x[0, 2] = value if dist.get_rank() == 1 else 1.0
    try:
        with torch.autograd.set_detect_anomaly(way == "eager hooks", check_nan=False):
            (factor * call(x).sum()).backward()
    except dp_compile.ReductionError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("way", ["captured", "eager hooks", "not compiled"])
def test_a_loss_that_is_not_finite_on_one_rank(ranks: Ranks, way: str) -> None:
    messages = ranks.run(run_nan, float("nan"), way, True)
    assert messages[0] == messages[1]
    assert "reduced gradients are not finite: scale (nan), first.weight (nan). The loss" in messages[0]
    assert "loss was not finite on rank(s) 1 of the group" in messages[0]


def test_a_gradient_that_is_infinite(ranks: Ranks) -> None:
    """Not one of them is a NaN; with a loss that is finite."""
    for message in ranks.run(run_nan, 1.0, "captured", True, 3e38):
        assert "not finite: first.weight (inf), first.bias (inf). The loss was not finite on rank(s) 0, 1" in message
    for message in ranks.run(run_nan, 0.0, "captured", True):
        assert "not finite: scale (nan). The loss was finite on every rank" in message
    assert set(ranks.run(run_nan, float("nan"), "captured", False)) == {"no error"}
