"""Suites: each lists the workloads, modes and networks of a benchmark run, and has the run's settings."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dp_compile.bench.modes import mode
from dp_compile.bench.networks import Network
from dp_compile.bench.workloads import workload
from dp_compile.errors import ConfigError, require, require_integer

PACKAGED: Final[Mapping[str, Any]] = tomllib.loads(Path(__file__).with_name("suites.toml").read_text())
SHARED, COLD, WARM = "shared", "cold", "warm"


@dataclass(frozen=True, slots=True)
class Suite:
    """A benchmark of every workload with every mode over every network.

    Args:
        workloads, modes: built-in names, or `package.module:function` that returns a `Workload` or a `Mode`.
        networks: one or more, with distinct names. In TOML, tables with the fields of `Network`.
        reference: the mode in the denominator of ratios.
        ranks: number of processes per mode; a simulated network has one.
        warmup_steps: number of steps after the first gradients and before timed steps; part of the time until warm.
        repetitions: number of timed turns of each mode, 3 or more. The modes take turns.
        steps_per_turn: number of steps timed together, for workloads whose step takes a few milliseconds.
        starts: how often each mode is started and timed until warm. The processes of the last start do the turns.
        caches: of compiled code. `shared`: machine's; `cold`: empty at each start; `warm`: filled by an untimed start.
    """

    name: str
    workloads: tuple[str, ...]
    modes: tuple[str, ...]
    networks: tuple[Network, ...]
    reference: str = "oracle"
    ranks: int = 2
    warmup_steps: int = 12
    repetitions: int = 15
    steps_per_turn: int = 1
    starts: int = 1
    caches: str = SHARED

    def __post_init__(self) -> None:
        for key in ("workloads", "modes", "networks"):
            names = [each.name if isinstance(each, Network) else each for each in getattr(self, key)]
            are_names = bool(names) and len(set(names)) == len(names) and all(isinstance(each, str) for each in names)
            require(are_names, key, "a list of one or more distinct names (networks: tables)", names)
        least = {"ranks": 1, "starts": 1, "repetitions": 3, "steps_per_turn": 1, "warmup_steps": 0}
        for key, minimum in least.items():
            require_integer(key, getattr(self, key), minimum)
        for key, allowed in {"caches": (SHARED, COLD, WARM), "reference": self.modes}.items():
            require(getattr(self, key) in allowed, key, f"one of {', '.join(allowed)}", getattr(self, key))


def load(given: str) -> Suite:
    """Return a packaged suite by name, or that of a TOML file, whose directory is added to `sys.path` for user code."""
    path = Path(given)
    known = f"packaged ({', '.join(PACKAGED)}) or the path of a TOML file"
    require(given in PACKAGED or path.is_file(), "a suite", known, given)
    try:
        data = PACKAGED.get(given)
        if data is None:
            data = tomllib.loads(path.read_text())
            sys.path.insert(0, str(path.resolve().parent))
        suite = from_dict({"name": path.stem} | data)
        _ = [*map(workload, suite.workloads), *map(mode, suite.modes)]  # raise for unknown names
    except (ValueError, TypeError) as error:  # the text of a TypeError has the unknown or missing key
        raise ConfigError(f"{given}: {error}") from error
    return suite


def from_dict(data: Mapping[str, Any]) -> Suite:
    """Return a suite from parsed TOML or JSON. Raises `ValueError` or `TypeError` for invalid data."""
    lists = {name: tuple(value) for name, value in data.items() if isinstance(value, list | tuple)}
    networks = tuple(Network(**each) for each in lists.pop("networks", ()))
    return Suite(**{**data, **lists, "networks": networks})
