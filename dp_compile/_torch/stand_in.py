"""The `.grad` of a parameter whose optimizer is sharded: a tensor without values. Costs nothing to load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dp_compile.errors import ReductionError


class ShardedGradient(torch.Tensor):
    """A `.grad` of which each rank has used its part. To zero it is allowed, to compute with it is an error."""

    @staticmethod
    def __new__(cls, like: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, like.shape, like.stride(), dtype=like.dtype, device=like.device)

    def __init__(self, like: torch.Tensor) -> None:
        super().__init__()

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype})"

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
        raise ReductionError(
            "this .grad has no values: gradients are reduce-scattered, and each rank used its shard in the backward. "
            "torch.nn.utils.clip_grad_norm_ cannot clip it: pass in_backward(..., shard=True, max_norm=...), and read "
            "the norm from optimizer.total_norm. If you need the gradients, use the optimizer without in_backward()."
        )
