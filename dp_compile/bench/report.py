"""A run as tables in Markdown: step over reference, what was skipped and why, and what the links proved."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import Any, Final

from dp_compile.bench.bound import rho
from dp_compile.bench.ratios import quartiles_ms, ratios, start_ratio
from dp_compile.bench.results import MEASURED, Cell, ModeResult, Results
from dp_compile.bench.selfcheck import SLOWDOWN_LIMIT, STATED_LIMIT, STATED_LIMIT_US, WAITING_LIMIT
from dp_compile.bench.suite import COLD, SHARED, WARM
from dp_compile.plan.words import count, format_bytes

COMPUTE: Final = "compute"
"""The mode that reduces nothing."""
_SHORTENED: Final = 160
_WIDTH: Final = 110


def markdown(results: Results) -> str:
    """The whole report. `results.check_proved` comes first."""
    return "\n".join(line for text in _lines(results) for line in _wrapped(text)).rstrip() + "\n"


def rows(results: Results) -> list[dict[str, Any]]:
    """The same figures as data, a row for each workload, link and mode."""
    found = []
    for cell in results.cells:
        values = ratios(cell, results.suite.reference)
        for mode in cell.modes:
            row: dict[str, Any] = {
                "workload": cell.workload,
                "link": cell.link,
                "heat": cell.heat,
                "mode": mode.name,
                "is_bound": mode.is_bound,
                "status": mode.status,
                "reason": mode.reason or cell.skipped,
            }
            if mode.status == MEASURED:
                low, middle, high = quartiles_ms(mode)
                row |= {"median_ms": middle, "quartiles_ms": [low, high], "peak_nbytes": mode.peak_nbytes}
                row |= {"until_warm_s": mode.until_warm_s, "gradient_error": mode.gradient_error}
                if (start := start_ratio(cell, mode, results.suite.reference)) is not None:
                    row |= {"until_warm_ratio": start.value, "until_warm_plus_minus": start.plus_minus}
                row |= {"rho": rho(results, cell, mode.name)} | mode.facts.counts()
            if mode.name in values:
                row |= {"ratio": values[mode.name].value, "plus_minus": values[mode.name].plus_minus}
            found.append(row)
    return found


def milliseconds(value: float) -> str:
    """Three significant digits: `1.23 ms`."""
    digits = max(0, 2 - len(str(int(value))) + 1) if value >= 1 else 3
    return f"{value:.{digits}f} ms"


def _wrapped(text: str) -> list[str]:
    """Prose broken at spaces; tables stay in one piece."""
    if text.startswith("|"):
        return [text]
    indent = "  " if text.startswith("- ") else ""
    wrapper = textwrap.TextWrapper(_WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return wrapper.wrap(text) or [""]


def _minute(date: str) -> str:
    return date[:16].replace("T", " ")


def _lines(results: Results) -> Iterator[str]:
    suite, environment = results.suite, results.environment
    finished = max((cell.date for cell in results.cells), default=results.started)
    yield f"# Benchmark `{suite.name}`"
    yield ""
    yield f"{_minute(results.started)} to {_minute(finished)} UTC, commit {environment.commit}. {environment}."
    turns = f"{suite.repetitions} turns a mode" + (
        f" of {suite.steps_per_turn} steps" if suite.steps_per_turn > 1 else ""
    )
    ranks = count(suite.ranks, "rank")
    if any(link.kind not in ("loopback", "shaped") for link in suite.links):
        ranks += " (one process on a played link)"
    yield f"{ranks} of {count(suite.threads, 'thread')}, {turns}, modes in turns, slowest rank."
    if suite.starts > 1 or suite.caches != SHARED:
        caches = {SHARED: "", COLD: ", nothing in any cache", WARM: ", found in a cache what a start before left there"}
        yield f"{count(suite.starts, 'start')} of each mode, in turns{caches[suite.caches]}; until warm: their median."
    if results.missing:
        yield f"Not finished or skipped: {len(results.missing)} of {len(results.keys())} cells."
    yield ""
    yield (
        f"Figures are median step / median step of `{suite.reference}` in the same run, +- 1.96 standard errors; of "
        f"`{suite.reference}` itself the median in ms with its quartiles. *Italic*: a bound, nothing trains there. "
        "!: gradients wrong, or failed, see below."
    )
    for workload in dict.fromkeys(cell.workload for cell in results.cells):
        yield ""
        yield from _workload(results, workload)
    yield ""
    yield from _links(results.cells)
    yield ""
    yield from _reasons(results)


def _workload(results: Results, workload: str) -> Iterator[str]:
    cells = [cell for cell in results.cells if cell.workload == workload and not cell.skipped]
    probe = next((probe for probe in results.probes if probe.workload == workload), None)
    yield f"## {workload}"
    if probe is not None:
        compute = f", compute {milliseconds(probe.compute_s * 1e3)}" if probe.compute_s else ""
        yield ""
        yield f"{format_bytes(probe.gradient_nbytes)} of gradients{compute}."
    if not cells:
        yield ""
        yield "Not measured, see below."
        return
    links = list(dict.fromkeys(cell.link for cell in cells))
    names = list(dict.fromkeys(mode.name for cell in cells for mode in cell.modes if mode.status != "skipped"))
    table = [["mode", *links, "until warm", "peak memory"]]
    for name in names:
        found = {cell.link: (cell, mode) for cell in reversed(cells) for mode in cell.modes if mode.name == name}
        measured = [each for each in found.values() if each[1].status == MEASURED]
        modes = [mode for _, mode in measured]
        table.append(
            [
                f"*{name}*" if any(mode.is_bound for _, mode in found.values()) else name,
                *(_figure(*found[link], results.suite.reference) if link in found else "" for link in links),
                _until_warm(*max(measured, key=lambda each: each[1].until_warm_s), results) if modes else "",
                format_bytes(max(mode.peak_nbytes for mode in modes)) if modes else "",
            ]
        )
    yield ""
    yield from _table(table)
    yield from _bounds(results, cells, links, names)
    yield from _exposed(results, cells, links, names)
    yield from _left(cells, links, names)


def _until_warm(cell: Cell, mode: ModeResult, results: Results) -> str:
    start = start_ratio(cell, mode, results.suite.reference)
    return f"{mode.until_warm_s:.1f} s" + ("" if start is None else f", {start.value:.2f} +-{start.plus_minus:.2f}")


def _bounds(results: Results, cells: Sequence[Cell], links: Sequence[str], names: Sequence[str]) -> Iterator[str]:
    """How far modes that say when their gradients are ready are from the computed bound."""
    table = [["step / computed bound", *links]]
    for name in names:
        found = {cell.link: value for cell in cells if (value := rho(results, cell, name)) is not None}
        if found:
            table.append([name, *(f"{found[link]:.3f}" if link in found else "" for link in links)])
    if len(table) > 1:
        yield ""
        yield from _table(table)


def _exposed(results: Results, cells: Sequence[Cell], links: Sequence[str], names: Sequence[str]) -> Iterator[str]:
    """How much longer a step is than one that reduces nothing, and that over what it is of the suite's first mode."""
    if results.suite.reference != COMPUTE or results.suite.ranks < 2:
        return
    others = [name for name in names if name != COMPUTE]
    if others:
        table = [[f"step - {COMPUTE} (over that of {others[0]})", *links]]
        for name in others:
            table.append([name, *(next(_exposed_ms(cells, link, name, others[0]), "") for link in links)])
        yield ""
        yield from _table(table)


