"""Apply a plan: replace the `reduce_grad` nodes of each bucket by collectives. No other pass creates or erases these.

    reduce_grad(a)  reduce_grad(b)   ->   flat_bucket(a, b) -> all_reduce -> wait
                                                                              |-> as_strided: reduced a
                                                                              '-> as_strided: reduced b

On two network levels a bucket has three collectives (stages), each followed by its wait. If each rank keeps a shard, a
bucket has one stage, and an optimizer update reads the shard instead of each member.

Gradients are computed inside the bucket if possible (`passes/lowering.py`), without copies, in the parameters' layout.
The averaging factor is folded into the op that computes a gradient. If that is impossible, `flat_bucket` applies it.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, cast

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from dp_compile.errors import InvalidGraphError
from dp_compile.fx import collectives, edit
from dp_compile.passes.memory import KEEPS
from dp_compile.passes.reduction import (
    FACTOR,
    FLAT_BUCKET,
    HOOK_STEP,
    dtype_of_product,
    finished,
    reduce_bucket,
    reductions_in,
)
from dp_compile.passes.result import PassResult
from dp_compile.plan.buckets import Bucket, BucketPlan
from dp_compile.plan.reduction import ALL_GATHER, ALL_TO_ALL, EXCHANGE, REDUCE_SCATTER, Stage, launch_order

aten, prims = torch.ops.aten, torch.ops.prims


@dataclass(frozen=True, slots=True)
class BucketReductions:
    """Pass that replaces the `reduce_grad` nodes of each bucket by its collectives, in the plan's order.

    `zero_gaps`: write zeros between members. By default only if NCCL checks for NaN, which unwritten gaps may contain.
    """

    zero_gaps: bool = field(default_factory=lambda: nan_check_is_on())
    name: ClassVar[str] = "bucket-reductions"

    def __call__(self, graph: fx.Graph, plans: Sequence[BucketPlan]) -> PassResult:
        # Compute positions once for all buckets: the time is linear in the size of the graph.
        position, views = edit.positions(graph), dict[fx.Node, fx.Node]()
        launches: list[fx.Node] = []
        for replica, found in sorted(planned_reductions(graph, plans).items()):
            plan, staged = plans[replica], list[list[fx.Node]]()
            for number, bucket in enumerate(plan.buckets):
                reductions = [found[member.gradient.index] for member in bucket.members]
                last = max(reductions, key=position.__getitem__)
                ops = GraphOps(graph, last, bucket, reductions, (replica, number), plan.keeps_memory, self.zero_gaps)
                reduced, is_scattered = finished(reduce_bucket(bucket, ops)), bucket.key.reduction.is_scattered
                for place, node in enumerate(reductions):
                    views[node] = reduced if is_scattered else ops.view_back(reduced, place)
                staged.append(ops.launches)
            order = launch_order([bucket.key.reduction.stages for bucket in plan.buckets])
            launches += [staged[number][stage] for number, stage in order]
        edit.replace_uses(views)
        # The graph may read a reduced gradient before it computes the last member of the bucket.
        edit.reorder(graph, edit.stable_order(graph, chain=chain_of(launches)))
        graph.eliminate_dead_code()  # the reductions, and their views and casts
        return PassResult()


def chain_of(launches: Sequence[fx.Node]) -> list[fx.Node]:
    """Return `launches` in the given order, each preceded by the waits for the previous stage of its bucket."""
    return list(dict.fromkeys(node for launch in launches for node in (*waits_before(launch), launch)))


def waits_before(launch: fx.Node) -> list[fx.Node]:
    """Return the waits for the stage before this launch in its bucket; empty if the launch is of the first stage."""

    def is_between(node: fx.Node) -> bool:
        is_ours = edit.provenance_of(node) is not None
        return is_ours and node.target is not FLAT_BUCKET and not collectives.is_wait(node)

    return list(filter(collectives.is_wait, edit.sources_of(launch.all_input_nodes, is_between)))


def nan_check_is_on() -> bool:
    """Return whether torch's NCCL backend checks its inputs for NaN."""
    return os.environ.get("TORCH_NCCL_NAN_CHECK", "").strip().lower() in ("1", "y", "yes", "t", "true")


