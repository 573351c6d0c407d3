"""Workloads and modes by the names that suite files use: built in, or `package.module:function` of the user.

What follows the colon of a built-in name is its argument: `ddp:5`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, cast

from dp_compile.bench import modes, workloads
from dp_compile.bench.contract import Mode, Workload
from dp_compile.errors import ConfigError


@dataclass(frozen=True, slots=True)
class _Shelf:
    """One kind of thing: what is built in, how it is made by its name, and what has to be in the user's own."""

    noun: str
    known: Iterable[str]
    make: Callable[[str], Any]
    attributes: tuple[str, ...]


_WORKLOADS: Final = _Shelf(
    "workload", workloads.WORKLOADS, workloads.workload, ("name", "build", "batch", "loss", "lr")
)
_MODES: Final = _Shelf("mode", modes.MODES, modes.mode, ("name", "is_bound", "why_not", "prepare"))


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
    base, _, _ = name.rpartition(":")
    if name in shelf.known or base in shelf.known:
        return shelf.make(name)
    if base:
        return _imported(shelf, name)
    allowed = ", ".join(sorted(shelf.known))
    raise ConfigError(f"unknown {shelf.noun} {name!r}. Built in: {allowed}. Your own: 'package.module:function'.")


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
