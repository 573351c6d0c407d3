"""Recognise launches of buckets, and waits for them, among the ops that compiled code calls. The code stays as it is.

A dispatch mode that is pushed only around code that is compiled already: nothing is compiled anew for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from dp_compile._torch import autograd
from dp_compile.engine.observers import Audience
from dp_compile.fx.collectives import is_launch, is_wait_op
from dp_compile.plan.buckets import BucketPlan
from dp_compile.plan.reduction import launch_order


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
