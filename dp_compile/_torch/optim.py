"""What `torch.optim` and `torch.amp` do between their public calls. Costs nothing to load."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import torch

from dp_compile._torch.missing import named

with named():
    from torch.amp import GradScaler as GradScaler

    _found_inf: Callable[..., dict[Any, torch.Tensor]] = GradScaler._found_inf_per_device
    _DisableAutocast: Callable[[], contextlib.AbstractContextManager[Any]] = torch._C._DisableAutocast


def step_without_hooks(optimizer: torch.optim.Optimizer) -> None:
    """The update of an optimizer's class, without the hooks that stand around `step()`.

    Autocast is for forwards, inside of which this may run: Adafactor multiplies matrices.
    """
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

    It must end: with the mark a scaler leaves it to the optimizer to unscale and to skip, which only fused ones do.
    """
    if "_step_supports_amp_scaling" in vars(optimizer):
        return lambda: None
    optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
    reference = weakref.ref(optimizer)  # its __dict__ may hold it, in a cycle

    def unmark() -> None:
        alive = reference()
        if alive is not None:
            vars(alive).pop("_step_supports_amp_scaling", None)

    return unmark
