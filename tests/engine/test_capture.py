"""Which backwards are captured, what is in the captured graph, and what stays untouched. One process, fake group.

On the fake group an all-reduce returns its input, so a gradient is the local one divided by the world size of two.
"""

from __future__ import annotations

import copy
import gc
import re
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
import torch
from beside import Untraceable
from torch import fx, nn
from torch._dynamo import compiled_autograd, convert_frame
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils._python_dispatch import TorchDispatchMode

import dp_compile
from dp_compile._torch import autograd, compiler
from dp_compile.engine import compilation
from dp_compile.engine.captured import CapturedBackward
from dp_compile.insight.report import Report

CONFIG = dp_compile.ReplicateConfig(backend="aot_eager")
pytestmark = pytest.mark.usefixtures("fake_group")


def mlp(width: int = 8, layers: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.GELU())))


class Block(nn.Module):
    """Unlike torch's own containers, a module of the user's file is compiled by `Module.compile()`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        return out


def batch(seed: int = 1, width: int = 8) -> torch.Tensor:
    return torch.randn(4, width, generator=torch.Generator().manual_seed(seed))


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="aot_eager")


def expect_half(ours: nn.Module, theirs: nn.Module) -> None:
    for (name, mine), other in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert mine.grad is not None, name
        torch.testing.assert_close(mine.grad, other[1].grad / 2, msg=lambda message, n=name: f"{n}: {message}")


class Twin:
    """A replicated model and its plain twin, stepped together."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        self.plain = copy.deepcopy(model)
        self.model = dp_compile.replicate(model, config=CONFIG, **options)
        self.run: Callable[..., Any] = compiled(self.model)

    def step(self, *inputs: Any, loss: Callable[[Any], torch.Tensor] = lambda out: out.square().sum()) -> None:
        self.model.zero_grad()
        self.plain.zero_grad()
        loss(self.run(*inputs)).backward()
        loss(self.plain(*inputs)).backward()
        expect_half(self.model, self.plain)

    def report(self) -> Report:
        return dp_compile.report(self.model)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    """Dynamo counts recompilations by code object, and all models here share `nn.Sequential`'s."""
    torch._dynamo.reset()


# --- what is captured -------------------------------------------------------------------------------------------


def test_hooks_become_few_collectives_in_one_graph() -> None:
    twin = Twin(mlp(width=9, layers=4), bucket_cap_mb=0.0005)
    before = compiler.captures()
    for seed in range(3):
        twin.step(batch(seed, 9))
    (record,) = twin.report().captures
    assert compiler.captures() - before == 1
    assert record.hooks == 8
    assert record.reductions == 9  # and the flags
    assert record.graphs == 1
    assert record.collectives == len(twin.report().plan.buckets)
    assert 1 < record.collectives < record.hooks
    bucketing = record.passes[0]
    assert bucketing.after["all_reduce"] == record.collectives
    assert "reduce_grad" not in bucketing.after


def test_exactly_one_more_capture_when_gradients_are_kept() -> None:
    twin = Twin(mlp(width=10))
    x = batch(1, 10)
    before = compiler.captures()
    twin.step(x)
    assert compiler.captures() - before == 1
    for keep in (True, True, False, True, False):
        twin.model.zero_grad(set_to_none=not keep)
        twin.run(x).square().sum().backward()
        expect_half(twin.model, twin.plain)
    assert compiler.captures() - before == 2
    assert len(twin.report().captures) == 2


def test_kept_gradient_is_the_same_tensor() -> None:
    twin = Twin(mlp())
    twin.step(batch())
    grads = [parameter.grad for parameter in twin.model.parameters()]
    twin.model.zero_grad(set_to_none=False)
    twin.run(batch()).square().sum().backward()
    assert all(parameter.grad is grad for parameter, grad in zip(twin.model.parameters(), grads, strict=True))


