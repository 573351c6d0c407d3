"""A captured graph with our reductions in it.

    compiled autograd's graph               what is compiled
      accumulate_grad(p, g)                   accumulate_grad(p, g)
      call_hook(GradHook, p)          ->      call_hook(another hook, p)      hooks of the user's
      call_hook(another hook, p)              reduce_accumulated(p, ...)      behind all of them
      ...                                     ...
      return []                               reduce the gradients that are missing, and the flags
                                              return [], (reduced flags, reduced missing gradients ...)

Mostly that is all, and `without_python` makes what Dynamo would make of it; else Dynamo does.

Every graph holds one reduction for each gradient of the plan, whatever this rank's backward produced, so every rank
runs the same collectives.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx, nn

from dp_compile._torch import dynamo
from dp_compile._torch.dtensors import from_part, own_part, redistributed_as
from dp_compile.comm_hooks.functional import HOOK_STATE
from dp_compile.engine.gradients import real_view
from dp_compile.engine.replica import Replica
from dp_compile.engine.updates import InBackward, Wanted
from dp_compile.passes.reduction import REDUCE_GRAD, emit
from dp_compile.passes.updates import UPDATE_LATER
from dp_compile.plan.flags import NUMBER_BITS
from dp_compile.plan.reduction import Reduction

Place = tuple[int, int]
"""Which gradient: the replica's position in this backward, the parameter's index in the replica."""

Layouts = tuple[tuple[str, ...], ...]
"""The placements of tensors, of each none or one for each dimension of its mesh."""


@dataclass(frozen=True, slots=True)
class HookCall:
    """A call of a post-accumulate-grad hook: its node and the positions of hook and parameter in the inputs."""

    node: str
    hook: int
    parameter: int


@dataclass(frozen=True, slots=True)
class Sites:
    """Where a graph accumulates gradients and calls hooks.

    `accumulations` are positions of the tensors in the inputs; `unhooked` those of them that have no hook at all.
    """

    accumulations: tuple[int, ...]
    unhooked: tuple[int, ...]
    hook_calls: tuple[HookCall, ...]


@dataclass(frozen=True, slots=True)
class Binding:
    """What the sites of a graph mean in one backward. Equal bindings run the same code.

    `hooked[i]` and `into_existing[i]` (did the parameter have a gradient before?) belong to `sites.hook_calls[i]`;
    `kept` are the parameters without a new gradient that have an old one.
    """

    code_keys: tuple[tuple[str, bool], ...]
    hooked: tuple[Place | None, ...]
    into_existing: tuple[bool, ...]
    kept: tuple[Place, ...]
    wanted: tuple[tuple[Wanted, ...], ...] = ()
    """What optimizers update in it, of each replica."""
    layouts: Layouts = ()
    """Beside DTensor parameters: how the gradients lie that parameters had before. Dynamo does not look at that."""


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    """A captured graph, what its sites mean in one backward, and how many tensors it takes."""

    graph_module: fx.GraphModule
    sites: Sites
    binding: Binding
    input_count: int


@dataclass(frozen=True, slots=True)
class ToReduce:
    """What is reduced: the modules in `synced`, by position, with what each of them did not use in this backward.

    `deferred`: all reductions stand at the end. `updates`: what optimizers update in it.
    """

    synced: tuple[int, ...]
    unused: Mapping[int, tuple[int, ...]]
    deferred: bool
    updates: tuple[InBackward, ...] = ()

    def updates_parameter(self, place: Place) -> bool:
        return any(each.replica == place[0] and place[1] in each.indices for each in self.updates)


def find_sites(graph: fx.Graph) -> Sites:
    accumulations = tuple(
        position_of(node.args[0]) for node in graph.find_nodes(op="call_function", target=dynamo.call_accumulate_grad)
    )
    hook_calls = tuple(
        HookCall(node.name, position_of(node.args[0]), position_of(node.args[1]))
        for node in graph.find_nodes(op="call_function", target=dynamo.call_hook)
        if node.kwargs.get("hook_type") == "post_acc_grad_hook"
    )
    with_hook = {call.parameter for call in hook_calls}
    unhooked = tuple(position for position in accumulations if position not in with_hook)
    return Sites(accumulations, unhooked, hook_calls)


def position_of(node: object) -> int:
    """`k` of a node `getitem(placeholder, k)`."""
    assert isinstance(node, fx.Node)
    assert node.target is operator.getitem, node
    position = node.args[1]
    assert isinstance(position, int)
    return position


def give_zeros_for_none(graph_module: fx.GraphModule) -> None:
    """Let an autograd function of the user's give `None` for a gradient, which means zeros.

    The engine hands an undefined gradient on, and torch's DDP reduces zeros for it. In a captured graph it is a Python
    `None` at which tracing fails (torch 2.13).
    """
    graph, found = graph_module.graph, False
    for check in list(graph.nodes):
        for position, (output, like) in enumerate(dynamo.validated_outputs(check)):
            if like is not None and _is_of_a_function(output):
                with graph.inserting_before(check):
                    given = graph.call_function(given_or_zeros, (output, *like))
                outputs = list(check.args[0])
                outputs[position] = given
                check.args = (outputs, *check.args[1:])
                found = True
    if found:
        graph_module.recompile()


def _is_of_a_function(output: Any) -> bool:
    return (
        isinstance(output, fx.Node)
        and output.target is operator.getitem
        and isinstance(output.args[0], fx.Node)
        and output.args[0].target is dynamo.call_backward
    )


def given_or_zeros(
    value: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Traced behind an autograd function: its gradient, or zeros if it gave none."""
    return torch.zeros(shape, dtype=dtype, device=device) if value is None else value


