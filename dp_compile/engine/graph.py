"""A captured graph with our reductions in it.

    compiled autograd's graph               what is compiled
      accumulate_grad(p, g)                   accumulate_grad(p, g)
      call_hook(GradHook, p)          ->      call_hook(another hook, p)      hooks of the user's
      call_hook(another hook, p)              reduce_accumulated(p, ...)      after all of them
      ...                                     ...
      return []                               reduce the gradients that are missing, and the flags
                                              return [], (reduced flags, reduced missing gradients ...)

Where that is all, `without_python` makes what Dynamo would make of it; else Dynamo does. Every graph has one reduction
for each gradient of the plan, also where this rank's backward produced none: every rank runs the same collectives.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx, nn

from dp_compile._torch import dynamo
from dp_compile._torch.dtensors import from_part, local_tensor, redistributed_as
from dp_compile.passes.reduction import REDUCE_GRAD, emit
from dp_compile.passes.updates import UPDATE_LATER
from dp_compile.replica.gradients import real_view
from dp_compile.replica.replica import Replica
from dp_compile.replica.sinks import UpdateRequest

GradientId = tuple[int, int]
"""Which gradient: the replica's position in this backward, the parameter's index in the replica."""


@dataclass(frozen=True, slots=True)
class HookCall:
    """A call of a post-accumulate-grad hook: its node and the positions of hook and parameter in the inputs."""

    node: str
    hook: int
    parameter: int


@dataclass(frozen=True, slots=True)
class Sites:
    """Where a graph accumulates gradients and calls hooks."""

    accumulations: tuple[int, ...]  # positions of the tensors in the inputs
    existing: tuple[int, ...]  # positions of the gradients that are added to
    unhooked: tuple[int, ...]  # those of `accumulations` that have no hook at all
    hook_calls: tuple[HookCall, ...]


@dataclass(frozen=True, slots=True)
class Binding:
    """What the sites of a graph mean in one backward. Equal bindings run the same code."""

    code_keys: tuple[tuple[str, bool], ...]
    hooked: tuple[GradientId | None, ...]  # of each of `sites.hook_calls`
    into_existing: tuple[bool, ...]  # of each of them: did the parameter have a gradient before?
    kept: tuple[GradientId, ...]  # the parameters without a new gradient that have an old one
    wanted: tuple[tuple[UpdateRequest, ...], ...]  # what optimizers update in it, of each replica
    layouts: tuple[tuple[str, ...], ...]
    """With DTensor parameters: the placements of gradients from before. Dynamo does not guard on them."""


@dataclass(frozen=True, slots=True)
class InBackward:
    """Parameters that one op of a captured backward updates."""

    replica: int  # by position, as the next two
    optimizer: int
    bucket: int  # the last one that holds a gradient of `indices`
    indices: tuple[int, ...]
    hands_over: bool = False  # no parameter is written to: this rank's backward does not have all of their gradients


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    """A captured graph, and what it does in one backward, from what its sites mean there."""

    graph_module: fx.GraphModule
    sites: Sites
    binding: Binding
    input_count: int  # tensors that it takes
    synced: tuple[int, ...]  # the modules that are reduced, by position
    used: tuple[tuple[int, ...], ...]  # of each module the parameters that get a gradient
    unused: tuple[tuple[int, ...], ...]  # and the others
    updates: tuple[InBackward, ...]  # what optimizers update in it


def find_sites(graph: fx.Graph) -> Sites:
    accumulating = graph.find_nodes(op="call_function", target=dynamo.call_accumulate_grad)
    accumulations = tuple(position_of(node.args[0]) for node in accumulating)
    added_to = (dynamo.accumulated(node).old for node in accumulating)
    existing = tuple(position_of(each) for each in added_to if each is not None)
    hook_calls = tuple(
        HookCall(node.name, position_of(node.args[0]), position_of(node.args[1]))
        for node in graph.find_nodes(op="call_function", target=dynamo.call_hook)
        if node.kwargs.get("hook_type") == "post_acc_grad_hook"
    )
    with_hook = {call.parameter for call in hook_calls}
    unhooked = tuple(position for position in accumulations if position not in with_hook)
    return Sites(accumulations, existing, unhooked, hook_calls)


def position_of(node: object) -> int:
    """`k` of a node `getitem(placeholder, k)`."""
    assert isinstance(node, fx.Node)
    assert node.target is operator.getitem, node
    position = node.args[1]
    assert isinstance(position, int)
    return position


def bind(
    graph_module: fx.GraphModule, sites: Sites, binding: Binding, input_count: int, replicas: Sequence[Replica]
) -> CapturedGraph:
    """A captured graph of these modules with what its sites mean in one backward."""
    used = tuple(
        tuple(sorted(index for of, index in filter(None, binding.hooked) if of == ordinal))
        for ordinal in range(len(replicas))
    )
    everything = (range(len(replica.parameters)) for replica in replicas)
    unused = tuple(tuple(sorted(set(each).difference(got))) for each, got in zip(everything, used, strict=True))
    synced = tuple(ordinal for ordinal, replica in enumerate(replicas) if replica.reduces)
    updates = _updates_of(replicas, binding.wanted, used)
    return CapturedGraph(graph_module, sites, binding, input_count, synced, used, unused, updates)


def _updates_of(
    replicas: Sequence[Replica], requests_of: Sequence[Sequence[UpdateRequest]], used: Sequence[Sequence[int]]
) -> tuple[InBackward, ...]:
    """What a captured backward updates of what optimizers of each module ask for; `used`: what gets a gradient in it.

    Each rank decides alone: an update is a function of reduced gradients, which are the same on every rank. What is
    left is updated when the backward has ended, with the same kernels.
    """
    found: list[InBackward] = []
    for ordinal, replica in enumerate(replicas):
        buckets = enumerate(replica.plan.buckets)
        bucket_of = {member.gradient.index: number for number, bucket in buckets for member in bucket.members}
        got = set(used[ordinal])
        for number, wanted in enumerate(requests_of[ordinal]):
            of_bucket: dict[int, list[int]] = {}
            for index in sorted(wanted.indices, key=bucket_of.__getitem__):
                if wanted.parts or index in got:
                    of_bucket.setdefault(bucket_of[index], []).append(index)
            for bucket, indices in of_bucket.items():
                hands_over = any(index not in got for index in indices)
                found.append(InBackward(ordinal, number, bucket, tuple(indices), hands_over))
    return tuple(found)


# --- reductions in it -----------------------------------------------------------------------------------------------


def with_reductions(captured: CapturedGraph, replicas: Sequence[Replica]) -> fx.GraphModule:
    """A copy of the graph that also reduces. It returns its outputs, and the reduced flags and missing gradients."""
    builder = _Builder(captured, replicas)
    builder.place_reductions()
    reduced = builder.complete()
    for update in captured.updates:
        places = [(update.replica, index) for index in update.indices]
        parameters = [] if update.hands_over else [builder.parameters[place] for place in places]
        gradients = [builder.reductions[place] for place in places]
        who = list(update.indices), update.replica, update.optimizer, update.bucket
        builder.graph.call_function(UPDATE_LATER, (parameters, gradients, *who))
    builder.graph.output((builder.outputs, tuple(reduced)))
    builder.graph.lint()
    module = fx.GraphModule(captured.graph_module, builder.graph, "CapturedBackward")
    dynamo.set_locals_to_steal(module, ["inputs"])
    return module


class _Builder:
    """The copy of a captured graph, and what was put into it so far."""

    def __init__(self, captured: CapturedGraph, replicas: Sequence[Replica]) -> None:
        self.captured, self.replicas = captured, replicas
        self.graph, nodes = fx.Graph(), dict[fx.Node, fx.Node]()
        self.outputs = self.graph.graph_copy(captured.graph_module.graph, nodes)
        self.copied = {old.name: new for old, new in nodes.items()}
        self.start = next(node for node in self.graph.nodes if node.op != "placeholder")
        self.position = captured.input_count
        self.parameters: dict[GradientId, fx.Node] = {}  # that have a hook
        self.reductions: dict[GradientId, fx.Node] = {}  # that are in the graph

    def place_reductions(self) -> None:
        """Put reductions in the place of our hooks' calls, after all hooks of a parameter.

        Those of the user's see the rank's own gradient, and may change it, whenever they were set, as with torch's DDP.
        """
        sites, binding = self.captured.sites, self.captured.binding
        updated = {(each.replica, index) for each in self.captured.updates for index in each.indices}
        last_call = {call.parameter: call.node for call in sites.hook_calls}
        for call, place, existing in zip(sites.hook_calls, binding.hooked, binding.into_existing, strict=True):
            if place is None:
                continue
            node, last = self.copied[call.node], self.copied[last_call[call.parameter]]
            parameter = node.args[1]
            assert isinstance(parameter, fx.Node)
            if self.replicas[place[0]].reduces:
                reduce: Callable[..., torch.Tensor] = reduce_accumulated
                if place[1] in self.replicas[place[0]].module.dtensors:
                    reduce = reduce_local_tensor
                elif place in updated:
                    reduce = reduce_to_update
                self.parameters[place] = parameter
                with self.graph.inserting_after(last):
                    self.reductions[place] = self.graph.call_function(reduce, (parameter, existing, place[1], place[0]))
            node.replace_all_uses_with(parameter)
            self.graph.erase_node(node)

    def complete(self) -> list[fx.Node]:
        """Reduce what no hook reduces: flags and unused parameters."""
        results: list[fx.Node] = []
        for ordinal in self.captured.synced:
            replica, done = self.replicas[ordinal], dict[int, fx.Node]()
            for index in (len(replica.parameters), *self.captured.unused[ordinal]):
                done[index] = self.graph.call_function(emit, (self.source(ordinal, index), index, ordinal))
            scattered = replica.after.scattered
            self.reductions |= {(ordinal, index): node for index, node in done.items() if index in scattered}
            results += [node for index, node in done.items() if index not in scattered]
        return results

    def source(self, ordinal: int, index: int) -> fx.Node:
        """What a rank contributes for flags, whose index follows the last parameter, or for an unused parameter.

        Zeros, or the next of `CompiledBackward._extra_inputs`, which follow the engine's. Those are taken at the start:
        compiled code empties the list of inputs.
        """
        parameters = self.replicas[ordinal].parameters
        if index == len(parameters) or (ordinal, index) in self.captured.binding.kept:
            with self.graph.inserting_before(self.start):
                taken = self.graph.call_function(operator.getitem, (self.copied["inputs"], self.position))
                self.position += 1
                return self.graph.call_function(real_view, (taken,))
        part = local_tensor(parameters[index])
        options: dict[str, Any] = {"dtype": part.dtype.to_real(), "device": part.device}
        return self.graph.call_function(
            torch.zeros, ([*part.shape, 2] if part.is_complex() else [*part.shape],), options
        )


def reduce_accumulated(parameter: nn.Parameter, existing: bool, index: int, replica: int) -> torch.Tensor:
    """Traced after a parameter's hooks: reduce the gradient as they left it. One that existed stays itself.

    A hook may have dropped it: then this rank adds zeros, as with torch's DDP.
    """
    in_place = (existing and parameter.grad is not None) or parameter.is_complex()
    grad = _accumulated(parameter)
    reduced = emit(real_view(grad), index, replica)
    if in_place:
        real_view(grad).copy_(reduced)
        parameter.grad = grad
    else:
        parameter.grad = reduced
    return reduced


def reduce_local_tensor(parameter: Any, existing: bool, index: int, replica: int) -> torch.Tensor:
    """As `reduce_accumulated`, for a DTensor: of its gradient, laid out as it is, the part that this rank holds."""
    grad: Any = redistributed_as(parameter, _accumulated(parameter))
    reduced = emit(grad.to_local(), index, replica)
    result = from_part(reduced, parameter)
    if existing and parameter.grad is not None:
        grad.copy_(result)
        parameter.grad = grad
    else:
        parameter.grad = result
    return reduced


def reduce_to_update(parameter: nn.Parameter, existing: bool, index: int, replica: int) -> torch.Tensor:
    """As `reduce_accumulated`, for a parameter that is updated in the backward: nothing stays in `.grad`."""
    reduced = emit(_accumulated(parameter), index, replica)
    parameter.grad = None
    return reduced


def _accumulated(parameter: nn.Parameter) -> torch.Tensor:
    return torch.zeros_like(parameter, requires_grad=False) if parameter.grad is None else parameter.grad


# --- without Dynamo -------------------------------------------------------------------------------------------------


class NotPlain(Exception):
    """A graph has something that only Dynamo can look into, or has to look at in each backward."""


def check_plain(captured: CapturedGraph, replicas: Sequence[Replica]) -> None:
    """Raises `NotPlain` unless sizes, strides, dtypes and torch's state are all that the code depends on."""
    if not dynamo.TAKES_EXISTING and (any(captured.binding.into_existing) or captured.sites.unhooked):
        raise NotPlain("gradients are added to others, which the graph does not take before torch 2.13")
    if captured.updates or any(replica.after.scattered for replica in replicas):
        raise NotPlain("an optimizer takes part in it")
    if any(replica.module.dtensors for replica in replicas):
        raise NotPlain("a DTensor takes part in it")
    if any(replica.planning.comm_hook is not None for replica in replicas):
        raise NotPlain("a comm hook takes part in it")