class Broken(nn.Module):
    """A forward with a graph break in its middle."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).relu()
        torch._dynamo.graph_break()
        return self.second(x)


def test_forward_with_graph_breaks_has_one_backward_graph() -> None:
    twin = Twin(Broken())
    twin.step(batch())
    (record,) = twin.report().captures
    assert (record.hooks, record.graphs, record.deferred) == (4, 1, False)


def test_compile_then_replicate() -> None:
    model = mlp()
    plain = copy.deepcopy(model)
    run = compiled(model)
    run(batch())
    assert dp_compile.replicate(run, config=CONFIG) is run
    run(batch()).square().sum().backward()
    plain(batch()).square().sum().backward()
    expect_half(model, plain)
    assert dp_compile.report(model).backwards == {"captured": 1}


@pytest.mark.skipif(
    torch.__version__ < (2, 12),
    reason="torch 2.11 compiles nothing of a container of torch.nn that is compiled in place (pytorch#132923)",
)
def test_module_compile_in_place() -> None:
    twin = Twin(mlp())
    twin.model.compile(backend="aot_eager")
    twin.run = twin.model
    twin.step(batch())
    assert twin.report().backwards == {"captured": 1}


def test_only_inner_blocks_compiled() -> None:
    model = nn.Sequential(nn.Linear(8, 8), Block(), nn.Linear(8, 8))
    plain = copy.deepcopy(model)
    model[1].compile(backend="aot_eager")
    dp_compile.replicate(model, config=CONFIG)
    model(batch()).square().sum().backward()
    plain(batch()).square().sum().backward()
    expect_half(model, plain)
    assert dp_compile.report(model).captures[0].hooks == 8


def test_compiled_train_step_function() -> None:
    twin = Twin(mlp())

    @torch.compile(backend="aot_eager")
    def train_step(x: torch.Tensor) -> torch.Tensor:
        loss = twin.model(x).square().sum()
        loss.backward()
        return loss

    for seed in range(2):
        twin.model.zero_grad()
        twin.plain.zero_grad()
        train_step(batch(seed))
        twin.plain(batch(seed)).square().sum().backward()
        expect_half(twin.model, twin.plain)
    assert twin.report().backwards == {"captured": 2}


def test_two_forwards_one_backward() -> None:
    twin = Twin(mlp())
    (twin.run(batch(1)).square().sum() + twin.run(batch(2)).sum()).backward()
    (twin.plain(batch(1)).square().sum() + twin.plain(batch(2)).sum()).backward()
    expect_half(twin.model, twin.plain)


def test_two_models_with_other_settings_in_one_backward() -> None:
    first, second = Twin(mlp(), bucket_cap_mb=0.0001), Twin(mlp(layers=3), passes=None)
    second.run(first.run(batch())).square().sum().backward()
    second.plain(first.plain(batch())).square().sum().backward()
    expect_half(first.model, first.plain)
    expect_half(second.model, second.plain)
    (record,) = first.report().captures
    assert record.collectives == len(first.report().plan.buckets) + len(second.report().plan.buckets)


def test_same_architecture_shares_a_capture_but_not_gradients() -> None:
    first, second = Twin(mlp(width=11)), Twin(mlp(width=11))
    with torch.no_grad():
        for mine, other in zip(second.model.parameters(), second.plain.parameters(), strict=True):
            mine.mul_(2)
            other.mul_(2)
    before = compiler.captures()
    for twin in (first, second, first):
        twin.step(batch(1, 11))
    assert compiler.captures() - before == 1
    assert len(second.report().captures) == 1


def test_explicit_scope_captures_an_eager_forward() -> None:
    twin = Twin(mlp())
    twin.run = twin.model
    with dp_compile.compiled_backward():
        twin.step(batch())
    assert twin.report().backwards == {"captured": 1}


# --- what is left alone -----------------------------------------------------------------------------------------


def test_autograd_grad_is_local() -> None:
    twin = Twin(mlp())
    ours = torch.autograd.grad(twin.run(batch()).square().sum(), list(twin.model.parameters()))
    theirs = torch.autograd.grad(twin.plain(batch()).square().sum(), list(twin.plain.parameters()))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other)
    assert twin.report().backwards == {}


def test_other_models_are_not_captured() -> None:
    twin = Twin(mlp())
    before = compiler.captures()
    other = compiled(mlp(width=12))
    other(batch(1, 12)).sum().backward()
    mlp(width=12)(batch(1, 12)).sum().backward()
    assert compiler.captures() == before
    assert twin.report().backwards == {}


def test_create_graph_reduces_eagerly() -> None:
    twin = Twin(mlp())
    twin.step(batch())
    twin.model.zero_grad()
    with dp_compile.compiled_backward(), pytest.warns(UserWarning, match="create_graph"):
        twin.model(batch()).square().sum().backward(create_graph=True)
    expect_half(twin.model, twin.plain)
    assert twin.report().backwards == {"captured": 1, "eager hooks": 1}


@pytest.mark.parametrize("obstacle", ["anomaly", "dispatch mode", "stance"])
def test_obstacles_take_the_eager_way(obstacle: str) -> None:
    twin = Twin(mlp())
    twin.step(batch())
    twin.model.zero_grad()
    loss = twin.run(batch()).square().sum()
    if obstacle == "anomaly":
        with pytest.warns(UserWarning, match="Anomaly"), torch.autograd.detect_anomaly(check_nan=False):
            loss.backward()
    elif obstacle == "dispatch mode":
        with Pass():
            loss.backward()
    else:
        with torch.compiler.set_stance("force_eager"):
            loss.backward()
    expect_half(twin.model, twin.plain)
    assert twin.report().backwards == {"captured": 1, "eager hooks": 1}


class Pass(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_engine_entered_past_torch_autograd() -> None:
    twin = Twin(mlp())
    twin.step(batch())
    twin.model.zero_grad()
    loss = twin.run(batch()).square().sum()
    engine = torch.autograd.Variable._execution_engine
    engine.run_backward((loss,), (torch.ones(()),), False, False, (), allow_unreachable=True, accumulate_grad=True)
    expect_half(twin.model, twin.plain)


class Keeping(torch.autograd.Function):
    """Keeps a tensor under the name by which torch's own nodes of leaves have their leaf."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        ctx.variable = kept
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


