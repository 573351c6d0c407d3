"""Results of a run as data and as a JSON file, and ratios of them with their noise."""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
import re
import shutil
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

from dp_compile.bench import suites
from dp_compile.bench.selfcheck import SelfCheck
from dp_compile.bench.suites import Suite
from dp_compile.errors import ConfigError

VERSION: Final = 5
MACHINE: Final = ("cpu", "cores", "accelerator", "malloc")
"""Of `environment`, what has to be equal for times to be comparable."""
_OF_MALLOC: Final = re.compile(r"MALLOC_\w*_=|GLIBC_TUNABLES=.*malloc|LD_PRELOAD=.*malloc")
_IQR_OF_NORMAL: Final = 1.349
_ERROR_OF_MEDIAN: Final = math.sqrt(math.pi / 2)


@dataclass(frozen=True, slots=True)
class ModeResult:
    """One mode in one cell.

    Args:
        reason: why it failed; empty if it is measured.
        step_s: seconds of a step, by turn; of the slowest rank.
        starts_s: seconds until each start of the mode was warm: building, first gradients, warm-up.
        peak_nbytes: resident set of a rank's process since the warm-up, or the allocator's peak on an accelerator.
        counts: of one backward, see `contract.Trainer`.
    """

    name: str
    is_bound: bool = False
    reason: str = ""
    step_s: tuple[float, ...] = ()
    starts_s: tuple[float, ...] = ()
    peak_nbytes: int = 0
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
        return {mode.name: mode for mode in self.modes if not mode.reason}


@dataclass(frozen=True, slots=True)
class Results:
    """A run, or the cells that it finished before it was interrupted."""

    suite: Suite
    environment: Mapping[str, str]
    started: str
    cells: tuple[Cell, ...] = ()


def environment() -> dict[str, str]:
    """What a figure depends on, besides the code that is measured.

    `malloc`: its settings in the environment, or a preloaded one; page faults are a part of a step. `commit`: of the
    checkout, `-dirty` if files differ from it; without a checkout the version.
    """
    cpus = re.findall(r"^model name\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    describe = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude=*"]
    commit = subprocess.run(describe, capture_output=True, text=True).stdout.strip() if shutil.which("git") else ""
    return {
        "cpu": cpus[0] if cpus else platform.machine(),
        "cores": str(len(os.sched_getaffinity(0))),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "malloc": " ".join(sorted(each for each in map("=".join, os.environ.items()) if _OF_MALLOC.match(each))),
        "torch": torch.__version__,
        "commit": commit or f"version {importlib.metadata.version('dp_compile')}",
    }


def save(results: Results, path: Path) -> None:
    path.write_text(json.dumps({"version": VERSION} | asdict(results), indent=1, allow_nan=False) + "\n")


def load(path: Path) -> Results:
    """Raises:
    ConfigError: no such file, not a result, or of another version.
    """
    try:
        data = json.loads(path.read_text())
        if data["version"] != VERSION:
            raise ValueError(data["version"])
        suite = suites.from_dict(data["suite"])
        return Results(suite, data["environment"], data["started"], tuple(map(_cell, data["cells"])))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{path} is not what `dp-compile bench run` writes. Run the benchmark again.") from error


def _cell(data: dict[str, Any]) -> Cell:
    times = "step_s", "starts_s"
    modes = [ModeResult(**mode | {name: tuple(mode[name]) for name in times}) for mode in data["modes"]]
    check = None if data["self_check"] is None else SelfCheck(**data["self_check"])
    return Cell(**data | {"modes": tuple(modes), "self_check": check})


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
