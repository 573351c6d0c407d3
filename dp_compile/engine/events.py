"""What the engine tells of synchronised backwards and compilations, and to whom. It knows none of the listeners.

Clocks, dumps and ranges in a profiler's trace are listeners. Observers of `observers_of` a module see its backwards;
those of `_always` see every module. Nothing is timed or dispatched without a listener.
"""

from __future__ import annotations

import contextlib
import logging
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch import fx

from dp_compile._torch import autograd
from dp_compile.engine.replica import Replica
from dp_compile.fx.collectives import WAIT as WAIT_TENSOR
from dp_compile.fx.collectives import is_launch
from dp_compile.plan.buckets import BucketPlan
from dp_compile.plan.reduction import launch_order

CAPTURED: Final = "captured"
"""The stage of a backward as Dynamo leaves it, before any pass."""
COMPILED_IN_IT: Final = "code was compiled in it"

LAUNCH: Final = "launch"
WAIT: Final = "wait"
"""Of a bucket."""
UPDATE: Final = "update"
GATHER: Final = "gather"
FORWARD: Final = "forward"
"""What follows reductions: an optimizer updates parameters, shards are gathered, a forward waits for updates."""


# --- backwards --------------------------------------------------------------------------------------------------------


class Backward(NamedTuple):
    """A synchronised backward that begins.

    `replicas`: the modules that are reduced in it, in launch order. `captured`: it runs as compiled code, not by hooks.
    `untold`: why its launches and waits are not reported; empty if they are.
    """

    replicas: tuple[Replica, ...]
    captured: bool
    untold: str = ""


class BackwardListener:
    """Listens to one backward, as a context from where it is entered to where everything has arrived.

    What an optimizer has deferred to the next forward is waited for when the context has been left already.
    """

    def __enter__(self) -> object:
        return self

    def __exit__(self, *error: Any) -> None:
        """Does nothing here."""

    def during(self, what: str, module: int, bucket: int) -> contextlib.AbstractContextManager[Any]:
        """What runs inside is `what`: `LAUNCH` or `WAIT` of a bucket; or `UPDATE`, `GATHER`, `FORWARD`, of no bucket.

        Args:
            what: one of these five.
            module: its place in `Backward.replicas`.
            bucket: its number in the module's plan; -1: none.
        """
        return contextlib.nullcontext()

    def void(self, why: str) -> None:
        """What was reported of this backward means nothing: code was compiled in it, say."""


class Observer:
    """Is asked at each backward and each compilation whether it wants to listen; here it does not."""

    def backward(self, begun: Backward) -> BackwardListener | None:
        return None

    def compilation(self, begun: Compilation) -> CompilationListener | None:
        return None

    def compiled(self, replicas: Sequence[Replica]) -> None:
        """A backward of these modules was compiled, has run, and is in their records."""


class Listeners(NamedTuple):
    """Of one backward, for one of its modules."""

    listeners: tuple[BackwardListener, ...] = ()
    module: int = 0

    def during(self, what: str, bucket: int = -1) -> contextlib.AbstractContextManager[Any]:
        return self._during(what, bucket) if self.listeners else contextlib.nullcontext()

    @contextlib.contextmanager
    def _during(self, what: str, bucket: int) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for listener in self.listeners:
                stack.enter_context(listener.during(what, self.module, bucket))
            yield

    def void(self, why: str) -> None:
        for listener in self.listeners:
            listener.void(why)


NO_LISTENERS: Final = Listeners()

_always: Final[list[str | Observer]] = ["dp_compile.insight.dumps:observer", "dp_compile.insight.ranges:observer"]
"""Observers of every module, as `module:name`, imported with the first event: the engine imports no room above it."""
_observers: Final[weakref.WeakKeyDictionary[Replica, list[Observer]]] = weakref.WeakKeyDictionary()
_listeners: Final[weakref.WeakKeyDictionary[Replica, Listeners]] = weakref.WeakKeyDictionary()


def observers_of(replica: Replica) -> list[Observer]:
    """Those of this module only; to be changed. They must not hold the replica."""
    return _observers.setdefault(replica, [])


