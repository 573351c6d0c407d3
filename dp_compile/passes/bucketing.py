"""Apply a plan: the reductions of a bucket become one all-reduce. The only pass that creates or erases nodes.

    reduce_grad(a)  reduce_grad(b)   ->   flat_bucket(a, b) -> all_reduce -> wait
                                                                              |-> as_strided: reduced a
                                                                              '-> as_strided: reduced b

Gradients are computed in their places in the bucket (`dp_compile/lowering.py`), each in its parameter's memory order.
What is handed back are views of the bucket: no copy out. The factor of the average is a factor of what is computed
anyway: the `alpha` of a matrix product, the values that are scattered; else `flat_bucket` applies it on the way.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from dp_compile.errors import InvalidGraphError
from dp_compile.fx import collectives, edit
from dp_compile.grad_reduction import GradReduction, ReductionTag
from dp_compile.lowering import FLAT_BUCKET
from dp_compile.passes.analysis import analyse
from dp_compile.passes.producers import fold_factor, is_view, without_views
from dp_compile.plan import Bucket, BucketPlan, GradientSpec, Member
from dp_compile.report import PassResult

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class BucketReductions:
    """One all-reduce for each bucket of each plan, issued in the plan's order."""

    name: ClassVar[str] = "bucket-reductions"
    realises_plan: ClassVar[bool] = True

    def __call__(self, graph: fx.Graph, plans: Sequence[BucketPlan]) -> PassResult:
        analysis = analyse(graph)
        # Once for all buckets: each takes as long as the graph is large.
        position, views = edit.positions(graph), dict[fx.Node, fx.Node]()
        launches: list[fx.Node] = []
        for replica, reductions in sorted(_by_replica(analysis.reductions, plans).items()):
            for number, bucket in enumerate(plans[replica].buckets):
                launch, of_bucket = _reduce_bucket(graph, bucket, f"{replica}.{number}", reductions, position)
                launches.append(launch)
                views |= of_bucket
        edit.replace_uses(views)
        for node in views:
            _erase(node)
        if launches:
            # A reduced gradient may have been used before the last member of its bucket was ready.
            edit.sort_stably(graph, chain=launches)
        return PassResult(changed=bool(launches), refusals=analysis.refusals)


def _by_replica(
    reductions: Sequence[GradReduction], plans: Sequence[BucketPlan]
) -> dict[int, dict[int, GradReduction]]:
    """The reductions of a graph by replica and index. Every one of them has to be planned, and only once."""
    names = [{gradient.index: gradient.name for gradient in plan.gradients} for plan in plans]
    found: dict[int, dict[int, GradReduction]] = {}
    for reduction in reductions:
        replica, index = reduction.tag.replica, reduction.tag.index
        if not 0 <= replica < len(plans):
            raise InvalidGraphError(
                f"{reduction.node.name} belongs to replica {replica}, but there are plans for {len(plans)} only"
            )
        if index not in names[replica]:
            raise InvalidGraphError(f"gradient {index} of replica {replica} is reduced in the graph, but not planned")
        if index in found.setdefault(replica, {}):
            raise InvalidGraphError(f"the gradient of {names[replica][index]} is reduced more than once")
        found[replica][index] = reduction
    return found


def _reduce_bucket(
    graph: fx.Graph,
    bucket: Bucket,
    unit: str,
    reductions: Mapping[int, GradReduction],
    position: Mapping[fx.Node, int],
) -> tuple[fx.Node, dict[fx.Node, fx.Node]]:
    """Returns the launch, and what takes the place of each reduction."""
    members = [(member, _reduction_of(member, bucket, reductions)) for member in bucket.members]
    last = max((reduction.node for _, reduction in members), key=position.__getitem__)
    provenance = edit.Provenance(BucketReductions.name, unit)
    names = tuple(f"{r.tag.index}/{r.tag.replica}/{r.tag.scale!r}" for _, r in members)
    flat = _flat_bucket(graph, members, provenance, before=last)
    launch = edit.insert_call(
        graph,
        last,
        collectives.ALL_REDUCE,
        (flat, bucket.key.reduce_op, bucket.key.group),
        edit.Provenance(BucketReductions.name, unit, names),
    )
    reduced = edit.insert_call(graph, last, collectives.WAIT, (launch,), provenance)
    views = {
        reduction.node: _view_back(graph, reduced, member, reduction, provenance, before=last)
        for member, reduction in members
    }
    return launch, views


