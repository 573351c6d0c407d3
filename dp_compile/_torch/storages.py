"""How many have a part of a block of memory. Costs nothing to load."""

from __future__ import annotations

import functools

import torch

from dp_compile._torch.missing import named

with named():
    from torch.utils._python_dispatch import _disable_current_modes


def uses(storage: torch.UntypedStorage) -> int:
    """How many tensors lie in it, or hold it otherwise, the caller's own object among them."""
    return int(torch._C._storage_Use_Count(storage._cdata))


@functools.cache
def counts_uses() -> bool:
    """Whether this torch says so, and counts what it should: tensors, views, arrays of NumPy and the storage itself."""
    try:
        with _disable_current_modes():  # while something is compiled, tensors are fake
            storage = torch.empty(4, device="cpu").untyped_storage()
            alone = uses(storage)
            tensor = torch.empty(0, device="cpu").set_(storage, 0, (4,), (1,))
            view = tensor[1:]
            of_both = uses(storage)
            array = view.numpy()
            del tensor, view
            of_array = uses(storage)
            del array
            return (alone, of_both, of_array, uses(storage)) == (1, 3, 2, 1)
    except (AttributeError, TypeError, RuntimeError):
        return False
