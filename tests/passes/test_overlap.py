"""Where compute goes: first what the next launch needs, within the memory bound, and never for a belief about time."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from graphs import Bounded, Grad, executed, is_all_reduce, launches, plan_for, short, trace
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from dp_compile.fx import edit
from dp_compile.fx.collectives import ALL_REDUCE, WAIT
from dp_compile.passes import BucketReductions, ScheduleCollectives
from dp_compile.passes.pipeline import Pipeline
from dp_compile.passes.result import PassResult
from dp_compile.plan.buckets import BucketPlan

pytestmark = pytest.mark.usefixtures("fake_group")

MOVING = (BucketReductions(), ScheduleCollectives())
STAYING = (BucketReductions(), Bounded(nbytes=0))


def layers(number: int, width: int = 16) -> tuple[list[Grad], fx.GraphModule]:
    """The backward of a chain of layers without biases, weight gradients where a compiler's tracing puts them."""
    grads = [Grad(index=index, shape=(width, width)) for index in range(number)]

    def backward(grad: torch.Tensor, *saved: torch.Tensor) -> list[torch.Tensor]:
        weights, inputs, reduced = saved[:number], saved[number:], []
        for index in reversed(range(number)):
            reduced.append(grads[index].reduce(inputs[index].t() @ grad))
            if index:
                grad = grad @ weights[index]
        return reduced

    return grads, trace(backward, *(torch.randn(width, width) for _ in range(2 * number + 1)))


def run(module: fx.GraphModule, plan: BucketPlan, *passes: Any) -> tuple[fx.Graph, PassResult]:
    results, after = list[PassResult](), copy.deepcopy(module)
    Pipeline(passes, [plan], results.append)(after.graph)
    after.recompile()
    return after.graph, results[0]


def compute_before_launches(graph: fx.Graph) -> list[int]:
    """How many nodes of the backward itself stand in front of each launch."""
    counts, count = [], 0
    for node in graph.nodes:
        if is_all_reduce(node):
            counts.append(count)
        count += node.op == "call_function" and edit.provenance_of(node) is None
    return counts


# --- where compute goes -----------------------------------------------------------------------------------------------


def test_compute_stays_if_the_bound_is_too_small_and_collectives_still_move() -> None:
    grads, module = layers(3)
    plan = plan_for([grads[1], grads[2], grads[0]], cap=1)
    graph, result = run(module, plan, *STAYING)
    (refusal,) = result.refusals
    assert_expected_inline(
        f"{refusal.node}: {refusal.reason}",
        """all_reduce_default: compute does not move: its simulated peak would be 8.0 KiB, the bound is 0 B""",
    )
    products = [node.name for node in graph.nodes if "mm" in node.name]
    assert products == [node.name for node in module.graph.nodes if "mm" in node.name]
    assert compute_before_launches(graph) == [5, 5, 8]
    assert compute_before_launches(run(module, plan, *MOVING)[0]) == [3, 5, 8]


def test_the_bound_is_the_largest_peak_that_is_allowed() -> None:
    grads, module = layers(3)
    plan = plan_for([grads[1], grads[2], grads[0]], cap=1)
    moved, result = run(module, plan, *MOVING)
    assert result.memory is not None
    for bound, expected in [(result.memory.nbytes, moved), (result.memory.nbytes - 1, run(module, plan, *STAYING)[0])]:
        graph, _ = run(module, plan, BucketReductions(), Bounded(nbytes=bound))
        assert short(graph) == short(expected)