def _erase(node: fx.Node) -> None:
    """Erase a reduction, and the views that nobody but it was made for."""
    inputs = node.all_input_nodes[:1]
    node.graph.erase_node(node)
    if inputs and not inputs[0].users and is_view(inputs[0]):
        _erase(inputs[0])


def _reduction_of(member: Member, bucket: Bucket, reductions: Mapping[int, GradReduction]) -> GradReduction:
    gradient = member.gradient
    reduction = reductions.get(gradient.index)
    if reduction is None:
        raise InvalidGraphError(f"the plan reduces the gradient of {gradient.name}, but the graph does not")
    value = reduction.grad.meta["val"]
    given = (tuple(value.shape), str(value.dtype).removeprefix("torch."), value.device.type)
    planned = (gradient.shape, bucket.key.dtype, bucket.key.device)
    if given != planned:
        raise InvalidGraphError(f"the gradient of {gradient.name} is {given}, the plan says {planned}")
    tag = reduction.tag
    wanted = ReductionTag(gradient.index, tag.replica, bucket.key.group, bucket.key.reduce_op, gradient.scale)
    if tag != wanted:
        raise InvalidGraphError(f"the gradient of {gradient.name} is reduced as {tag}, the plan says {wanted}")
    return reduction


def _flat_bucket(
    graph: fx.Graph, members: Sequence[tuple[Member, GradReduction]], provenance: edit.Provenance, *, before: fx.Node
) -> fx.Node:
    """The members one after the other, each scaled and in its parameter's memory order."""
    sources: list[fx.Node] = []
    scales: list[float] = []
    strides: list[int] = []
    offsets = itertools.accumulate((member.gradient.numel for member, _ in members), initial=0)
    for offset, (member, reduction) in zip(offsets, members, strict=False):
        assert member.offset == offset, "flat_bucket leaves no gaps"
        source, stride = without_views(reduction.grad, member.gradient.stride)
        folded = fold_factor(source, reduction.tag.scale, provenance)
        sources.append(source)
        scales.append(1.0 if folded else reduction.tag.scale)
        strides.extend(stride)
    if len(members) == 1 and scales == [1.0]:
        return _flattened(graph, members[0][1].grad, members[0][0].gradient, provenance, before)
    return edit.insert_call(graph, before, FLAT_BUCKET, (sources, scales, strides), provenance)


def _flattened(
    graph: fx.Graph, piece: fx.Node, gradient: GradientSpec, provenance: edit.Provenance, before: fx.Node
) -> fx.Node:
    """A gradient alone in its bucket is its own bucket, if need be in another memory order."""
    order = memory_order(gradient.stride)
    if order != tuple(range(len(order))):
        piece = edit.insert_call(graph, before, aten.permute.default, (piece, list(order)), provenance)
    if len(gradient.shape) != 1:
        piece = edit.insert_call(graph, before, aten.reshape.default, (piece, [gradient.numel]), provenance)
    return piece


def _view_back(
    graph: fx.Graph,
    reduced: fx.Node,
    member: Member,
    reduction: GradReduction,
    provenance: edit.Provenance,
    *,
    before: fx.Node,
) -> fx.Node:
    gradient = member.gradient
    shape, promised = list(gradient.shape), tuple(reduction.node.meta["val"].stride())
    if _same_layout(gradient.shape, promised, gradient.stride):
        arguments = (reduced, shape, list(promised), member.offset)
        return edit.insert_call(graph, before, aten.as_strided.default, arguments, provenance)
    # Somebody was told other strides than the parameter's while the graph was traced: keep that promise.
    arguments = (reduced, shape, list(gradient.stride), member.offset)
    view = edit.insert_call(graph, before, aten.as_strided.default, arguments, provenance)
    turned = edit.insert_call(graph, before, aten.permute.default, (view, list(memory_order(promised))), provenance)
    flat = edit.insert_call(graph, before, aten.reshape.default, (turned, [gradient.numel]), provenance)
    return edit.insert_call(graph, before, aten.as_strided.default, (flat, shape, list(promised)), provenance)


def _same_layout(shape: tuple[int, ...], one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Whether two strides mean the same places in memory: a dimension of size one may have any."""
    return 0 in shape or all(size == 1 or a == b for size, a, b in zip(shape, one, other, strict=True))


def memory_order(stride: Sequence[int]) -> tuple[int, ...]:
    """Dimensions from the slowest to the fastest in memory: `(0, 2, 3, 1)` for channels last."""
    return tuple(sorted(range(len(stride)), key=lambda dimension: (-stride[dimension], dimension)))