@pytest.mark.parametrize("kept", [torch.ones(1), nn.Parameter(torch.ones(1))], ids=["a tensor", "a parameter"])
def test_a_function_of_the_user_that_looks_like_a_leaf(kept: torch.Tensor) -> None:
    twin = Twin(mlp())
    loss = Keeping.apply(twin.run(batch()).square().sum(), kept)
    loss.backward()
    twin.plain(batch()).square().sum().backward()
    expect_half(twin.model, twin.plain)
    assert dp_compile.report(twin.model).backwards == {"captured": 1}


class InnerBackward(torch.autograd.Function):
    """A backward that runs another backward, of a plain module."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            leaf = torch.ones(3, requires_grad=True)
            leaf.square().sum().backward()
        assert leaf.grad is not None
        return grad * (leaf.grad.sum() / 6)


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = InnerBackward.apply(self.inner(x))
        return out


def test_nested_backward() -> None:
    model = Nested()
    plain = copy.deepcopy(model)
    dp_compile.replicate(model, config=CONFIG)
    model.inner.compile(backend="aot_eager")
    for _ in range(2):
        model.zero_grad()
        plain.zero_grad()
        model(batch()).square().sum().backward()
        plain(batch()).square().sum().backward()
        expect_half(model, plain)


def run_in_threads(*jobs: Callable[[], None]) -> None:
    """Start all jobs at the same time; raise the first failure."""
    failures: list[BaseException] = []
    start = threading.Barrier(len(jobs))

    def guarded(job: Callable[[], None]) -> None:
        try:
            start.wait(timeout=60)
            job()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(job,), daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
        assert not thread.is_alive()
    if failures:
        raise failures[0]


@pytest.mark.skipif(
    torch.__version__ < (2, 12), reason="torch 2.11 refuses to run compiled code while another thread traces"
)
def test_backwards_in_other_threads() -> None:
    """A second capture at the same time takes the eager way; unrelated backwards stay plain. All are right."""
    twins = [Twin(mlp(width=width)) for width in (8, 9, 10)]
    plain, reference = mlp(width=5), mlp(width=5)
    reference(batch(1, 5)).sum().backward()

    def replicated(twin: Twin, width: int) -> None:
        for seed in range(6):
            twin.step(batch(seed, width))

    def unrelated() -> None:
        for _ in range(60):
            plain.zero_grad()
            plain(batch(1, 5)).sum().backward()
            for mine, other in zip(plain.parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(mine.grad, other.grad)

    run_in_threads(unrelated, *(partial(replicated, twin, 8 + number) for number, twin in enumerate(twins)))
    for twin in twins:
        assert sum(twin.report().backwards.values()) == 6


# --- hooks of others, exceptions, breaks ------------------------------------------------------------------------


def test_user_hooks_on_the_same_parameters() -> None:
    """One that was set late sees the rank's own gradient too: on the fake group the average is half of it."""
    seen: dict[str, torch.Tensor] = {}
    twin = Twin(mlp())
    for model in (twin.model, twin.plain):
        model[0].weight.register_hook(lambda grad: grad * 3)
    weight = twin.model[0].weight
    weight.register_post_accumulate_grad_hook(lambda parameter: seen.update(late=parameter.grad.clone()))
    twin.step(batch())
    torch.testing.assert_close(seen["late"] / 2, weight.grad)


