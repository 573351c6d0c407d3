"""Estimate when each gradient of a captured graph is ready, from the work of earlier nodes. Does not change the graph.

Compute waits for the model's own collectives, such as those of tensor parallelism. Contention with gradient reductions
is not modelled: tensor parallelism mostly runs inside a node, and reductions between nodes use other links.
"""

from __future__ import annotations

import logging
import operator
from collections import defaultdict
from collections.abc import Container, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from dp_compile._torch import distributed, dynamo
from dp_compile.fx.collectives import is_collective, is_wait
from dp_compile.fx.memory import Storage, storages_in, tensors_in
from dp_compile.fx.text import last_name
from dp_compile.plan.cost import nominal_cost
from dp_compile.plan.network import legs_of
from dp_compile.plan.reduction import ALL_REDUCE, WHOLE, Load

logger = logging.getLogger("dp_compile.estimates")

# Ridge points of rooflines, in FLOPs per byte of memory traffic. Typical machines; only ratios between nodes matter.
FLOPS_PER_BYTE: Final = {"cpu": 8.0, "cuda": 200.0}
# Memory bandwidth: the order of magnitude of one core; else the vendor's figure of an H100 SXM, for other devices too.
_BYTES_PER_S: Final = defaultdict(lambda: 3.35e12, cpu=15e9)

Values = Mapping[fx.Node, Any]  # results of nodes: fake tensors of static sizes, or lists; a node without one: no work


class Accumulation(NamedTuple):
    """The node that accumulates a gradient, and the gradient. `adds`: whether the node adds to an existing `.grad`."""

    node: fx.Node
    gradient: fx.Node
    adds: bool


class Shares(NamedTuple):
    """When a gradient is ready, and its own work, which only this gradient needs; as shares of the graph's work.

    `ready`: if launches are in graph order, and work for later ones alone is deferred (`overlap.py`). `backward_s`:
    duration of the graph at `_BYTES_PER_S`. A GPT and a ResNet of the benchmark take 0.96 and 0.77 of that, 1,000 small
    layers 6 times as long, one large embedding 0.23 (one CPU core, 2026-11-28). `may_wait`: see `_may_wait`.
    """

    ready: float
    own: float
    backward_s: float
    may_wait: bool


def ready_shares(accumulations: Sequence[Accumulation], values: Values) -> list[Shares]:
    """Return the `Shares` of each accumulation of a graph.

    The work of a node is the larger of its bytes and its FLOPs over `FLOPS_PER_BYTE` (roofline: Williams, Waterman,
    Patterson, CACM 2009). torch's flop counter gives the FLOPs. A collective's work is the bytes memory could move in
    its time on a nominal link. In a graph without work, each gradient is ready at 1, the end.
    """
    if not accumulations:
        return []
    at = {each.node: each for each in accumulations}
    nodes = list(accumulations[0].node.graph.nodes)
    position = {node: place for place, node in enumerate(nodes)}
    # Compute is not reordered in a graph with collectives of the model (`overlap.py`).
    only = {} if any(map(is_collective, nodes)) else _only_for(nodes, at)
    shared, shared_until, own = 0.0, dict[fx.Node, float](), dict.fromkeys(at, 0.0)
    for node in nodes:
        if (here := at.get(node)) is None:
            work = _sending(node, values) if is_collective(node) else _work(node, values)
        else:
            gradient = values.get(here.gradient)
            work = 3.0 * gradient.nbytes if here.adds and isinstance(gradient, torch.Tensor) else 0.0
        if (gradient_of := only.get(node)) is None:
            shared += work
        else:
            own[gradient_of] += work
        shared_until[node] = shared
    total = shared + sum(own.values())

    def made(each: Accumulation) -> int:
        # The graph builds a DTensor after the whole backward, but the gradient only needs its local parts.
        return max(map(position.__getitem__, dynamo.parts_of_subclass(each.gradient) or [each.node]))

    in_order = sorted(accumulations, key=made)
    may_wait, found, launched = _may_wait(in_order, only, values), dict[fx.Node, Shares](), 0.0
    for each in in_order:
        launched += own[each.node]
        work = shared_until[nodes[made(each)]] + launched
        shares = (work / total, own[each.node] / total) if total else (1.0, 0.0)
        backward_s = total / _BYTES_PER_S[values[each.gradient].device.type]
        found[each.node] = Shares(*shares, backward_s, each.node in may_wait)
    return [found[each.node] for each in accumulations]


def _only_for(nodes: Sequence[fx.Node], accumulations: Container[fx.Node]) -> dict[fx.Node, fx.Node | None]:
    """Return for each node the one accumulation that depends on it; `None` if several do, or another output does."""
    found: dict[fx.Node, fx.Node | None] = {}
    for node in reversed(nodes):
        needed_by = {found[user] for user in node.users}
        found[node] = node if node in accumulations else needed_by.pop() if len(needed_by) == 1 else None
    return found


