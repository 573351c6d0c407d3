"""Reduction of a bucket by a Python comm hook of torch's DDP, which eager backwards call."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import torch

from dp_compile.comm_hooks.comm_hook import CommHook
from dp_compile.comm_hooks.functional import FunctionalHook
from dp_compile.errors import ReductionError
from dp_compile.passes.reduction import EagerOps
from dp_compile.plan.buckets import Bucket, BucketPlan
from dp_compile.plan.reduction import CALLED


@dataclass(eq=False, slots=True)
class CalledBucket:
    """The argument of a Python hook: a bucket with the methods of `torch.distributed.GradBucket`."""

    number: int  # in launch order
    is_final: bool  # whether it is the last bucket of the backward
    flat: torch.Tensor  # the local gradients, concatenated, not divided
    parts: list[torch.Tensor]  # the gradients in `flat`, each shaped as its parameter
    of: list[torch.Tensor]  # their parameters

    def index(self) -> int:
        return self.number

    def is_last(self) -> bool:
        return self.is_final

    def buffer(self) -> torch.Tensor:
        return self.flat

    def set_buffer(self, buffer: torch.Tensor) -> None:
        self.flat = buffer

    def gradients(self) -> list[torch.Tensor]:
        return self.parts

    def parameters(self) -> list[torch.Tensor]:
        return self.of


def reduce_by_call(
    hook: CommHook, bucket: Bucket, ops: EagerOps, parameters: Sequence[torch.Tensor], plan: BucketPlan
) -> Generator[None, None, torch.Tensor]:
    """Reduce a bucket by a Python hook. Yields after calling the hook, as `reduce_bucket` does after a launch."""
    called = [each for each in plan.buckets if each.key.reduction.hook == CALLED]
    number = next(number for number, each in enumerate(called) if each is bucket)
    flat = ops.fill(1.0, None)
    assert ops.filled is not None
    members = [parameters[member.gradient.index] for member in bucket.members]
    given = CalledBucket(number, number == len(called) - 1, flat, ops.filled[1], members)
    if ops.is_silent:
        yield
        return flat
    assert not isinstance(hook.function, FunctionalHook)
    with ops.launching():
        future = hook.function(hook.state, given)  # type: ignore[arg-type]
    if not callable(getattr(future, "wait", None)):  # a collective's future is of the C++ base class
        returned = type(future).__name__
        raise ReductionError(
            f"comm hook {hook.name} returned a {returned}, not a torch.futures.Future of the reduced bucket."
        )
    ops.work, ops.launches = future, ops.launches + 1
    if flat.is_cpu:
        # On CPUs, callbacks that launch collectives, as in powerSGD_hook, run in a backend thread. Their order relative
        # to the launches of this thread would differ between ranks. On GPUs they run in this thread, when added.
        future.wait()
    yield
    with ops.waiting():
        value = future.wait()
    reduced = value[0] if isinstance(value, (list, tuple)) and len(value) == 1 else value
    if not isinstance(reduced, torch.Tensor) or reduced.numel() != bucket.numel:
        what = f"{reduced.numel()} elements" if isinstance(reduced, torch.Tensor) else f"a {type(reduced).__name__}"
        raise ReductionError(
            f"the future of comm hook {hook.name} holds {what}, not the {bucket.numel} elements of bucket {number}."
        )
    if reduced is not flat:
        with torch.no_grad():
            flat.copy_(reduced.reshape(-1))  # as torch's reducer does: the hook may write to its tensor later
    return flat
