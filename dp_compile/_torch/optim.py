"""What `torch.optim` and `torch.amp` do between their public calls, and the `.grad` of a sharded optimizer."""

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
    """The update of an optimizer's class, without the hooks that stand around `step()`. Autocast is for forwards,
    inside of which this may run: Adafactor multiplies matrices."""
    step: Any = type(optimizer).step
    with _DisableAutocast():
        (step.__wrapped__ if getattr(step, "hooked", False) else step)(optimizer)


def found_inf_tensors(scaler: GradScaler, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Where `scaler.unscale_(optimizer)` has noted, for each device, whether what it looked at was not finite."""
    return list(_found_inf(scaler, optimizer).values())


def note_backward(scaler: GradScaler, optimizer: torch.optim.Optimizer) -> None:
    """Note at a scaler that gradients of an optimizer are there, until `scaler.update()`, which forgets its notes."""
    scaler._per_optimizer_states[id(optimizer)]["dp_compile"] = True


def awaits_update(scaler: GradScaler, optimizer: torch.optim.Optimizer) -> bool:
    """Whether `scaler.update()` is to come for what `note_backward` noted."""
    return "dp_compile" in scaler._per_optimizer_states.get(id(optimizer), ())


def steps_in_backward(parameter: torch.Tensor) -> bool:
    """Whether torch's `_apply_optimizer_in_backward` made an optimizer that steps with this rank's own gradient."""
    return bool(getattr(parameter, "_in_backward_optimizers", ()))


def mark_for_scaler(optimizer: torch.optim.Optimizer) -> Callable[[], object]:
    """Let every GradScaler call `step()` itself, with what it found in `optimizer.found_inf`; returns what ends that.
    It must end: with the mark a scaler leaves it to the optimizer to unscale and to skip, which only fused ones do."""
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
