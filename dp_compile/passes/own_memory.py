"""Gradients lie in memory of their own: a write to one, as clipping does, changes no other.

autograd copies a gradient that it returns for two parameters, and so does what compiled autograd traces. Inductor
removes these copies as operations that change nothing (`remove_noop_ops`, torch 2.13): the gradients of a weight and of
what is added to it became one tensor. A gradient that is reduced gets its own place in a bucket.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from dp_compile.fx.storages import viewed_by

_CLONE = torch.ops.aten.clone.default


@dataclass(frozen=True, slots=True)
class OwnMemory:
    """Copies what a backward returns twice."""

    def __call__(self, graph: fx.Graph) -> None:
        output, taken = graph.output_node(), set[fx.Node]()

        def own(value: Any) -> Any:
            if isinstance(value, (list, tuple)):
                return type(value)(map(own, value))
            if not isinstance(value, fx.Node) or not isinstance(value.meta.get("val"), torch.Tensor):
                return value
            if (root := _root(value)) not in taken:
                taken.add(root)
                return value
            with graph.inserting_before(output):
                copy = graph.call_function(_CLONE, (value,))
            copy.meta["val"] = _CLONE(value.meta["val"])
            return copy

        output.args = own(output.args)


def _root(node: fx.Node) -> fx.Node:
    """In whose memory a node's result lies, by its calls: `meta` has other storages after copies were removed."""
    while (looked_at := viewed_by(node)) is not None:
        node = looked_at
    return node
