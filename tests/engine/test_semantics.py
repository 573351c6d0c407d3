"""Gradient semantics: each test trains beside torch's DDP on two ranks, or says where the two differ.

`docs/semantics.md` has the table of all lines with their tests.
"""

from __future__ import annotations

import logging
import os
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from beside import (
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
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import dp_compile
from dp_compile._torch import compiler
from dp_compile.config import CHECK_VARIABLE
from dp_compile.insight.report import Report
from dp_compile.testing.ranks import Ranks

nothing_beside = mock.patch.dict(os.environ, {CHECK_VARIABLE: "0"})
"""No collectives but those of a backward."""


# --- accumulation -----------------------------------------------------------------------------------------------


def gloo_calls(work: Callable[[], None]) -> dict[str, int]:
    """The collectives that gloo runs for `work`, by kind."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        work()
    return {each.key: each.count for each in profile.key_averages() if each.key.startswith("gloo:")}


@nothing_beside
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
        compilations.append((compiler.captures(), torch._dynamo.utils.counters["stats"]["unique_graphs"]))
    return calls, len(dp_compile.report(model).plan.buckets), compilations


def test_accumulation_costs_no_collectives_and_no_recompilation(ranks: Ranks) -> None:
    for calls, buckets, compilations in ranks.run(accumulate):
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
def test_step_beside_torch_ddp(ranks: Ranks, step: str, way: str) -> None:
    ranks.run(run_step, step, way)


def run_freeze(way: str) -> Report:
    return beside(mlp, freeze_later, steps=5, compile_model=WAYS[way], find_unused=True)


@pytest.mark.parametrize("way", WAYS)
def test_frozen_later_and_back(ranks: Ranks, way: str) -> None:
    ranks.run(run_freeze, way)


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


def run_checkpointed(way: str, use_reentrant: bool) -> list[str]:
    ways = {"whole": compile_whole, "blocks": compile_blocks, "not compiled": not_compiled}
    with warnings_of_ours() as lines:
        beside(lambda: Checkpointed(use_reentrant), plain, compile_model=ways[way], bucket_cap_mb=1e-4)
    return lines


@pytest.mark.parametrize("way", ["whole", "blocks", "not compiled"])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(ranks: Ranks, way: str, use_reentrant: bool) -> None:
    for lines in ranks.run(run_checkpointed, way, use_reentrant):
        if way != "not compiled":
            broken = ["its hooks run eagerly: Unsupported" in line for line in lines]
            assert broken == ([] if way == "whole" else [True])


def backward_in_autocast(side: Side, number: int) -> None:
    """Nobody means that: what torch.compile makes of a backward computes without, so a captured one does too."""
    with side.no_sync():
        loss = side.loss(number + 50)
        with torch.autocast("cpu", torch.bfloat16, enabled=side.ours):
            loss.backward()
    loss = side.loss(number)
    with torch.autocast("cpu", torch.bfloat16, enabled=side.ours):
        loss.backward()
        assert torch.is_autocast_enabled("cpu") is side.ours


def two_blocks() -> nn.Sequential:
    return nn.Sequential(Block(), nn.Linear(6, 6), Block())


def run_backward_in_autocast(way: str) -> Report:
    ways = {"whole": compile_whole, "blocks": compile_blocks}
    return beside(two_blocks, backward_in_autocast, compile_model=ways[way], bucket_cap_mb=1e-4)


@pytest.mark.parametrize("way", ["whole", "blocks"])
def test_a_captured_backward_that_is_called_in_autocast(ranks: Ranks, way: str) -> None:
    for report in ranks.run(run_backward_in_autocast, way):
        assert report.backwards == {"captured": 3, "captured without sync": 3}


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
    return beside(WithHooks, with_a_late_hook(step), compile_model=compile_model, bucket_cap_mb=1e-6)


@pytest.mark.parametrize("way", HOOK_WAYS)
def test_hooks_that_change_gradients(ranks: Ranks, way: str) -> None:
    ranks.run(run_hooks, way)


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
def test_custom_function(ranks: Ranks, way: str) -> None:
    """Traced with the forward, or run by the backward that is captured."""
    for report in ranks.run(run_function, way):
        assert report.backwards == {"captured": 3}
        assert [record.deferred for record in report.captures] == [False]


def run_dropout() -> Report:
    def build() -> nn.Module:
        return nn.Sequential(mlp(), nn.Dropout(0.5), mlp())

    return beside(build, plain)


def test_dropout_draws_the_same_numbers(ranks: Ranks) -> None:
    """The generator has the same state before each forward; every rank has its own."""
    for report in ranks.run(run_dropout):
        assert report.backwards == {"captured": 3}


def penalty(side: Side, number: int) -> None:
    """A loss that holds a gradient, as in WGAN-GP: the backward goes through a backward."""
    x = batch(number).requires_grad_()
    (grad,) = torch.autograd.grad(side.run(x).square().sum(), x, create_graph=True)
    with dp_compile.compiled_backward() if side.ours and number > 0 else nullcontext():
        (grad.square().sum() / 100).backward()


def run_penalty() -> Report:
    return beside(
        lambda: nn.Sequential(nn.Linear(6, 6, bias=False), nn.Tanh(), nn.Linear(6, 6, bias=False)),
        penalty,
        compile_model=not_compiled,
    )


def test_gradient_of_a_gradient(ranks: Ranks) -> None:
    ranks.run(run_penalty)


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


def test_a_hook_that_cannot_be_traced(ranks: Ranks) -> None:
    """Right, with one warning; the hook really runs in each backward."""
    for lines, report, same in ranks.run(run_untraceable):
        assert same
        assert len(lines) == 1
        assert "graph_break" in lines[0]
        assert report.backwards == {"eager hooks": 3}


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
            with pytest.raises(Exception, match="blown"):
                step(side, number)
            Fuse.blown = False
            side.optimizer.zero_grad()
        step(side, number)

    return fused


EXCEPTION_WAYS = {
    "compiled": (compile_blocks, plain),
    "eager hooks": (compile_blocks, anomaly),
    "not compiled": (not_compiled, plain),
    "started in C++": (compile_blocks, in_cpp),
}


def run_exception(way: str) -> Report:
    compile_model, step = EXCEPTION_WAYS[way]
    return beside(Fused, blow_once(step), compile_model=compile_model)


@pytest.mark.parametrize("way", EXCEPTION_WAYS)
def test_training_goes_on_after_an_exception_in_a_backward(ranks: Ranks, way: str) -> None:
    ranks.run(run_exception, way)


# --- buffers ----------------------------------------------------------------------------------------------------


class WithBuffers(nn.Module):
    """Statistics of two dtypes, some of them replaced and some changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6)
        self.register_buffer("scale", torch.ones(1))
        self.register_buffer("steps", torch.zeros(1, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps.add_(1 + dist.get_rank())
        self.scale = 0.5 * self.scale + x.detach().abs().mean()
        result: torch.Tensor = self.last(self.norm(self.first(x))) * self.scale
        return result


@nothing_beside
def run_buffers() -> tuple[list[dict[str, int]], str, dict[str, torch.Tensor]]:
    calls, state, report = [], {}, None

    def step(side: Side, number: int) -> None:
        if side.ours:
            calls.append(gloo_calls(lambda: plain(side, number)))
            state.update({name: buffer.clone() for name, buffer in side.module.named_buffers()})
        else:
            plain(side, number)

    report = beside(WithBuffers, step, config=AOT)
    return calls, str([record.passes for record in report.captures]), state


def test_buffers_are_copied_coalesced_and_outside_the_captured_graph(ranks: Ranks) -> None:
    """One broadcast for each dtype; the captured graphs hold none."""
    first, second, *_ = ranks.run(run_buffers)
    for calls, passes, state in (first, second):
        assert calls == [{"gloo:all_reduce": 1, "gloo:broadcast": 2}] * 3
        assert "all_reduce" in passes
        assert "broadcast" not in passes
        assert state["steps"].item() == 3
    for name, buffer in first[2].items():
        assert torch.equal(buffer, second[2][name])


def run_synced_norm(device: str, training: bool) -> str:
    """SyncBatchNorm under ours; torch's DDP takes it on a GPU only, so on a CPU it gets the plain one."""
    norms = iter([nn.SyncBatchNorm, nn.SyncBatchNorm if device == "cuda" else nn.BatchNorm1d])

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 6), next(norms)(6), nn.Linear(6, 6)).to(device)

    def step(side: Side, number: int) -> None:
        side.module.train(training)
        side.run(batch(number).to(device)).square().mean().backward()

    try:
        beside(build, step)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "as torch's DDP"


