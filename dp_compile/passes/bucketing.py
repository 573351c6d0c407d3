"""Apply a plan: the reductions of a bucket become its stages. The only pass that creates or erases collectives.

    reduce_grad(a)  reduce_grad(b)   ->   flat_bucket(a, b) -> all_reduce -> wait
                                                                              |-> as_strided: reduced a
                                                                              '-> as_strided: reduced b

On two levels of network there are three stages, with a wait after each. Where ranks keep parts there is only the first;
an update then gets the part instead of each member.

Gradients are computed in their places in the bucket (`passes/lowering.py`), each in its parameter's memory order: no
copy in or out. The factor of the average goes into what computes a gradient; else `flat_bucket` applies it on the way.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, NamedTuple, cast

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
    GradReduction,
    dtype_of_product,
    finished,
    reduce_bucket,
    reductions_in,
)
from dp_compile.passes.result import PassResult
from dp_compile.plan.buckets import Bucket, BucketPlan, Member
from dp_compile.plan.reduction import ALL_GATHER, ALL_TO_ALL, EXCHANGE, REDUCE_SCATTER, Stage, launch_order

aten, prims = torch.ops.aten, torch.ops.prims


@dataclass(frozen=True, slots=True)
class BucketReductions:
    """The stages of each bucket of each plan, in the plan's order.

    `zero_gaps`: write zeros between members. By default only where NCCL looks for NaN in all that it sends: what is
    uninitialised may look like one.
    """

    zero_gaps: bool = field(default_factory=lambda: nan_check_is_on())
    name: ClassVar[str] = "bucket-reductions"

    def __call__(self, graph: fx.Graph, plans: Sequence[BucketPlan]) -> PassResult:
        # Positions once for all buckets: they take as long as the graph is large.
        position, views = edit.positions(graph), dict[fx.Node, fx.Node]()
        launches: list[fx.Node] = []
        for replica, reductions in sorted(by_replica(reductions_in(graph), plans).items()):
            staged: list[list[fx.Node]] = []
            stages = [bucket.key.reduction.stages for bucket in plans[replica].buckets]
            for number, bucket in enumerate(plans[replica].buckets):
                parts = parts_of(bucket, reductions)
                last = max((part.reduction.node for part in parts), key=position.__getitem__)
                unit, keeps = (replica, number), plans[replica].keeps_memory
                ops = GraphOps(graph, last, bucket, parts, unit, keeps, self.zero_gaps)
                reduced, is_scattered = finished(reduce_bucket(bucket, ops)), bucket.key.reduction.is_scattered
                for part in parts:
                    views[part.reduction.node] = reduced if is_scattered else ops.view_back(reduced, part)
                staged.append(ops.launches)
            launches += [staged[bucket][stage] for bucket, stage in launch_order(stages)]
        edit.replace_uses(views)
        for node in views:
            _erase(node)
        if launches:
            # A reduced gradient may have been used before the last member of its bucket was ready.
            edit.reorder(graph, edit.stable_order(graph, chain=chain_of(launches)))
        return PassResult()


def chain_of(launches: Sequence[fx.Node]) -> list[fx.Node]:
    """Launches in their order, each right after the wait for the stage before it."""
    return list(dict.fromkeys(node for launch in launches for node in (*waits_before(launch), launch)))


def waits_before(launch: fx.Node) -> list[fx.Node]:
    """The waits for the stages before a launch; none before the first, which is given a bucket."""

    def is_between(node: fx.Node) -> bool:
        is_ours = edit.provenance_of(node) is not None
        return is_ours and node.target is not FLAT_BUCKET and not collectives.is_wait(node)

    return list(filter(collectives.is_wait, edit.sources_of(launch.all_input_nodes, is_between)))


def nan_check_is_on() -> bool:
    """Whether torch's NCCL looks for NaN in what it is given."""
    return os.environ.get("TORCH_NCCL_NAN_CHECK", "").strip().lower() in ("1", "y", "yes", "t", "true")


def by_replica(reductions: Sequence[GradReduction], plans: Sequence[BucketPlan]) -> dict[int, dict[int, GradReduction]]:
    """The reductions of a graph by replica and index; an error if one is not planned, or there twice."""
    names = [{gradient.index: gradient.name for gradient in plan.gradients} for plan in plans]
    found: dict[int, dict[int, GradReduction]] = {}
    for reduction in reductions:
        replica, index, problem = reduction.replica, reduction.index, ""
        if not 0 <= replica < len(plans):
            problem = f"{reduction.node.name} belongs to replica {replica}, but there are plans for {len(plans)} only"
        elif index not in names[replica]:
            problem = f"gradient {index} of replica {replica} is reduced in the graph, but not planned"
        elif index in found.setdefault(replica, {}):
            problem = f"the gradient of {names[replica][index]} is reduced more than once"
        if problem:
            raise InvalidGraphError(problem)
        found[replica][index] = reduction
    return found


