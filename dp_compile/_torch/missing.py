"""Names of torch that are not there: lacking in the installed one, or of a module that was not loaded."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch

from dp_compile.errors import UnsupportedTorchError


@contextlib.contextmanager
def named() -> Iterator[None]:
    """Inside, a private name that is missing is one clear error, an UnsupportedTorchError."""
    try:
        yield
    except (ImportError, AttributeError) as error:
        raise UnsupportedTorchError(
            f"dp_compile needs a private name that torch {torch.__version__} does not have: {error}. "
            "Install a torch in the supported range: pip install 'torch>=2.11,<2.16'."
        ) from error


def loaded(module: str, *names: str) -> Any:
    """An attribute of a module of torch, `None` if nothing has imported that module yet."""
    found: Any = sys.modules.get(module)
    for name in names if found is not None else ():
        found = getattr(found, name)
    return found
