"""Names of ops and types of values as short text."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx


def last_name(node: fx.Node) -> str:
    """Return an op's name without namespace and overload: `mm`."""
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target.overloadpacket.__name__)
    return str(getattr(node.target, "__name__", node.target))


def type_text(value: Any) -> str:
    """Return a tensor's dtype and shape, `float32[2, 3]`; for a list `2 tensors`; else the Python type."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, (list, tuple)):
        return f"{len(value)} tensors"
    return type(value).__name__