class Fuse(torch.autograd.Function):
    """The identity, whose backward can be made to fail or to break the captured graph."""

    fail = False

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        if Fuse.fail:
            raise ValueError("blown")
        return grad


def test_a_reduction_that_the_captured_graph_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knows how to make Dynamo lose one; what it traced is counted all the same."""
    found_in = compilation.reductions_in

    def one_less(graph: torch.fx.Graph) -> Any:
        return found_in(graph) - Counter({(0, 1): 1})

    monkeypatch.setattr(compilation, "reductions_in", one_less)
    model = dp_compile.replicate(mlp(), config=CONFIG)
    with pytest.raises(dp_compile.ReductionError, match=r"captured backward reduces 0\.bias 0 times, expected once"):
        torch.compile(model, backend="aot_eager")(batch()).sum().backward()


def test_exception_in_the_middle_of_a_backward() -> None:
    model = nn.Sequential(Block(), Block())
    plain = copy.deepcopy(model)
    dp_compile.replicate(model, config=CONFIG)
    model[0].compile(backend="aot_eager")
    for fail in (False, True, False):
        Fuse.fail = fail
        model.zero_grad()
        plain.zero_grad()
        loss = model[1](Fuse.apply(model[0](batch()))).square().sum()
        if fail:
            with pytest.raises(Exception, match="blown"):
                loss.backward()
            Fuse.fail = False
            continue
        loss.backward()
        plain(batch()).square().sum().backward()
        expect_half(model, plain)


def test_a_backward_that_breaks_is_reduced_by_eager_hooks() -> None:
    model = nn.Sequential(Block(), Block())
    plain = copy.deepcopy(model)
    dp_compile.replicate(model, config=CONFIG, bucket_cap_mb=0.0005)
    model[0].compile(backend="aot_eager")
    for _ in range(2):
        model.zero_grad()
        plain.zero_grad()
        model[1](Untraceable.apply(model[0](batch()))).square().sum().backward()
        plain(batch()).square().sum().backward()
        expect_half(model, plain)
    report = dp_compile.report(model)
    assert (report.backwards, report.captures) == ({"eager hooks": 2}, ())


# --- the guard --------------------------------------------------------------------------------------------------


def test_removed_hook_is_named() -> None:
    twin = Twin(mlp())
    twin.step(batch())
    weight = twin.model[2].weight
    weight._post_accumulate_grad_hooks.clear()
    twin.model.zero_grad()
    with pytest.raises(dp_compile.ReductionError, match=r"2\.weight.*hook"):
        twin.run(batch()).square().sum().backward()


def test_removed_hook_with_the_guard_off() -> None:
    twin = Twin(mlp(), check_reductions=False)
    twin.model[2].weight._post_accumulate_grad_hooks.clear()
    twin.run(batch()).square().sum().backward()
    twin.plain(batch()).square().sum().backward()
    torch.testing.assert_close(twin.model[2].weight.grad, twin.plain[2].weight.grad)
    torch.testing.assert_close(twin.model[0].weight.grad, twin.plain[0].weight.grad / 2)


@pytest.mark.skipif(
    torch.__version__ < (2, 12),
    reason="torch 2.11 does not compile a forward again whose parameter was unfrozen (pytorch#139476, #177158)",
)
def test_parameter_unfrozen_after_replicate_is_named() -> None:
    model = mlp()
    model[0].bias.requires_grad_(False)
    twin = Twin(model)
    twin.run(batch()).square().sum().backward()
    twin.model[0].bias.requires_grad_(True)
    with pytest.raises(dp_compile.ReductionError, match=r"0\.bias.*frozen"):
        twin.run(batch()).square().sum().backward()


def test_tracing_of_backward_by_dynamo_is_refused() -> None:
    with (
        torch._dynamo.config.patch(trace_autograd_ops=True),
        pytest.raises(dp_compile.ConfigError, match="trace_autograd_ops"),
    ):
        dp_compile.replicate(mlp(), config=CONFIG)
    twin = Twin(mlp())

    def train_step(x: torch.Tensor) -> torch.Tensor:
        loss = twin.model(x).square().sum()
        loss.backward()
        return loss

    with torch._dynamo.config.patch(trace_autograd_ops=True), pytest.raises(Exception, match="trace_autograd_ops"):
        torch.compile(train_step, backend="aot_eager", fullgraph=True)(batch())


def test_torch_s_python_reducer_is_refused() -> None:
    with (
        torch._dynamo.config.patch(optimize_ddp="python_reducer"),
        pytest.raises(dp_compile.ConfigError, match="python_reducer"),
    ):
        dp_compile.replicate(mlp(), config=CONFIG)


# --- nothing is left behind -------------------------------------------------------------------------------------


def test_torch_settings_are_untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    def settings() -> dict[str, Any]:
        configs = (torch._dynamo.config, torch._inductor.config, torch._functorch.config)
        return {config.__name__: config.save_config_portable() for config in configs}

    def switches() -> tuple[bool, bool, Any]:
        compiler, dynamic = torch._C._dynamo.compiled_autograd.set_autograd_compiler(None, False)
        torch._C._dynamo.compiled_autograd.set_autograd_compiler(compiler, dynamic)
        return compiled_autograd.compiled_autograd_enabled, torch._C._is_multithreading_enabled(), compiler

    before = settings(), switches()
    first, second = Twin(mlp(), bucket_cap_mb=1.0), Twin(mlp(layers=3), passes=())
    for twin in (first, second):
        twin.step(batch())
    assert (settings(), switches()) == before
    loss = first.run(batch()).square().sum()

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(compilation.CompiledBackward, "__call__", fail)
    with pytest.raises(KeyboardInterrupt):
        loss.backward()
    assert switches() == before[1]


def test_unreplicate_takes_everything_off() -> None:
    gc.collect()
    mlp()(batch()).sum().backward()  # the last replicas of other tests are gone, and with this the wrapper is too
    assert not autograd.engine_is_watched()
    twin = Twin(mlp())
    twin.step(batch())
    assert dp_compile.unreplicate(twin.model) is twin.model
    assert not any(parameter._post_accumulate_grad_hooks for parameter in twin.model.parameters())
    assert not twin.model._forward_pre_hooks
    with pytest.raises(dp_compile.ModuleError, match="not replicated"):
        dp_compile.report(twin.model)
    mlp()(batch()).sum().backward()
    assert not autograd.engine_is_watched()
    dp_compile.replicate(twin.model, config=CONFIG)


def test_deleted_model_is_freed() -> None:
    twin = Twin(mlp())
    twin.step(batch())
    parameter = weakref.ref(next(twin.model.parameters()))
    del twin
    gc.collect()
    assert parameter() is None


class TwoOutputs(nn.Module):
    """Of the second one nobody asks for a gradient: compiled code is given zeros for it, of this batch's size."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.first(x)
        return self.second(out), out.sin()


