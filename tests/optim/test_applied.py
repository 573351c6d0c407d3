"""torch's `_apply_optimizer_in_backward` before `replicate()`: no `step()`, and what DDP with one would do.

torch's DDP honours it on accelerators only (2.13: on a CPU its backward raises), so the reference steps by hand.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from beside import AOT, batch, compile_whole, not_compiled
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import dp_compile
from dp_compile.decentralized import decentralize
from dp_compile.testing.ranks import Ranks

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # loading it uses what torch itself deprecates
    from torch.distributed.optim import _apply_optimizer_in_backward, _get_in_backward_optimizers


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 6))


def applied(model: nn.Sequential) -> nn.Sequential:
    """Two classes, two learning rates of one of them; the norm has no optimizer at all."""
    _apply_optimizer_in_backward(torch.optim.SGD, model[0].parameters(), {"lr": 0.1, "momentum": 0.9})
    _apply_optimizer_in_backward(torch.optim.AdamW, [model[3].weight], {"lr": 0.02})
    _apply_optimizer_in_backward(torch.optim.AdamW, [model[3].bias], {"lr": 0.04, "weight_decay": 0.1})
    return model


def by_hand(model: nn.Sequential) -> list[torch.optim.Optimizer]:
    """The same, in the same order, for somebody who calls `step()`."""
    return [
        *(torch.optim.SGD([each], lr=0.1, momentum=0.9) for each in model[0].parameters()),
        torch.optim.AdamW([model[3].weight], lr=0.02),
        torch.optim.AdamW([model[3].bias], lr=0.04, weight_decay=0.1),
    ]


def load_again(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Every optimizer gets a copy of its own state: new groups, new tensors."""
    for optimizer in optimizers:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def compare(ours: nn.Module, theirs: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, msg=lambda text, name=name: f"{name}: {text}")
        assert (one.grad is None) is (other.grad is None)
        if one.grad is not None:
            torch.testing.assert_close(one.grad, other.grad)
    for mine, other in zip(_get_in_backward_optimizers(ours), optimizers, strict=True):
        assert mine.state_dict()["param_groups"] == other.state_dict()["param_groups"]
        states = mine.state_dict()["state"], other.state_dict()["state"]
        torch.testing.assert_close(*states)


WAYS: dict[str, Callable[[nn.Module], Any]] = {
    "captured": compile_whole,
    "not compiled": not_compiled,
    "one rank by hooks": compile_whole,
    "retain_graph": compile_whole,
}


def train(way: str) -> int:
    torch._dynamo.reset()
    ours, theirs = applied(net()), net()
    mine, others = _get_in_backward_optimizers(ours), by_hand(theirs)
    dp_compile.replicate(ours, config=AOT)
    wrapped, run = DistributedDataParallel(theirs), WAYS[way](ours)
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 2, gamma=0.5) for each in (*mine, *others)]
    for step in range(6):
        for model in (ours, theirs):
            model[2].zero_grad()  # type: ignore[index]
        for micro in range(2 if step == 3 else 1):
            local = step == 3 and micro == 0
            x, broken = batch(10 * step + micro), way == "one rank by hooks" and step in (2, 4) and dist.get_rank()
            with warnings.catch_warnings(), dp_compile.no_sync(ours) if local else nullcontext():
                warnings.simplefilter("ignore")
                with torch.autograd.detect_anomaly(check_nan=False) if broken else nullcontext():
                    run(x).square().mean().backward(retain_graph=way == "retain_graph")
            with wrapped.no_sync() if local else nullcontext():
                wrapped(x).square().mean().backward()
        for optimizer in others:
            optimizer.step()
            optimizer.zero_grad()
        compare(ours, theirs, others)
        with warnings.catch_warnings(action="error"):  # that nobody has called step()
            for scheduler in schedulers:
                scheduler.step()
        if step == 4:
            load_again(mine)
            load_again(others)
    updated = max((capture.updated for capture in dp_compile.report(ours).captures), default=0)
    dp_compile.unreplicate(ours)
    return updated


@pytest.mark.parametrize("way", WAYS)
def test_as_ddp_with_steps(ranks2: Ranks, way: str) -> None:
    """Classes, learning rates that schedulers change, accumulation, a state that is loaded in between."""
    for found in ranks2.run(train, way):
        assert found == (4 if way in ("captured", "one rank by hooks") else 0)


def train_inside() -> None:
    """Reentrant checkpoints: only a backward inside the backward reaches any parameter."""
    ours, theirs = applied(net()), net()
    others = by_hand(theirs)
    dp_compile.replicate(ours, config=AOT)
    for step in range(3):
        x = batch(step).requires_grad_()
        for model in (ours, theirs):
            model[2].zero_grad()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                checkpoint(model, x, use_reentrant=True).square().mean().backward()
        for parameter in theirs.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        for optimizer in others:
            optimizer.step()
            optimizer.zero_grad()
        compare(ours, theirs, others)
    dp_compile.unreplicate(ours)


def test_a_backward_that_only_one_inside_of_it_brings_gradients_to(ranks2: Ranks) -> None:
    ranks2.run(train_inside)


def differ() -> str:
    model = net()
    if dist.get_rank():
        _apply_optimizer_in_backward(torch.optim.SGD, [model[0].weight], {"lr": 0.1})
    try:
        dp_compile.replicate(model, config=AOT)
    except dp_compile.DesyncError as error:
        return str(error)
    return ""


def test_ranks_that_differ(ranks2: Ranks) -> None:
    for said in ranks2.run(differ):
        assert "optimizers in the backward" in said
        assert "0.weight: SGD" in said


@pytest.mark.usefixtures("fake_group")
class TestAlone:
    def test_unreplicated_they_step_as_before(self) -> None:
        ours, plain = applied(net()), applied(net())
        dp_compile.unreplicate(dp_compile.replicate(ours, config=AOT))
        for model in (ours, plain):
            model(batch(0)).sum().backward()
        compare(ours, plain, _get_in_backward_optimizers(plain))
        assert ours[0].weight.grad is None

    def test_warm_up_leaves_no_trace(self) -> None:
        torch._dynamo.reset()
        model = dp_compile.replicate(applied(net()), config=AOT)
        before = copy.deepcopy(model.state_dict())
        compiled = torch.compile(model, backend="aot_eager")
        dp_compile.warmup(compiled, [batch(0)], lambda x: compiled(x).sum())
        for name, value in model.state_dict().items():
            assert torch.equal(value, before[name])
        assert not any(each.state_dict()["state"].get(0) for each in _get_in_backward_optimizers(model))
        dp_compile.unreplicate(model)

    def test_what_is_refused(self) -> None:
        model = applied(net())
        _apply_optimizer_in_backward(torch.optim.SGD, [model[0].bias], {"lr": 0.1})
        with pytest.raises(dp_compile.ModuleError, match=r"more than once for 0\.bias"):
            dp_compile.replicate(model, config=AOT)
        model = net()
        _apply_optimizer_in_backward(torch.optim.LBFGS, [model[0].bias], {})
        with pytest.raises(dp_compile.ConfigError, match="LBFGS cannot update in the backward"):
            dp_compile.replicate(model, config=AOT)
        model = applied(net())
        with pytest.raises(dp_compile.ConfigError, match="Give the optimizer to decentralize"):
            decentralize(model, topology="complete", optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        replicated = dp_compile.replicate(applied(net()), config=AOT)
        with pytest.raises(dp_compile.ConfigError, match=r"another optimizer updates .* in the backward already"):
            dp_compile.optim.in_backward(replicated, torch.optim.SGD(replicated.parameters(), lr=0.1))
        dp_compile.unreplicate(replicated)