def with_reductions(captured: CapturedGraph, replicas: Sequence[Replica], wanted: ToReduce) -> fx.GraphModule:
    """A copy of the graph that also reduces. It returns its outputs, and the reduced flags and missing gradients."""
    graph, nodes = fx.Graph(), dict[fx.Node, fx.Node]()
    outputs = graph.graph_copy(captured.graph_module.graph, nodes)
    copied = {old.name: new for old, new in nodes.items()}
    factors, position = _add_factors(graph, (copied["inputs"], captured.input_count), replicas, wanted)
    hooked, reductions = _place_reductions(graph, copied, captured, replicas, wanted, factors)
    inputs = copied["inputs"], position
    reduced = _add_completion(graph, inputs, captured.binding, hooked, reductions, replicas, wanted, factors)
    for update in wanted.updates:
        places = [(update.replica, index) for index in update.indices]
        parameters = [] if update.hands_over else [hooked[place][0] for place in places]
        gradients = [reductions[place] for place in places]
        who = list(update.indices), update.replica, update.optimizer, update.bucket
        graph.call_function(UPDATE_LATER, (parameters, gradients, *who))
    graph.output((outputs, tuple(reduced)))
    graph.lint()
    module = fx.GraphModule(captured.graph_module, graph, "CapturedBackward")
    dynamo.set_locals_to_steal(module, ["inputs"])
    return module


def _add_factors(
    graph: fx.Graph, inputs: tuple[fx.Node, int], replicas: Sequence[Replica], wanted: ToReduce
) -> tuple[dict[Place, tuple[fx.Node, ...]], int]:
    """The factors that are given when the code runs, for each gradient that has some; and how many inputs there are."""
    tensors, position = inputs
    start = next(node for node in graph.nodes if node.op != "placeholder")
    found: dict[Place, tuple[fx.Node, ...]] = {}
    for ordinal in wanted.synced:
        plan, nodes = replicas[ordinal].plan, dict[Reduction, tuple[fx.Node, ...]]()
        for reduction in plan.given_reductions():
            with graph.inserting_before(start):
                nodes[reduction] = tuple(
                    graph.call_function(operator.getitem, (tensors, position + each)) for each in range(reduction.given)
                )
            position += reduction.given
        for gradient in plan.gradients if nodes else ():
            found[ordinal, gradient.index] = nodes.get(gradient.key.reduction, ())
    return found, position


