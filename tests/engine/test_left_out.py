"""A parameter that is left out is named on every rank, in the step in which it happens, whichever way that goes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from beside import AOT, batch, beside, compile_blocks, compile_whole, mlp, not_compiled, plain
from torch import nn
from torch.utils.checkpoint import checkpoint

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


# --- static graphs ------------------------------------------------------------------------------------------------


class Static(nn.Module):
    """Shared weights, a layer that is checkpointed twice with inner backwards, and a part that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice, self.never = mlp(), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).clone()
        for _ in range(2):
            x = checkpoint(self.twice, x, use_reentrant=True)
        return x


def run_static(compile_model: Any) -> None:
    beside(Static, plain, compile_model=compile_model, theirs={"static_graph": True}, config=AOT, static_graph=True)


@pytest.mark.parametrize("compile_model", [compile_blocks, not_compiled])
def test_static_graph_means_what_it_says(ranks: Ranks, compile_model: Any) -> None:
    ranks.run(run_static, compile_model)
