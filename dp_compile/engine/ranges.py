"""Named ranges for `torch.profiler`: a recorded trace shows the work of this package by name.

dp_compile::module 0 backward                                          from its start to its last reduced gradient
dp_compile::module 0 bucket 3 (blocks.1.expand.weight .. +4) launch    or `wait`, in the backward or the next forward
dp_compile::module 0 update                                            after reductions: `update` or `gather`; or
                                                                       `forward`, which waits for updates
dp_compile::module 0 compile                                           compilation, inside the range of its backward

The range of a backward of two modules is named `modules 0, 1`. `insight/profile.py` reads these names. Without a
profiler nothing is timed or dispatched.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch

from dp_compile._torch import autograd
from dp_compile.fx.collectives import WAIT as WAIT_TENSOR
from dp_compile.fx.collectives import is_launch
from dp_compile.plan.buckets import UNUSED_FLAGS, Bucket
from dp_compile.plan.reduction import launch_order
from dp_compile.replica.replica import Replica

BACKWARD: Final = "backward"
COMPILE: Final = "compile"
UPDATE: Final = "update"
GATHER: Final = "gather"
FORWARD: Final = "forward"
LAUNCH: Final = "launch"
WAIT: Final = "wait"


def during(what: str, *replicas: Replica) -> contextlib.AbstractContextManager[Any]:
    """Return a profiler range around work for these modules; a null context without modules or profiler."""
    if not replicas or not autograd.profiler_is_on():
        return contextlib.nullcontext()
    numbers = ", ".join(str(replica.module.number) for replica in replicas)
    return torch.profiler.record_function(f"dp_compile::module{'s' * (len(replicas) > 1)} {numbers} {what}")


def during_bucket(what: str, replica: Replica, number: int, bucket: Bucket) -> contextlib.AbstractContextManager[Any]:
    """Return a profiler range around a launch or wait of the bucket with this number in the plan."""
    if not autograd.profiler_is_on():
        return contextlib.nullcontext()
    return during(f"bucket {number} ({members_in_short(bucket)}) {what}", replica)


def members_in_short(bucket: Bucket) -> str:
    """Return the name of a bucket's first gradient and the number of gradients after this one."""
    names = [name for member in bucket.members if (name := member.gradient.name) != UNUSED_FLAGS] or ["flags only"]
    return names[0] if len(names) == 1 else f"{names[0]} .. +{len(names) - 1}"


class BucketRanges(autograd.TorchDispatchMode):
    """A dispatch mode that puts profiler ranges around the collectives of buckets in compiled code.

    It is pushed only around compiled code, so it causes no recompilation. Launches run in the order of the plans; a
    launch whose size differs from that of the next expected one belongs to no bucket. A bucket with several stages has
    a range for its first launch and for each wait.
    """

    # Activation checkpointing calls higher-order operators that draw random numbers again.
    supports_higher_order_operators = True

    def __init__(self, replicas: Sequence[Replica]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._expected: list[_Expected] = []
        for replica in replicas:
            buckets = replica.plan.buckets
            for number, stage in launch_order([bucket.key.reduction.stages for bucket in buckets]):
                reduction = buckets[number].key.reduction
                numel = None if reduction.hook is not None else list(reduction.numels(buckets[number].numel))[stage]
                self._expected.append(_Expected((replica, number, buckets[number]), numel, stage == 0))
        self._launched = 0
        self._in_flight: dict[int, _Expected] = {}  # by address of the reduced tensor, from launch to wait

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, so that torch does not disable Dynamo around each op: in compiled backwards it is off already.

        Disabling takes longer than a small op: a step of 2,000 small parameters took 79 ms, and takes 44 (torch 2.13).
        """
        return False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if is_launch(func):
            return self._launch(func, args, kwargs or {})
        if func is WAIT_TENSOR and (of := self._in_flight.pop(args[0].data_ptr(), None)) is not None:
            with during_bucket(WAIT, *of.bucket):
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _launch(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        expected = self._expected[self._launched] if self._launched < len(self._expected) else None
        # A collective of several tensors is the model's own.
        if expected is None or isinstance(args[0], list) or expected.numel not in (None, args[0].numel()):
            return func(*args, **kwargs)
        self._launched += 1
        with during_bucket(LAUNCH, *expected.bucket) if expected.is_first else contextlib.nullcontext():
            result = func(*args, **kwargs)
        self._in_flight[result.data_ptr()] = expected
        return result


class _Expected(NamedTuple):
    """One launch of a collective that compiled code should make according to the plan."""

    bucket: tuple[Replica, int, Bucket]
    numel: int | None  # `None`: a functional hook may send any size
    is_first: bool  # whether it is the first launch of its bucket