def _place_reductions(
    graph: fx.Graph,
    copied: Mapping[str, fx.Node],
    captured: CapturedGraph,
    replicas: Sequence[Replica],
    wanted: ToReduce,
    factors: Mapping[Place, tuple[fx.Node, ...]],
) -> tuple[dict[Place, tuple[fx.Node, bool]], dict[Place, fx.Node]]:
    """Take the calls of our hooks out and put the reductions in, or nothing yet if all come at the end.

    A reduction stands behind all hooks of its parameter: those of the user's see the rank's own gradient, and may
    change it, whenever they were set, as with torch's DDP.

    Returns:
        The parameter of each hook, and whether it had a gradient before; the reductions that are in the graph, and
        gradients of a rank's own that update.
    """
    hooked: dict[Place, tuple[fx.Node, bool]] = {}
    reductions: dict[Place, fx.Node] = {}
    last_call = {call.parameter: call.node for call in captured.sites.hook_calls}
    for call, place, existing in zip(
        captured.sites.hook_calls, captured.binding.hooked, captured.binding.into_existing, strict=True
    ):
        if place is None:
            continue
        node, last = copied[call.node], copied[last_call[call.parameter]]
        parameter = node.args[1]
        assert isinstance(parameter, fx.Node)
        reduces, updated = replicas[place[0]].reduces, wanted.updates_parameter(place)
        if reduces or updated:
            hooked[place] = (parameter, existing)
        with graph.inserting_after(last):
            if reduces and not wanted.deferred:
                reduce = _reduce_function(replicas[place[0]], place[1], updated=updated)
                given = (parameter, existing, place[1], place[0], None, *factors.get(place, ()))
                reductions[place] = graph.call_function(reduce, given)
            elif updated and not reduces:
                reductions[place] = graph.call_function(take_to_update, (parameter,))
        _take_out(graph, node)
    return hooked, reductions


def _take_out(graph: fx.Graph, call: fx.Node) -> fx.Node:
    """Take out a hook's call; its parameter."""
    parameter = call.args[1]
    assert isinstance(parameter, fx.Node)
    call.replace_all_uses_with(parameter)
    graph.erase_node(call)
    return parameter