def listeners_of(replica: Replica) -> Listeners:
    """Who listens to the latest backward of a module, for what comes after its end."""
    return _listeners.get(replica, NO_LISTENERS)


def _asked(replicas: Sequence[Replica]) -> Iterator[Observer]:
    for number, observer in enumerate(_always):
        if isinstance(observer, str):
            module, _, name = observer.partition(":")
            _always[number] = observer = getattr(import_module(module), name)
        yield observer
    for replica in replicas:
        yield from _observers.get(replica, ())


@contextlib.contextmanager
def telling_of_backward(begun: Backward) -> Iterator[tuple[Listeners, ...]]:
    """Around a backward: who listens to it, for each of its modules."""
    asked = [observer.backward(begun) for observer in _asked(begun.replicas)] if begun.replicas else []
    listening = tuple(listener for listener in asked if listener is not None)
    told = tuple(Listeners(listening, module) for module in range(len(begun.replicas)))
    _listeners.update(zip(begun.replicas, told, strict=True))
    with contextlib.ExitStack() as stack:
        for listener in listening:
            stack.enter_context(listener)
        yield told


# --- compilations -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Compilation:
    """A captured backward that is about to be compiled.

    `replicas`: the modules that are reduced in it, in launch order. `plans`: one for each module in it, also of those
    without synchronisation. `inputs`: the parameter that each input is, `None` for others. `dump_dir`: where the user
    wants to see what becomes of it.
    """

    replicas: tuple[Replica, ...]
    plans: tuple[BucketPlan, ...]
    inputs: tuple[str | None, ...]
    world_size: int
    backend: str
    dump_dir: str | None


class CompilationListener(Protocol):
    """Sees one backward being compiled. With a listener, code is generated instead of taken from a cache."""

    def __enter__(self) -> object: ...

    def __exit__(self, *error: Any) -> None: ...

    def stage(self, name: str, graph: fx.Graph) -> None: ...

    def code(self, graph: fx.Graph, code: str) -> None: ...


@contextlib.contextmanager
def telling_of_compilation(begun: Compilation) -> Iterator[tuple[CompilationListener, ...]]:
    """Around a compilation: who looks at it."""
    asked = [observer.compilation(begun) for observer in _asked(begun.replicas)]
    with contextlib.ExitStack() as stack:
        listeners = tuple(listener for listener in asked if listener is not None)
        for listener in listeners:
            stack.enter_context(listener)
        yield listeners


def tell_compiled(replicas: Sequence[Replica]) -> None:
    """A backward of these modules was compiled, has run, and is in their records."""
    for observer in _asked(replicas):
        observer.compiled(replicas)


# --- buckets in compiled code -----------------------------------------------------------------------------------------


