"""Which nodes of a graph are gradient reductions, and of what. Reads only."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from torch import fx

from dp_compile.fx.collectives import is_collective
from dp_compile.fx.edit import provenance_of
from dp_compile.passes.reduction import REDUCE_GRAD, GradReduction, match
from dp_compile.passes.result import Refusal


@dataclass(frozen=True, slots=True)
class Analysis:
    """The reductions of a graph, in graph order, and what looked like one but was not understood."""

    reductions: tuple[GradReduction, ...]
    refusals: tuple[Refusal, ...]


def analyse(graph: fx.Graph) -> Analysis:
    """Find every `reduce_grad` in a graph."""
    found = [match(node) for node in graph.find_nodes(op="call_function", target=REDUCE_GRAD)]
    return Analysis(
        tuple(item for item in found if isinstance(item, GradReduction)),
        tuple(item for item in found if isinstance(item, Refusal)),
    )


def is_reduction(node: fx.Node) -> bool:
    """Whether a node runs a collective: one of its own for a gradient, or one for a bucket."""
    return is_collective(node) or (node.op == "call_function" and node.target is REDUCE_GRAD)


def accounted(graph: fx.Graph) -> Counter[tuple[int, int]]:
    """How often each gradient is reduced in a graph, by an op of its own or as a member of a bucket.

    By replica and index.
    """
    found = Counter((each.replica, each.index) for each in analyse(graph).reductions)
    for node in graph.nodes:
        provenance = provenance_of(node)
        if is_collective(node) and provenance is not None:
            for mark in provenance.members:
                index, replica = map(int, mark.split("/"))
                found[replica, index] += 1
    return found


def member_mark(index: int, replica: int) -> str:
    """What the launch of a bucket notes of each member."""
    return f"{index}/{replica}"
