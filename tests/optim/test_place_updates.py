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
from dp_compile.passes.memory import Running
from dp_compile.passes.updates import UPDATE, UPDATE_LATER, PlaceUpdates, read_update

pytestmark = pytest.mark.usefixtures("fake_group")
SIDE = 8
GRADS = [Grad(index=index, shape=(SIDE, SIDE)) for index in range(4)]
PLAN = plan_for(GRADS, cap=1)
"""A bucket for each."""


def backward(x: torch.Tensor, alias: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
    gradient, reduced = x, []
    for grad, parameter in zip(GRADS, parameters, strict=True):
        gradient = gradient @ parameter
        reduced.append(grad.reduce(gradient))
    result = gradient @ alias.t()
    for index, parameter in enumerate(parameters):
        UPDATE_LATER([parameter], [reduced[index]], [index], 0, 0, index)
    return result


def test_what_lies_in_the_memory_of_a_parameter_is_written_too() -> None:
    graph = trace(backward, *(torch.randn(SIDE, SIDE) for _ in range(6))).graph
    PlaceUpdates((-1, 0, 0, 1, 2, 3))(graph, [PLAN])
    _, alias, *parameters = graph.find_nodes(op="placeholder")
    updates = graph.find_nodes(op="call_function", target=UPDATE)
    written = {read_update(each).indices[0]: each.args[0] for each in updates}
    assert written == {0: [parameters[0], alias]} | {index: [parameters[index]] for index in (1, 2, 3)}


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