@pytest.fixture
def quick_captures() -> Iterator[Any]:
    from dp_compile._torch import dynamo

    yield dynamo
    dynamo._QuickCapture.with_symbols = False


@pytest.mark.parametrize("careful", [False, True])
def test_a_captured_graph_serves_batches_of_other_sizes(quick_captures: Any, careful: bool) -> None:
    """Also where no size is a symbol while it is captured."""
    quick_captures._QuickCapture.with_symbols = careful
    twin = Twin(TwoOutputs())
    for rows in (4, 6, 3, 6):
        twin.step(torch.randn(rows, 8), loss=lambda out: out[0].square().sum())
    assert set(twin.report().backwards) == {"captured"}


def embedded() -> nn.Module:
    return nn.Sequential(nn.Embedding(5, 8), Block(), nn.LayerNorm(8))


@pytest.mark.parametrize("model", [mlp, TwoOutputs, embedded])
def test_captures_are_as_torchs_own(
    quick_captures: Any, monkeypatch: pytest.MonkeyPatch, model: Callable[[], nn.Module]
) -> None:
    codes = []

    def noted(self: CapturedBackward, graph_module: fx.GraphModule) -> None:
        codes.append(graph_module.code)
        start(self, graph_module)

    start = CapturedBackward.__init__
    monkeypatch.setattr(CapturedBackward, "__init__", noted)
    for careful in (False, True):
        quick_captures._QuickCapture.with_symbols = careful
        torch._dynamo.reset()
        dense = dp_compile.replicate(model(), config=CONFIG)
        inputs = torch.arange(4) if model is embedded else torch.randn(4, 8)
        out = compiled(dense)(inputs)
        (out[0] if isinstance(out, tuple) else out).square().sum().backward()
    assert len(codes) == 2
    assert re.sub(r"aot\d+", "aot", codes[0]) == re.sub(r"aot\d+", "aot", codes[1])