def without_python(
    module: fx.GraphModule, inputs: Sequence[torch.Tensor], example: list[torch.Tensor]
) -> tuple[fx.GraphModule, tuple[int, ...]]:
    """What Dynamo makes of a plain graph with our reductions, node for node, made without Dynamo.

    All that Dynamo has to look into is what accumulates (`call_accumulate_grad` in torch/_dynamo/external_utils.py),
    `reduce_accumulated`, `emit`, `real_view`. With 600 small parameters the first step takes it 28 s of processor time,
    and 17 s without it.

    `module`: made by `with_reductions`, for `inputs`; `example`: the same as fake tensors, for the compiler.

    Returns:
        A graph that takes one list of tensors and returns reduced flags and missing gradients, then new gradients; and
        of the latter the positions of their parameters in the inputs. What is added to existing ones is added in place.
    """
    plain = _PlainGraph(inputs)
    graph, made = plain.graph, dict[fx.Node, Any]()
    outputs: Any = None
    for node in module.graph.nodes:
        if node.op == "placeholder":
            if node.target == "inputs":
                made[node] = taken = graph.placeholder("L_inputs_")
                taken.meta |= {"steal_arg": True, "example_value": example}  # it may empty the list
        elif node.op == "output":
            outputs = fx.map_arg(node.args[0], made.__getitem__)
        elif node.op != "call_function":
            raise NotPlain(f"a {node.op} node")
        elif not (node.target is operator.getitem and node.args[0] not in made) and node.target is not dynamo.at_end:
            unknown = [each.name for each in node.all_input_nodes if each not in made]
            if unknown:
                raise NotPlain(f"it takes {', '.join(unknown)}, not only tensors")
            made[node] = plain.add(node, *fx.map_arg((node.args, node.kwargs), made.__getitem__))
    nothing, reduced = outputs
    if nothing:
        raise NotPlain("gradients are returned")
    positions = tuple(sorted(plain.gradients.keys() - plain.in_place))
    graph.output((*reduced, *(plain.gradients[each] for each in positions)))
    graph.lint()
    return fx.GraphModule({}, graph, "CapturedBackward"), positions


