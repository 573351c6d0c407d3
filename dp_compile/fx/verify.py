"""What must hold of a graph after every pass. Errors name the pass and the node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from dp_compile.errors import InvalidGraphError
from dp_compile.fx.collectives import is_collective, wait_counts


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
