"""Every backward of the process passes here: which ones are ours, and which way each of them goes.

The entry is a wrapper on the one Python function through which `torch.autograd` enters its engine. It is there while
there are replicated modules, and gone with the last one. A backward without our parameters passes untouched.

| forward of the module            | what reduces                                                      |
|----------------------------------|-------------------------------------------------------------------|
| compiled, whole or in part       | hooks, traced with the backward into one graph                    |
| not compiled                     | torch's C++ reducer; the hooks come back with the first compiled  |
| compiled, capture not possible   | hooks, run eagerly: same collectives, said once in the log        |
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Final

import torch

from dp_compile._torch import autograd, compiler, distributed
from dp_compile.engine import drift, probe
from dp_compile.engine.bucket_events import backward_range
from dp_compile.engine.finite import check_finite
from dp_compile.engine.hooks import close_round, install_hooks, open_rounds
from dp_compile.engine.intact import check_intact, refuse_unreduced
from dp_compile.engine.logs import warn_once
from dp_compile.engine.monitor import Watched
from dp_compile.engine.replica import Replica, Revision, owners
from dp_compile.engine.settling import agree_on_hooks, revise_if_due, settle
from dp_compile.engine.window import Backward, try_capturing, wait_for_window
from dp_compile.errors import ReductionError
from dp_compile.insight.launch_clock import TORCH_REDUCES

logger = logging.getLogger("dp_compile.backward")
BROADCAST_BYTES = 250 * 2**20
FIRST_AS_DDP: Final = "strategy 'ddp' looks at the order of the gradients in the first backward, as torch's DDP does"
_CAPTURE_PATIENCE_S = 600.0

_scope = threading.local()
_under_way: set[Replica] = set()
"""The modules whose backward is running in some thread."""
_original: autograd.BackwardEntry | None = None


def install_entry() -> None:
    """Start to look at backwards. Does nothing if that was done already."""
    global _original
    if autograd.backward_entry() is not _enter:
        _original = autograd.backward_entry()
        autograd.set_backward_entry(_enter)


def _remove_entry_if_idle() -> None:
    """Take the wrapper away when the last replicated module is gone, unless somebody wrapped it in turn."""
    if not len(owners) and _original is not None and autograd.backward_entry() is _enter:
        autograd.set_backward_entry(_original)


@contextlib.contextmanager
def compiled_backward() -> Iterator[None]:
    """Capture and compile the backwards inside, also of a forward that was not compiled."""
    before = getattr(_scope, "forced", False)
    _scope.forced = True
    try:
        yield
    finally:
        _scope.forced = before


@dataclass(frozen=True, slots=True)
class _Found:
    """What a backward reaches: replicated modules, in launch order, and whether AOTAutograd compiled any of it."""

    replicas: tuple[Replica, ...]
    compiled: bool

    def without(self, replicas: Set[Replica]) -> _Found:
        return _Found(tuple(each for each in self.replicas if each not in replicas), self.compiled)


_NOTHING = _Found((), compiled=False)


@compiler.untraced("dp_compile decides at each backward how it is reduced")
def _enter(outputs: Sequence[Any], *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    wait_for_window()
    # In `torch.autograd.grad` nothing is accumulated, no hook runs: nothing to reduce.
    found = _search(outputs) if kwargs.get("accumulate_grad") else _NOTHING
    if autograd.graph_task() != autograd.NO_GRAPH_TASK:
        found = found.without(_under_way)
    call = _Call(outputs, args, kwargs)
    if not found.replicas:
        _remove_entry_if_idle()
        return call.run()
    with _marked(found.replicas):
        return _reduce(found, call)


@contextlib.contextmanager
def _marked(replicas: Sequence[Replica]) -> Iterator[None]:
    """A backward of these modules is under way: those inside it, as of reentrant checkpointing, are parts of it."""
    _under_way.update(replicas)
    try:
        yield
    finally:
        _under_way.difference_update(replicas)


@contextlib.contextmanager
def _interrupted_reducers_end(replicas: Sequence[Replica]) -> Iterator[None]:
    """After an exception a reducer of torch waits for the rest of its backward; the next one gets a new reducer."""
    try:
        yield
    except BaseException:
        for replica in replicas:
            _end_reducer(replica)
        raise


def _end_reducer(replica: Replica) -> None:
    if replica.reducer is not None:
        replica.reducer.close()
        replica.reducer = None


def _reduce(found: _Found, call: _Call) -> tuple[torch.Tensor, ...]:
    if any(replica.config.uses_python_hook() for replica in found.replicas):
        probe.check()
    outputs, args, kwargs = call.outputs, call.args, call.kwargs
    synced = [replica for replica in found.replicas if replica.sync]
    with Watched(synced) as watched:
        for replica in synced:
            replica.check_unchanged()
        _announce(synced)
        for replica in synced:
            revise_if_due(replica)
        by_hooks = [replica for replica in found.replicas if _choose_hooks(replica, found.compiled, outputs)]
        watched.count_from_here()
        obstacle = _obstacle(found, create_graph=bool(args[2] if len(args) > 2 else kwargs.get("create_graph")))
        with _interrupted_reducers_end(found.replicas):
            result = _run(by_hooks, obstacle, call)
        for replica in synced:
            _complete(replica, outputs)
    for replica in found.replicas:
        if not replica.sync:
            replica.note_without_sync()
    return result


def _run(by_hooks: Sequence[Replica], obstacle: str | None, call: _Call) -> tuple[torch.Tensor, ...]:
    if not by_hooks:
        return call.run()
    if obstacle is not None:
        return _run_eagerly(by_hooks, obstacle, call)
    with try_capturing(by_hooks, _capture) as backward:
        if backward is not None:
            return _run_captured(by_hooks, backward, call)
    return _run_eagerly(by_hooks, "another backward is captured at the moment", call)


def _capture() -> contextlib.AbstractContextManager[None]:
    """Imported here: it loads Dynamo and Inductor, as the forward's compilation has done by now."""
    from dp_compile.engine.captured import capture

    return capture()


