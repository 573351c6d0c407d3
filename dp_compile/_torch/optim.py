"""Private state and methods of `torch.optim` and `torch.amp`, and the `.grad` of a sharded optimizer."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dp_compile._torch.missing import named
from dp_compile.errors import ReductionError

with named():
    from torch.amp import GradScaler as GradScaler

    _found_inf: Callable[..., dict[Any, torch.Tensor]] = GradScaler._found_inf_per_device
    _DisableAutocast: Callable[[], contextlib.AbstractContextManager[Any]] = torch._C._DisableAutocast


def step_without_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Run the `step()` of an optimizer's class without step hooks and without autocast. It may run inside a forward
    under autocast, which must not affect the update: Adafactor multiplies matrices."""
    step: Any = type(optimizer).step
    with _DisableAutocast():
        (step.__wrapped__ if getattr(step, "hooked", False) else step)(optimizer)


def found_inf_tensors(scaler: GradScaler, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the per-device `found_inf` tensors that `scaler.unscale_(optimizer)` has recorded."""
    return list(_found_inf(scaler, optimizer).values())


def note_backward(scaler: GradScaler, optimizer: torch.optim.Optimizer) -> None:
    """Record in a scaler that gradients of an optimizer are ready, until `scaler.update()` clears its records."""
    scaler._per_optimizer_states[id(optimizer)]["dp_compile"] = True


def awaits_update(scaler: GradScaler, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether `note_backward` was called for the optimizer since the last `scaler.update()`."""
    return "dp_compile" in scaler._per_optimizer_states.get(id(optimizer), ())


def steps_in_backward(parameter: torch.Tensor) -> bool:
    """Return whether torch's `_apply_optimizer_in_backward` updates the parameter with this rank's local gradient."""
    return bool(getattr(parameter, "_in_backward_optimizers", ()))


def mark_for_scaler(optimizer: torch.optim.Optimizer) -> Callable[[], object]:
    """Mark an optimizer: GradScaler then always calls `step()` and stores its inf check in `found_inf`. Returns the
    function to unmark it, to be called: a scaler expects a marked optimizer to unscale and skip, as fused ones do."""
    if "_step_supports_amp_scaling" in vars(optimizer):
        return lambda: None
    optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
    reference = weakref.ref(optimizer)  # its __dict__ may hold it, in a cycle

    def unmark() -> None:
        alive = reference()
        if alive is not None:
            vars(alive).pop("_step_supports_amp_scaling", None)

    return unmark


class ShardedGradient(torch.Tensor):
    """A `.grad` without values: each rank used its shard in the backward. Zeroing is a no-op; other ops raise."""

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
