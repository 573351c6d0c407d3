"""What must hold of a graph after every pass. Errors name the pass and the node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from dp_compile.errors import InvalidGraphError
from dp_compile.fx.collectives import is_collective, waits_of


@dataclass(frozen=True, slots=True)
class OutputFacts:
    """Shape, dtype and strides of each tensor that a graph returns, as text for comparison."""

    tensors: tuple[str, ...]


def output_facts(graph: fx.Graph) -> OutputFacts:
    facts: list[str] = []

    def note(node: fx.Node) -> fx.Node:
        facts.append(_describe(node.meta.get("val")))
        return node

    map_arg(graph.output_node().args[0], note)
    return OutputFacts(tuple(facts))


def verify(graph: fx.Graph, *, after: str, outputs: OutputFacts) -> None:
    """Check a graph that the pass `after` left behind.

    Raises:
        InvalidGraphError: nodes are used before they are defined, a collective is not waited for exactly once, or
            what the graph returns has another shape, dtype or stride than `outputs`.
    """
    try:
        graph.lint()
    except RuntimeError as error:
        raise InvalidGraphError(f"after pass '{after}': {error}") from error
    for node in graph.nodes:
        if is_collective(node) and len(waits_of(node)) != 1:
            raise InvalidGraphError(f"after pass '{after}': {node.name} has {len(waits_of(node))} waits, expected 1")
    found = output_facts(graph)
    if found != outputs:
        changed = [
            f"output {position}: {was} became {now}"
            for position, (was, now) in enumerate(zip(outputs.tensors, found.tensors, strict=False))
            if was != now
        ] or [f"{len(outputs.tensors)} outputs became {len(found.tensors)}"]
        raise InvalidGraphError(f"after pass '{after}': {changed[0]}")


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)} strides {list(value.stride())}"
    return type(value).__name__
