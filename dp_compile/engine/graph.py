"""A captured graph with reductions inserted.

    compiled autograd's graph               compiled graph
      accumulate_grad(p, g)                   accumulate_grad(p, g)
      call_hook(GradHook, p)          ->      call_hook(another hook, p)      user hooks
      call_hook(another hook, p)              reduce_accumulated(p, ...)      after all user hooks
      ...                                     ...
      return []                               reduce the missing gradients and the flags
                                              return [], (reduced flags, reduced missing gradients ...)

In most graphs without user code, ops replace `accumulate_grad` and `reduce_accumulated`, and `.grad` is set after the
graph, which reduces Dynamo's tracing time. Each graph reduces every gradient of the plan, including those that this
rank's backward did not produce, because every rank runs the same collectives.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from dp_compile._torch import dynamo
from dp_compile._torch.dtensors import from_part, is_dtensor, local_tensor, redistributed_as
from dp_compile.passes.estimates import Values
from dp_compile.passes.reduction import REDUCE_GRAD, emit
from dp_compile.passes.updates import UPDATE_LATER
from dp_compile.replica.gradients import real_view
from dp_compile.replica.replica import Replica
from dp_compile.replica.sinks import UpdateRequest

GradientId = tuple[int, int]  # position of the replica in this backward, index of the parameter in the replica


@dataclass(frozen=True, slots=True)
class HookCall:
    """A call of a post-accumulate-grad hook: name of its node, and positions of hook and parameter in the inputs."""

    node: str
    hook: int
    parameter: int


@dataclass(frozen=True, slots=True)
class Sites:
    """The places where a graph accumulates gradients and calls hooks."""

    accumulations: tuple[int, ...]  # positions of the tensors in the inputs
    unhooked: tuple[int, ...]  # those of `accumulations` without any hook
    hook_calls: tuple[HookCall, ...]


@dataclass(frozen=True, slots=True)
class Binding:
    """The parameters to which accumulations and hook calls of a graph refer in one backward. Equal ones share code."""

    code_keys: tuple[tuple[str, bool], ...]  # per replica
    hooked: tuple[GradientId | None, ...]  # per entry of `sites.hook_calls`; `None`: not a hook of these replicas
    into_existing: tuple[bool, ...]  # per entry of `sites.hook_calls`: the parameter already had a gradient
    kept: tuple[GradientId, ...]  # parameters that get no new gradient but have an old one
    wanted: tuple[tuple[UpdateRequest, ...], ...]  # per replica: the updates that optimizers request
    layouts: tuple[tuple[str, ...], ...]  # placements of existing DTensor gradients: Dynamo does not guard on them


@dataclass(frozen=True, slots=True)
class InBackward:
    """The parameters that one op of a captured backward updates."""

    replica: int  # position of the replica in this backward
    optimizer: int  # position in the updates of the replica
    bucket: int  # number of the last bucket with gradients of `indices`
    indices: tuple[int, ...]
    hands_over: bool = False  # the op writes no parameter, because this rank's backward lacks some of the gradients


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    """A captured graph with its binding, and the reductions and updates that follow from this binding."""

    graph_module: fx.GraphModule
    sites: Sites
    binding: Binding
    input_count: int  # number of input tensors
    synced: tuple[int, ...]  # positions of the replicas whose gradients are reduced
    used: tuple[tuple[int, ...], ...]  # per replica: indices of parameters that get a gradient
    unused: tuple[tuple[int, ...], ...]  # per replica: the other indices
    updates: tuple[InBackward, ...]  # optimizer updates in the graph
    unchanged: Mapping[str, str]  # see `dynamo.unchanged_by_prologue`


def find_sites(graph: fx.Graph) -> Sites:
    accumulating = graph.find_nodes(op="call_function", target=dynamo.call_accumulate_grad)
    accumulations = tuple(position_of(node.args[0]) for node in accumulating)
    hook_calls = tuple(
        HookCall(node.name, position_of(node.args[0]), position_of(node.args[1]))
        for node in graph.find_nodes(op="call_function", target=dynamo.call_hook)
        if node.kwargs.get("hook_type") == "post_acc_grad_hook"
    )
    with_hook = {call.parameter for call in hook_calls}
    unhooked = tuple(position for position in accumulations if position not in with_hook)
    return Sites(accumulations, unhooked, hook_calls)


def position_of(node: object) -> int:
    """Return `k` of a node `getitem(placeholder, k)`."""
    assert isinstance(node, fx.Node)
    assert node.target is operator.getitem, node
    position = node.args[1]
    assert isinstance(position, int)
    return position


def bind(
    graph_module: fx.GraphModule,
    sites: Sites,
    binding: Binding,
    input_count: int,
    replicas: Sequence[Replica],
    values: Values,
) -> CapturedGraph:
    """Return the captured graph with one binding, and with the reductions and updates of its replicas."""
    used = tuple(
        tuple(sorted(index for of, index in filter(None, binding.hooked) if of == ordinal))
        for ordinal in range(len(replicas))
    )
    everything = (range(len(replica.parameters)) for replica in replicas)
    unused = tuple(tuple(sorted(set(each).difference(got))) for each, got in zip(everything, used, strict=True))
    synced = tuple(ordinal for ordinal, replica in enumerate(replicas) if replica.reduces)
    updates = _updates_of(replicas, binding.wanted, used)
    unchanged = dynamo.unchanged_by_prologue(graph_module.graph, values)
    return CapturedGraph(graph_module, sites, binding, input_count, synced, used, unused, updates, unchanged)


def _updates_of(
    replicas: Sequence[Replica], requests_of: Sequence[Sequence[UpdateRequest]], used: Sequence[Sequence[int]]
) -> tuple[InBackward, ...]:
    """Return the requested updates that run inside a captured backward; `used`: per replica, indices with a gradient.

    Each rank decides independently: an update is a function of reduced gradients, which are equal on all ranks. The
    other updates run when the backward has ended, with the same kernels.
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


