"""Results of a run as data and as a JSON file, and ratios of them with their noise."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from dp_compile.bench import suites
from dp_compile.bench.selfcheck import SelfCheck
from dp_compile.bench.suites import Suite
from dp_compile.errors import ConfigError

VERSION: Final = 4
MEASURED, SKIPPED, FAILED = "measured", "skipped", "failed"
_IQR_OF_NORMAL: Final = 1.349
_ERROR_OF_MEDIAN: Final = math.sqrt(math.pi / 2)


@dataclass(frozen=True, slots=True)
class ModeResult:
    """One mode in one cell.

    Args:
        status: `measured`, `skipped` or `failed`; the last two have a `reason`.
        step_s: seconds of a step, by turn; of the slowest rank.
        starts_s: seconds until each start of the mode was warm: building, first gradients, warm-up.
        peak_nbytes: resident set of a rank's process since the warm-up, or the allocator's peak on an accelerator.
        gradient_error: largest error of a gradient, see `reference.compare`; `None` for a bound.
        counts: of one backward, see `contract.Trainer`.
    """

    name: str
    is_bound: bool = False
    status: str = FAILED
    reason: str = ""
    step_s: tuple[float, ...] = ()
    starts_s: tuple[float, ...] = ()
    peak_nbytes: int = 0
    gradient_error: float | None = None
    counts: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Cell:
    """A workload over a network.

    Args:
        compute_s: seconds of the workload's step in mode `compute`; 0 if no rate depends on it.
        skipped: why nothing was measured, or empty.
        self_check: of this network; `None` only if skipped.
    """

    workload: str
    network: str
    compute_s: float = 0.0
    gradient_nbytes: int = 0
    skipped: str = ""
    rate_mbit: float | None = None
    self_check: SelfCheck | None = None
    modes: tuple[ModeResult, ...] = ()

    def measured(self) -> dict[str, ModeResult]:
        return {mode.name: mode for mode in self.modes if mode.status == MEASURED}


@dataclass(frozen=True, slots=True)
class Results:
    """A run, or the cells that it finished before it was interrupted."""

    suite: Suite
    environment: Mapping[str, str]
    started: str
    cells: tuple[Cell, ...] = ()


def save(results: Results, path: Path) -> None:
    path.write_text(json.dumps({"version": VERSION} | asdict(results), indent=1, allow_nan=False) + "\n")


def load(path: Path) -> Results:
    """Raises:
    ConfigError: no such file, not a result, of another version, empty, or measured without a self-check.
    """
    try:
        data = json.loads(path.read_text())
        if data["version"] != VERSION:
            raise ConfigError(f"{path} has version {data['version']!r}, this is {VERSION}. Run the benchmark again.")
        found = _results(data)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path} is not what `dp-compile bench run` writes: {error!r}.") from error
    if not found.cells:
        raise ConfigError(f"{path} holds no cell.")
    for cell in found.cells:
        if cell.measured() and cell.self_check is None:
            raise ConfigError(f"{path}: {cell.workload} over {cell.network} has times but no self-check.")
    return found


def _results(data: Mapping[str, Any]) -> Results:
    networks = [{key: value for key, value in each.items() if value is not None} for each in data["suite"]["networks"]]
    cells = []
    for cell in data["cells"]:
        modes = []
        for mode in cell["modes"]:
            times = {name: tuple(map(float, mode[name])) for name in ("step_s", "starts_s")}
            modes.append(ModeResult(**(mode | times)))
            if modes[-1].status == MEASURED and not modes[-1].step_s:
                raise ValueError(f"mode {modes[-1].name} is measured and has no times")
        check = None if cell["self_check"] is None else SelfCheck(**cell["self_check"])
        cells.append(Cell(**(cell | {"modes": tuple(modes), "self_check": check})))
    suite = suites.from_dict(data["suite"] | {"networks": networks})
    return Results(suite, data["environment"], data["started"], tuple(cells))


@dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio of times and the standard error of its logarithm."""

    value: float
    log_error: float

    def __str__(self) -> str:
        """With half of an interval that covers about 95 %."""
        return f"{self.value:.3f} +-{self.value * 1.96 * self.log_error:.3f}"


def ratio(times: Sequence[float], reference: Sequence[float]) -> Ratio:
    """The median of the ratios of turns: a slowness that both share is not noise of the ratio.

    The standard error is that of a median of normal values with the interquartile range of the logarithms, which does
    not depend on single outliers.
    """
    logs = [math.log(own / other) for own, other in zip(times, reference, strict=False)]
    low, middle, high = statistics.quantiles(logs, n=4) if len(logs) > 1 else logs * 3
    return Ratio(math.exp(middle), _ERROR_OF_MEDIAN * (high - low) / _IQR_OF_NORMAL / math.sqrt(len(logs)))


def ratios(cell: Cell, reference: str) -> dict[tuple[str, str], Ratio]:
    """Of every measured mode to the reference, by mode and `step`, with three starts or more also `until warm`."""
    measured, found = cell.measured(), {}
    for name, mode in measured.items() if reference in measured else ():
        other = measured[reference]
        if name != reference:
            found[name, "step"] = ratio(mode.step_s, other.step_s)
            if min(len(mode.starts_s), len(other.starts_s)) >= 3:
                found[name, "until warm"] = ratio(mode.starts_s, other.starts_s)
    return found
