"""What must hold after every pass: a valid graph, and each `reduce_grad` has become the right view of the right bucket.

`BucketReductions` makes the nodes of a bucket by `GraphOps`. After each pass the same steps run once more over the
graph, and find each node instead of making it: this bucket of these gradients, launched once, waited for, viewed. What
read a reduced gradient before the first pass has to read that view. What computes a gradient, and what is done to a
reduced one, is not checked: tests compare numbers (tests/passes/test_pipeline_properties.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import fx
from torch.fx.node import map_arg

from dp_compile.errors import InvalidGraphError
from dp_compile.fx.collectives import is_collective, wait_counts
from dp_compile.fx.edit import provenance_of
from dp_compile.fx.storages import storages_of, written_by
from dp_compile.passes.bucket_ops import FLAT_BUCKET
from dp_compile.passes.bucketing import (
    SCATTERED,
    GraphOps,
    Part,
    by_replica,
    is_cast,
    is_view,
    parts_of,
    reduced_by,
    stride_before,
)
from dp_compile.passes.reduction import REDUCE_GRAD, dtype_of, reductions_in, states_in
from dp_compile.passes.updates import UPDATE, UPDATE_LATER, read_update
from dp_compile.plan.buckets import BucketPlan, GradientSpec


class Checks:
    """What no pass may change of a graph, read before the first one."""

    def __init__(self, graph: fx.Graph, plans: Sequence[BucketPlan]) -> None:
        self.plans = plans
        self.nodes = frozenset(graph.nodes)
        self.outputs = _outputs(graph)
        self.collectives = {node: wait_counts(node) for node in graph.nodes if is_collective(node)}
        self.orders = _orders(graph)
        self.reductions = reductions_in(graph)
        self.states = states_in(graph)
        planned = {(number, each.index): each for number, plan in enumerate(plans) for each in plan.gradients}
        self.sources = {
            each.node: _sources(each.grad, planned[each.replica, each.index])
            for each in self.reductions
            if (each.replica, each.index) in planned
        }
        """Of each gradient the nodes that hold its elements, with the strides that these have in its bucket."""
        self.factors = {node: _factor_in(node) for each in self.sources.values() for node in each}
        """What a pass changes of such a node that takes in a factor."""
        self.whose = {each.node: (each.replica, each.index) for each in self.reductions}
        """Replica and index of each reduction, and of each tensor that a hook's state becomes."""
        self.whose |= {node: of for of, state in self.states.items() for node in state.items.values()}
        self.uses = {use: value for node in graph.nodes for use, value in _reads(node) if value in self.whose}

    def run(self, graph: fx.Graph, *, after: str) -> None:
        """Check a graph that the pass `after` has left.

        Raises:
            InvalidGraphError: a node is used before it is defined; a result of a new collective is not waited for
                exactly once, an old one has lost or got a wait, those of a group stand in another order; an output has
                another shape, dtype or stride; or a gradient is not reduced once, as its plan says, and read where it
                was read before. Names the pass, and the node or the gradient.
        """
        self._check_graph(graph, after)
        self._check_reductions(graph, after)

    def _check_graph(self, graph: fx.Graph, after: str) -> None:
        try:
            graph.lint()
        except RuntimeError as error:
            raise InvalidGraphError(f"after pass '{after}': {error}") from error
        for node in filter(is_collective, graph.nodes):
            waits = wait_counts(node)
            expected = self.collectives.get(node, (1,) * len(waits))
            if waits != expected:
                found, wanted = (", ".join(map(str, each)) for each in (waits, expected))
                raise InvalidGraphError(f"after pass '{after}': {node.name} has {found} waits, expected {wanted}")
        left = _orders(graph)
        for group, order in self.orders.items():
            now = [node for node in left.get(group, ()) if node in self.collectives]
            if now != [node for node in order if node in left.get(group, ())]:  # as on ranks whose graph is unchanged
                stand, stood = (", ".join(node.name for node in each) for each in (now, order))
                raise InvalidGraphError(
                    f"after pass '{after}': the collectives of group {group} stand in the order {stand}, before {stood}"
                )
        outputs = _outputs(graph)
        if len(outputs) != len(self.outputs):
            raise InvalidGraphError(f"after pass '{after}': {len(self.outputs)} outputs became {len(outputs)}")
        for position, (was, is_now) in enumerate(zip(self.outputs, outputs, strict=True)):
            if was != is_now:
                raise InvalidGraphError(f"after pass '{after}': output {position}: {was} became {is_now}")

    def _check_reductions(self, graph: fx.Graph, after: str) -> None:
        left, known = reductions_in(graph), {each.node: each for each in self.reductions}
        for each in left:
            if known.get(each.node) != each:
                name = self._name(each.replica, each.index)
                _wrong(after, name, f"{each.node.name} is a reduction more, or another")
        now = {each.node: each.node for each in left}
        now |= {node: node for state in states_in(graph).values() for node in state.items.values()}
        read: dict[fx.Node, str] = {}
        if len(left) < len(known):
            now |= self._bucketed(graph, now, after, read)
        found = {use: value for node in graph.nodes for use, value in _reads(node) if use in self.uses}
        for use, was in self.uses.items():
            value, wanted = found.get(use), now.get(was)
            if value is None or wanted is None or (value.target, value.args) != (wanted.target, wanted.args):
                name = self._name(*self.whose[was])
                text = f"pass '{after}' changed where reduced gradients go: {use[0]} no longer reads that of {name}"
                raise InvalidGraphError(text)
        memory = {storage: names for node, names in read.items() for storage in storages_of(node)}
        for node in graph.nodes:
            if node not in self.nodes and node.target is not UPDATE:
                for storage in (storage for each in written_by(node) for storage in storages_of(each)):
                    if storage in memory:
                        _wrong(after, memory[storage], f"{node.name} writes to memory of its bucket")

    def _bucketed(
        self, graph: fx.Graph, left: Mapping[fx.Node, fx.Node], after: str, read: dict[fx.Node, str]
    ) -> dict[fx.Node, fx.Node]:
        """What each reduction has become that is not left, and each tensor of a hook's state."""
        now: dict[fx.Node, fx.Node] = {}
        for replica, reductions in sorted(by_replica(self.reductions, self.plans).items()):
            for number, bucket in enumerate(self.plans[replica].buckets):
                parts, unit = parts_of(bucket, reductions), f"{replica}.{number}"
                if any(part.reduction.node not in left for part in parts):
                    first = parts[0].reduction.node
                    ops = _Written(graph, first, unit, parts, self.states, {}, iter(()), False)
                    ops.checks, ops.after, ops.read, ops.now = self, after, read, now
                    now |= reduced_by(ops, bucket) | ops.remembered
        return now

    def _name(self, replica: int, index: int) -> str:
        gradients = self.plans[replica].gradients if replica < len(self.plans) else ()
        return next((each.name for each in gradients if each.index == index), f"index {index}")


