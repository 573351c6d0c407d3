"""Backwards that are compiled, and run, without Dynamo: what is done in its place, and where that is not enough.

How could it be wrong without a word? By a graph that is not what Dynamo would have made of it. Later by something that
Dynamo would have noticed: other inputs, another state of torch, code of the user's that runs in the backward and does
something else now.
"""

import copy
import operator
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from parity import AOT, compile_whole, expect_average, mlp
from torch import fx, nn
from torch._dynamo.convert_frame import compile_lock
from torch._inductor.utils import fresh_cache

import dp_compile
from dp_compile._torch import dynamo
from dp_compile.engine import compile as compilation

pytestmark = pytest.mark.usefixtures("fake_group")


@pytest.fixture
def without(monkeypatch):
    """How many inputs each run without Dynamo had."""
    runs = []
    run = compilation._Plain.run

    def counted(self, inputs):
        runs.append(len(inputs))
        return run(self, inputs)

    monkeypatch.setattr(compilation._Plain, "run", counted)
    return runs


@pytest.fixture
def graphs(monkeypatch):
    """What was compiled, by Dynamo or in its place."""
    seen = []
    compile_whole = compilation.CompiledBackward._compile_whole

    def noted(self, graph_module, inputs):
        seen.append(copied(graph_module.graph))
        return compile_whole(self, graph_module, inputs)

    monkeypatch.setattr(compilation.CompiledBackward, "_compile_whole", noted)
    return seen


def copied(graph):
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph, {}))
    return copy


@pytest.fixture
def dynamos(monkeypatch):
    """How often Dynamo was asked to trace a backward."""
    asked = []
    make = compilation.CompiledBackward._make

    def noted(self, inputs):
        made = make(self, inputs)
        asked.extend([] if isinstance(made, compilation._Plain) else [1])
        return made

    monkeypatch.setattr(compilation.CompiledBackward, "_make", noted)
    return asked


X = torch.linspace(-1, 1, 18).view(3, 6)


def backward(model):
    model(X).square().sum().backward()


@pytest.fixture
def model():
    made = dp_compile.replicate(mlp(5), config=AOT)
    yield made
    dp_compile.unreplicate(made)


class Scale(torch.autograd.Function):
    """Its backward multiplies by what a variable of this module says now."""

    @staticmethod
    def forward(ctx, x):
        return x * factor

    @staticmethod
    def backward(ctx, grad):
        return grad * factor


factor = 1.0


def post_hook(parameter):
    parameter.grad.mul_(factor)


@pytest.mark.parametrize("what", ["post-accumulate hook", "hook on a tensor", "autograd function"])
def test_code_of_the_user_s_that_changes(model, without, what, monkeypatch):
    """Dynamo sees that a variable which the code reads has another value; nothing else would."""
    if what == "post-accumulate hook":
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(post_hook)
    compiled = compile_whole(model)

    def run(x):
        out = compiled(x)
        if what == "hook on a tensor":
            out.register_hook(lambda grad: grad * factor)
        return Scale.apply(out) / factor if what == "autograd function" else out

    found = []
    for value in (1.0, 1.0, 2.0):
        monkeypatch.setitem(globals(), "factor", value)
        model.zero_grad()
        run(X).sum().backward()
        found.append([each.grad.clone() for each in model.parameters() if each.grad is not None])
    assert not without
    scale = 1.0 if what == "autograd function" else 2.0
    for first, second, third in zip(*found, strict=True):
        torch.testing.assert_close(second, first)
        torch.testing.assert_close(third, scale * first)


takes_existing = pytest.mark.skipif(
    not dynamo.TAKES_EXISTING, reason="before torch 2.13 Dynamo traces a backward that adds to gradients"
)


