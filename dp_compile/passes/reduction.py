"""The contract between hooks and passes: how a gradient's reduction is issued, and how it is recognised.

    grad -> dp_compile::reduce_grad(grad, index, replica, group, reduce_op, scale, after) -> reduced grad

`index` is the gradient's position among the parameters of its module, `replica` the module's position among those in
this backward. The op really reduces when it is executed; in a captured graph the passes replace it. `after` only
orders: the result of the reduction that has to run before.

Emit and match live together so that they cannot drift apart.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import fx

from dp_compile._torch import distributed
from dp_compile.passes.result import Refusal
from dp_compile.plan.backends import LIKE_NCCL

_library = torch.library.Library("dp_compile", "FRAGMENT")
_library.define(
    "reduce_grad(Tensor grad, int index, int replica, str group, str reduce_op, float scale, Tensor? after=None)"
    " -> Tensor"
)

REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG}


@dataclass(frozen=True, slots=True)
class Averaging:
    """How a group averages: each contribution times `scale`, then `reduce_op`."""

    reduce_op: str
    scale: float


def averaging_for(backend: str, world_size: int) -> Averaging:
    """NCCL averages inside the collective; other backends add contributions that were scaled before."""
    if backend in LIKE_NCCL:
        return Averaging("avg", 1.0)
    return Averaging("sum", 1.0 / world_size)


@dataclass(frozen=True, slots=True)
class ReductionTag:
    """The constants of one reduction, in the order of the op's arguments."""

    index: int
    replica: int
    group: str
    reduce_op: str
    scale: float


@dataclass(frozen=True, slots=True)
class GradReduction:
    """A recognised reduction in a graph: of `grad`, with `tag`, done by `node`."""

    node: fx.Node
    grad: fx.Node
    tag: ReductionTag


def _reduce_now(
    grad: torch.Tensor,
    index: int,
    replica: int,
    group: str,
    reduce_op: str,
    scale: float,
    after: torch.Tensor | None = None,
) -> torch.Tensor:
    # Row by row, whatever the memory order: another rank may have its gradient in another one.
    flat = torch.empty(grad.shape, dtype=grad.dtype, device=grad.device)
    torch.mul(grad, scale, out=flat)
    dist.all_reduce(flat, op=REDUCE_OPS[reduce_op], group=distributed.group_of_name(group))
    return torch.empty_like(grad).copy_(flat)


def _shape_of_reduced(grad: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty_like(grad)


_library.impl("reduce_grad", _reduce_now, "CompositeExplicitAutograd")
torch.library.register_fake("dp_compile::reduce_grad", _shape_of_reduced, lib=_library)

REDUCE_GRAD = torch.ops.dp_compile.reduce_grad.default


def emit(
    grad: torch.Tensor,
    index: int,
    replica: int,
    group: str,
    reduce_op: str,
    scale: float,
    after: torch.Tensor | None = None,
) -> torch.Tensor:
    """Reduce one gradient. Returns a new tensor with the shape, dtype and strides of `grad`."""
    reduced: torch.Tensor = REDUCE_GRAD(grad, index, replica, group, reduce_op, scale, after)
    return reduced


def match(node: fx.Node) -> GradReduction | Refusal:
    """Read a reduction back from a graph; a `Refusal` says why a node of this op was not understood."""
    if node.kwargs or len(node.args) not in (6, 7):
        return Refusal(node.name, f"expected 6 or 7 positional arguments, got {len(node.args)} and {node.kwargs}")
    grad, index, replica, group, reduce_op, scale = node.args[:6]
    if not isinstance(grad, fx.Node):
        return Refusal(node.name, f"the gradient is not a node but {grad!r}")
    if not (isinstance(index, int) and isinstance(replica, int) and isinstance(scale, (int, float))):
        return Refusal(node.name, f"index, replica or scale is not a number: {index!r}, {replica!r}, {scale!r}")
    if not isinstance(group, str) or reduce_op not in REDUCE_OPS:
        return Refusal(node.name, f"unknown group or reduce op: {group!r}, {reduce_op!r}")
    return GradReduction(node, grad, ReductionTag(index, replica, group, str(reduce_op), float(scale)))
