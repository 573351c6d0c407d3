"""Which backwards are captured, what is in the graph, and its dumps. One process, fake group."""

import os
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from parity import AOT, Block, Twin, batch, compile_whole, expect_average, mlp
from torch import fx, nn
from torch._dynamo import compiled_autograd, convert_frame
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils._python_dispatch import TorchDispatchMode

import dp_compile
from dp_compile._torch import autograd, compiler, dynamo, inductor
from dp_compile.config import ReplicateConfig
from dp_compile.engine import compile as compilation
from dp_compile.engine import dumps

pytestmark = pytest.mark.usefixtures("fake_group")


@pytest.mark.parametrize("by_dynamo", [False, True])
def test_exactly_one_more_capture_when_gradients_are_kept(by_dynamo):
    """A gradient that is kept is the same tensor."""
    twin = Twin(mlp(width=10))
    if by_dynamo:
        twin.model.register_comm_hook(None, allreduce_hook)
    x = batch(1)
    before = compiler.captures()
    twin.step(x)
    assert compiler.captures() - before == 1
    for keep in (True, True, False, True, False):
        twin.model.zero_grad(set_to_none=not keep)
        grads = [parameter.grad for parameter in twin.model.parameters()]
        twin.run(x).square().sum().backward()
        expect_average(twin.model, twin.plain)
        if keep:
            assert all(parameter.grad is grad for parameter, grad in zip(twin.model.parameters(), grads, strict=True))
    assert compiler.captures() - before == 2
    assert len(twin.report.captures) == 2


class Broken(nn.Sequential):
    """A forward with a graph break in its middle."""

    def forward(self, x):
        x = self[0](x).relu()
        torch._dynamo.graph_break()
        return self[1](x)


@pytest.mark.parametrize(
    ("what", "build"),
    [
        ("all", lambda: Broken(nn.Linear(6, 6), nn.Linear(6, 6))),
        ("all, in place", Block),
        ("a part", lambda: nn.Sequential(Block(), Block())),
        ("nothing", lambda: nn.Sequential(Block(), Block())),
    ],
)
def test_what_is_compiled_of_a_forward(what, build):
    """One graph with all reductions."""
    twin = Twin(build())
    if what != "all":
        twin.run = twin.model
    if what in ("all, in place", "a part"):
        (twin.model if what == "all, in place" else twin.model[1]).compile(backend="aot_eager")
    with dp_compile.compiled_backward() if what == "nothing" else nullcontext():
        twin.step(batch(1))
    (record,) = twin.report.captures
    assert (record.hooks, record.graphs) == (len(list(twin.model.parameters())), 1)
    assert twin.report.backwards == {"captured": 1}


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
def test_obstacles_take_the_eager_way(obstacle, said, caplog):
    """Each is logged once."""
    twin, with_graph = Twin(mlp()), said == "create_graph=True"
    for number in range(3):
        twin.model.zero_grad()
        twin.plain.zero_grad()
        twin.plain(batch(1)).square().sum().backward()
        loss = (twin.model if with_graph and number else twin.run)(batch(1)).square().sum()
        with obstacle() if number else nullcontext():
            loss.backward(create_graph=with_graph and number > 0)
        expect_average(twin.model, twin.plain)
        if number and not with_graph:
            for parameter in twin.model.parameters():
                parameter.grad.detach_()  # no view for autograd, though it lies in a bucket
    assert twin.report.backwards == {"captured": 1, "eager hooks": 2}
    (message,) = (each.message for each in caplog.records if each.name.startswith("dp_compile."))
    assert message.startswith("dp_compile, rank 0: a backward is not captured, its hooks run eagerly: ")
    assert said in message


class Pass(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.skipif(
    torch.__version__ < (2, 12), reason="torch 2.11 refuses to run compiled code while another thread traces"
)
def test_backwards_in_other_threads():
    """A second capture at the same time takes the eager way; all are right."""
    twins = [Twin(mlp(width=width)) for width in (8, 9, 10)]

    def steps(twin):
        for seed in range(6):
            twin.step(batch(seed))

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(steps, twins, timeout=120))
    for twin in twins:
        assert sum(twin.report.backwards.values()) == 6


