"""Results of a benchmark run: data, JSON file, ratios with their noise, Markdown, and comparison of two runs."""

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
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

import torch

from dp_compile.bench import suites
from dp_compile.bench.suites import Suite
from dp_compile.errors import ConfigError, require
from dp_compile.plan.words import WIDTH, count, format_bytes, table

VERSION: Final = 6
MACHINE: Final = ("cpu", "cores", "accelerator", "malloc")  # keys of `environment` that must be equal in two runs
FALSE_ALARMS: Final = 0.01  # probability of a false regression in two runs of the same code, if turns show all noise
TOO_NOISY: Final = 0.25  # a wider noise band is `unclear` instead of `same`
# Smaller changes are no regression. Starts of the same code differ by memory layout and order of compilation, and turns
# of one start do not show this (Kalibera and Jones, Rigorous Benchmarking in Reasonable Time, ISMM 2013).
TOLERANCE: Final = 0.03
REGRESSIONS: Final = ("slower", "lost", "more")
_SETTINGS: Final = ("reference", "ranks", "steps_per_turn", "caches")
_OF_MALLOC: Final = re.compile(r"MALLOC_\w*_=|GLIBC_TUNABLES=.*malloc|LD_PRELOAD=.*malloc")


@dataclass(frozen=True, slots=True)
class ModeResult:
    """The measurements of one mode (method of training) in one cell (workload over a network)."""

    name: str
    is_bound: bool = False
    reason: str = ""  # the cause of its failure, empty if it was measured
    step_s: tuple[float, ...] = ()  # seconds per step of the slowest rank, by turn
    starts_s: tuple[float, ...] = ()  # seconds until warm, by start: build, first gradients, warm-up
    peak_nbytes: int = 0  # since the warm-up: of a rank's resident set, or of its accelerator's allocator
    counts: Mapping[str, int] = field(default_factory=dict)  # of one backward, see `contract.Trainer`


@dataclass(frozen=True, slots=True)
class Cell:
    """The measurements of all modes with one workload over one network."""

    workload: str
    network: str
    compute_s: float = 0.0  # per step in mode `compute`; 0 if no rate depends on it
    gradient_nbytes: int = 0
    skipped: str = ""  # the reason if nothing was measured, otherwise empty
    rate_mbit: float | None = None
    alpha_us: float = 0.0  # latency of an all-reduce (`dp_compile.calibrate`); 0 for one rank
    mb_per_s: float = 0.0  # rate of an all-reduce in 1e6 bytes per second, without latency; 0 for one rank
    modes: tuple[ModeResult, ...] = ()

    def measured(self) -> dict[str, ModeResult]:
        return {mode.name: mode for mode in self.modes if not mode.reason}


@dataclass(frozen=True, slots=True)
class Results:
    """A run of a suite: one cell for each workload and network that was completed before the run ended."""

    suite: Suite
    environment: Mapping[str, str]
    started: str
    cells: tuple[Cell, ...] = ()


