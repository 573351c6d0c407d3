"""Edits that keep a graph valid: insert with metadata, replace, reorder."""

from __future__ import annotations

import contextlib
import graphlib
import heapq
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from torch import fx
from torch.fx.node import map_aggregate, map_arg

from dp_compile.errors import InvalidGraphError
from dp_compile.fx.collectives import by_group, is_collective
from dp_compile.fx.memory import Storage, is_ordered, storages_of, written_by

PROVENANCE: Final = "dp_compile"
_ENDS: Final = {"placeholder": 0, "output": 2}


@dataclass(frozen=True, slots=True)
class Provenance:
    """For which unit (in passes: replica and number) and which of its members a pass created a node."""

    unit: tuple[int, int]
    members: tuple[int, ...] = ()


def insert_call(
    graph: fx.Graph, before: fx.Node, target: Callable[..., Any], args: tuple[Any, ...], provenance: Provenance
) -> fx.Node:
    """Insert a call with its fake value, so that later passes and Inductor know shape, dtype and strides."""
    with graph.inserting_before(before):
        node = graph.call_function(target, args)
    modes: list[Any] = []
    values: Any = map_arg(args, lambda argument: argument.meta["val"])
    map_aggregate((values, before.meta.get("val")), lambda value: modes.append(getattr(value, "fake_mode", None)))
    with next(filter(None, modes), contextlib.nullcontext()):
        node.meta["val"] = target(*values)
    node.meta[PROVENANCE] = provenance
    return node


def provenance_of(node: fx.Node) -> Provenance | None:
    found = node.meta.get(PROVENANCE)
    return found if isinstance(found, Provenance) else None


def replace_uses(new: Mapping[fx.Node, fx.Node]) -> None:
    """Replace all uses of each node in `new` by the node that it is mapped to.

    Each user is rewritten only once: a rewrite copies all arguments of a node, and the output has thousands.
    """
    for user in {user: None for old in new for user in old.users}:
        user.args = map_arg(user.args, lambda node: new.get(node, node))
        user.kwargs = map_arg(user.kwargs, lambda node: new.get(node, node))


def sources_of(nodes: Sequence[fx.Node], through: Callable[[fx.Node], bool]) -> list[fx.Node]:
    """Return these nodes and, recursively, the inputs of those for which `through` holds; once each, breadth first."""
    found, seen = list(dict.fromkeys(nodes)), set(nodes)
    for node in found:  # grows in this loop
        if through(node):
            found += (each for each in node.all_input_nodes if each not in seen)
            seen.update(node.all_input_nodes)
    return found


def positions(graph: fx.Graph) -> dict[fx.Node, int]:
    return {node: position for position, node in enumerate(graph.nodes)}


def dependencies(graph: fx.Graph, chain: Sequence[fx.Node] = ()) -> dict[fx.Node, dict[fx.Node, None]]:
    """Return the nodes that each node has to follow: its inputs, and nodes whose order has observable effects.

    Such nodes are a write to memory and other uses of this memory, nodes that draw random numbers or are unknown, the
    model's own collectives of one group, and neighbours in `chain`.
    """
    found = {node: dict.fromkeys(node.all_input_nodes) for node in graph.nodes}
    # Another rank may run the unchanged graph, so the order of the model's own collectives has to stay.
    others = by_group(node for node in graph.nodes if is_collective(node) and provenance_of(node) is None)
    ordered = filter(is_ordered, graph.nodes), *others.values(), chain
    pairs = itertools.chain.from_iterable(map(itertools.pairwise, ordered))
    for before, after in itertools.chain(_around_writes(graph), pairs):
        found[after][before] = None
    return found


def stable_order(
    graph: fx.Graph, priority: Callable[[fx.Node], Any] | None = None, chain: Sequence[fx.Node] = ()
) -> list[fx.Node]:
    """Return a topological order in which the ready node with the least `priority` (default: position) comes next.

    Ties keep their order. Inputs stay first and the output last. `chain`: nodes that have to keep this order.
    """
    nodes, now = list(graph.nodes), positions(graph)

    def wish(node: fx.Node) -> tuple[int, Any]:
        return (_ENDS[node.op], 0) if node.op in _ENDS else (1, priority(node) if priority else now[node])

    sorter = graphlib.TopologicalSorter(dependencies(graph, chain))
    try:
        sorter.prepare()
    except graphlib.CycleError as error:
        stuck = sorted(set(error.args[1]), key=now.__getitem__)[:5]
        names = ", ".join(node.name for node in stuck)
        raise InvalidGraphError(f"nodes form a dependency cycle: {names}") from None
    ready: list[tuple[Any, int]] = []
    order: list[fx.Node] = []
    while sorter.is_active():
        for node in sorter.get_ready():
            heapq.heappush(ready, (wish(node), now[node]))
        order.append(nodes[heapq.heappop(ready)[1]])
        sorter.done(order[-1])
    return order


def reorder(graph: fx.Graph, order: Sequence[fx.Node]) -> None:
    """Reorder a graph. `order` contains all its nodes and ends with the output."""
    output = graph.output_node()
    for node in order[:-1]:
        output.prepend(node)


def _around_writes(graph: fx.Graph) -> list[tuple[fx.Node, fx.Node]]:
    """Return pairs (earlier, later) of each node that writes to memory and the other users of that memory."""
    writers = [(node, written) for node in graph.nodes if (written := written_by(node))]
    if not writers:
        return []
    uses: dict[Storage, list[fx.Node]] = {}
    for node in graph.nodes:
        for storage in {storage for each in (node, *node.all_input_nodes) for storage in storages_of(each)}:
            uses.setdefault(storage, []).append(node)
    now, pairs = positions(graph), []
    for writer, written in writers:
        for storage in {storage for each in written for storage in storages_of(each)}:
            others = [node for node in uses[storage] if node is not writer and node.op != "output"]
            pairs += [(node, writer) if now[node] < now[writer] else (writer, node) for node in others]
    return pairs
