"""What stands in a backward that leaves reductions, and in a forward that waits for updates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from graphs import Grad, plan_for, run_passes, trace
from torch import fx

from dp_compile.fx.collectives import is_collective, is_wait
from dp_compile.passes import DEFAULT_PASSES
from dp_compile.passes.crossing import LEAVE, WAIT_FOR_PARAMETERS, CompleteBeforeUse, DeferReductions
from dp_compile.passes.updates import UPDATE, UPDATE_LATER, PlaceUpdates
from dp_compile.plan.buckets import BucketPlan

pytestmark = pytest.mark.usefixtures("fake_group")
GRADS = [Grad(index=index, shape=(4, 4)) for index in range(4)]


def left(
    plan: BucketPlan, updates: Sequence[tuple[int, ...]], *, returned: Sequence[int] = (), crosses: bool = True
) -> fx.Graph:
    """The graph of four gradients. `updates`: of which of them each op is; `returned`: which of them somebody reads."""

    def backward(x: torch.Tensor, *parameters: torch.Tensor) -> Any:
        reduced = [grad.reduce(x @ parameter) for grad, parameter in zip(GRADS, parameters, strict=True)]
        for number, indices in enumerate(updates):
            bucket = max(bucket_of[index] for index in indices)
            some = [parameters[index] for index in indices]
            UPDATE_LATER(some, [reduced[index] for index in indices], list(indices), 0, number, bucket)
        return [reduced[index] for index in returned] or x + 1

    bucket_of = {m.gradient.index: number for number, bucket in enumerate(plan.buckets) for m in bucket.members}
    values = [torch.randn(4, 4) for _ in range(5)]
    graph = run_passes(trace(backward, *values), plan, passes=(*DEFAULT_PASSES, PlaceUpdates((-1, 0, 1, 2, 3)))).graph
    DeferReductions((plan,), ((crosses,) * len(updates),))(graph)
    graph.lint()
    return graph


def counts(graph: fx.Graph) -> tuple[int, int, int, int]:
    """Launches, waits, updates, and reductions that are left."""
    calls = [node for node in graph.nodes if node.op == "call_function"]
    return (
        sum(map(is_collective, calls)),
        sum(map(is_wait, calls)),
        *(sum(node.target is target for node in calls) for target in (UPDATE, LEAVE)),
    )


ONE_EACH, PAIRS = plan_for(GRADS, cap=1), plan_for(GRADS, cap=128)
EACH = ((0,), (1,), (2,), (3,))


def test_every_bucket_is_left() -> None:
    assert counts(left(ONE_EACH, EACH)) == (4, 0, 0, 4)
    assert counts(left(PAIRS, ((0, 1), (2, 3)))) == (2, 0, 0, 2)


def test_who_does_not_cross_waits() -> None:
    assert counts(left(ONE_EACH, EACH, crosses=False)) == (4, 4, 4, 0)


def test_what_somebody_else_reads_is_waited_for() -> None:
    assert counts(left(ONE_EACH, EACH, returned=[2])) == (4, 1, 1, 3)
    assert counts(left(PAIRS, ((0, 1), (2, 3)), returned=[0])) == (2, 1, 1, 1)


def test_two_optimizers_of_one_bucket_wait() -> None:
    assert counts(left(PAIRS, ((0,), (1,), (2, 3)))) == (2, 1, 2, 1)


def test_an_update_over_several_buckets() -> None:
    graph = left(ONE_EACH, ((0, 1), (2,), (3,)))
    assert counts(graph) == (4, 0, 0, 3)
    assert [node.args[1] for node in graph.find_nodes(op="call_function", target=LEAVE)] == [[0, 1], [2], [3]]


def forward(first: torch.Tensor, x: torch.Tensor, second: torch.Tensor, unread: torch.Tensor) -> torch.Tensor:
    return (x @ first).tanh() @ second.t() + first


def waiting(parameters: Sequence[int], inputs: int = 4, **options: Any) -> list[tuple[str, ...]]:
    """Of each wait the inputs that it names, and what stands right behind it."""
    graph = trace(forward, *(torch.randn(4, 4) for _ in range(4))).graph
    CompleteBeforeUse(tuple(parameters), inputs, **options)(graph)
    graph.lint()
    return [
        (*(each.name for each in node.args[0]), node.next.name)
        for node in graph.find_nodes(op="call_function", target=WAIT_FOR_PARAMETERS)
    ]


def test_each_parameter_is_waited_for_in_front_of_its_first_reader() -> None:
    assert waiting((0, 2, 3)) == [("first_1", "mm"), ("second_1", "t")]


def test_a_wait_is_ordered_behind_the_last_product() -> None:
    graph = trace(forward, *(torch.randn(4, 4) for _ in range(4))).graph
    CompleteBeforeUse((0, 2), 4)(graph)
    behind = [node.args[1] for node in graph.find_nodes(op="call_function", target=WAIT_FOR_PARAMETERS)]
    assert [None if node is None else node.name for node in behind] == [None, "mm"]


def test_if_inputs_are_not_those_that_were_seen_all_are_waited_for_at_the_start() -> None:
    assert waiting((0, 2), inputs=5, most=1) == [("first_1", "x_1", "second_1", "mm")]


def test_a_backward_waits_for_nothing() -> None:
    graph = trace(forward, *(torch.randn(4, 4) for _ in range(4))).graph
    next(iter(graph.nodes)).name = "tangents_1"
    CompleteBeforeUse((0, 2), 4)(graph)
    assert not graph.find_nodes(op="call_function", target=WAIT_FOR_PARAMETERS)