# --- inserting the reductions ---------------------------------------------------------------------------------------


def with_reductions(captured: CapturedGraph, replicas: Sequence[Replica]) -> tuple[fx.GraphModule, tuple[int, ...]]:
    """Return a copy of the graph with reductions, and the positions of parameters whose `.grad` is set after its run.

    The copy returns the old outputs; then reduced flags and missing gradients; then gradients to assign to `.grad`.
    """
    builder = _Builder(captured, replicas)
    builder.skip_prologues()
    builder.accumulate_by_ops()
    dynamo.make_cacheable(builder.graph)
    builder.place_reductions()
    reduced = builder.complete()
    for update in captured.updates:
        places = [(update.replica, index) for index in update.indices]
        parameters = [] if update.hands_over else [builder.parameters[place] for place in places]
        gradients = [builder.reductions[place] for place in places]
        who = list(update.indices), update.replica, update.optimizer, update.bucket
        builder.graph.call_function(UPDATE_LATER, (parameters, gradients, *who))
    assigned = dict(sorted(builder.assigned.items()))
    builder.graph.output((builder.outputs, tuple(reduced), tuple(assigned.values())))
    builder.graph.lint()
    module = fx.GraphModule(captured.graph_module, builder.graph, "CapturedBackward")
    dynamo.set_locals_to_steal(module, ["inputs"])
    return module, tuple(assigned)