def planned_reductions(graph: fx.Graph, plans: Sequence[BucketPlan]) -> dict[int, dict[int, fx.Node]]:
    """Return the `reduce_grad` nodes of a graph, by replica and gradient index.

    Raises `InvalidGraphError` if such a node is not planned, is repeated or has another shape, dtype or device than
    planned, or if a replica with such nodes in the graph lacks a planned one.
    """
    planned = {(replica, each.index): each for replica, plan in enumerate(plans) for each in plan.gradients}
    found: dict[int, dict[int, fx.Node]] = {}
    for node, (grad, index, replica) in reductions_in(graph).items():
        if not 0 <= replica < len(plans):
            raise InvalidGraphError(
                f"{node.name} belongs to replica {replica}, but there are plans for {len(plans)} only"
            )
        if (gradient := planned.get((replica, index))) is None:
            raise InvalidGraphError(f"gradient {index} of replica {replica} is reduced in the graph, but not planned")
        if found.setdefault(replica, {}).setdefault(index, node) is not node:
            raise InvalidGraphError(f"the gradient of {gradient.name} is reduced more than once")
        value, kind = grad.meta["val"], (gradient.shape, gradient.key.dtype, gradient.key.device)
        given = (tuple(value.shape), str(value.dtype).removeprefix("torch."), value.device.type)
        if given != kind:
            raise InvalidGraphError(f"the gradient of {gradient.name} is {given}, the plan says {kind}")
    for (replica, index), gradient in planned.items():
        if index not in found.get(replica, (index,)):
            raise InvalidGraphError(f"the plan reduces the gradient of {gradient.name}, but the graph does not")
    return found


