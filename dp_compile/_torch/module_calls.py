"""How a module is called. Costs nothing to load."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn


def compile_in_place(module: nn.Module, **options: Any) -> None:
    """As `module.compile(**options)`, for torch's own classes too: Dynamo skips a frame of theirs that it starts with.

    Modules of one class share a function of ours as their first frame, and with it what was compiled.
    """
    kind = type(module)
    if not kind.forward.__module__.startswith("torch."):
        module.compile(**options)
        return
    if kind not in _first_frames:
        code = _call.__code__.replace(co_name=f"call_{kind.__name__}")  # what was compiled, and its limit, go by code
        _first_frames[kind] = types.FunctionType(code, globals())
    module._compiled_call_impl = functools.partial(torch.compile(_first_frames[kind], **options), module)


def is_compiled(module: object) -> bool:
    """Whether it is what `torch.compile` returns for a module. Not by the name `_orig_mod`: a child may have it."""
    kind = type(module)
    return kind.__name__ == "OptimizedModule" and kind.__module__ == "torch._dynamo.eval_frame"


def _call(module: Any, *args: Any, **kwargs: Any) -> Any:
    return module._call_impl(*args, **kwargs)


_first_frames: Final[weakref.WeakKeyDictionary[type[nn.Module], Callable[..., Any]]] = weakref.WeakKeyDictionary()
