"""An optimizer that updates in the backward, in each of its ways: the same parameters as without, on every rank."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from parity import Block, Untraceable, batch, compile_blocks, compile_whole, not_compiled
from poison import poisoned
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint
from twins import ADAMW, GIVEN, SGD, Last, Make, Net, Twins, id_of, made, two_groups

import dp_compile
from dp_compile.config import CHECK_VARIABLE
from dp_compile.optim import full_state_dict
from dp_compile.testing.ranks import Ranks

OPTIMIZERS: dict[str, Make] = {
    "sgd": SGD,
    "adamw": ADAMW,
    "adamw_fused": two_groups(torch.optim.AdamW, lr=torch.tensor(0.01), fused=True),
    "adafactor": two_groups(torch.optim.Adafactor, lr=0.01),
}


def train(way: str, name: str, max_norm: float | None, compile_model: Callable[[nn.Module], Any]) -> tuple[int, int]:
    both = made(way, make=OPTIMIZERS[name], beside_ddp=True, compile_model=compile_model, max_norm=max_norm)
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 2, gamma=0.5) for each in (both.mine, both.other)]
    for number in range(5):
        both.backward(number)
        if way == "whole":
            assert all(each.grad is None for each in both.ours.parameters())
        both.step()
        for scheduler in schedulers:
            scheduler.step()
        both.compare()
    if way == "sharded":
        mine, whole = (
            sum(each.numel() for state in optimizer.state.values() for each in state.values() if each.dim())
            for optimizer in (both.mine, both.other)
        )
        dist.all_reduce(total := torch.tensor(mine))
        assert int(total) == whole
        assert mine <= 1.2 * whole / dist.get_world_size() + 64
        assert f"sharded over {dist.get_world_size()} ranks" in dp_compile.report(both.ours).updates
    return both.updated, len(dp_compile.report(both.ours).captures)


@pytest.mark.parametrize(
    ("way", "name", "max_norm", "compile_model"),
    [
        ("whole", "adamw", None, not_compiled),
        ("whole", "adamw_fused", None, compile_whole),
        ("whole", "adafactor", None, compile_whole),
        ("sharded", "sgd", None, compile_whole),
        ("sharded", "adamw", 0.05, compile_whole),
        ("sharded", "adamw", 1e3, not_compiled),
    ],
    ids=id_of,
)
def test_the_same_parameters_as_ddp(
    ranks: Ranks, way: str, name: str, max_norm: float | None, compile_model: Any
) -> None:
    """Two parameter groups and a scheduler; another learning rate compiles nothing."""
    expected = (10, 1) if compile_model is compile_whole else (0, 0)
    assert set(ranks.run(train, way, name, max_norm, compile_model)) == {expected}


@on_ranks("ranks2")
def test_sgd_is_ddp_s_bit_for_bit() -> None:
    """One layer, so that torch's gradients are computed as ours are."""
    make = two_groups(torch.optim.SGD, lr=0.1, momentum=0.9)
    both = made("whole", lambda: nn.Linear(6, 6), make, beside_ddp=True)
    for number in range(4):
        both.backward(number)
        both.step()
        assert all(map(torch.equal, both.ours.parameters(), both.theirs.parameters()))
    assert both.updated == 2


class Broken(Net):
    """Its backward has a graph break, so hooks reduce eagerly."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = super().forward(Untraceable.apply(super().forward(x)))
        return result


class Reentrant(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True) + x
        result: torch.Tensor = self.norm(x)
        return result


FEATURES: dict[tuple[str, str], tuple[dict[str, Any], int]] = {
    ("whole", "mixed precision"): ({"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}, 10),
    ("whole", "compiled in parts"): (
        {"build": lambda: nn.Sequential(Block(), Block()), "compile_model": compile_blocks},
        8,
    ),
    ("whole", "reentrant checkpoint"): ({"build": Reentrant, "compile_theirs": True}, 10),
    ("sharded", "optimal buckets"): ({"config": dp_compile.ReplicateConfig(backend="aot_eager")}, 10),
    ("sharded", "not one graph"): ({"build": Broken}, 0),
    ("sharded", "tied weights"): ({"build": lambda: Net(tied=True)}, 9),
    ("sharded", "channels last"): ({"build": Last, "make": partial(torch.optim.AdamW, lr=0.01)}, 5),
}
"""With how many parameters compiled backwards update."""


@pytest.mark.parametrize(("way", "name"), FEATURES)
@on_ranks("ranks")
def test_features(way: str, name: str) -> None:
    options, updated = FEATURES[way, name]
    both = made(way, **options)
    both.train(*range(4))
    assert both.updated == updated


# --- each of these in several ways ------------------------------------------------------------------------------------


class Spare(Net):
    """In some steps no rank uses `spare`, in some the first rank only."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(6, 6)
        self.users = 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.spare(x) if dist.get_rank() < self.users else x)