class _PlainGraph:
    """A graph as Dynamo leaves it, and the gradients in it, by the position of their parameter in the inputs."""

    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        self.graph, self.gradients = fx.Graph(), dict[int, fx.Node]()
        self.in_place = set[int]()  # those that are added to one from before
        self._inputs = inputs

    def add(self, node: fx.Node, args: Any, kwargs: Any) -> fx.Node:
        """Add what a node becomes; `args`, `kwargs`: its own, in this graph."""
        if node.target is dynamo.call_accumulate_grad:
            return self._accumulate(node, args)
        if node.target is reduce_accumulated:
            return self._reduce(*args)
        if node.target is emit:
            return self._call(REDUCE_GRAD, args, "reduced")
        if node.target is real_view:
            if self._inputs[position_of(args[0])].is_complex():
                raise NotPlain("complex numbers")
            return cast(fx.Node, args[0])
        if node.target in (operator.getitem, torch.zeros) or dynamo.stays_in_graph(node):
            return self.graph.create_node("call_function", node.target, args, kwargs, node.name)
        raise NotPlain(f"a call of {getattr(node.target, '__name__', node.target)!s}")

    def _call(self, target: Any, args: tuple[Any, ...], name: str) -> fx.Node:
        return self.graph.create_node("call_function", target, args, {}, name)

    def _accumulate(self, node: fx.Node, args: tuple[Any, ...]) -> fx.Node:
        position, flag = position_of(args[0]), args[-1]
        old, new = (None if each is None else args[node.args.index(each)] for each in dynamo.accumulated(node))
        if position in self.gradients:
            raise NotPlain("a gradient is accumulated twice")
        if old is not None:
            self.in_place.add(position)
        accumulated = self._call(dynamo.accumulate_op(), ([new], args[0], old, flag), "accumulate_grad")
        self.gradients[position] = self._call(operator.getitem, (accumulated, 0), node.name)
        return self.gradients[position]

    def _reduce(self, parameter: fx.Node, existing: bool, index: int, replica: int) -> fx.Node:
        position = position_of(parameter)
        if position not in self.gradients or self._inputs[position].is_complex():
            raise NotPlain("complex numbers, or a gradient that a hook dropped")
        reduced = self._call(REDUCE_GRAD, (self.gradients[position], index, replica), "reduced")
        if existing:
            self.graph.call_method("copy_", (self.gradients[position], reduced))
        else:
            self.gradients[position] = reduced
        return reduced


def reductions_in(graph: fx.Graph) -> Counter[Any]:
    """The reductions in a graph as Dynamo leaves it, by `GradientId`: third and second argument of the op."""
    nodes = graph.find_nodes(op="call_function", target=REDUCE_GRAD)
    return Counter((node.args[2], node.args[1]) for node in nodes)