def test_a_reduction_that_the_captured_graph_lacks(monkeypatch):
    """No known way makes Dynamo lose one; what it traced is counted all the same."""
    found_in = compilation.reductions_in

    def one_less(graph):
        return found_in(graph) - Counter({(0, 1): 1})

    monkeypatch.setattr(compilation, "reductions_in", one_less)
    model = dp_compile.replicate(mlp(), config=AOT)
    with pytest.raises(dp_compile.ReductionError, match=r"captured backward reduces 0\.bias 0 times, expected once"):
        torch.compile(model, backend="aot_eager")(batch(1)).sum().backward()


@pytest.mark.parametrize("checked", [True, False])
def test_a_hook_that_was_removed(checked):
    """It is named, unless the check is off."""
    twin = Twin(mlp(), check_reductions=checked)
    twin.model[2].weight._post_accumulate_grad_hooks.clear()
    loss = twin.run(batch(1)).square().sum()
    with pytest.raises(dp_compile.ReductionError, match=r"2\.weight.*hook") if checked else nullcontext():
        loss.backward()


def test_settings_of_dynamo_that_are_refused():
    for setting in ({"trace_autograd_ops": True}, {"optimize_ddp": "python_reducer"}):
        with (
            torch._dynamo.config.patch(**setting),
            pytest.raises(dp_compile.ConfigError, match=r"trace_autograd_ops|python_reducer"),
        ):
            dp_compile.replicate(mlp(), config=AOT)
    twin = Twin(mlp())

    def train_step(x):
        loss = twin.model(x).square().sum()
        loss.backward()
        return loss

    with torch._dynamo.config.patch(trace_autograd_ops=True), pytest.raises(Exception, match="trace_autograd_ops"):
        torch.compile(train_step, backend="aot_eager", fullgraph=True)(batch(1))


