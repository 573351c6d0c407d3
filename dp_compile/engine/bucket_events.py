"""Recognise launches of buckets, and waits for them, among the ops that compiled code calls. The code stays as it is.

A dispatch mode that is pushed only around code that is compiled already: nothing is compiled anew for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dp_compile._torch import autograd
from dp_compile.engine.observers import Audience
from dp_compile.fx.collectives import is_launch, is_wait_op
from dp_compile.plan.buckets import BucketPlan


class BucketEvents(autograd.TorchDispatchMode):
    """Recognises the all-reduces of buckets among the ops that code calls, and tells an audience.

    Launches run in the order of the plans. One that does not have the sizes of the bucket that is next is somebody
    else's.
    """

    def __init__(self, plans: Sequence[BucketPlan], audience: Audience) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._places = [(module, number) for module, plan in enumerate(plans) for number in range(len(plan.buckets))]
        self._sizes = [list(bucket.tensor_numels) for plan in plans for bucket in plan.buckets]
        self._audience = audience
        self._launched = 0
        self._place_at: dict[int, tuple[int, int]] = {}
        """Module and bucket by the address of what is reduced. It stays there until it has been waited for."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if is_launch(func):
            return self._launch(func, args, kwargs or {})
        if is_wait_op(func) and (place := self._place_at.get(args[0].data_ptr())) is not None:
            with self._audience.waiting(*place):
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _launch(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        number = self._launched
        if number == len(self._sizes) or [each.numel() for each in _listed(args[0])] != self._sizes[number]:
            return func(*args, **kwargs)
        self._launched += 1
        place = self._places[number]
        with self._audience.launching(*place):
            result = func(*args, **kwargs)
        self._place_at |= {each.data_ptr(): place for each in _listed(result)}
        return result


def _listed(value: Any) -> Sequence[torch.Tensor]:
    return value if isinstance(value, (list, tuple)) else (value,)
