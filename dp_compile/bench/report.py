"""A run as Markdown: times over the reference, the self-checks of the networks, and what was not measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from dp_compile.bench.results import FAILED, SKIPPED, Cell, ModeResult, Ratio, Results, ratios
from dp_compile.bench.selfcheck import SLOWDOWN_LIMIT, WAITING_LIMIT
from dp_compile.plan.words import count, format_bytes


def markdown(results: Results) -> str:
    return "\n".join(_lines(results)) + "\n"


def failures(results: Results) -> list[str]:
    """One line for each mode that failed."""
    return [
        f"{mode.name} over {cell.network}, {cell.workload}: {_short(mode.reason)}"
        for cell in results.cells
        for mode in cell.modes
        if mode.status == FAILED
    ]


def _lines(results: Results) -> Iterator[str]:
    suite, where = results.suite, ", ".join(f"{key} {each}" for key, each in results.environment.items() if each)
    yield from (f"# Benchmark `{suite.name}`", "", f"{results.started[:16]} UTC, {where}.")
    yield (
        f"{count(suite.ranks, 'rank')}, {count(suite.repetitions, 'turn')} of {count(suite.steps_per_turn, 'step')}, "
        f"{count(suite.starts, 'start')} of each mode, caches {suite.caches}; modes in turns, the slowest rank counts."
    )
    yield f"A step over that of `{suite.reference}` in the same turn: median +-1.96 standard errors; of the reference"
    yield "in ms with its quartiles. *Italic*: a bound. !: failed, or wrong gradients."
    for name in suite.workloads:
        cells = [cell for cell in results.cells if cell.workload == name and not cell.skipped]
        if cells:
            yield from ("", f"## {name}", "")
            yield from _table(_workload(cells, suite.reference))
    yield from ("", "## Self-checks of the networks", "")
    yield from _table(_self_checks(results.cells))
    yield f"\nPassed: a rank that waits for an all-reduce uses <= {WAITING_LIMIT:.0%} of a core, and a concurrent"
    yield f"matmul takes <= {SLOWDOWN_LIMIT:g}x as long. Otherwise, as on loopback, hiding communication gains little."
    skipped = [f"{cell.workload} over {cell.network}: {_short(cell.skipped)}" for cell in results.cells if cell.skipped]
    modes = [mode for cell in results.cells for mode in cell.modes]
    skipped += [f"{mode.name}: {_short(mode.reason)}" for mode in modes if mode.status == SKIPPED]
    if reasons := list(dict.fromkeys(failures(results) + skipped)):
        yield from ("", "## Not measured", "", *(f"- {each}" for each in reasons))


def _workload(cells: Sequence[Cell], reference: str) -> Iterator[Sequence[str]]:
    yield ["mode", *(cell.network for cell in cells), "until warm", "peak memory", "counts"]
    found = [ratios(cell, reference) for cell in cells]
    for mode in cells[0].modes:
        measured = [cell.measured().get(mode.name) for cell in cells]
        if not (runs := [each for each in measured if each is not None]):
            continue
        figures = [_figure(each, times.get((mode.name, "step"))) for each, times in zip(measured, found, strict=True)]
        warm = [f", {times[mode.name, 'until warm']}" for times in found if (mode.name, "until warm") in times]
        yield [
            f"*{mode.name}*" if mode.is_bound else mode.name,
            *figures,
            f"{np.median(runs[-1].starts_s):.1f} s{''.join(warm[:1])}",
            format_bytes(max(each.peak_nbytes for each in runs)),
            ", ".join(f"{what} {number:,}" for what, number in runs[-1].counts.items()),
        ]


def _figure(mode: ModeResult | None, value: Ratio | None) -> str:
    if mode is None:
        return "!"
    low, middle, high = np.quantile(mode.step_s, [0.25, 0.5, 0.75]) * 1e3
    return f"{middle:.3g} ms ({low:.3g}-{high:.3g})" if value is None else str(value)


def _self_checks(cells: Sequence[Cell]) -> Iterator[Sequence[str]]:
    yield ["workload", "network", "rate", "alpha", "MB/s", "all-reduce", "waiting", "concurrent matmul", "self-check"]
    for cell, check in ((cell, cell.self_check) for cell in cells if cell.self_check is not None):
        stated = f" (stated {check.stated_mb_per_s:.4g})" if check.stated_mb_per_s else ""
        yield [
            *(cell.workload, cell.network, f"{cell.rate_mbit:.4g} mbit" if cell.rate_mbit is not None else "-"),
            *(f"{check.alpha_us:.0f} us", f"{check.mb_per_s:.4g}{stated}"),
            f"{format_bytes(check.nbytes)} in {check.all_reduce_ms:.3g} ms",
            *(f"{check.waiting_cpu_share:.0%} of a core", f"{check.matmul_slowdown:.2f}x as slow"),
            ("passed" if check.passed else "FAILED") if check.nbytes else "one rank",
        ]


def _short(reason: str) -> str:
    """First and last line: the last one of a traceback is its error. The result file has all of it."""
    lines = [line for line in reason.splitlines() if line.strip()] or [""]
    return lines[0] if len(lines) == 1 else f"{lines[0]} ... {lines[-1]}"


def _table(rows: Iterator[Sequence[str]]) -> Iterator[str]:
    for number, row in enumerate(rows):
        yield f"| {' | '.join(row)} |"
        if number == 0:
            yield "|---" * len(row) + "|"
