"""Backwards inside a backward, by any function, in every way."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fuzzing import RecomputedFunction
from on_ranks import on_ranks
from parity import (
    AOT,
    Block,
    Side,
    Step,
    anomaly,
    batch,
    beside,
    compile_blocks,
    compile_whole,
    in_cpp,
    mlp,
    not_compiled,
    plain,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

import dp_compile
from dp_compile.errors import ReductionError
from dp_compile.testing.ranks import Ranks


class Model(nn.Module):
    """Blocks that are recomputed, and a part that is not, unless `everything` is recomputed."""

    def __init__(self, everything: bool, reentrant: bool = False) -> None:
        super().__init__()
        self.first, self.middle, self.last = Block(), Block(), Block()
        self.everything, self.reentrant = everything, reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        for block in (self.first, self.middle):
            x = checkpoint(block, x, use_reentrant=True) if self.reentrant else RecomputedFunction.apply(block, x)
        result: torch.Tensor = RecomputedFunction.apply(self.last, x) if self.everything else self.last(x)
        return result


WAYS: dict[str, tuple[Any, Any]] = {
    "compiled blocks": (compile_blocks, plain),
    "eager hooks": (compile_blocks, anomaly),
    "not compiled": (not_compiled, plain),
}


def run_inner(way: str, everything: bool, reentrant: bool) -> None:
    compile_model, step = WAYS[way]
    beside(lambda: Model(everything, reentrant), step, compile_model=compile_model)


@pytest.mark.parametrize(("everything", "reentrant"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("way", WAYS)
def test_inner_backwards_are_parts_of_the_outermost(ranks: Ranks, way: str, everything: bool, reentrant: bool) -> None:
    ranks.run(run_inner, way, everything, reentrant)


@on_ranks("ranks")
def test_what_inner_backwards_use_is_not_taken_for_unused() -> None:
    """torch's DDP takes it for that."""
    torch.manual_seed(0)
    model = Model(everything=False)
    alone = copy.deepcopy(model)
    dp_compile.replicate(model, config=AOT, find_unused_parameters=True)
    for number in range(2):
        for each in (model, alone):
            each.zero_grad()
            each(batch(number)).square().mean().backward()
        for mine, other in zip(model.parameters(), alone.parameters(), strict=True):
            dist.all_reduce(other.grad)
            torch.testing.assert_close(mine.grad, other.grad / dist.get_world_size())
    dp_compile.unreplicate(model)


# --- started in C++, and past torch.autograd --------------------------------------------------------------------------


def past_torch(side: Side, number: int) -> None:
    """As Megatron's schedules do."""
    loss = side.loss(number)
    if not side.ours or not number:
        loss.backward()
        return
    torch.autograd.Variable._execution_engine.run_backward(
        tensors=(loss,),
        grad_tensors=(torch.ones_like(loss),),
        keep_graph=False,
        create_graph=False,
        inputs=(),
        allow_unreachable=True,
        accumulate_grad=True,
    )


def run_entry(step: Step, compile_model: Any) -> None:
    beside(mlp, step, compile_model=compile_model)


@pytest.mark.parametrize("compile_model", [compile_whole, not_compiled])
@pytest.mark.parametrize("step", [past_torch, in_cpp])
def test_a_backward_that_does_not_come_from_torch_autograd(ranks: Ranks, step: Step, compile_model: Any) -> None:
    ranks.run(run_entry, step, compile_model)


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
    """torch 2.13 loses gradients behind it, without this package too."""
    torch.manual_seed(0)
    model = Shares(function, outside)
    twin, x = copy.deepcopy(model), torch.randn(3, 4)
    twin(x).square().sum().backward()
    dp_compile.replicate(model, config=AOT)
    loss = model(x).square().sum()
    with dp_compile.compiled_backward():
        if outside and function(x) is not x:
            with pytest.raises(ReductionError, match=r"reaches the parameter weight through ToCopyBackward0, "):
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
