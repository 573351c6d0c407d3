"""Gradients in memory of their own: what a graph returns twice is copied, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from graphs import trace
from torch import fx, nn

import dp_compile
from dp_compile.passes.pipeline import OwnMemory

aten = torch.ops.aten


def separated(function: Callable[..., Any], *inputs: torch.Tensor) -> fx.GraphModule:
    module = trace(function, *inputs)
    OwnMemory()(module.graph)
    module.graph.lint()
    module.recompile()
    return module


def copies(module: fx.GraphModule) -> int:
    return len(module.graph.find_nodes(op="call_function", target=aten.clone.default))


def twice(x: torch.Tensor) -> Any:
    found = x.sum(0)
    return found, found


def overlapping(x: torch.Tensor) -> Any:
    found = x * 2
    return found[:2], found[1:]


@pytest.mark.parametrize(
    ("function", "expected"),
    [(twice, 1), (overlapping, 1)],
)
def test_what_is_returned(function: Callable[..., Any], expected: int) -> None:
    x = torch.randn(4, 3)
    module = separated(function, x)
    assert copies(module) == expected
    found = module(x)
    for one, other in zip(found, function(x), strict=True):
        assert torch.equal(one, other)
    for each in found:
        each.fill_(7.0)  # of no other
        assert sum(bool((one == 7.0).any()) for one in found) == 1
        each.fill_(0.0)


# --- with Inductor, which takes copies out ----------------------------------------------------------------------


class Twice(nn.Module):
    """A weight and what is added to it have one gradient; that of `whole` is what theirs is computed from."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.more = nn.Parameter(torch.randn(6, 6)), nn.Parameter(torch.randn(6, 6))
        self.whole, self.bias = nn.Parameter(torch.randn(4, 6)), nn.Parameter(torch.zeros(6))
        self.last = nn.Linear(6, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.linear(x, self.weight + self.more) + self.whole + self.bias
        result: torch.Tensor = self.last(torch.tanh(x))
        return result


def batch(number: int) -> torch.Tensor:
    return 0.01 * torch.randn(4, 6, generator=torch.Generator().manual_seed(number))


def loss_of(model: Any, number: int) -> torch.Tensor:
    loss: torch.Tensor = model(batch(number)).square().sum()
    return loss


def test_gradients_that_are_clipped(fake_group: dist.ProcessGroup) -> None:
    """Of parameters beside the replicated module, in the same captured backward."""
    torch._dynamo.reset()
    models = [nn.Sequential(Twice(), nn.Linear(6, 6)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    replicated = dp_compile.replicate(models[0][1])
    for run, model in ((torch.compile(models[0]), models[0]), (models[1], models[1])):
        loss_of(run, 0).backward()
        torch.nn.utils.clip_grad_norm_(model[0].parameters(), 0.1)
    for one, other in zip(models[0][0].parameters(), models[1][0].parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    assert dict(dp_compile.report(replicated).backwards) == {"captured": 1}
    dp_compile.unreplicate(replicated)


class Viewed(nn.Module):
    """The gradient of one weight is a view of the other's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.square, self.flat = nn.Parameter(torch.randn(6, 6)), nn.Parameter(torch.randn(36))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x @ (self.square + self.flat.view(6, 6)))


def test_gradients_that_are_added_to(fake_group: dist.ProcessGroup) -> None:
    """`torch.compile` alone is wrong here."""
    torch._dynamo.reset()
    model, plain = Viewed(), Viewed()
    run = torch.compile(dp_compile.replicate(model))
    for number in range(2):
        with dp_compile.no_sync(model):
            loss_of(run, number).backward()
        loss_of(plain, number).backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    dp_compile.unreplicate(model)