def _add_completion(
    graph: fx.Graph,
    inputs: tuple[fx.Node, int],
    binding: Binding,
    hooked: Mapping[Place, tuple[fx.Node, bool]],
    reductions: dict[Place, fx.Node],
    replicas: Sequence[Replica],
    wanted: ToReduce,
    factors: Mapping[Place, tuple[fx.Node, ...]],
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
                    source = graph.call_function(operator.getitem, (tensors, position))
                    sources[index] = graph.call_function(real_view, (source,))
                position += 1
            else:
                sources[index] = _zeros(graph, replica.parameters[index])
        done: dict[int, fx.Node] = {}
        after: fx.Node | None = None
        for index in (gradient.index for gradient in replica.plan.gradients):
            more = factors.get((ordinal, index), ())
            if index in sources:
                after = done[index] = graph.call_function(emit, (sources[index], index, ordinal, after, *more))
            elif wanted.deferred:
                place, (parameter, existing) = (ordinal, index), hooked[ordinal, index]
                reduce = _reduce_function(replica, index, updated=wanted.updates_parameter(place))
                given = (parameter, existing, index, ordinal, after, *more)
                after = reductions[place] = graph.call_function(reduce, given)
            after = after if wanted.deferred else None
        reductions |= {(ordinal, index): node for index, node in done.items() if index in replica.after.scattered}
        results += [done[index] for index in sources if index not in replica.after.scattered]
        for index in range(len(replica.parameters)):
            names = list(replica.state_of_hook(index))
            with graph.inserting_before(start):
                state = [
                    graph.call_function(operator.getitem, (tensors, position + each)) for each in range(len(names))
                ]
            position += len(names)
            if names:
                may_be_unused = replica.config.may_be_unused
                flags = done[len(replica.parameters)], len(replica.parameters)
                graph.call_function(remember, (state, names, index, ordinal, *flags, may_be_unused))
    return results


def remember(
    state: Sequence[torch.Tensor],
    names: Sequence[str],
    index: int,
    replica: int,
    flags: torch.Tensor,
    parameters: int,
    may_be_unused: bool,
) -> None:
    """Traced at the end: the state of a hook becomes what the hook says, in place.

    It stays as it is where no rank gets an average, as what was in it is still to be sent: the backward of a rank
    failed, or no rank used the parameter. `flags`: the reduced ones; `parameters`: how many of them are of those.
    """
    holds = flags[parameters] * flags[parameters + NUMBER_BITS] == 0  # no bit together with its complement
    if may_be_unused:
        holds = holds & (flags[index] != 0)
    for tensor, value in zip(state, HOOK_STATE(state, names, index, replica), strict=True):
        tensor.copy_(torch.where(holds, value, tensor))


def reduce_accumulated(
    parameter: nn.Parameter,
    existing: bool,
    index: int,
    replica: int,
    after: torch.Tensor | None = None,
    *factors: torch.Tensor,
) -> torch.Tensor:
    """Traced behind a parameter's hooks: reduce the gradient as they left it. One that existed stays itself.

    A hook may have dropped it: then this rank adds zeros, as with torch's DDP.
    """
    in_place = (existing and parameter.grad is not None) or parameter.is_complex()
    grad = _accumulated(parameter)
    reduced = emit(real_view(grad), index, replica, after, *factors)
    if in_place:
        real_view(grad).copy_(reduced)
        parameter.grad = grad
    else:
        parameter.grad = reduced
    return reduced


def reduce_own_part(
    parameter: Any,
    existing: bool,
    index: int,
    replica: int,
    after: torch.Tensor | None = None,
    *factors: torch.Tensor,
) -> torch.Tensor:
    """As `reduce_accumulated`, for a DTensor: of its gradient, laid out as it is, the part that this rank holds."""
    grad: Any = redistributed_as(parameter, _accumulated(parameter))
    reduced = emit(grad.to_local(), index, replica, after, *factors)
    result = from_part(reduced, parameter)
    if existing and parameter.grad is not None:
        grad.copy_(result)
        parameter.grad = grad
    else:
        parameter.grad = result
    return reduced


def _reduce_function(replica: Replica, index: int, *, updated: bool) -> Callable[..., torch.Tensor]:
    if index in replica.dtensors:
        return reduce_own_part
    return reduce_to_update if updated else reduce_accumulated


def reduce_to_update(
    parameter: nn.Parameter,
    existing: bool,
    index: int,
    replica: int,
    after: torch.Tensor | None = None,
    *factors: torch.Tensor,
) -> torch.Tensor:
    """As `reduce_accumulated`, for a parameter that is updated in the backward: nothing stays in `.grad`."""
    reduced = emit(_accumulated(parameter), index, replica, after, *factors)
    parameter.grad = None
    return reduced


def take_to_update(parameter: nn.Parameter) -> torch.Tensor:
    """As `reduce_to_update`, where gradients are each rank's own."""
    grad = _accumulated(parameter)
    parameter.grad = None
    return grad


def _accumulated(parameter: nn.Parameter) -> torch.Tensor:
    return torch.zeros_like(parameter, requires_grad=False) if parameter.grad is None else parameter.grad


def _zeros(graph: fx.Graph, parameter: nn.Parameter) -> fx.Node:
    options: dict[str, Any] = {"dtype": parameter.dtype.to_real(), "device": parameter.device}
    part = own_part(parameter)
    shape = [*part.shape, 2] if part.is_complex() else list(part.shape)
    return graph.call_function(torch.zeros, (shape,), options)


class HasPython(Exception):
    """A graph has code of Python's that only Dynamo can look into."""


def without_python(
    module: fx.GraphModule, inputs: Sequence[torch.Tensor], example: list[torch.Tensor]
) -> tuple[fx.GraphModule, tuple[int, ...]]:
    """What Dynamo makes of a graph with our reductions, node for node, made without Dynamo.

    Where no parameter has a gradient yet and no hook is the user's, all that Dynamo has to look into is what follows:
    what accumulates (`call_accumulate_grad` in torch/_dynamo/external_utils.py), `reduce_accumulated`, `emit`,
    `real_view`. For that it takes an eighth of a cold start with 600 small parameters, and memory that stays.

    Args:
        module: made by `with_reductions`.
        inputs: what it is going to be called with.
        example: the same for whoever compiles it.

    Returns:
        A graph that takes one list of tensors and returns tensors, and where these go, see `ready.Ready.places`.

    Raises:
        HasPython: there is something else in it.
    """
    graph, made = fx.Graph(), dict[fx.Node, Any]()
    gradients: dict[int, fx.Node] = {}
    outputs: Any = None
    for node in module.graph.nodes:
        if node.op == "placeholder":
            if node.target == "inputs":
                made[node] = taken = graph.placeholder("L_inputs_")
                taken.meta |= {"steal_arg": True, "example_value": example}  # it may empty the list
        elif node.op == "output":
            outputs = fx.map_arg(node.args[0], made.__getitem__)
        elif node.op != "call_function":
            raise HasPython(f"a {node.op} node")
        elif not (node.target is operator.getitem and node.args[0] not in made) and node.target is not dynamo.at_end:
            # What it takes of hooks and sizes is used by nobody: hooks are taken out, and sizes refused by the caller.
            args, kwargs = fx.map_arg((node.args, node.kwargs), made.__getitem__)
            made[node] = _plain(graph, node, args, kwargs, inputs, gradients)
    nothing, reduced = outputs
    if nothing:
        raise HasPython("gradients are returned")
    positions = sorted(gradients)
    graph.output((*reduced, *(gradients[each] for each in positions)))
    graph.lint()
    places = (*(-1 - number for number in range(len(reduced))), *positions)
    return fx.GraphModule({}, graph, "CapturedBackward"), places


def _plain(
    graph: fx.Graph,
    node: fx.Node,
    args: Any,
    kwargs: Any,
    inputs: Sequence[torch.Tensor],
    gradients: dict[int, fx.Node],
) -> fx.Node:
    """A node of a graph as Dynamo leaves it. `gradients`: by the position of their parameter, noted here."""

    def call(target: Any, args: Any, name: str = node.name) -> fx.Node:
        return graph.create_node("call_function", target, args, kwargs, name)

    if node.target is dynamo.call_accumulate_grad:
        gradient = dynamo.accumulated(node)
        parameter, added, flag = args[0], args[node.args.index(gradient)], args[-1]
        position = position_of(parameter)
        if position in gradients:
            raise HasPython("a gradient is accumulated twice")
        accumulated = call(dynamo.accumulate_op(), ([added], parameter, None, flag), "accumulate_grad")
        gradients[position] = call(operator.getitem, (accumulated, 0))
        return gradients[position]
    if node.target is reduce_accumulated:
        parameter, existing, *rest = args
        position = position_of(parameter)
        if existing or position not in gradients or inputs[position].is_complex():
            raise HasPython("a gradient that is changed in place")
        gradients[position] = call(REDUCE_GRAD, (gradients[position], *rest), "reduced")
        return gradients[position]
    if node.target is emit:
        return call(REDUCE_GRAD, args, "reduced")
    if node.target is real_view:
        if inputs[position_of(args[0])].is_complex():
            raise HasPython("complex numbers")
        return cast(fx.Node, args[0])
    if node.target in (operator.getitem, torch.zeros) or dynamo.stays_in_graph(node.target):
        return call(node.target, args)
    raise HasPython(f"a call of {getattr(node.target, '__name__', node.target)!s}")


def reductions_in(graph: fx.Graph) -> Counter[Place]:
    """The reductions in a graph as Dynamo leaves it: index and replica are the op's second and third argument."""
    found: Counter[Place] = Counter()
    for node in graph.find_nodes(op="call_function", target=REDUCE_GRAD):
        index, replica = node.args[1:3]
        assert isinstance(index, int)
        assert isinstance(replica, int)
        found[replica, index] += 1
    return found
