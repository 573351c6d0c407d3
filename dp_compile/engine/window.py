"""The state of one backward, its optimizers, and when compiled autograd, a switch of the whole process, is on for it.

Compiled autograd is on only while a backward of ours enters the engine. Backwards of other threads wait until it is off
again, and at most one backward is captured at a time. Loads no compiler: every backward of the process passes here.
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
    """What changes during one backward that is not inside another one. Made at its start, dropped at its end."""

    outputs: Sequence[Any]  # what it starts from
    replicas: tuple[Replica, ...] = ()  # that it reaches, in the order in which their collectives run
    synced: tuple[Replica, ...] = ()  # those of them whose gradients are reduced
    is_compiled: bool = False  # AOTAutograd compiled a part of its forward, or the user wants it captured all the same
    thread: int = field(default_factory=threading.get_ident)
    wanted: dict[Replica, tuple[UpdateRequest, ...]] = field(default_factory=dict)  # what optimizers update in it
    late: dict[Replica, ReductionRound] = field(default_factory=dict)  # modules that only backwards inside it reach
    nodes: set[Any] | None = None  # between its outputs and its leaves, once a backward inside it asked
    launches: list[int] | None = None
    """Collectives in the groups of `synced` before the first of this backward; `None` until the ranks have met."""
    is_announced: bool = False
    completed: list[Replica] = field(default_factory=list)  # their gradients are reduced, and what follows has begun
    ran: bool = False  # its graph is captured: autograd's own has been given up, and runs no second time
    is_spoilt: bool = False  # its capture ended where autograd's own graph cannot run either
    obstacle: str | None = None  # why it is not captured; if `ran`, its hooks reduced while its graph ran node by node
    holds_window: bool = True


class OneBackward:
    """Around a backward of these modules: calls their optimizers at its start and end. Gives what they update."""

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
"""Held while compiled autograd is on."""
_current: BackwardState | None = None


class Capturing:
    """The backward that starts inside may be captured; `None` if another one is in progress, here or elsewhere.

    A class and no generator, as all contexts that every backward enters: between steps of a model the processor has
    forgotten our code, and what a generator takes there can be seen in the steps of a small one.
    """

    __slots__ = ("_has_turn", "_state")

    def __init__(self, state: BackwardState) -> None:
        self._state, self._has_turn = state, False

    def __enter__(self) -> BackwardState | None:
        global _current
        if compiler.capture_is_running() or not _turn.acquire(blocking=False):
            return None
        try:
            _window.acquire()  # while another thread's backward enters the engine; an interrupt may come meanwhile
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
                # An error of C++ that no binding of torch catches goes past `Outside.__exit__` (torch 2.13).
                if self._state.holds_window:
                    _window.release()
            finally:
                _turn.release()


def wait_for_window() -> None:
    """Return when no other thread is about to capture what runs next."""
    current = _current
    if current is not None and current.thread != threading.get_ident():
        with _window:
            pass


class Outside:
    """Let other threads in while captured code runs: compiled autograd is off then. `_current` stays set."""

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
    """The backward of this thread that is being captured."""
    found = _current
    return found if found is not None and found.thread == threading.get_ident() else None
