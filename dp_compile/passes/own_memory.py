"""Gradients lie in memory of their own: a write to one, as clipping does, changes no other.

autograd copies a gradient that it returns for two parameters, and so does what compiled autograd traces. Inductor
removes these copies as operations that change nothing (`remove_noop_ops`, torch 2.13): the gradients of a weight and of
what is added to it became one tensor, and an update got memory that the rest of the backward reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from dp_compile.fx.storages import viewed_by
from dp_compile.passes.reduction import REDUCE_GRAD
from dp_compile.passes.updates import UPDATE_LATER, read_update

_CLONE = torch.ops.aten.clone.default


@dataclass(frozen=True, slots=True)
class OwnMemory:
    """Copies what a backward returns twice, and what an update gets although there are other readers."""

    def __call__(self, graph: fx.Graph) -> None:
        graph.eliminate_dead_code()  # it would count as a reader
        output, taken = graph.output_node(), set[fx.Node]()

        def own(value: Any) -> Any:
            if isinstance(value, (list, tuple)):
                return type(value)(map(own, value))
            if not isinstance(value, fx.Node) or not isinstance(value.meta.get("val"), torch.Tensor):
                return value
            if (root := _root(value)) in taken:
                return _copied(graph, value, output)
            taken.add(root)
            return value

        output.args = own(output.args)
        for update in graph.find_nodes(op="call_function", target=UPDATE_LATER):
            gradients = read_update(update).gradients
            update.update_arg(1, [_own(graph, each, update) for each in gradients])


def _own(graph: fx.Graph, gradient: fx.Node, update: fx.Node) -> fx.Node:
    root = _root(gradient)
    if root.target is REDUCE_GRAD:  # gets its own place in a bucket
        return gradient
    family = [root]
    for node in family:
        family += [user for user in node.users if viewed_by(user) is node]
    readers = {user for node in family for user in node.users if user not in family}
    uses = sum(map(read_update(update).gradients.count, family)) if readers == {update} else 2
    return gradient if uses == 1 and root.op != "placeholder" else _copied(graph, gradient, update)


def _copied(graph: fx.Graph, node: fx.Node, before: fx.Node) -> fx.Node:
    with graph.inserting_before(before):
        copy = graph.call_function(_CLONE, (node,))
    copy.meta["val"] = _CLONE(node.meta["val"])
    return copy


def _root(node: fx.Node) -> fx.Node:
    """In whose memory a node's result lies, by its calls: `meta` has other storages after copies were removed."""
    while (looked_at := viewed_by(node)) is not None:
        node = looked_at
    return node
