"""The rows of a gradient that is reduced in pieces, computed by themselves if its producer is one matrix product.

rows of mm(a, b)               ->  mm(slice(a, rows), b)
rows of permute(mm(a, b))      ->  mm(a, slice(b, columns)), written with the strides of a permuted block
rows of anything else          ->  slice(gradient, rows): right, but no piece is ready before the others
"""

from __future__ import annotations

from typing import Final

import torch
from torch import fx

from dp_compile.fx import edit
from dp_compile.passes.producers import without_views
from dp_compile.passes.reduction import GradReduction
from dp_compile.plan.buckets import GradientSpec, Rows

aten = torch.ops.aten

_ROWS: Final = 0
_COLUMNS: Final = 1


def _product_behind(reduction: GradReduction, gradient: GradientSpec) -> tuple[fx.Node, int] | None:
    """The 2-D product that is a gradient and serves nobody else, and which of its dimensions are the rows."""
    source, stride = without_views(reduction.grad, gradient.stride)
    if source.target is not aten.mm.default or len(source.users) != 1 or len(gradient.shape) != 2:
        return None
    place, (rows, width) = (tuple(source.meta["val"].shape), stride), gradient.shape
    if place == ((rows, width), (width, 1)):
        return source, _ROWS
    return (source, _COLUMNS) if place == ((width, rows), (1, width)) else None


def rows_of(
    reduction: GradReduction, gradient: GradientSpec, rows: Rows, provenance: edit.Provenance
) -> tuple[fx.Node, tuple[int, ...]]:
    """A node that computes these rows of a gradient, and the strides with which it lies as they do.

    A block of a product counts as the backward's own compute, so that scheduling puts it just before its launch.
    """
    graph, product = reduction.node.graph, _product_behind(reduction, gradient)
    if product is None:
        piece = edit.insert_call(graph, reduction.node, aten.slice.Tensor, (reduction.grad, 0, *rows), provenance)
        return piece, gradient.stride
    node, dimension = product
    factors = list(node.args)
    factors[dimension] = edit.insert_call(
        graph, node, aten.slice.Tensor, (factors[dimension], dimension, *rows), provenance
    )
    block = edit.insert_call(graph, node, aten.mm.default, tuple(factors), provenance)
    del block.meta[edit.PROVENANCE]
    return block, gradient.stride if dimension == _ROWS else gradient.stride[::-1]


def is_left_over(node: fx.Node) -> bool:
    """Whether a product has no user any more because it is computed in blocks."""
    return node.target is aten.mm.default and not node.users
