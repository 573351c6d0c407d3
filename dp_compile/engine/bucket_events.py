"""Tell who wants to know when compiled code, or a hook, launches a bucket and waits for it. The code stays as it is.

A dispatch mode that is pushed only around code that is compiled already: nothing is compiled anew for it. Named ranges
for `torch.profiler` come from here, `LaunchClock` listens here.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

import torch

from dp_compile._torch import autograd
from dp_compile.fx.collectives import is_launch, is_wait_op
from dp_compile.plan.buckets import UNUSED_FLAGS, Bucket, BucketPlan

BACKWARD_RANGE: Final = "dp_compile::backward"
"""The name of a synchronised backward in a trace, from where it is entered to where everything has arrived."""

_RANGE: Final = re.compile(r"dp_compile::(?:module (\d+) )?bucket (\d+) \((.*)\) (launch|wait)")


class Observer(Protocol):
    """Wants to know of launches and waits, by the bucket's place in launch order."""

    def launch(self, bucket: int) -> contextlib.AbstractContextManager[Any]: ...

    def wait(self, bucket: int) -> contextlib.AbstractContextManager[Any]: ...


Observers = tuple[Observer, ...]


class BucketEvents(autograd.TorchDispatchMode):
    """Recognises the all-reduces of buckets among the ops that code calls, and tells observers.

    Launches run in the plan's order. One that does not have the sizes of the bucket that is next is somebody else's.
    """

    def __init__(self, buckets: Sequence[Bucket], observers: Observers) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sizes = [list(bucket.tensor_numels) for bucket in buckets]
        self._observers = observers
        self._launched = 0
        self._bucket_at: dict[int, int] = {}
        """By the address of what is reduced. It stays there until it has been waited for."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if is_launch(func):
            return self._launch(func, args, kwargs or {})
        if is_wait_op(func) and (bucket := self._bucket_at.get(args[0].data_ptr())) is not None:
            with waiting(self._observers, bucket):
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _launch(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        bucket = self._launched
        if bucket == len(self._sizes) or [each.numel() for each in _listed(args[0])] != self._sizes[bucket]:
            return func(*args, **kwargs)
        self._launched += 1
        with launching(self._observers, bucket):
            result = func(*args, **kwargs)
        self._bucket_at |= {each.data_ptr(): bucket for each in _listed(result)}
        return result


@contextlib.contextmanager
def launching(observers: Observers, bucket: int) -> Iterator[None]:
    """What runs inside launches a bucket."""
    with contextlib.ExitStack() as stack:
        for observer in observers:
            stack.enter_context(observer.launch(bucket))
        yield


@contextlib.contextmanager
def waiting(observers: Observers, bucket: int) -> Iterator[None]:
    """What runs inside waits for a bucket."""
    with contextlib.ExitStack() as stack:
        for observer in observers:
            stack.enter_context(observer.wait(bucket))
        yield


class BucketRanges:
    """While a profiler is on: ranges that carry the bucket's name in its trace."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def launch(self, bucket: int) -> contextlib.AbstractContextManager[Any]:
        return torch.profiler.record_function(f"{self._names[bucket]} launch")

    def wait(self, bucket: int) -> contextlib.AbstractContextManager[Any]:
        return torch.profiler.record_function(f"{self._names[bucket]} wait")


def ranges_if_profiled(plans: Sequence[BucketPlan], only: int | None = None) -> Observers:
    """Nobody, but while a profiler is on: this is asked in every backward.

    Args:
        plans: of the modules that the backward reduces, in the order in which they launch.
        only: for the buckets of this one among them.
    """
    if not autograd.profiler_is_on():
        return ()
    modules = range(len(plans)) if only is None else (only,)
    several = len(plans) > 1
    return (
        BucketRanges(
            [
                range_name(plans[module], number, module if several else None)
                for module in modules
                for number in range(len(plans[module].buckets))
            ]
        ),
    )


def backward_range() -> contextlib.AbstractContextManager[Any]:
    """A range around a backward, while a profiler is on."""
    return torch.profiler.record_function(BACKWARD_RANGE) if autograd.profiler_is_on() else contextlib.nullcontext()


class RangeName(NamedTuple):
    """What a range in a trace says. `module`: which of several in one backward; `kind`: `launch` or `wait`."""

    module: int | None
    bucket: int
    members: str
    kind: str


def range_name(plan: BucketPlan, number: int, module: int | None = None) -> str:
    """How a bucket is called in traces: `dp_compile::bucket 3 (blocks.1.expand.weight .. +4)`."""
    of = "" if module is None else f"module {module} "
    return f"dp_compile::{of}bucket {number} ({members_in_short(plan.buckets[number])})"


def parse_range_name(name: str) -> RangeName | None:
    """The inverse of `range_name` with ` launch` or ` wait` behind it; `None` for other names."""
    found = _RANGE.fullmatch(name)
    if found is None:
        return None
    module, bucket, members, kind = found.groups()
    return RangeName(None if module is None else int(module), int(bucket), members, kind)


def members_in_short(bucket: Bucket) -> str:
    """The first member's name, and how many gradients come after it."""
    labels = [member.label for member in bucket.members if member.gradient.name != UNUSED_FLAGS]
    if not labels:
        return "flags only"
    return labels[0] if len(labels) == 1 else f"{labels[0]} .. +{len(labels) - 1}"


def _listed(value: Any) -> Sequence[torch.Tensor]:
    return value if isinstance(value, (list, tuple)) else (value,)