class BucketEvents(autograd.TorchDispatchMode):
    """Recognises the collectives of buckets among the ops that compiled code calls, and reports them to its listeners.

    Pushed only around code that is compiled already: nothing is compiled again for it. Launches run in the order of
    the plans. One that does not have the sizes of the one that is next is not of a bucket. Of a bucket with several
    stages the first launch is reported, and each wait.
    """

    # Code with activation checkpointing calls such: what draws random numbers once more.
    supports_higher_order_operators = True

    def __init__(self, plans: Sequence[BucketPlan], told: Sequence[Listeners]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._expected = [each for plan, who in zip(plans, told, strict=True) for each in _launches(plan, who)]
        self._launched = 0
        self._place_at: dict[int, _Expected] = {}
        """By the address of what is reduced. It stays there until it has been waited for."""

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
        if func is WAIT_TENSOR and (of := self._place_at.pop(args[0].data_ptr(), None)) is not None:
            with of.told.during(WAIT, of.bucket):
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _launch(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        number = self._launched
        expected = self._expected[number] if number < len(self._expected) else None
        # Several tensors are of a collective of the model's.
        if expected is None or isinstance(args[0], list) or expected.numel not in (None, args[0].numel()):
            return func(*args, **kwargs)
        self._launched += 1
        with expected.told.during(LAUNCH, expected.bucket) if expected.is_first else contextlib.nullcontext():
            result = func(*args, **kwargs)
        self._place_at[result.data_ptr()] = expected
        return result


class _Expected(NamedTuple):
    """A launch: of which bucket, how large its tensor is (`None`: a functional hook may send any size), and whether it
    is the bucket's first."""

    told: Listeners
    bucket: int
    numel: int | None
    is_first: bool


def _launches(plan: BucketPlan, told: Listeners) -> Iterator[_Expected]:
    stages = [bucket.key.reduction.stages for bucket in plan.buckets]
    given = [list(bucket.key.reduction.numels(bucket.numel)) for bucket in plan.buckets]
    for bucket, stage in launch_order(stages):
        by_hook = plan.buckets[bucket].key.reduction.hook is not None
        yield _Expected(told, bucket, None if by_hook else given[bucket][stage], stage == 0)


# --- a clock ----------------------------------------------------------------------------------------------------------

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
    """Notes when each bucket is launched and waited for, and what follows, on the device's own clock.

    Args:
        device: whose clock.
        then: called with the clock when the backward has ended without an exception.

    On a GPU a wait is measured on the stream: from where compute has come to it to where it may go on.
    """

    def __init__(self, device: torch.device, then: Callable[[LaunchClock], None] | None = None) -> None:
        self.voided = ""
        """Why it says nothing."""
        self._device, self._then = device, then
        self._blocks: list[tuple[str, int, Stamp, Stamp]] = []
        self._start = Stamp(device)
        self._end = self._start

    def __exit__(self, *error: Any) -> None:
        self._end = Stamp(self._device)
        if self._then is not None and error[0] is None:
            self._then(self)

    @contextlib.contextmanager
    def during(self, what: str, module: int, bucket: int) -> Iterator[None]:
        begin = Stamp(self._device)
        yield
        self._blocks.append((what, bucket, begin, Stamp(self._device)))

    def void(self, why: str) -> None:
        self.voided = why

    def _spans(self) -> list[tuple[str, int, float, float]]:
        return [(what, bucket, self._s(begin), self._s(end)) for what, bucket, begin, end in self._blocks]

    def _s(self, stamp: Stamp) -> float:
        return stamp.seconds_after(self._start)

    def start_s_after(self, earlier: LaunchClock) -> float:
        """How long after another backward this one started."""
        return self._start.seconds_after(earlier._start)

    def backward_s(self) -> float:
        """From the start to the end of the block."""
        return self._s(self._end)

    def follows(self) -> list[tuple[str, float, float]]:
        """What followed the reductions, in the order in which it ended: what, from when to when."""
        return [(what, begin, end) for what, bucket, begin, end in self._spans() if bucket < 0]

    def buckets(self, count: int) -> tuple[TimedBucket, ...] | None:
        """The buckets in the plan's order; `None` if not each of `count` was launched and waited for."""
        launches = [begin_s for what, _, begin_s, _ in self._spans() if what == LAUNCH]
        waits: dict[int, list[tuple[float, float]]] = {number: [] for number in range(count)}
        for what, bucket, begin_s, end_s in self._spans():
            if what == WAIT:
                waits[bucket].append((begin_s, end_s))
        if len(launches) != count or not all(waits.values()):
            return None
        return tuple(
            TimedBucket(
                launch_s,
                spans[0][0],
                sum(end_s - begin_s for begin_s, end_s in spans),
                max((end_s for begin_s, end_s in spans if end_s - begin_s > BLOCKED_S), default=None),
            )
            for launch_s, spans in zip(launches, waits.values(), strict=True)
        )


class Stamp:
    """A moment on the host's clock, or on a GPU's stream."""

    def __init__(self, device: torch.device) -> None:
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


# --- the log ----------------------------------------------------------------------------------------------------------


def warn_once(logger: logging.Logger, replicas: Iterable[Replica], message: str, *args: object, key: str = "") -> None:
    """Warn, unless that was reported of each of these modules before.

    Args:
        replicas: whom it is about.
        message: with places for `args`.
        key: what may not be reported twice; `message` as it stands if not given, so that `args` do not count.
    """
    new = [replica for replica in replicas if (key or message) not in replica.state.said]
    for replica in new:
        replica.state.said.add(key or message)
    if new:
        logger.warning(message, *args)
