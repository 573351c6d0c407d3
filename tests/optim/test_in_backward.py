"""Updates in the backward: the same parameters as torch's DDP with the same optimizer, in every way, on every rank."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from beside import batch, compile_whole, not_compiled
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dp_compile
from dp_compile.testing.ranks import Ranks

SMALL = dp_compile.ReplicateConfig(backend="aot_eager", bucket_cap_mb=1e-4)
"""Buckets of about one layer."""

Make = Callable[[Any], torch.optim.Optimizer]


class Net(nn.Module):
    """Two layers share a weight, so the gradient of one input is computed after a gradient of that weight is."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.norm = nn.LayerNorm(6)
        if tied:
            self.layers[3].weight = self.layers[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) + x
        result: torch.Tensor = self.norm(x)
        return result


def two_groups(kind: Any, **options: Any) -> Make:
    def make(parameters: Any) -> torch.optim.Optimizer:
        every = list(parameters)
        flat = [each for each in every if each.dim() == 1]
        matrices = [each for each in every if each.dim() > 1]
        optimizer: torch.optim.Optimizer = kind([{"params": matrices}, {"params": flat, "lr": 0.03}], **options)
        return optimizer

    return make


SGD = two_groups(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)
OPTIMIZERS: dict[str, Make] = {
    "sgd": SGD,
    "adamw": two_groups(torch.optim.AdamW, lr=0.01),
    "adamw_foreach": two_groups(torch.optim.AdamW, lr=0.01, foreach=True),
    "adamw_fused": two_groups(torch.optim.AdamW, lr=torch.tensor(0.01), fused=True),
    "adafactor": two_groups(torch.optim.Adafactor, lr=0.01),
    "rmsprop": two_groups(torch.optim.RMSprop, lr=0.01, momentum=0.5),
}


@dataclass
class Pair:
    """A model of ours whose optimizer updates in the backward, and torch's DDP with the same optimizer."""

    ours: nn.Module
    run: Any
    theirs: DistributedDataParallel
    mine: torch.optim.Optimizer
    other: torch.optim.Optimizer
    max_norm: float | None = None

    def backward(self, number: int, *, sync: bool = True, broken: bool = False, **options: Any) -> None:
        with warnings.catch_warnings(), nullcontext() if sync else dp_compile.no_sync(self.ours):
            warnings.simplefilter("ignore")
            with torch.autograd.detect_anomaly(check_nan=False) if broken else nullcontext():
                self.run(batch(number)).square().mean().backward(**options)
        with nullcontext() if sync else self.theirs.no_sync():
            self.theirs(batch(number)).square().mean().backward(**options)

    def step(self) -> None:
        self.mine.step()
        if self.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(
                [each for group in self.other.param_groups for each in group["params"]], self.max_norm
            )
        self.other.step()
        for optimizer in (self.mine, self.other):
            optimizer.zero_grad()

    def compare(self, *, exact: bool = False, rtol: float = 1e-5, atol: float = 1e-6) -> None:
        bounds = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": rtol, "atol": atol}
        for (name, mine), other in zip(self.ours.named_parameters(), self.theirs.parameters(), strict=True):
            torch.testing.assert_close(mine, other, **bounds, msg=lambda text, name=name: f"{name}: {text}")
        everything = torch.cat([each.detach().flatten() for each in self.ours.parameters()])
        first = everything.clone()
        dist.broadcast(first, 0)
        assert torch.equal(everything, first), "the ranks have drifted apart"


def pair(
    build: Callable[[], nn.Module] = Net,
    make: Make = SGD,
    *,
    compile_model: Callable[[nn.Module], Any] = compile_whole,
    config: dp_compile.ReplicateConfig = SMALL,
    max_norm: float | None = None,
    options: dict[str, Any] | None = None,
    **given: Any,
) -> Pair:
    torch._dynamo.reset()
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(build())
    ours, theirs = models
    wrapped = DistributedDataParallel(
        theirs, find_unused_parameters=(options or {}).get("find_unused_parameters", False)
    )
    dp_compile.replicate(ours, config=config, **(options or {}))
    mine, other = make(ours.parameters()), make(theirs.parameters())
    assert dp_compile.optim.in_backward(ours, mine, max_norm=max_norm, **given) is mine
    return Pair(ours, compile_model(ours), wrapped, mine, other, max_norm)


def updated_in_backward(model: nn.Module) -> int:
    return max((record.updated for record in dp_compile.report(model).captures), default=0)


def train(
    name: str, backend: str, max_norm: float | None, in_flight: int | None, compile_model: Callable[[nn.Module], Any]
) -> tuple[int, int]:
    config = dp_compile.ReplicateConfig(backend=backend, bucket_cap_mb=1e-4)  # type: ignore[arg-type]
    both = pair(
        make=OPTIMIZERS[name],
        compile_model=compile_model,
        config=config,
        max_norm=max_norm,
        buckets_in_flight=in_flight,
    )
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 2, gamma=0.5) for each in (both.mine, both.other)]
    for number in range(5):
        both.backward(number)
        if compile_model is compile_whole:
            assert all(each.grad is None for each in both.ours.parameters())
        both.step()
        for scheduler in schedulers:
            scheduler.step()
        both.compare()
    return updated_in_backward(both.ours), len(dp_compile.report(both.ours).captures)


@pytest.mark.parametrize("max_norm", [None, 0.05])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_same_parameters_as_ddp(ranks: Ranks, name: str, max_norm: float | None) -> None:
    """Two parameter groups and a scheduler; a changed learning rate compiles nothing anew."""
    for updated, captures in ranks.run(train, name, "aot_eager", max_norm, None, compile_whole):
        assert (updated, captures) == (10, 1)


@pytest.mark.parametrize("max_norm", [None, 0.05])
def test_the_same_parameters_if_nothing_is_compiled(ranks: Ranks, max_norm: float | None) -> None:
    for updated, captures in ranks.run(train, "adamw", "aot_eager", max_norm, None, not_compiled):
        assert (updated, captures) == (0, 0)


@pytest.mark.parametrize("in_flight", [None, 1])
def test_the_same_parameters_in_generated_code(ranks: Ranks, in_flight: int | None) -> None:
    for updated, captures in ranks.run(train, "adamw", "inductor", None, in_flight, compile_whole):
        assert (updated, captures) == (10, 1)
