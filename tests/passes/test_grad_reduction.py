"""What hooks emit is what passes recognise; and the op reduces when it is simply executed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from graphs import bucket_key, trace
from torch import fx

from dp_compile.errors import InvalidGraphError
from dp_compile.passes.memory import Running
from dp_compile.passes.reduction import REDUCE_GRAD, GradReduction, emit, match
from dp_compile.passes.result import Refusal
from dp_compile.plan.buckets import BucketPlan, GradientSpec, plan_single

pytestmark = pytest.mark.usefixtures("fake_group")

GOOD: tuple[Any, ...] = (0, 0)


def node_of(*args: Any, **kwargs: Any) -> fx.Node:
    graph = fx.Graph()
    grad = graph.placeholder("grad")
    return graph.call_function(REDUCE_GRAD, tuple(grad if arg == "grad" else arg for arg in args), kwargs)


def test_what_is_emitted_is_matched() -> None:
    graph = trace(lambda grad: emit(grad * 2, 3, 1), torch.randn(2, 3)).graph
    (node,) = graph.find_nodes(op="call_function", target=REDUCE_GRAD)
    found = match(node)
    assert isinstance(found, GradReduction)
    assert (found.index, found.replica) == (3, 1)
    assert found.node is node
    assert found.grad is node.args[0]


@pytest.mark.parametrize(
    ("args", "kwargs", "reason"),
    [
        (("grad",), {}, "expected 3 to 6 positional arguments, got 1"),
        (("grad", *GOOD, *[None] * 4), {}, "expected 3 to 6 positional arguments, got 7"),
        (("grad", *GOOD), {"after": None}, "positional arguments"),
        ((1.0, *GOOD), {}, "the gradient is not a node but 1.0"),
        (("grad", "zero", 0), {}, "is not a number: 'zero', 0"),
        (("grad", 0, None), {}, "is not a number: 0, None"),
    ],
)
def test_refusals(args: tuple[Any, ...], kwargs: dict[str, Any], reason: str) -> None:
    node = node_of(*args, **kwargs)
    found = match(node)
    assert isinstance(found, Refusal)
    assert found.node == node.name
    assert reason in found.reason


def plan_of(grad: torch.Tensor, group: str = "0", scale: float = 0.5) -> BucketPlan:
    spec = GradientSpec(0, "p", tuple(grad.shape), grad.stride(), 4, bucket_key(group, "sum", "float32", "cpu", scale))
    return plan_single([spec])


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_the_result_is_new_and_keeps_the_layout(scale: float) -> None:
    grad = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    before = grad.clone()
    with Running([plan_of(grad, scale=scale)]):
        reduced = emit(grad, *GOOD)
    assert torch.equal(grad, before)
    assert torch.equal(reduced, before * scale)
    assert reduced.data_ptr() != grad.data_ptr()
    assert (reduced.stride(), reduced.dtype) == (grad.stride(), grad.dtype)


@pytest.mark.parametrize("layout", [(6, 1), (1, 4), (12, 2)])
def test_the_promised_layout_is_the_real_one(layout: tuple[int, int]) -> None:
    grad = torch.empty_strided((4, 6), layout).normal_()
    (node,) = trace(lambda g: emit(g, *GOOD), grad).graph.find_nodes(op="call_function", target=REDUCE_GRAD)
    with Running([plan_of(grad)]):
        assert node.meta["val"].stride() == emit(grad, *GOOD).stride()


def test_nothing_is_reduced_without_a_plan() -> None:
    with pytest.raises(InvalidGraphError, match="gradient 0 of module 0 is reduced outside a backward"):
        emit(torch.ones(3), *GOOD)
