"""Run passes: time them, verify what they leave, keep a record, give Inductor's cache a key. Passes do none of it."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from dp_compile._torch import inductor
from dp_compile.fx.memory import hold
from dp_compile.fx.text import op_counts
from dp_compile.passes.reduction import is_reduction
from dp_compile.passes.result import GraphPass, PassRecord
from dp_compile.passes.sources import source_key
from dp_compile.passes.verify import check_reductions, facts_of, reductions_of, verify
from dp_compile.plan.buckets import BucketPlan

SOURCES = tuple(sorted(str(path) for path in Path(__file__).parents[1].rglob("*.py")))
"""All of this package: whatever becomes of a backward is written there."""


class Pipeline(inductor.CustomGraphPass):
    """The passes of one captured backward, in Inductor's own form of a graph pass.

    Args:
        passes: in the order in which they run.
        plans: one for each replica in this backward; a reduction names its replica by position.
        on_record: called with all records after a run.
        held: for each input of the graph, whether somebody else keeps its memory, as a module does its parameters.
        on_stage: shown the graph as it comes, as `analysed`, and after each pass, by its name, before it is verified.
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
        self.on_stage = on_stage
        self._source_keys: tuple[str | None, ...] | None = None

    def __call__(self, graph: fx.Graph) -> None:
        # Accumulation leaves dead allocations behind that would count as users of a gradient.
        graph.eliminate_dead_code()
        hold(graph, self.held)
        facts, reductions = facts_of(graph), reductions_of(graph, self.plans)
        records = []
        self._show("analysed", graph)
        for graph_pass in self.passes:
            before, start = op_counts(graph), time.perf_counter()
            result = graph_pass(graph, self.plans)
            self._show(graph_pass.name, graph)
            verify(graph, after=graph_pass.name, before=facts)
            check_reductions(graph, reductions, self.plans, made_by=graph_pass.name)
            duration_ms = (time.perf_counter() - start) * 1e3
            # Reductions that the graph came with, each with its waits, are somebody else's.
            ours = sum(is_reduction(node) and node.name not in facts.waits for node in graph.nodes)
            records.append(PassRecord(graph_pass.name, result, before, op_counts(graph), duration_ms, ours))
        self.on_record(tuple(records))

    def _show(self, stage: str, graph: fx.Graph) -> None:
        if self.on_stage is not None:
            self.on_stage(stage, graph)

    def uuid(self) -> Any:
        """Changes with our sources and those of the passes, with all that the passes are given, and with torch.

        `None`, which Inductor takes for "never from a cache", if the source of a pass cannot be known.
        """
        if self._source_keys is None:
            self._source_keys = tuple(source_key(graph_pass) for graph_pass in self.passes if not _is_ours(graph_pass))
        if None in self._source_keys:
            return None
        ours = inductor.source_hash(SOURCES)
        text = repr((ours, self._source_keys, torch.__version__, self.passes, self.plans, self.held))
        return hashlib.sha256(text.encode()).hexdigest()


def _is_ours(graph_pass: GraphPass) -> bool:
    """Whether the file of a pass is among our sources anyway."""
    return type(graph_pass).__module__.startswith(f"{__package__}.")
