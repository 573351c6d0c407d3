"""Run the passes, verify the graph after each, and compute the key for Inductor's cache."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx

from dp_compile._torch import inductor
from dp_compile.fx import edit
from dp_compile.fx.collectives import is_collective
from dp_compile.fx.memory import hold, viewed_by
from dp_compile.passes.crossing import defer_reductions
from dp_compile.passes.result import GraphPass, PassResult
from dp_compile.passes.verify import Checks
from dp_compile.plan.buckets import BucketPlan

# The whole package, for the cache key: any file may affect the compiled backward.
SOURCES = tuple(sorted(str(path) for path in Path(__file__).parents[1].rglob("*.py")))


@dataclass(eq=False)
class Pipeline(inductor.CustomGraphPass):
    """The passes of one captured backward, as a custom graph pass of Inductor.

    Args:
        passes: in execution order.
        plans: one for each replica in this backward; a reduction refers to its replica by position.
        on_result: called with the combined result of all passes.
        held: for each input of the graph, whether its memory outlives the graph, as a parameter's memory does.
        crosses: for each replica and optimizer, whether updates may complete after the backward.
        on_stage: called with stage name and graph: `analysed` at first, then each pass's name, before the check.
    """

    passes: Sequence[GraphPass]
    plans: Sequence[BucketPlan]
    on_result: Callable[[PassResult], None]
    held: Sequence[bool] = ()
    crosses: Sequence[Sequence[bool]] = ()
    on_stage: Callable[[str, fx.Graph], None] | None = None

    def __call__(self, graph: fx.Graph) -> None:
        # Before the checks record the graph: for the passes, such a copy is the source of a gradient.
        copy_what_is_returned_twice(graph)
        # Accumulation leaves dead allocations that would count as users of a gradient.
        graph.eliminate_dead_code()
        hold(graph, self.held)
        checks, results, on_stage = Checks(graph, self.plans), [], self.on_stage or (lambda stage, graph: None)
        on_stage("analysed", graph)
        for graph_pass in self.passes:
            results.append(graph_pass(graph, self.plans))
            on_stage(graph_pass.name, graph)
            checks.run(graph, after=graph_pass.name)
        if any(map(any, self.crosses)):  # the checks before this expect a wait for every launch
            defer_reductions(graph, self.plans, self.crosses)
        self.on_result(
            PassResult(
                tuple(refusal for each in results for refusal in each.refusals),
                next((each.memory for each in results if each.memory is not None), None),
                sum(is_collective(node) and node not in checks.waits for node in graph.nodes),
            )
        )

    def uuid(self) -> Any:
        """Return a cache key: a hash of our sources, the torch version and all inputs of the passes."""
        options = tuple(self.passes), tuple(self.plans), self.held, self.crosses
        text = repr((inductor.source_hash(SOURCES), torch.__version__, *options))
        return hashlib.sha256(text.encode()).hexdigest()


def copy_what_is_returned_twice(graph: fx.Graph) -> None:
    """Give each output its own memory: an in-place write to a gradient, as in clipping, must not change another one.

    autograd copies a gradient that it returns for two parameters, and so does the graph of compiled autograd. Inductor
    removes these copies as no-ops (`remove_noop_ops`, torch 2.13): the gradients of a weight and of a tensor added to
    it would become one tensor. A reduced gradient has its own place in a bucket and needs no copy.
    """
    output, taken, clone = graph.output_node(), set[fx.Node](), torch.ops.aten.clone.default

    def own(value: fx.Node) -> fx.Node:
        if not isinstance(value.meta.get("val"), torch.Tensor):
            return value
        root = value  # the base of its views, by op schemas: storages in `meta` are stale after copies were removed
        while edit.provenance_of(root) is None and (viewed := viewed_by(root)) is not None:
            root = viewed
        if root not in taken:
            taken.add(root)
            return value
        with graph.inserting_before(output):
            copy = graph.call_function(clone, (value,))
        copy.meta["val"] = clone(value.meta["val"])
        return copy

    output.args = fx.map_arg(output.args, own)
