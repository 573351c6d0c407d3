"""Gradient semantics: each test trains beside torch's DDP on two ranks, or says where the two differ.

`docs/semantics.md` has the table of all lines with their tests.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parity import compare
from ranks import Ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import dp_compile
from dp_compile import _torch
from dp_compile.report import Report

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
    comparison: Callable[..., None] = compare,
) -> Report:
    """Train `build()` twice, with torch's DDP and with ours, by the same steps; raise where they differ."""
    torch._dynamo.reset()
    with _both(build, compile_model, find_unused) as sides:
        for number in range(steps):
            for side in sides:
                torch.manual_seed(100 * number + dist.get_rank())
                side.optimizer.zero_grad()
                step(side, number)
            comparison(sides[0].module, sides[1].module, f"step {number}", rtol=1e-4, atol=1e-6)
            for side in sides:
                side.optimizer.step()
        comparison(sides[0].module, sides[1].module, "the end", rtol=1e-4, atol=1e-6)
        return dp_compile.report(sides[0].module)


@contextmanager
def _both(
    build: Callable[[], nn.Module], compile_model: Callable[[nn.Module], Any], find_unused: bool
) -> Iterator[tuple[Side, Side]]:
    torch.manual_seed(0)
    ours = build()
    torch.manual_seed(0)
    theirs = build()
    wrapped = DistributedDataParallel(theirs, find_unused_parameters=find_unused)
    dp_compile.replicate(ours, config=AOT, find_unused_parameters=find_unused)
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


# --- accumulation -----------------------------------------------------------------------------------------------


def gloo_calls(work: Callable[[], None]) -> dict[str, int]:
    """The collectives that gloo runs for `work`, by kind."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        work()
    return {each.key: each.count for each in profile.key_averages() if each.key.startswith("gloo:")}


def accumulate() -> tuple[list[dict[str, int]], int, list[tuple[int, int]]]:
    """Three rounds of two local steps and one with a sync. Returns collectives, buckets, and compilations so far."""
    torch._dynamo.reset()
    model = dp_compile.replicate(mlp(), config=AOT, bucket_cap_mb=1e-6)
    compiled = torch.compile(model, backend="aot_eager")
    calls, compilations = [], []

    def local_steps() -> None:
        with dp_compile.no_sync(model):
            for number in range(2):
                compiled(batch(number)).square().mean().backward()

    for _ in range(3):
        model.zero_grad()
        calls.append(gloo_calls(local_steps))
        calls.append(gloo_calls(lambda: compiled(batch(2)).square().mean().backward()))
        compilations.append((_torch.captures(), torch._dynamo.utils.counters["stats"]["unique_graphs"]))
    return calls, len(dp_compile.report(model).plan.buckets), compilations


def test_accumulation_costs_no_collectives_and_no_recompilation(ranks2: Ranks) -> None:
    for calls, buckets, compilations in ranks2.run(accumulate):
        assert buckets > 1
        assert calls == [{}, {"gloo:all_reduce": buckets}] * 3
        assert len(set(compilations)) == 1


# --- several forwards, several backwards ------------------------------------------------------------------------


def two_forwards(side: Side, number: int) -> None:
    (side.loss(number) + 2 * side.loss(number + 50)).backward()


def forward_without_backward(side: Side, number: int) -> None:
    with torch.no_grad():
        side.run(batch(number + 70))
    side.loss(number).backward()


def accumulation(side: Side, number: int) -> None:
    with side.no_sync():
        side.loss(number).backward()
        side.loss(number + 50).backward()
    side.loss(number + 90).backward()


def twice_through_one_graph(side: Side, number: int) -> None:
    """torch's DDP reduces only the first backward of a forward, so it runs the forward twice."""
    loss = side.loss(number)
    loss.backward(retain_graph=side.ours)
    if not side.ours:
        loss = side.loss(number)
    loss.backward()


def local_then_synced_through_one_graph(side: Side, number: int) -> None:
    with side.no_sync():
        loss = side.loss(number)
        loss.backward(retain_graph=side.ours)
    if not side.ours:
        loss = side.loss(number)
    loss.backward()


def freeze_later(side: Side, number: int) -> None:
    side.module.get_parameter("0.bias").requires_grad_(number == 0 or number > 2)
    plain(side, number)