def accumulated(both: Twins) -> None:
    """Then two forwards before their backwards."""
    both.backward(20, sync=False)
    both.train(21)
    outputs = [[run(batch(each)) for each in (22, 23)] for run in (both.run, both.run_theirs)]
    for whose, ((first, second), model) in enumerate(zip(outputs, (both.ours, both.theirs), strict=True)):
        with dp_compile.no_sync(model):
            both.scaled(whose, first).backward()
        both.scaled(whose, second).backward()
    both.step()
    both.compare()


def falls_back(both: Twins) -> None:
    """Not captured on one rank; gradients of before are not cleared."""
    for number in (30, 31):
        both.backward(number, broken=number == 30 and dist.get_rank() == 0)
        both.step(zero=False)
        both.compare()


def unused(both: Twins) -> None:
    """What no rank uses is not updated: no weight decay, no moments."""
    ours: Any = both.ours
    for number, users in enumerate((0, 1, 2, 0, 2), 40):
        ours.users = both.theirs.users = users  # type: ignore[assignment]
        before = ours.spare.weight.clone()
        both.backward(number)
        both.step()
        both.compare()
        assert torch.equal(before, ours.spare.weight) is (users == 0)


def frozen(both: Twins) -> None:
    for number, requires in ((50, False), (51, True)):
        for model in (both.ours, both.theirs):
            model.layers[1].weight.requires_grad_(requires)  # type: ignore[index,union-attr]
        both.train(number)


def overflows(both: Twins) -> None:
    """On one rank, in that rank's part; captured on it or not: no rank steps."""
    for broken in (False, True):
        before = [each.clone() for each in both.ours.parameters()]
        spoiled = []
        if dist.get_rank() == 0:
            for model in (both.ours, both.theirs):
                spoiled.append([*model.parameters()][-1].register_hook(lambda grad: grad * torch.inf))
        both.backward(60, broken=broken and dist.get_rank() == 0)
        for each in spoiled:
            each.remove()
        both.step()
        assert all(map(torch.equal, before, both.ours.parameters()))
        both.train(61)


def every_kind_of_step(way: str, max_norm: float | None, has_scaler: bool) -> None:
    one, two = (torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2) for _ in range(2))
    given = {"scaler": one} if has_scaler else {}
    both = made(way, Spare, ADAMW, max_norm=max_norm, given=given, find_unused_parameters=True)
    both.scalers = (one, two) if has_scaler else None
    both.train(0)
    for kind in (accumulated, falls_back, unused, frozen, *([overflows] if has_scaler else [])):
        kind(both)
    both.train(70)


@pytest.mark.parametrize(
    ("way", "max_norm", "has_scaler"),
    [
        ("whole", None, False),
        ("sharded", None, False),
        ("sharded", 0.05, True),
        ("overlapping", None, False),
        ("next forward", 0.05, True),
    ],
)
def test_every_kind_of_step(ranks2: Ranks, way: str, max_norm: float | None, has_scaler: bool) -> None:
    """With parameters that are NaN as long as they are in flight, and compared between ranks after each step."""
    ranks2.run(in_way, every_kind_of_step, way, max_norm, has_scaler)


@mock.patch.dict(os.environ, {CHECK_VARIABLE: "1"})
def in_way(scenario: Callable[..., Any], way: str, *args: Any) -> None:
    with poisoned() if "overlap_forward" in GIVEN[way] else nullcontext():
        scenario(way, *args)