def test_a_graph_that_may_be_of_one_size_is_captured_with_more_care(
    quick_captures: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quick_captures, "_is_computed", lambda node: node.target is torch.ops.aten.zeros.default)
    twin = Twin(TwoOutputs())
    for rows in (4, 6):
        twin.step(torch.randn(rows, 8), loss=lambda out: out[0].square().sum())
        assert quick_captures._QuickCapture.with_symbols
    assert set(twin.report().backwards) == {"captured"}


def test_what_a_capture_computes_is_seen(quick_captures: Any) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    new_zeros, zeros, detach = torch.ops.aten.new_zeros.default, torch.ops.aten.zeros.default, torch.ops.aten.detach
    computed = [
        graph.call_function(new_zeros, (x, [4, 8])),
        graph.call_function(torch.ops.aten.zero_.default, (x,)),  # nobody reads its result
    ]
    others = [
        graph.call_function(zeros, ([4, 8],)),
        graph.create_node("call_function", new_zeros, (x, [4, 8]), {}, name="aot0_new_zeros"),
    ]
    graph.output((computed[0], *others))
    assert all(map(quick_captures._is_computed, computed))
    assert not any(map(quick_captures._is_computed, [*others, graph.call_function(detach.default, (x,))]))


def test_a_traced_backward_goes_with_its_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    """AOTAutograd keeps the module, in code that runs in each later backward too."""
    traced: list[fx.GraphModule] = []

    def noted(self: compilation.CompiledBackward, graph_module: fx.GraphModule, inputs: Any) -> Any:
        traced.append(graph_module)
        return compile_graph(self, graph_module, inputs)

    compile_graph = compilation.CompiledBackward._compile_whole
    monkeypatch.setattr(compilation.CompiledBackward, "_compile_whole", noted)
    twin = Twin(mlp())
    for rows in (4, 4, 6):
        twin.step(torch.randn(rows, 8))
    assert len(traced) == 2
    assert [len(each.graph.nodes) for each in traced] == [0, 0]