def scaled(side: Side, number: int) -> None:
    """Rank 1 overflows in the second step: both ranks see it, skip the step and lower the scale."""
    scaler = side.state.setdefault("scaler", torch.amp.GradScaler("cpu", init_scale=1024.0))
    factor = float("inf") if number == 1 and dist.get_rank() == 1 else 1.0
    scaler.scale(side.loss(number) * factor).backward()
    scaler.unscale_(side.optimizer)
    scaler.step(side.optimizer)
    scaler.update()
    assert scaler.get_scale() == (1024.0 if number == 0 else 512.0)
    if number == 1:
        side.optimizer.zero_grad()


def anomaly(side: Side, number: int) -> None:
    with warnings.catch_warnings(), torch.autograd.detect_anomaly(check_nan=False):
        warnings.simplefilter("ignore")
        side.loss(number).backward()


def create_graph(side: Side, number: int) -> None:
    """torch's DDP raises ("a leaf Variable that requires grad is being used in an in-place operation")."""
    loss = side.module(batch(number)).square().mean() if side.ours else side.loss(number)
    with warnings.catch_warnings(), dp_compile.compiled_backward() if side.ours else nullcontext():
        warnings.simplefilter("ignore")
        loss.backward(create_graph=side.ours)
    for parameter in side.module.parameters():
        assert parameter.grad is not None
        assert (parameter.grad.grad_fn is not None) == side.ours
        parameter.grad = parameter.grad.detach()


STEPS: dict[str, Step] = {
    "two forwards, one backward": two_forwards,
    "a forward without a backward": forward_without_backward,
    "accumulation": accumulation,
    "twice through one graph": twice_through_one_graph,
    "local, then synced through one graph": local_then_synced_through_one_graph,
    "GradScaler": scaled,
    "anomaly mode": anomaly,
    "create_graph": create_graph,
}
WAYS = {"compiled": compile_whole, "not compiled": not_compiled}


def run_step(step: str, way: str) -> Report:
    return beside(mlp, STEPS[step], compile_model=WAYS[way])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("step", STEPS)
def test_step_beside_torch_ddp(ranks2: Ranks, step: str, way: str) -> None:
    ranks2.run(run_step, step, way)


def run_freeze(way: str) -> Report:
    return beside(mlp, freeze_later, steps=5, compile_model=WAYS[way], find_unused=True)


@pytest.mark.parametrize("way", WAYS)
def test_frozen_later_and_back(ranks2: Ranks, way: str) -> None:
    ranks2.run(run_freeze, way)


# --- hooks of the user, custom functions, checkpointing, dropout --------------------------------------------------


class Checkpointed(nn.Module):
    """A checkpointed part between two others, which are compiled for themselves if the whole is not."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.first, self.middle, self.last = Block(), Block(), Block()
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.middle, self.first(x), use_reentrant=self.use_reentrant)
        result: torch.Tensor = self.last(x)
        return result


def compile_blocks(module: nn.Module) -> nn.Module:
    for each in module.children():
        each.compile(backend="aot_eager")
    return module


def run_checkpointed(way: str, use_reentrant: bool) -> Report:
    ways = {"whole": compile_whole, "blocks": compile_blocks, "not compiled": not_compiled}
    return beside(lambda: Checkpointed(use_reentrant), plain, compile_model=ways[way])


@pytest.mark.parametrize("way", ["whole", "blocks", "not compiled"])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(ranks2: Ranks, way: str, use_reentrant: bool) -> None:
    ranks2.run(run_checkpointed, way, use_reentrant)


def doubled(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(2)


class WithHooks(nn.Module):
    """Hooks on tensors, after accumulation, and around a module's backward; each changes gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(6, 6), Block(), nn.Linear(6, 6)
        self.first.weight.register_hook(lambda grad: grad * 3)
        self.last.weight.register_post_accumulate_grad_hook(doubled)
        self.inner.register_full_backward_hook(lambda module, grads, _: (grads[0] * 0.5,))
        self.last.register_full_backward_pre_hook(lambda module, grads: (grads[0] + 1,))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(self.inner(torch.tanh(self.first(x))))
        return result


def with_a_late_hook(step: Step) -> Step:
    """Adds one more hook, after `replicate` put its own on the parameters."""

    def hooked(side: Side, number: int) -> None:
        if number == 0:
            side.module.get_parameter("first.bias").register_post_accumulate_grad_hook(doubled)
        step(side, number)

    return hooked


HOOK_WAYS = {
    "compiled": (compile_whole, plain),
    "eager hooks": (compile_whole, anomaly),
    "not compiled": (not_compiled, plain),
}


def run_hooks(way: str) -> Report:
    compile_model, step = HOOK_WAYS[way]
    return beside(WithHooks, with_a_late_hook(step), compile_model=compile_model)


