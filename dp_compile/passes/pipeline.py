"""Run passes: time them, check what they leave, keep a record, give Inductor's cache a key. Passes do none of it."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from dp_compile._torch import inductor
from dp_compile.fx.collectives import is_collective
from dp_compile.fx.memory import hold
from dp_compile.fx.text import last_name
from dp_compile.passes.bucketing import BucketReductions
from dp_compile.passes.reduction import REDUCE_GRAD, reductions_in
from dp_compile.passes.result import GraphPass, PassRecord, is_ours
from dp_compile.passes.verify import Checks
from dp_compile.plan.buckets import BucketPlan

SOURCES = tuple(sorted(str(path) for path in Path(__file__).parents[1].rglob("*.py")))
"""The whole package: all that decides what a backward becomes is written there."""


class Pipeline(inductor.CustomGraphPass):
    """The passes of one captured backward, in Inductor's own form of a graph pass.

    Args:
        passes: in the order in which they run. What they leave of the reductions becomes the buckets of the plan.
        plans: one for each replica in this backward; a reduction names its replica by position.
        on_record: called with all records after a run.
        held: for each input of the graph, whether its memory is kept elsewhere, as a module keeps its parameters.
        on_stage: called with the graph as it comes, as `analysed`, and after each pass, by its name, before the check.
    """

    def __init__(
        self,
        passes: Sequence[GraphPass],
        plans: Sequence[BucketPlan],
        on_record: Callable[[tuple[PassRecord, ...]], None],
        held: Sequence[bool] = (),
        on_stage: Callable[[str, fx.Graph], None] | None = None,
    ) -> None:
        self.passes, self.plans, self.on_record, self.held = tuple(passes), tuple(plans), on_record, tuple(held)
        self.on_stage = on_stage or (lambda stage, graph: None)

    def __call__(self, graph: fx.Graph) -> None:
        # Accumulation leaves dead allocations that would count as users of a gradient.
        graph.eliminate_dead_code()
        hold(graph, self.held)
        checks, others = Checks(graph, self.plans), set(filter(is_collective, graph.nodes))
        records = []
        self.on_stage("analysed", graph)
        for graph_pass in self.passes:
            before, start = _op_counts(graph), time.perf_counter()
            result = graph_pass(graph, self.plans)
            self.on_stage(graph_pass.name, graph)
            checks.run(graph, after=graph_pass.name)
            duration_ms = (time.perf_counter() - start) * 1e3
            collectives = sum(
                (is_collective(node) and node not in others) or node.target is REDUCE_GRAD for node in graph.nodes
            )
            changes = _changes(before, _op_counts(graph))
            records.append(PassRecord(graph_pass.name, result, changes, duration_ms, collectives))
        if reductions_in(graph):
            BucketReductions()(graph, self.plans)
            checks.run(graph, after=BucketReductions.name)
        self.on_record(tuple(records))

    def uuid(self) -> Any:
        """Changes with our sources, with all that passes are given, and with torch.

        `None`, "never from a cache" for Inductor, with a pass of the user's: what it does may have changed.
        """
        if not all(map(is_ours, self.passes)):
            return None
        text = repr((inductor.source_hash(SOURCES), torch.__version__, self.passes, self.plans, self.held))
        return hashlib.sha256(text.encode()).hexdigest()


def _op_counts(graph: fx.Graph) -> Counter[str]:
    """How often each op is called, under its last name."""
    return Counter(last_name(node) for node in graph.nodes if node.op == "call_function")


def _changes(before: Counter[str], after: Counter[str]) -> tuple[str, ...]:
    """How the counts of ops differ, `mm 4 -> 3`, by name."""
    names = sorted({*before, *after})
    return tuple(f"{name} {before[name]} -> {after[name]}" for name in names if before[name] != after[name])
