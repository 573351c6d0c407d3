"""Updates in the backward, around `step()`: what holds, and what is an error with its remedy."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parity import batch, compile_whole, not_compiled
from torch import nn
from torch.utils.checkpoint import checkpoint
from twins import GIVEN, SMALL, Net, id_of, made, two_groups, waiting

import dp_compile
from dp_compile.testing.ranks import Ranks


def refused(match: str) -> Any:
    return pytest.raises(dp_compile.ReductionError, match=match)


def guarded(way: str, compile_model: Callable[[nn.Module], Any]) -> None:
    """The same errors in every way, captured on this rank or not: no rank goes on alone."""
    make = two_groups(torch.optim.AdamW, lr=torch.tensor(0.01), fused="shard" not in GIVEN[way])
    both = made(way, make=make, compile_model=compile_model)
    both.mine.step()  # before any backward, as state is initialised for a checkpoint
    both.train(0)
    with refused("retain_graph=True"):
        both.run(batch(1)).square().mean().backward(retain_graph=True)
    both.backward(1, broken=dist.get_rank() == 0)
    parameters = [*both.ours.parameters()]
    before = [each.clone() for each in parameters]
    weight: Any = both.ours.layers[1].weight  # type: ignore[index,union-attr]
    assert weight.grad is None or "shard" in GIVEN[way]
    with refused(r"before optimizer.step\(\).*no_sync\(\)"):
        both.run(batch(2)).square().mean().backward()
    with refused("closure"):
        both.mine.step(lambda: 0.0)
    with refused("max_norm="):
        dp_compile.optim.clip_grad_norm_(parameters, 0.1)
    weight.grad = torch.ones_like(weight)
    with refused(r"layers.1.weight .*not set .grad"):
        both.mine.step()
    group = both.mine.param_groups[1]
    for changed in ({"lr": 0.02}, {"betas": (0.8, 0.9)}):
        options = dict(group)
        group.update(changed)
        with refused(rf"{next(iter(changed))} of parameter group 1 .*between the backward and optimizer.step\(\)"):
            both.mine.step()
        group.update(options)
    assert all(map(torch.equal, before, parameters))
    both.ours.zero_grad()
    both.step()
    both.compare()
    group.update(lr=0.02)  # after it they may change
    both.other.param_groups[1].update(lr=0.02)
    both.train(2)
    assert not dp_compile.optim.clip_grad_norm_(parameters, 0.1)
    both.backward(3)
    both.mine.param_groups[0]["lr"].mul_(0.5)
    with refused("lr of parameter group 0"):
        both.mine.step()


def unknown_scaler(way: str, compile_model: Callable[[nn.Module], Any]) -> None:
    both = made(way, compile_model=compile_model)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(both.run(batch(0)).square().mean()).backward()
    with refused("scaler=scaler"):
        scaler.step(both.mine)


def scaled_step_is_dropped(way: str, compile_model: Callable[[nn.Module], Any]) -> None:
    scaler = torch.amp.GradScaler("cpu")
    both = made(way, given={"scaler": scaler}, compile_model=compile_model)
    scaler.scale(both.run(batch(0)).square().mean()).backward()
    with refused(r"before optimizer.step\(\).*scaler.update\(\)"):
        scaler.scale(both.run(batch(1)).square().mean()).backward()
    scaler.step(both.mine)
    scaler.update()
    scaler.scale(both.run(batch(2)).square().mean()).backward()


class Inside(Net):
    """Only a backward inside the backward reaches any parameter."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = checkpoint(super().forward, x.requires_grad_(), use_reentrant=True)
        return result


def only_inside(way: str, compile_model: Callable[[nn.Module], Any]) -> None:
    both = made(way, Inside, compile_model=compile_model)
    both.backward(0)
    with refused("before optimizer.step"):
        both.backward(1)


def hooks_copies_and_other_parameters(way: str, compile_model: Callable[[nn.Module], Any]) -> None:
    both = made(way, compile_model=compile_model)
    calls: list[str] = []
    both.mine.register_step_pre_hook(lambda *_: calls.append("before"))
    both.mine.register_step_post_hook(lambda *_: calls.append("after"))
    both.train(0)
    assert calls == ["before", "after"]
    for copied in (copy.deepcopy(both.mine), pickle.loads(pickle.dumps(both.mine))):
        # A plain one, over other parameters.
        parameter = copied.param_groups[0]["params"][0]
        parameter.grad = torch.ones_like(parameter)
        copied.step()
        assert parameter.grad is not None
    extra = [nn.Parameter(torch.ones(6)) for _ in range(2)]
    for optimizer, parameter in zip((both.mine, both.other), extra, strict=True):
        optimizer.add_param_group({"params": [parameter], "lr": 0.5})
    for number in range(2):
        both.backward(number)
        for parameter in extra:
            parameter.grad = torch.full((6,), 1.0 + number)
        both.step()
        both.compare()
        assert torch.equal(*extra)
        assert not torch.equal(extra[0], torch.ones(6))