@pytest.mark.parametrize("way", HOOK_WAYS)
def test_hooks_that_change_gradients(ranks2: Ranks, way: str) -> None:
    ranks2.run(run_hooks, way)


class _Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return (grad * weight).clamp(-0.01, 0.01), (grad * x).sum(0)


class WithFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Block(), Block()
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(_Clipped.apply(self.first(x), self.weight))
        return result


def run_function(way: str) -> Report:
    return beside(WithFunction, plain, compile_model=compile_whole if way == "whole" else compile_blocks)


@pytest.mark.parametrize("way", ["whole", "blocks"])
def test_custom_function(ranks2: Ranks, way: str) -> None:
    """Traced with the forward, or run by the backward that is captured."""
    for report in ranks2.run(run_function, way):
        assert report.backwards == {"captured": 3}
        assert [record.deferred for record in report.captures] == [False]


def run_dropout() -> Report:
    def build() -> nn.Module:
        return nn.Sequential(mlp(), nn.Dropout(0.5), mlp())

    return beside(build, plain)


def test_dropout_draws_the_same_numbers(ranks2: Ranks) -> None:
    """The generator has the same state before each forward; every rank has its own."""
    for report in ranks2.run(run_dropout):
        assert report.backwards == {"captured": 3}


def penalty(side: Side, number: int) -> None:
    """A loss that holds a gradient, as in WGAN-GP: the backward goes through a backward."""
    x = batch(number).requires_grad_()
    (grad,) = torch.autograd.grad(side.run(x).square().sum(), x, create_graph=True)
    with dp_compile.compiled_backward() if side.ours and number > 0 else nullcontext():
        (grad.square().sum() / 100).backward()


def run_penalty() -> Report:
    return beside(lambda: nn.Sequential(nn.Linear(6, 6, bias=False), nn.Tanh(), nn.Linear(6, 6, bias=False)),
                  penalty, compile_model=not_compiled)


def test_gradient_of_a_gradient(ranks2: Ranks) -> None:
    ranks2.run(run_penalty)


# --- a hook that cannot be traced -------------------------------------------------------------------------------


class Untraceable(nn.Module):
    """Its hook breaks the captured graph, and keeps a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()
        self.seen: list[float] = []
        self.layers[2].weight.register_hook(self.look)

    def look(self, grad: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        self.seen.append(float(grad.norm()))
        return grad * 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layers(x)
        return result


@contextmanager
def warnings_of_ours() -> Iterator[list[str]]:
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("dp_compile")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


def run_untraceable() -> tuple[list[str], Report, bool]:
    seen: list[list[float]] = []

    def step(side: Side, number: int) -> None:
        plain(side, number)
        assert isinstance(side.module, Untraceable)
        if number == 2:
            seen.append(side.module.seen)

    with warnings_of_ours() as lines:
        report = beside(Untraceable, step)
    return lines, report, seen[0] == pytest.approx(seen[1], rel=1e-4)


def test_a_hook_that_cannot_be_traced(ranks2: Ranks) -> None:
    """Right, with one warning; the hook really runs in each backward."""
    for lines, report, same in ranks2.run(run_untraceable):
        assert same
        assert len(lines) == 1
        assert "cannot be captured as one graph" in lines[0]
        assert report.backwards == {"captured": 3}
        assert all(record.deferred for record in report.captures)


# --- exceptions -------------------------------------------------------------------------------------------------


class Fuse(torch.autograd.Function):
    """The identity, with a backward that fails when told to."""

    blown = False

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        if Fuse.blown:
            raise ValueError("blown")
        return grad


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Block(), Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(Fuse.apply(self.first(x)))
        return result


def blow_once(step: Step) -> Step:
    """Before the second step the backward of ours fails half-way, on both ranks. torch's DDP could not go on."""

    def fused(side: Side, number: int) -> None:
        if number == 1 and side.ours:
            Fuse.blown = True
            try:
                step(side, number)
            except Exception as error:
                assert "blown" in str(error)
            else:
                raise AssertionError("the backward did not fail")
            finally:
                Fuse.blown = False
            side.optimizer.zero_grad()
        step(side, number)

    return fused


EXCEPTION_WAYS = {
    "compiled": (compile_blocks, plain),
    "eager hooks": (compile_blocks, anomaly),
}


def run_exception(way: str) -> Report:
    compile_model, step = EXCEPTION_WAYS[way]
    return beside(Fused, blow_once(step), compile_model=compile_model)


@pytest.mark.parametrize("way", EXCEPTION_WAYS)
def test_training_goes_on_after_an_exception_in_a_backward(ranks2: Ranks, way: str) -> None:
    ranks2.run(run_exception, way)
