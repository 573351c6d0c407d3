"""Two runs of a suite: has a mode become slower, beyond what repetitions differ by, or does it do more than before?"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from statistics import NormalDist
from typing import Any, Final

from dp_compile.bench.ratios import Ratio, log_change, ratios
from dp_compile.bench.results import FAILED, Cell, Results
from dp_compile.errors import ConfigError
from dp_compile.plan.words import count

FALSE_ALARMS: Final = 0.01
"""How often a comparison of two runs of the same code may find any regression, if repetitions tell all of the noise."""

TOLERANCE: Final = 0.03
"""Changes below are no regression however sure they are. Two starts of the same code differ too (memory layout, order
of compilation), which repetitions inside one start cannot show (Kalibera and Jones, Rigorous Benchmarking in
Reasonable Time, ISMM 2013)."""

TOO_NOISY: Final = 0.25
"""Where repetitions differ by more, `same` would be a claim."""

_RATE_TOLERANCE: Final = 0.1


@dataclass(frozen=True, slots=True)
class Change:
    """A mode in a cell of both runs. `change` and `band` as shares: 0.1 is 10% slower.

    `verdict`: `slower`, `faster`, `same`, `unclear` (the noise is above `TOO_NOISY`), or `lost` (measured in the
    baseline, failed or gone now).
    """

    workload: str
    link: str
    mode: str
    baseline_ratio: float
    new_ratio: float | None
    change: float | None
    band: float | None
    verdict: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class CountChange:
    """Something that is counted, not timed, and is not what it was: `what` is a name of `Facts.counts`."""

    workload: str
    link: str
    mode: str
    what: str
    baseline: int
    new: int

    @property
    def verdict(self) -> str:
        return "more" if self.new > self.baseline else "fewer"

    def __str__(self) -> str:
        return (
            f"{self.verdict}: {self.workload}, {self.link}, {self.mode}: {self.what} {self.baseline:,} -> {self.new:,}"
        )


@dataclass(frozen=True, slots=True)
class Comparison:
    """All changes, the worst first. `counts`: those that changed. `notes`: what else differs."""

    reference: str
    tolerance: float
    changes: tuple[Change, ...]
    counts: tuple[CountChange, ...]
    notes: tuple[str, ...]

    @property
    def regressions(self) -> tuple[Change | CountChange, ...]:
        slower = (change for change in self.changes if change.verdict in ("slower", "lost"))
        return (*slower, *(change for change in self.counts if change.verdict == "more"))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"regressions": len(self.regressions)}


def compare(
    baseline: Results, new: Results, *, reference: str = "", tolerance: float = TOLERANCE, force: bool = False
) -> Comparison:
    """Ratios to a reference mode inside each run, one run against the other. Bounds are not compared.

    Counts (collectives, bytes, copies, captures) have no noise: one more is a regression.
    A change of time counts when it is larger than `tolerance` and than the noise band: the normal quantile of one-sided
    error `FALSE_ALARMS` over the number of comparisons (Bonferroni), times the bootstrap's standard error.

    Raises:
        ConfigError: another machine, unless forced; other settings; nothing in common; no such reference.
    """
    notes = _check_comparable(baseline, new, force)
    reference = reference or baseline.suite.reference
    if not tolerance >= 0:
        raise ConfigError(f"--tolerance must be >= 0, got {tolerance:g}.")
    pairs = _pairs(baseline, new, reference)
    if not pairs:
        raise ConfigError(
            f"the two runs have no workload, link and mode in common in which the reference {reference!r} was measured."
        )
    sure = NormalDist().inv_cdf(1 - FALSE_ALARMS / len(pairs))
    changes = [_change(pair, sure, tolerance) for pair in pairs]
    changes.sort(key=lambda change: (change.verdict != "lost", -(change.change or 0.0)))
    return Comparison(reference, tolerance, tuple(changes), tuple(_count_changes(baseline, new)), notes)


@dataclass(frozen=True, slots=True)
class _Pair:
    cell: Cell
    mode: str
    old: Ratio
    new: Ratio | None
    reason: str


def _check_comparable(baseline: Results, new: Results, force: bool) -> tuple[str, ...]:
    old, here = baseline.environment.machine, new.environment.machine
    differing = [f"{name} {old[name]!r} and {here[name]!r}" for name in old if old[name] != here[name]]
    if differing and not force:
        raise ConfigError(
            f"the baseline is from another machine: {', '.join(differing)}. Make a baseline here, or compare all the "
            "same: --force."
        )
    for name in ("ranks", "threads", "steps_per_turn"):
        if getattr(baseline.suite, name) != getattr(new.suite, name):
            raise ConfigError(
                f"{name} was {getattr(baseline.suite, name)} and is {getattr(new.suite, name)}: the runs measured "
                "different things."
            )
    notes = [f"another machine, compared all the same: {', '.join(differing)}"] if differing else []
    notes += _other_notes(baseline, new)
    return tuple(notes)


def _other_notes(baseline: Results, new: Results) -> list[str]:
    notes = []
    if baseline.environment.torch != new.environment.torch:
        notes.append(f"torch was {baseline.environment.torch} and is {new.environment.torch}")
    here_too = {(cell.workload, cell.link) for cell in new.cells}
    gone = {(cell.workload, cell.link) for cell in baseline.cells} - here_too
    if gone:
        notes.append(f"not in the new run: {', '.join(sorted(' over '.join(pair) for pair in gone))}")
    if new.missing:
        notes.append(f"the new run is not finished: {len(new.missing)} of {len(new.keys())} cells are missing")
    return notes + _link_notes(baseline, new)


def _link_notes(baseline: Results, new: Results) -> list[str]:
    """Links that are not what they were, or not what they should be."""
    notes = []
    before = {cell.key: cell.rate_mbit for cell in baseline.cells}
    for cell in new.cells:
        where, rate, old = f"{cell.workload} over {cell.link}", cell.rate_mbit, before.get(cell.key)
        if rate is not None and old is not None and abs(math.log(rate / old)) > math.log1p(_RATE_TOLERANCE):
            notes.append(f"{where}: the rate was {old:.4g} mbit and is {rate:.4g}; rate_mbit in the suite keeps it")
        if rate is not None and cell.self_check is not None and not cell.self_check.passed:
            notes.append(f"{where}: the link did not pass its self-check in the new run")
    return notes


def _pairs(baseline: Results, new: Results, reference: str) -> list[_Pair]:
    pairs = []
    for cell in baseline.cells:
        later = [each for each in new.cells if (each.workload, each.link) == (cell.workload, cell.link)]
        bounds = {mode.name for mode in cell.modes if mode.is_bound}
        for name, old in ratios(cell, reference).items():
            if name in bounds or not later:
                continue
            pairs.append(_Pair(cell, name, old, *_again(later, name, reference)))
    return pairs


def _again(cells: list[Cell], name: str, reference: str) -> tuple[Ratio | None, str]:
    """A mode's ratio in the new run, or why there is none."""
    for cell in cells:
        if name in (found := ratios(cell, reference)):
            return found[name], ""
    for cell in cells:
        for mode in cell.modes:
            if mode.name == name and mode.status == FAILED:
                return None, mode.reason.splitlines()[0]
    return None, "not measured: " + (cells[0].skipped or f"{name} or {reference} is not there")


