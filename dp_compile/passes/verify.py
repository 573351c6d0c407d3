"""Invariants after every pass: a valid graph in which each `reduce_grad` became the right view of the right bucket.

Only structure is checked, that is the nodes of each bucket and their readers. tests/passes/test_pipeline_properties.py
compares numbers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from dp_compile.errors import InvalidGraphError
from dp_compile.fx import edit
from dp_compile.fx.collectives import by_group, count_waits, is_collective
from dp_compile.fx.text import type_text
from dp_compile.passes.reduction import FLAT_BUCKET, REDUCE_GRAD, reductions_in
from dp_compile.passes.updates import UPDATE, UPDATE_LATER, read_update
from dp_compile.plan.buckets import Bucket, BucketPlan


class Checks:
    """Properties of a graph that no pass may change, recorded before the first pass."""

    def __init__(self, graph: fx.Graph, plans: Sequence[BucketPlan]) -> None:
        self.plans = plans
        self.outputs = _outputs(graph)
        self.waits = {node: count_waits(node) for node in graph.nodes if is_collective(node)}
        self.orders = by_group(self.waits)
        self.reductions = reductions_in(graph)
        whose = {node: (replica, index) for node, (_, index, replica) in self.reductions.items()}
        self.uses = {use: whose[value] for node in graph.nodes for use, value in _reads(node) if value in whose}

    def run(self, graph: fx.Graph, *, after: str) -> None:
        """Check a graph after the pass `after`. Raise `InvalidGraphError`, which names the pass and the problem."""
        try:
            graph.lint()
        except RuntimeError as error:
            raise InvalidGraphError(f"after pass '{after}': {error}") from error
        if problem := next(self._problems(graph), ""):
            raise InvalidGraphError(f"after pass '{after}': {problem}")
        if reductions_in(graph) != self.reductions and (problem := next(self._problems_of_buckets(graph), "")):
            raise InvalidGraphError(f"pass '{after}' changed {problem}")

    def _problems(self, graph: fx.Graph) -> Iterator[str]:
        for node in filter(is_collective, graph.nodes):
            waits, expected = count_waits(node), self.waits.get(node, 1)
            if waits != expected:
                yield f"{node.name} has {waits} waits, expected {expected}"
        left = by_group(node for node in graph.nodes if node in self.waits)
        for group, order in self.orders.items():
            now = left[group]
            if now != [node for node in order if node in now]:  # has to match ranks whose graph is unchanged
                stand, stood = (", ".join(node.name for node in each) for each in (now, order))
                yield f"the order of collectives of group {group} changed from {stood} to {stand}"
        outputs = _outputs(graph)
        if len(outputs) != len(self.outputs):
            yield f"{len(self.outputs)} outputs became {len(outputs)}"
        for position, (was, is_now) in enumerate(zip(self.outputs, outputs, strict=False)):
            if was != is_now:
                yield f"output {position}: {was} became {is_now}"

    def _problems_of_buckets(self, graph: fx.Graph) -> Iterator[str]:
        nodes: defaultdict[tuple[int, int], list[fx.Node]] = defaultdict(list)
        for node in graph.nodes:
            if (by := edit.provenance_of(node)) is not None:
                nodes[by.unit].append(node)
        wanted: dict[tuple[int, int], tuple[str, edit.Provenance]] = {}
        for replica in sorted({replica for _, _, replica in self.reductions.values()}):
            for number, bucket in enumerate(self.plans[replica].buckets):
                yield from _problems_of(bucket, nodes[replica, number])
                for position, member in enumerate(bucket.members):
                    members = () if bucket.key.reduction.is_scattered else (position,)
                    planned = edit.Provenance((replica, number), members)
                    wanted[replica, member.gradient.index] = member.gradient.name, planned
        found = {use: value for node in graph.nodes for use, value in _reads(node) if use in self.uses}
        for use, of in self.uses.items():
            name, planned = wanted[of]
            if use not in found or edit.provenance_of(found[use]) != planned:
                yield f"where reduced gradients go: {use[0]} no longer reads that of {name}"


def _problems_of(bucket: Bucket, nodes: Sequence[fx.Node]) -> Iterator[str]:
    """Yield an error if a bucket is not filled once, or not launched once per stage, as planned."""
    ends = dict.fromkeys((bucket.members[0].gradient.name, bucket.members[-1].gradient.name))
    names = f"the reduction of the gradient of {' .. '.join(ends)}"
    filled = [(list(node.args[3]), node.args[4]) for node in nodes if node.target is FLAT_BUCKET]  # type: ignore[arg-type]
    planned = [member.offset for member in bucket.members], bucket.numel
    if filled != [planned]:
        yield f"{names}: its bucket is filled at (offsets, numel) {filled}, expected once {planned}"
    groups = [str(node.args[-1]) for node in filter(is_collective, nodes)]
    if groups != [stage.group for stage in bucket.key.reduction.stages]:
        yield f"{names}: its bucket is launched on {groups}, expected {bucket.key.reduction.stages}"


def _outputs(graph: fx.Graph) -> list[str]:
    """Return the type and strides of each output as text."""
    values = [node.meta.get("val") for node in _nodes_in(graph.output_node().args[0])]
    return [
        f"{type_text(each)} strides {list(each.stride())}" if isinstance(each, torch.Tensor) else type_text(each)
        for each in values
    ]


def _reads(node: fx.Node) -> Iterator[tuple[tuple[Any, ...], fx.Node]]:
    """Yield a key and the node for each use in `node` of another node. Passes that replace `node` keep the key."""
    if node.target in (UPDATE, UPDATE_LATER):
        update = read_update(node)
        for index, gradient in zip(update.indices, update.gradients, strict=True):
            yield ("the update", update.replica, update.optimizer, index), gradient
    elif node.target is not REDUCE_GRAD:
        given = _nodes_in((node.args, node.kwargs))
        # Count from the last argument: a product into which a factor is folded gets one more in front.
        yield from (((node.name, place - len(given)), each) for place, each in enumerate(given))


def _nodes_in(arguments: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    map_arg(arguments, found.append)
    return found
