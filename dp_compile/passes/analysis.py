"""Which nodes of a graph are gradient reductions, and of what. Reads only."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from torch import fx

from dp_compile.fx.collectives import is_all_reduce
from dp_compile.fx.edit import provenance_of
from dp_compile.grad_reduction import REDUCE_GRAD, GradReduction, ReductionTag, match
from dp_compile.report import Refusal


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


def accounted(graph: fx.Graph) -> Counter[ReductionTag]:
    """How often each reduction is done in a graph, by an op of its own or as a member of a bucket.

    For a bucket, group and reduce op are read from the collective that really runs, not from what it was made of.
    """
    tags = Counter(reduction.tag for reduction in analyse(graph).reductions)
    for node in graph.nodes:
        provenance = provenance_of(node)
        if is_all_reduce(node) and provenance is not None:
            _, reduce_op, group = node.args
            for member in provenance.members:
                index, replica, scale = member.split("/")
                tags[ReductionTag(int(index), int(replica), str(group), str(reduce_op), float(scale))] += 1
    return tags
