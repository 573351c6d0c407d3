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
from twins import ADAMW, GIVEN, SGD, SMALL, Net, id_of, made, twins, two_groups

import dp_compile
from dp_compile.testing.ranks import Ranks

Compile = Callable[[nn.Module], Any]


def refused(match: str) -> Any:
    return pytest.raises(dp_compile.ReductionError, match=match)


class Inside(Net):
    """Only a backward inside the backward reaches any parameter."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = checkpoint(super().forward, x.requires_grad_(), use_reentrant=True)
        return result


def second_backward(build: Callable[[], nn.Module], compile_model: Compile) -> None:
    """An error in every way, so that no rank goes on alone."""
    both = twins(build, compile_model=compile_model)
    both.backward(0)
    with refused(r"before optimizer.step\(\).*no_sync\(\)"):
        both.backward(1)
    if build is Net:  # else what the inner backward brought is in `.grad`
        both.mine.step()
        both.other.step()
        both.other.zero_grad()
        both.train(2)


def kept_graph() -> None:
    both = twins()
    both.train(0)
    for run in (both.run, both.run_theirs):
        loss = run(batch(1)).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
    # Twice the gradient: the first one was kept in `.grad`, and reduced again.
    assert all(each.grad is None for each in both.ours.parameters())
    both.step()
    both.compare()


def no_zero_grad() -> None:
    """Nor may it matter which way a rank went."""
    both = twins()
    for number in range(4):
        both.backward(number, broken=number == 1 and dist.get_rank() == 0)
        both.step(zero=False)
        both.compare()


def checkpoints() -> None:
    both = twins(make=ADAMW)
    both.train(0, 1)
    both.backward(2)
    weights, state = copy.deepcopy((both.ours.state_dict(), both.mine.state_dict()))
    assert state.keys() == both.other.state_dict().keys()
    both.step()
    both.train(3)
    again = twins(make=ADAMW)
    for model, optimizer in ((again.ours, again.mine), (again.theirs, again.other)):
        model.load_state_dict(weights)
        optimizer.load_state_dict(copy.deepcopy(state))  # it keeps the tensors that it is given
    again.train(3)
    assert all(map(torch.equal, both.ours.parameters(), again.ours.parameters()))
    both.mine.load_state_dict(copy.deepcopy(state))  # in the middle of a run: its groups are new
    both.ours.load_state_dict(weights)
    both.backward(3)
    both.mine.step()
    assert all(map(torch.equal, both.ours.parameters(), again.ours.parameters()))


def hooks_copies_and_other_parameters() -> None:
    both = twins(max_norm=0.05)
    calls: list[str] = []
    both.mine.register_step_pre_hook(lambda *_: calls.append("before"))
    both.mine.register_step_post_hook(lambda *_: calls.append("after"))
    both.train(0)
    assert calls == ["before", "after"]
    for copied in (copy.deepcopy(both.mine), pickle.loads(pickle.dumps(both.mine))):
        # A plain one, over parameters of its own.
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
    text = str(dp_compile.report(both.ours))
    assert "left to step(): all parameters: the norm or the check is over 1 more parameters" in text


def in_join() -> None:
    """There gradients are divided after the backward, so `step()` updates."""
    both = twins(make=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    both.train(0)
    for model, run, optimizer in ((both.ours, both.run, both.mine), (both.theirs, both.run_theirs, both.other)):
        with dp_compile.join(model, divide_by_initial_world_size=False):
            for number in range(1 + dist.get_rank()):
                run(batch(number)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    both.train(1)


def unknown_scaler() -> None:
    both = twins()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(both.run(batch(0)).square().mean()).backward()
    with refused("scaler=scaler"):
        scaler.step(both.mine)


def options_change(compile_model: Compile) -> None:
    """The update was done with those of before; a rank that falls back would do it with those of now."""
    make = two_groups(torch.optim.AdamW, lr=torch.tensor(0.01), fused=True)
    both = twins(make=make, compile_model=compile_model)
    group = both.mine.param_groups[1]
    changes: dict[str, Callable[[], object]] = {
        "lr of parameter group 1": lambda: group.update(lr=0.02),
        "betas of parameter group 1": lambda: group.update(betas=(0.8, 0.9)),
        "lr of": lambda: both.mine.param_groups[0]["lr"].mul_(0.5),
    }
    for number, (text, change) in enumerate(changes.items()):
        both.backward(number)
        before = dict(group)
        change()
        with refused(rf"{text}.*between the backward and optimizer.step\(\)"):
            both.mine.step()
        group.update(before)
        if text != "lr of":
            both.step()  # and behind it they may change
            both.compare()


def loaded_between() -> None:
    """The first rank falls back: what the other has updated waits for `step()` there."""
    both = twins(make=ADAMW)
    both.train(0)
    state = copy.deepcopy(both.mine.state_dict())
    both.train(1)
    both.backward(2, broken=dist.get_rank() == 0)
    both.mine.load_state_dict(state)
    with refused(r"a state was loaded into the optimizer between the backward and optimizer.step\(\)"):
        both.mine.step()
    both.mine.zero_grad()
    both.ours.load_state_dict(both.theirs.state_dict())
    both.mine.load_state_dict(copy.deepcopy(both.other.state_dict()))  # and goes on, as one that left a step out
    both.theirs.zero_grad()
    both.train(3, 4)
    both.backward(5)
    both.mine.load_state_dict(copy.deepcopy(both.mine.state_dict()))
    dp_compile.unreplicate(both.ours)
    both.ours(batch(6)).square().mean().backward()
    both.mine.step()  # of an optimizer as any other


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


def other_memory() -> None:
    """Code that was compiled for tensors in memory of their own is not run for ones that share it."""
    both = twins(Given)
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


def gradient_after_the_update(way: str) -> None:
    """The plain loop would replace the other one, or add to it."""
    both = made(way)
    both.nearly = True
    both.train(0)
    both.backward(1)
    weight: Any = both.ours.layers[1].weight  # type: ignore[index,union-attr]
    assert weight.grad is None or "shard" in GIVEN[way]
    weight.grad = torch.ones_like(weight)
    before = [each.clone() for each in both.ours.parameters()]
    with refused(r"layers\..*set no .grad"):
        both.mine.step()
    assert all(map(torch.equal, before, both.ours.parameters()))
    both.ours.zero_grad()
    both.mine.step()
    both.other.step()
    both.compare()


def falls_back_and_changes() -> None:
    """On the first rank the gradient waits for `step()`; the other one has updated with it."""
    both = twins()
    weight: Any = both.ours.layers[1].weight  # type: ignore[index,union-attr]
    for number, change in enumerate(("set", "dropped", "written to")):
        both.backward(number, broken=dist.get_rank() == 0)
        if dist.get_rank() == 0:
            kept = weight.grad
            weight.grad = {"set": kept.clone(), "dropped": None, "written to": kept}[change]
            if change == "written to":
                kept.mul_(1.0)
            with refused(r"layers.1.weight got another gradient.*set no .grad"):
                both.mine.step()
            weight.grad = kept
        if change != "written to":
            both.step()
            both.compare()


def step_fails_once(compile_model: Compile) -> None:
    """In a hook of the user's, after ours: gradients are clipped once."""
    both = twins(compile_model=compile_model, max_norm=0.05)
    both.train(0)
    both.backward(1)

    def fails(*_: Any) -> None:
        raise RuntimeError("the user's")

    handle = both.mine.register_step_pre_hook(fails)
    with pytest.raises(RuntimeError, match="the user's"):
        both.mine.step()
    handle.remove()
    both.step()
    both.compare()
    both.train(2)


