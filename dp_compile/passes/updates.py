"""Optimizer updates in a captured backward: the op that runs an update, and the pass that places it.

    update_later([a, b], [reduced a, reduced b], ...)  ->  update_parameters([a, b, aliases of these], [...])

Dynamo and AOTAutograd see the first op, which mutates nothing. The pass replaces it in the final graph by the second,
which declares its writes. So all readers of a parameter's memory come before it, in our orders (`fx/edit.py`) and in
Inductor's. Only the inputs at run time show which of them alias a parameter, as a saved transpose does. The op runs the
user's optimizer, so a rank that updates after its backward gets the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import fx
from torch.fx.node import has_side_effect

from dp_compile.errors import InvalidGraphError, ReductionError
from dp_compile.passes.memory import make_op, this_thread
from dp_compile.passes.result import PassResult
from dp_compile.plan.buckets import BucketPlan


def updates_by(replica: int) -> tuple[BucketPlan, Sequence[Any]]:
    """Return a module's plan and its `Updates` (`replica/sinks.py`) for the backward that this thread runs."""
    now = this_thread.running
    if replica >= len(now.optimizers):
        raise InvalidGraphError(f"parameters of module {replica} are updated outside a backward of dp_compile")
    return now.plans[replica], now.optimizers[replica]


def _update(
    written: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    indices: Sequence[int],
    replica: int,
    optimizer: int,
    bucket: int,
) -> None:
    _, optimizers = updates_by(replica)
    optimizers[optimizer].apply(bucket, indices, written[: len(indices)], gradients)


def _not_placed(*_: object) -> None:
    raise ReductionError("no pass has put an optimizer's update into the captured backward.")


_ARGUMENTS = "Tensor[] gradients, int[] indices, int replica, int optimizer, int bucket"
UPDATE_LATER = has_side_effect(make_op(f"update_later(Tensor[] parameters, {_ARGUMENTS}) -> ()", _not_placed))
UPDATE = has_side_effect(make_op(f"update_parameters(Tensor(a!)[] written, {_ARGUMENTS}) -> ()", _update))


class Update(NamedTuple):
    """The arguments of an op that updates parameters: an `UPDATE` or `UPDATE_LATER` node."""

    tensors: Sequence[fx.Node]
    gradients: Sequence[fx.Node]
    indices: Sequence[int]
    replica: int
    optimizer: int
    bucket: int


def read_update(node: fx.Node) -> Update:
    arguments: Any = node.args
    return Update(*arguments)


@dataclass(frozen=True, slots=True)
class PlaceUpdates:
    """Pass that inserts optimizer updates into a graph, after all readers of the updated parameters' memory.

    `shares`: for each input of the graph the number of the updated parameter that it aliases; -1 if it aliases none.
    """

    shares: tuple[int, ...]
    name: ClassVar[str] = "place-updates"

    def __call__(self, graph: fx.Graph, plans: Sequence[BucketPlan]) -> PassResult:
        inputs = graph.find_nodes(op="placeholder")
        tensors = [node for node in inputs if isinstance(node.meta.get("val"), torch.Tensor)]
        for node in graph.find_nodes(op="call_function", target=UPDATE_LATER):
            # Inputs that alias the parameters: all inputs, if the compiler has merged some.
            parameters, others = read_update(node).tensors, tensors
            if len(inputs) == len(self.shares):
                number = dict(zip(inputs, self.shares, strict=True))
                if any(each not in number or number[each] < 0 for each in parameters):
                    raise InvalidGraphError("an operand of an optimizer update is not a parameter input of the graph")
                mine = {number[each] for each in parameters}
                others = [each for each in tensors if number[each] in mine]
            with graph.inserting_before(node):
                update = graph.call_function(UPDATE, (list(dict.fromkeys([*parameters, *others])), *node.args[1:]))
            update.meta["val"] = None
            graph.erase_node(node)
        return PassResult()
