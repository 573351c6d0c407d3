"""Which backwards are captured, what is in the captured graph, and what stays untouched. One process, fake group.

On the fake group an all-reduce returns its input, so a gradient is the local one divided by the world size of two.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
import torch
from parity import AOT, Block, Twin, compile_whole, expect_half
from torch import fx, nn
from torch._dynamo import compiled_autograd, convert_frame
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils._python_dispatch import TorchDispatchMode

import dp_compile
from dp_compile._torch import autograd, compiler, dynamo
from dp_compile.engine import compile as compilation

pytestmark = pytest.mark.usefixtures("fake_group")


def mlp(width: int = 8, layers: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.GELU())))


def batch(seed: int = 1, width: int = 8) -> torch.Tensor:
    return torch.randn(4, width, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    """Dynamo counts recompilations by code object, and all models here share `nn.Sequential`'s."""
    torch._dynamo.reset()


# --- what is captured -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_dynamo", [False, True])
def test_exactly_one_more_capture_when_gradients_are_kept(by_dynamo: bool) -> None:
    """A gradient that is kept is the same tensor."""
    twin = Twin(mlp(width=10))
    if by_dynamo:
        twin.model.register_comm_hook(None, allreduce_hook)
    x = batch(1, 10)
    before = compiler.captures()
    twin.step(x)
    assert compiler.captures() - before == 1
    for keep in (True, True, False, True, False):
        twin.model.zero_grad(set_to_none=not keep)
        grads = [parameter.grad for parameter in twin.model.parameters()]
        twin.run(x).square().sum().backward()
        expect_half(twin.model, twin.plain)
        if keep:
            assert all(parameter.grad is grad for parameter, grad in zip(twin.model.parameters(), grads, strict=True))
    assert compiler.captures() - before == 2
    assert len(twin.report.captures) == 2


class Broken(nn.Module):
    """A forward with a graph break in its middle."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).relu()
        torch._dynamo.graph_break()
        return self.second(x)


@pytest.mark.parametrize("what", ["all, with a graph break", "all, in place", "a part", "nothing"])
def test_what_is_compiled_of_a_forward(what: str) -> None:
    """One graph with all reductions."""
    build = {"all, with a graph break": Broken, "all, in place": Block}.get(
        what, lambda: nn.Sequential(Block(), Block())
    )
    twin = Twin(build())
    if what != "all, with a graph break":
        twin.run = twin.model
    if what in ("all, in place", "a part"):
        (twin.model if what == "all, in place" else twin.model[1]).compile(backend="aot_eager")
    with dp_compile.compiled_backward() if what == "nothing" else nullcontext():
        twin.step(batch(1, 6))
    (record,) = twin.report.captures
    assert (record.hooks, record.graphs) == (len(list(twin.model.parameters())), 1)
    assert twin.report.backwards == {"captured": 1}


# --- what is left alone -----------------------------------------------------------------------------------------


def test_gradients_that_are_not_accumulated_and_other_models() -> None:
    twin, before = Twin(mlp()), compiler.captures()
    ours = torch.autograd.grad(twin.run(batch()).square().sum(), list(twin.model.parameters()))
    theirs = torch.autograd.grad(twin.plain(batch()).square().sum(), list(twin.plain.parameters()))
    torch.testing.assert_close(ours, theirs)
    compile_whole(mlp(width=12))(batch(1, 12)).sum().backward()
    assert compiler.captures() == before
    assert twin.report.backwards == {}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("obstacle", "said"),
    [
        (partial(torch.autograd.detect_anomaly, check_nan=False), "anomaly mode is on"),
        (lambda: Pass(), "a TorchDispatchMode"),
        (partial(torch.compiler.set_stance, "force_eager"), "compilation is switched off"),
        (dp_compile.compiled_backward, "create_graph=True"),
    ],
)
def test_obstacles_take_the_eager_way(obstacle: Callable[[], Any], said: str, caplog: pytest.LogCaptureFixture) -> None:
    """Each is logged once."""
    twin, with_graph = Twin(mlp()), said == "create_graph=True"
    for number in range(3):
        twin.model.zero_grad()
        twin.plain.zero_grad()
        twin.plain(batch()).square().sum().backward()
        loss = (twin.model if with_graph and number else twin.run)(batch()).square().sum()
        with obstacle() if number else nullcontext():
            loss.backward(create_graph=with_graph and number > 0)
        expect_half(twin.model, twin.plain)
        if number and not with_graph:
            for parameter in twin.model.parameters():
                parameter.grad.detach_()  # no view for autograd, though it lies in a bucket
    assert twin.report.backwards == {"captured": 1, "eager hooks": 2}
    (message,) = (each.message for each in caplog.records if each.name.startswith("dp_compile."))
    assert message.startswith("a backward is not captured, its hooks run eagerly: ")
    assert said in message


class Pass(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


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

    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(unrelated), *(pool.submit(replicated, twin, 8 + n) for n, twin in enumerate(twins))]
        for job in jobs:
            job.result(timeout=120)
    for twin in twins:
        assert sum(twin.report.backwards.values()) == 6


def test_a_reduction_that_the_captured_graph_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """No known way makes Dynamo lose one; what it traced is counted all the same."""
    found_in = compilation.reductions_in

    def one_less(graph: torch.fx.Graph) -> Any:
        return found_in(graph) - Counter({(0, 1): 1})

    monkeypatch.setattr(compilation, "reductions_in", one_less)
    model = dp_compile.replicate(mlp(), config=AOT)
    with pytest.raises(dp_compile.ReductionError, match=r"captured backward reduces 0\.bias 0 times, expected once"):
        torch.compile(model, backend="aot_eager")(batch()).sum().backward()


# --- the guard --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("checked", [True, False])
def test_a_hook_that_was_removed(checked: bool) -> None:
    """It is named, unless the check is off."""
    twin = Twin(mlp(), check_reductions=checked)
    twin.model[2].weight._post_accumulate_grad_hooks.clear()
    loss = twin.run(batch()).square().sum()
    with pytest.raises(dp_compile.ReductionError, match=r"2\.weight.*hook") if checked else nullcontext():
        loss.backward()


def test_settings_of_dynamo_that_are_refused() -> None:
    for setting in ({"trace_autograd_ops": True}, {"optimize_ddp": "python_reducer"}):
        with (
            torch._dynamo.config.patch(**setting),
            pytest.raises(dp_compile.ConfigError, match=r"trace_autograd_ops|python_reducer"),
        ):
            dp_compile.replicate(mlp(), config=AOT)
    twin = Twin(mlp())

    def train_step(x: torch.Tensor) -> torch.Tensor:
        loss = twin.model(x).square().sum()
        loss.backward()
        return loss

    with torch._dynamo.config.patch(trace_autograd_ops=True), pytest.raises(Exception, match="trace_autograd_ops"):
        torch.compile(train_step, backend="aot_eager", fullgraph=True)(batch())


# --- state afterwards --------------------------------------------------------------------------------------------


def test_torch_settings_are_untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    def settings() -> dict[str, Any]:
        configs = (torch._dynamo.config, torch._inductor.config, torch._functorch.config)
        return {config.__name__: config.save_config_portable() for config in configs}

    def switches() -> tuple[bool, bool, Any]:
        compiler, dynamic = torch._C._dynamo.compiled_autograd.set_autograd_compiler(None, False)
        torch._C._dynamo.compiled_autograd.set_autograd_compiler(compiler, dynamic)
        return compiled_autograd.compiled_autograd_enabled, torch._C._is_multithreading_enabled(), compiler

    before = settings(), switches()
    first, second = Twin(mlp(), bucket_cap_mb=1.0), Twin(mlp(layers=3))
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
    with pytest.raises(dp_compile.UnsupportedModuleError, match="not replicated"):
        dp_compile.report(twin.model)
    mlp()(batch()).sum().backward()
    assert not autograd.engine_is_watched()
    dp_compile.replicate(twin.model, config=AOT)


class TwoOutputs(nn.Module):
    """The second one needs no gradient: compiled code is given zeros for it, of this batch's size."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.first(x)
        return self.second(out), out.sin()


