"""Access to torch names that may be missing in the installed torch, or whose module may not be loaded."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch

from dp_compile.errors import UnsupportedTorchError


@contextlib.contextmanager
def named() -> Iterator[None]:
    """Raise UnsupportedTorchError if an import or attribute access in this block fails."""
    try:
        yield
    except (ImportError, AttributeError) as error:
        raise UnsupportedTorchError(
            f"dp_compile needs a private name that torch {torch.__version__} does not have: {error}. "
            "Install a torch in the supported range: pip install 'torch>=2.11,<2.16'."
        ) from error


def loaded(module: str, *names: str) -> Any:
    """Return a (nested) attribute of a torch module, the module if `names` is empty, `None` before its import."""
    found: Any = sys.modules.get(module)
    for name in names if found is not None else ():
        found = getattr(found, name)
    return found
