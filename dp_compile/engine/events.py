"""What the engine tells of synchronised backwards and compilations, and to whom. It knows none of the listeners.

Clocks, dumps and ranges in a profiler's trace are listeners. A module has observers of its own (`Replica.observers`);
those of `_always` see every module.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import torch

from dp_compile._torch import autograd
from dp_compile.fx.collectives import is_launch, is_wait_op
from dp_compile.plan.buckets import BucketPlan
from dp_compile.plan.ready_times import Launches
from dp_compile.plan.reduction import launch_order

if TYPE_CHECKING:
    from torch import fx

    from dp_compile.engine.replica import Replica
    from dp_compile.passes.result import GraphPass

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

_always: Final[list[str | Observer]] = ["dp_compile.insight.dumps:observer", "dp_compile.insight.ranges:observer"]
"""Observers of every module, as `module:name`, imported with the first event: the engine imports no room above it."""


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


class BucketEvents(autograd.TorchDispatchMode):
    """Recognises the collectives of buckets among the ops that code calls, and tells an audience.

    Launches run in the order of the plans. One that does not have the sizes of the one that is next is somebody else's.
    Of a bucket with several stages the first launch is told, and each wait.
    """

    # Code with activation checkpointing calls such: what draws random numbers once more.
    supports_higher_order_operators = True

    def __init__(self, plans: Sequence[BucketPlan], audience: Audience) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._expected = [each for module, plan in enumerate(plans) for each in _launches(module, plan)]
        self._audience = audience
        self._launched = 0
        self._place_at: dict[int, tuple[int, int]] = {}
        """Module and bucket by the address of what is reduced. It stays there until it has been waited for."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether torch switches Dynamo off around each op: it would be off already, where compiled backwards run.

        It takes longer than small ops do: a step with 2,000 small parameters took 79 ms, and takes 44 (torch 2.13).
        """
        return False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if is_launch(func):
            return self._launch(func, args, kwargs or {})
        if is_wait_op(func) and (place := self._place_at.pop(args[0].data_ptr(), None)) is not None:
            with self._audience.waiting(*place):
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _launch(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        number = self._launched
        expected = self._expected[number] if number < len(self._expected) else None
        if expected is None or expected.numels not in (None, [each.numel() for each in _listed(args[0])]):
            return func(*args, **kwargs)
        self._launched += 1
        with self._audience.launching(*expected.place) if expected.is_first else contextlib.nullcontext():
            result = func(*args, **kwargs)
        self._place_at |= {each.data_ptr(): expected.place for each in _listed(result)}
        return result


class _Expected(NamedTuple):
    """A launch: of which module's bucket, how large its tensors are, and whether it is the bucket's first.

    What a functional hook sends may have any size.
    """

    place: tuple[int, int]
    numels: list[int] | None
    is_first: bool


def _launches(module: int, plan: BucketPlan) -> Iterator[_Expected]:
    stages = [bucket.key.reduction.stages for bucket in plan.buckets]
    numels = [[bucket.key.reduction.numels(numel) for numel in bucket.tensor_numels] for bucket in plan.buckets]
    given = [list(zip(*each, strict=True)) for each in numels]
    for bucket, stage in launch_order(stages):
        by_hook = plan.buckets[bucket].key.reduction.hook is not None
        yield _Expected((module, bucket), None if by_hook else list(given[bucket][stage]), stage == 0)


def _listed(value: Any) -> Sequence[torch.Tensor]:
    return value if isinstance(value, (list, tuple)) else (value,)


BLOCKED_S: Final = 100e-6
"""A wait that takes longer found its collective not finished. One that did not block takes 5 to 40 us (measured)."""


class TimedBucket(NamedTuple):
    """One bucket in one backward, in seconds after its start.

    `waited_s`: how long its waits took, together. `finish_s`: the end of the last one that blocked; if none did, the
    collective was over at some time between `launch_s` and `wait_s`, and the answer is `None`.
    """

    launch_s: float
    wait_s: float
    waited_s: float
    finish_s: float | None


class LaunchClock(BackwardListener):
    """Notes when each bucket is launched and waited for, on the device's own clock. Listens to one backward, and to
    what follows it.

    Args:
        device: whose clock.
        then: called with the clock when the backward has ended without an exception.

    On a GPU a wait is measured on the stream: from where compute has come to it to where it may go on.
    """

    def __init__(self, device: torch.device, then: Callable[[LaunchClock], None] | None = None) -> None:
        self.voided = ""
        """Why it says nothing: what was told of the backward means nothing."""
        self._device = device
        self._then = then
        self._launches: list[Stamp] = []
        self._waits: list[_Wait] = []
        self._follows: list[tuple[str, Stamp, Stamp]] = []
        self._done: Stamp | None = None
        self._end: Stamp | None = None
        self._start = Stamp(device)

    def __exit__(self, *error: Any) -> None:
        self._end = Stamp(self._device)
        if self._then is not None and error[0] is None:
            self._then(self)

    @contextlib.contextmanager
    def launch(self, module: int, bucket: int) -> Iterator[None]:
        self._launches.append(Stamp(self._device))
        self._done = None
        yield

    @contextlib.contextmanager
    def wait(self, module: int, bucket: int) -> Iterator[None]:
        begin = Stamp(self._device)
        self._done = self._done or begin
        yield
        self._waits.append(_Wait(bucket, begin, Stamp(self._device)))

    @contextlib.contextmanager
    def follow(self, module: int, what: str) -> Iterator[None]:
        begin = Stamp(self._device)
        yield
        self._follows.append((what, begin, Stamp(self._device)))

    def void(self, why: str) -> None:
        self.voided = why

    def result(self) -> Launches | None:
        """Launches, and the first wait after the last one; `None` if nothing was launched and waited for.

        Stops the host until a GPU has come so far. Code that waits before it has launched everything looks slower than
        it is: what it waits for counts as compute.
        """
        if self._done is None or not self._launches:
            return None
        return Launches(
            tuple(stamp.seconds_after(self._start) for stamp in self._launches), self._done.seconds_after(self._start)
        )

    def start_s_after(self, earlier: LaunchClock) -> float:
        """How long after another backward this one started."""
        return self._start.seconds_after(earlier._start)

    def backward_s(self) -> float:
        """From the start to the end of the block."""
        assert self._end is not None
        return self._end.seconds_after(self._start)

    def follows(self) -> list[tuple[str, float, float]]:
        """What followed the reductions, in the order in which it ended: what, from when to when."""
        return [
            (what, begin.seconds_after(self._start), end.seconds_after(self._start))
            for what, begin, end in self._follows
        ]

    def launched(self) -> int:
        """How many buckets were launched."""
        return len(self._launches)

    def buckets(self, count: int) -> tuple[TimedBucket, ...] | None:
        """The buckets in the plan's order; `None` if not each of `count` was launched and waited for."""
        waits: dict[int, list[_Wait]] = {number: [] for number in range(count)}
        for wait in self._waits:
            waits[wait.bucket].append(wait)
        if len(self._launches) != count or not all(waits.values()):
            return None
        return tuple(self._timed(stamp, waits[number]) for number, stamp in enumerate(self._launches))

    def _timed(self, launch: Stamp, waits: list[_Wait]) -> TimedBucket:
        spans = [(w.begin.seconds_after(self._start), w.end.seconds_after(self._start)) for w in waits]
        return TimedBucket(
            launch.seconds_after(self._start),
            spans[0][0],
            sum(end - begin for begin, end in spans),
            max((end for begin, end in spans if end - begin > BLOCKED_S), default=None),
        )


class Stamp:
    """A moment on the host's clock, or on a GPU's stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._event: torch.Event | None = None
        self._time_s = time.perf_counter()
        if device.type != "cpu":
            self._event = torch.Event(device, enable_timing=True)
            self._event.record()

    def seconds_after(self, start: Stamp) -> float:
        if self._event is None or start._event is None:
            return self._time_s - start._time_s
        self._event.synchronize()
        return float(start._event.elapsed_time(self._event)) / 1e3


class _Wait(NamedTuple):
    bucket: int
    begin: Stamp
    end: Stamp
