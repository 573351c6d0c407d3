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
from typing import Any

import torch
from torch import fx

from dp_compile.fx.collectives import is_all_gather, is_launch, is_wait
from dp_compile.fx.edit import Provenance, provenance_of
from dp_compile.passes.bucket_ops import FLAT_BUCKET
from dp_compile.passes.bucketing import waits_before
from dp_compile.passes.crossing import LEAVE
from dp_compile.passes.reduction import REDUCE_GRAD, GradReduction, match
from dp_compile.passes.updates import UPDATE, UPDATE_LATER
from dp_compile.plan.buckets import UNUSED_FLAGS, Bucket, BucketPlan, Member

aten = torch.ops.aten


def node_names(graph: fx.Graph, plans: Sequence[BucketPlan], inputs: Sequence[str | None]) -> dict[fx.Node, str]:
    """Names for the nodes that have one.

    Args:
        graph: at any stage, as Dynamo leaves it or after the passes.
        plans: one for each replica in this backward.
        inputs: the parameter that each input is, those in lists one by one; `None` for other tensors.
    """
    naming = _Naming(plans)
    for node, name in zip(_inputs(graph), inputs, strict=False):
        if name is not None:
            naming.names[node] = name
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


def _position_in_launch(tensor: fx.Node) -> str:
    """Which of the tensors of a grouped launch this is, as `/1`; nothing if it is launched alone."""
    for user in tensor.users:
        if is_launch(user.target) and isinstance(user.args[0], (list, tuple)):
            return f"/{user.args[0].index(tensor)}"
    return ""


def _stage_of(launch: fx.Node) -> str:
    """Which stage of several a launch is; nothing for the first."""
    if is_all_gather(launch):
        return " gather"
    return " between" if is_launch(launch.target) and waits_before(launch) else ""


class _Naming:
    """Names found so far, going through a graph from its start to its end."""

    def __init__(self, plans: Sequence[BucketPlan]) -> None:
        self.names: dict[fx.Node, str] = {}
        self._plans = plans
        self._gradients = {
            (replica, gradient.index): self._of_replica(replica, gradient.name)
            for replica, plan in enumerate(plans)
            for gradient in plan.gradients
        }
        self._lies_in: dict[fx.Node, tuple[Provenance, int]] = {}
        """Tensors of buckets that came back: the bucket, and which of its tensors."""

    def _of_replica(self, replica: int, name: str) -> str:
        name = "flags" if name == UNUSED_FLAGS else name
        return f"{replica}:{name}" if len(self._plans) > 1 else name

    def _member(self, replica: int, member: Member) -> str:
        is_flags = member.gradient.name == UNUSED_FLAGS
        return self._of_replica(replica, UNUSED_FLAGS if is_flags else member.label)

    def _unit(self, unit: str) -> str:
        return unit if len(self._plans) > 1 else unit.partition(".")[2]

    def _bucket(self, unit: str) -> tuple[int, Bucket] | None:
        """A bucket by the name that passes give it; `None` for what other passes make."""
        replica, _, number = unit.partition(".")
        if not (replica.isdigit() and number.isdigit() and int(replica) < len(self._plans)):
            return None
        buckets = self._plans[int(replica)].buckets
        return (int(replica), buckets[int(number)]) if int(number) < len(buckets) else None

    def look_at(self, node: fx.Node) -> None:
        provenance = provenance_of(node)
        if node.target is REDUCE_GRAD:
            reduction = match(node)
            if isinstance(reduction, GradReduction):
                place = reduction.replica, reduction.index
                name = self._gradients.get(place, f"gradient {place[1]} of module {place[0]}")
                self._name_gradient(reduction.grad, name)
                self.names[node] = f"reduced {name}"
        elif node.target in (UPDATE_LATER, UPDATE):
            self.names[node] = f"update of bucket {self._numbers(node.args[3], (node.args[5],))}"
        elif node.target is LEAVE:
            self.names[node] = f"left for the next forward, bucket {self._numbers(node.args[3], node.args[1])}"
        elif provenance is not None and self._bucket(provenance.unit) is not None:
            self._look_at_bucket(node, provenance)

    def _numbers(self, replica: Any, buckets: Any) -> str:
        """Buckets as they are called elsewhere."""
        return ", ".join(self._unit(f"{replica}.{number}") for number in buckets)

    def _name_gradient(self, node: fx.Node, name: str) -> None:
        # The flags and gradients of unused parameters are inputs.
        self.names.setdefault(node, name if name.endswith("flags") else f"grad {name}")

    def _look_at_bucket(self, node: fx.Node, provenance: Provenance) -> None:
        unit = self._unit(provenance.unit)
        if node.target is FLAT_BUCKET:
            self._name_members(node, provenance)
            self.names[node] = f"bucket {unit}{_position_in_launch(node)}"
        elif is_launch(node.target):
            self.names[node] = f"launch {unit}{_stage_of(node)}"
        elif node.target is operator.getitem:
            self.names[node] = f"launch {unit}/{node.args[1]}"
        elif is_wait(node):
            source = node.args[0]
            assert isinstance(source, fx.Node)
            _, slash, tensor = self.names.get(source, "").partition("/")
            self.names[node] = f"wait {unit}{slash}{tensor}{_stage_of(source)}"
            self._lies_in[node] = provenance, int(tensor or 0)
        elif node.target is aten.as_strided.default:
            self._name_view(node)

    def _name_members(self, node: fx.Node, provenance: Provenance) -> None:
        found, sources = self._bucket(provenance.unit), node.args[0]
        assert found is not None
        assert isinstance(sources, (list, tuple))
        for number, source in zip(provenance.members, sources, strict=True):
            assert isinstance(source, fx.Node)
            self._name_gradient(source, self._member(found[0], found[1].members[int(number)]))

    def _member_of(self, wait: fx.Node, offset: int, numel: int) -> tuple[int, Member] | None:
        provenance, tensor = self._lies_in[wait]
        found = self._bucket(provenance.unit)
        assert found is not None
        replica, bucket = found
        for member, place in zip(bucket.members, bucket.places, strict=True):
            if place == (tensor, offset) and member.numel == numel:
                return replica, member
        return None

    def _name_view(self, node: fx.Node) -> None:
        source, offset = node.args[0], int(str(node.args[3])) if len(node.args) > 3 else 0
        assert isinstance(source, fx.Node)
        if source in self._lies_in:
            found = self._member_of(source, offset, node.meta["val"].numel())
            if found is not None:
                self.names[node] = f"reduced {self._member(*found)}"