def _may_wait(
    accumulations: Sequence[Accumulation], only: Mapping[fx.Node, fx.Node | None], values: Values
) -> set[fx.Node]:
    """Return those of a graph's last accumulations whose own work may run at the end of the backward.

    The inputs of this work stay in memory until then. They may take as much memory as the backward's inputs,
    without parameters, and the gradients (as in torch's DDP). This limit usually admits all; with checkpointing, few.
    """
    nodes = accumulations[0].node.graph.nodes
    read = {each.node: dict[Storage, int]() for each in accumulations}
    given = dict[Storage, int]()
    for node in nodes:
        gradient_of = only.get(node)
        if node.op == "placeholder":
            given |= storages_in(values.get(node))
        elif gradient_of is not None and node not in read and node.target is not operator.getitem:
            for source in node.all_input_nodes:
                if only.get(source) is not gradient_of or source.target is operator.getitem:
                    read[gradient_of] |= storages_in(values.get(source))
    parameters = [each.node.all_input_nodes[0] for each in accumulations]
    stay = {memory for node in parameters for memory in storages_in(values.get(node))}
    room = sum(nbytes for memory, nbytes in given.items() if memory not in stay)
    held, found = dict[Storage, int](), set[fx.Node]()
    for each in reversed(accumulations):
        room += sum(storages_in(values.get(each.gradient)).values())
        more = {memory: nbytes for memory, nbytes in read[each.node].items() if memory not in held}
        held |= more
        room -= sum(more.values())
        if room < 0:
            break
        found.add(each.node)
    return found


def _sending(node: fx.Node, values: Values) -> float:
    """Return how many bytes memory can move during a collective of the model; 0 if the sent tensors are unknown."""
    given, made = (list(tensors_in(each)) for each in (fx.map_arg(node.args[0], values.get), values.get(node)))
    group = node.args[-1]
    if not given or not made or not isinstance(group, str):
        return 0.0
    device_type, members = made[0].device.type, distributed.group_of_name(group)
    nbytes = max(sum(tensor.nbytes for tensor in each) for each in (given, made))
    load = Load(WHOLE, 2 if last_name(node).startswith(ALL_REDUCE) else 1, nbytes)
    (leg,) = legs_of([[load]], nominal_cost(distributed.backend_of(members, device_type), members.size()))
    return leg.seconds * _BYTES_PER_S[device_type]


def _work(node: fx.Node, values: Values) -> float:
    is_call = node.op in ("call_function", "call_method")
    if not is_call or node.target is operator.getitem or is_wait(node) or dynamo.sorts_only(node.target):
        return 0.0  # the results of `sorts_only` calls look like new memory, but are not
    outputs = list(tensors_in(values.get(node)))
    inputs = [tensor for each in node.all_input_nodes for tensor in tensors_in(values.get(each))]
    # An op that writes into an input counts as a view, too; this is rare.
    if storages_in(outputs).keys() <= storages_in(inputs).keys():
        return 0.0
    nbytes = float(sum(tensor.nbytes for tensor in (*inputs, *outputs)))
    formula = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if formula is None:
        return nbytes
    args, kwargs = fx.map_arg((node.args, node.kwargs), values.get)
    flops = float(formula(*args, **kwargs, out_val=values[node]))
    return max(nbytes, flops / FLOPS_PER_BYTE.get(outputs[0].device.type, 100.0))


# --- the values of a graph that is not traced yet ---------------------------------------------------------------------


def fake_values(graph_module: fx.GraphModule, given: tuple[Any, ...]) -> dict[fx.Node, Any]:
    """Return a fake tensor, or a list of them, for each node whose value follows from a backward's inputs.

    No user code runs: the shapes of a Python autograd function come from the engine's validation of its outputs.
    The graph input `hooks` also contains device meshes, from which AOTAutograd's code builds DTensors.
    """
    inputs = dict(zip(("inputs", "sizes", "scalars", "hooks"), given, strict=False))
    values: dict[fx.Node, Any] = {}
    with torch.no_grad(), dynamo.FakeTensorMode() as mode:
        for node in graph_module.graph.nodes:
            try:
                if node.op == "placeholder":
                    value = [_fake(mode, each) for each in inputs[node.name]]
                elif node.op == "get_attr":
                    value = _fake(mode, operator.attrgetter(node.target)(graph_module))
                else:
                    value = _call(node, values)
            except LookupError:
                pass
            except Exception as error:
                # The op fails on fake tensors, for any reason: its result and all that depend on it are unknown.
                logger.debug("the result of %s is unknown: %s", node, error)
            else:
                values[node] = value
    return values


def _fake(mode: Any, value: Any) -> Any:
    return mode.from_tensor(value) if isinstance(value, torch.Tensor) else value


def _as_checked(value: Any, like: dynamo.GradientLike | None) -> Any:
    """Return a gradient as autograd's validation leaves it: summed over broadcast dimensions, and cast."""
    if like is None or (isinstance(value, torch.Tensor) and (value.shape, value.dtype) == (like.shape, like.dtype)):
        return value
    return like.make()


def _call(node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    """Return the result of a call. Raise `LookupError` if the result is unknown or needs user code."""
    if checked := dynamo.validated_outputs(node):
        return [_as_checked(values.get(output), like) for output, like in checked]
    hooked = node.args[1] if node.target is dynamo.call_hook else None
    if isinstance(hooked, fx.Node) and node.kwargs.get("hook_type") != "unpack_hook":
        return values[hooked]  # approximation: a hook may return another tensor, of the same shape
    if node.op != "call_function" or not dynamo.computes_only(node.target):
        raise LookupError(node.name)
    assert callable(node.target)
    args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
    return node.target(*args, **kwargs)