def _announce(replicas: Sequence[Replica]) -> None:
    """Tell ranks that have run out of inputs what is about to be reduced."""
    members = [replica.uneven for replica in replicas if replica.uneven is not None]
    if members:
        members[0].announce(replicas)


def _complete(replica: Replica, outputs: Sequence[Any]) -> None:
    """What a rank does after a synchronised backward of its own."""
    if replica.uneven is not None:
        replica.uneven.rescale()
    if replica.reducer is not None:
        replica.fill_missing()
        if replica.recording is not None:
            replica.recording.skipped[TORCH_REDUCES] += 1
    reduced = {}
    if replica.config.check_nan:
        grads = zip(replica.names, (parameter.grad for parameter in replica.parameters), strict=True)
        reduced = {name: grad for name, grad in grads if grad is not None}
    complete_backward(replica, reduced, outputs)


def complete_backward(replica: Replica, reduced: Mapping[str, torch.Tensor], outputs: Sequence[Any] = ()) -> None:
    """What follows a synchronised backward on every rank, also on one that took part with zeros only.

    Args:
        replica: whose gradients were reduced.
        reduced: the reduced gradients by name, if `check_nan` is on.
        outputs: what the backward started from on this rank.

    Raises:
        ReductionError: `check_nan` is on and a reduced gradient is not finite.
        DesyncError: parameters are not the same on all ranks any more.
    """
    if replica.config.broadcast_buffers:
        source = 0 if replica.uneven is None else replica.uneven.source
        distributed.broadcast(replica.buffers, replica.group.process_group, BROADCAST_BYTES, source)
    replica.synced_backwards += 1
    if replica.config.check_nan:
        check_finite(replica, reduced, outputs)
    drift.check(replica)


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of the engine's entry."""

    outputs: Sequence[Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]

    def run(self) -> tuple[torch.Tensor, ...]:
        """Enter the engine. If another thread's capture is in the way nothing has run yet: wait for its end.

        Raises:
            NotImplementedError: the backward is inside a capture of its own thread.
        """
        assert _original is not None
        deadline = time.monotonic() + _CAPTURE_PATIENCE_S
        depth, _scope.depth = getattr(_scope, "depth", 0), getattr(_scope, "depth", 0) + 1
        try:
            while True:
                try:
                    return _original(self.outputs, *self.args, **self.kwargs)
                except NotImplementedError as error:
                    if depth or not compiler.is_capture_in_the_way(error) or time.monotonic() > deadline:
                        raise
                    time.sleep(0.002)
        finally:
            _scope.depth = depth


def _search(outputs: Sequence[Any]) -> _Found:
    """Walk the autograd graph, depth first, until everything there is to know is known.

    The first leaf is usually a parameter behind a compiled backward, so this ends after a few nodes.
    """
    replicas: set[Replica] = set()
    strangers: list[torch.Tensor] = []
    compiled = bool(getattr(_scope, "forced", False))
    seen: set[Any] = set()
    stack = [output.grad_fn if isinstance(output, torch.Tensor) else output.node for output in outputs]
    all_replicas = len(owners)
    while stack and not (compiled and len(replicas) == all_replicas):
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            owner = owners.find(variable)
            if owner is not None:
                replicas.add(owner[0])
            elif isinstance(variable, torch.nn.Parameter):
                strangers.append(variable)
            continue
        compiled = compiled or autograd.is_aot_backward(node)
        stack.extend(following for following, _ in node.next_functions)
    if not replicas:
        _refuse_unreduced(strangers)
    # The last module is usually the first whose gradients are ready. Any rule serves that is the same on all ranks.
    return _Found(tuple(sorted(replicas, key=lambda replica: -replica.number)), compiled)