def test_synced_batch_norm_on_a_cpu(ranks2: Ranks) -> None:
    """torch has no training of it there, and says so. With statistics that are not updated it trains as anywhere."""
    for text in ranks2.run(run_synced_norm, "cpu", True):
        assert "SyncBatchNorm expected input tensor to be on GPU" in text
    assert ranks2.run(run_synced_norm, "cpu", False) == ["as torch's DDP"] * 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="SyncBatchNorm trains on GPUs only")
def test_synced_batch_norm_on_a_gpu(ranks: Ranks) -> None:
    assert ranks.run(run_synced_norm, "cuda", True) == ["as torch's DDP"] * 2


# --- shapes -----------------------------------------------------------------------------------------------------


class Sequences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.block, self.head = nn.Embedding(11, 6), Block(), nn.Linear(6, 11)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        scores = torch.softmax(x @ x.transpose(1, 2), dim=-1)
        result: torch.Tensor = self.head(self.block(scores @ x))
        return result


def of_other_shapes(side: Side, number: int) -> None:
    """Length by rank and step, a smaller last batch."""
    rank = dist.get_rank()
    rows, length = (4 if number < 4 else 1 + rank), 3 + (2 * number + 3 * rank) % 7
    tokens = torch.randint(0, 11, (rows, length), generator=torch.Generator().manual_seed(2 * number + rank))
    side.run(tokens).square().mean().backward()


