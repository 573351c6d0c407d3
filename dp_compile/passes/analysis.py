"""Which nodes of a graph are gradient reductions, and of what. Reads only."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from torch import fx

from dp_compile.errors import InvalidGraphError
from dp_compile.fx.collectives import is_collective
from dp_compile.fx.edit import provenance_of
from dp_compile.passes.reduction import REDUCE_GRAD, GradReduction, match
from dp_compile.passes.result import Refusal
from dp_compile.plan.buckets import Rows, covers


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

    By replica and index. All pieces of a gradient together count as one reduction.

    Raises:
        InvalidGraphError: the pieces of a gradient overlap or miss rows.
    """
    found = Counter((each.replica, each.index) for each in analyse(graph).reductions)
    pieces: dict[tuple[tuple[int, int], int], list[Rows]] = {}
    for node in graph.nodes:
        provenance = provenance_of(node)
        if is_collective(node) and provenance is not None:
            for mark in map(MemberMark.read, provenance.members):
                which = mark.replica, mark.index
                if mark.rows is None:
                    found[which] += 1
                else:
                    pieces.setdefault((which, mark.n_rows), []).append(mark.rows)
    for (which, n_rows), blocks in pieces.items():
        if not covers(blocks, n_rows):
            raise InvalidGraphError(
                f"the pieces {sorted(blocks)} of gradient {which[1]} overlap or miss some of its {n_rows} rows"
            )
        found[which] += 1
    return found


@dataclass(frozen=True, slots=True)
class MemberMark:
    """What the launch of a bucket notes of each member; a piece has `rows` of the gradient's `n_rows`."""

    index: int
    replica: int
    rows: Rows | None
    n_rows: int

    def write(self) -> str:
        piece = "" if self.rows is None else f"/{self.rows[0]}:{self.rows[1]}:{self.n_rows}"
        return f"{self.index}/{self.replica}{piece}"

    @staticmethod
    def read(text: str) -> MemberMark:
        index, replica, *piece = text.split("/")
        first, last, n_rows = map(int, piece[0].split(":")) if piece else (0, 0, 0)
        return MemberMark(int(index), int(replica), (first, last) if piece else None, n_rows)
