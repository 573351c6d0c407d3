"""Parameters without a gradient that take part as zeros, and reduced gradients that are not finite."""

from __future__ import annotations

import copy
import itertools
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dp_compile
from dp_compile.engine.backward import AT_ONCE
from dp_compile.testing.ranks import Ranks


class Branches(nn.Module):
    """Which parameters take part depends on the batch; `never` takes part in none."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.never, self.last = (nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: torch.Tensor, way: int) -> torch.Tensor:
        branch = self.left if way % 2 == 0 else self.right
        out: torch.Tensor = self.last(branch(x))
        return out


def batch(step: int) -> tuple[torch.Tensor, int]:
    """Both ranks take the same branch in some steps, different ones in others."""
    generator = torch.Generator().manual_seed(100 * dist.get_rank() + step)
    return torch.randn(3, 6, generator=generator), dist.get_rank() * (step % 3) + step // 3


def average(module: nn.Module) -> None:
    """The definition: what is missing is zeros, then the mean over ranks, on every rank."""
    for parameter in module.parameters():
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        dist.all_reduce(grad)
        parameter.grad = grad.detach() / dist.get_world_size()


def run_zeros(way: str, micro_steps: int, kept: bool) -> dict[str, int]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    ours = Branches()
    plain = copy.deepcopy(ours)
    config = dp_compile.ReplicateConfig(
        backend="aot_eager",
        unused_parameters="zeros",
        ddp_python_hook=way != "torch reducer",
        bucket_cap_mb=0.0003,
    )
    dp_compile.replicate(ours, config=config)
    call = ours if way == "torch reducer" else torch.compile(ours, backend="aot_eager")
    for step in range(6):
        for model in (ours, plain):
            model.zero_grad(set_to_none=not kept)
        for micro_step in range(micro_steps):
            inputs = batch(step * micro_steps + micro_step)
            plain(*inputs).square().mean().backward()
            with dp_compile.no_sync(ours) if micro_step + 1 < micro_steps else nullcontext():
                with torch.autograd.set_detect_anomaly(way == "eager hooks", check_nan=False):
                    call(*inputs).square().mean().backward()
        average(plain)
        for (name, mine), other in zip(ours.named_parameters(), plain.parameters(), strict=True):
            assert mine.grad is not None, name
            torch.testing.assert_close(mine.grad, other.grad, msg=lambda text, n=f"step {step}: {name}": f"{n}: {text}")
    return dict(dp_compile.report(ours).backwards)


EVERY_DAY = {"captured": {(1, True), (2, False)}, "eager hooks": {(1, False), (2, True)}}
"""Without a compiler, all."""


@pytest.mark.parametrize(
    ("way", "micro_steps", "kept"),
    [
        pytest.param(way, *each, marks=() if each in EVERY_DAY.get(way, {each}) else pytest.mark.nightly)
        for way in ("captured", "eager hooks", "torch reducer")
        for each in itertools.product((1, 2), (False, True))
    ],
)
def test_zeros(ranks: Ranks, way: str, micro_steps: int, kept: bool) -> None:
    for backwards in ranks.run(run_zeros, way, micro_steps, kept):
        assert backwards[way] >= (AT_ONCE if way == "captured" else 6)  # each step has another graph


class Root(nn.Module):
    """The gradient of a square root at zero is infinite, though the loss is not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) + (self.scale * x).abs().sqrt()


def run_nan(value: float, way: str, checked: bool, factor: float = 1.0) -> str:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = dp_compile.replicate(
        Root(),
        config=dp_compile.ReplicateConfig(
            backend="aot_eager", check_nan=checked, ddp_python_hook=way != "torch reducer"
        ),
    )
    call = model if way == "torch reducer" else torch.compile(model, backend="aot_eager")
    x = torch.ones(2, 4)
    call(x).sum().backward()
    x[0, 2] = value if dist.get_rank() == 1 else 1.0
    try:
        with torch.autograd.set_detect_anomaly(way == "eager hooks", check_nan=False):
            (factor * call(x).sum()).backward()
    except dp_compile.ReductionError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("way", ["captured", "eager hooks", "torch reducer"])
def test_a_loss_that_is_not_finite_on_one_rank(ranks: Ranks, way: str) -> None:
    messages = ranks.run(run_nan, float("nan"), way, True)
    assert messages[0] == messages[1]
    assert "reduced gradients are not finite: scale (nan), first.weight (nan). The loss" in messages[0]
    assert "loss was not finite on rank(s) 1 of the group" in messages[0]


def test_a_gradient_that_is_not_finite(ranks: Ranks) -> None:
    messages = ranks.run(run_nan, 0.0, "captured", True)
    assert messages[0] == messages[1]
    assert "not finite: scale (nan). The loss was finite on every rank" in messages[0]


def test_a_gradient_that_is_infinite(ranks: Ranks) -> None:
    """Not one of them is a NaN."""
    for message in ranks.run(run_nan, 1.0, "captured", True, 3e38):
        assert "not finite: first.weight (inf), first.bias (inf). The loss was not finite on rank(s) 0, 1" in message


def test_without_the_check(ranks2: Ranks) -> None:
    assert ranks2.run(run_nan, float("nan"), "captured", False) == ["no error"] * 2