def _change(pair: _Pair, sure: float, tolerance: float) -> Change:
    cell = pair.cell
    if pair.new is None:
        return Change(cell.workload, cell.link, pair.mode, pair.old.value, None, None, None, "lost", pair.reason)
    log, error = log_change(pair.old, pair.new)
    band = sure * error
    verdict = "unclear" if math.expm1(band) > max(TOO_NOISY, tolerance) else "same"
    if abs(log) > band and abs(log) > math.log1p(tolerance):
        verdict = "slower" if log > 0 else "faster"
    return Change(
        cell.workload,
        cell.link,
        pair.mode,
        pair.old.value,
        pair.new.value,
        math.expm1(log),
        math.expm1(band),
        verdict,
    )


def _count_changes(baseline: Results, new: Results) -> Iterator[CountChange]:
    later = {(cell.workload, cell.link, name): mode for cell in new.cells for name, mode in cell.measured().items()}
    for cell in baseline.cells:
        for name, mode in cell.measured().items():
            now = later.get((cell.workload, cell.link, name))
            counts = now.facts.counts() if now is not None else {}
            for what, value in mode.facts.counts().items():
                if what in counts and counts[what] != value:
                    yield CountChange(cell.workload, cell.link, name, what, value, counts[what])


def text(comparison: Comparison) -> str:
    """For people."""
    rows = [("workload", "link", "mode", "baseline", "new", "change", "noise", "verdict")]
    for change in comparison.changes:
        numbers = ("-", "-", "-")
        if change.new_ratio is not None and change.change is not None and change.band is not None:
            numbers = (f"{change.new_ratio:.3f}", f"{change.change:+.1%}", f"{change.band:.1%}")
        rows.append(
            (change.workload, change.link, change.mode, f"{change.baseline_ratio:.3f}", *numbers, change.verdict)
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines += [f"note: {note}" for note in comparison.notes]
    lines += [
        f"lost: {each.workload}, {each.link}, {each.mode}: {each.reason}" for each in comparison.changes if each.reason
    ]
    lines += [str(each) for each in comparison.counts]
    found = len(comparison.regressions)
    lines.append(
        f"{found or 'no'} regression{'' if found == 1 else 's'} in {len(comparison.changes)} comparisons of step / "
        f"{comparison.reference}; counted above {comparison.tolerance:.0%} and above the noise, and every count that "
        "grew"
    )
    if unclear := sum(change.verdict == "unclear" for change in comparison.changes):
        lines.append(f"unclear: {count(unclear, 'comparison')} too noisy to tell, on a quiet machine they may be")
    return "\n".join(lines)