def second_step(way: str, compile_model: Compile) -> None:
    both = made(way, compile_model=compile_model)
    both.mine.step()  # before any backward, as state is initialised for a checkpoint
    both.train(0)
    with refused("called twice after one backward"):
        both.mine.step()
    with torch.enable_grad():
        nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()  # of another model: this one may have had no part in it
    both.mine.step()
    both.train(1)


def clipped_by_hand() -> None:
    """An error in every way, also where `.grad` is the reduced gradient."""
    both = twins(compile_model=not_compiled)
    both.train(0)
    both.backward(1)
    with refused("max_norm="):
        dp_compile.optim.clip_grad_norm_(both.ours.parameters(), 0.1)
    both.step()
    both.compare()
    assert not dp_compile.optim.clip_grad_norm_(both.ours.parameters(), 0.1)


def scaled_step_is_dropped(way: str, compile_model: Compile) -> None:
    scaler = torch.amp.GradScaler("cpu")
    both = made(way, given={"scaler": scaler}, compile_model=compile_model)
    scaler.scale(both.run(batch(0)).square().mean()).backward()
    with refused(r"before optimizer.step\(\).*scaler.update\(\)"):
        scaler.scale(both.run(batch(1)).square().mean()).backward()
    scaler.step(both.mine)
    scaler.update()
    scaler.scale(both.run(batch(2)).square().mean()).backward()


