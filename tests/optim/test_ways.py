"""An optimizer that updates in the backward, in each of its ways: the same parameters as without, on every rank."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from parity import Block, Untraceable, batch, compile_blocks, compile_whole, not_compiled
from poison import poisoned
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint
from twins import ADAMW, GIVEN, SGD, Last, Make, Net, assert_same, id_of, made, two_groups

import dp_compile
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
        if way == "whole" and compile_model is compile_whole:
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
        assert f"sharded over {dist.get_world_size()} ranks" in str(dp_compile.report(both.ours))
    return both.updated, len(dp_compile.report(both.ours).captures)


@pytest.mark.parametrize(
    ("way", "name", "max_norm"),
    [
        ("whole", "adamw", None),
        ("whole", "adamw", 0.05),
        ("whole", "adamw_fused", None),
        ("whole", "adafactor", 0.05),
        ("sharded", "sgd", None),
        ("sharded", "adamw", 0.05),
    ],
)
def test_the_same_parameters_as_ddp(ranks: Ranks, way: str, name: str, max_norm: float | None) -> None:
    """Two parameter groups and a scheduler; another learning rate compiles nothing."""
    assert set(ranks.run(train, way, name, max_norm, compile_whole)) == {(10, 1)}


@pytest.mark.parametrize(("way", "max_norm"), [("whole", 0.05), ("sharded", None), ("sharded", 1e3)])
def test_the_same_parameters_if_nothing_is_compiled(ranks: Ranks, way: str, max_norm: float | None) -> None:
    assert set(ranks.run(train, way, "adamw", max_norm, not_compiled)) == {(0, 0)}


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


# --- each of these in several ways ------------------------------------------------------------------------------------


def one_rank_falls_back(way: str, max_norm: float | None) -> int:
    """Bit by bit as a run in which nothing falls back: the same kernels on the same elements."""
    both = [made(way, make=ADAMW, max_norm=max_norm) for _ in range(2)]
    for number in range(5):
        for run, each in enumerate(both):
            each.backward(number, broken=run == 0 and number in (1, 3) and dist.get_rank() == 0)
            each.step()
            each.compare()
        assert all(map(torch.equal, both[0].ours.parameters(), both[1].ours.parameters()))
    assert_same(*(full_state_dict(each.mine) for each in both))
    return both[0].updated


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


def accumulated(way: str, max_norm: float | None) -> None:
    both = made(way, max_norm=max_norm)
    for number in range(3):
        both.backward(10 * number, sync=False)
        both.backward(10 * number + 1)
        both.step()
        both.compare()
    outputs = [[run(batch(each)) for each in (50, 51)] for run in (both.run, both.run_theirs)]
    for (first, second), model in zip(outputs, (both.ours, both.theirs), strict=True):
        with dp_compile.no_sync(model):
            first.square().mean().backward()
        second.square().mean().backward()
    both.step()
    both.compare()


class Spare(Net):
    """In some steps no rank uses `spare`, in some the first rank only."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(6, 6)
        self.users = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.spare(x) if dist.get_rank() < self.users else x)


def unused(way: str, max_norm: float | None, compiled: bool = True) -> None:
    """What no rank uses is not updated: no weight decay, no moments."""
    options = {} if compiled else {"compile_model": not_compiled}
    both = made(way, Spare, ADAMW, max_norm=max_norm, find_unused_parameters=True, **options)
    ours, theirs = both.ours, both.theirs
    assert isinstance(ours, Spare)
    assert isinstance(theirs, Spare)
    for number, users in enumerate((2, 0, 1, 2, 0)):
        ours.users = theirs.users = users
        before = ours.spare.weight.clone()
        both.backward(number)
        assert way == "whole" or (ours.spare.weight.grad is None) is (users == 0)
        both.step()
        both.compare()
        assert torch.equal(before, ours.spare.weight) is (users == 0)


def frozen(way: str, max_norm: float | None = None) -> None:
    both = made(way, make=ADAMW, find_unused_parameters=True, max_norm=max_norm)
    both.train(0)
    for requires in (False, True):
        for model in (both.ours, both.theirs):
            model.layers[1].weight.requires_grad_(requires)  # type: ignore[index,union-attr]
        both.train(1, 2)


def scaled(way: str, max_norm: float | None, broken: bool) -> None:
    """A step is left out on all ranks, though one of them alone has seen what is not finite: in one rank's part."""
    one, two = (torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2) for _ in range(2))
    both = made(way, make=ADAMW, max_norm=max_norm, given={"scaler": one})
    both.scalers = one, two
    for number in range(6):
        before = [each.clone() for each in both.ours.parameters()]
        spoiled = []
        if number == 2 and dist.get_rank() == 0:
            for model in (both.ours, both.theirs):
                spoiled.append([*model.parameters()][-1].register_hook(lambda grad: grad * torch.inf))
        both.backward(number, broken=broken and number in (2, 4) and dist.get_rank() == 0)
        for each in spoiled:
            each.remove()
        both.step()
        both.compare()
        assert all(map(torch.equal, before, both.ours.parameters())) is (number == 2)


