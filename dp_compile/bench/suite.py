"""Suite files: which workloads, modes and links are measured, and how."""

from __future__ import annotations

import dataclasses
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dp_compile.bench import catalogue
from dp_compile.bench.beds import Link
from dp_compile.errors import ConfigError

PACKAGED: Final = Path(__file__).parent / "suites"
REFERENCES: Final = ("oracle", "ddp")
"""What ratios are to, if a suite does not say: the first of these that it has."""
SHARED, COLD, WARM = "shared", "cold", "warm"
"""Whose cache of compiled code a mode starts with: see `Suite.caches`."""


@dataclass(frozen=True, slots=True)
class Suite:
    """Every workload with every mode over every link.

    Args:
        name: of the result file too.
        workloads: built-in names, or `package.module:function` that returns a `Workload`.
        modes: the same for `Mode`.
        links: where the ranks meet.
        reference: the mode that ratios are to.
        ranks: processes of a mode.
        threads: of a process, for its kernels.
        warmup_steps: untimed steps after the gradients were compared, which compiled. More than the ten that ours
            listens to for its predictions.
        repetitions: timed steps of a mode, in turns with the other modes.
        steps_per_turn: steps that are timed as one, for workloads whose step takes a few milliseconds.
        modes_at_once: so many modes share the memory at a time, each time with the reference beside them; 0: all.
        others_limit: a turn in which other processes had more than this share of the machine is set aside and repeated.
        repeat_limit: of the turns set aside, so many times `repetitions` a mode; after that they count.
        start_timeout_s: for a process to start, for its first backward, which compiles, and for the warm-up.
        turn_timeout_s: for one turn.
        starts: processes of a mode that are timed until they are warm, in turns; the last go on to timed steps.
        caches: of compiled code. `shared`: that of the machine; `cold`: an empty one for each start; `warm`: one for
            each mode, which a start that is not timed has filled.

    Raises:
        ConfigError: a number that is not allowed, a name twice, or a reference that is no mode.
    """

    name: str
    workloads: tuple[str, ...]
    modes: tuple[str, ...]
    links: tuple[Link, ...]
    reference: str = ""
    ranks: int = 2
    threads: int = 1
    warmup_steps: int = 12
    repetitions: int = 15
    steps_per_turn: int = 1
    modes_at_once: int = 0
    others_limit: float = 0.05
    repeat_limit: int = 3
    start_timeout_s: float = 900.0
    turn_timeout_s: float = 120.0
    starts: int = 1
    caches: str = SHARED

    def __post_init__(self) -> None:
        for name in ("workloads", "modes", "links"):
            _check_distinct(name, [link.name if isinstance(link, Link) else link for link in getattr(self, name)])
        least = {"ranks": 1, "threads": 1, "starts": 1, "repetitions": 3, "steps_per_turn": 1}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type in ("int", "float") and value < least.get(field.name, 0):
                raise ConfigError(f"{field.name} must be >= {least.get(field.name, 0)}, got {value!r}.")
        if self.caches not in (SHARED, COLD, WARM):
            raise ConfigError(f"caches must be one of {SHARED}, {COLD}, {WARM}, got {self.caches!r}.")
        if not self.reference:
            object.__setattr__(self, "reference", next((name for name in REFERENCES if name in self.modes), ""))
        if self.reference not in self.modes:
            wanted = repr(self.reference) if self.reference else f"none, and there is no {' or '.join(REFERENCES)}"
            raise ConfigError(f"reference must be one of the modes ({', '.join(self.modes)}), got {wanted}.")

    def heats(self) -> tuple[tuple[str, ...], ...]:
        """The modes that are measured together, each heat with the reference first."""
        others = [name for name in self.modes if name != self.reference]
        size = max(1, (self.modes_at_once or len(self.modes)) - 1)
        chunks = [others[start : start + size] for start in range(0, len(others), size)] or [[]]
        return tuple((self.reference, *chunk) for chunk in chunks)


def load(given: str) -> Suite:
    """The suite of a file, or a packaged one by its name. The file's directory joins `sys.path`: own code lies there.

    Raises:
        ConfigError: no such file or name, not TOML, an unknown key or name, a value that is not allowed; names the
            file, the key and what is allowed.
    """
    path = Path(given)
    if not path.suffix and not path.exists():
        path = PACKAGED / f"{given}.toml"
    if not path.is_file():
        raise ConfigError(f"no suite {given!r}. Packaged: {', '.join(packaged())}; or the path of a TOML file.")
    try:
        data = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error
    directory = str(path.resolve().parent)
    if path.parent != PACKAGED and directory not in sys.path:
        sys.path.insert(0, directory)
    try:
        suite = from_dict({"name": path.stem} | data)
        for name in suite.workloads:
            catalogue.workload(name)
        for name in suite.modes:
            catalogue.mode(name)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    return suite


def packaged() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in PACKAGED.glob("*.toml")))


def from_dict(data: Mapping[str, Any]) -> Suite:
    """A suite from what TOML or JSON holds.

    Raises:
        ConfigError: an unknown or missing key, or a value of the wrong kind.
    """
    _check_keys(Suite, data, "")
    given = dict(data)
    for name in ("workloads", "modes"):
        if not isinstance(given[name], Sequence) or not all(isinstance(item, str) for item in given[name]):
            raise ConfigError(f"{name} must be a list of names, got {given[name]!r}.")
        given[name] = tuple(given[name])
    if not isinstance(given["links"], Sequence) or not all(isinstance(item, Mapping) for item in given["links"]):
        raise ConfigError(f"links must be a list of tables such as {{kind = 'loopback'}}, got {given['links']!r}.")
    given["links"] = tuple(_link(item, number) for number, item in enumerate(given["links"]))
    for field in dataclasses.fields(Suite):
        if field.name in given:
            given[field.name] = _checked(field.name, str(field.type), given[field.name])
    return Suite(**given)


def _link(data: Mapping[str, Any], number: int) -> Link:
    where = f"links[{number}]"
    _check_keys(Link, data, f"{where}.")
    try:
        return Link(**data)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _checked(name: str, kind: str, value: Any) -> Any:
    """A value of a scalar key; an integer is fine where a float is wanted, and `true` is no number."""
    allowed: dict[str, Any] = {"int": (int,), "float": (int, float), "bool": (bool,), "str": (str,)}
    if kind not in allowed:
        return value
    if not isinstance(value, allowed[kind]) or (isinstance(value, bool) and kind != "bool"):
        raise ConfigError(f"{name} must be {'an' if kind == 'int' else 'a'} {kind}, got {value!r}.")
    return float(value) if kind == "float" else value


def _check_keys(kind: type[Suite] | type[Link], data: Mapping[str, Any], where: str) -> None:
    fields = dataclasses.fields(kind)
    allowed = [field.name for field in fields]
    for key in data:
        if key not in allowed:
            raise ConfigError(f"unknown key {where + key!r}. Allowed: {', '.join(allowed)}.")
    for field in fields:
        if field.default is dataclasses.MISSING and field.name not in data:
            raise ConfigError(f"the key {where + field.name!r} is missing.")


def _check_distinct(key: str, names: Sequence[str]) -> None:
    if not names:
        raise ConfigError(f"{key} is empty: there is nothing to measure.")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"{key} names {', '.join(twice)} more than once; tables could not tell them apart.")