def removed(way: str) -> None:
    both = made(way)
    both.nearly = True
    both.train(0)
    second = SGD(both.ours.parameters())
    with pytest.raises(dp_compile.ConfigError, match=r"remove_in_backward\(other_optimizer\)"):
        dp_compile.optim.in_backward(both.ours, second)
    dp_compile.optim.remove_in_backward(both.mine)
    both.train(1)  # the first one steps as any optimizer does
    with pytest.raises(dp_compile.ConfigError, match="does not update in the backward"):
        dp_compile.optim.remove_in_backward(both.mine)
    state = copy.deepcopy(both.mine.state_dict())
    torch.testing.assert_close(state, both.other.state_dict())
    dp_compile.optim.in_backward(both.ours, second, **GIVEN[way])
    second.load_state_dict(state)
    both.mine = second
    both.train(2, 3)
    assert both.updated == 10


@pytest.mark.parametrize(
    ("scenario", "args"),
    [
        (second_backward, (Net, compile_whole)),
        (second_backward, (Net, not_compiled)),
        (second_backward, (Inside, not_compiled)),
        (kept_graph, ()),
        (no_zero_grad, ()),
        (checkpoints, ()),
        (hooks_copies_and_other_parameters, ()),
        (in_join, ()),
        (unknown_scaler, ()),
        (options_change, (compile_whole,)),
        (options_change, (not_compiled,)),
        (loaded_between, ()),
        (other_memory, ()),
        (gradient_after_the_update, ("sharded",)),
        (gradient_after_the_update, ("overlapping",)),
        (falls_back_and_changes, ()),
        (step_fails_once, (compile_whole,)),
        (step_fails_once, (not_compiled,)),
        (second_step, ("whole", compile_whole)),
        (second_step, ("sharded", not_compiled)),
        (clipped_by_hand, ()),
        (scaled_step_is_dropped, ("whole", compile_whole)),
        (scaled_step_is_dropped, ("sharded", not_compiled)),
        (removed, ("whole",)),
        (removed, ("next forward",)),
    ],
    ids=id_of,
)
def test_around_the_step(ranks2: Ranks, scenario: Callable[..., Any], args: tuple[Any, ...]) -> None:
    ranks2.run(scenario, *args)


# --- what is refused --------------------------------------------------------------------------------------------------


class Own(torch.optim.SGD):
    pass


def attempt(model: Any, kind: Any = torch.optim.SGD, *, of: Any = None, **options: Any) -> Any:
    return dp_compile.optim.in_backward(model, kind((of or model).parameters()), **options)


optim = torch.optim
REFUSED: dict[str, Callable[[Any, Any], object]] = {
    "is not replicated": lambda model, _: attempt(Net()),
    "has no trainable parameter of this module": lambda model, _: attempt(model, of=Net()),
    "LBFGS cannot update in the backward: it evaluates the model again": lambda model, _: attempt(model, optim.LBFGS),
    "SparseAdam cannot update in the backward: it needs": lambda model, _: attempt(model, optim.SparseAdam),
    "Own is not of torch.optim": lambda model, _: attempt(model, Own),
    r"SGD\(differentiable=True\)": lambda model, _: attempt(model, partial(optim.SGD, differentiable=True)),
    "Adafactor cannot be sharded: it looks at a parameter as a whole.*Use shard=False, or one of SGD, Adam": (
        lambda model, _: attempt(model, optim.Adafactor, of=model.layers[0], shard=True)
    ),
    "another optimizer updates norm.weight in the backward already": lambda model, _: attempt(model),
    "updates in the backward already": lambda model, kept: dp_compile.optim.in_backward(model, kept),
    "max_norm must be a number > 0": lambda model, _: attempt(model, max_norm=0.0),
    "max_norm must be a number > 0 or None, got nan": lambda model, _: attempt(model, max_norm=float("nan")),
    "scaler must be a torch.amp.GradScaler": lambda model, _: attempt(model, scaler=1),
    "shard must be True or False, got 1": lambda model, _: attempt(model, shard=1),
    "overlap_forward must be True or False, got 1": lambda model, _: attempt(model, overlap_forward=1),
    "together with max_norm": lambda model, _: attempt(model, overlap_forward=True, max_norm=1.0),
    "together with scaler": lambda model, _: attempt(
        model, overlap_forward=True, scaler=torch.amp.GradScaler("cpu", enabled=False)
    ),
    "optimizer must be a torch.optim.Optimizer": lambda model, _: dp_compile.optim.in_backward(model, model),
    "was given a closure": lambda model, kept: kept.step(closure=lambda: 0.0),
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
    with pytest.raises(dp_compile.ModuleError, match=r"called for norm.weight.*dp_compile.optim.in_backward"):
        dp_compile.replicate(model, config=SMALL)
