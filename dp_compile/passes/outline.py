"""Short text of a plan and a graph, without names that a tracer generates: it changes only if plan or graph change.

       ... 37 nodes                                                       other nodes in between
       bucket 0 = 2 gradients: 2.bias .. 2.weight: float32[96]
    >> launch 0 = all_reduce(bucket 0, sum): float32[96]                  a collective is launched
    << wait 0: float32[96]                                                its result is waited for
       return 2 tensors

In a backward of several modules, buckets of all but the first module are numbered `replica.bucket`.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from dp_compile.fx.collectives import is_collective, is_wait
from dp_compile.fx.edit import provenance_of
from dp_compile.fx.text import last_name, type_text
from dp_compile.passes.reduction import FLAT_BUCKET
from dp_compile.plan.buckets import Bucket, BucketPlan
from dp_compile.plan.words import count


def outline(graph: fx.Graph, plans: Sequence[BucketPlan]) -> str:
    """Return a line for each bucket, collective and wait. Types are from the `meta` of ATen or Dynamo nodes."""
    lines, between = [], 0
    for node in graph.nodes:
        provenance, what = provenance_of(node), type_text(node.meta.get("val", node.meta.get("example_value")))
        line = f"{_name(node)}: {what}"
        if node.op == "output":
            line = f"   return {count(len(node.all_input_nodes), 'tensor')}"
        elif is_wait(node):
            line = f"<< {line}"
        elif is_collective(node):
            given = [_name(each) for each in node.all_input_nodes]
            given += [each for each in node.args[1:2] if isinstance(each, str)]
            line = f">> {_name(node)} = {last_name(node)}({', '.join(given)}): {what}"
        elif node.target is FLAT_BUCKET and provenance is not None:
            replica, number = provenance.unit
            line = f"   {_name(node)} = {span(plans[replica].buckets[number])}: {what}"
        else:
            between += node.op != "placeholder"
            continue
        lines += [f"   ... {count(between, 'node')}", line] if between else [line]
        between = 0
    return "\n".join(lines) + "\n"


def _name(node: fx.Node) -> str:
    """Return how the outline names a node: `launch 0`, `wait 0`, `bucket 0`; for other nodes the op."""
    kind = "launch" if is_collective(node) else "wait" if is_wait(node) else "bucket"
    if kind == "bucket" and node.target is not FLAT_BUCKET:
        return "input" if node.op == "placeholder" else last_name(node)
    if (provenance := provenance_of(node)) is None:
        return f"{kind} of the model"
    replica, number = provenance.unit
    return f"{kind} {f'{replica}.' * (replica > 0)}{number}"


def span(bucket: Bucket) -> str:
    """Return the number of gradients of a bucket, the first and the last: `3 gradients: 2.bias .. 0.weight + flags`."""
    number, ends = bucket.span
    return f"{count(number, 'gradient')}: {ends}"
