"""Where updates stand in a graph: after all that reads what they write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import pytest
import torch
from graphs import Grad, plan_for, trace
from torch import fx

from dp_compile._torch import inductor
from dp_compile.fx import edit
from dp_compile.passes.memory import Running
from dp_compile.passes.updates import UPDATE, UPDATE_LATER, PlaceUpdates, read_update

pytestmark = pytest.mark.usefixtures("fake_group")
SIDE = 8
GRADS = [Grad(index=index, shape=(SIDE, SIDE)) for index in range(4)]
PLAN = plan_for(GRADS, cap=1)
"""A bucket for each."""


def backward(x: torch.Tensor, alias: torch.Tensor, *parameters: torch.Tensor, reduces: bool = True) -> torch.Tensor:
    """`alias` is read last of all. Each gradient needs the one before."""
    gradient, reduced = x, []
    for grad, parameter in zip(GRADS, parameters, strict=True):
        gradient = gradient @ parameter
        reduced.append(grad.reduce(gradient) if reduces else gradient)
    result = gradient @ alias.t()
    for index, parameter in enumerate(parameters):
        UPDATE_LATER([parameter], [reduced[index]], [index], 0, 0, index)
    return result


def placed_at_once(shares: Sequence[int]) -> fx.Graph:
    """As where ranks mix parameters: nothing is launched, and gradients are this rank's own."""
    values = [torch.randn(SIDE, SIDE) for _ in range(6)]
    graph = trace(lambda *each: backward(*each, reduces=False), *values).graph
    PlaceUpdates(tuple(shares), at_once=True)(graph, [PLAN])
    return graph


def updates_of(graph: fx.Graph) -> dict[int, int]:
    """Where the update of each parameter stands."""
    where = edit.positions(graph)
    return {read_update(node).indices[0]: where[node] for node in graph.find_nodes(op="call_function", target=UPDATE)}


def last_read(graph: fx.Graph) -> int:
    """Where the result is computed, from `alias`."""
    (result,) = graph.output_node().all_input_nodes
    return edit.positions(graph)[result]


def test_at_once_each_comes_behind_what_reads_its_memory() -> None:
    updates = updates_of(graph := placed_at_once((-1, -1, 0, 1, 2, 3)))
    products = [edit.positions(graph)[node] for node in graph.nodes if "mm" in str(node.target)]
    assert [sum(place < updates[index] for place in products) for index in range(4)] == [1, 2, 3, 4]
    updates = updates_of(graph := placed_at_once((-1, 0, 0, 1, 2, 3)))
    assert updates[0] > last_read(graph) > updates[1]


@dataclass
class Keeping:
    """Keeps what it is given."""

    kept: list[torch.Tensor] = field(default_factory=list)

    def apply(self, bucket: int, indices: Any, parameters: Any, gradients: Sequence[torch.Tensor]) -> None:
        self.kept.extend(gradients)


def test_generated_code_leaves_to_an_optimizer_what_it_keeps() -> None:
    def backward(x: torch.Tensor, y: torch.Tensor, parameter: torch.Tensor) -> tuple[torch.Tensor, ...]:
        UPDATE_LATER([parameter], [x * 2], [0], 0, 0, 0)
        return (y.sin(),)  # fits into the memory of the product

    x, y, parameter = (torch.randn(SIDE, SIDE) for _ in range(3))
    target = Keeping()

    import_module("dp_compile.passes.lowering")  # loaded only by what compiles

    def place(graph: fx.Graph) -> None:
        PlaceUpdates((-1, -1, 0))(graph, [PLAN])

    compiled = inductor.compile_with_inductor(trace(backward, x, y, parameter), [x, y, parameter], place)
    with Running([PLAN], optimizers=[[target]]):
        (result,) = compiled(x, y, parameter)
    torch.testing.assert_close(result, y.sin())
    torch.testing.assert_close(target.kept, [x * 2])
