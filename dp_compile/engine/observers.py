"""What the engine tells of synchronised backwards, and to whom. It knows nobody who listens.

Clocks, dumps and ranges in a profiler's trace are listeners. A module has listeners of its own (`Replica.observers`);
those of `always` hear of every module. Imports no torch: the package registers listeners when it is imported.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import fx

    from dp_compile.engine.replica import Replica
    from dp_compile.passes.result import GraphPass
    from dp_compile.plan.buckets import BucketPlan

CAPTURED: Final = "captured"
"""The stage of a backward as Dynamo leaves it, before any pass."""

COMPILED_IN_IT: Final = "code was compiled in it"
NO_BUCKETS: Final = "no pass makes buckets"

UPDATE: Final = "update"
GATHER: Final = "gather"
FORWARD: Final = "forward"
"""What follows reductions: an optimizer updates parameters, they go round, a forward runs that waits for updates."""


class Backward(NamedTuple):
    """A synchronised backward that begins.

    `replicas`: the modules that are reduced in it, in launch order. `captured`: it runs as compiled code, not by hooks.
    `untold`: why nothing will be told of its launches and waits; empty if it will.
    """

    replicas: tuple[Replica, ...]
    captured: bool
    untold: str = ""


class BackwardListener:
    """Listens to one backward, as a context from where it is entered to where everything has arrived.

    Launches and waits are blocks, by the module's place in `Backward.replicas` and the bucket's in its plan. What an
    optimizer has left for the next forward is waited for when the context has been left already.
    """

    def __enter__(self) -> object:
        return self

    def __exit__(self, *error: Any) -> None:
        """Does nothing here."""

    def launch(self, module: int, bucket: int) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def wait(self, module: int, bucket: int) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def follow(self, module: int, what: str) -> contextlib.AbstractContextManager[Any]:
        """What runs inside follows reductions, `UPDATE`, `GATHER` or `FORWARD`, in the backward or behind its end."""
        return contextlib.nullcontext()

    def void(self, why: str) -> None:
        """What was told of this backward means nothing: code was compiled in it, say."""


@dataclass(frozen=True, slots=True)
class Compilation:
    """A captured backward that is about to be compiled.

    `replicas`: the modules that are reduced in it, in launch order. `plans`: one for each module in it, also of those
    without synchronisation. `inputs`: the parameter that each input is, `None` for others. `dump_dir`: where the user
    wants to see what becomes of it. `behind`: the names of passes that run behind `passes`, for optimizers.
    """

    replicas: tuple[Replica, ...]
    plans: tuple[BucketPlan, ...]
    passes: tuple[GraphPass, ...]
    inputs: tuple[str | None, ...]
    world_size: int
    backend: str
    dump_dir: str | None
    behind: tuple[str, ...] = ()


class CompilationListener(Protocol):
    """Sees one backward being compiled. While somebody does, code is generated anew instead of taken from a cache."""

    def __enter__(self) -> object: ...

    def __exit__(self, *error: Any) -> None: ...

    def stage(self, name: str, graph: fx.Graph) -> None: ...

    def code(self, graph: fx.Graph, code: str) -> None: ...


class Observer:
    """Is asked at each backward and each compilation whether it wants to listen; here it does not."""

    def backward(self, begun: Backward) -> BackwardListener | None:
        return None

    def compilation(self, begun: Compilation) -> CompilationListener | None:
        return None

    def compiled(self, replicas: Sequence[Replica]) -> None:
        """A backward of these modules was compiled, has run, and is in their records."""


@dataclass(frozen=True, slots=True)
class Audience:
    """Those who listen to one backward."""

    listeners: tuple[BackwardListener, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.listeners)

    @contextlib.contextmanager
    def launching(self, module: int, bucket: int) -> Iterator[None]:
        """What runs inside launches a bucket."""
        with contextlib.ExitStack() as stack:
            for listener in self.listeners:
                stack.enter_context(listener.launch(module, bucket))
            yield

    @contextlib.contextmanager
    def waiting(self, module: int, bucket: int) -> Iterator[None]:
        """What runs inside waits for a bucket."""
        with contextlib.ExitStack() as stack:
            for listener in self.listeners:
                stack.enter_context(listener.wait(module, bucket))
            yield

    @contextlib.contextmanager
    def following(self, module: int, what: str) -> Iterator[None]:
        """What runs inside follows reductions."""
        with contextlib.ExitStack() as stack:
            for listener in self.listeners:
                stack.enter_context(listener.follow(module, what))
            yield

    def void(self, why: str) -> None:
        for listener in self.listeners:
            listener.void(why)


NOBODY: Final = Audience()


class Told(NamedTuple):
    """Who hears of a module's latest backward, and as which of its modules. Kept for what comes behind its end."""

    audience: Audience = NOBODY
    module: int = 0

    def waiting(self, bucket: int) -> contextlib.AbstractContextManager[Any]:
        return self.audience.waiting(self.module, bucket) if self.audience else contextlib.nullcontext()

    def following(self, what: str) -> contextlib.AbstractContextManager[Any]:
        return self.audience.following(self.module, what) if self.audience else contextlib.nullcontext()


UNTOLD: Final = Told()
"""Nobody hears of it."""

_always: list[str | Observer] = []


def always(home: str) -> None:
    """Let a observer hear of every module: `module:name` of an object, imported when there is something to tell."""
    _always.append(home)


def _observers(replicas: Sequence[Replica]) -> Iterator[Observer]:
    for number, observer in enumerate(_always):
        if isinstance(observer, str):
            module, _, name = observer.partition(":")
            _always[number] = observer = getattr(import_module(module), name)
        yield observer
    for replica in replicas:
        yield from replica.observers


class TellingOfBackward:
    """Around a backward: who listens to it. Without synchronised modules there is nothing to tell."""

    __slots__ = ("_begun", "_stack")

    def __init__(self, begun: Backward) -> None:
        self._begun = begun
        self._stack: contextlib.ExitStack | None = None

    def __enter__(self) -> Audience:
        replicas = self._begun.replicas
        if not replicas:
            return NOBODY
        asked = [observer.backward(self._begun) for observer in _observers(replicas)]
        listeners = tuple(listener for listener in asked if listener is not None)
        audience = Audience(listeners) if listeners else NOBODY  # nearly always
        for module, replica in enumerate(replicas):
            replica.told = Told(audience, module)
        if listeners:
            with contextlib.ExitStack() as stack:  # leaves those that it has entered if one fails
                for listener in listeners:
                    stack.enter_context(listener)
                self._stack = stack.pop_all()
        return audience

    def __exit__(self, *error: Any) -> None:
        if self._stack is not None:
            self._stack.__exit__(*error)


@contextlib.contextmanager
def telling_of_compilation(begun: Compilation) -> Iterator[tuple[CompilationListener, ...]]:
    """Around a compilation: who looks at it."""
    asked = [observer.compilation(begun) for observer in _observers(begun.replicas)]
    with contextlib.ExitStack() as stack:
        listeners = tuple(listener for listener in asked if listener is not None)
        for listener in listeners:
            stack.enter_context(listener)
        yield listeners


def tell_compiled(replicas: Sequence[Replica]) -> None:
    """A backward of these modules was compiled, has run, and is in their records."""
    for observer in _observers(replicas):
        observer.compiled(replicas)