class Given(nn.Module):
    """A matrix that is given may lie in the memory of a parameter, whose gradient is ready before it is read."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle = nn.Linear(6, 6), nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.last = nn.Linear(6, 6, bias=False)

    def forward(self, x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x)) @ given
        for layer in self.middle:
            x = torch.tanh(layer(x))
        result: torch.Tensor = self.last(x)
        return result


def other_memory(way: str, compile_model: Callable[[nn.Module], Any]) -> None:
    """Code that was compiled for tensors in memory of their own is not run for ones that share it."""
    both = made(way, Given, compile_model=compile_model)
    captures = []
    for number, shares in enumerate((False, False, True, True, False)):
        for model, run in ((both.ours, both.run), (both.theirs, both.run_theirs)):
            weight = model.last.weight.detach()  # type: ignore[union-attr,operator]
            run(batch(number), weight if shares else weight.clone()).square().mean().backward()
        both.step()
        both.compare()
        captures.append(both.updated and len(dp_compile.report(both.ours).captures))
    assert captures[0] == 1
    assert captures[-1] > 1


@pytest.mark.parametrize(
    ("scenario", "way", "compile_model"),
    [
        (guarded, "whole", compile_whole),
        (guarded, "whole", not_compiled),
        (guarded, "sharded", not_compiled),
        (guarded, "overlapping", waiting),
        (unknown_scaler, "whole", compile_whole),
        (scaled_step_is_dropped, "sharded", not_compiled),
        (only_inside, "whole", not_compiled),
        (hooks_copies_and_other_parameters, "whole", compile_whole),
        (other_memory, "whole", compile_whole),
    ],
    ids=id_of,
)
def test_around_the_step(ranks2: Ranks, scenario: Callable[..., Any], way: str, compile_model: Any) -> None:
    ranks2.run(scenario, way, compile_model)


# --- what is refused --------------------------------------------------------------------------------------------------


class Own(torch.optim.SGD):
    pass


def attempt(model: Any, kind: Any = torch.optim.SGD, *, of: Any = None, **options: Any) -> Any:
    return dp_compile.optim.in_backward(model, kind((of or model).parameters()), **options)


def in_one_memory() -> nn.Module:
    model = Net()
    model.layers[3].weight.data = model.layers[0].weight.data
    return dp_compile.replicate(model, config=SMALL)


optim = torch.optim
REFUSED: dict[str, Callable[[Any, Any], object]] = {
    "is not replicated": lambda model, _: attempt(Net()),
    "has no trainable parameter of this module": lambda model, _: attempt(model, of=Net()),
    "LBFGS cannot update in the backward: it evaluates the model again": lambda model, _: attempt(model, optim.LBFGS),
    "SparseAdam cannot update in the backward: it needs": lambda model, _: attempt(model, optim.SparseAdam),
    "Own is not of torch.optim": lambda model, _: attempt(model, Own),
    r"SGD\(differentiable=True\)": lambda model, _: attempt(model, partial(optim.SGD, differentiable=True)),
    "Adafactor cannot be sharded: its update needs whole parameters.*Use shard=False, or one of SGD, Adam": (
        lambda model, _: attempt(model, optim.Adafactor, of=model.layers[0], shard=True)
    ),
    "another optimizer updates norm.weight in the backward already": lambda model, _: attempt(model),
    "updates in the backward already": lambda model, kept: dp_compile.optim.in_backward(model, kept),
    "max_norm must be a number > 0": lambda model, _: attempt(model, max_norm=0.0),
    "max_norm must be a number > 0 or None, got nan": lambda model, _: attempt(model, max_norm=float("nan")),
    "scaler must be a torch.amp.GradScaler": lambda model, _: attempt(model, scaler=1),
    "shard must be True or False, got 1": lambda model, _: attempt(model, shard=1),
    "overlap_forward must be True or False, got 1": lambda model, _: attempt(model, overlap_forward=1),
    r"in_backward\(max_norm=...\) needs shard=True.*clip_grad_norm_": lambda model, _: attempt(model, max_norm=1.0),
    r"in_backward\(scaler=...\) needs shard=True": lambda model, _: attempt(model, scaler=torch.amp.GradScaler("cpu")),
    "optimizer must be a torch.optim.Optimizer": lambda model, _: dp_compile.optim.in_backward(model, model),
    r"join\(\) divides gradients after it": lambda model, _: dp_compile.join(model).__enter__(),
    "check_nan looks at gradients": lambda *_: attempt(
        dp_compile.replicate(Net(), config=dp_compile.ReplicateConfig(backend="aot_eager", check_nan=True))
    ),
    "layers.3.weight shares its memory with layers.0.weight": lambda *_: attempt(in_one_memory()),
}


@pytest.mark.usefixtures("fake_group")
def test_what_is_refused() -> None:
    model = dp_compile.replicate(Net(), config=SMALL)
    kept = dp_compile.optim.in_backward(model, torch.optim.SGD([model.norm.weight], lr=0.1))
    for text, wrong in REFUSED.items():
        with pytest.raises(dp_compile.DPCompileError, match=text):
            wrong(model, kept)


@pytest.mark.usefixtures("fake_group")
@pytest.mark.filterwarnings("ignore")  # loading it uses what torch itself deprecates
def test_torch_s_own_optimizers_in_the_backward_are_refused() -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward

    model = Net()
    _apply_optimizer_in_backward(torch.optim.SGD, [model.norm.weight], {"lr": 0.1})
    with pytest.raises(
        dp_compile.UnsupportedModuleError,
        match=r"norm.weight is updated in the backward by torch.*dp_compile.optim.in_backward",
    ):
        dp_compile.replicate(model, config=SMALL)