def with_biases(grad: torch.Tensor, saved: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
    """A layer's backward as compilers trace it, and what it comes to before."""
    weight_grad = Grad(index=0, shape=(16, 16)).reduce(saved.t() @ grad)
    bias_grad = Grad(index=1, shape=(16,)).reduce(grad.sum(0))
    return [weight_grad, bias_grad, Grad(index=2, shape=(16, 16)).reduce((grad @ weight).tanh())]


@pytest.mark.parametrize("buckets", ["one", "two"])
def test_a_sum_between_two_products_is_beside_other_code_unless_a_launch_needs_it(buckets: str) -> None:
    module = trace(with_biases, *(torch.randn(16, 16) for _ in range(3)))
    grads = [Grad(index=0, shape=(16, 16)), Grad(index=1, shape=(16,)), Grad(index=2, shape=(16, 16))]
    graph, _ = run(module, plan_for(grads, cap=float("inf") if buckets == "one" else 16 * 17 * 4), *MOVING)
    ops = [str(node.target).split(".")[1] for node in graph.nodes if "." in str(node.target)]
    order = [op for op in ops if op in ("addmm", "mm", "sum", "tanh", "all_reduce")]
    if buckets == "one":
        assert order == ["addmm", "mm", "sum", "tanh", "all_reduce"]
    else:
        assert order == ["addmm", "sum", "all_reduce", "mm", "tanh", "all_reduce"]


def test_a_sum_of_what_the_product_does_not_read_stays() -> None:
    """Behind the product it would hold its input for longer."""

    def backward(grad: torch.Tensor, weight: torch.Tensor, other: torch.Tensor) -> list[torch.Tensor]:
        bias_grad = Grad(index=0, shape=(16,)).reduce(other.exp().sum(0))
        return [bias_grad, Grad(index=1, shape=(16, 16)).reduce((grad @ weight).tanh())]

    module = trace(backward, *(torch.randn(16, 16) for _ in range(3)))
    graph, _ = run(module, plan_for([Grad(index=0, shape=(16,)), Grad(index=1, shape=(16, 16))]), *MOVING)
    names = [node.name for node in graph.nodes]
    assert names.index("exp") < names.index("sum_1") < names.index("mm") < names.index("tanh")


def test_compute_stays_where_somebody_elses_collectives_are() -> None:
    grad = Grad(index=0)
    module = trace(
        lambda a, b: (WAIT(ALL_REDUCE(b.exp(), "max", "0")), grad.reduce(a.sin())), grad.values(), torch.randn(3)
    )
    graph, result = run(module, plan_for([grad]), *MOVING)
    assert [refusal.node for refusal in result.refusals] == ["all_reduce"]
    names = [node.name for node in graph.nodes]
    assert names.index("exp") < names.index("all_reduce") < names.index("sin")


# --- memory -----------------------------------------------------------------------------------------------------------


def test_both_peaks_by_hand() -> None:
    """Layers of 1 KiB: three weights, three inputs and the output's gradient go in."""
    grads, module = layers(3)
    _, result = run(module, plan_for(grads[::-1], cap=1), *MOVING)
    memory = result.memory
    assert memory is not None
    # 7 inputs, the first bucket; everything later takes what something else has left.
    assert memory.nbytes == 8 * 1024
    # 3 buckets more, of which none is a gradient's own memory.
    assert memory.ddp_nbytes == (7 + 3 + 1) * 1024


# --- every graph ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Compute:
    """A random backward: operations on earlier values, some of which are gradients; a plan in any order."""

    operations: tuple[tuple[str, int, int], ...]
    gradients: tuple[int, ...]
    grads: tuple[Grad, ...]
    plan: BucketPlan

    def __call__(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        values, results = list(inputs), []
        for position, (kind, left, right) in enumerate(self.operations):
            one, other = values[left % len(values)], values[right % len(values)]
            values.append(one @ other if kind == "product" else one.sin() + other)
            if position in self.gradients:
                results.append(self.grads[self.gradients.index(position)].reduce(values[-1]))
        return [*results, values[-1].cos()]


@st.composite
def computes(draw: st.DrawFn) -> Compute:
    positions = st.integers(0, 30)
    operation = st.tuples(st.sampled_from(["product", "pointwise"]), positions, positions)
    operations = tuple(draw(st.lists(operation, min_size=1, max_size=14)))
    gradients = tuple(sorted(draw(st.sets(st.integers(0, len(operations) - 1), min_size=1))))
    grads = tuple(Grad(index=index, shape=(4, 4)) for index in range(len(gradients)))
    cap = draw(st.sampled_from([1, 100, 1000]))
    return Compute(operations, gradients, grads, plan_for(draw(st.permutations(grads)), cap))


def needed_by(graph: fx.Graph, ends: Sequence[fx.Node]) -> set[fx.Node]:
    found, stack = set[fx.Node](), list(ends)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack.extend(node.all_input_nodes)
    return {node for node in found if node.op == "call_function" and edit.provenance_of(node) is None}


@settings(max_examples=60)
@given(backward=computes(), bound=st.none() | st.integers(0, 2000))
def test_what_holds_of_every_order(backward: Compute, bound: int | None) -> None:
    inputs = [torch.randn(4, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    module = trace(backward, *inputs)
    staying, _ = run(module, backward.plan, *STAYING)
    scheduling = ScheduleCollectives() if bound is None else Bounded(nbytes=bound)
    graph, result = run(module, backward.plan, BucketReductions(), scheduling)
    # The plan's order.
    assert launches(graph) == launches(staying) == [f"0.{number}" for number in range(len(backward.plan.buckets))]
    # Before each launch the least that any order could have there, so never more than if only collectives move.
    counts, least = compute_before_launches(graph), []
    ends: list[fx.Node] = []
    for launch in filter(is_all_reduce, graph.nodes):
        ends.append(launch)
        least.append(len(needed_by(graph, ends)))
    assert result.memory is not None
    if result.refusals:
        assert short(graph) == short(staying)
    else:
        assert counts == least
    if short(graph) != short(staying):
        assert result.memory.nbytes <= (result.memory.ddp_nbytes if bound is None else bound)
    assert all(now <= was for now, was in zip(counts, compute_before_launches(staying), strict=True))
    # The same numbers.
    for was, now in zip(
        executed(module, [backward.plan], *inputs), fx.GraphModule(module, graph)(*inputs), strict=True
    ):
        torch.testing.assert_close(was, now)