def several_modules(way: str) -> None:
    pairs = [made(way, make=ADAMW), made(way, make=SGD, max_norm=0.05)]
    for number in range(3):
        for ours in (True, False):
            first, second = (each.run if ours else each.run_theirs for each in pairs)
            second(first(batch(number))).square().mean().backward()
        for each in pairs:
            each.step()
            each.nearly = each.nearly or way != "whole"
            each.compare()


def another_optimizer(way: str) -> None:
    """A second one of the same module updates whole parameters; a group is added later."""

    def half(number: int, model: Any) -> list[nn.Parameter]:
        return [each for place, each in enumerate(model.parameters()) if place % 2 == number]

    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW([*parameters][:8:2], lr=0.01)

    both = made(way, make=make)
    more = [torch.optim.SGD(half(1, model), lr=0.1, momentum=0.9) for model in (both.ours, both.theirs)]
    dp_compile.optim.in_backward(both.ours, more[0])
    for number in range(4):
        if number == 2:
            for model, optimizer in ((both.ours, both.mine), (both.theirs, both.other)):
                optimizer.add_param_group({"params": half(0, model)[4:], "lr": 0.5})
        both.backward(number)
        both.step()
        for optimizer in more:
            optimizer.step()
            optimizer.zero_grad()
        for model in (both.ours, both.theirs):
            model.zero_grad()
        both.compare()
    state = full_state_dict(both.mine)
    assert len(state["state"]) == 5
    fresh = made(way, make=make)
    fresh.mine.add_param_group({"params": half(0, fresh.ours)[4:]})
    fresh.mine.load_state_dict(copy.deepcopy(state))  # before any backward
    assert_same(full_state_dict(fresh.mine), state)


def warmed_up(way: str) -> None:
    both = made(way, make=ADAMW, max_norm=0.05)
    before = [each.clone() for each in both.ours.parameters()]
    dp_compile.warmup(both.ours, [batch(0)], lambda x: both.run(x).square().mean())
    assert all(map(torch.equal, before, both.ours.parameters()))
    assert not both.mine.state
    captures = len(dp_compile.report(both.ours).captures)
    both.train(0, 1)
    assert captures == len(dp_compile.report(both.ours).captures)
    assert both.updated == 10


def taken_off(way: str) -> None:
    """Not replicated any more: a plain optimizer, but for a sharded one, which has a part of the state."""
    both = made(way, make=ADAMW)
    both.train(0)
    for model in (both.ours, both.theirs):
        dp_compile.unreplicate(model)
        model(torch.ones(3, 6)).square().mean().backward()
    if way == "whole":
        both.step()
        both.compare()
    else:
        with pytest.raises(dp_compile.ReductionError, match="not replicated any more"):
            both.mine.step()
        both.mine.zero_grad()
        both.other.zero_grad()
    for number, given in enumerate((GIVEN[way], {}), 1):
        for model in (both.ours, both.theirs):
            dp_compile.replicate(model, config=dp_compile.ReplicateConfig(backend="aot_eager", bucket_cap_mb=1e-4))
        dp_compile.optim.in_backward(both.ours, both.mine, **given)
        both.train(number)
        for model in (both.ours, both.theirs):
            dp_compile.unreplicate(model)
    assert len(full_state_dict(both.mine)["state"]) == 10


def fails_between(way: str) -> None:
    """The model is of no step until a state is loaded."""
    both = made(way, make=ADAMW)
    both.train(0)
    state = copy.deepcopy((full_state_dict(both.mine), both.ours.state_dict()))
    for group in both.mine.param_groups:
        group["betas"] = (0.9, None)
    with pytest.raises(TypeError):
        both.backward(1)
    for act in (both.mine.step, lambda: both.backward(2)):
        with pytest.raises(dp_compile.ReductionError, match=r"after the optimizer had updated.*load_state_dict"):
            act()
    both.mine.load_state_dict(state[0])
    both.ours.load_state_dict(state[1])
    both.other.zero_grad()
    both.train(1)


def in_way(scenario: Callable[..., Any], way: str, args: Sequence[Any]) -> None:
    with poisoned() if way == "next forward" else nullcontext():
        scenario(way, *args)


@pytest.mark.parametrize(
    ("scenario", "way", "args"),
    [
        (one_rank_falls_back, "whole", (None,)),
        (one_rank_falls_back, "next forward", (0.05,)),
        (accumulated, "whole", (None,)),
        (accumulated, "sharded", (0.05,)),
        (unused, "whole", (0.05,)),
        (unused, "sharded", (None,)),
        (unused, "next forward", (None,)),
        (frozen, "next forward", ()),
        (scaled, "whole", (0.05, True)),
        (scaled, "sharded", (None, True)),
        (scaled, "next forward", (None, True)),
        (several_modules, "whole", ()),
        (another_optimizer, "whole", ()),
        (another_optimizer, "sharded", ()),
        (warmed_up, "sharded", ()),
        (taken_off, "whole", ()),
        (taken_off, "sharded", ()),
        (fails_between, "whole", ()),
        (fails_between, "next forward", ()),
    ],
    ids=id_of,
)
def test_ways(ranks2: Ranks, scenario: Callable[..., Any], way: str, args: tuple[Any, ...]) -> None:
    """With parameters that are NaN as long as they are in flight."""
    ranks2.run(in_way, scenario, way, args)