def environment() -> dict[str, str]:
    """Return facts that measurements depend on: the machine, settings of malloc, versions of torch and this package.

    `malloc`: environment variables that set malloc's thresholds or preload another malloc: page faults depend on them.
    `commit`: that of the checkout, with `-dirty` if files differ from it; without checkout or git, the package version.
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
    """Read a file that `save` wrote. Raises `ConfigError` if it is unreadable, of another version, or not a result."""
    try:
        data = json.loads(path.read_text())
        if data["version"] != VERSION:
            raise ValueError(data["version"])
        for cell in data["cells"]:
            for mode in cell["modes"]:
                mode |= {name: tuple(mode[name]) for name in ("step_s", "starts_s")}
            cell["modes"] = tuple(ModeResult(**mode) for mode in cell["modes"])
        cells = tuple(Cell(**cell) for cell in data["cells"])
        return Results(suites.from_dict(data["suite"]), data["environment"], data["started"], cells)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{path} is not a result of this version of `dp-compile bench`. Run it again.") from error


class Ratio(NamedTuple):
    """A ratio of times and the standard error of its logarithm."""

    value: float
    log_error: float

    def __str__(self) -> str:
        """Format as the value and the half-width of its interval of about 95 % confidence."""
        return f"{self.value:.3f} +-{self.value * 1.96 * self.log_error:.3f}"


def ratio(times: Sequence[float], reference: Sequence[float]) -> Ratio:
    """Return the median of `times` / `reference`, each with one time per turn: what slows both in one turn cancels.

    The standard error is that of a median of normal values, sqrt(pi / 2) sigma / sqrt(n). sigma, robust to single
    outliers, is the interquartile range of the ratios' logarithms divided by 1.349.
    """
    logs = [math.log(own / other) for own, other in zip(times, reference, strict=False)]
    low, middle, high = statistics.quantiles(logs, n=4) if len(logs) > 1 else logs * 3
    return Ratio(math.exp(middle), math.sqrt(math.pi / 2) * (high - low) / 1.349 / math.sqrt(len(logs)))


def ratios(cell: Cell, reference: str) -> dict[tuple[str, str], Ratio]:
    """Return each measured mode's time / the reference's, for `step` and, with >= 3 starts, for `until warm`."""
    measured, found = cell.measured(), {}
    if reference not in measured:
        return {}
    other = measured.pop(reference)
    for name, mode in measured.items():
        found[name, "step"] = ratio(mode.step_s, other.step_s)
        if min(len(mode.starts_s), len(other.starts_s)) >= 3:
            found[name, "until warm"] = ratio(mode.starts_s, other.starts_s)
    return found


def failures(results: Results) -> list[str]:
    """Return one line for each cell that was skipped and for each mode that failed in a cell."""
    reasons = [(f"{cell.workload} over {cell.network}", cell.skipped) for cell in results.cells]
    reasons += [
        (f"{mode.name} over {at.network}, {at.workload}", mode.reason) for at in results.cells for mode in at.modes
    ]
    return [f"{what}: {why.splitlines()[0]}" for what, why in reasons if why]


def lines(results: Results) -> Iterator[str]:
    """Yield the lines of the Markdown page that shows the results."""
    suite, cells = results.suite, [cell for cell in results.cells if not cell.skipped]
    fastest = Counter(name for name in map(_fastest, cells) if name)
    found = ", ".join(f"`{name}` in {number} of {len(cells)}" for name, number in fastest.most_common())
    yield from (f"# `{suite.name}`: fastest mode: {found or 'none beyond noise'}", "")
    where = ", ".join(f"{key} {each}" for key, each in results.environment.items() if each)
    turns = f"{count(suite.repetitions, 'turn')} of {count(suite.steps_per_turn, 'step')}"
    yield from textwrap.wrap(
        f"{results.started[:16]} UTC, {where}. {count(suite.ranks, 'rank')}, {turns}, {count(suite.starts, 'start')}, "
        f"caches {suite.caches}. Values with +-: ratio to `{suite.reference}` in the same turn, median and 1.96 "
        "standard errors. Values in ms: median and quartiles. All times are the slowest rank's. Modes in *italic* "
        "are bounds: they reduce no gradients.",
        WIDTH,
    )
    for cell in cells:
        yield from ("", f"## {cell.workload}, {cell.network}", "")
        rows = table(list(_rows(cell, suite.reference)), left=[0], width=WIDTH - 4, between=" | ")
        head, *others = (f"| {row} |" for row in rows)
        yield from (head, re.sub(r"[^|]", "-", head), *others)
        if cell.mb_per_s:
            yield f"\nAn all-reduce: latency {cell.alpha_us:.0f} us, {cell.mb_per_s:.4g} MB/s."
    reasons = failures(results)
    yield from ("", "## Not measured", "") if reasons else ()
    for each in reasons:
        yield from textwrap.wrap(f"- {each}", WIDTH, subsequent_indent="  ", break_on_hyphens=False)


def _fastest(cell: Cell) -> str:
    """Return the mode (not a bound) with the shortest step; empty if the second differs from it only by noise."""
    modes = {name: each.step_s for name, each in cell.measured().items() if not each.is_bound}
    first, *others = sorted(modes, key=lambda name: statistics.median(modes[name])) or [""]
    over = [ratio(modes[name], modes[first]) for name in others[:1]]
    return first if all(each.value > math.exp(1.96 * each.log_error) for each in over) else ""


def _rows(cell: Cell, reference: str) -> Iterator[Sequence[str]]:
    yield ["mode", f"step / {reference}", "until warm", "peak memory"]
    times = ratios(cell, reference)
    for name, mode in cell.measured().items():
        quartiles = statistics.quantiles(mode.step_s, n=4, method="inclusive")
        low, middle, high = (float(f"{1e3 * each:.3g}") for each in quartiles)
        yield [
            f"*{name}*" if mode.is_bound else name,
            str(times.get((name, "step"), f"{middle:g} ms ({low:g}-{high:g})")),
            str(times.get((name, "until warm"), f"{statistics.median(mode.starts_s):.1f} s")),
            format_bytes(mode.peak_nbytes),
        ]


def compare(baseline: Results, new: Results) -> tuple[str, int]:
    """Return the verdict with a table for each cell, and the number of regressions. Bounds are not compared.

    A mode is slower or faster if its ratio changed by over `TOLERANCE` and the noise band: standard error times the
    normal quantile of one-sided error `FALSE_ALARMS` / number of comparisons (Bonferroni). An increase in any of its
    `counts` is a regression. Raises `ConfigError` if machines, settings or cells differ, or the baseline has no ratio.
    """
    old, here = (
        {name: each.environment[name] for name in MACHINE}
        | {name: getattr(each.suite, name) for name in _SETTINGS}
        | {"cells": ", ".join(f"{cell.workload} over {cell.network}" for cell in each.cells)}
        for each in (baseline, new)
    )
    for name, value in old.items():
        require(here[name] == value, f"{name} of the new run", f"{value!r} as in the baseline", here[name])
    reference, pairs = baseline.suite.reference, list(zip(baseline.cells, new.cells, strict=True))
    times = [list(_times(*pair, reference)) for pair in pairs]
    number = sum(map(len, times))
    require(number > 0, "modes in the baseline", f"the reference {reference!r} and at least one more", "fewer")
    sure = statistics.NormalDist().inv_cdf(1 - FALSE_ALARMS / number)
    lines: list[str] = []
    regressions = unclear = 0
    for pair, found in zip(pairs, times, strict=True):
        rows = [_judged(*each, sure) for each in found] + list(_counts(*pair))
        rows.sort(key=lambda row: row[0] not in REGRESSIONS)
        regressions += sum(row[0] in REGRESSIONS for row in rows)
        unclear += sum(row[0] == "unclear" for row in rows)
        lines += ["", f"{pair[0].workload}, {pair[0].network}"]
        head = "", "mode", "what", "before", "after", "change", "noise"
        lines += table([head, *rows], left=[0, 1, 2])
        for name, what, _, after, reason in found:
            lines += ["", *textwrap.wrap(f"{name}, {what}, is lost: {reason}", WIDTH)] if after is None else []
    text = f"{regressions or 'no'} regression{'' if regressions == 1 else 's'}. Compared: all counts, {number} ratios"
    text += f" to {reference}" + (f" ({unclear} unclear)" if unclear else "")
    return "\n".join([text, *lines]) + "\n", regressions


def _times(old: Cell, new: Cell, reference: str) -> Iterator[tuple[str, str, Ratio, Ratio | None, str]]:
    """Yield mode, timed quantity, old ratio, new ratio (`None` if missing), and the reason if it is missing."""
    after = ratios(new, reference)
    for (name, what), value in ratios(old, reference).items():
        if not old.measured()[name].is_bound:
            failed = next((mode for mode in new.modes if mode.name == name), ModeResult(name, reason="not measured"))
            reason = (new.skipped or failed.reason or "no reference").splitlines()[0]
            yield name, what, value, after.get((name, what)), reason


def _judged(name: str, what: str, old: Ratio, new: Ratio | None, _: str, sure: float) -> Sequence[str]:
    if new is None:
        return "lost", name, what, f"{old.value:.3f}", "-", "", ""
    change, band = math.log(new.value / old.value), sure * math.hypot(old.log_error, new.log_error)
    verdict = "unclear" if math.expm1(band) > TOO_NOISY else "same"
    if abs(change) > max(band, math.log1p(TOLERANCE)):
        verdict = "slower" if change > 0 else "faster"
    shown = f"{old.value:.3f}", f"{new.value:.3f}", f"{math.expm1(change):+.1%}", f"{math.expm1(band):.1%}"
    return verdict, name, what, *shown


def _counts(old: Cell, new: Cell) -> Iterator[Sequence[str]]:
    for name, mode in old.measured().items():
        after = new.measured().get(name, mode).counts
        for what, before in mode.counts.items():
            if (now := after.get(what, before)) != before:
                yield "more" if now > before else "fewer", name, what, f"{before:,}", f"{now:,}", "", ""
