"""A sharded optimizer: the same parameters as without, in every way, on every rank; a part of the state on each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from beside import compile_whole, not_compiled
from torch import nn
from twins import ADAMW, SGD, Make, Twins, twins, two_groups

import dp_compile
from dp_compile.testing.ranks import Ranks

OPTIMIZERS: dict[str, Make] = {
    "sgd": SGD,
    "adamw": ADAMW,
    "rmsprop": two_groups(torch.optim.RMSprop, lr=0.01, momentum=0.5),
    "adagrad": two_groups(torch.optim.Adagrad, lr=0.01),
    "adafactor": two_groups(torch.optim.Adafactor, lr=0.01),
}


def sharded(*args: Any, **options: Any) -> Twins:
    return twins(*args, **{"given": {"shard": True, **options.pop("given", {})}} | options)


# --- the same numbers -------------------------------------------------------------------------------------------------


def train(name: str, max_norm: float | None, compile_model: Callable[[nn.Module], Any]) -> tuple[int, int]:
    both = sharded(make=OPTIMIZERS[name], beside_ddp=True, compile_model=compile_model, max_norm=max_norm)
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 2, gamma=0.5) for each in (both.mine, both.other)]
    for number in range(5):
        both.backward(number)
        both.step()
        for scheduler in schedulers:
            scheduler.step()
        both.compare()
    mine, whole = (sum(_numels(optimizer)) for optimizer in (both.mine, both.other))
    total = torch.tensor(mine)
    dist.all_reduce(total)
    assert int(total) == whole, (int(total), whole)
    if name != "adafactor":  # whole matrices
        assert mine <= 1.2 * whole / dist.get_world_size() + 64
    return both.updated, len(dp_compile.report(both.ours).captures)


def _numels(optimizer: torch.optim.Optimizer) -> list[int]:
    return [each.numel() for state in optimizer.state.values() for each in state.values() if each.dim()]


@pytest.mark.parametrize("max_norm", [None, 0.05])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_same_parameters_as_ddp(ranks: Ranks, name: str, max_norm: float | None) -> None:
    assert set(ranks.run(train, name, max_norm, compile_whole)) == {(10, 1)}


@pytest.mark.parametrize("max_norm", [None, 0.05])
def test_the_same_parameters_if_nothing_is_compiled(ranks: Ranks, max_norm: float | None) -> None:
    assert set(ranks.run(train, "adamw", max_norm, not_compiled)) == {(0, 0)}
