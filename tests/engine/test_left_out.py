"""Errors on every rank in the step in which it happens: a parameter that is left out, a gradient that is not finite."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from parity import AOT, batch, compile_whole, mlp, not_compiled
from torch import nn

import dp_compile
from dp_compile.errors import ReductionError
from dp_compile.testing.ranks import Ranks

WAYS: dict[str, Any] = {"captured": compile_whole, "not compiled": not_compiled}


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.common, self.left, self.right = mlp(), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, left_out: str = "") -> torch.Tensor:
        x = self.common(x)
        if left_out != "left":
            x = x + self.left(x)
        return x if left_out == "right" else x + self.right(x)


@pytest.mark.parametrize(
    ("way", "parts", "at"),
    [
        ("captured", ("left",), 1),
        ("captured", ("left", "right"), 0),
        ("captured", ("", "right"), 1),
        ("not compiled", ("left",), 0),
        ("not compiled", ("", "right"), 1),
    ],
)
@on_ranks("ranks")
def test_it_is_named_on_every_rank(way: str, parts: tuple[str, ...], at: int) -> None:
    """In step `at` each rank leaves one of `parts` out, the last rank the last one."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = dp_compile.replicate(Branches(), config=AOT)
    run, last = WAYS[way](model), dist.get_world_size() - 1
    part = parts[-1] if dist.get_rank() == last else parts[0]
    for number in range(at):
        model.zero_grad()
        run(batch(number)).square().mean().backward()
    with pytest.raises(ReductionError, match="find_unused_parameters=True") as error:
        run(batch(at), part).square().mean().backward()
    if part:
        assert f"without a gradient on this rank: {part}.weight, {part}.bias" in str(error.value)
    if dist.get_rank() != last and len(parts) > 1:
        assert f"on rank {last}: {parts[-1]}.weight, {parts[-1]}.bias" in str(error.value)
    dp_compile.unreplicate(model)


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
    assert "loss was not finite on rank 1 of the group" in messages[0]


def test_a_gradient_that_is_infinite(ranks: Ranks) -> None:
    """Not one of them is a NaN; with a loss that is finite."""
    for message in ranks.run(run_nan, 1.0, "captured", True, 3e38):
        assert "not finite: first.weight (inf), first.bias (inf). The loss was not finite on ranks 0, 1" in message
    for message in ranks.run(run_nan, 0.0, "captured", True):
        assert "not finite: scale (nan). The loss was finite on every rank" in message
    assert set(ranks.run(run_nan, float("nan"), "captured", False)) == {"no error"}
