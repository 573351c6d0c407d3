"""Named ranges for `torch.profiler`: while one is on, each backward, launch and wait is in its trace by name."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

from torch.profiler import record_function

from dp_compile._torch import autograd
from dp_compile.engine.events import FORWARD, GATHER, UPDATE, Backward, BackwardListener, Observer
from dp_compile.plan.buckets import UNUSED_FLAGS, Bucket, BucketPlan

BACKWARD_RANGE: Final = "dp_compile::backward"
"""A synchronised backward, from where it is entered to where all has arrived."""
FOLLOWING: Final = {
    what: f"dp_compile::{name}"
    for what, name in ((UPDATE, "update"), (GATHER, "all-gather of parameters"), (FORWARD, "forward with waits"))
}


class BackwardRanges(BackwardListener):
    """Ranges of one backward: `dp_compile::bucket 3 (blocks.1.expand.weight .. +4) launch`, or ` wait`."""

    def __init__(self, plans: Sequence[BucketPlan]) -> None:
        self._plans = plans
        self._whole: AbstractContextManager[Any] = record_function(BACKWARD_RANGE)

    def __enter__(self) -> object:
        return self._whole.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._whole.__exit__(*error)

    def during(self, what: str, module: int, bucket: int) -> AbstractContextManager[Any]:
        return record_function(FOLLOWING[what] if what in FOLLOWING else f"{self._name(module, bucket)} {what}")

    def _name(self, module: int, bucket: int) -> str:
        of, members = f"module {module} " * (len(self._plans) > 1), self._plans[module].buckets[bucket]
        return f"dp_compile::{of}bucket {bucket} ({members_in_short(members)})"


class ProfilerRanges(Observer):
    """Listens to every backward while a profiler is on."""

    def backward(self, begun: Backward) -> BackwardRanges | None:
        return BackwardRanges([each.plan for each in begun.replicas]) if autograd.profiler_is_on() else None


observer: Final = ProfilerRanges()


def members_in_short(bucket: Bucket) -> str:
    """The first member's name, and how many gradients come after it."""
    labels = [member.label for member in bucket.members if member.gradient.name != UNUSED_FLAGS] or ["flags only"]
    return labels[0] if len(labels) == 1 else f"{labels[0]} .. +{len(labels) - 1}"
