"""Named ranges for `torch.profiler`: while one is on, each backward, launch and wait is in its trace by name."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch

from dp_compile._torch import autograd
from dp_compile.engine.observers import FORWARD, GATHER, UPDATE, Backward, BackwardListener, Observer
from dp_compile.plan.buckets import UNUSED_FLAGS, Bucket, BucketPlan

BACKWARD_RANGE: Final = "dp_compile::backward"
"""The name of a synchronised backward in a trace, from where it is entered to where everything has arrived."""

FOLLOWING: Final = {
    UPDATE: "dp_compile::update",
    GATHER: "dp_compile::parameters go round",
    FORWARD: "dp_compile::forward that waits for updates",
}
"""The names of what follows reductions, in a backward and behind it."""

_RANGE: Final = re.compile(r"dp_compile::(?:module (\d+) )?bucket (\d+) \((.*)\) (launch|wait)")


class BackwardRanges(BackwardListener):
    """Ranges of one backward."""

    def __init__(self, plans: Sequence[BucketPlan]) -> None:
        self._plans = plans
        self._whole: contextlib.AbstractContextManager[Any] = torch.profiler.record_function(BACKWARD_RANGE)

    def __enter__(self) -> object:
        self._whole.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._whole.__exit__(*error)

    def launch(self, module: int, bucket: int) -> contextlib.AbstractContextManager[Any]:
        return torch.profiler.record_function(f"{self._name(module, bucket)} launch")

    def wait(self, module: int, bucket: int) -> contextlib.AbstractContextManager[Any]:
        return torch.profiler.record_function(f"{self._name(module, bucket)} wait")

    def follow(self, module: int, what: str) -> contextlib.AbstractContextManager[Any]:
        return torch.profiler.record_function(FOLLOWING[what])

    def _name(self, module: int, bucket: int) -> str:
        return range_name(self._plans[module], bucket, module if len(self._plans) > 1 else None)


class ProfilerRanges(Observer):
    """Listens to every backward while a profiler is on."""

    def backward(self, begun: Backward) -> BackwardRanges | None:
        return BackwardRanges([each.plan for each in begun.replicas]) if autograd.profiler_is_on() else None


observer: Final = ProfilerRanges()


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
