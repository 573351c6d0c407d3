"""Ways to train data parallel: this package's, its peers', and the bounds for both. A file for each family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Final

from dp_compile.bench.contract import Mode
from dp_compile.bench.modes import (
    bounds,
    decent_dp,
    decentralized,
    functional,
    ours,
    python_reducer,
    thunder,
    torch_ddp,
    unavailable,
)
from dp_compile.errors import ConfigError

_FAMILIES: Final = (
    ours,
    decentralized,
    torch_ddp,
    python_reducer,
    functional,
    decent_dp,
    thunder,
    unavailable,
    bounds,
)

MODES: Final[Mapping[str, Mode]] = MappingProxyType({kind.name: kind for each in _FAMILIES for kind in each.KINDS})
"""By name, each in its recommended setting."""


def _arguments() -> dict[str, tuple[str, Callable[[str], Mode]]]:
    """What may follow a mode's name and a colon, as users read it, and what makes the mode of it."""
    takers: list[tuple[Any, Callable[[Any, str], Mode], str]] = [
        *((kind, torch_ddp.with_cap, "MIB") for kind in torch_ddp.KINDS),
        *((kind, python_reducer.with_cap, "MIB") for kind in python_reducer.KINDS),
        *((kind, ours.with_cap, "MIB") for kind in ours.KINDS if kind.strategy in ("fixed", "ddp")),
        *((kind, functional.with_cap, "MIB") for kind in functional.KINDS if kind.settings == functional.BUCKETED),
        *((kind, thunder.with_cap, "MIB") for kind in thunder.KINDS),
        *((kind, bounds.with_cap, "MIB") for kind in bounds.KINDS if kind.name != "compute"),
        *((kind, decentralized.with_topology, "TOPOLOGY") for kind in decentralized.KINDS),
        *((kind, decent_dp.with_topology, "TOPOLOGY") for kind in decent_dp.KINDS),
    ]
    return {kind.name: (shown, partial(make, kind)) for kind, make, shown in takers}


_ARGUMENTS: Final = _arguments()


def mode(name: str) -> Mode:
    """The mode of that name: one of `MODES`, or one with an argument, as `ddp:5` for buckets of 5 MiB.

    Raises:
        ConfigError: there is none, or what follows the colon is not allowed.
    """
    if name in MODES:
        return MODES[name]
    base, _, argument = name.rpartition(":")
    if base in _ARGUMENTS:
        return _ARGUMENTS[base][1](argument)
    shown = (f"{each}[:{_ARGUMENTS[each][0]}]" if each in _ARGUMENTS else each for each in MODES)
    raise ConfigError(f"there is no mode '{name}'. Modes: {', '.join(shown)}.")
