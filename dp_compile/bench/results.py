"""What a run of the benchmark found, as data and as a JSON file."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from dp_compile.bench import suite as suites
from dp_compile.bench.contract import Facts
from dp_compile.bench.machine import Environment
from dp_compile.bench.selfcheck import SelfCheck
from dp_compile.bench.suite import Suite
from dp_compile.errors import ConfigError

VERSION: Final = 2
MEASURED, SKIPPED, FAILED = "measured", "skipped", "failed"


@dataclass(frozen=True, slots=True)
class ModeResult:
    """One mode in one cell.

    Args:
        name: of the mode.
        is_bound: a bound trains nothing; its gradients were not compared.
        status: `measured`, `skipped` or `failed`.
        reason: why not measured, for people.
        step_s: seconds of a step, by turn; of the slowest rank.
        others: by turn, the share of the machine that other processes had.
        set_aside: turns that were repeated because that share was too large.
        prepare_s: building the model and what reduces its gradients.
        first_backward_s: the first gradients, which compile. `None`: a bound.
        warmup_s: all warm-up steps.
        peak_nbytes: resident set of a rank's process since the warm-up, or what its accelerator's allocator held.
        gradient_error: largest deviation of a gradient from the average of a single process, see `reference.compare`.
        gradient_of: the parameter where that was.
        facts: what rank 0 said of itself after the last turn.
        left_nbytes: that left the node that sends most, a step, as its interface counts; the median of the turns.
            `None`: nodes have no interface of their own.
        starts_s: until each start of the mode was warm, the last included.
    """

    name: str
    is_bound: bool
    status: str
    reason: str = ""
    step_s: tuple[float, ...] = ()
    others: tuple[float, ...] = ()
    set_aside: int = 0
    prepare_s: float = 0.0
    first_backward_s: float | None = None
    warmup_s: float = 0.0
    peak_nbytes: int = 0
    gradient_error: float | None = None
    gradient_of: str = ""
    facts: Facts = field(default_factory=Facts)
    left_nbytes: int | None = None
    starts_s: tuple[float, ...] = ()

    @property
    def until_warm_s(self) -> float:
        """From the start of building until the first timed step; the median of its starts."""
        return statistics.median(self.starts_s) if self.starts_s else self.last_start_s

    @property
    def last_start_s(self) -> float:
        """The same of the start whose parts are above."""
        return self.prepare_s + (self.first_backward_s or 0.0) + self.warmup_s


@dataclass(frozen=True, slots=True)
class Cell:
    """A workload over a link, with those modes that were in memory together.

    Args:
        workload: its name.
        link: as the suite calls it.
        heat: which part of the modes.
        skipped: why nothing was measured, or empty.
        rate_mbit: of a shaped link.
        self_check: of this very link; `None` only if skipped.
        load: the machine's load average when the cell began.
        date: when it ended, UTC.
        modes: what was found.
    """

    workload: str
    link: str
    heat: int
    skipped: str = ""
    rate_mbit: float | None = None
    self_check: SelfCheck | None = None
    load: float = 0.0
    date: str = ""
    modes: tuple[ModeResult, ...] = ()

    @property
    def key(self) -> tuple[str, str, int]:
        return self.workload, self.link, self.heat

    def measured(self) -> dict[str, ModeResult]:
        return {mode.name: mode for mode in self.modes if mode.status == MEASURED}


@dataclass(frozen=True, slots=True)
class Probe:
    """A workload by itself: seconds of its step in mode `compute` on all ranks at once, without any link."""

    workload: str
    compute_s: float
    gradient_nbytes: int


@dataclass(frozen=True, slots=True)
class Results:
    """A run, finished or not."""

    suite: Suite
    environment: Environment
    started: str
    probes: tuple[Probe, ...] = ()
    cells: tuple[Cell, ...] = ()

    def keys(self) -> tuple[tuple[str, str, int], ...]:
        """Every cell that the suite asks for."""
        return tuple(
            (workload, link.name, heat)
            for workload in self.suite.workloads
            for link in self.suite.links
            for heat in range(len(self.suite.heats()))
        )

    @property
    def missing(self) -> tuple[tuple[str, str, int], ...]:
        """Cells that were not measured yet; a skipped one may be possible next time."""
        done = {cell.key for cell in self.cells if not cell.skipped}
        return tuple(key for key in self.keys() if key not in done)

    def with_cell(self, cell: Cell) -> Results:
        return replace(self, cells=(*(old for old in self.cells if old.key != cell.key), cell))

    def with_probe(self, probe: Probe) -> Results:
        return replace(self, probes=(*(old for old in self.probes if old.workload != probe.workload), probe))

    def failures(self) -> tuple[tuple[Cell, ModeResult], ...]:
        return tuple((cell, mode) for cell in self.cells for mode in cell.modes if mode.status == FAILED)


def save(results: Results, path: Path) -> None:
    """Written beside the file and moved over it: an interrupted run leaves the old one."""
    text = json.dumps({"version": VERSION} | asdict(results), indent=1, allow_nan=False)
    beside = path.with_name(f"{path.name}.{os.getpid()}.part")
    beside.write_text(text + "\n")
    beside.replace(path)


def load(path: Path) -> Results:
    """Raises:
    ConfigError: no such file, not a result file, or of another version.
    """
    try:
        data = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path} is not JSON: {error}. It should be what `dp-compile bench run` wrote.") from error
    version = data.get("version") if isinstance(data, dict) else None
    if version != VERSION:
        raise ConfigError(f"{path} is of version {version!r}, readable is {VERSION}. Run the benchmark again.")
    try:
        return _results(data)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{path} is not a result of dp-compile bench: {error!r}. Run the benchmark again.") from error


def check_proved(results: Results, path: Path) -> None:
    """Raises:
    ConfigError: nothing is in there, or something was measured on a link that had not proved itself.
    """
    if not results.cells:
        raise ConfigError(f"{path} holds no cell yet. `dp-compile bench run` goes on with it.")
    for cell in results.cells:
        if cell.self_check is None and cell.measured():
            raise ConfigError(
                f"{path}: {cell.workload} over {cell.link} has times but no self-check of the link, so nobody knows "
                "whether waiting was free there. Run the benchmark again."
            )


def _results(data: Mapping[str, Any]) -> Results:
    suite = {name: value for name, value in data["suite"].items() if value is not None}
    suite["links"] = [{key: value for key, value in link.items() if value is not None} for link in suite["links"]]
    return Results(
        suite=suites.from_dict(suite),
        environment=Environment(**data["environment"]),
        started=data["started"],
        probes=tuple(Probe(**probe) for probe in data["probes"]),
        cells=tuple(_cell(cell) for cell in data["cells"]),
    )


def _cell(data: Mapping[str, Any]) -> Cell:
    check = data["self_check"]
    modes = tuple(_mode(mode) for mode in data["modes"])
    return Cell(**{**data, "self_check": SelfCheck(**check) if check is not None else None, "modes": modes})


def _mode(data: Mapping[str, Any]) -> ModeResult:
    times = {name: tuple(float(value) for value in data.get(name, ())) for name in ("step_s", "others", "starts_s")}
    facts = Facts(**{**data["facts"], "ready": tuple((float(at), int(size)) for at, size in data["facts"]["ready"])})
    mode = ModeResult(**{**data, **times, "facts": facts})
    if mode.status not in (MEASURED, SKIPPED, FAILED) or (mode.status == MEASURED and not mode.step_s):
        raise ValueError(f"mode {mode.name} has status {mode.status!r} and {len(mode.step_s)} times")
    return mode
