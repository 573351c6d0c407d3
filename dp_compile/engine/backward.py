"""Entry of every backward that Python starts: finds its replicated modules, captures the backward or runs it eagerly.

The entry wraps the autograd engine while replicated modules exist. Backwards that reach none of them run unchanged.

| forward of the module            | gradients are reduced by                                          |
|----------------------------------|-------------------------------------------------------------------|
| compiled, whole or in part       | hooks, captured with the backward as one graph                    |
| not compiled; compiled, but the  | hooks that run eagerly, with the same collectives; the reason is  |
| capture is not possible, failed, | logged once                                                       |
| or the graph is still too rare   |                                                                   |

Gradients of a nested backward (reentrant checkpointing) are reduced at the end of the outermost backward. A backward
is nested if a graph task or a `BackwardState` exists at its start. Both are tested: a captured backward has no graph
task, and the engine's threads for accelerators do not have our thread-local `BackwardState`.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch

from dp_compile._torch import autograd, compiler, distributed
from dp_compile._torch.dtensors import adding_cannot_be_traced, is_dtensor
from dp_compile.engine.compiled_outputs import CorrectedOutputs
from dp_compile.engine.flags import stepped_message
from dp_compile.engine.guards import check_finite, check_module, check_parameters, refuse_unreduced
from dp_compile.engine.hooks import (
    NoGradients,
    UnsyncedGradients,
    await_inner,
    launches_so_far,
    leave,
    receiver_of,
    reduce_eagerly,
    reporting,
)
from dp_compile.engine.monitor import Watched
from dp_compile.engine.plan_sync import finalize_plans, meet_before_launch
from dp_compile.engine.window import BackwardState, Capturing, OneBackward, current, wait_for_window
from dp_compile.errors import CommunicationError, DesyncError, DPCompileError, ReductionError
from dp_compile.replica.precision import recomputing
from dp_compile.replica.replica import Replica, owners, warn, warn_once
from dp_compile.replica.store_channel import is_of_other_ranks

logger = logging.getLogger("dp_compile.backward")
AT_ONCE: Final = 4
COMES_AGAIN: Final = 64
"""The first `AT_ONCE` graphs of a module under one plan are compiled at their first use, others after `COMES_AGAIN`
uses. Otherwise a model that takes another path in each step would be compiled in each step."""
MOST_CAPTURES: Final = 32
"""The limit of captures per module. `COMES_AGAIN` does not limit graphs of one structure that differ in a constant."""
_CAPTURE_PATIENCE_S: Final = 600.0

_scope = threading.local()


def install_entry() -> None:
    """Route every backward that Python starts through `_enter`. Does nothing if installed already."""
    autograd.watch_engine(_enter)


@contextlib.contextmanager
def compiled_backward() -> Iterator[None]:
    """Context manager: capture and compile this thread's backwards in it, also if their forward was not compiled. A
    backward that cannot be captured runs eagerly, and a warning has the reason."""
    before = getattr(_scope, "forced", False)
    _scope.forced = True
    try:
        yield
    finally:
        _scope.forced = before


# --- the entry ----------------------------------------------------------------------------------------------------


class _Call(NamedTuple):
    """The arguments of a call of autograd's engine, by its names. A tuple, because every backward has to create one."""

    tensors: Sequence[Any]
    grad_tensors: Sequence[Any]
    keep_graph: bool
    create_graph: bool
    inputs: Sequence[Any] = ()
    allow_unreachable: bool = False
    accumulate_grad: bool = False

    def run(self, *, is_inner: bool = False) -> tuple[torch.Tensor, ...]:
        """Run the engine. Retries an outermost backward that another thread's capture blocked before anything ran."""
        deadline: float | None = None
        while True:
            try:
                with recomputing():
                    return autograd.run_engine(*self)
            except NotImplementedError as error:
                deadline = deadline or time.monotonic() + _CAPTURE_PATIENCE_S
                if is_inner or not compiler.is_capture_in_the_way(error) or time.monotonic() > deadline:
                    raise
                time.sleep(0.002)