class Part(NamedTuple):
    """A member of a bucket: its number there, and the reduction that it replaces."""

    number: int
    member: Member
    reduction: GradReduction


def parts_of(bucket: Bucket, reductions: Mapping[int, GradReduction]) -> list[Part]:
    """The members of a bucket with their reductions; an error if one is missing or of another kind of tensor."""
    parts: list[Part] = []
    for number, member in enumerate(bucket.members):
        gradient, reduction = member.gradient, reductions.get(member.gradient.index)
        if reduction is None:
            raise InvalidGraphError(f"the plan reduces the gradient of {gradient.name}, but the graph does not")
        value = reduction.grad.meta["val"]
        given = (tuple(value.shape), str(value.dtype).removeprefix("torch."), value.device.type)
        planned = (gradient.shape, bucket.key.dtype, bucket.key.device)
        if given != planned:
            raise InvalidGraphError(f"the gradient of {gradient.name} is {given}, the plan says {planned}")
        parts.append(Part(number, member, reduction))
    return parts


@dataclass(slots=True)
class GraphOps:
    """Puts into a graph, in front of a node, what `reduce_bucket` asks for. `unit`: replica and bucket, by position."""

    graph: fx.Graph
    before: fx.Node
    bucket: Bucket
    parts: list[Part]
    unit: tuple[int, int]
    keeps_memory: bool | None
    zero_gaps: bool
    launches: list[fx.Node] = field(default_factory=list)

    def make(self, target: Callable[..., Any], *arguments: Any, members: tuple[int, ...] = ()) -> fx.Node:
        provenance = edit.Provenance(self.unit, members)
        return edit.insert_call(self.graph, self.before, target, arguments, provenance)

    def view_back(self, reduced: fx.Node, part: Part) -> fx.Node:
        """A reduced gradient as a view of its bucket, with the strides that it had when it was traced."""
        gradient, offset = part.member.gradient, part.member.offset
        shape, promised = list(gradient.shape), tuple(part.reduction.node.meta["val"].stride())
        member = (part.number,)
        # A dimension of size one may have any stride.
        alike = (size == 1 or a == b for size, a, b in zip(shape, promised, gradient.stride, strict=True))
        if 0 in shape or all(alike):
            return self.make(aten.as_strided.default, reduced, shape, list(promised), offset, members=member)
        view = self.make(aten.as_strided.default, reduced, shape, list(gradient.stride), offset)
        # Compiled code of its readers relies on these strides, which are not the parameter's.
        order = sorted(range(len(shape)), key=lambda dimension: (-promised[dimension], dimension))
        flat = self.make(aten.reshape.default, self.make(aten.permute.default, view, order), [gradient.numel])
        return self.make(aten.as_strided.default, flat, shape, list(promised), members=member)

    def step_of_hook(self, hook: str, received: Sequence[fx.Node]) -> list[fx.Node]:
        gradients, group = [part.reduction.grad for part in self.parts], self.bucket.key.reduction.stages[0].group
        step = self.make(HOOK_STEP, gradients, list(received), hook, group, *self.unit)
        return [self.make(operator.getitem, step, number) for number in range(len(step.meta["val"]))]

    def factor(self, *, last: bool) -> fx.Node | None:
        """The factor before or after the stages, if code asks for it when it runs; `None`: it is a constant."""
        if self.bucket.key.reduction.given < (2 if last else 1):
            return None
        return self.make(FACTOR, *self.unit, last, self.parts[0].reduction.grad.meta["val"].device)

    def fill(self, scale: float, dtype: torch.dtype | None, given: Sequence[fx.Node] | None = None) -> fx.Node:
        factor = self.factor(last=False)
        if given is None:
            put = [self.source_of(part, scale if factor is None else 1.0, dtype) for part in self.parts]
        else:
            put = [(node, 1.0, part.member.gradient.stride) for node, part in zip(given, self.parts, strict=True)]
        offsets = [part.member.offset for part in self.parts]
        numbers = tuple(part.number for part in self.parts)
        gaps = self.zero_gaps and self.bucket.padding_nbytes > 0
        more: tuple[Any, ...] = gaps, dtype, factor
        while more and more[-1] in (None, False):  # as by default
            more = more[:-1]
        sources, scales = [node for node, _, _ in put], [each for _, each, _ in put]
        strides = [step for _, _, stride in put for step in stride]
        bucket = self.make(FLAT_BUCKET, sources, scales, strides, offsets, self.bucket.numel, *more, members=numbers)
        bucket.meta[KEEPS] = self.keeps_memory
        return bucket

    def source_of(self, part: Part, scale: float, dtype: torch.dtype | None) -> tuple[fx.Node, float, tuple[int, ...]]:
        """What a bucket gets for a gradient, the factor that it applies to it, and its memory order."""
        source, stride = without_views(part.reduction.grad, part.member.gradient.stride)
        if dtype is not None and is_cast(source) and len(source.users) == 1:
            # A gradient that was computed in bfloat16 and cast to the parameter's float32 travels in bfloat16.
            wide, narrow = source, source.all_input_nodes[0]
            was, now = narrow.meta["val"].dtype, wide.meta["val"].dtype
            if was == dtype and torch.promote_types(was, now) == now:
                source, stride = without_views(narrow, stride)
        # A source narrower than the wire is widened first: the product would be rounded once more.
        kind = source.meta["val"].dtype
        fits = dtype is None or torch.promote_types(kind, dtype) == kind
        folded = fits and fold_factor(source, scale, edit.Provenance(self.unit))
        return source, 1.0 if folded else scale, tuple(stride)

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


