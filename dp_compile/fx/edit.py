"""Edits that keep a graph valid: insert with metadata, move, replace, order."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from torch import fx
from torch.fx.node import map_arg

from dp_compile.errors import InvalidGraphError

PROVENANCE = "dp_compile"
_ENDS: Final = {"placeholder": 0, "output": 2}


@dataclass(frozen=True, slots=True)
class Provenance:
    """Which pass made a node, and for which unit of work of that pass."""

    made_by: str
    unit: str
    members: tuple[str, ...] = ()


def insert_call(
    graph: fx.Graph, before: fx.Node, target: Callable[..., Any], args: tuple[Any, ...], provenance: Provenance
) -> fx.Node:
    """Insert a call with its fake value, so that later passes and Inductor know shape, dtype and strides."""
    with graph.inserting_before(before):
        node = graph.call_function(target, args)
    values = map_arg(args, lambda argument: argument.meta["val"])
    mode = next((value.fake_mode for value in _leaves(values) if hasattr(value, "fake_mode")), None)
    if mode is None:
        node.meta["val"] = target(*values)
    else:
        with mode:
            node.meta["val"] = target(*values)
    node.meta[PROVENANCE] = provenance
    return node


def provenance_of(node: fx.Node) -> Provenance | None:
    found = node.meta.get(PROVENANCE)
    return found if isinstance(found, Provenance) else None


def replace(old: fx.Node, new: fx.Node) -> None:
    """Let every user of `old` use `new`, and erase `old`."""
    old.replace_all_uses_with(new)
    old.graph.erase_node(old)


def replace_uses(new: Mapping[fx.Node, fx.Node]) -> None:
    """Let every user of a node in `new` use what it is mapped to.

    One node for all at once: what a graph returns uses thousands, and each change of one of them copies all.
    """
    users = {user: None for old in new for user in old.users}
    for user in users:
        user.args = map_arg(user.args, lambda node: new.get(node, node))
        user.kwargs = map_arg(user.kwargs, lambda node: new.get(node, node))


def positions(graph: fx.Graph) -> dict[fx.Node, int]:
    return {node: position for position, node in enumerate(graph.nodes)}


def sort_stably(
    graph: fx.Graph,
    priority: Callable[[fx.Node], Any] | None = None,
    chain: Sequence[fx.Node] = (),
) -> bool:
    """Order topologically; of the nodes that could come next, the one with the least `priority` does.

    What the graph takes stays in front and what it returns stays last, whatever their priority.

    Args:
        priority: where a node wants to be, the node's present position if not given; ties keep their order.
        chain: nodes that have to come in this order although no data passes between them.

    Raises:
        InvalidGraphError: some nodes depend on each other.
    """
    nodes = list(graph.nodes)
    now = {node: position for position, node in enumerate(nodes)}
    wish = {node: (_ENDS.get(node.op, 1), priority(node) if priority else now[node], now[node]) for node in nodes}
    follower = dict(itertools.pairwise(chain))
    missing = {node: len(node.all_input_nodes) for node in nodes}
    for node in follower.values():
        missing[node] += 1
    ready = [(wish[node], now[node]) for node in nodes if missing[node] == 0]
    heapq.heapify(ready)
    order: list[fx.Node] = []
    while ready:
        node = nodes[heapq.heappop(ready)[1]]
        order.append(node)
        for user in [*node.users, *([follower[node]] if node in follower else [])]:
            missing[user] -= 1
            if missing[user] == 0:
                heapq.heappush(ready, (wish[user], now[user]))
    if len(order) != len(nodes):
        stuck = [node.name for node in nodes if missing[node] > 0][:5]
        raise InvalidGraphError(f"nodes depend on each other in a circle: {', '.join(stuck)}")
    return _reorder(graph, order)


def _reorder(graph: fx.Graph, order: Sequence[fx.Node]) -> bool:
    if list(graph.nodes) == list(order):
        return False
    first = next(iter(graph.nodes))
    if order[0] is not first:
        first.prepend(order[0])
    for before, node in itertools.pairwise(order):
        if before.next is not node:
            before.append(node)
    return True


def _leaves(values: Any) -> list[Any]:
    if isinstance(values, (list, tuple)):
        return [leaf for value in values for leaf in _leaves(value)]
    return [values]
