"""Compiled autograd is a switch of the whole process: when it is on, and whose turn it is.

It is on only while a backward of ours enters the engine; other threads' backwards wait for that moment to pass, and at
most one backward is captured at a time. Loads no compiler: every backward of the process passes here.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from dp_compile._torch import compiler
from dp_compile.engine.replica import Replica


@dataclass(eq=False, slots=True)
class Backward:
    """One backward that is being captured. `replicas` are in the order in which their collectives run."""

    replicas: tuple[Replica, ...]
    thread: int = field(default_factory=threading.get_ident)
    ran: bool = False
    is_new: bool = False
    """Code was made, or found, for it."""


_turn = threading.Lock()
"""Held from the start to the end of a captured backward: there can be one at a time in a process."""
_window = threading.Lock()
"""Held while compiled autograd is on: it is on for the whole process, so other threads' backwards have to wait."""
_current: Backward | None = None


@contextlib.contextmanager
def try_capturing(
    replicas: Sequence[Replica], capture: Callable[[], contextlib.AbstractContextManager[None]]
) -> Iterator[Backward | None]:
    """Capture the backward that starts inside; `None` if another one is in progress, here or in another thread."""
    global _current
    if compiler.capture_is_running() or not _turn.acquire(blocking=False):
        yield None
        return
    try:
        with _window:
            _current = Backward(tuple(replicas))
            try:
                with capture():
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


@contextlib.contextmanager
def outside() -> Iterator[None]:
    """Let other threads in while captured code runs: compiled autograd is off then. `_current` stays set."""
    _window.release()
    try:
        yield
    finally:
        _window.acquire()


def current() -> Backward | None:
    """The backward of this thread that is being captured."""
    found = _current
    return found if found is not None and found.thread == threading.get_ident() else None
