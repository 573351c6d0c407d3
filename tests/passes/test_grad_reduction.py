"""What hooks emit is what passes recognise; and the op reduces when it is simply executed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from graphs import trace
from torch import fx

from dp_compile.passes.reduction import REDUCE_GRAD, Averaging, GradReduction, ReductionTag, averaging_for, emit, match
from dp_compile.passes.result import Refusal
from dp_compile.testing.ranks import Ranks

pytestmark = pytest.mark.usefixtures("fake_group")

GOOD: tuple[Any, ...] = (0, 0, "0", "sum", 0.5)


def node_of(*args: Any, **kwargs: Any) -> fx.Node:
    graph = fx.Graph()
    grad = graph.placeholder("grad")
    return graph.call_function(REDUCE_GRAD, tuple(grad if arg == "grad" else arg for arg in args), kwargs)


def test_what_is_emitted_is_matched() -> None:
    graph = trace(lambda grad: emit(grad * 2, 3, 1, "0", "avg", 0.25), torch.randn(2, 3)).graph
    (node,) = graph.find_nodes(op="call_function", target=REDUCE_GRAD)
    found = match(node)
    assert isinstance(found, GradReduction)
    assert found.tag == ReductionTag(index=3, replica=1, group="0", reduce_op="avg", scale=0.25)
    assert found.node is node
    assert found.grad is node.args[0]


def test_an_order_between_two_reductions_is_matched() -> None:
    def both(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = emit(a, *GOOD)
        return first, emit(b, 1, 0, "0", "sum", 0.5, first)

    graph = trace(both, torch.randn(2), torch.randn(3)).graph
    first, second = graph.find_nodes(op="call_function", target=REDUCE_GRAD)
    assert first in second.all_input_nodes
    found = match(second)
    assert isinstance(found, GradReduction)
    assert found.tag.index == 1


@pytest.mark.parametrize(
    ("args", "kwargs", "reason"),
    [
        (("grad",), {}, "expected 6 or 7 positional arguments, got 1"),
        (("grad", *GOOD, None, None), {}, "expected 6 or 7 positional arguments, got 8"),
        (("grad", *GOOD), {"after": None}, "positional arguments"),
        ((1.0, *GOOD), {}, "the gradient is not a node but 1.0"),
        (("grad", "zero", 0, "0", "sum", 0.5), {}, "is not a number: 'zero', 0, 0.5"),
        (("grad", 0, None, "0", "sum", 0.5), {}, "is not a number: 0, None, 0.5"),
        (("grad", 0, 0, "0", "sum", "half"), {}, "is not a number: 0, 0, 'half'"),
        (("grad", 0, 0, 0, "sum", 0.5), {}, "unknown group or reduce op: 0, 'sum'"),
        (("grad", 0, 0, "0", "max", 0.5), {}, "unknown group or reduce op: '0', 'max'"),
        (("grad", 0, 0, "0", ["sum"], 0.5), {}, "unknown group or reduce op: '0', ['sum']"),
    ],
)
def test_refusals(args: tuple[Any, ...], kwargs: dict[str, Any], reason: str) -> None:
    node = node_of(*args, **kwargs)
    found = match(node)
    assert isinstance(found, Refusal)
    assert found.node == node.name
    assert reason in found.reason


@pytest.mark.parametrize(
    ("backend", "expected"),
    [
        ("nccl", Averaging("avg", 1.0)),
        ("fabric", Averaging("avg", 1.0)),
        ("gloo", Averaging("sum", 0.25)),
        ("fake", Averaging("sum", 0.25)),
    ],
)
def test_averaging(backend: str, expected: Averaging) -> None:
    assert averaging_for(backend, 4) == expected


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_the_result_is_new_and_keeps_the_layout(scale: float) -> None:
    grad = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    before = grad.clone()
    reduced = emit(grad, 0, 0, "0", "sum", scale)
    assert torch.equal(grad, before)
    assert torch.equal(reduced, before * scale)
    assert reduced.data_ptr() != grad.data_ptr()
    assert (reduced.stride(), reduced.dtype) == (grad.stride(), grad.dtype)


@pytest.mark.parametrize("layout", [(6, 1), (1, 4), (12, 2)])
def test_the_promised_layout_is_the_real_one(layout: tuple[int, int]) -> None:
    grad = torch.empty_strided((4, 6), layout).normal_()
    (node,) = trace(lambda g: emit(g, *GOOD), grad).graph.find_nodes(op="call_function", target=REDUCE_GRAD)
    assert node.meta["val"].stride() == emit(grad, *GOOD).stride()


def _reduce_here(tag: tuple[Any, ...]) -> torch.Tensor:
    return emit(torch.full((3,), float(dist.get_rank() + 1)), *tag)


def test_it_really_reduces(ranks2: Ranks) -> None:
    for result in ranks2.run(_reduce_here, (0, 0, "0", "sum", 0.5)):
        assert result.tolist() == [1.5, 1.5, 1.5]
