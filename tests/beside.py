"""Train a model with torch's DDP and its twin with ours, by the same steps, and compare after each."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from parity import compare
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dp_compile
from dp_compile.insight.report import Report

AOT = dp_compile.ReplicateConfig(backend="aot_eager")


def mlp(width: int = 6) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 6))


class Block(nn.Module):
    """Unlike torch's own containers, a module of the user's file is compiled by `Module.compile()`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layers(x)
        return result


class Untraceable(torch.autograd.Function):
    """The identity. Its backward cannot be captured as one graph."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return grad.clone()


class Fuse(torch.autograd.Function):
    """The identity, whose backward can be made to fail."""

    blown = False

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        if Fuse.blown:
            raise ValueError("blown")
        return grad.clone()


def batch(number: int, rows: int = 3) -> torch.Tensor:
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(10 * number + dist.get_rank()))


@dataclass(frozen=True)
class Side:
    """One of two models that train beside each other."""

    module: nn.Module
    run: Callable[..., torch.Tensor]
    optimizer: torch.optim.Optimizer
    no_sync: Callable[[], AbstractContextManager[None]]
    ours: bool
    state: dict[str, Any] = field(default_factory=dict)

    def loss(self, number: int) -> torch.Tensor:
        return self.run(batch(number)).square().mean()


def compile_whole(module: nn.Module) -> Any:
    return torch.compile(module, backend="aot_eager")


def not_compiled(module: nn.Module) -> Any:
    return module


Step = Callable[[Side, int], None]


def beside(
    build: Callable[[], nn.Module],
    step: Step,
    *,
    steps: int = 3,
    compile_model: Callable[[nn.Module], Any] = compile_whole,
    find_unused: bool = False,
    theirs: dict[str, Any] | None = None,
    **options: Any,
) -> Report:
    """Train `build()` twice, with torch's DDP and with ours, by the same steps; raise where they differ."""
    torch._dynamo.reset()
    with _both(build, compile_model, find_unused, theirs or {}, options) as sides:
        for number in range(steps):
            for side in sides:
                torch.manual_seed(100 * number + dist.get_rank())
                side.optimizer.zero_grad()
                step(side, number)
            compare(sides[0].module, sides[1].module, f"step {number}", rtol=1e-4, atol=1e-6)
            for side in sides:
                side.optimizer.step()
        compare(sides[0].module, sides[1].module, "the end", rtol=1e-4, atol=1e-6)
        return dp_compile.report(sides[0].module)


@contextmanager
def _both(
    build: Callable[[], nn.Module],
    compile_model: Callable[[nn.Module], Any],
    find_unused: bool,
    theirs_options: dict[str, Any],
    options: dict[str, Any],
) -> Iterator[tuple[Side, Side]]:
    torch.manual_seed(0)
    ours = build()
    torch.manual_seed(0)
    theirs = build()
    wrapped = DistributedDataParallel(theirs, find_unused_parameters=find_unused, **theirs_options)
    dp_compile.replicate(ours, **{"config": AOT, "find_unused_parameters": find_unused} | options)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (ours, theirs)]
    try:
        yield (
            Side(ours, compile_model(ours), optimizers[0], lambda: dp_compile.no_sync(ours), ours=True),
            Side(theirs, wrapped, optimizers[1], wrapped.no_sync, ours=False),
        )
    finally:
        dp_compile.unreplicate(ours)


def plain(side: Side, number: int) -> None:
    side.loss(number).backward()


def anomaly(side: Side, number: int) -> None:
    with warnings.catch_warnings(), torch.autograd.detect_anomaly(check_nan=False):
        warnings.simplefilter("ignore")
        side.loss(number).backward()


def in_cpp(side: Side, number: int) -> None:
    """The operator behind `backward()` in TorchScript: the engine is entered without Python."""
    loss = side.loss(number)
    if side.ours and number:  # the first backward of a module is to come through Python
        torch.ops.aten._backward(loss, [], None, None, False)
    else:
        loss.backward()


def compile_blocks(module: nn.Module) -> nn.Module:
    for each in module.children():
        each.compile(backend="aot_eager")
    return module


def train_beside(
    ours: Any,
    run: Callable[..., Any],
    theirs: Any,
    steps: range,
    broken: Callable[[int], bool],
    micro: int = 1,
    rows: int = 3,
    rtol: float = 1e-5,
    atol: float = 1e-7,
) -> None:
    """Train a module of ours, run by `run`, and its twin behind torch's DDP; compare gradients after each step.

    In a step in which `broken` holds on this rank, its backward is not captured.
    """
    sides = [(model, call, torch.optim.SGD(model.parameters(), 0.1)) for model, call in ((ours, run), (theirs, theirs))]
    for step in steps:
        for module, forward, optimizer in sides:
            optimizer.zero_grad()
            is_broken = module is ours and broken(step)
            for each in range(micro):
                silent = dp_compile.no_sync(ours) if module is ours else theirs.no_sync()
                with warnings.catch_warnings(), silent if each + 1 < micro else nullcontext():
                    warnings.simplefilter("ignore")
                    with torch.autograd.detect_anomaly(check_nan=False) if is_broken else nullcontext():
                        forward(batch(10 * step + each, rows)).square().mean().backward()
        for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            text = f"{name}, step {step}: "
            torch.testing.assert_close(mine.grad, other.grad, rtol=rtol, atol=atol, msg=lambda t, text=text: text + t)
        for _, _, optimizer in sides:
            optimizer.step()
    everything = torch.cat([parameter.detach().flatten() for parameter in ours.parameters()])
    first = everything.clone()
    dist.broadcast(first, 0)
    assert torch.equal(everything, first), "the ranks have drifted apart"


# --- in one process, on the fake group --------------------------------------------------------------------------


def expect_half(ours: nn.Module, theirs: nn.Module) -> None:
    """An all-reduce of the fake group returns its input: the average over two ranks is half of a gradient."""
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert mine.grad is not None, name
        assert other.grad is not None, name
        torch.testing.assert_close(mine.grad, other.grad / 2, msg=lambda message, n=name: f"{n}: {message}")


class Twin:
    """A replicated model and its plain twin, stepped together."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        self.plain = copy.deepcopy(model)
        self.model: Any = dp_compile.replicate(model, **{"config": AOT} | options)
        self.run: Callable[..., Any] = compile_whole(self.model)

    def step(self, *inputs: Any, loss: Callable[[Any], torch.Tensor] = lambda out: out.square().sum()) -> None:
        self.model.zero_grad()
        self.plain.zero_grad()
        loss(self.plain(*inputs)).backward()
        loss(self.run(*inputs)).backward()
        expect_half(self.model, self.plain)

    @property
    def report(self) -> Report:
        return dp_compile.report(self.model)
