"""Names for the nodes of a captured backward: parameters, gradients, buckets.

    primals_17                                  ->  blocks.0.expand.weight
    mm_3, what reduce_grad or flat_bucket gets  ->  grad blocks.0.expand.weight
    reduce_grad                                 ->  reduced blocks.0.expand.weight
    flat_bucket, all_reduce, wait_tensor        ->  bucket 2, launch 2, wait 2
    of two levels the second and third stage    ->  launch 2 between, wait 2 between; launch 2 gather, wait 2 gather

With several modules in one backward a bucket's number is `replica.bucket`, a parameter's name `replica:name`.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

from torch import fx

from dp_compile.fx.collectives import ALL_GATHER, is_launch, is_wait
from dp_compile.fx.edit import provenance_of
from dp_compile.passes.bucketing import waits_before
from dp_compile.passes.reduction import FLAT_BUCKET, REDUCE_GRAD
from dp_compile.plan.buckets import UNUSED_FLAGS, BucketPlan


def node_names(graph: fx.Graph, plans: Sequence[BucketPlan], inputs: Sequence[str | None]) -> dict[fx.Node, str]:
    """Names for the nodes that have one, at any stage: as Dynamo leaves a graph, or after the passes.

    `inputs`: the parameter that each input is, those in lists one by one; `None` for other tensors.
    """
    names = {node: name for node, name in zip(_inputs(graph), inputs, strict=False) if name is not None}

    def gradient(node: fx.Node, replica: int, name: str) -> str:
        """Name the gradient of a parameter; returns the parameter's name. Flags and unused gradients are inputs."""
        is_flags = name.startswith(UNUSED_FLAGS)
        name = f"{replica}:" * (len(plans) > 1) + ("flags" if is_flags else name)
        names.setdefault(node, name if is_flags else f"grad {name}")
        return name

    for node in (node for node in graph.nodes if node.op == "call_function"):
        args: Any = node.args
        if node.target is REDUCE_GRAD:
            source, index, replica = args[:3]
            known = {each.index: each.name for each in plans[replica].gradients}
            names[node] = f"reduced {gradient(source, replica, known.get(index, f'gradient {index}'))}"
        elif (provenance := provenance_of(node)) is not None and provenance.unit.replace(".", "").isdigit():
            replica, number = map(int, provenance.unit.split("."))  # of others another pass made the node
            unit = f"{replica}." * (len(plans) > 1) + str(number)
            if node.target is FLAT_BUCKET:
                for member, source in zip(provenance.members, args[0], strict=True):
                    gradient(source, replica, plans[replica].buckets[number].members[int(member)].gradient.name)
                names[node] = f"bucket {unit}"
            elif is_launch(node.target) or is_wait(node):
                launch, stage = node if is_launch(node.target) else args[0], ""
                if launch.target is ALL_GATHER:
                    stage = " gather"
                elif is_launch(launch.target) and waits_before(launch):
                    stage = " between"
                names[node] = f"{'launch' if launch is node else 'wait'} {unit}{stage}"
    return names


def _inputs(graph: fx.Graph) -> Iterator[fx.Node]:
    """What stands for each input. Dynamo hands a list over whole and takes its items out; not all need appear."""
    for node in graph.find_nodes(op="placeholder"):
        value = node.meta.get("example_value")
        if not isinstance(value, (list, tuple)):
            yield node
            continue
        items = {user.args[1]: user for user in node.users if user.target is operator.getitem}
        yield from (items.get(position, node) for position in range(len(value)))