@dataclass(slots=True)
class GraphOps:
    """Implementation of `Ops` that inserts nodes into a graph, before the node `before`.

    `reductions`: the `reduce_grad` node of each member. `unit`: indices of the replica (in the backward) and bucket.
    """

    graph: fx.Graph
    before: fx.Node
    bucket: Bucket
    reductions: list[fx.Node]
    unit: tuple[int, int]
    keeps_memory: bool | None
    zero_gaps: bool
    launches: list[fx.Node] = field(default_factory=list)

    def make(self, target: Callable[..., Any], *arguments: Any, members: tuple[int, ...] = ()) -> fx.Node:
        provenance = edit.Provenance(self.unit, members)
        return edit.insert_call(self.graph, self.before, target, arguments, provenance)

    @property
    def gradients(self) -> list[fx.Node]:
        return [node.all_input_nodes[0] for node in self.reductions]

    def view_back(self, reduced: fx.Node, place: int) -> fx.Node:
        """Return a member with its traced strides: a view of `reduced`, or of a copy if the parameter has others."""
        gradient, offset, member = self.bucket.members[place].gradient, self.bucket.members[place].offset, (place,)
        shape, promised = list(gradient.shape), tuple(self.reductions[place].meta["val"].stride())
        # A dimension of size one may have any stride.
        alike = (size == 1 or a == b for size, a, b in zip(shape, promised, gradient.stride, strict=True))
        if 0 in shape or all(alike):
            return self.make(aten.as_strided.default, reduced, shape, list(promised), offset, members=member)
        view = self.make(aten.as_strided.default, reduced, shape, list(gradient.stride), offset)
        # Compiled readers rely on the traced strides, which differ from the parameter's.
        order = sorted(range(len(shape)), key=lambda dimension: (-promised[dimension], dimension))
        flat = self.make(aten.reshape.default, self.make(aten.permute.default, view, order), [gradient.numel])
        return self.make(aten.as_strided.default, flat, shape, list(promised), members=member)

    def step_of_hook(self, hook: str, received: Sequence[fx.Node]) -> list[fx.Node]:
        group = self.bucket.key.reduction.stages[0].group
        step = self.make(HOOK_STEP, self.gradients, list(received), hook, group, *self.unit)
        return [self.make(operator.getitem, step, number) for number in range(len(step.meta["val"]))]

    def factor(self, *, last: bool) -> fx.Node | None:
        """Return a node that reads the factor for before the stages (`last`: after) at run time; `None` if constant."""
        if self.bucket.key.reduction.given < (2 if last else 1):
            return None
        return self.make(FACTOR, *self.unit, last, self.gradients[0].meta["val"].device)

    def fill(self, scale: float, dtype: torch.dtype | None, given: Sequence[fx.Node] | None = None) -> fx.Node:
        factor, members = self.factor(last=False), self.bucket.members
        placed = zip(self.gradients if given is None else given, members, strict=True)
        if given is None:
            scale = scale if factor is None else 1.0
            put = [self.source_of(node, member.gradient.stride, scale, dtype) for node, member in placed]
        else:
            put = [(node, 1.0, member.gradient.stride) for node, member in placed]
        offsets, numbers = [member.offset for member in members], tuple(range(len(members)))
        gaps = self.zero_gaps and self.bucket.padding_nbytes > 0
        more: tuple[Any, ...] = gaps, dtype, factor
        while more and more[-1] in (None, False):  # omit default values
            more = more[:-1]
        sources, scales = [node for node, _, _ in put], [each for _, each, _ in put]
        strides = [step for _, _, stride in put for step in stride]
        bucket = self.make(FLAT_BUCKET, sources, scales, strides, offsets, self.bucket.numel, *more, members=numbers)
        bucket.meta[KEEPS] = self.keeps_memory
        return bucket

    def source_of(
        self, gradient: fx.Node, stride: tuple[int, ...], scale: float, dtype: torch.dtype | None
    ) -> tuple[fx.Node, float, tuple[int, ...]]:
        """Return the node to store for a gradient, the factor still to apply to that node, and its strides."""
        source, stride = without_views(gradient, stride)
        if dtype is not None and source.target in _CASTS and len(source.users) == 1:
            # Send a gradient in bfloat16 if it was computed in bfloat16 and only cast to the parameter's float32.
            narrow, wide = source.all_input_nodes[0], source.meta["val"].dtype
            if narrow.meta["val"].dtype == dtype and torch.promote_types(dtype, wide) == wide:
                source, stride = without_views(narrow, stride)
        # Do not fold into a source narrower than the wire dtype: the product would be rounded twice.
        kind = source.meta["val"].dtype
        fits = dtype is None or torch.promote_types(kind, dtype) == kind
        folded = fits and fold_factor(source, scale, edit.Provenance(self.unit))
        return source, 1.0 if folded else scale, stride

    def launch(self, stage: Stage, tensor: fx.Node) -> fx.Node:
        how: tuple[Any, ...] = stage.reduce_op, stage.group
        target = collectives.ALL_REDUCE
        if stage.op == REDUCE_SCATTER:
            target, how = collectives.REDUCE_SCATTER, (stage.reduce_op, stage.parts, stage.group)
        elif stage.op in (EXCHANGE, ALL_TO_ALL):
            sizes = [tensor.meta["val"].numel() // stage.parts] * stage.parts
            target, how = collectives.ALL_TO_ALL, (sizes, sizes, stage.group)
        elif stage.op == ALL_GATHER:
            target, how = collectives.ALL_GATHER, (stage.parts, stage.group)
        self.launches.append(self.make(target, tensor, *how))
        return self.launches[-1]

    def wait(self, launched: fx.Node) -> fx.Node:
        return self.make(collectives.WAIT, launched)

    def add_up(self, tensor: fx.Node, parts: int) -> fx.Node:
        view = self.make(aten.view.default, tensor, [parts, tensor.meta["val"].numel() // parts])
        return self.make(aten.sum.dim_IntList, view, [0])

    def restore(self, tensor: fx.Node, scale: float, dtype: torch.dtype) -> fx.Node:
        factor = self.factor(last=True)
        if factor is not None or scale != 1.0:
            widened = torch.promote_types if factor is None else dtype_of_product
            tensor = self._cast(tensor, widened(tensor.meta["val"].dtype, dtype))
            tensor = self.make(aten.mul.Tensor, tensor, scale if factor is None else factor)
        return self._cast(tensor, dtype)

    def _cast(self, tensor: fx.Node, dtype: torch.dtype) -> fx.Node:
        if tensor.meta["val"].dtype == dtype:
            return tensor
        return self.make(prims.convert_element_type.default, tensor, dtype)


# --- folding the averaging factor into the op that computes a gradient ---
#
# permute(view(mm(a, b)))                 ->  mm, and the strides of its output
# mm(a, b), addmm(c, a, b), bmm, baddbmm  ->  the same with alpha * scale (and beta * scale): no pass over the result
# index_put(zeros, rows, values)          ->  index_put(zeros, rows, values * scale)

_VIEWS: Final = (  # of all elements, in another shape or order of dimensions
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.squeeze.default, aten.squeeze.dim,
    aten.squeeze.dims, aten.unsqueeze.default, aten.permute.default,
)  # fmt: skip
_CASTS: Final = (aten._to_copy.default, prims.convert_element_type.default)
SCATTERED: Final[dict[Any, int]] = {  # position of the values among the arguments
    aten.index_put.default: 2,
    aten._unsafe_index_put.default: 2,
    aten._unsafe_masked_index_put_accumulate.default: 3,
}
_ZEROS: Final = (aten.zeros.default, aten.new_zeros.default, aten.zeros_like.default)


def without_views(node: fx.Node, stride: tuple[int, ...]) -> tuple[fx.Node, tuple[int, ...]]:
    """Return the node that `node` views (through views with one user), and its strides if `node` has `stride`."""
    while node.target in _VIEWS and len(node.users) == 1:
        source = node.all_input_nodes[0]
        value = torch.empty_strided(node.meta["val"].shape, stride, device="meta")
        if node.target is aten.permute.default:
            order = [dimension % value.dim() for dimension in cast(Sequence[int], node.args[1])]
            value = value.permute([order.index(dimension) for dimension in range(value.dim())])
        else:
            try:
                value = value.view(source.meta["val"].shape)
            except RuntimeError:  # no strides of the source give this view
                break
        node, stride = source, value.stride()
    return node, stride


def fold_factor(node: fx.Node, factor: float, provenance: edit.Provenance) -> bool:
    """Fold `factor` into the op of a node with at most one user. Return whether the node now applies the factor."""
    if factor == 1.0:
        return True
    if len(node.users) > 1 or not node.meta["val"].is_floating_point():
        return False
    if node.target in (aten.mm.default, aten.bmm.default):
        left, right = cast(tuple[fx.Node, fx.Node], node.args)
        if not statically_known_true(right.meta["val"].shape[-2] > 0):
            return False
        # With beta = 0 the addend is not read. A row of the right operand has a valid shape and needs no memory.
        batched = node.target is aten.bmm.default
        row, given = (aten.slice.Tensor, (right, 1, 0, 1)) if batched else (aten.select.int, (right, 0, 0))
        node.args = (edit.insert_call(node.graph, node, row, given, provenance), left, right)
        node.kwargs = {"beta": 0, "alpha": factor}
        node.target = aten.baddbmm.default if batched else aten.addmm.default
        return True
    if node.target in (aten.addmm.default, aten.baddbmm.default):
        factors = {name: node.kwargs.get(name, 1) for name in ("beta", "alpha")}
        if not all(isinstance(each, (int, float)) for each in factors.values()):
            return False
        node.kwargs = {name: cast(float, each) * factor for name, each in factors.items()}
        return True
    if (position := SCATTERED.get(node.target)) is not None:
        base, values = cast(tuple[fx.Node, fx.Node], (node.args[0], node.args[position]))
        is_zero = base.target in _ZEROS or (base.target is aten.full.default and base.args[1] == 0)
        # Empty values cannot carry the factor.
        if not is_zero or not statically_known_true(values.meta["val"].numel() > 0):
            return False
        node.update_arg(position, edit.insert_call(node.graph, node, aten.mul.Tensor, (values, factor), provenance))
        return True
    return False
