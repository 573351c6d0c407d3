"""Gradients that a captured backward accumulates by ops, with `.grad` set after the graph.

How could it be wrong without an error? User code in the graph sees another `.grad` than in an eager backward, or what
it reads is frozen at its first value; a gradient arrives at another parameter, or in another gradient's memory.
"""

import copy

import pytest
import torch
from parity import AOT, compile_whole, mlp
from torch import fx, nn

import dp_compile
from dp_compile._torch import dynamo
from dp_compile.engine import graph as graphs

pytestmark = pytest.mark.usefixtures("fake_group")

X = torch.linspace(-1, 1, 18).view(3, 6)


@pytest.fixture
def functions(monkeypatch):
    """How many gradients of each captured backward a function reduces, not an op."""
    counts = []
    with_reductions = graphs.with_reductions

    def counted(*args):
        module, positions = with_reductions(*args)
        counts.append(len(module.graph.find_nodes(op="call_function", target=graphs.reduce_accumulated)))
        return module, positions

    monkeypatch.setattr("dp_compile.engine.compile.with_reductions", counted)
    return counts


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
def test_code_of_the_user_s_that_changes(what, functions, monkeypatch):
    """Dynamo guards on a variable that the code reads."""
    model = dp_compile.replicate(mlp(5), config=AOT)
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
    assert functions
    assert all(functions)
    scale = 1.0 if what == "autograd function" else 2.0
    for first, second, third in zip(*found, strict=True):
        torch.testing.assert_close(second, first)
        torch.testing.assert_close(third, scale * first)
    dp_compile.unreplicate(model)


def test_gradients_in_each_other_s_memory():
    """Code that adds in place is for gradients that do not overlap; others are added to as plain autograd does."""
    twin = nn.Sequential(*(nn.Linear(6, 6, bias=False) for _ in range(3)))
    model = copy.deepcopy(twin)
    dp_compile.replicate(model[2], config=AOT)
    run, bucket = compile_whole(model), torch.zeros(80)
    for offsets in ((0, 36), (40, 0), (0, 18), (7, 7)):
        expected = []
        for each, how in ((twin, twin), (model, run)):
            memory = bucket.clone()
            for layer, offset in zip(each, offsets, strict=False):  # those beside the replicated one
                layer.weight.grad = memory[offset:].as_strided((6, 6), (6, 1))
            each[2].weight.grad = None
            how(X).square().sum().backward()
            expected.append(memory)
        torch.testing.assert_close(*expected)
    assert dp_compile.report(model[2]).backwards["captured"] == 2
    dp_compile.unreplicate(model[2])


class Blocks(nn.Module):
    """Two that are compiled by themselves, code between and after them that is not, and unused parameters."""

    def __init__(self):
        super().__init__()
        self.first, self.last = mlp(5), mlp(5)
        self.scale = nn.Parameter(torch.ones(6))
        self.unused = nn.Linear(3, 3)

    def forward(self, x):
        out = self.last(self.first(x).relu() * self.scale)
        return nn.functional.log_softmax(out, -1)


class Attention(nn.Module):
    """Its backward makes zeros, and numbers in other dtypes."""

    def __init__(self):
        super().__init__()
        self.table, self.inner = nn.Embedding(7, 6), nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
        self.first, self.last = nn.Identity(), nn.Identity()

    def forward(self, x):
        tokens = (x > 0).long().sum(1, keepdim=True).expand(-1, 4)
        hidden = self.inner(self.table(tokens))
        return nn.functional.linear(hidden.double().float(), self.table.weight)


class Complex(Blocks):
    def forward(self, x):
        return super().forward(x) * torch.view_as_real(x * self.phase).sum(-1)

    def __init__(self):
        super().__init__()
        self.phase = nn.Parameter(torch.full((6,), 1 + 2j))


@pytest.mark.parametrize("make", [Blocks, Attention, Complex])
def test_the_bits_of_an_eager_backward(make, functions):
    """Fresh gradients, and those added to; in the layout and the memory that autograd gives them."""
    torch.manual_seed(0)
    eager = make()
    model = copy.deepcopy(eager)
    dp_compile.replicate(model, config=AOT, find_unused_parameters=True)
    run = compile_whole(model) if make is Attention else model
    for block in (model.first, model.last):
        block.compile(backend="aot_eager")
    for kept in (None, 0.25, 0.25):
        for parameter in (*model.parameters(), *eager.parameters()):
            parameter.grad = None if kept is None else torch.full_like(parameter, kept)
        before = [parameter.grad for parameter in model.parameters()]
        with dp_compile.compiled_backward():
            run(X).square().sum().backward()
        eager(X).square().sum().backward()
        for (name, parameter), twin, old in zip(model.named_parameters(), eager.parameters(), before, strict=True):
            assert old is None or parameter.grad is old
            if not name.startswith("unused"):  # the fake group sums nothing, and the average is of two ranks
                torch.testing.assert_close(parameter.grad, twin.grad / 2, rtol=0, atol=0)
                assert parameter.grad.stride() == twin.grad.stride()
    assert [bool(each) for each in functions] == [make is Complex] * len(functions)
    dp_compile.unreplicate(model)


def test_constants_of_one_value_are_made_again():
    def used_twice(x):
        twos = torch.full((3,), 2.0)
        return x * twos + twos + torch.arange(3.0)

    graph_module = fx.symbolic_trace(used_twice)
    dynamo.refill_constants(graph_module)
    assert [each.tolist() for each in graph_module.buffers()] == [[0.0, 1.0, 2.0]]
    torch.testing.assert_close(graph_module(torch.ones(3)), torch.tensor([4.0, 5.0, 6.0]))
