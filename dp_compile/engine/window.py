"""The state of one backward, and contexts around it: for its optimizers, and for the window of compiled autograd.

Compiled autograd is process-wide. It is enabled only while one of our backwards enters the engine (the window), and
backwards of other threads wait. At most one is captured at a time. Loads no compiler: every backward uses this file.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dp_compile._torch import compiler
from dp_compile.replica.replica import Replica

if TYPE_CHECKING:
    from dp_compile.engine.hooks import ReductionRound
    from dp_compile.replica.sinks import UpdateRequest


@dataclass(eq=False, slots=True)
class BackwardState:
    """The mutable state of one outermost backward, created at its start and dropped at its end."""

    outputs: Sequence[Any]  # its roots: tensors, edges or nodes
    replicas: tuple[Replica, ...] = ()  # replicas that it reaches, in the order in which their collectives run
    synced: tuple[Replica, ...] = ()  # those of `replicas` whose gradients are reduced
    is_compiled: bool = False  # AOTAutograd compiled a part of its forward, or the user forces a capture
    thread: int = field(default_factory=threading.get_ident)
    wanted: dict[Replica, tuple[UpdateRequest, ...]] = field(default_factory=dict)  # what optimizers update in it
    late: dict[Replica, ReductionRound] = field(default_factory=dict)  # of modules that only nested backwards reach
    nodes: set[Any] | None = None  # nodes of its graph except leaves, collected for its first nested backward
    launches: list[int] | None = None
    """For each of `synced`, the number of collectives launched in its groups before this backward; set by `_meet`."""
    is_announced: bool = False  # `_meet` has begun
    completed: list[Replica] = field(default_factory=list)  # replicas whose `complete_backward` has begun
    ran: bool = False  # its captured graph has started: autograd's own graph cannot run any more
    is_spoilt: bool = False  # its capture aborted and left autograd's own graph unusable
    obstacle: str | None = None  # why it is not captured or, if `ran`, why its graph ran node by node with hooks
    holds_window: bool = True


class OneBackward:
    """A context around one backward that notifies the optimizers of its modules. Entering returns requested updates."""

    __slots__ = ("_keep_graph", "_replicas", "_wanted")

    def __init__(self, replicas: Sequence[Replica], *, keep_graph: bool) -> None:
        self._replicas, self._keep_graph = replicas, keep_graph

    def __enter__(self) -> dict[Replica, tuple[UpdateRequest, ...]]:
        for replica in self._replicas:
            updates = replica.after.updates
            updates[:] = [each for each in updates if each.is_alive]
            for each in () if replica.state.is_dry_run else updates:
                each.begin()
        self._wanted = {
            replica: tuple(each.update_request(keep_graph=self._keep_graph) for each in replica.after.updates)
            for replica in self._replicas
            if replica.after.updates and replica.state.sync
        }
        return self._wanted

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        for replica in self._replicas:
            if error is not None:
                for each in replica.after.updates:
                    each.interrupted(error)
            elif replica in self._wanted and not replica.state.is_dry_run:
                for each in replica.after.updates:
                    each.ended()


_turn = threading.Lock()
"""Held from the start to the end of a captured backward."""
_window = threading.Lock()
"""Held while compiled autograd is enabled."""
_current: BackwardState | None = None


class Capturing:
    """A context for one captured backward. Entering returns `None` if another capture is in progress in the process.

    It is a class, not a generator: the CPU caches are cold between steps, and the time of a generator is then visible
    in the steps of a small model.
    """

    __slots__ = ("_has_turn", "_state")

    def __init__(self, state: BackwardState) -> None:
        self._state, self._has_turn = state, False

    def __enter__(self) -> BackwardState | None:
        global _current
        if compiler.capture_is_running() or not _turn.acquire(blocking=False):
            return None
        try:
            _window.acquire()  # may wait for another thread's backward, and an interrupt may end the wait
        except BaseException:
            _turn.release()
            raise
        self._has_turn, self._state.holds_window, _current = True, True, self._state
        return self._state

    def __exit__(self, *error: object) -> None:
        global _current
        if self._has_turn:
            _current = None
            try:
                # A C++ exception that no torch binding catches skips `Outside.__exit__` (torch 2.13).
                if self._state.holds_window:
                    _window.release()
            finally:
                _turn.release()


def wait_for_window() -> None:
    """Block while another thread has compiled autograd enabled, which would capture this thread's backward."""
    current = _current
    if current is not None and current.thread != threading.get_ident():
        with _window:
            pass


class Outside:
    """A context that runs captured code with compiled autograd off, so that backwards of other threads may start."""

    __slots__ = ()

    def __enter__(self) -> None:
        assert _current is not None
        _current.holds_window = False
        _window.release()

    def __exit__(self, *error: object) -> None:
        _window.acquire()
        assert _current is not None
        _current.holds_window = True


def current() -> BackwardState | None:
    """Return the backward of this thread that is being captured, `None` if there is none."""
    found = _current
    return found if found is not None and found.thread == threading.get_ident() else None
