"""What the nodes of a captured graph make, before anything is traced or compiled: tensors without memory.

Compiled autograd drops what it knew of its nodes (torch 2.13, `end_capture`: they were made with dummies). But the
inputs of a backward are at hand, and most nodes are aten ops of AOTAutograd's backward: they run once on fake tensors.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from dp_compile._torch import dynamo
from dp_compile.engine.binding import Binding, Place, Sites
from dp_compile.passes.estimates import Accumulation, ready_shares
from dp_compile.plan.ready_times import ModelCollective

logger = logging.getLogger("dp_compile.capture")


def estimates_of(
    graph_module: fx.GraphModule,
    sites: Sites,
    binding: Binding,
    inputs: Sequence[Any],
    sizes: Any,
    scalars: Any,
    hooks: Any,
) -> tuple[dict[Place, float], tuple[ModelCollective, ...]]:
    """When the gradients of a backward are ready, and what its model sends, from its graph; nothing if it does not say.

    It does not where the shape of a gradient depends on data, or on what a hook of the user's puts in its place.
    """
    values = fake_values(graph_module, inputs, sizes, scalars, hooks)
    found = dict(zip(sites.accumulations, _accumulations(graph_module.graph), strict=True))
    accumulations: dict[Place, Accumulation] = {}
    for call, place, adds in zip(sites.hook_calls, binding.hooked, binding.into_existing, strict=True):
        if place is not None:
            accumulations[place] = found[call.parameter]._replace(adds=adds)
    unknown = [
        place for place, each in accumulations.items() if not isinstance(values.get(each.gradient), torch.Tensor)
    ]
    if unknown:
        logger.debug("a captured graph does not say when %d of its gradients are ready", len(unknown))
        return {}, ()
    found_in_graph = ready_shares(list(accumulations.values()), values)
    return dict(zip(accumulations, found_in_graph.gradients, strict=True)), found_in_graph.collectives


def _accumulations(graph: fx.Graph) -> Iterator[Accumulation]:
    for node in graph.nodes:
        gradient = dynamo.accumulated(node)
        if gradient is not None:
            yield Accumulation(node, gradient, adds=False)


def fake_values(
    graph_module: fx.GraphModule, inputs: Sequence[Any], sizes: Any, scalars: Any, hooks: Any = ()
) -> dict[fx.Node, Any]:
    """A fake tensor, or a list of them, for each node of which the inputs of a backward tell it.

    No code of the user's runs: of a function written in Python the engine's check of its outputs tells the shapes.
    Among `hooks` are also meshes, of which AOTAutograd's code makes DTensors.
    """
    given = {"inputs": inputs, "sizes": sizes, "scalars": scalars, "hooks": hooks}
    values: dict[fx.Node, Any] = {}
    with torch.no_grad(), dynamo.fake_tensors() as mode:
        for node in graph_module.graph.nodes:
            try:
                if node.op == "placeholder":
                    value = [_fake(mode, each) for each in given[node.name]]
                elif node.op == "get_attr":
                    value = _fake(mode, operator.attrgetter(node.target)(graph_module))
                else:
                    value = _call(node, values)
            except LookupError:
                pass
            except Exception as error:
                # Whatever an op has against fake tensors: of this node nothing is known, nor of what is made of it.
                logger.debug("what %s makes is not known: %s", node, error)
            else:
                values[node] = value
    return values


def _fake(mode: Any, value: Any) -> Any:
    return mode.from_tensor(value) if isinstance(value, torch.Tensor) else value


def _as_checked(value: Any, like: dynamo.GradientLike | None) -> Any:
    """The engine's check of a gradient adds up what was broadcast, and casts."""
    if like is None or (isinstance(value, torch.Tensor) and (value.shape, value.dtype) == (like.shape, like.dtype)):
        return value
    return like.make()


def _call(node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    """What a call makes.

    Raises:
        LookupError: that is not known, or other code would run.
    """
    if checked := dynamo.validated_outputs(node):
        return [_as_checked(values.get(output), like) for output, like in checked]
    hooked = node.args[1] if node.target is dynamo.call_hook else None
    if isinstance(hooked, fx.Node) and node.kwargs.get("hook_type") != "unpack_hook":
        return values[hooked]  # as it mostly is: a hook may give another tensor, of the same shape
    if node.op != "call_function" or not dynamo.computes_only(node.target):
        raise LookupError(node.name)
    assert callable(node.target)
    args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
    return node.target(*args, **kwargs)