@takes_existing
def test_gradients_in_each_other_s_memory(without):
    """Code that adds in place is for gradients that do not overlap; others are added to as plain autograd does."""
    twin = nn.Sequential(*(nn.Linear(6, 6, bias=False) for _ in range(3)))
    model = copy.deepcopy(twin)
    dp_compile.replicate(model[2], config=AOT)
    run, bucket = compile_whole(model), torch.zeros(80)
    for offsets, is_plain in (((0, 36), True), ((40, 0), True), ((0, 18), False), ((7, 7), False)):
        expected = []
        for each, how in ((twin, twin), (model, run)):
            memory = bucket.clone()
            for layer, offset in zip(each, offsets, strict=False):  # those beside the replicated one
                layer.weight.grad = memory[offset:].as_strided((6, 6), (6, 1))
            each[2].weight.grad = None
            before = len(without)
            backward(how)
            expected.append(memory)
        torch.testing.assert_close(*expected)
        assert len(without) - before == is_plain, offsets
    dp_compile.unreplicate(model[2])


def lines(graph):
    """A graph without the names of its nodes, nor the places where something is taken out of a list."""
    found, names = list[str](), dict[fx.Node, str]()
    for node in graph.nodes:
        args = fx.map_arg((node.args, node.kwargs), names.get)
        if checked := dynamo.validated_outputs(node):  # Dynamo has run it, and knows which outputs are `None`
            kept = [None if like is None else output for output, (_, like) in zip(args[0][0], checked, strict=True)]
            args = ((kept, *args[0][1:]), args[1])
        if node.target is operator.getitem:
            names[node] = f"{names[node.args[0]]}[{node.args[1]}]"
        elif node.op == "placeholder":
            names[node] = "given"
        else:
            names[node] = f"node {len(found)}"
            found.append(f"{node.op} {getattr(node.target, '__name__', node.target)} {args}")
    return found


class Blocks(nn.Module):
    """Two that are compiled by themselves, and code between and after them that is not."""

    def __init__(self, *, unused=False):
        super().__init__()
        self.first, self.last = mlp(5), mlp(5)
        self.scale = nn.Parameter(torch.ones(6))
        if unused:
            self.unused = nn.Linear(3, 3)

    def forward(self, x):
        out = self.last(self.first(x).relu() * self.scale)
        return nn.functional.log_softmax(out, -1)


def compiled_blocks(model):
    for block in (model.first, model.last):
        block.compile(backend="aot_eager")
    return model


class Attention(nn.Module):
    """Its backward makes zeros, and numbers in other dtypes."""

    def __init__(self):
        super().__init__()
        self.table, self.inner = nn.Embedding(7, 6), nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)

    def forward(self, x):
        tokens = (x > 0).long().sum(1, keepdim=True).expand(-1, 4)
        hidden = self.inner(self.table(tokens))
        return nn.functional.linear(hidden.double().float(), self.table.weight)


KINDS = {
    "with eager code": (Blocks, compiled_blocks, {}),
    "attention": (Attention, compile_whole, {}),
    "unused": (lambda: Blocks(unused=True), compiled_blocks, {"find_unused_parameters": True}),
    "accumulating": (lambda: Blocks(unused=True), compiled_blocks, {"find_unused_parameters": True}),
}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=takes_existing if "accumulating" in kind else ()) for kind in KINDS]
)
def test_the_graph_is_dynamos(kind, graphs, dynamos, monkeypatch):
    """Node for node; and what comes of it goes to the same places."""
    make, how, options = KINDS[kind]
    gradients = []
    for by_dynamo in (False, True):
        if by_dynamo:
            monkeypatch.delattr(compilation, "check_plain")
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = dp_compile.replicate(make(), **{"config": AOT} | options)
        run = how(model)
        if "accumulating" in kind:
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 0.25)
        for _ in range(2):
            if "accumulating" not in kind:
                model.zero_grad()
            with dp_compile.compiled_backward():
                run(X).square().sum().backward()
        gradients.append([each.grad for each in model.parameters()])
        dp_compile.unreplicate(model)
    assert len(dynamos) == 1
    made, expected = map(lines, graphs)
    if "accumulating" in kind:  # Dynamo returns what was added to in place, too
        made.pop(), expected.pop()
    assert made == expected
    assert len(made) > 10
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6, dtype=torch.complex64))

    def forward(self, x):
        return torch.view_as_real(x * self.weight)


