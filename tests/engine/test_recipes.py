"""What torch's DDP allows: SAM, embeddings with a norm, gradients of inputs, complex numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from beside import AOT, Side, Step, anomaly, batch, beside, compile_whole, mlp, not_compiled
from torch import nn

import dp_compile
from dp_compile.errors import ReductionError
from dp_compile.testing.ranks import Ranks

WAYS: dict[str, Any] = {"captured": compile_whole, "not compiled": not_compiled}


def sharpness_aware(side: Side, number: int) -> None:
    """As its README says for DDP: the first backward is local, the step back comes behind the second."""
    with side.no_sync():
        side.loss(number).backward()
    moved = {}
    with torch.no_grad():
        for parameter in side.module.parameters():
            assert parameter.grad is not None
            moved[parameter] = 0.05 * parameter.grad
            parameter.add_(moved[parameter])
    side.optimizer.zero_grad(set_to_none=number % 2 == 0)
    side.loss(number).backward()
    with torch.no_grad():
        for parameter, change in moved.items():
            parameter.sub_(change)


class Renormalised(nn.Module):
    """The forward changes the embedding's weight itself, also between micro steps."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layers = nn.Embedding(12, 6, max_norm=1.0), mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = (x.abs() * 3).long().clamp(max=11)
        result: torch.Tensor = self.layers(self.table(tokens).sum(1))
        return result


def accumulated(side: Side, number: int) -> None:
    with side.no_sync():
        side.loss(number).backward()
    side.loss(number + 50).backward()


def input_gradients(side: Side, number: int) -> None:
    """An adversarial example first: a backward that accumulates into the input only."""
    x = batch(number).requires_grad_()
    if side.ours:
        side.run(x).square().mean().backward(inputs=[x])
    else:
        side.module(x).square().mean().backward(inputs=[x])
    assert x.grad is not None
    assert all(parameter.grad is None for parameter in side.module.parameters())
    side.run(x.detach() + x.grad.sign() / 10).square().mean().backward()


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.back = mlp(), nn.Linear(6, 6)
        self.filter = nn.Parameter(torch.randn(6, 4, dtype=torch.complex64).t())
        self.phase = nn.Parameter(torch.randn((), dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turned = torch.fft.rfft(self.layers(x)) @ self.filter * self.phase
        result: torch.Tensor = self.back(torch.fft.irfft(turned[..., :4], n=6))
        return result


RECIPES: dict[str, tuple[Any, Step]] = {
    "sharpness-aware": (mlp, sharpness_aware),
    "max_norm": (Renormalised, accumulated),
    "input gradients": (mlp, input_gradients),
    "complex": (Complex, accumulated),
    "complex, eager hooks": (Complex, anomaly),
}


def run_recipe(recipe: str, way: str) -> None:
    build, step = RECIPES[recipe]
    beside(build, step, compile_model=WAYS[way])


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("way", WAYS)
def test_recipe_beside_torch_ddp(ranks: Ranks, recipe: str, way: str) -> None:
    ranks.run(run_recipe, recipe, way)


# --- what is still found -----------------------------------------------------------------------------------------


def run_step_after_local(way: str) -> str:
    """Steps on local gradients, on rank 1 only."""
    torch.manual_seed(0)
    model = dp_compile.replicate(mlp(), config=AOT)
    run, optimizer = WAYS[way](model), torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        with dp_compile.no_sync(model):
            run(batch(0)).square().mean().backward()
        if dist.get_rank() == 1:
            optimizer.step()
        run(batch(1)).square().mean().backward()
    except ReductionError as error:
        return str(error)
    finally:
        dp_compile.unreplicate(model)
    return "no error"


@pytest.mark.parametrize("way", WAYS)
def test_a_step_on_local_gradients_of_one_rank_is_an_error_on_all(ranks2: Ranks, way: str) -> None:
    first, second = ranks2.run(run_step_after_local, way)
    assert "parameters of another rank changed" in first
    assert "0.weight, 0.bias" in second


@pytest.mark.usefixtures("fake_group")
def test_some_parameters_as_inputs() -> None:
    model = dp_compile.replicate(mlp(), config=AOT)
    with pytest.raises(ReductionError, match=r"backward\(inputs=\.\.\.\) names some parameters .* not 0\.bias, 2\."):
        model(torch.ones(2, 6)).sum().backward(inputs=[model[0].weight])
    dp_compile.unreplicate(model)


@pytest.mark.usefixtures("fake_group")
def test_torchs_own_capture_of_a_forward_that_was_not_compiled() -> None:
    """torch advises python_reducer, which is refused here: the error names what to use instead."""
    model = dp_compile.replicate(mlp(), config=AOT)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        with pytest.raises(ReductionError, match=r"dp_compile\.compiled_backward\(\)"):
            model(torch.ones(2, 6)).sum().backward()
    dp_compile.unreplicate(model)
