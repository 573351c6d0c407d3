"""What must hold of reductions after every pass: each `reduce_grad` has become the right view of the right bucket.

`BucketReductions` makes the nodes of a bucket by `GraphOps`. After each pass the same steps run once more over what the
graph has by then, and find each node in place of making it: this bucket of these gradients, launched once, waited for,
looked at. What read a reduced gradient before the first pass has to read that view. What computes a gradient, and what
is done to a reduced one, is not checked: tests compare numbers (tests/passes/test_pipeline_properties.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
    Site,
    by_replica,
    is_cast,
    is_view,
    parts_of,
    reduced_by,
    reduction_of,
    stride_before,
)
from dp_compile.passes.memory import MemoryPlaces
from dp_compile.passes.reduction import REDUCE_GRAD, GradReduction, StateInGraph, analyse, dtype_of, states_in
from dp_compile.passes.updates import UPDATE, UPDATE_LATER, read_update
from dp_compile.plan.buckets import BucketPlan, GradientSpec


@dataclass(frozen=True, slots=True)
class GraphFacts:
    """What no pass may change: each returned tensor as text, for each collective by name how often each of its results
    is waited for, and for each group the order in which its collectives stand."""

    outputs: tuple[str, ...]
    waits: Mapping[str, tuple[int, ...]]
    orders: Mapping[str, Sequence[str]]


def facts_of(graph: fx.Graph) -> GraphFacts:
    outputs: list[str] = []

    def note(node: fx.Node) -> fx.Node:
        outputs.append(_describe(node.meta.get("val")))
        return node

    map_arg(graph.output_node().args[0], note)
    collectives = list(filter(is_collective, graph.nodes))
    orders: dict[str, list[str]] = {}
    for node in collectives:
        orders.setdefault(str(node.args[-1]), []).append(node.name)
    return GraphFacts(tuple(outputs), {node.name: wait_counts(node) for node in collectives}, orders)


def verify(graph: fx.Graph, *, after: str, before: GraphFacts) -> None:
    """Check a graph that the pass `after` left behind against what it was `before` the first pass.

    Raises:
        InvalidGraphError: nodes are used before they are defined, a result of a new collective is not waited for
            exactly once, an old one has lost or got a wait, those of a group that stood there stand in another order,
            or what is returned has another shape, dtype or stride.
    """
    try:
        graph.lint()
    except RuntimeError as error:
        raise InvalidGraphError(f"after pass '{after}': {error}") from error
    found = facts_of(graph)
    for name, waits in found.waits.items():
        expected = before.waits.get(name, (1,) * len(waits))
        if waits != expected:
            raise InvalidGraphError(
                f"after pass '{after}': {name} has {_listed(waits)} waits, expected {_listed(expected)}"
            )
    for group, order in before.orders.items():
        now = [name for name in found.orders.get(group, ()) if name in before.waits]
        if now != [name for name in order if name in found.waits]:  # as on ranks whose graph no pass has changed
            raise InvalidGraphError(
                f"after pass '{after}': the collectives of group {group} stand in the order {', '.join(now)}, before "
                f"{', '.join(order)}"
            )
    if found.outputs != before.outputs:
        changed = [
            f"output {position}: {was} became {now}"
            for position, (was, now) in enumerate(zip(before.outputs, found.outputs, strict=False))
            if was != now
        ] or [f"{len(before.outputs)} outputs became {len(found.outputs)}"]
        raise InvalidGraphError(f"after pass '{after}': {changed[0]}")


def _listed(counts: tuple[int, ...]) -> str:
    return ", ".join(map(str, counts))


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)} strides {list(value.stride())}"
    return type(value).__name__


# --- reductions ---


@dataclass(frozen=True, slots=True)
class Reductions:
    """What a graph asks for before the first pass.

    `sources`: of each gradient the nodes that hold its elements, with the strides that these have in its bucket.
    `factors`: what a pass changes of such a node that takes in a factor. `whose`: replica and index of each reduction,
    and of each tensor that a hook's state becomes; `uses`: which of these is read, by what.
    """

    reductions: tuple[GradReduction, ...]
    sources: Mapping[fx.Node, Mapping[fx.Node, tuple[int, ...]]]
    factors: Mapping[fx.Node, tuple[Any, ...]]
    states: Mapping[tuple[int, int], StateInGraph]
    whose: Mapping[fx.Node, tuple[int, int]]
    uses: Mapping[tuple[Any, ...], fx.Node]
    nodes: frozenset[fx.Node]


def reductions_of(graph: fx.Graph, plans: Sequence[BucketPlan]) -> Reductions:
    """What no pass may change."""
    planned = [{each.index: each for each in plan.gradients} for plan in plans]
    reductions, states = analyse(graph).reductions, states_in(graph)
    sources = {
        each.node: _sources(each.grad, planned[each.replica][each.index])
        for each in reductions
        if each.replica < len(plans) and each.index in planned[each.replica]
    }
    whose = {each.node: (each.replica, each.index) for each in reductions}
    whose |= {node: of for of, state in states.items() for node in state.items.values()}
    uses = {use: value for node in graph.nodes for use, value in _reads(node) if value in whose}
    factors = {node: _factor_in(node) for each in sources.values() for node in each}
    return Reductions(reductions, sources, factors, states, whose, uses, frozenset(graph.nodes))


def check_reductions(graph: fx.Graph, before: Reductions, plans: Sequence[BucketPlan], *, made_by: str) -> None:
    """Check that each gradient is reduced once, as its plan says, and read where it was read before.

    Raises:
        InvalidGraphError: it is not; names the pass `made_by` and the gradient.
    """
    left, known = analyse(graph).reductions, {each.node: each for each in before.reductions}
    for each in left:
        if known.get(each.node) != each:
            _wrong(made_by, _name(each.replica, each.index, plans), f"{each.node.name} is a reduction more, or another")
    now = {each.node: each.node for each in left}
    now |= {node: node for state in states_in(graph).values() for node in state.items.values()}
    read: dict[fx.Node, str] = {}
    if len(left) < len(known):
        now |= _bucketed(graph, before, plans, now, made_by, read)
    found = {use: value for node in graph.nodes for use, value in _reads(node) if use in before.uses}
    for use, was in before.uses.items():
        value, wanted = found.get(use), now.get(was)
        if value is None or wanted is None or (value.target, value.args) != (wanted.target, wanted.args):
            name = _name(*before.whose[was], plans)
            text = f"pass '{made_by}' changed where reduced gradients go: {use[0]} no longer reads that of {name}"
            raise InvalidGraphError(text)
    memory = {storage: names for node, names in read.items() for storage in storages_of(node)}
    for node in graph.nodes:
        if node not in before.nodes and node.target is not UPDATE:
            for storage in (storage for each in written_by(node) for storage in storages_of(each)):
                if storage in memory:
                    _wrong(made_by, memory[storage], f"{node.name} writes to memory of its bucket")


def _bucketed(
    graph: fx.Graph,
    before: Reductions,
    plans: Sequence[BucketPlan],
    left: Mapping[fx.Node, fx.Node],
    made_by: str,
    read: dict[fx.Node, str],
) -> dict[fx.Node, fx.Node]:
    """What each reduction has become that is left no more, and each tensor of a hook's state."""
    now: dict[fx.Node, fx.Node] = {}
    for replica, reductions in sorted(by_replica(before.reductions, plans).items()):
        for number, bucket in enumerate(plans[replica].buckets):
            members = [reduction_of(member, bucket, reductions) for member in bucket.members]
            if any(each.node not in left for each in members):
                names = " .. ".join(dict.fromkeys((bucket.members[0].label, bucket.members[-1].label)))
                places = MemoryPlaces(replica, None)
                site = _Written(graph, members[0].node, f"{replica}.{number}", False, places, made_by, names, read)
                ops = _WrittenOps(site, parts_of(bucket, members), before.states, {}, before=before, now=now)
                now |= reduced_by(ops, bucket) | ops.remembered
    return now