def run_shapes(way: str) -> Report:
    return beside(Sequences, of_other_shapes, steps=5, compile_model=WAYS[way], bucket_cap_mb=1e-4)


@pytest.mark.parametrize("way", WAYS)
def test_shapes_that_differ_by_rank_and_step(ranks: Ranks, way: str) -> None:
    for report in ranks.run(run_shapes, way):
        assert report.backwards == ({"captured": 5} if way == "compiled" else {"torch reducer": 5})


# --- gradients of kinds that are not reduced --------------------------------------------------------------------


class SparseByFunction(nn.Module):
    """No module says that these gradients are sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(5, 6))
        self.block = Block()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.block(nn.functional.embedding(tokens, self.table, sparse=True))
        return result


SPARSE_WAYS = {"whole": compile_whole, "blocks": compile_blocks, "eager hooks": compile_blocks}


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize("way", SPARSE_WAYS)
def test_a_sparse_gradient_that_no_module_announces(way: str) -> None:
    torch._dynamo.reset()
    model = dp_compile.replicate(SparseByFunction(), config=AOT)
    compiled = SPARSE_WAYS[way](model)
    way_back = torch.autograd.set_detect_anomaly(way == "eager hooks", check_nan=False)
    with way_back, pytest.raises(dp_compile.ReductionError, match=r"table.*sparse"):
        compiled(torch.tensor([1, 2])).sum().backward()


# --- the module changes after replicate -------------------------------------------------------------------------

CHANGE_WAYS = {
    "compiled": (compile_whole, nullcontext),
    "eager hooks": (compile_whole, lambda: torch.autograd.set_detect_anomaly(True, check_nan=False)),
    "not compiled": (not_compiled, nullcontext),
}


class Casting(nn.Module):
    """Its parts may have other dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.first.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(self.first(x.to(self.first.weight)).to(self.last.weight))
        return result


def replace(model: Casting) -> None:
    model.last.weight = nn.Parameter(torch.ones(6, 6))


def replace_frozen(model: Casting) -> None:
    model.first.bias = nn.Parameter(torch.ones(6))


