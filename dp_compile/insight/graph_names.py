"""Names for the nodes of a captured backward: parameters, gradients, buckets.

    primals_17                                  ->  blocks.0.expand.weight
    mm_3, what reduce_grad or flat_bucket gets  ->  grad blocks.0.expand.weight
    flat_bucket, all_reduce, wait_tensor        ->  bucket 2, launch 2, wait 2
    of two levels the second and third stage    ->  launch 2 between, wait 2 between; launch 2 gather, wait 2 gather
    as_strided of a bucket that came back       ->  reduced blocks.0.expand.weight
    an optimizer's update, or what is in its place  ->  update of bucket 2; left for the next forward, bucket 2

With several modules in one backward a bucket's number is `replica.bucket`, a parameter's name `replica:name`. Of a
bucket with several tensors `/1` is the second.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import fx

from dp_compile.fx.collectives import is_all_gather, is_launch, is_wait
from dp_compile.fx.edit import Provenance, provenance_of
from dp_compile.passes.bucket_ops import FLAT_BUCKET
from dp_compile.passes.bucketing import waits_before
from dp_compile.passes.crossing import LEAVE
from dp_compile.passes.reduction import REDUCE_GRAD
from dp_compile.passes.updates import UPDATE, UPDATE_LATER
from dp_compile.plan.buckets import UNUSED_FLAGS, Bucket, BucketPlan

aten = torch.ops.aten


def node_names(graph: fx.Graph, plans: Sequence[BucketPlan], inputs: Sequence[str | None]) -> dict[fx.Node, str]:
    """Names for the nodes that have one.

    Args:
        graph: at any stage, as Dynamo leaves it or after the passes.
        plans: one for each replica in this backward.
        inputs: the parameter that each input is, those in lists one by one; `None` for other tensors.
    """
    naming = _Naming(plans)
    naming.names |= {node: name for node, name in zip(_inputs(graph), inputs, strict=False) if name is not None}
    for node in graph.nodes:
        if node.op == "call_function":
            naming.look_at(node)
    return naming.names


def _inputs(graph: fx.Graph) -> Iterator[fx.Node]:
    """What stands for each input. Dynamo hands a list over whole and takes its items out; not all need appear."""
    for node in graph.find_nodes(op="placeholder"):
        value = node.meta.get("example_value")
        if not isinstance(value, (list, tuple)):
            yield node
            continue
        items = {user.args[1]: user for user in node.users if user.target is operator.getitem}
        yield from (items.get(position, node) for position in range(len(value)))


class _Naming:
    """Names found so far, going through a graph from its start to its end."""

    def __init__(self, plans: Sequence[BucketPlan]) -> None:
        self.names: dict[fx.Node, str] = {}
        self._plans = plans
        self._gradients = {(number, each.index): each.name for number, of in enumerate(plans) for each in of.gradients}
        self._lies_in: dict[fx.Node, tuple[Provenance, int]] = {}
        """Tensors of buckets that came back: the bucket, and which of its tensors."""

    def _of(self, replica: int, name: str) -> str:
        """A gradient's name, with the number of its module if there are several."""
        name = "flags" if name.startswith(UNUSED_FLAGS) else name
        return f"{replica}:{name}" if len(self._plans) > 1 else name

    def _unit(self, unit: str) -> str:
        return unit if len(self._plans) > 1 else unit.partition(".")[2]

    def _bucket(self, provenance: Provenance | None) -> tuple[int, Bucket] | None:
        """A bucket by the name that passes give it; `None` for what other passes make."""
        replica, _, number = ("" if provenance is None else provenance.unit).partition(".")
        if not (replica.isdigit() and number.isdigit() and int(replica) < len(self._plans)):
            return None
        buckets = self._plans[int(replica)].buckets
        return (int(replica), buckets[int(number)]) if int(number) < len(buckets) else None

    def look_at(self, node: fx.Node) -> None:
        provenance = provenance_of(node)
        if node.target is REDUCE_GRAD:
            grad, index, replica = cast(Any, node.args[:3])
            name = self._of(replica, self._gradients.get((replica, index), f"gradient {index}"))
            self._name_gradient(grad, name)
            self.names[node] = f"reduced {name}"
        elif node.target in (UPDATE_LATER, UPDATE):
            self.names[node] = f"update of bucket {self._unit(f'{node.args[3]}.{node.args[5]}')}"
        elif node.target is LEAVE:
            numbers: Any = node.args[1]
            units = ", ".join(self._unit(f"{node.args[3]}.{number}") for number in numbers)
            self.names[node] = f"left for the next forward, bucket {units}"
        elif provenance is not None and (found := self._bucket(provenance)) is not None:
            self._look_at_bucket(node, provenance, *found)

    def _name_gradient(self, node: fx.Node, name: str) -> None:
        # The flags and gradients of unused parameters are inputs.
        self.names.setdefault(node, name if name.endswith("flags") else f"grad {name}")

    def _look_at_bucket(self, node: fx.Node, provenance: Provenance, replica: int, bucket: Bucket) -> None:
        unit, given = self._unit(provenance.unit), cast(Any, node.args[0] if node.args else None)
        if node.target is FLAT_BUCKET:
            for number, source in zip(provenance.members, given, strict=True):
                self._name_gradient(source, self._of(replica, bucket.members[int(number)].label))
            launched: list[Any] = [user.args[0] for user in node.users if is_launch(user.target)]
            several = [f"/{each.index(node)}" for each in launched if isinstance(each, (list, tuple))]
            self.names[node] = f"bucket {unit}{''.join(several[:1])}"
        elif is_launch(node.target):
            self.names[node] = f"launch {unit}{_stage_of(node)}"
        elif node.target is operator.getitem:
            self.names[node] = f"launch {unit}/{node.args[1]}"
        elif is_wait(node):
            _, slash, tensor = self.names.get(given, "").partition("/")
            self.names[node] = f"wait {unit}{slash}{tensor}{_stage_of(given)}"
            self._lies_in[node] = provenance, int(tensor or 0)
        elif node.target is aten.as_strided.default and given in self._lies_in:
            place = self._lies_in[given][1], int(str(node.args[3])) if len(node.args) > 3 else 0
            for member, own in zip(bucket.members, bucket.places, strict=True):
                if own == place and member.numel == node.meta["val"].numel():
                    self.names[node] = f"reduced {self._of(replica, member.label)}"


def _stage_of(launch: fx.Node) -> str:
    """Which stage of several a launch is; nothing for the first."""
    if is_all_gather(launch):
        return " gather"
    return " between" if is_launch(launch.target) and waits_before(launch) else ""
