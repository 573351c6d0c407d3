"""Train one model with `dp_compile` and its twin with torch's DDP, and compare gradients and parameters each step."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dp_compile
from dp_compile.insight.report import Report

Batch = tuple[Any, ...]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One comparison. `build` makes the model, `batch(rank, step)` its inputs; the loss is a mean of squares."""

    build: Callable[[], nn.Module]
    batch: Callable[[int, int], Batch]
    loss: Callable[[Any], torch.Tensor] = field(default=lambda output: _mean_square(output))
    steps: int = 4
    set_to_none: Callable[[int], bool] = field(default=lambda step: True)
    micro_steps: int = 1
    autocast: bool = False
    compile_model: Callable[[nn.Module], Any] = field(default=lambda model: torch.compile(model, backend="aot_eager"))
    options: dict[str, Any] = field(default_factory=dict)
    config: dp_compile.ReplicateConfig = field(default_factory=dp_compile.ReplicateConfig)
    backend: str = "aot_eager"
    rtol: float = 1e-5
    atol: float = 1e-6


def _mean_square(output: Any) -> torch.Tensor:
    return output.float().square().mean()


def train_both(case: Case) -> Report:
    """Run a case on this rank; raises where the two differ. Returns our report."""
    torch.manual_seed(0)
    ours = case.build()
    theirs = DistributedDataParallel(
        copy.deepcopy(ours), find_unused_parameters=case.options.get("find_unused_parameters", False)
    )
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.add_(dist.get_rank())  # replicate() has to undo this
    config = dataclasses.replace(case.config, backend=case.backend)
    dp_compile.replicate(ours, config=config, **case.options)
    compiled = case.compile_model(ours)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (ours, theirs)]
    for step in range(case.steps):
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=case.set_to_none(step))
        for micro_step in range(case.micro_steps):
            batch = case.batch(dist.get_rank(), step * case.micro_steps + micro_step)
            local = micro_step + 1 < case.micro_steps
            with dp_compile.no_sync(ours) if local else nullcontext():
                _backward(case, compiled, batch)
            with theirs.no_sync() if local else nullcontext():
                _backward(case, theirs, batch)
        compare(ours, theirs.module, f"step {step}", rtol=case.rtol, atol=case.atol)
        for optimizer in optimizers:
            optimizer.step()
    compare(ours, theirs.module, "the end", rtol=case.rtol, atol=case.atol)
    result = dp_compile.report(ours)
    dp_compile.unreplicate(ours)
    return result


def _backward(case: Case, model: Any, batch: Batch) -> None:
    with torch.autocast("cpu", torch.bfloat16) if case.autocast else nullcontext():
        loss = case.loss(model(*batch))
    loss.backward()


def compare(ours: nn.Module, theirs: nn.Module, when: str, *, rtol: float, atol: float) -> None:
    """Gradients, parameters and buffers, by name; also the layout of the gradients.

    Buffers on the first rank only, whose buffers count: torch's DDP hands them to the others one forward later.
    """
    if dist.get_rank() == 0:
        for (name, mine), other in zip(ours.named_buffers(), theirs.buffers(), strict=True):
            torch.testing.assert_close(mine, other, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{when}: {n}: {m}")
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert (mine.grad is None) == (other.grad is None), f"{when}: gradient of {name}"
        if mine.grad is not None and other.grad is not None:
            assert _layout(mine.grad) == _layout(other.grad), f"{when}: strides of the gradient of {name}"
            torch.testing.assert_close(
                mine.grad, other.grad, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{when}: gradient of {n}: {m}"
            )
        torch.testing.assert_close(
            mine, other, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{when}: parameter {n}: {m}"
        )


def _layout(tensor: torch.Tensor) -> list[int]:
    """Strides, but of dimensions of size one, where any stride means the same."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1]
