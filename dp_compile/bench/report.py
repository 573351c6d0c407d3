"""A run as Markdown of at most 80 columns, and two runs compared: the verdict first, then a table for each cell."""

from __future__ import annotations

import math
import re
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import NormalDist
from typing import Final

import numpy as np

from dp_compile.bench.results import MACHINE, Cell, ModeResult, Ratio, Results, ratio, ratios
from dp_compile.errors import require
from dp_compile.plan.words import count, format_bytes

WIDTH: Final = 80
FALSE_ALARMS: Final = 0.01  # probability of a regression in two runs of the same code, if turns show all of the noise
TOO_NOISY: Final = 0.25  # with a wider noise band, `same` would be a claim without evidence
# Two starts of the same code differ (memory layout, order of compilation), which turns of one start cannot show:
# Kalibera and Jones, Rigorous Benchmarking in Reasonable Time, ISMM 2013. Smaller changes are no regression.
TOLERANCE: Final = 0.03
REGRESSIONS: Final = ("slower", "lost", "more")
_SETTINGS: Final = ("reference", "ranks", "steps_per_turn", "caches")


def markdown(results: Results) -> str:
    return "\n".join(_lines(results)) + "\n"


def failures(results: Results) -> list[str]:
    """One line for each mode that failed."""
    return [
        f"{mode.name} over {cell.network}, {cell.workload}: {mode.reason.splitlines()[0]}"
        for cell in results.cells
        for mode in cell.modes
        if mode.reason
    ]


def _aligned(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [list(map(str.ljust, row, widths)) for row in rows]


def _lines(results: Results) -> Iterator[str]:
    suite, cells = results.suite, [cell for cell in results.cells if not cell.skipped]
    fastest = Counter(name for name in map(_fastest, cells) if name)
    found = ", ".join(f"`{name}` in {number} of {len(cells)}" for name, number in fastest.most_common())
    yield from (f"# `{suite.name}`: fastest {found or 'none beyond noise'}", "")
    where = ", ".join(f"{key} {each}" for key, each in results.environment.items() if each)
    turns = f"{count(suite.repetitions, 'turn')} of {count(suite.steps_per_turn, 'step')}"
    yield from textwrap.wrap(
        f"{results.started[:16]} UTC, {where}. {count(suite.ranks, 'rank')}, {turns}, {count(suite.starts, 'start')}, "
        f"caches {suite.caches}. With +-: over the time of `{suite.reference}` in the same turn, median and 1.96 "
        "standard errors; its own with quartiles. The slowest rank counts. *Italic*: a bound, whose gradients are not "
        "reduced.",
        WIDTH,
    )
    for cell in cells:
        yield from ("", f"## {cell.workload}, {cell.network}", "")
        head, *rows = (f"| {' | '.join(row)} |" for row in _aligned(list(_rows(cell, suite.reference))))
        yield from (head, re.sub(r"[^|]", "-", head), *rows)
        if (check := cell.self_check) is not None and check.mb_per_s:
            yield f"\nLatency {check.alpha_us:.0f} us, {check.mb_per_s:.4g} MB/s; a matmul during an all-reduce takes"
            hint = "" if check.passed else ",\nso hiding communication gains little here"
            yield f"{check.matmul_slowdown:.2f}x as long: self-check {'passed' if check.passed else 'FAILED'}{hint}."
    skipped = [f"{cell.workload} over {cell.network}: {cell.skipped}" for cell in results.cells if cell.skipped]
    reasons = dict.fromkeys(each.splitlines()[0] for each in failures(results) + skipped)
    yield from ("", "## Not measured", "") if reasons else ()
    for each in reasons:
        yield from textwrap.wrap(f"- {each}", WIDTH, subsequent_indent="  ", break_on_hyphens=False)


def _fastest(cell: Cell) -> str:
    """The mode with the shortest step, if the next one takes longer beyond noise."""
    modes = {name: each.step_s for name, each in cell.measured().items() if not each.is_bound}
    first, *others = sorted(modes, key=lambda name: np.median(modes[name])) or [""]
    over = [ratio(modes[name], modes[first]) for name in others[:1]]
    return first if all(each.value > math.exp(1.96 * each.log_error) for each in over) else ""


def _rows(cell: Cell, reference: str) -> Iterator[Sequence[str]]:
    yield ["mode", f"step / {reference}", "until warm", "peak memory"]
    times = ratios(cell, reference)
    for name, mode in cell.measured().items():
        low, middle, high = np.quantile(mode.step_s, [0.25, 0.5, 0.75]) * 1e3
        yield [
            f"*{name}*" if mode.is_bound else name,
            str(times.get((name, "step"), f"{middle:.3g} ms ({low:.3g}-{high:.3g})")),
            str(times.get((name, "until warm"), f"{np.median(mode.starts_s):.1f} s")),
            format_bytes(mode.peak_nbytes),
        ]


# --- two runs ---------------------------------------------------------------------------------------------------------


def compare(baseline: Results, new: Results) -> tuple[str, int]:
    """Ratios to the reference inside each run, one run against the other, and counts. Bounds are not compared.

    A change of time counts when it is larger than `TOLERANCE` and than the noise band: the normal quantile of one-sided
    error `FALSE_ALARMS` over the number of comparisons (Bonferroni), times the standard error. Counts have no noise:
    one more is a regression. Returns the verdict with a table for each cell, and the number of regressions.

    Raises:
        ConfigError: another machine, other settings, or nothing in common.
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
    require(number > 0, "what both runs measured", f"the reference {reference!r} and another mode", "less")
    sure = NormalDist().inv_cdf(1 - FALSE_ALARMS / number)
    lines: list[str] = []
    regressions = unclear = 0
    for pair, found in zip(pairs, times, strict=True):
        rows = [_judged(*each, sure) for each in found] + list(_counts(*pair))
        rows.sort(key=lambda row: row[0] not in REGRESSIONS)
        regressions += sum(row[0] in REGRESSIONS for row in rows)
        unclear += sum(row[0] == "unclear" for row in rows)
        lines += ["", f"{pair[0].workload}, {pair[0].network}"]
        head = "", "mode", "what", "before", "after", "change", "noise"
        lines += ["  ".join(row).rstrip() for row in _aligned([head, *rows])]
        for name, what, _, after, reason in found:
            lines += ["", *textwrap.wrap(f"{name}, {what}, is lost: {reason}", WIDTH)] if after is None else []
    text = f"{regressions or 'no'} regression{'' if regressions == 1 else 's'} in {number} times over {reference}"
    text += f", {unclear} of them unclear," if unclear else ""
    return "\n".join([f"{text} and in all counts", *lines]) + "\n", regressions


_Times = tuple[str, str, Ratio, Ratio | None, str]


def _times(old: Cell, new: Cell, reference: str) -> Iterator[_Times]:
    """A mode and what was timed, the ratios of both runs; `None` with a reason where the new run has none."""
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