def _refuse_unreduced(parameters: Sequence[torch.Tensor]) -> None:
    """The guard for a backward that seems to be of other modules: every parameter of one of ours may be a new one."""
    for replica in owners if parameters else ():
        if replica.sync and replica.config.check_reductions:
            refuse_unreduced(replica, parameters)


def _choose_hooks(replica: Replica, compiled: bool, outputs: Sequence[Any]) -> bool:
    """Whether the hooks reduce in this backward; if not, arm torch's reducer. Switches between the two."""
    if _reduces_by_hooks(replica, compiled):
        if replica.reducer is not None:
            why = "the forward is compiled now" if compiled else "inputs may be uneven"
            logger.info("%s: dp_compile's hooks take over from torch's reducer", why)
            _end_reducer(replica)
            # No hook has noted what was used while torch's reducer was at work, inside no_sync() for example.
            parameters = enumerate(replica.parameters)
            replica.used_without_sync.update(index for index, parameter in parameters if parameter.grad is not None)
        if replica.hooks is None:
            replica.hooks = install_hooks(replica)
        return True
    check_intact(replica)
    if replica.reducer is None:
        assert replica.make_reducer is not None
        if replica.hooks is not None:
            logger.warning(
                "the forward is not compiled: torch's C++ reducer reduces the gradients. "
                "Call torch.compile(model) for one graph with fused all-reduces."
            )
            replica.hooks.remove()
            replica.hooks = None
        replica.reducer = replica.make_reducer()
    if replica.sync:
        replica.reducer.prepare([output for output in outputs if isinstance(output, torch.Tensor)])
    replica.backwards["torch reducer" if replica.sync else "without sync"] += 1
    return False


def _reduces_by_hooks(replica: Replica, compiled: bool) -> bool:
    """Hooks, if the user wants them and the forward of some rank was compiled; nobody has to agree without a sync.

    The ranks ask each other in the first synchronised backward, and while torch's reducer is at work in the second,
    third, fifth, ninth and so on: often after a start that was not compiled, next to never in a long run.
    """
    if not replica.config.uses_python_hook() or replica.comm_hook is not None:
        return False
    done = replica.synced_backwards
    asks = replica.by_hooks is None or (not replica.by_hooks and done & (done - 1) == 0)
    if replica.sync and asks:
        now, replica.by_hooks = agree_on_hooks(replica, compiled)
        return now
    return replica.by_hooks is not False


def _obstacle(found: _Found, *, create_graph: bool) -> str | None:
    """Why this backward cannot be captured, or `None`."""
    if not found.compiled:
        return "its forward was not compiled"
    if any(replica.sync and replica.awaits(Revision.FROM_ARRIVALS) for replica in found.replicas):
        return FIRST_AS_DDP
    if any(replica.beside_shards for replica in found.replicas):
        return "parts of the module are managed by fully_shard"
    if create_graph:
        return "create_graph=True"
    if torch.is_anomaly_enabled():
        return "anomaly mode is on"
    if autograd.dispatch_mode_is_active():
        return "a TorchDispatchMode is on"
    if compiler.forced_eager():
        return "compilation is switched off"
    return None


def _run_captured(replicas: Sequence[Replica], backward: Backward, call: _Call) -> tuple[torch.Tensor, ...]:
    result = call.run()
    if not backward.ran:
        names = ", ".join(replica.names[0] for replica in replicas)
        raise ReductionError(
            f"a backward of the modules that hold {names} ran outside dp_compile's capture. Is torch's own compiled "
            "autograd on? Leave torch._dynamo.config.compiled_autograd off."
        )
    for replica in replicas:
        replica.backwards["captured" if replica.sync else "captured without sync"] += 1
    return result


def _run_eagerly(replicas: Sequence[Replica], obstacle: str, call: _Call) -> tuple[torch.Tensor, ...]:
    for replica in replicas:
        check_intact(replica)
        replica.backwards["eager hooks" if replica.sync else "without sync"] += 1
    synced = [replica for replica in replicas if replica.sync]
    if obstacle is not FIRST_AS_DDP:
        warn_once(logger, synced, "a backward is not captured, its hooks run eagerly: %s", obstacle, key=obstacle)
    settle(synced)
    rounds = open_rounds(synced)
    try:
        with backward_range() if synced else contextlib.nullcontext():
            result = call.run()
            for reduction_round in rounds:
                reduction_round.finish()
    finally:
        for replica in synced:
            close_round(replica)
    return result
