"""Peers that come as packages of their own: whether they are there, and if not, how to get them."""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import Any

import torch

from dp_compile.errors import ConfigError


def why_not_there(package: str, *needed: str) -> str | None:
    """Why a peer cannot be imported, for people; `None`: it is installed. It is not imported for that.

    Args:
        package: its name on PyPI.
        needed: packages that it needs beside torch and what comes with torch.
    """
    missing = [name for name in (package, *needed) if not _is_installed(name)]
    if not missing:
        return None
    return (
        f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed: pip install --no-deps "
        f"{' '.join((package, *needed))} (without --no-deps it may replace torch)."
    )


def _is_installed(package: str) -> bool:
    try:
        importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def load(module: str) -> Any:
    """A module of such a package, untyped.

    Raises:
        ConfigError: it cannot be imported with this torch.
    """
    try:
        return importlib.import_module(module)
    except Exception as error:
        raise ConfigError(f"importing {module} with torch {torch.__version__} fails: {_one_line(error)}") from error


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
