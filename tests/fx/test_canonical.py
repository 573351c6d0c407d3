"""Texts of graphs: what changes a graph changes its text, what does not leaves it, what has no text is refused."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from dp_compile.fx.canonical import NoText, digest, name_of_function, text_of

aten = torch.ops.aten


def graph(target: Any = aten.mul.Tensor, constant: Any = 2.0, prefix: str = "", rest: tuple[Any, ...] = ()) -> fx.Graph:
    made = fx.Graph()
    x = made.placeholder("inputs")
    x.name = f"{prefix}x"
    first = made.call_function(operator.getitem, (x, 0))
    second = made.call_function(target, (first, constant), dict(rest))
    made.output(((second, first),))
    return made


BASE = text_of(graph())


@pytest.mark.parametrize(
    "other",
    [
        graph(aten.add.Tensor),
        graph(aten.mul.Scalar),
        graph(constant=2),
        graph(constant=True),
        graph(constant=-2.0),
        graph(constant="2.0"),
        graph(constant=None),
        graph(constant=[2.0]),
        graph(constant=torch.float32),
        graph(rest=(("alpha", 1),)),
    ],
    ids=["op", "overload", "integer", "truth", "sign", "text", "nothing", "list", "dtype", "keyword"],
)
def test_what_is_called_and_with_what_is_said(other: fx.Graph) -> None:
    assert text_of(other) != BASE


@pytest.mark.parametrize(
    ("one", "other"),
    [(1, True), (1, 1.0), (0.0, -0.0), ((1,), [1]), ("a", b"a"), (torch.float16, torch.bfloat16), (slice(1), slice(0))],
)
def test_equal_constants_of_other_kinds_are_others(one: Any, other: Any) -> None:
    assert text_of(graph(constant=one)) != text_of(graph(constant=other))


def test_names_and_dead_reads_are_left_out() -> None:
    other = graph(prefix="aot7_")
    x, first, *_ = other.nodes
    with other.inserting_after(first):
        other.call_function(operator.getitem, (x, 3))
    assert text_of(other) == BASE


def test_order_and_edges_are_said() -> None:
    def made(swap: bool, use: int) -> str:
        whole = fx.Graph()
        x = whole.placeholder("inputs")
        nodes = [whole.call_function(op, (x,)) for op in ((aten.sin, aten.cos) if swap else (aten.cos, aten.sin))]
        whole.output(nodes[use])
        return text_of(whole, lambda node: str(node.target))

    assert len({made(swap, use) for swap in (False, True) for use in (0, 1)}) == 4


def test_an_effect_without_a_reader_stays() -> None:
    other = graph()
    x, first, *_ = other.nodes
    with other.inserting_after(first):
        other.call_function(operator.setitem, (x, 0, first))
    assert text_of(other) != BASE


def in_a_closure() -> Callable[[Any, Any], Any]:
    return lambda x, y: x


@pytest.mark.parametrize(
    "refused",
    [
        graph(target=in_a_closure()),
        graph(target=lambda x, y: x),
        graph(constant=torch.ones(2)),
        graph(constant=object()),
        graph(constant={1: object()}),
    ],
    ids=["closure", "lambda", "tensor", "object", "object inside"],
)
def test_what_has_no_text_is_refused(refused: fx.Graph) -> None:
    with pytest.raises(NoText):
        text_of(refused)


def test_a_function_has_a_name_if_it_is_found_under_it() -> None:
    assert name_of_function(torch.zeros) == "torch:zeros"
    assert name_of_function(operator.getitem) == "_operator:getitem"
    assert name_of_function(in_a_closure) == f"{__name__}:in_a_closure"
    assert name_of_function(in_a_closure()) is None
    assert name_of_function(print_of_another_module()) is None


def print_of_another_module() -> Any:
    def stands_in(x: Any) -> Any:
        return x

    stands_in.__module__, stands_in.__qualname__ = "operator", "neg"
    return stands_in


def test_a_digest_says_where_one_text_ends() -> None:
    assert digest("ab", "c") != digest("a", "bc") != digest("abc")
