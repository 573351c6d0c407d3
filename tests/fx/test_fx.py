"""Graph tools: ordering, inserting, checking, printing. No process group, no policy."""

import operator

import torch
from graphs import sort_stably
from hypothesis import given
from hypothesis import strategies as st
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from dp_compile.fx import edit
from dp_compile.fx.memory import is_ordered, written_by


@st.composite
def dags(draw):
    """A random valid graph, with placeholders only in front, and its nodes in between."""
    graph = fx.Graph()
    nodes = [graph.placeholder(f"x{number}") for number in range(draw(st.integers(1, 3)))]
    middle = []
    for _ in range(draw(st.integers(0, 12))):
        inputs = draw(st.lists(st.sampled_from(nodes), max_size=3))
        middle.append(graph.call_function(torch.add, tuple(inputs)))
        nodes.append(middle[-1])
    graph.output(tuple(draw(st.lists(st.sampled_from(nodes), max_size=4))))
    return graph, middle


def order_of(graph):
    return [node.name for node in graph.nodes]


@given(dags(), st.data())
def test_any_wish_and_any_chain_give_a_valid_order(dag, data):
    graph, middle = dag
    wish = {node: data.draw(st.integers(-3, 20)) for node in graph.nodes}
    chain = [node for node in middle if data.draw(st.booleans())]
    before = order_of(graph)
    moved = sort_stably(graph, wish.__getitem__, chain=chain)
    graph.lint()
    after = order_of(graph)
    assert sorted(after) == sorted(before)
    assert moved == (after != before)
    position = edit.positions(graph)
    assert [position[node] for node in chain] == sorted(position[node] for node in chain)
    kinds = [node.op for node in graph.nodes]
    assert kinds == sorted(kinds, key=["placeholder", "call_function", "output"].index)
    assert sort_stably(graph, wish.__getitem__, chain=chain) is False


def test_writes_and_random_numbers_keep_their_order_whatever_the_wishes():
    def function(a, b):
        before, first = a.sin(), torch.rand(2)
        a.copy_(b)
        return before, first, a.cos(), b.exp(), torch.rand(2)

    graph = make_fx(function, tracing_mode="fake")(torch.randn(2), torch.randn(2)).graph
    now = edit.positions(graph)
    assert sort_stably(graph, lambda node: -now[node])
    assert [node.name for node in graph.nodes if node.op == "call_function"] == [
        "exp", "rand", "rand_1", "sin", "copy_", "cos",
    ]  # fmt: skip


def test_what_calls_write_to():
    graph = fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")

    def unknown(*tensors): ...

    calls = [
        (torch.ops.aten.add.Tensor, {}, ()),
        (torch.ops.aten.add_.Tensor, {}, (a,)),
        (torch.ops.aten.sin.out, {"out": b}, (b,)),
        (torch.ops.aten._foreach_add_.List, {}, (a, b)),
        (operator.add, {}, ()),
        (unknown, {}, (a, b)),
        (torch.ops.higher_order.cond, {}, ()),
    ]
    for target, kwargs, written in calls:
        args = (a,) if kwargs else ([a, b], [b]) if "foreach" in str(target) else (a, b)
        node = graph.call_function(target, args, kwargs)
        assert written_by(node) == written, target
        assert is_ordered(node) == (target in (unknown, torch.ops.higher_order.cond))
