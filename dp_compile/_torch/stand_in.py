"""Tensors with a shape, a dtype and a device, and no values: to compute with one is an error that says why.

Costs nothing to load.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from dp_compile.errors import ReductionError


class StandIn(torch.Tensor):
    """Base of them. `why`: what the error says."""

    why: ClassVar[str] = ""

    @staticmethod
    def __new__(cls, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, shape, stride, dtype=dtype, device=device)

    def __init__(self, *_: object) -> None:
        super().__init__()

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        raise ReductionError(cls.why)


class ShardedGradient(StandIn):
    """A `.grad` of which each rank has used its part. To zero it is allowed."""

    why = (
        "this .grad has no values: each rank has a part of the reduced gradients, and has used it in the backward. "
        "torch.nn.utils.clip_grad_norm_ cannot clip them: pass in_backward(..., shard=True, max_norm=...), and read "
        "the norm from optimizer.total_norm. Where gradients themselves are needed, use in_backward() without shard."
    )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func._schema.name
        if name == "aten::zero_":
            return args[0]
        if name == "aten::_foreach_zero_":
            for each in args[0]:
                if not isinstance(each, ShardedGradient):
                    each.zero_()
            return None
        return super().__torch_dispatch__(func, types, args, kwargs)


def sharded_gradient(like: torch.Tensor) -> ShardedGradient:
    """What stands in for the gradient of a parameter."""
    made: ShardedGradient = ShardedGradient(like.shape, like.stride(), like.dtype, like.device)
    return made
