"""Compiled autograd is a switch of the whole process: when it is on, and whose turn it is.

It is on only while a backward of ours enters the engine; other threads' backwards wait for that moment to pass, and at
most one backward is captured at a time. Loads no compiler: every backward of the process passes here.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from dp_compile._torch import compiler
from dp_compile.engine.replica import Replica


@dataclass(eq=False, slots=True)
class Backward:
    """One backward that is being captured. `replicas` are in the order in which their collectives run."""

    replicas: tuple[Replica, ...]
    thread: int = field(default_factory=threading.get_ident)
    ran: bool = False
    """Its graph is captured: autograd's own has been given up, and runs no second time."""
    is_spoilt: bool = False
    """Its capture ended where autograd's own graph cannot run either."""
    obstacle: str | None = None
    """Why there is no code for its graph, whose hooks have reduced eagerly instead."""
    holds_window: bool = True


_turn = threading.Lock()
"""Held from the start to the end of a captured backward: there can be one at a time in a process."""
_window = threading.Lock()
"""Held while compiled autograd is on: it is on for the whole process, so other threads' backwards have to wait."""
_current: Backward | None = None


class Capturing:
    """The backward that starts inside may be captured; `None` if another one is in progress, here or elsewhere.

    A class and no generator, as all contexts that every backward enters: between steps of a model the processor has
    forgotten our code, and what a generator takes there can be seen in the steps of a small one.
    """

    __slots__ = ("_backward", "_replicas")

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = replicas
        self._backward: Backward | None = None

    def __enter__(self) -> Backward | None:
        global _current
        if compiler.capture_is_running() or not _turn.acquire(blocking=False):
            return None
        try:
            _window.acquire()  # while another thread's backward enters the engine; an interrupt may come meanwhile
        except BaseException:
            _turn.release()
            raise
        self._backward = _current = Backward(tuple(self._replicas))
        return self._backward

    def __exit__(self, *error: object) -> None:
        global _current
        if self._backward is not None:
            _current = None
            try:
                # An error of C++ that no binding of torch catches goes past `Outside.__exit__` (torch 2.13).
                if self._backward.holds_window:
                    _window.release()
            finally:
                _turn.release()


def wait_for_window() -> None:
    """Return when no other thread is about to capture whatever runs."""
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


def current() -> Backward | None:
    """The backward of this thread that is being captured."""
    found = _current
    return found if found is not None and found.thread == threading.get_ident() else None
