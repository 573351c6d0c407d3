"""Communication hooks with the interface of torch's DDP: a user's function replaces the all-reduce of a bucket."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as hooks

from dp_compile._torch.distributed import GradBucket
from dp_compile.comm_hooks.functional import FunctionalHook, HookState, register
from dp_compile.errors import ConfigError, require
from dp_compile.plan.backends import Backend
from dp_compile.plan.reduction import CALLED, Averaging

TorchHook = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]
HookFunction = TorchHook | FunctionalHook


@dataclass(frozen=True, slots=True)
class CommHook:
    """A comm hook. If `is_called`, `function(state, bucket)` takes full buckets and returns futures of reduced ones.

    `averaging`: the hook as a reduction; `averaging.hook` is `CALLED` if the engine has to call the function.
    `why_called`: why backwards with the hook are not captured; empty if they are captured.
    """

    state: Any
    function: HookFunction
    averaging: Averaging
    why_called: str = ""

    @property
    def memory(self) -> HookState | None:
        """The state of a functional hook; `None` for other hooks."""
        return self.state if isinstance(self.function, FunctionalHook) else None

    @property
    def is_called(self) -> bool:
        """Whether the engine calls the hook with each bucket. Such backwards are eager."""
        return self.averaging.hook == CALLED

    @property
    def name(self) -> str:
        return str(getattr(self.function, "__qualname__", type(self.function).__name__))

    @property
    def statement(self) -> str:
        """Text that ranks compare, because either all ranks must call the hook or none."""
        memory = "" if self.memory is None else f", after {self.memory.backwards} backwards"
        return self.name if self.is_called else f"{self.name}, as {self.averaging}{memory}"


def make_comm_hook(state: Any, function: HookFunction, group: dist.ProcessGroup, backend: Backend) -> CommHook:
    """Check a hook function and its state, and return both as a `CommHook`."""
    if isinstance(function, FunctionalHook):
        if not isinstance(state, HookState):
            raise ConfigError(
                f"the state of functional comm hook {function!r} must be a HookState, got {type(state).__name__}. Call "
                "register_comm_hook(dp_compile.HookState(), hook)."
            )
        state.check_free()
        key, kept = register(function)  # plans refer to it by key; the CommHook keeps it alive
        return CommHook(state, kept, Averaging(hook=key, rounds=kept.rounds))
    require(callable(function), "a comm hook", "a function of (state, bucket)", type(function))
    cast, why = _cast_of(function), ""
    if cast is None:
        why = "what it computes is unknown, so it cannot be captured. Write a FunctionalHook that does the same"
    elif (dist.group.WORLD if state is None else state) is not group:
        why = "it averages over another group than the module's"
    hook = CommHook(state, function, Averaging(hook=CALLED) if cast is None or why else cast, why_called=why)
    signature = inspect.signature(function)
    try:
        signature.bind(state, None)
    except TypeError as error:
        raise ConfigError(f"comm hook {hook.name} must take (state, bucket), takes {signature}.") from error
    if hook.is_called and hook.name.startswith("bf16_compress") and not backend.bf16_compress:
        raise ConfigError(f"comm hook {hook.name} needs NCCL or XCCL, the group's backend is {backend}.")
    return hook


_WIRES: Final = {  # the dtype in which torch's own hooks average, by their code
    hooks.allreduce_hook.__code__: None,
    hooks.fp16_compress_hook.__code__: "float16",
    hooks.bf16_compress_hook.__code__: "bfloat16",
    # A wrapper makes a new function each time: its code identifies it, and its closure has the wrapped hook.
    hooks.fp16_compress_wrapper(hooks.allreduce_hook).__code__: "float16",
    hooks.bf16_compress_wrapper(hooks.allreduce_hook).__code__: "bfloat16",
}


def _cast_of(function: TorchHook) -> Averaging | None:
    """Return the averaging of one of torch's hooks that only cast and average; `None` for any other function.

    The state of these hooks is the group over which they average (`None`: the default group, not the module's). They
    cast, divide by the number of ranks, sum and cast back. This package divides and casts in one rounding: the same
    numbers if the number of ranks is a power of two, else one rounding less.
    """
    code = getattr(function, "__code__", None)
    if code not in _WIRES:
        return None
    inner = inspect.getclosurevars(function).nonlocals.get("hook", hooks.allreduce_hook)
    return Averaging(_WIRES[code], in_collective=False, all_before=True) if inner is hooks.allreduce_hook else None