def of_several(way: str) -> None:
    """Two modules in one backward, and two optimizers of one module, one of which gets a group later."""
    torch.manual_seed(0)

    def half(number: int, model: Any) -> list[nn.Parameter]:
        return [each for place, each in enumerate(model.parameters()) if place % 2 == number]

    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW([*parameters][:8:2], lr=0.01)

    pairs = [made(way, make=make), made(way, make=SGD)]
    first = pairs[0]
    more = [torch.optim.SGD(half(1, model), lr=0.1, momentum=0.9) for model in (first.ours, first.theirs)]
    dp_compile.optim.in_backward(first.ours, more[0])
    for number in range(4):
        if number == 2:
            for model, optimizer in ((first.ours, first.mine), (first.theirs, first.other)):
                optimizer.add_param_group({"params": half(0, model)[4:], "lr": 0.5})
        for ours in (True, False):
            inner, outer = (each.run if ours else each.run_theirs for each in pairs)
            outer(inner(batch(number))).square().mean().backward()
        for each in pairs:
            each.step()
        for optimizer in more:
            optimizer.step()
            optimizer.zero_grad()
        for each in pairs:
            each.compare()
    assert len(full_state_dict(first.mine)["state"]) == 5


def life(way: str) -> None:
    """Warmed up; fails half way and goes on from a checkpoint; is taken out, and its module; and is there once more."""
    both = made(way, make=ADAMW)
    both.nearly = True
    before = [each.clone() for each in both.ours.parameters()]
    dp_compile.warmup(both.ours, [batch(0)], lambda x: both.run(x).square().mean())
    assert all(map(torch.equal, before, both.ours.parameters()))
    assert not both.mine.state
    captures = len(dp_compile.report(both.ours).captures)
    both.train(0, 1)
    assert captures == len(dp_compile.report(both.ours).captures)
    assert both.updated == 10

    state = copy.deepcopy((full_state_dict(both.mine), both.ours.state_dict()))
    assert state[0].keys() == both.other.state_dict().keys()
    for group in both.mine.param_groups:
        group["betas"] = (0.9, None)
    with pytest.raises(TypeError):
        both.backward(2)
    for act in (both.mine.step, lambda: both.run(batch(2)).sum().backward()):
        with pytest.raises(dp_compile.ReductionError, match=r"after the optimizer had updated.*load_state_dict"):
            act()
    both.mine.load_state_dict(state[0])
    both.ours.load_state_dict(state[1])
    both.other.zero_grad()
    both.train(2)

    second = ADAMW(both.ours.parameters())
    with pytest.raises(dp_compile.ConfigError, match=r"remove_in_backward\(other_optimizer\)"):
        dp_compile.optim.in_backward(both.ours, second)
    dp_compile.optim.remove_in_backward(both.mine)
    both.train(3)  # it steps as any optimizer does
    with pytest.raises(dp_compile.ConfigError, match="does not update in the backward"):
        dp_compile.optim.remove_in_backward(both.mine)
    whole = copy.deepcopy(both.mine.state_dict())
    torch.testing.assert_close(whole, both.other.state_dict())
    dp_compile.optim.in_backward(both.ours, second, **GIVEN[way])
    second.load_state_dict(whole)
    both.mine = second
    both.train(4, 5)
    assert both.updated == 10

    for model in (both.ours, both.theirs):
        dp_compile.unreplicate(model)
        model(torch.ones(3, 6)).square().mean().backward()
    if "shard" in GIVEN[way]:  # it has a part of the state
        with pytest.raises(dp_compile.ReductionError, match="no longer replicated"):
            both.mine.step()
        both.mine.zero_grad()
        both.other.zero_grad()
    else:
        both.step()
        both.compare()
    for number, given in enumerate((GIVEN[way], {}), 6):
        for model in (both.ours, both.theirs):
            dp_compile.replicate(model, config=dp_compile.ReplicateConfig(backend="aot_eager", bucket_cap_mb=1e-4))
        dp_compile.optim.in_backward(both.ours, both.mine, **given)
        both.train(number)
        for model in (both.ours, both.theirs):
            dp_compile.unreplicate(model)
    assert len(full_state_dict(both.mine)["state"]) == 10


@pytest.mark.parametrize(
    ("scenario", "way"),
    [
        (of_several, "whole"),
        (of_several, "sharded"),
        (life, "whole"),
        (life, "sharded"),
        (life, "next forward"),
    ],
    ids=id_of,
)
def test_optimizers_and_modules(ranks2: Ranks, scenario: Callable[..., Any], way: str) -> None:
    ranks2.run(in_way, scenario, way)
