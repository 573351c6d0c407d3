"""A capture that fails costs a warning, never a step; and compilations are bounded by use."""

import os
import re
import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch
from parity import AOT, Block, Twin, expect_average
from torch import nn
from torch._dynamo import compiled_autograd

import dp_compile
from dp_compile._torch import compiler, dynamo
from dp_compile.engine import backward, capture, window
from dp_compile.engine import compile as compilation

pytestmark = pytest.mark.usefixtures("fake_group")
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


class Small(Twin):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)))

    def step(self, loss=torch.sum):
        super().step(X, loss=loss)

    @property
    def backwards(self):
        return dict(self.report.backwards)


def expect_clean():
    """Nothing of a capture is left in the process."""
    assert not compiled_autograd.in_compiled_autograd_region
    assert not window._turn.locked()
    assert not window._window.locked()
    assert window.current() is None
    assert torch._C._len_torch_dispatch_stack() == 0
    assert torch._guards.CompileContext.try_get() is None
    assert not torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.PythonDispatcher)


def messages(caplog):
    return [each.message for each in caplog.records if each.name.startswith("dp_compile")]


def nested(y):
    both = torch.nested.as_nested_tensor([y[:1], y[1:]], layout=torch.jagged)
    return (both * 2).values().square().sum()


def checked(y):
    y.register_hook(lambda grad: torch._dynamo.graph_break())
    return y.square().sum()


LOSSES = {
    "a product with a CSR matrix": (lambda y: (torch.eye(len(y)).to_sparse_csr() @ y).square().sum(), "IndexError"),
    "a nested tensor": (nested, "NestedTensor"),
    "a hook that breaks the graph": (checked, "graph_break"),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.filterwarnings("ignore")
def test_what_a_capture_cannot_take(name, caplog):
    (loss, why), twin = LOSSES[name], Small()
    twin.step(loss)
    expect_clean()
    before = compiler.captures()
    twin.step(loss)
    assert compiler.captures() == before  # it is known
    assert twin.backwards == {"eager hooks": 2}
    (said,) = messages(caplog)
    place = r"at \S*/(?:parity|test_failed_captures)\.py:\d+ in \S+"  # the line of the backward, or of the hook
    assert re.fullmatch(rf"dp_compile, rank 0: a backward is not .* run eagerly: {place}: .{{1,100}}", said)
    assert why in said
    twin.step()
    assert twin.backwards == {"eager hooks": 2, "captured": 1}
    torch._dynamo.reset()  # refused by torch if it takes a capture for under way


class Planted(Exception):
    """Of a class that no code catches by name."""


STAGES = {
    "inputs": (dynamo._QuickCapture, "wrap_fake"),
    "nodes": (dynamo._QuickCapture, "proxy_call_aot_backward"),
    "end": (dynamo._Capture, "end_capture"),
    "sites": (capture, "find_sites"),
    "binding": (capture.CapturedBackward, "_bind"),
    "estimates": (capture, "estimates_of"),
    "reductions": (compilation, "with_reductions"),
    "passes": (compilation, "Pipeline"),
    "compiler": (compilation.inductor, "compile_with_aot_eager"),
}


@pytest.mark.parametrize(
    ("stage", "error"),
    [
        *((stage, Planted) for stage in STAGES),
        *((stage, KeyboardInterrupt) for stage in ("inputs", "nodes", "binding", "compiler")),
        ("binding", dp_compile.ReductionError),
    ],
)
def test_an_exception_in_each_stage(stage, error, monkeypatch):
    """Of any class: the step is trained. The user's own interrupt and this package's named errors come through."""
    twin = Small()

    def fail(*_, **__):
        raise error("planted")

    raised = error is not Planted
    comes = pytest.raises(error, match="planted") if raised else nullcontext()
    with monkeypatch.context() as planted:
        planted.setattr(*STAGES[stage], fail)
        with comes:
            twin.step()
    expect_clean()
    twin.step()  # a capture that failed is not tried again
    assert twin.backwards == ({"captured": 1} if raised else {"eager hooks": 2})
    other = Small()
    other.step()
    assert other.backwards == {"captured": 1}


def test_an_error_that_passes_python_by(monkeypatch):
    """An exception of C++ that no binding catches leaves the frames above without running their `finally`."""
    twin = Small()

    def run(*_):
        compiled_autograd.in_compiled_autograd_region = True
        raise Planted

    with monkeypatch.context() as planted:
        planted.setattr(capture.CapturedBackward, "_run", run)
        planted.setattr(window.Outside, "__exit__", lambda *_: None)
        with pytest.raises(Planted):
            twin.step()
    compiled_autograd.in_compiled_autograd_region &= window.current() is not None
    expect_clean()
    twin.step()
    assert twin.backwards == {"captured": 1}


class Deep(nn.Module):
    """A compiled block, called as often as asked for."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = Block()

    def forward(self, x, times):
        for _ in range(times):
            x = x + self.layers(x)
        return x


def test_a_structure_that_changes_is_compiled_a_few_times(caplog, monkeypatch):
    """And one that comes again and again is compiled then."""
    monkeypatch.setattr(backward, "COMES_AGAIN", 3)
    plain, model, ways = Deep(), dp_compile.replicate(Deep(), config=AOT), []
    model.layers.compile(backend="aot_eager")
    x, before = torch.randn(3, 6), compiler.captures()
    for times in (1, 2, 3, 4, 1, 5, 5, 5, 5, 5, 2):
        captured = dp_compile.report(model).backwards.get("captured", 0)
        for each in (plain, model):
            each.zero_grad()
            each(x, times).square().mean().backward()
        expect_average(model, plain)
        ways.append("captured" if dp_compile.report(model).backwards["captured"] > captured else "eager")
    assert ways == ["captured"] * 5 + ["eager"] * 3 + ["captured"] * 3
    assert compiler.captures() - before == len(dp_compile.report(model).captures) == backward.AT_ONCE + 1
    assert sum("its autograd graph varies" in each for each in messages(caplog)) == 1


CODE = """
import logging, dp_compile, torch  # whichever comes first
logging.getLogger("dp_compile.plan_sync").info("a plan")
logging.getLogger("dp_compile.capture").warning("a fallback")
logging.getLogger("dp_compile.compilation").debug("a graph")
"""


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("setting", "shown"), [("", ["a fallback"]), ("+dp_compile", ["a plan", "a fallback", "a graph"])]
)
def test_torchs_switch_shows_our_log(setting, shown):
    environment = {name: value for name, value in os.environ.items() if name != "TORCH_LOGS"}
    environment |= {"TORCH_LOGS": setting} if setting else {}  # torch does not take an empty one
    done = subprocess.run([sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, check=True)
    assert [line.split("] ")[-1] for line in done.stderr.splitlines()] == shown