def test_torch_settings_are_untouched(monkeypatch):
    def settings():
        configs = (torch._dynamo.config, torch._inductor.config, torch._functorch.config)
        return {config.__name__: config.save_config_portable() for config in configs}

    def switches():
        compiler, dynamic = torch._C._dynamo.compiled_autograd.set_autograd_compiler(None, False)
        torch._C._dynamo.compiled_autograd.set_autograd_compiler(compiler, dynamic)
        return compiled_autograd.compiled_autograd_enabled, torch._C._is_multithreading_enabled(), compiler

    before = settings(), switches()
    first, second = Twin(mlp(), bucket_cap_mb=1.0), Twin(mlp(8))
    for twin in (first, second):
        twin.step(batch(1))
    assert (settings(), switches()) == before
    loss = first.run(batch(1)).square().sum()

    def fail(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(compilation.CompiledBackward, "__call__", fail)
    with pytest.raises(KeyboardInterrupt):
        loss.backward()
    assert switches() == before[1]


def test_unreplicate_takes_everything_off():
    mlp()(batch(1)).sum().backward()  # no replica of another test is left, and with this the wrapper is gone too
    assert not autograd.engine_is_watched()
    twin = Twin(mlp())
    twin.step(batch(1))
    assert dp_compile.unreplicate(twin.model) is twin.model
    assert not any(parameter._post_accumulate_grad_hooks for parameter in twin.model.parameters())
    assert not twin.model._forward_pre_hooks
    with pytest.raises(dp_compile.UnsupportedModuleError, match="not replicated"):
        dp_compile.report(twin.model)
    mlp()(batch(1)).sum().backward()
    assert not autograd.engine_is_watched()
    dp_compile.replicate(twin.model, config=AOT)


class TwoOutputs(nn.Module):
    """The second one needs no gradient: compiled code is given zeros for it, of this batch's size."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 6)

    def forward(self, x):
        out = self.first(x)
        return self.second(out), out.sin()


def test_a_graph_that_may_be_of_one_size_is_not_captured(monkeypatch):
    monkeypatch.setattr(dynamo, "_is_computed", lambda node: node.target is torch.ops.aten.zeros.default)
    twin = Twin(TwoOutputs())
    for rows in (4, 6):
        twin.step(torch.randn(rows, 8), loss=lambda out: out[0].square().sum())
    assert twin.report.backwards == {"eager hooks": 2}


def test_what_a_capture_computes_is_seen():
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


def test_a_traced_backward_goes_with_its_compilation(monkeypatch):
    """AOTAutograd keeps the module, in code that runs in each later backward too."""
    traced = []

    def noted(self, graph_module, inputs):
        traced.append(graph_module)
        return compile_graph(self, graph_module, inputs)

    compile_graph = compilation.CompiledBackward._compile_whole
    monkeypatch.setattr(compilation.CompiledBackward, "_compile_whole", noted)
    twin = Twin(mlp())
    for rows in (4, 4, 6):
        twin.step(torch.randn(rows, 6))
    assert len(traced) == 2
    assert [len(each.graph.nodes) for each in traced] == [0, 0]


@pytest.fixture
def frames(monkeypatch):
    """What Dynamo compiles of this package: frames that it meets outside of a graph."""
    found = []
    compile_frame = convert_frame._compile

    def noted(code, *args, **kwargs):
        if Path(dp_compile.__file__).parent in Path(code.co_filename).parents:
            found.append(code)
        return compile_frame(code, *args, **kwargs)

    monkeypatch.setattr(convert_frame, "_compile", noted)
    return found


def test_dynamo_compiles_no_frames_of_ours(frames):
    """The check before a forward runs outside of what is compiled; a backward breaks the graph of a train step."""
    twin, x = Twin(mlp()), batch(1)
    twin.model.compile(backend="aot_eager")
    twin.model(x)
    assert not frames
    torch.compile(lambda: twin.model(x).square().sum().backward(), backend="aot_eager")()
    assert twin.report.backwards == {"captured": 1}
    assert not frames


def test_casts_are_no_frames_of_their_own(frames):
    """A forward that breaks runs as Python, what puts casts into their places with it."""
    model = Broken(nn.Linear(6, 6), nn.Linear(6, 6))
    dp_compile.replicate(model, config=AOT, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    compile_whole(model)(batch(1)).float().sum().backward()
    assert frames
    assert not {"_begin", "_end"}.intersection(each.co_name for each in frames)


STAGES = ["captured", "analysed", "bucket-reductions", "schedule-collectives", "to-inductor", "code"]


@pytest.fixture
def dumped(monkeypatch):
    """Texts in torch's structured trace by their name."""
    found = {}
    monkeypatch.setattr(dumps.dynamo, "structured_trace_is_on", lambda: True)
    monkeypatch.setattr(dumps.dynamo, "trace_artifact", lambda name, text: found.update({name: text}))
    return found


def train(backend="aot_eager", **options):
    """One step of a small model; replicated."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    dp_compile.replicate(model, config=ReplicateConfig(backend=backend, bucket_cap_mb=0.0003), **options)
    torch.compile(model, backend="aot_eager")(torch.ones(3, 8)).square().sum().backward()
    return model


def short(text):
    return text.partition("\n# As torch prints it\n")[0]


TRACED = """
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from test_capture import train

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
train()
dist.destroy_process_group()
"""


@pytest.mark.nightly
def test_tlparse_shows_the_stages_under_our_names(tmp_path):
    environment = os.environ | {"TORCH_TRACE": str(tmp_path / "trace"), "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", TRACED], env=environment, check=True, capture_output=True)
    (log,) = (tmp_path / "trace").iterdir()
    command = [str(Path(sys.executable).parent / "tlparse"), str(log), "-o", str(tmp_path / "out"), "--no-browser"]
    subprocess.run(command, check=True, capture_output=True)
    index = (tmp_path / "out" / "index.html").read_text()
    for number, stage in enumerate(STAGES):
        assert f"dp_compile-{number}-{stage}" in index
    (shown,) = (tmp_path / "out").rglob("dp_compile-3-schedule-collectives*")
    assert ">> launch 0 = all_reduce(bucket 0, sum)" in shown.read_text()


@pytest.mark.nightly
def test_a_second_run_is_dumped_as_the_first(dumped, monkeypatch):
    """The compiler has all of it in its caches and makes it again; afterwards it uses them as before."""
    settings = torch._inductor.config.fx_graph_cache, torch._functorch.config.enable_autograd_cache
    with fresh_cache():
        for is_on in (False, True, True, False):
            monkeypatch.setattr(dumps.dynamo, "structured_trace_is_on", lambda is_on=is_on: is_on)
            dumped.clear()
            model = train("inductor")
            if is_on:
                assert [name.partition("-")[2].partition("-")[2] for name in dumped][1:] == STAGES
                assert short(dumped["dp_compile-3-schedule-collectives"]).count("all_reduce(") == 2
                # Inductor's own last change.
                assert short(dumped["dp_compile-4-to-inductor"]).count("all_reduce_(") == 2
                assert dumped["dp_compile-plan"] == f"{dp_compile.report(model).plan}\n"
                code = dumped["dp_compile-5-code"]
                assert "async_compile" in code
                assert code.count("all_reduce_.default(") == 2
    assert not dumped
    assert (torch._inductor.config.fx_graph_cache, torch._functorch.config.enable_autograd_cache) == settings
    (record,) = dp_compile.report(model).captures
    assert record.collectives == 2


class Columns(nn.Module):
    """Its backward fills a tensor with zeros and uses it twice."""

    def forward(self, x):
        return x[:, 0] * x[:, 1].sigmoid()


def test_the_next_process_finds_the_code_of_the_same_plan(monkeypatch):
    """In AOTAutograd's cache, for which a graph must be pickled. Here the next process is one without compiled code.

    The first backward only accumulates, so AOTAutograd compiles it and caches the forward too."""
    hits, collectives, locked = [], [], []
    monkeypatch.setattr(inductor, "first_on_host", lambda key: locked.append(key) or nullcontext())
    with fresh_cache():
        for cap_mb in (None, None, 1e-6):
            torch._dynamo.reset()
            counted = counters["aot_autograd"].copy()
            twin = Twin(nn.Sequential(mlp(), Columns()), config=ReplicateConfig(bucket_cap_mb=cap_mb))
            twin.run = torch.compile(twin.model)
            with dp_compile.no_sync(twin.model):
                twin.run(batch(1)).sum().backward()
            twin.step(batch(1))
            hits.append((counters["aot_autograd"] - counted)["autograd_cache_hit"])
            collectives.append(twin.report.captures[-1].collectives)
    assert hits == [0, 2, 1]
    assert collectives[0] == collectives[1] < collectives[2]
    assert [locked.index(key) for key in locked] == [0, 0, 2]


def test_one_process_of_a_host_compiles_a_graph_while_the_others_wait():
    compiles, may_end, others_meet, order = threading.Event(), threading.Event(), threading.Barrier(2), []

    def compile_first():
        with inductor.first_on_host("a graph"):
            compiles.set()
            assert may_end.wait(20)
            order.append("compiled")

    def load():
        with inductor.first_on_host("a graph"):
            order.append("loaded")
            others_meet.wait(20)  # they do not wait for each other

    with fresh_cache(), ThreadPoolExecutor(3) as pool:
        threads = [pool.submit(compile_first)]
        assert compiles.wait(20)
        threads += [pool.submit(load), pool.submit(load)]
        with inductor.first_on_host("another graph"):
            time.sleep(0.2)
        may_end.set()
        for each in threads:
            each.result()
    assert order == ["compiled", "loaded", "loaded"]


def test_a_graph_that_cannot_be_printed_stops_no_training(dumped, monkeypatch):
    monkeypatch.setattr(dumps, "outline", mock.Mock(side_effect=ValueError("no text")))
    dumping = train()
    assert dumped["dp_compile-1-analysed"] == "ValueError: no text\n"
    monkeypatch.setattr(dumps.dynamo, "structured_trace_is_on", lambda: False)
    assert not dumps.are_wanted()
    for mine, other in zip(dumping.parameters(), train().parameters(), strict=True):
        assert torch.equal(mine.grad, other.grad)
