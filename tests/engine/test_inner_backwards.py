"""Backwards inside a backward: what `test_semantics.py` does not compare with torch's DDP, and what is refused."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from parity import AOT, mlp
from torch import nn
from torch.utils.checkpoint import checkpoint

import dp_compile
from dp_compile.errors import ReductionError

# --- a node of both -------------------------------------------------------------------------------------------------


class Shares(nn.Module):
    """What it computes from its parameter is used inside of a reentrant checkpoint, and outside."""

    def __init__(self, function: Any, outside: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.function, self.outside = function, outside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.function(self.weight)
        product = torch.compile(lambda x, weight: torch.tanh(x @ weight.float()), backend="aot_eager")
        y = checkpoint(lambda x: product(x, weight), self.first(x), use_reentrant=True)
        result: torch.Tensor = self.last(product(y, weight) if self.outside else y)
        return result


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize("outside", [True, False])
@pytest.mark.parametrize("function", [torch.Tensor.double, lambda weight: weight])
def test_a_node_that_a_checkpoint_and_the_captured_backward_share(function: Any, outside: bool) -> None:
    """torch 2.13 loses gradients after it, without this package too."""
    torch.manual_seed(0)
    model = Shares(function, outside)
    twin, x = copy.deepcopy(model), torch.randn(3, 4)
    twin(x).square().sum().backward()
    dp_compile.replicate(model, config=AOT)
    loss = model(x).square().sum()
    with dp_compile.compiled_backward():
        if outside and function(x) is not x:
            with pytest.raises(ReductionError, match=r"reaches the parameter weight through ToCopyBackward0\. "):
                loss.backward()
        else:
            loss.backward()
            assert dp_compile.report(model).backwards["eager hooks"] == 1
            for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
                assert ours.grad is not None
                torch.testing.assert_close(2 * ours.grad, theirs.grad)  # the other rank of the fake group gives zeros
    dp_compile.unreplicate(model)


# --- two at a time --------------------------------------------------------------------------------------------------


class Waits(torch.autograd.Function):
    started, may_end = threading.Event(), threading.Event()

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        Waits.started.set()
        assert Waits.may_end.wait(60)
        return grad


@pytest.mark.usefixtures("fake_group")
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_two_backwards_of_one_module_at_a_time_are_refused() -> None:
    model = dp_compile.replicate(mlp(), config=AOT)
    compiled = torch.compile(model, backend="aot_eager")
    with torch.autograd.detect_anomaly(check_nan=False):  # not captured: a thread cannot be held up in a capture
        compiled(torch.ones(2, 6)).sum().backward()
        loss = Waits.apply(compiled(torch.ones(2, 6))).sum()
        slow = threading.Thread(target=loss.backward)
        slow.start()
        assert Waits.started.wait(60)
        try:
            with pytest.raises(ReductionError, match=r"two backwards of the module of 0\.weight run at the same time"):
                compiled(torch.ones(2, 6)).sum().backward()
        finally:
            Waits.may_end.set()
            slow.join()
        compiled(torch.ones(2, 6)).sum().backward()
    assert dp_compile.report(model).backwards["eager hooks"] == 3
    dp_compile.unreplicate(model)
