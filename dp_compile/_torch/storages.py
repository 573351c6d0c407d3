"""Memory: who has a part of a block, and kernels for many tensors at once. Loads no compiler."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from dp_compile._torch.autograd import as_outermost_code
from dp_compile._torch.missing import named

with named():
    copy_all: Callable[..., None] = torch._foreach_copy_
    multiply_all: Callable[..., None] = torch._foreach_mul_


def holders(tensor: torch.Tensor) -> tuple[int, int]:
    """Two numbers that are the same again once no more holds a tensor's memory than when they were asked for.

    How many tensors, arrays and so on lie in it; and how many hold its storage as an object of Python, of which there
    is one that everybody gets, so that the first number does not show them (torch 2.13).
    """
    storage = tensor.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)), sys.getrefcount(storage)


@functools.cache
def shows_holders() -> bool:
    """Whether this torch says so, of all who could look at memory later."""
    try:
        with as_outermost_code():  # while something is compiled, tensors are fake
            tensor = torch.empty(4, dtype=torch.uint8, device="cpu")
            alone = holders(tensor)
            for held in _held(tensor):
                if holders(tensor) == alone:
                    return False
                del held
            return holders(tensor) == alone
    except (AttributeError, TypeError, RuntimeError):
        return False


def _held(tensor: torch.Tensor) -> Iterator[Any]:
    """The memory of a tensor, held in different ways, one after the other."""
    yield tensor[1:]
    yield tensor.detach()
    yield tensor.numpy()
    yield tensor.untyped_storage()
    yield tensor.detach().__dlpack__()