def test_a_graph_that_may_be_of_one_size_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamo, "_is_computed", lambda node: node.target is torch.ops.aten.zeros.default)
    twin = Twin(TwoOutputs())
    for rows in (4, 6):
        twin.step(torch.randn(rows, 8), loss=lambda out: out[0].square().sum())
    assert twin.report.backwards == {"eager hooks": 2}


def test_what_a_capture_computes_is_seen() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    new_zeros, zeros, detach = torch.ops.aten.new_zeros.default, torch.ops.aten.zeros.default, torch.ops.aten.detach
    computed = [
        graph.call_function(new_zeros, (x, [4, 8])),
        graph.call_function(torch.ops.aten.zero_.default, (x,)),  # its result has no reader
    ]
    others = [
        graph.call_function(zeros, ([4, 8],)),
        graph.create_node("call_function", new_zeros, (x, [4, 8]), {}, name="aot0_new_zeros"),
    ]
    graph.output((computed[0], *others))
    assert all(map(dynamo._is_computed, computed))
    assert not any(map(dynamo._is_computed, [*others, graph.call_function(detach.default, (x,))]))


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


def test_dynamo_compiles_no_frames_of_ours(frames: list[CodeType]) -> None:
    """The check before a forward runs outside of what is compiled; a backward breaks the graph of a train step."""
    twin, x = Twin(mlp()), batch()
    twin.model.compile(backend="aot_eager")
    twin.model(x)
    assert not frames
    torch.compile(lambda: twin.model(x).square().sum().backward(), backend="aot_eager")()
    assert twin.report.backwards == {"captured": 1}
    assert not frames
    dp_compile.unreplicate(twin.model)  # it holds itself, and other tests count what is replicated


def test_casts_are_no_frames_of_their_own(frames: list[CodeType]) -> None:
    """A forward that breaks runs as Python, what puts casts into their places with it."""
    model = Broken()
    dp_compile.replicate(model, config=AOT, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    compile_whole(model)(batch(1, 6)).float().sum().backward()
    assert frames
    assert not {"_begin", "_end"}.intersection(each.co_name for each in frames)
    dp_compile.unreplicate(model)  # it holds itself, and other tests count what is replicated