def _erase(node: fx.Node) -> None:
    """Erase a reduction, and views and casts that only it reads."""
    inputs = node.all_input_nodes[:1]
    node.graph.erase_node(node)
    if inputs and not inputs[0].users and (is_view(inputs[0]) or is_cast(inputs[0])):
        _erase(inputs[0])


# --- what computes a gradient, and how that takes in the factor of an average ---
#
# permute(view(mm(a, b)))                 ->  mm, and the strides that it has to write with
# mm(a, b), addmm(c, a, b), bmm, baddbmm  ->  the same with alpha * scale (and beta * scale): no pass over the result
# index_put(zeros, rows, values)          ->  index_put(zeros, rows, values * scale)

_RESHAPES: Final = (
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.squeeze.default, aten.squeeze.dim,
    aten.squeeze.dims, aten.unsqueeze.default,
)  # fmt: skip
_CASTS: Final = (aten._to_copy.default, prims.convert_element_type.default)
SCATTERED: Final[dict[Any, int]] = {
    aten.index_put.default: 2,
    aten._unsafe_index_put.default: 2,
    aten._unsafe_masked_index_put_accumulate.default: 3,
}
"""Where the values stand among the arguments."""
_ZEROS: Final = (aten.zeros.default, aten.new_zeros.default, aten.zeros_like.default)


def is_view(node: fx.Node) -> bool:
    """Whether a node has all the elements of its input, in another shape or order of dimensions."""
    return node.op == "call_function" and (node.target in _RESHAPES or node.target is aten.permute.default)


def without_views(node: fx.Node, stride: Sequence[int]) -> tuple[fx.Node, tuple[int, ...]]:
    """The node of which `node` is a view for no other user, and its strides if `node` has `stride`."""
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


def is_cast(node: fx.Node) -> bool:
    """Whether a node is its input in another dtype."""
    return node.op == "call_function" and node.target in _CASTS


def fold_factor(node: fx.Node, factor: float, provenance: edit.Provenance) -> bool:
    """Let a node with one user at most compute `factor` times its result. Returns whether it does now."""
    if factor == 1.0:
        return True
    if len(node.users) > 1 or not node.meta["val"].is_floating_point():
        return False
    if node.target in (aten.mm.default, aten.bmm.default):
        left, right = cast(tuple[fx.Node, fx.Node], node.args)
        if not statically_known_true(right.meta["val"].shape[-2] > 0):
            return False
        # With beta = 0 what is added is not read; a row of the right factor has its shape and costs no memory.
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
        base, values = node.args[0], node.args[position]
        if not isinstance(base, fx.Node) or not isinstance(values, fx.Node):
            return False
        is_zero = base.target in _ZEROS or (base.target is aten.full.default and base.args[1] == 0)
        # Of no values at all, none would bear the factor.
        if not is_zero or not statically_known_true(values.meta["val"].numel() > 0):
            return False
        node.update_arg(position, edit.insert_call(node.graph, node, aten.mul.Tensor, (values, factor), provenance))
        return True
    return False
