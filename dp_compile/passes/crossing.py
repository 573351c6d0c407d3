"""Ops for reductions that end after the backward: one op leaves them in flight, the other waits for them.

    backward                                            next forward
      all_reduce(bucket)                                  wait_for_parameters([weights that are read first])
      leave_in_flight([bucket], ...)                      ... reads them
                                                          wait_for_parameters([the next ones])

The first op passes launched reductions to an optimizer, which keeps them. The second op precedes the first reader of
some parameters: it waits for their reductions, and the optimizer updates them. A parameter is identified by its memory
address alone. So compiled code of a forward works for every plan and every module of its class.

The second op mutates parameters. AOTAutograd copies mutated tensors (torch 2.13), so the op would silently be wrong in
a graph that AOTAutograd traces. Both ops are inserted into the final graph, which only Inductor's scheduler sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import fx
from torch.fx.node import has_side_effect

from dp_compile.fx import edit
from dp_compile.fx.collectives import is_collective, is_wait
from dp_compile.passes.memory import make_op, nothing
from dp_compile.passes.updates import UPDATE, Update, read_update, updates_by
from dp_compile.plan.buckets import BucketPlan
from dp_compile.plan.crossing import why_not_left


class InFlight(Protocol):
    """A parameter update whose reductions are in flight."""

    def complete(self) -> None:
        """Wait for the reductions and update the parameters; no-op after the first call."""


in_flight: dict[int, InFlight] = {}  # by parameter address, for all modules: compiled forwards have no other key


def wait_for_parameters(parameters: Sequence[torch.Tensor], after: torch.Tensor | None = None) -> None:
    """Complete the updates in flight of these parameters. `after` is not read; it only orders the op after a node."""
    if in_flight:
        for parameter in parameters:
            found = in_flight.get(parameter.data_ptr())
            if found is not None:
                found.complete()


def _leave(
    launched: Sequence[torch.Tensor], buckets: Sequence[int], indices: Sequence[int], replica: int, optimizer: int
) -> None:
    plan, optimizers = updates_by(replica)
    given = [(number, plan.buckets[number]) for number in buckets]
    optimizers[optimizer].deferred.leave(given, indices, launched)


_LEAVE = "leave_in_flight(Tensor[] launched, int[] buckets, int[] indices, int replica, int optimizer) -> ()"
_WAIT = "wait_for_parameters(Tensor(a!)[] parameters, Tensor? after=None) -> ()"
LEAVE = has_side_effect(make_op(_LEAVE, _leave))
WAIT_FOR_PARAMETERS = has_side_effect(make_op(_WAIT, wait_for_parameters))
START = has_side_effect(make_op("forward_starts(bool training, bool of_part) -> ()", nothing))
"""Traced at the start of the forward of a module or of a part, for the backend: see `take_starts_out`. The argument
`training` makes Dynamo guard on the mode: a graph break in evaluation mode does not prevent compilation in training."""


def take_starts_out(graph_module: fx.GraphModule) -> tuple[bool, bool]:
    """Remove `START` ops from a Dynamo graph. Return whether the graph starts a module's forward, and a part's.

    A checkpointed part starts in a nested graph (`torch.utils.checkpoint`), where torch 2.13 rejects ops with effects.
    """
    of_part = set[bool]()
    for each in graph_module.modules():
        if isinstance(each, fx.GraphModule):
            for node in each.graph.find_nodes(op="call_function", target=START):
                of_part.add(bool(node.args[1]))
                each.graph.erase_node(node)
                each.recompile()
    return False in of_part, True in of_part


def defer_reductions(graph: fx.Graph, plans: Sequence[BucketPlan], crosses: Sequence[Sequence[bool]]) -> None:
    """Defer updates of whole buckets past a captured backward. Called after all passes, because waits are removed.

    `crosses`: for each replica and optimizer, whether the optimizer keeps reductions in flight.
    """
    for node in graph.find_nodes(op="call_function", target=UPDATE):
        update = read_update(node)
        if crosses[update.replica][update.optimizer]:
            _defer(graph, node, update, plans[update.replica])


def _defer(graph: fx.Graph, node: fx.Node, update: Update, plan: BucketPlan) -> None:
    def is_between(node: fx.Node) -> bool:  # a view or cast between wait and update
        return node.op == "call_function" and not is_collective(node) and not is_wait(node)

    found = edit.sources_of(update.gradients, is_between)
    between, waits = set(filter(is_between, found)), set(filter(is_wait, found))
    if any(user not in {*between, node} for each in (*between, *waits) for user in each.users):
        return  # Other nodes read the reduced values: flags, another optimizer, the graph's output.
    launched = dict[int, fx.Node]()
    for wait in waits:
        made_for = edit.provenance_of(wait)
        if made_for is None or made_for.unit[0] != update.replica or why_not_left(plan.buckets[made_for.unit[1]]):
            return
        launched[made_for.unit[1]] = wait.all_input_nodes[0]
    numbers = sorted(launched)
    with graph.inserting_before(node):
        given = [launched[number] for number in numbers], numbers, update.indices
        left = graph.call_function(LEAVE, (*given, update.replica, update.optimizer))
    left.meta["val"] = None
    graph.erase_node(node)
    for each in sorted((*between, *waits), key=list(graph.nodes).index, reverse=True):
        graph.erase_node(each)


@dataclass(frozen=True, slots=True)
class CompleteBeforeUse:
    """Insert waits for parameter updates into a forward graph, each right before the first reader.

    Args:
        parameters: positions of the parameters among the graph's inputs.
        inputs: number of graph inputs; if the graph has another number, all its tensors are waited for at the start.
        most: largest number of wait ops, each of which costs 2 to 3 microseconds (torch 2.13, CPU).
    """

    parameters: tuple[int, ...]
    inputs: int
    most: int = 32

    def __call__(self, graph: fx.Graph) -> None:
        inputs = graph.find_nodes(op="placeholder")
        if any(node.name.startswith("tangents") for node in inputs):
            return  # A backward graph: the forward has waited for its parameters.
        nodes, position, first = list(graph.nodes), edit.positions(graph), dict[fx.Node, fx.Node]()
        if len(inputs) == self.inputs:
            for node in (inputs[each] for each in self.parameters):
                if readers := [user for user in node.users if user.op != "output"]:
                    first[node] = min(readers, key=position.__getitem__)
            read = sorted(first, key=lambda node: position[first[node]])
        else:
            read = [node for node in inputs if isinstance(node.meta.get("val"), torch.Tensor) and node.users]
            first = dict.fromkeys(read, next(node for node in nodes if node.op != "placeholder"))
        size = -(-len(read) // self.most)
        for group in (read[start : start + size] for start in range(0, len(read), max(1, size))):
            reader = first[group[0]]
            with graph.inserting_before(reader):
                # Without a computed input, Inductor would schedule every wait at the start.
                before = reversed(nodes[: position[reader]])
                after = next((node for node in before if node.target in _PRODUCTS), None)
                graph.call_function(WAIT_FOR_PARAMETERS, (group, after)).meta["val"] = None


_PRODUCTS: Final = frozenset(
    op for name in ("mm", "addmm", "bmm", "baddbmm", "convolution") for op in [getattr(torch.ops.aten, name).default]
)
"""Library kernels: Inductor stores their results in memory in any case."""
