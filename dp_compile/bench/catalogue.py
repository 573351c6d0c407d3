"""Workloads and modes by the names that suite files use: built in, or `package.module:function` of the user.

What follows the colon of a built-in name is its argument: `ddp:5`.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, cast

from dp_compile.bench.contract import Mode, Workload
from dp_compile.errors import ConfigError


@dataclass(frozen=True, slots=True)
class _Shelf:
    """One kind of thing: where it is built in, and what has to be in it."""

    noun: str
    module: str
    table: str
    function: str
    attributes: tuple[str, ...]


_WORKLOADS: Final = _Shelf(
    "workload", "dp_compile.bench.workloads", "WORKLOADS", "workload", ("name", "build", "batch", "loss", "lr")
)
_MODES: Final = _Shelf("mode", "dp_compile.bench.modes", "MODES", "mode", ("name", "is_bound", "why_not", "prepare"))


def workload(name: str) -> Workload:
    """Raises:
    ConfigError: unknown, or the user's function cannot be imported or returns something else.
    """
    return cast(Workload, _find(_WORKLOADS, name))


def mode(name: str) -> Mode:
    """Raises:
    ConfigError: as in `workload`.
    """
    return cast(Mode, _find(_MODES, name))


def _find(shelf: _Shelf, name: str) -> Any:
    known = _known(shelf)
    base, _, _ = name.rpartition(":")
    if name in known or base in known:
        return getattr(importlib.import_module(shelf.module), shelf.function)(name)
    if base:
        return _imported(shelf, name)
    allowed = ", ".join(sorted(known)) or "none is built in"
    raise ConfigError(f"unknown {shelf.noun} {name!r}. Built in: {allowed}. Your own: 'package.module:function'.")


def _known(shelf: _Shelf) -> Iterable[str]:
    try:
        return tuple(getattr(importlib.import_module(shelf.module), shelf.table))
    except ModuleNotFoundError as error:
        if error.name != shelf.module:
            raise
        return ()


def _imported(shelf: _Shelf, name: str) -> Any:
    module, _, function = name.rpartition(":")
    try:
        found = getattr(importlib.import_module(module), function)()
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"{shelf.noun} {name!r} cannot be made: {type(error).__name__}: {error}") from error
    lacking = [attribute for attribute in shelf.attributes if not hasattr(found, attribute)]
    if lacking:
        raise ConfigError(
            f"{name!r} returned a {type(found).__name__} without {', '.join(lacking)}; a {shelf.noun} as in "
            "dp_compile.bench.contract is needed."
        )
    return found