def _exposed_ms(cells: Sequence[Cell], link: str, name: str, first: str) -> Iterator[str]:
    for measured in (cell.measured() for cell in cells if cell.link == link):
        if {name, first, COMPUTE} <= set(measured):
            middle = {each: quartiles_ms(measured[each])[1] for each in (name, first, COMPUTE)}
            own, of_first = middle[name] - middle[COMPUTE], middle[first] - middle[COMPUTE]
            yield f"{own:.0f} ms" + (f" ({own / of_first:.2f})" if of_first > 0 else "")


def _left(cells: Sequence[Cell], links: Sequence[str], names: Sequence[str]) -> Iterator[str]:
    """What leaves a node, as its interface counts: beside a link between nodes that hold several ranks."""
    found = {(cell.link, mode.name): mode.left_nbytes for cell in cells for mode in cell.measured().values()}
    senders = [name for name in names if any(found.get((link, name)) for link in links) and name != COMPUTE]
    if not senders:
        return
    table = [[f"bytes that leave a node in a step (over those of {senders[0]})", *links]]
    for name in senders:
        row = [name]
        for link in links:
            own, first = found.get((link, name)), found.get((link, senders[0]))
            row.append(format_bytes(own) + (f" ({own / first:.2f})" if first else "") if own else "")
        table.append(row)
    yield ""
    yield from _table(table)