@compiler.untraced("dp_compile decides at each backward how its gradients are reduced")
def _enter(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    wait_for_window()
    call = _Call(*args, **kwargs)
    outermost: BackwardState | None = getattr(_scope, "state", None)
    if outermost is not None or autograd.graph_task() != autograd.NO_GRAPH_TASK:
        return _run_inner(outermost, call)
    if not len(owners):
        autograd.unwatch_engine()
        return call.run()
    if not call.accumulate_grad:
        _warn_of_local_gradients(call.inputs)
    _scope.state = state = _state_of(call)
    try:
        return _run_outermost(state, call)
    finally:
        _scope.state = None


def _run_outermost(state: BackwardState, call: _Call) -> tuple[torch.Tensor, ...]:
    try:
        if state.replicas:
            with Watched(state.synced) as watched:
                result = _reduce(state, call, watched)
        else:
            result = call.run()
            _reduce_late(state)
    except BaseException as error:
        leave({replica: this.launches for replica, this in state.late.items()}, error)
        raise
    finally:
        for replica in state.late:
            replica.state.receiver = None
    for replica in state.replicas:
        if not replica.state.sync:
            replica.state.step_guard.backward_ended()
        if replica.module.precision is not None and not call.keep_graph:
            replica.module.precision.backward_has_ended()
    return result


def _run_inner(outermost: BackwardState | None, call: _Call) -> tuple[torch.Tensor, ...]:
    """Run a backward nested in `outermost`: None in the engine's accelerator threads and if C++ entered the engine."""
    replicas = _state_of(call).replicas
    if outermost is not None and replicas and current() is not None:
        _refuse_shared_nodes(outermost, call, replicas)
    for replica in replicas:
        await_inner(replica, None if outermost is None else outermost.late)
    return call.run(is_inner=True)


def _refuse_shared_nodes(outermost: BackwardState, inner: _Call, replicas: Sequence[Replica]) -> None:
    """Raise if nested and captured backward reach a parameter through the same node: torch 2.13 loses gradients there.

    Such a node is, for example, a cast (of a policy or by hand) whose result is used inside and outside a checkpoint.
    """
    if outermost.nodes is None:
        outermost.nodes = {each for each in _nodes(outermost.outputs) if autograd.leaf_behind(each) is None}
    found = sorted(
        (replica.names[index], node.name())
        for node in outermost.nodes.intersection(_nodes(inner.tensors))
        for replica in replicas
        for index in _reached([node], replica)
    )
    if found:
        name, through = found[0]
        raise ReductionError(
            f"a backward nested in a captured backward (reentrant checkpointing) reaches the parameter {name} through "
            f"{through}. The captured backward traverses the same node, so gradients would be lost. Use "
            "checkpoint(..., use_reentrant=False), compile the whole forward, or compile none of it."
        )


def _reduce_late(state: BackwardState) -> None:
    """Reduce gradients of modules that only nested backwards reached. Call it after the last nested backward."""
    for replica, reduction_round in state.late.items():
        replica.history.backwards["eager hooks"] += 1
        with Watched([replica]), OneBackward([replica], keep_graph=False):
            reduction_round.finish()
            replica.state.receiver = None
            complete_backward(replica)


def _warn_of_local_gradients(inputs: Sequence[Any]) -> None:
    """Warn that `torch.autograd.grad` returns local gradients, which are right for a penalty, wrong for an update."""
    found: dict[Replica, list[int]] = {}
    for replica, index in filter(None, map(owners.find, inputs)):
        if replica.state.sync and replica.group.world_size > 1:
            found.setdefault(replica, []).append(index)
    for replica, indices in found.items():
        warn_once(
            logger,
            [replica],
            "torch.autograd.grad returns the gradients of this rank alone: those of %s are not reduced. For an update "
            "call backward(), or average them over the ranks.",
            replica.name_list(indices, 2),
        )


# --- one backward of ours -----------------------------------------------------------------------------------------


def _reduce(state: BackwardState, call: _Call, watched: Watched) -> tuple[torch.Tensor, ...]:
    for replica in state.replicas:
        if receiver_of(replica) is not None:
            raise ReductionError(
                f"two backwards of the module of {replica.names[0]} run at the same time, in two threads or one inside "
                "the other. Concurrent backward passes are not supported: run one after the other."
            )
    for replica in state.synced:
        if not distributed.is_alive(replica.group.process_group):
            raise CommunicationError(
                f"the process group that reduces the gradients of {replica.names[0]} and others was destroyed. "
                "End training before destroy_process_group(); or, with a new group, call unreplicate() and "
                "replicate()."
            )
    try:
        with OneBackward(state.replicas, keep_graph=call.keep_graph) as state.wanted:
            for replica in state.synced:
                _check_inputs(replica, call)
            _meet(state)
            watched.count_from_here()
            result = _run(state, call)
            _reduce_late(state)
            for replica in state.synced:
                state.completed.append(replica)
                complete_backward(replica, outputs=call.tensors)
    except BaseException as error:
        _leave(state, error)
        raise
    return result


def _meet(state: BackwardState) -> None:
    """Exchange data with other ranks before a reduction: first notify ranks without inputs, then compare parameters."""
    state.is_announced = True
    for replica in state.synced:
        replica.state.step_guard.begin()
    for uneven in [replica.state.uneven for replica in state.synced if replica.state.uneven is not None][:1]:
        uneven.announce(state.synced)
    for replica in state.synced:
        if replica.after.updates and replica.history.synced_backwards:
            check_parameters(replica)  # of the last step: within a backward, ranks may update at different times
    state.launches = list(map(launches_so_far, state.synced))


def _leave(state: BackwardState, error: BaseException) -> None:
    """After a backward failed on this rank, complete its collectives, so that other ranks do not wait for this one."""
    synced = state.synced
    if not any(replica.group.has_others for replica in synced):
        return
    if is_of_other_ranks(error) or (state.is_announced and state.launches is None):
        # The other ranks do not launch, or learn of the error at their next synchronisation point.
        leave({each: 0 for each in synced if state.launches is not None and each.state.step_guard.reduced}, error)
        return
    try:
        if state.launches is None:
            _meet(state)
        assert state.launches is not None
        launches = dict[Replica, int]()
        for replica, before in zip(synced, state.launches, strict=True):
            # Modules that share a group launch one after the other.
            earlier = sum(launches[each] for each in launches if each.planning.groups == replica.planning.groups)
            stages = sum(len(bucket.key.reduction.stages) for bucket in replica.plan.buckets)
            launches[replica] = min(stages, launches_so_far(replica) - before - earlier)
        waited_for = [replica for replica in synced if replica.state.step_guard.reduced is None]
        finalize_plans(waited_for)
        meet_before_launch(waited_for)
        leave(launches, error)
        _follow(state, error)
    except Exception as another:
        if is_of_other_ranks(another):
            raise
        message = "a backward failed without launching its remaining collectives; other ranks wait until their time-out"
        warn(logger, message, exc_info=True)


def _follow(state: BackwardState, error: BaseException) -> None:
    """After an error on this rank, join what follows a reduction, for modules whose gradients the other ranks have."""
    others = [replica for replica in state.synced if replica.state.step_guard.reduced]
    for replica in others:
        if replica not in state.completed:
            with contextlib.suppress(DesyncError, ReductionError):  # `error` is raised instead: it says more
                complete_backward(replica, {})
    for replica in others:
        for each in () if replica.state.is_dry_run else replica.after.updates:
            each.left_out(error)


def _check_inputs(replica: Replica, call: _Call) -> None:
    """Raise if `backward(inputs=...)` omits parameters of a module that must not have unused parameters."""
    if not call.inputs or replica.config.may_be_unused:
        return
    given = set(map(id, map(_leaf_of, call.inputs)))
    left_out = [index for index, parameter in enumerate(replica.parameters) if id(parameter) not in given]
    if left_out:
        raise ReductionError(
            f"backward(inputs=...) names some parameters of a replicated module but not {replica.name_list(left_out)}. "
            "Pass all of them, or none; call it under no_sync(); or pass find_unused_parameters=True to replicate()."
        )


def _run(state: BackwardState, call: _Call) -> tuple[torch.Tensor, ...]:
    """Run a backward: captured, or eagerly if an obstacle prevents the capture or the capture fails."""
    obstacle, is_refused = _obstacle(state, call), False
    if obstacle is None:
        # A local import: it loads Dynamo and Inductor, which a compiled forward has loaded already.
        from dp_compile.engine.compile import described

        with Capturing(state) as turn:
            if turn is None:
                obstacle = "another backward is captured at the moment"
            else:
                try:
                    return _run_captured(state, call)
                except DPCompileError:
                    raise
                except Exception as error:
                    if state.ran:
                        raise
                    obstacle, is_refused = described(error), True
                    if state.is_spoilt:
                        _remember(state, obstacle)
                        raise
                    # Nothing has run and autograd's graph is intact: the eager run raises a user's error unwrapped.
    result = _run_eagerly(state, obstacle, call)
    if is_refused:
        _remember(state, obstacle)
    return result


def _run_captured(state: BackwardState, call: _Call) -> tuple[torch.Tensor, ...]:
    from dp_compile._torch import dynamo
    from dp_compile.engine.capture import CapturedBackward

    replicas = state.replicas
    known = [len(replica.history.captures) for replica in replicas]
    receivers = {each: NoGradients(each) if each.state.sync else UnsyncedGradients(each) for each in replicas}
    with dynamo.CaptureBackward(CapturedBackward) as begun, reporting(receivers):
        try:
            result = call.run()
        finally:
            state.is_spoilt = begun.has_spoilt_graph
    if not state.ran:
        names = ", ".join(replica.names[0] for replica in replicas)
        raise ReductionError(
            f"a backward of the modules that hold {names} ran outside dp_compile's capture. Is torch's own compiled "
            "autograd on? Leave torch._dynamo.config.compiled_autograd off."
        )
    if state.obstacle is not None:
        _say_not_captured(replicas, state.obstacle)
        _remember(state, state.obstacle)
        return result
    for replica, before in zip(replicas, known, strict=True):
        replica.history.backwards["captured" if replica.state.sync else "without sync"] += 1
        if len(replica.history.captures) > before:
            replica.history.structures[_structure(state.outputs)] = COMES_AGAIN
    for replica in state.synced:  # flags were sent before hooks ran, so changes made by hooks are found here
        replica.state.step_guard.note_steps()
        if replica.state.step_guard.stepped:
            indices = sorted(replica.state.step_guard.stepped)
            replica.state.step_guard.stepped.clear()
            raise ReductionError(stepped_message(replica, indices))
    return result


def _remember(state: BackwardState, obstacle: str) -> None:
    """Record that graphs of this structure cannot be captured, so that later backwards do not try again."""
    for replica in state.replicas:
        replica.history.refused[_structure(state.outputs)] = obstacle


def _run_eagerly(state: BackwardState, obstacle: str, call: _Call) -> tuple[torch.Tensor, ...]:
    for replica in state.replicas:
        check_module(replica)
    _say_not_captured(state.replicas, obstacle)
    nodes = filter(autograd.is_aot_backward, _nodes(state.outputs)) if state.is_compiled else ()
    corrected = CorrectedOutputs(nodes, state.replicas)

    def run() -> tuple[torch.Tensor, ...]:
        with corrected:
            return call.run()

    def reached(replica: Replica) -> set[int]:
        return _reached(call.tensors, replica) - {index for of, index in corrected.left_out if of is replica}

    return reduce_eagerly(state.replicas, run, create_graph=call.create_graph, reached=reached)


def _say_not_captured(replicas: Sequence[Replica], obstacle: str) -> None:
    for replica in replicas:
        replica.history.backwards["eager hooks" if replica.state.sync else "without sync"] += 1
    synced = [replica for replica in replicas if replica.reduces]
    warn_once(logger, synced, "a backward is not captured, its hooks run eagerly: %s", obstacle, key=obstacle)


def complete_backward(
    replica: Replica, reduced: Mapping[str, torch.Tensor] | None = None, outputs: Sequence[Any] = ()
) -> None:
    """Finish a synchronised backward: rescale gradients, broadcast buffers, check gradients and parameters.

    Every rank calls it. `reduced`: the reduced gradients by name, given only by a rank that contributed zeros.
    `outputs`: the roots of this rank's backward.
    """
    if reduced is None and replica.state.uneven is not None:
        replica.state.uneven.rescale()
    if replica.config.broadcast_buffers:
        source = 0 if replica.state.uneven is None else replica.state.uneven.source
        distributed.broadcast(replica.buffers, replica.group.process_group, source)
    replica.count_synced()
    if replica.config.check_nan:
        check_finite(replica, reduced, outputs)
    if not replica.after.updates:
        check_parameters(replica)


# --- captured or eager --------------------------------------------------------------------------------------------


def _state_of(call: _Call) -> BackwardState:
    """Return the state of a backward with its modules, none for `torch.autograd.grad`, which accumulates nothing."""
    if not call.accumulate_grad:
        return BackwardState(call.tensors)
    replicas, strangers, is_compiled = _search(call.tensors)
    if call.inputs:  # only these are accumulated
        leaves = [leaf for leaf in map(_leaf_of, call.inputs) if leaf is not None]
        replicas &= {owner[0] for owner in map(owners.find, leaves) if owner is not None}
    elif not replicas:
        for replica in owners if strangers else ():  # all parameters of a module may have been replaced
            if replica.state.sync and replica.config.check_reductions:
                refuse_unreduced(replica, strangers)
    # The gradients of the last module are usually ready first. Any order works that is equal on all ranks.
    in_order = tuple(sorted(replicas, key=lambda replica: -replica.module.number))
    synced = tuple(replica for replica in in_order if replica.reduces)
    return BackwardState(call.tensors, in_order, synced, is_compiled=is_compiled)


def _search(outputs: Iterable[Any]) -> tuple[set[Replica], list[torch.Tensor], bool]:
    """Return the replicas that a backward reaches, parameters that no replica has, and whether it is compiled.

    A backward is compiled if AOTAutograd compiled a part of its graph or `compiled_backward` is active. The walk, depth
    first, ends when the result is known, usually after a few nodes: a compiled backward and a parameter next to it.
    """
    replicas: set[Replica] = set()
    strangers: list[torch.Tensor] = []
    compiled = is_known = False
    all_replicas = len(owners)
    leaf_behind, is_aot_backward = autograd.leaf_behind, autograd.is_aot_backward  # local names: a hot loop
    for node in _nodes(outputs):
        variable = leaf_behind(node)
        if variable is not None:
            owner = owners.find(variable)
            if owner is not None:
                if not replicas:  # only now: backwards that reach no replica need not compute this
                    # If it is known that nothing was compiled, the walk can stop sooner.
                    is_known = not autograd.has_aot_backwards()
                    compiled = compiled or getattr(_scope, "forced", False)
                replicas.add(owner[0])
            elif isinstance(variable, torch.nn.Parameter):
                strangers.append(variable)
        else:
            compiled = compiled or is_aot_backward(node)
        if (compiled or is_known) and len(replicas) == all_replicas:
            break
    return replicas, strangers, compiled


def _reached(outputs: Iterable[Any], replica: Replica) -> set[int]:
    """Return the indices of a module's parameters that are leaves of the autograd graph of `outputs`."""
    variables = map(autograd.leaf_behind, _nodes(outputs))
    places = (owners.find(variable) for variable in variables if variable is not None)
    return {place[1] for place in places if place is not None and place[0] is replica}


def _nodes(outputs: Iterable[Any]) -> Iterator[Any]:
    """Yield, depth first, the nodes of the autograd graph that starts at these tensors, gradient edges or nodes."""
    seen: set[Any] = set()
    stack = list(map(_node_of, outputs))
    while stack:
        node = stack.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            stack += [following for following, _ in node.next_functions]


def _node_of(output: Any) -> Any:
    """Return the node at which a backward from an output starts. For a leaf, it is the AccumulateGrad node."""
    if not isinstance(output, torch.Tensor):
        return getattr(output, "node", output)
    if output.grad_fn is not None or not output.requires_grad:
        return output.grad_fn
    return torch.autograd.graph.get_gradient_edge(output).node


def _leaf_of(given: Any) -> torch.Tensor | None:
    """Return a tensor of `backward(inputs=...)` itself, the leaf of a gradient edge, `None` if the edge has no leaf."""
    return given if isinstance(given, torch.Tensor) else autograd.leaf_behind(getattr(given, "node", None))


def _obstacle(state: BackwardState, call: _Call) -> str | None:
    """Return why this backward cannot be captured, `None` if it can be captured."""
    replicas = state.replicas
    if not state.synced:
        return "no gradient in it is reduced"  # autograd runs AOTAutograd's code: a capture would only cost compilation
    if not state.is_compiled:
        return "its forward was not compiled; call torch.compile(model) for one graph with fused all-reduces"
    if (obstacle := _obstacle_of_tensors(replicas, call.tensors) or _obstacle_of_modules(replicas)) is not None:
        return obstacle
    if call.create_graph:
        return "create_graph=True"
    if torch.is_anomaly_enabled():
        return "anomaly mode is on"
    if autograd.dispatch_mode_is_active():
        return "a TorchDispatchMode is on"
    if compiler.forced_eager():
        return "compilation is switched off"
    return _obstacle_of_structure(replicas, call.tensors)


def _obstacle_of_tensors(replicas: Sequence[Replica], outputs: Sequence[Any]) -> str | None:
    if not any(replica.module.dtensors for replica in replicas):
        return None
    # Compiled forwards record no DTensor nodes. A captured graph with DTensor nodes cannot be traced (torch 2.13).
    if any(map(is_dtensor, outputs)) or any(map(autograd.leaves_dtensors, _nodes(outputs))):
        return "operations on DTensors in it were not compiled"
    if any(adding_cannot_be_traced(each.parameters[index].grad) for each in replicas for index in each.module.dtensors):
        return "it accumulates into DTensor gradients that are views of buckets, which this torch cannot trace"
    return None


def _obstacle_of_modules(replicas: Sequence[Replica]) -> str | None:
    called = next((hook for each in replicas if (hook := each.called_hook) is not None), None)
    if called is not None:
        return f"comm hook {called.name} is called with each bucket"
    if len({each.config.backend for each in replicas}) > 1:
        return "modules in it have different backends"
    if any(len(replica.history.captures) >= MOST_CAPTURES for replica in replicas):
        return f"a module in it has {MOST_CAPTURES} compiled backwards already, for other graphs"
    if not all(replica.state.reduces_gradients for replica in replicas):
        return "no gradient of a module in it is reduced"
    if any(replica.module.sparse for replica in replicas):
        return "gradients in it are sparse"
    if any(replica.module.beside_shards for replica in replicas):
        return "parts of the module are managed by fully_shard"
    return None


def _obstacle_of_structure(replicas: Sequence[Replica], outputs: Sequence[Any]) -> str | None:
    """Return why this autograd graph is not captured: a capture failed before, or the graph is still too rare."""
    history = replicas[0].history
    compiled = len(history.captures) - history.captures_of_other_plans
    all_at_once = compiled < AT_ONCE or replicas[0].state.is_dry_run
    if all_at_once and not history.refused:
        return None
    structure = _structure(outputs)
    if structure in history.refused or all_at_once:
        return history.refused.get(structure)
    times = history.structures.get(structure, 0)
    if times < COMES_AGAIN:
        history.structures[structure] = times + 1
        return (
            f"its autograd graph varies: {compiled} graphs are compiled, and a further graph only after {COMES_AGAIN} "
            "uses"
        )
    return None


def _structure(outputs: Iterable[Any]) -> int:
    """Return a hash of the autograd graph of `outputs`, equal for equal node types, edges and leaves."""
    numbers: dict[Any, int] = {}
    found: list[object] = []
    stack = list(map(_node_of, outputs))
    while stack:
        node = stack.pop()
        if node is None or node in numbers:
            found.append(numbers.get(node))
            continue
        numbers[node] = len(numbers)
        leaf = autograd.leaf_behind(node)
        found.append(type(node) if leaf is None else id(leaf))
        for following, which in node.next_functions:
            stack.append(following)
            found.append(which)
    return hash(tuple(found))
