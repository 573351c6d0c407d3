"""What Dynamo checks and calls around a compiled backward. Loading this loads Dynamo."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from dp_compile._torch.missing import named

with named():
    import torch._dynamo.compiled_autograd as _compiled_autograd
    from torch._C._dynamo.guards import GlobalStateGuard as _GlobalStateGuard
    from torch._C._dynamo.guards import TensorGuards as _TensorGuards
    from torch._functorch._aot_autograd.schemas import PlainTensorMeta as _PlainTensorMeta

    _prologue_name = "call_aot_bwd_prologue"


class Fits:
    """Whether inputs are like those that code was made for, and torch in the same state: what Dynamo's guards ask."""

    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        for each in inputs:
            # torch's guards throw for a tensor without strides, an error of C++ that nothing catches: it goes past each
            # `finally` of the frames above, or ends the process (torch 2.13).
            each.stride()
        self._tensors = _TensorGuards(*inputs, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        self._state = _GlobalStateGuard()
        self._count = len(inputs)

    def __call__(self, inputs: Sequence[Any]) -> bool:
        return len(inputs) == self._count and self._state.check() and self._tensors.check(*inputs)


def is_prologue(node: fx.Node) -> bool:
    """Whether a captured graph's call puts the inputs of AOTAutograd's backward into order."""
    return (
        getattr(node.target, "__module__", "") == _compiled_autograd.__name__
        and getattr(node.target, "__name__", "") == _prologue_name
    )


def handles_subclasses(prologue: fx.Node) -> bool:
    """Whether such a call unwraps tensors of a class of their own, or expects gradients of one."""
    cells = dict(zip(prologue.target.__code__.co_freevars, prologue.target.__closure__ or (), strict=True))  # type: ignore[union-attr]
    if "bw_prologue_fn" not in cells:  # torch 2.11 has one function for all forwards, which reads their metadata
        metadata = cells["metadata"].cell_contents.subclass_tangent_meta
        return cells["maybe_subclass_metadata"].cell_contents is not None or not _are_plain(metadata)
    inner = cells["bw_prologue_fn"].cell_contents
    metadata = inner.__globals__.get("_tangent_metas_")
    return bool(inner.__closure__) or "_unwrap_" in inner.__globals__ or metadata is None or not _are_plain(metadata)


def _are_plain(metadata: Sequence[Any]) -> bool:
    return all(type(each) is _PlainTensorMeta for each in metadata)


def is_op_of_autograd(target: Any) -> bool:
    """Whether a call is of a function of autograd's own, or of one that was written in C++ with torch."""
    return isinstance(target, _compiled_autograd.Op) and not target.is_custom_function
