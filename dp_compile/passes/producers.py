"""The node that really computes a gradient, and how it takes the factor of an average into what it does anyway.

permute(view(mm(a, b)))                 ->  mm, and the strides that it has to write with
mm(a, b), addmm(c, a, b), bmm, baddbmm  ->  the same with alpha * scale (and beta * scale): no pass over the result
index_put(zeros, rows, values)          ->  index_put(zeros, rows, values * scale)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, cast

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from dp_compile.fx import edit

aten = torch.ops.aten

# The elements in their order, in another shape.
_RESHAPES: Final = {
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.unsqueeze.default,
}


def is_view(node: fx.Node) -> bool:
    """Whether a node only looks at all the elements of its input in another shape or order of dimensions."""
    return node.op == "call_function" and (node.target in _RESHAPES or node.target is aten.permute.default)


def without_views(node: fx.Node, stride: Sequence[int]) -> tuple[fx.Node, tuple[int, ...]]:
    """The node behind views that only serve `node`, and the strides that put its elements where `stride` puts them."""
    wanted = tuple(stride)
    while is_view(node) and len(node.users) == 1:
        source = node.all_input_nodes[0]
        before = stride_before(node, source, wanted)
        if before is None:
            break
        node, wanted = source, before
    return node, wanted


def stride_before(view: fx.Node, source: fx.Node, stride: tuple[int, ...]) -> tuple[int, ...] | None:
    """Strides of a view's input if the view itself has `stride`; `None` if no strides do that."""
    value = torch.empty_strided(view.meta["val"].shape, stride, device="meta")
    if view.target is aten.permute.default:
        order = [dimension % value.dim() for dimension in cast(Sequence[int], view.args[1])]
        return value.permute([order.index(dimension) for dimension in range(value.dim())]).stride()
    try:
        return value.view(source.meta["val"].shape).stride()
    except RuntimeError:
        return None


def before_cast(node: fx.Node, dtype: torch.dtype) -> fx.Node:
    """What a node was cast from, if that has a dtype already and nobody else wants the cast: nothing was lost by it.

    A gradient that was computed in bfloat16 and cast to the parameter's float32 goes back to bfloat16 for the network.
    """
    if not is_cast(node) or len(node.users) > 1:
        return node
    source = node.all_input_nodes[0]
    was, now = source.meta["val"].dtype, node.meta["val"].dtype
    return source if was == dtype and torch.promote_types(was, now) == now else node


def is_cast(node: fx.Node) -> bool:
    """Whether a node is its input in another dtype."""
    return node.op == "call_function" and node.target in _CASTS


def fold_factor(node: fx.Node, factor: float, provenance: edit.Provenance) -> bool:
    """Let a node that serves one user at most compute `factor` times what it did. Returns whether it does now."""
    if factor == 1.0:
        return True
    fold = _FOLDS.get(node.target)
    if fold is None or len(node.users) > 1 or not node.meta["val"].is_floating_point():
        return False
    return fold(node, factor, provenance)


def _scale_product(node: fx.Node, factor: float, provenance: edit.Provenance) -> bool:
    left, right = node.args
    assert isinstance(left, fx.Node)
    assert isinstance(right, fx.Node)
    inner = right.meta["val"].shape[-2]
    if not statically_known_true(inner > 0):
        return False
    # With beta = 0 what is added is not read; a row of the right factor has its shape and costs no memory.
    graph, batched = node.graph, node.target is aten.bmm.default
    if batched:
        row = edit.insert_call(graph, node, aten.slice.Tensor, (right, 1, 0, 1), provenance)
    else:
        row = edit.insert_call(graph, node, aten.select.int, (right, 0, 0), provenance)
    node.target = aten.baddbmm.default if batched else aten.addmm.default
    node.args, node.kwargs = (row, left, right), {"beta": 0, "alpha": factor}
    return True


def _scale_sum_and_product(node: fx.Node, factor: float, provenance: edit.Provenance) -> bool:
    beta, alpha = node.kwargs.get("beta", 1), node.kwargs.get("alpha", 1)
    if not isinstance(beta, (int, float)) or not isinstance(alpha, (int, float)):
        return False
    node.kwargs = {"beta": beta * factor, "alpha": alpha * factor}
    return True


def _scale_scattered(node: fx.Node, factor: float, provenance: edit.Provenance) -> bool:
    base, position = node.args[0], SCATTERED[node.target]
    values = node.args[position]
    if not isinstance(base, fx.Node) or not isinstance(values, fx.Node) or not _is_zero(base):
        return False
    if not statically_known_true(values.meta["val"].numel() > 0):  # nothing would bear the factor
        return False
    node.update_arg(position, edit.insert_call(node.graph, node, aten.mul.Tensor, (values, factor), provenance))
    return True


def _is_zero(node: fx.Node) -> bool:
    if node.target is aten.full.default:
        return bool(node.args[1] == 0)
    return node.target in (aten.zeros.default, aten.new_zeros.default, aten.zeros_like.default)


# Where the values stand among the arguments.
SCATTERED: Final[dict[Any, int]] = {
    aten.index_put.default: 2,
    aten._unsafe_index_put.default: 2,
    aten._unsafe_masked_index_put_accumulate.default: 3,
}
_CASTS: Final = (aten._to_copy.default, torch.ops.prims.convert_element_type.default)
_FOLDS: Final[dict[Any, Callable[[fx.Node, float, edit.Provenance], bool]]] = {
    aten.mm.default: _scale_product,
    aten.bmm.default: _scale_product,
    aten.addmm.default: _scale_sum_and_product,
    aten.baddbmm.default: _scale_sum_and_product,
    **dict.fromkeys(SCATTERED, _scale_scattered),
}
