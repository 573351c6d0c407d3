"""The error where the installed torch lacks a private name."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from dp_compile.errors import UnsupportedTorchError


@contextlib.contextmanager
def named() -> Iterator[None]:
    """Inside, a private name that is missing is one clear error.

    Raises:
        UnsupportedTorchError: an import or an attribute of torch failed.
    """
    try:
        yield
    except (ImportError, AttributeError) as error:
        raise UnsupportedTorchError(
            f"dp_compile needs a private name that torch {torch.__version__} does not have: {error}. "
            "Install a torch in the supported range: pip install 'torch>=2.11,<2.16'."
        ) from error