class Adapted(nn.Module):
    """A linear layer beside a product of two small ones (LoRA, arXiv 2106.09685)."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.low, self.high = nn.Linear(6, 2, bias=False), nn.Linear(2, 6, bias=False)

    @property
    def weight(self) -> torch.Tensor:
        return self.base.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.base(x) + self.high(self.low(x))
        return result


def add_adapter(model: Casting) -> None:
    model.last = Adapted(model.last)  # type: ignore[assignment]


CHANGES: dict[str, tuple[Callable[[Casting], Any], str]] = {
    "replaced": (replace, r"not reduced: last\.weight. The parameter was replaced"),
    "a frozen one is replaced": (replace_frozen, r"not reduced: first\.bias. The parameter was replaced"),
    "added": (add_adapter, r"not reduced: last\.low\.weight, last\.high\.weight. The parameter was added after"),
    "unfrozen": (lambda model: model.first.bias.requires_grad_(True), r"not reduced: first\.bias. It was frozen"),
    "another dtype": (lambda model: model.double(), r"last\.bias is float64, it was float32"),
    "a part of another dtype": (lambda model: model.first.double(), r"first\.weight is float64, it was float32"),
    "all replaced": (
        lambda model: model.load_state_dict(
            {name: p.detach() + 1 for name, p in model.named_parameters()}, assign=True
        ),
        r"not reduced: first\.weight, last\.weight, last\.bias. The parameter was replaced",
    ),
    "another device": (lambda model: model.to("meta"), r"not reduced: first\.weight, last\.weight, last\.bias"),
}


def run_change(change: str, way: str, find_unused: bool) -> str:
    """Train two steps, change the module, train another step; the error of that one."""
    torch._dynamo.reset()
    model = dp_compile.replicate(Casting(), config=AOT, find_unused_parameters=find_unused)
    compile_model, mode = CHANGE_WAYS[way]
    compiled = compile_model(model)
    for _ in range(2):
        model.zero_grad()
        compiled(torch.ones(2, 6)).sum().backward()
    model.zero_grad()
    CHANGES[change][0](model)
    with warnings.catch_warnings(), mode():
        warnings.simplefilter("ignore")
        try:
            compiled(torch.ones(2, 6)).sum().backward()
        except dp_compile.ReductionError as error:
            return str(error)
    return "no error"


STALE = pytest.mark.skipif(
    torch.__version__ < (2, 12),
    reason="torch 2.11 does not compile a forward again whose parameter changed in place (pytorch#139476, #177158)",
)


def marks_of_change(change: str, way: str, number: int) -> Any:
    if way == "compiled" and change in ("unfrozen", "another dtype", "a part of another dtype"):
        return STALE
    return pytest.mark.nightly if way == "eager hooks" and number % 3 else ()


@pytest.mark.parametrize(
    ("change", "way"),
    [
        # What is looked at is the same in every way, where it is looked at is not.
        pytest.param(change, way, marks=marks_of_change(change, way, number))
        for number, change in enumerate(CHANGES)
        for way in CHANGE_WAYS
    ],
)
def test_a_change_after_replicate_is_named(ranks: Ranks, change: str, way: str) -> None:
    for find_unused in (False, True) if change == "replaced" else (False,):
        for text in ranks.run(run_change, change, way, find_unused):
            assert re.search(CHANGES[change][1], text)


def run_there_and_back(way: str) -> str:
    """Two steps, the second behind another dtype; the error of that one, or how far it is from DDP's first one."""
    torch._dynamo.reset()
    model = dp_compile.replicate(Casting(), config=AOT)
    compiled = CHANGE_WAYS[way][0](model)
    found = []
    for _ in range(2):
        model.zero_grad()
        try:
            compiled(torch.full((2, 6), 1.0 + dist.get_rank())).sum().backward()
        except dp_compile.ReductionError as error:
            return str(error)
        found.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
        model.double()
        model.float()
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)
    return "the same"


@pytest.mark.parametrize("way", ["compiled", "not compiled"])
def test_another_dtype_for_a_while(ranks: Ranks, way: str) -> None:
    """torch's DDP, and its reducer, lose all parameters without a word."""
    expected = "the same" if way == "compiled" else "first.weight and 2 more had another dtype after replicate()"
    assert all(text.startswith(expected) for text in ranks.run(run_there_and_back, way))


def run_without_grad_mode() -> bool:
    """The first backward is called under `no_grad`, after a parameter was frozen; torch's reducer is made in it."""
    model = dp_compile.replicate(Casting(), config=AOT, find_unused_parameters=True)
    model.last.bias.requires_grad_(False)
    loss = model(torch.full((2, 6), 1.0 + dist.get_rank())).sum()
    with torch.no_grad():
        loss.backward()
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    everything = torch.cat([grad.flatten() for grad in grads])
    first = everything.clone()
    dist.broadcast(first, 0)
    return bool(grads) and torch.equal(first, everything)


def test_torchs_reducer_is_made_without_grad_mode(ranks: Ranks) -> None:
    assert all(ranks.run(run_without_grad_mode))


# --- ranks that were started differently ------------------------------------------------------------------------


class Ordered(nn.Module):
    def __init__(self, names: list[str]) -> None:
        super().__init__()
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.ones(2)))


