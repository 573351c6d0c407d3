"""Peers that come as packages of their own: whether they are there, and if not, how to get them."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch


def why_not_there(module: str, package: str, *needed: str) -> str | None:
    """Why a module cannot be imported, for people; `None`: it can, and has been.

    Args:
        module: its dotted name.
        package: what it comes with on PyPI.
        needed: packages that this one needs beside torch and what comes with torch.
    """
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        names = " ".join((package, *needed))
        return f"{package} is not installed: pip install --no-deps {names} (without --no-deps it may replace torch)."
    try:
        importlib.import_module(module)
    except Exception as error:
        return f"{package} is installed, but importing it with torch {torch.__version__} fails: {_one_line(error)}"
    return None


def load(module: str) -> Any:
    """A module of such a package, untyped."""
    return importlib.import_module(module)


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
