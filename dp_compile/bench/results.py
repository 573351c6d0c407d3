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
    ConfigError: no such file, not a result, of another version, or empty.
    """
    try:
        data = json.loads(path.read_text())
        version, found = data["version"], None
        if version == VERSION:
            networks = [{key: value for key, value in each.items() if value} for each in data["suite"]["networks"]]
            suite = suites.from_dict(data["suite"] | {"networks": networks})
            found = Results(suite, data["environment"], data["started"], tuple(map(_cell, data["cells"])))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{path} is not what `dp-compile bench run` writes: {error!r}.") from error
    if found is None:
        raise ConfigError(f"{path} has version {version!r}, this is {VERSION}. Run the benchmark again.")
    if not found.cells:
        raise ConfigError(f"{path} holds no cell.")
    return found


def _cell(data: dict[str, Any]) -> Cell:
    times = "step_s", "starts_s"
    modes = [ModeResult(**mode | {name: tuple(mode[name]) for name in times}) for mode in data["modes"]]
    check = None if data["self_check"] is None else SelfCheck(**data["self_check"])
    cell = Cell(**data | {"modes": tuple(modes), "self_check": check})
    for mode in cell.measured().values():
        if check is None or not mode.step_s:
            raise ValueError(f"mode {mode.name} is measured, and has no times or its network no self-check")
    return cell


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
    if reference not in measured:
        return {}
    other = measured.pop(reference)
    for name, mode in measured.items():
        found[name, "step"] = ratio(mode.step_s, other.step_s)
        if min(len(mode.starts_s), len(other.starts_s)) >= 3:
            found[name, "until warm"] = ratio(mode.starts_s, other.starts_s)
    return found