def test_complex_gradients_are_traced_by_dynamo(dynamos):
    model = dp_compile.replicate(Complex(), config=AOT)
    for _ in range(2):
        model.zero_grad()
        backward(compile_whole(model))
    assert len(dynamos) == 1
    assert dp_compile.report(model).backwards == {"captured": 2}
    dp_compile.unreplicate(model)


def test_other_threads_are_kept_out(model, monkeypatch):
    """No thread compiles meanwhile, and one that runs compiled code is not in a trace (torch 2.13)."""
    seen = []
    compile_graph = compilation.CompiledBackward._compile_with_passes

    def look(self, *args):
        with ThreadPoolExecutor(1) as other:
            seen.append((other.submit(compile_lock.acquire, False).result(), torch.compiler.is_compiling()))
        return compile_graph(self, *args)

    monkeypatch.setattr(compilation.CompiledBackward, "_compile_with_passes", look)
    backward(compile_whole(model))
    assert seen == [(False, hasattr(torch.compiler, "_compile_session_context"))]


def test_a_stance_against_compiling_is_kept(model, dynamos):
    run = compile_whole(model)
    loss = run(X).square().sum()
    with torch.compiler.set_stance("fail_on_recompile"), pytest.raises(RuntimeError, match="fail_on_recompile"):
        loss.backward()
    assert len(dynamos) == 1


def test_compiling_draws_no_random_numbers(model):
    run = compile_whole(model)
    loss = run(X).square().sum()
    torch.manual_seed(1)
    random.seed(1)
    loss.backward()
    drawn = torch.rand(1).item(), random.random()
    torch.manual_seed(1)
    random.seed(1)
    assert drawn == (torch.rand(1).item(), random.random())


class Sub(torch.Tensor):
    pass


def test_what_fits_is_what_dynamo_would_guard_on():
    tensors = [torch.ones(3, 4), torch.ones(2, requires_grad=True)]
    fits = dynamo.Fits(tensors)
    assert fits([torch.zeros(3, 4), torch.zeros(2, requires_grad=True)])
    for others in (
        tensors[:1],
        [*tensors, torch.ones(1)],
        [torch.ones(4, 3).t(), tensors[1]],
        [torch.ones(3, 5), tensors[1]],
        [torch.ones(3, 4).double(), tensors[1]],
        [torch.ones(3, 4).requires_grad_(), tensors[1]],
        [torch.ones(3, 4).as_subclass(Sub), tensors[1]],
        [torch.ones(3, 4, device="meta"), tensors[1]],
    ):
        assert not fits(others)
    same = torch.ones(2)
    assert not dynamo.Fits([torch.ones(2), torch.ones(2)])([same, same])
    with torch.autocast("cpu", torch.bfloat16):
        assert not fits(tensors)


class Positions(nn.Module):
    """Its backward starts from zeros and from positions: calls that are given no tensor."""

    def __init__(self):
        super().__init__()
        self.position = nn.Embedding(6, 6)
        self.last = nn.Linear(6, 6)

    def forward(self, x):
        return self.last(x + self.position(torch.arange(len(x))))


def test_a_forward_that_torch_saved_gives_the_same_gradients(fake_group, dynamos):
    """Plain `torch.compile` ran first: entries of AOTAutograd's cache have constants for calls without a tensor."""
    alone, x = Positions(), torch.randn(4, 6)
    with fresh_cache():
        torch.compile(alone)(x).square().mean().backward()
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model = dp_compile.replicate(copy.deepcopy(alone))
        model.zero_grad()
        torch.compile(model)(x).square().mean().backward()
    expect_average(model, alone)
    assert torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"] == 1
    assert not dynamos


def test_constants_of_one_value_are_made_again():
    def used_twice(x):
        twos = torch.full((3,), 2.0)
        return x * twos + twos + torch.arange(3.0)

    graph_module = fx.symbolic_trace(used_twice)
    dynamo.refill_constants(graph_module)
    assert [each.tolist() for each in graph_module.buffers()] == [[0.0, 1.0, 2.0]]
    torch.testing.assert_close(graph_module(torch.ones(3)), torch.tensor([4.0, 5.0, 6.0]))