def _figure(cell: Cell, mode: ModeResult, reference: str) -> str:
    if mode.status != MEASURED:
        return "!"
    if mode.name == reference:
        low, middle, high = quartiles_ms(mode)
        return f"{milliseconds(middle)} ({milliseconds(low).split()[0]}-{milliseconds(high).split()[0]})"
    value = ratios(cell, reference).get(mode.name)
    return f"{value.value:.3f} +-{value.plus_minus:.3f}" if value is not None else milliseconds(quartiles_ms(mode)[1])


def _links(cells: Sequence[Cell]) -> Iterator[str]:
    yield "## What the links proved before they were used"
    yield ""
    table = [["workload", "link", "rate", "alpha", "MB/s", "all-reduce", "waiting costs", "matmul beside it", "proof"]]
    for cell in cells:
        check = cell.self_check
        if check is None:
            continue
        if not check.nbytes:
            table.append([cell.workload, cell.link, "-", "-", "-", "-", "-", "-", "one rank"])
            continue
        table.append(
            [
                cell.workload,
                cell.link,
                f"{cell.rate_mbit:.4g} mbit" if cell.rate_mbit is not None else "-",
                f"{check.alpha_us:.0f} us",
                f"{check.mb_per_s:.4g}",
                f"{format_bytes(check.nbytes)} in {milliseconds(check.all_reduce_ms)}",
                f"{check.waiting_cpu_share:.0%} of a core",
                f"{check.matmul_slowdown:.2f}x as slow",
                "passed" if check.passed else "FAILED",
            ]
        )
    yield from _table(table)
    yield ""
    yield (
        f"Passed: a rank that waits for an all-reduce costs <= {WAITING_LIMIT:.0%} of a core, and a matmul beside it "
        f"takes <= {SLOWDOWN_LIMIT:g}x as long. Where that failed (as on loopback) communication is a copy by the "
        "cores that compute: hiding it gains little, and ratios say what a mode costs, not what it hides."
    )
    played = {cell.link: cell.self_check for cell in cells if cell.self_check and cell.self_check.stated_mb_per_s}
    for link, check in played.items():
        yield (
            f"{link} is played: stated {check.stated_alpha_us:.0f} us and {check.stated_mb_per_s:.4g} MB/s; it passes "
            f"only within {STATED_LIMIT:.0%} of that, latency also within {STATED_LIMIT_US:.0f} us."
        )


def _reasons(results: Results) -> Iterator[str]:
    """What was not measured, each reason once, and how quiet it was."""
    where: dict[tuple[str, str, str], list[str]] = {}
    for cell in results.cells:
        place = f"{cell.workload} over {cell.link}"
        if cell.skipped:
            where.setdefault(("skipped", "all modes", cell.skipped), []).append(place)
        for mode in cell.modes:
            if mode.status != MEASURED:
                where.setdefault((mode.status, mode.name, mode.reason), []).append(place)
    if where:
        yield "## Not measured"
        yield ""
    for (status, name, reason), places in where.items():
        distinct = list(dict.fromkeys(places))
        yield f"- {name}, {status} ({', '.join(distinct)}): {shortened(reason)}"
    measured = [mode for cell in results.cells for mode in cell.measured().values()]
    if not measured:
        return
    noisy = sum(share > results.suite.others_limit for mode in measured for share in mode.others)
    total = sum(len(mode.others) for mode in measured)
    yield from [""] * bool(where)
    yield (
        f"{sum(mode.set_aside for mode in measured)} turns were set aside and repeated because other processes had "
        f"more than {results.suite.others_limit:.0%} of the machine; {noisy} of the {total} that count are no quieter."
    )


def shortened(reason: str) -> str:
    """A traceback's last line says what went wrong; the file has all of it."""
    lines = [line for line in reason.splitlines() if line.strip()] or [""]
    text = lines[0] if len(lines) == 1 else f"{lines[0]} ... {lines[-1]}"
    return text if len(text) <= _SHORTENED * 2 else f"{text[:_SHORTENED]} ... {text[-_SHORTENED:]}"


def _table(table: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    for number, row in enumerate(table):
        yield "| " + " | ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)) + " |"
        if number == 0:
            yield "|" + "|".join("-" * (width + 2) for width in widths) + "|"
