"""Capture a backward with compiled autograd and run its compiled form.

Compiled autograd is a switch of the whole process. It is on only while a backward of ours enters the engine; other
threads' backwards wait for that moment to pass, and at most one backward is captured at a time.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from dp_compile import _torch
from dp_compile.binding import Binder, Binding, find_sites
from dp_compile.bucket_events import backward_range
from dp_compile.compilation import CompiledBackward, NotTraced, first_line
from dp_compile.errors import ReductionError
from dp_compile.hooks import close_round, open_rounds
from dp_compile.logs import warn_once
from dp_compile.reduced_graph import CapturedGraph
from dp_compile.replica import Replica
from dp_compile.settling import Shares, settle

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Backward:
    """One backward that is being captured. `replicas` are in the order in which their collectives run."""

    replicas: tuple[Replica, ...]
    thread: int = field(default_factory=threading.get_ident)
    ran: bool = False


_turn = threading.Lock()
"""Held from the start to the end of a captured backward: there can be one at a time in a process."""
_window = threading.Lock()
"""Held while compiled autograd is on: it is on for the whole process, so other threads' backwards have to wait."""
_current: Backward | None = None


@contextlib.contextmanager
def try_capturing(replicas: Sequence[Replica]) -> Iterator[Backward | None]:
    """Capture the backward that starts inside; `None` if another one is in progress, here or in another thread."""
    global _current
    if _torch.capture_is_running() or not _turn.acquire(blocking=False):
        yield None
        return
    try:
        with _window:
            _current = Backward(tuple(replicas))
            try:
                with _torch.capture_backward(CapturedBackward):
                    yield _current
            finally:
                _current = None
    finally:
        _turn.release()


def wait_for_window() -> None:
    """Return when no other thread is about to capture whatever runs."""
    current = _current
    if current is not None and current.thread != threading.get_ident():
        with _window:
            pass


class CapturedBackward:
    """A graph of compiled autograd, with a compiled form for each binding that was met. Holds no model."""

    def __init__(self, graph_module: fx.GraphModule) -> None:
        self._graph_module = graph_module
        self._sites = find_sites(graph_module.graph)
        self._binder = Binder(self._sites)
        self._compiled: dict[Binding, CompiledBackward] = {}
        self._shares: dict[Binding, dict[int, Shares]] = {}
        """What is known of ready times, by binding without the plans."""

    def __call__(self, inputs: list[Any], sizes: Any, scalars: Any, hooks: Sequence[Any], packed: Any) -> Any:
        backward = _current
        if backward is None or backward.thread != threading.get_ident():
            # Another thread's backward slipped into our window: run it as it is.
            return torch.compiler.disable(self._graph_module.forward)(inputs, sizes, scalars, hooks, packed)
        backward.ran = True
        with _outside_window():
            return self._run(backward.replicas, inputs, (sizes, scalars, hooks, packed))

    def _run(self, replicas: tuple[Replica, ...], inputs: list[Any], rest: tuple[Any, ...]) -> Any:
        binding = self._binder.bind(replicas, inputs, rest[2])
        if (shares := self._shares.get(binding.without_plans())) is not None:
            settle([replica for replica in replicas if replica.sync], shares)
            binding = self._binder.bind(replicas, inputs, rest[2])
        compiled = self._compiled.get(binding)
        if compiled is None:
            _refuse_shards(rest[2])
            captured = CapturedGraph(self._graph_module, self._sites, binding, len(inputs))
            compiled = self._compiled[binding] = CompiledBackward(captured, replicas)
            compiled.gave_up = _is_reentrant(rest[2], replicas)
        if compiled.gave_up:
            return self._run_uncompiled(replicas, inputs, rest)
        try:
            outputs = compiled(replicas, inputs, rest)
        except NotTraced:
            # Another thread is tracing something, and Dynamo then leaves every frame in the process alone.
            del self._compiled[binding]
            return self._run_uncompiled(replicas, inputs, rest)
        except _torch.RECOMPILE_LIMIT_ERRORS as error:
            compiled.gave_up = True
            message = "a backward is not compiled any more, it was recompiled too often: %s"
            warn_once(logger, replicas, message, first_line(error))
            return self._run_uncompiled(replicas, inputs, rest)
        if compiled.shares:
            # The plans were settled from its graph: what was compiled is the code of another binding.
            self._shares.setdefault(binding.without_plans(), compiled.shares)
            del self._compiled[binding]
            self._compiled[binding.with_plans_of(replicas)] = compiled
        return outputs

    def _run_uncompiled(self, replicas: Sequence[Replica], inputs: list[Any], rest: tuple[Any, ...]) -> Any:
        """Run the graph node by node; the hooks reduce. The same collectives as the compiled form."""
        synced = [replica for replica in replicas if replica.sync]
        settle(synced)
        rounds = open_rounds(synced)
        try:
            with backward_range() if synced else contextlib.nullcontext():
                outputs = torch.compiler.disable(self._graph_module.forward)(inputs, *rest)
                for reduction_round in rounds:
                    reduction_round.finish()
        finally:
            for replica in synced:
                close_round(replica)
        return outputs


@contextlib.contextmanager
def _outside_window() -> Iterator[None]:
    """Let other threads in while captured code runs: compiled autograd is off then. `_current` stays set."""
    _window.release()
    try:
        yield
    finally:
        _window.acquire()


def _is_reentrant(hooks: Sequence[Any], replicas: Sequence[Replica]) -> bool:
    if not any(_torch.is_reentrant_checkpoint(hook) for hook in hooks):
        return False
    warn_once(
        logger,
        replicas,
        "a backward is not compiled, its hooks run eagerly: reentrant checkpointing runs a backward inside it. "
        "Use checkpoint(..., use_reentrant=False).",
    )
    return True


def _refuse_shards(hooks: Sequence[Any]) -> None:
    """Refuse to capture the hooks of `fully_shard`: the captured code gives other gradients than they do (measured)."""
    if any(_torch.is_hook_of_fully_shard(hook) for hook in hooks):
        raise ReductionError(
            "a captured backward reaches a module that fully_shard manages. Call replicate() on a module around it, "
            "after fully_shard(): the backward is then not captured, and the gradients are right."
        )
