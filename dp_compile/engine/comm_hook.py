"""A communication hook, as torch's DDP has them: the user's function in place of the all-reduce of a bucket."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from dp_compile._torch.distributed import GradBucket
from dp_compile.errors import ConfigError

HookFunction = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]


@dataclass(frozen=True, slots=True)
class CommHook:
    """`function(state, bucket)` is called when a bucket is full and returns a future of the reduced bucket.

    `bucket` is a `torch.distributed.GradBucket`: a flat tensor with the local gradients, not divided. What the future
    holds is what the gradients become; averaging is up to the hook.
    """

    state: Any
    function: HookFunction

    @property
    def name(self) -> str:
        return str(getattr(self.function, "__qualname__", type(self.function).__name__))


def make_comm_hook(state: Any, function: HookFunction, backend: str) -> CommHook:
    """A hook whose function was checked.

    The checks are those of torch's DDP (`_check_comm_hook`), with two differences: the parameters may have any name,
    and annotations that are text are not read.

    Raises:
        ConfigError: not callable, not two parameters, annotated as something else, or bf16 compression on a backend
            that torch does not offer it for.
    """
    if not callable(function):
        raise ConfigError(f"a comm hook must be a function of (state, bucket), got {type(function).__name__}.")
    hook = CommHook(state, function)
    signature = inspect.signature(function)
    try:
        signature.bind(state, None)
    except TypeError as error:
        raise ConfigError(f"comm hook {hook.name} must take (state, bucket), takes {signature}.") from error
    bucket = list(signature.parameters.values())[1] if len(signature.parameters) > 1 else None
    if bucket is not None and _says_otherwise(bucket.annotation, GradBucket):
        raise ConfigError(f"comm hook {hook.name}: the bucket is a dist.GradBucket, annotated {bucket.annotation}.")
    if _says_otherwise(signature.return_annotation, torch.futures.Future[torch.Tensor]):
        raise ConfigError(
            f"comm hook {hook.name} must return torch.futures.Future[torch.Tensor], annotated "
            f"{signature.return_annotation}."
        )
    if hook.name.startswith("bf16_compress") and backend not in ("nccl", "xccl"):
        raise ConfigError(f"comm hook {hook.name} needs NCCL or XCCL, the group's backend is {backend}.")
    return hook


def _says_otherwise(annotation: Any, expected: Any) -> bool:
    return annotation is not inspect.Signature.empty and not isinstance(annotation, str) and annotation != expected