def differ(how: str) -> str:
    second, options, model = dist.get_rank() == 1, {}, Ordered(["a", "b"])
    with pytest.MonkeyPatch.context() as patch:
        if how == "parameter order":
            model = Ordered(["b", "a"] if second else ["a", "b"])
        if second and how == "version of the package":
            patch.setitem(dp_compile.replicate.__globals__, "version", lambda name: "0.0.7")
        if second and how == "version of torch":
            patch.setattr(torch, "__version__", "2.12.1")
        if second and how == "environment":
            patch.setenv("DP_COMPILE_DDP_PYTHON_HOOK", "0")
        try:
            dp_compile.replicate(model, **options)
        except dp_compile.DesyncError as error:
            return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("how", "difference"),
    [
        ("parameter order", 'trainable parameters[0] is "b: float32[2] strides [1]" there'),
        ("version of the package", 'dp_compile is "0.0.7" there'),
        ("version of torch", 'torch is "2.12.1" there'),
        ("environment", "options.ddp_python_hook is false there, true on rank 0"),
    ],
)
def test_ranks_that_were_started_differently(ranks: Ranks, how: str, difference: str) -> None:
    for text in ranks.run(differ, how):
        assert "rank 1 differs from rank 0" in text
        assert difference in text


# --- where torch's DDP does something else ----------------------------------------------------------------------


def torch_twice_through_one_graph(model: DistributedDataParallel) -> None:
    loss = model(batch(0)).sum()
    loss.backward(retain_graph=True)
    loss.backward()


def torch_after_an_exception(model: DistributedDataParallel) -> None:
    Fuse.blown = True
    with pytest.raises(ValueError, match="blown"):
        model(batch(0)).square().sum().backward()
    Fuse.blown = False
    model.zero_grad()
    model(batch(1)).square().sum().backward()


def torch_create_graph(model: DistributedDataParallel) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model(batch(0)).square().sum().backward(create_graph=True)


def torch_replaced(model: DistributedDataParallel) -> None:
    replace(model.module)
    model(batch(0)).square().sum().backward()
    model.zero_grad()
    model(batch(1)).square().sum().backward()


def torch_all_replaced(model: DistributedDataParallel) -> None:
    model.module.load_state_dict(Casting().state_dict(), assign=True)
    model(batch(0)).square().sum().backward()


def torch_added(model: DistributedDataParallel) -> None:
    add_adapter(model.module)
    model(batch(0)).sum().backward()


def torch_unfrozen(model: DistributedDataParallel) -> None:
    model.module.first.bias.requires_grad_(True)
    model(batch(0)).square().sum().backward()


def torch_frozen_later(model: DistributedDataParallel) -> None:
    model.module.last.bias.requires_grad_(False)
    for number in range(2):
        model.zero_grad()
        model(batch(number)).square().sum().backward()


def torch_moved(model: DistributedDataParallel) -> None:
    model(batch(0)).square().sum().backward()
    model.zero_grad()
    model.double()
    model(batch(1).double()).square().sum().backward()


def torch_sparse(model: DistributedDataParallel) -> None:
    model(torch.tensor([dist.get_rank()])).square().sum().backward()


TORCH: dict[str, tuple[Callable[[], nn.Module], Callable[[DistributedDataParallel], None], str]] = {
    "twice through one graph": (Casting, torch_twice_through_one_graph, "ranks differ"),
    "an exception": (Fused, torch_after_an_exception, "Expected to have finished reduction in the prior"),
    "create_graph": (Casting, torch_create_graph, "leaf Variable that requires grad"),
    "replaced": (Casting, torch_replaced, "Expected to have finished reduction in the prior iteration"),
    "all replaced": (Casting, torch_all_replaced, "ranks differ"),
    "unfrozen": (Casting, torch_unfrozen, "ranks differ"),
    "added": (Casting, torch_added, "ranks differ"),
    "frozen later": (Casting, torch_frozen_later, "Expected to have finished reduction in the prior iteration"),
    "moved": (Casting, torch_moved, "ranks differ"),
    "sparse": (lambda: nn.Sequential(nn.Embedding(3, 6, sparse=True), Casting()), torch_sparse, "ranks agree"),
    "complex": (
        lambda: nn.Linear(6, 6, dtype=torch.complex64),
        lambda model: model(batch(0).cfloat()).abs().sum().backward(),
        "ranks agree",
    ),
}


def run_torch(what: str) -> str:
    build, train, _ = TORCH[what]
    torch.manual_seed(0)
    model = DistributedDataParallel(build())
    try:
        train(model)
    except RuntimeError as error:
        return str(error)
    sums = [parameter.grad.to_dense().abs().sum() for parameter in model.parameters() if parameter.grad is not None]
    both = [torch.empty(len(sums)) for _ in range(2)]
    dist.all_gather(both, torch.stack(sums).float().detach())
    return "ranks agree" if torch.allclose(*both) else "ranks differ"


@pytest.mark.parametrize("what", TORCH)
def test_what_torch_ddp_does(ranks2: Ranks, what: str) -> None:
    for text in ranks2.run(run_torch, what):
        assert TORCH[what][2] in text
