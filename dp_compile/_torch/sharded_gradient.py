"""A `.grad` without values: whoever computes with it is told that it is not there. Costs nothing to load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dp_compile.errors import ReductionError

_MESSAGE = (
    "this .grad has no values: each rank has a part of the reduced gradients, and has used it in the backward. "
    "torch.nn.utils.clip_grad_norm_ cannot clip them: pass in_backward(..., shard=True, max_norm=...), and read the "
    "norm from optimizer.total_norm. Where gradients themselves are needed, use in_backward() without shard=True."
)


class ShardedGradient(torch.Tensor):
    """Shape, dtype and device of a gradient of which each rank has used its part. To zero it is allowed."""

    @staticmethod
    def __new__(cls, like: torch.Tensor) -> ShardedGradient:
        made: ShardedGradient = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, like.stride(), dtype=like.dtype, device=like.device
        )
        return made

    def __init__(self, like: torch.Tensor) -> None:
        super().__init__()

    def __repr__(self, *, tensor_contents: Any = None) -> Any:
        return f"ShardedGradient({tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func._schema.name.split("::")[1]
        if name == "zero_":
            return args[0]
        if name == "_foreach_zero_":
            for each in args[0]:
                if not isinstance(each, ShardedGradient):
                    each.zero_()
            return None
        raise ReductionError(_MESSAGE)
