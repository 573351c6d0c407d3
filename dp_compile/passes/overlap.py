"""Order collectives so that they run while the backward still computes. The only pass that moves nodes.

    a  b  launch(a)  wait(a)  use(a)  c   ->   a  launch(a)  b  c  ...  wait(a)  use(a)

Each collective is launched as soon as its last input is there, but never before the one that precedes it in the
plan; each wait goes to just before its first use. Nothing here depends on a belief about time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from dp_compile.fx import edit
from dp_compile.fx.collectives import is_all_reduce, is_wait
from dp_compile.plan import BucketPlan
from dp_compile.report import PassResult


@dataclass(frozen=True, slots=True)
class ScheduleCollectives:
    """Launch early, wait late, keep the order of the launches."""

    name: ClassVar[str] = "schedule-collectives"
    realises_plan: ClassVar[bool] = False

    def __call__(self, graph: fx.Graph, plans: Sequence[BucketPlan]) -> PassResult:
        now = edit.positions(graph)
        launches = [node for node in graph.nodes if is_all_reduce(node) and edit.provenance_of(node)]
        wish: dict[fx.Node, float] = {}
        for node in reversed(graph.nodes):
            if edit.provenance_of(node) is None:
                continue
            if _follows_a_wait(node):
                uses = [wish.get(user, now[user]) for user in node.users]
                wish[node] = min(uses, default=now[node]) - 0.5 / len(now)
            else:
                wish[node] = -1.0
        changed = edit.sort_stably(graph, lambda node: wish.get(node, now[node]), chain=launches)
        return PassResult(changed=changed)


def _follows_a_wait(node: fx.Node) -> bool:
    """Whether a node of a bucket hands results back, rather than prepare a launch."""
    while not is_wait(node):
        if is_all_reduce(node) or not node.all_input_nodes:
            return False
        node = node.all_input_nodes[0]
        if edit.provenance_of(node) is None:
            return False
    return True