def _outputs(graph: fx.Graph) -> list[str]:
    """Each returned tensor as text."""
    return [_describe(node.meta.get("val")) for node in _nodes_in(graph.output_node().args[0])]


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)} strides {list(value.stride())}"
    return type(value).__name__


def _orders(graph: fx.Graph) -> dict[str, list[fx.Node]]:
    """The collectives of each group in their order."""
    orders: dict[str, list[fx.Node]] = {}
    for node in filter(is_collective, graph.nodes):
        orders.setdefault(str(node.args[-1]), []).append(node)
    return orders


def _wrong(after: str, name: str, what: str) -> NoReturn:
    raise InvalidGraphError(f"pass '{after}' changed what is reduced: the gradient of {name}: {what}")


def _reads(node: fx.Node) -> Iterator[tuple[tuple[Any, ...], fx.Node]]:
    """What a node reads. Ours that replace another one read the same by another name."""
    if node.target in (UPDATE, UPDATE_LATER):
        update = read_update(node)
        for index, gradient in zip(update.indices, update.gradients, strict=True):
            yield ("the update", update.replica, update.optimizer, index), gradient
    elif node.target is not REDUCE_GRAD:
        given = _nodes_in((node.args, node.kwargs))
        # From the last: a product that takes in a factor gets one argument more in front.
        yield from (((node.name, place - len(given)), each) for place, each in enumerate(given))