def _wrong(made_by: str, name: str, what: str) -> NoReturn:
    raise InvalidGraphError(f"pass '{made_by}' changed what is reduced: the gradient of {name}: {what}")


def _name(replica: int, index: int, plans: Sequence[BucketPlan]) -> str:
    gradients = plans[replica].gradients if replica < len(plans) else ()
    return next((each.name for each in gradients if each.index == index), f"index {index}")


def _reads(node: fx.Node) -> Iterator[tuple[tuple[Any, ...], fx.Node]]:
    """What a node reads. Ours that take the place of another read the same by another name."""
    if node.target in (UPDATE, UPDATE_LATER):
        update = read_update(node)
        for index, gradient in zip(update.indices, update.gradients, strict=True):
            yield ("the update", update.replica, update.optimizer, index), gradient
    elif node.target is not REDUCE_GRAD:
        given = _nodes_in((node.args, node.kwargs))
        # From the last: a product that takes in a factor is given one argument more in front.
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
    """Where a node takes in a factor (`producers.fold_factor`)."""
    position = SCATTERED.get(node.target)
    return node.target, None if position is None else node.args[position], *map(node.kwargs.get, ("beta", "alpha"))


@dataclass(frozen=True, slots=True)
class _Written(Site):
    """Nodes that are in a graph already. `read`: notes what was found."""

    made_by: str
    names: str
    read: dict[fx.Node, str]

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
            _wrong(self.made_by, self.names, f"the bucket needs {wanted}")
        self.read.update(dict.fromkeys((first, *others, found[0]), self.names))
        return found[0]

    def make_bucket(self, target: Callable[..., Any], *arguments: Any, members: tuple[str, ...] = ()) -> fx.Node:
        return self.make(target, *arguments, members=members)

    def _is_of(self, node: fx.Node, members: tuple[str, ...]) -> bool:
        """Two gradients may be made of one tensor: each is copied, by calls with equal arguments."""
        by = provenance_of(node)
        return by is None or (by.unit == self.unit and (not members or by.members == members))


def _plain(arguments: Sequence[Any]) -> list[Any]:
    """Arguments of a call; of a bucket, without what its gaps hold and without defaults."""
    plain = [list(each) if isinstance(each, (list, tuple)) else each for each in arguments]
    if len(plain) > 5 and isinstance(plain[5], bool):
        plain[5] = False
    while plain and plain[-1] in (None, False):
        plain.pop()
    return plain


@dataclass(slots=True)
class _WrittenOps(GraphOps):
    site: _Written
    before: Reductions | None = None
    now: Mapping[fx.Node, fx.Node] = field(default_factory=dict)
    """What the reductions of earlier buckets have become, which later gradients may be made of."""

    def source_of(self, part: Part, scale: float, dtype: torch.dtype | None) -> tuple[fx.Node, float, tuple[int, ...]]:
        assert self.before is not None
        for source, stride in self.before.sources[part.reduction.node].items():
            source = self.now.get(source, source)
            for user in source.users:
                by = provenance_of(user)
                if user.target is FLAT_BUCKET and by is not None and by.unit == self.site.unit:
                    is_folded = _factor_in(source) != self.before.factors.get(source, _factor_in(source))
                    return source, 1.0 if is_folded else scale, stride
        _wrong(self.site.made_by, part.member.label, "became not reduced: it is in no bucket")