class _Builder:
    def __init__(self, captured: CapturedGraph, replicas: Sequence[Replica]) -> None:
        self.captured, self.replicas = captured, replicas
        self.graph, nodes = fx.Graph(), dict[fx.Node, fx.Node]()
        self.outputs = self.graph.graph_copy(captured.graph_module.graph, nodes)
        self.copied = {old.name: new for old, new in nodes.items()}
        self.start = next(node for node in self.graph.nodes if node.op != "placeholder")
        self.position = captured.input_count
        self.updated = {(each.replica, index) for each in captured.updates for index in each.indices}
        self.parameters: dict[GradientId, fx.Node] = {}  # hooked parameters
        self.reductions: dict[GradientId, fx.Node] = {}  # inserted reductions
        self.accumulated: dict[int, fx.Node] = {}  # by position of the parameter: gradients accumulated by ops
        self.assigned: dict[int, fx.Node | None] = {}  # by position of the parameter: its `.grad` after the graph

    def runs_user_code(self) -> bool:
        """Return whether the graph runs Python code of the user, which might read or set `.grad`."""
        hooks = len(self.graph.find_nodes(op="call_function", target=dynamo.call_hook))
        known = {dynamo.call_accumulate_grad, dynamo.call_hook, dynamo.at_end}
        called = [node.target for node in self.graph.nodes if node.op == "call_function"]
        of_others = self.captured.binding.hooked.count(None) or hooks > len(self.captured.sites.hook_calls)
        return bool(of_others) or not all(each in known or dynamo.computes_only(each) for each in called)

    def skip_prologues(self) -> None:
        """Replace each result of AOTAutograd's prologue that equals an operand of the prologue by this operand."""
        for node, same in ((self.copied[each], self.copied[of]) for each, of in self.captured.unchanged.items()):
            prologue = node.args[0]
            node.replace_all_uses_with(same)
            self.graph.erase_node(node)
            if isinstance(prologue, fx.Node) and not prologue.users:
                self.graph.erase_node(prologue)

    def accumulate_by_ops(self) -> None:
        """Accumulate by ops, which do not set `.grad`, if they support all gradients and the graph has no user code.

        For each parameter, Dynamo takes 18 ms of CPU time to trace the functions, 8 ms for the ops (600 parameters).
        """
        sites, binding = self.captured.sites, self.captured.binding
        parameters = [each for replica in self.replicas for each in replica.parameters]
        if self.runs_user_code() or any(each.is_complex() or is_dtensor(each) for each in parameters):
            return
        if len({*sites.accumulations}) < len(sites.accumulations):
            return
        if not dynamo.TAKES_EXISTING and (any(binding.into_existing) or sites.unhooked):
            return
        for node in self.graph.find_nodes(op="call_function", target=dynamo.call_accumulate_grad):
            position, (old, new) = position_of(node.args[0]), dynamo.accumulated(node)
            with self.graph.inserting_before(node):
                both = self.graph.call_function(dynamo.accumulate_op(), ([new], node.args[0], old, node.args[-1]))
                self.accumulated[position] = self.graph.call_function(operator.getitem, (both, 0))
            if old is None:
                self.assigned[position] = self.accumulated[position]
            node.replace_all_uses_with(self.accumulated[position])
            self.graph.erase_node(node)

    def place_reductions(self) -> None:
        """Replace the calls of our hooks by reductions, placed after all hooks of a parameter.

        User hooks therefore see and may change the local gradient in any registration order, as in torch's DDP.
        """
        sites, binding = self.captured.sites, self.captured.binding
        last_call = {call.parameter: call.node for call in sites.hook_calls}
        for call, place, existing in zip(sites.hook_calls, binding.hooked, binding.into_existing, strict=True):
            if place is None:
                continue
            node, last = self.copied[call.node], self.copied[last_call[call.parameter]]
            parameter = node.args[1]
            assert isinstance(parameter, fx.Node)
            if self.replicas[place[0]].reduces:
                self.parameters[place] = parameter
                with self.graph.inserting_after(last):
                    self.reductions[place] = self._reduce(place, existing, call.parameter, parameter)
            node.replace_all_uses_with(parameter)
            self.graph.erase_node(node)

    def _reduce(self, place: GradientId, existing: bool, position: int, parameter: fx.Node) -> fx.Node:
        if (gradient := self.accumulated.get(position)) is None:
            reduce: Callable[..., torch.Tensor] = reduce_to_update if place in self.updated else reduce_accumulated
            if place[1] in self.replicas[place[0]].module.dtensors:
                reduce = reduce_local_tensor
            return self.graph.call_function(reduce, (parameter, existing, place[1], place[0]))
        reduced = self.graph.call_function(REDUCE_GRAD, (gradient, place[1], place[0]))
        if place in self.updated:
            self.assigned[position] = None
        elif existing:
            with self.graph.inserting_after(reduced):
                self.graph.call_method("copy_", (gradient, reduced))
        else:
            self.assigned[position] = reduced
        return reduced

    def complete(self) -> list[fx.Node]:
        """Insert reductions of flags and unused parameters, for which no hook is called. Return the reduced nodes."""
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
        """Return this rank's contribution for the flags (the index after the last parameter) or an unused parameter.

        It is zeros, or the next extra input (`CompiledBackward._extra_inputs`) after the engine's inputs. The graph
        reads extra inputs at its start, because compiled code empties the list of inputs.
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
    """Reduce `parameter.grad` as the parameter's hooks left it, in place if there was a gradient before this backward.

    If a hook set `.grad` to `None`, this rank contributes zeros, as with torch's DDP.
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
    """Reduce a DTensor's gradient like `reduce_accumulated`: redistribute it like its parameter, reduce its shard."""
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
    """Reduce like `reduce_accumulated`, for a parameter that is updated in the backward: `.grad` becomes `None`."""
    reduced = emit(_accumulated(parameter), index, replica)
    parameter.grad = None
    return reduced


def _accumulated(parameter: nn.Parameter) -> torch.Tensor:
    return torch.zeros_like(parameter, requires_grad=False) if parameter.grad is None else parameter.grad


def reductions_in(graph: fx.Graph) -> Counter[Any]:
    """Count the reductions in a Dynamo graph by `GradientId`: the op's arguments `replica` and `index`."""
    nodes = graph.find_nodes(op="call_function", target=REDUCE_GRAD)
    return Counter((node.args[2], node.args[1]) for node in nodes)
