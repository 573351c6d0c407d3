"""A captured graph with our reductions in it.

    compiled autograd's graph               what is compiled
      accumulate_grad(p, g)                   accumulate_grad(p, g)
      call_hook(GradHook, p)          ->      reduce_accumulated(p, ...)      in the hook's place
      ...                                     ...
      return []                               reduce the gradients that are missing, and the flags
                                              return [], (reduced flags, reduced missing gradients ...)

Every graph holds one reduction for each gradient of the plan, whatever this rank's backward produced, so every rank
runs the same collectives.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from dp_compile._torch import dynamo
from dp_compile.engine.binding import Binding, Place, Sites
from dp_compile.engine.replica import Replica
from dp_compile.passes.reduction import REDUCE_GRAD, ReductionTag, emit


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    """A captured graph, what its sites mean in one backward, and how many tensors it takes."""

    graph_module: fx.GraphModule
    sites: Sites
    binding: Binding
    input_count: int


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is reduced: the modules in `synced`, by position, with what each of them did not use in this backward.

    `deferred`: all reductions stand at the end.
    """

    synced: tuple[int, ...]
    unused: Mapping[int, tuple[int, ...]]
    deferred: bool


def with_reductions(captured: CapturedGraph, replicas: Sequence[Replica], wanted: Wanted) -> fx.GraphModule:
    """A copy of the graph that also reduces. It returns its outputs, and the reduced flags and missing gradients."""
    graph, nodes = fx.Graph(), dict[fx.Node, fx.Node]()
    outputs = graph.graph_copy(captured.graph_module.graph, nodes)
    copied = {old.name: new for old, new in nodes.items()}
    hooked = _place_reductions(graph, copied, captured, replicas, wanted)
    inputs = copied["inputs"], captured.input_count
    reduced = _add_completion(graph, inputs, captured.binding, hooked, replicas, wanted)
    graph.output((outputs, tuple(reduced)))
    graph.lint()
    module = fx.GraphModule(captured.graph_module, graph, "CapturedBackward")
    dynamo.set_locals_to_steal(module, ["inputs"])
    return module


def _place_reductions(
    graph: fx.Graph,
    copied: Mapping[str, fx.Node],
    captured: CapturedGraph,
    replicas: Sequence[Replica],
    wanted: Wanted,
) -> dict[Place, tuple[fx.Node, bool]]:
    """Replace each call of one of our hooks by the reduction itself, or only take it out if all come at the end."""
    hooked: dict[Place, tuple[fx.Node, bool]] = {}
    for call, place, existing in zip(
        captured.sites.hook_calls, captured.binding.hooked, captured.binding.into_existing, strict=True
    ):
        if place is None:
            continue
        node = copied[call.node]
        parameter = node.args[1]
        assert isinstance(parameter, fx.Node)
        if replicas[place[0]].sync:
            hooked[place] = (parameter, existing)
            if not wanted.deferred:
                with graph.inserting_before(node):
                    graph.call_function(reduce_accumulated, (parameter, existing, *_tag(replicas, place)))
        node.replace_all_uses_with(parameter)
        graph.erase_node(node)
    return hooked


def _add_completion(
    graph: fx.Graph,
    inputs: tuple[fx.Node, int],
    binding: Binding,
    hooked: Mapping[Place, tuple[fx.Node, bool]],
    replicas: Sequence[Replica],
    wanted: Wanted,
) -> list[fx.Node]:
    """Reduce what no hook reduces: flags, unused parameters, and everything if reductions come at the end.

    `inputs`: the list of tensors, and how many there are without ours.
    """
    tensors, position = inputs
    start = next(node for node in graph.nodes if node.op != "placeholder")
    results: list[fx.Node] = []
    for ordinal in wanted.synced:
        replica = replicas[ordinal]
        sources: dict[int, fx.Node] = {}
        for index in (len(replica.parameters), *wanted.unused[ordinal]):
            if index == len(replica.parameters) or (ordinal, index) in binding.kept:
                # Early: compiled code empties the list, and if the backward breaks the rest runs after that.
                with graph.inserting_before(start):
                    sources[index] = graph.call_function(operator.getitem, (tensors, position))
                position += 1
            else:
                sources[index] = _zeros(graph, replica.parameters[index])
        done: dict[int, fx.Node] = {}
        after: fx.Node | None = None
        for index in (gradient.index for gradient in replica.plan.gradients):
            tag = _tag(replicas, (ordinal, index))
            if index in sources:
                after = done[index] = graph.call_function(emit, (sources[index], *tag, after))
            elif wanted.deferred:
                parameter, existing = hooked[ordinal, index]
                after = graph.call_function(reduce_accumulated, (parameter, existing, *tag, after))
            after = after if wanted.deferred else None
        results += [done[index] for index in sources]
    return results


def reduce_accumulated(
    parameter: nn.Parameter,
    existing: bool,
    index: int,
    replica: int,
    group: str,
    reduce_op: str,
    scale: float,
    after: torch.Tensor | None = None,
) -> torch.Tensor:
    """Traced in a hook's place: reduce the gradient that was just accumulated. A gradient that existed stays itself."""
    grad = parameter.grad
    assert grad is not None
    reduced = emit(grad, index, replica, group, reduce_op, scale, after)
    if existing:
        grad.copy_(reduced)
    else:
        parameter.grad = reduced
    return reduced


def _tag(replicas: Sequence[Replica], place: Place) -> tuple[int, int, str, str, float]:
    tag: ReductionTag = replicas[place[0]].tag(place[1], place[0])
    return (tag.index, tag.replica, tag.group, tag.reduce_op, tag.scale)


def _zeros(graph: fx.Graph, parameter: nn.Parameter) -> fx.Node:
    options: dict[str, Any] = {"dtype": parameter.dtype, "device": parameter.device}
    return graph.call_function(torch.zeros, (list(parameter.shape),), options)


def reductions_in(graph: fx.Graph) -> Counter[Place]:
    """The reductions in a graph as Dynamo leaves it: index and replica are the op's second and third argument."""
    found: Counter[Place] = Counter()
    for node in graph.find_nodes(op="call_function", target=REDUCE_GRAD):
        index, replica = node.args[1:3]
        assert isinstance(index, int)
        assert isinstance(replica, int)
        found[replica, index] += 1
    return found