def _nodes_in(arguments: Any) -> list[fx.Node]:
    found: list[fx.Node] = []

    def note(node: fx.Node) -> fx.Node:
        found.append(node)
        return node

    map_arg(arguments, note)
    return found


def _sources(grad: fx.Node, gradient: GradientSpec) -> dict[fx.Node, tuple[int, ...]]:
    """A gradient, and what it is a view of; also what it was cast from, if that has the dtype of the wire."""
    found, wire = {grad: gradient.stride}, gradient.key.reduction.wire
    while is_view(grad) or is_cast(grad):
        source = grad.all_input_nodes[0]
        stride = stride_before(grad, source, found[grad]) if is_view(grad) else found[grad]
        if stride is None or (is_cast(grad) and (wire is None or source.meta["val"].dtype != dtype_of(wire))):
            break
        found[source], grad = stride, source
    return found


def _factor_in(node: fx.Node) -> tuple[Any, ...]:
    """Where a node takes in a factor (`bucketing.fold_factor`)."""
    position = SCATTERED.get(node.target)
    return node.target, None if position is None else node.args[position], *map(node.kwargs.get, ("beta", "alpha"))


class _Written(GraphOps):
    """Finds in a graph what `GraphOps` would make.

    `read`: collects the nodes, with the names of their gradients. `now`: what the reductions of earlier buckets have
    become, which later gradients may be made of.
    """

    checks: Checks
    after: str
    read: dict[fx.Node, str]
    now: Mapping[fx.Node, fx.Node]

    @property
    def names(self) -> str:
        return " .. ".join(dict.fromkeys((self.parts[0].member.label, self.parts[-1].member.label)))

    def make(self, target: Callable[..., Any], *arguments: Any, members: tuple[str, ...] = ()) -> fx.Node:
        first, *others = _nodes_in(arguments)
        found = [
            each
            for each in first.users
            if each.target is target and _plain(each.args) == _plain(arguments) and self._is_of(each, members)
        ]
        launches = list(filter(is_collective, first.users))
        if not found or (found[0] in launches and len(launches) > 1):
            there = ", ".join(f"{each.target}{each.args[1:]}" for each in first.users if each.target is target)
            wanted = f"once {target}{arguments[1:]} of {first.name}, found {there or 'none'}"
            _wrong(self.after, self.names, f"the bucket needs {wanted}")
        self.read.update(dict.fromkeys((first, *others, found[0]), self.names))
        return found[0]

    def _is_of(self, node: fx.Node, members: tuple[str, ...]) -> bool:
        """Two gradients may be made of one tensor: each is copied, by calls with equal arguments."""
        by = provenance_of(node)
        return by is None or (by.unit == self.unit and (not members or by.members == members))

    def source_of(self, part: Part, scale: float, dtype: torch.dtype | None) -> tuple[fx.Node, float, tuple[int, ...]]:
        for source, stride in self.checks.sources[part.reduction.node].items():
            source = self.now.get(source, source)
            for user in source.users:
                by = provenance_of(user)
                if user.target is FLAT_BUCKET and by is not None and by.unit == self.unit:
                    is_folded = _factor_in(source) != self.checks.factors.get(source, _factor_in(source))
                    return source, 1.0 if is_folded else scale, stride
        _wrong(self.after, part.member.label, "became not reduced: it is in no bucket")


def _plain(arguments: Sequence[Any]) -> list[Any]:
    """Arguments of a call; of a bucket, without what its gaps hold and without defaults."""
    plain = [list(each) if isinstance(each, (list, tuple)) else each for each in arguments]
    if len(plain) > 5 and isinstance(plain[5], bool):
        plain[5] = False
    while plain and plain[-1] in (None, False):
        plain.pop()
    return plain