def test_guards_are_timed_for_forwards_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo takes 32 MiB for that, when the process has most: activations, and what compiling has left."""
    from dp_compile._torch import dynamo

    timed: list[Any] = []

    def timer(*arguments: Any) -> float:
        timed.append(arguments)
        return 0.0

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("this torch cannot do that")

    monkeypatch.setattr(dynamo, "_untimed", [])  # tests let nothing be timed
    monkeypatch.setattr(dynamo, "stand_ins", fail)  # so that Dynamo traces the backward
    monkeypatch.setattr(torch._dynamo.guards, "profile_guard_manager", timer)
    Twin(mlp()).step(batch())
    assert len(timed) == 1  # and not what the probe compiles
    with dynamo.measuring_no_guards(), dynamo.measuring_no_guards():
        pass
    assert torch._dynamo.guards.profile_guard_manager is timer


@pytest.mark.skipif(
    torch.__version__ < (2, 12),
    reason="torch 2.11 compiles nothing of a container of torch.nn that is compiled in place (pytorch#132923)",
)
def test_a_forward_is_the_only_frame_that_dynamo_compiles() -> None:
    """The check in front of it was another one, and what it calls, compiled to nothing."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = dp_compile.replicate(mlp(), config=CONFIG)
    model.compile(backend="aot_eager")  # hooks of the module run outside of what is compiled
    model(batch())
    assert torch._dynamo.utils.counters["frames"]["total"] == 1
    dp_compile.unreplicate(model)  # it holds itself, and other tests count what is replicated


@pytest.fixture
def frames(monkeypatch: pytest.MonkeyPatch) -> list[CodeType]:
    """What Dynamo compiles of this package: frames that it meets outside of a graph."""
    found: list[CodeType] = []
    compile_frame = convert_frame._compile

    def noted(code: CodeType, *args: Any, **kwargs: Any) -> Any:
        if Path(dp_compile.__file__).parent in Path(code.co_filename).parents:
            found.append(code)
        return compile_frame(code, *args, **kwargs)

    monkeypatch.setattr(convert_frame, "_compile", noted)
    return found


def test_a_compiled_train_step_has_no_frames_of_ours(frames: list[CodeType]) -> None:
    """Its backward breaks the graph, and Dynamo meets what stands in front of the engine."""
    twin, x = Twin(mlp()), batch()
    torch.compile(lambda: twin.model(x).square().sum().backward(), backend="aot_eager")()
    assert twin.report().backwards == {"captured": 1}
    assert not frames


def test_casts_are_no_frames_of_their_own(frames: list[CodeType]) -> None:
    """A forward that breaks runs as Python, what puts casts into their places with it."""
    model = Broken()
    dp_compile.replicate(model, config=CONFIG, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    compiled(model)(batch()).float().sum().backward()
    assert frames
    assert not {"_enter_untraced", "_leave_untraced"}.intersection(each.co_name for each in frames)
    dp_compile.unreplicate(model)  # it holds itself, and other tests count what is replicated
