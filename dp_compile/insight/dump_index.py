"""The index pages of a directory of graph dumps: self-contained HTML, light and dark as the reader's system is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Final

from dp_compile.insight.dump_files import INDEX_FILE, REPRO_FILE, STEP_FILE, DumpedCapture, DumpedStage
from dp_compile.passes.result import count_changes
from dp_compile.plan.words import count

_COUNTED: Final = {
    "nodes": ("nodes",),
    "gradients reduced alone": ("reduce_grad",),
    "buckets filled": ("flat_bucket",),
    "all-reduces": ("all_reduce", "all_reduce_", "all_reduce_coalesced", "all_reduce_coalesced_"),
    "waits": ("wait_tensor",),
}
_STYLE: Final = """\
:root { color-scheme: light dark; --ink: #1a1a1a; --paper: #ffffff; --line: #d0d0d0; --link: #0645ad; --faint: #595959;
        --added: #e6f4e6; --removed: #fbe9e9; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e4e4; --paper: #161616; --line: #444444; --link: #8ab4f8; --faint: #a8a8a8; --added: #16301a;
          --removed: #3a1a1c; } }
body { background: var(--paper); color: var(--ink); font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto;
       max-width: 75rem; padding: 0 1rem; }
a { color: var(--link); }
h1 { font-size: 1.3rem; } h2 { font-size: 1.05rem; margin-top: 2rem; }
table { border-collapse: collapse; }
th, td { border-bottom: 1px solid var(--line); padding: .3rem .8rem .3rem 0; text-align: left; vertical-align: top; }
td.n, th.n { font-variant-numeric: tabular-nums; text-align: right; }
p.faint, td.faint { color: var(--faint); }
pre { border: 1px solid var(--line); font-size: 13px; overflow-x: auto; padding: .5rem; }
pre .a { background: var(--added); } pre .r { background: var(--removed); }
"""
_MOST_DIFF_LINES: Final = 400


def capture_page(dump: DumpedCapture, diffs: Mapping[int, str], *, has_repro: bool) -> str:
    """The page of one captured backward.

    Args:
        dump: its stages.
        diffs: by the number of a stage, the short text against the one of the stage before, where they differ.
        has_repro: whether a repro lies beside it.
    """
    head = f"{count(dump.world_size, 'rank')}, this is rank {dump.rank}; {dump.backend}; {dump.versions}"
    repro = f'<p><a href="{REPRO_FILE}">{REPRO_FILE}</a> rebuilds the graph and runs the passes, on any machine: '
    step = f'<p><a href="{STEP_FILE}">{STEP_FILE}</a> holds what explains the step: '
    parts = [
        "<h1>A captured backward, stage by stage</h1>",
        f'<p class="faint">{escape(head)}</p>',
        *(f"<p><strong>{escape(note)}</strong></p>" for note in dump.notes),
        _table(_header(), [_row(stage, stage.number in diffs) for stage in dump.stages]),
        f"{repro}<code>python {REPRO_FILE}</code></p>" if has_repro else "",
        f"{step}<code>dp-compile explain {STEP_FILE}</code></p>" if dump.collectives else "",
        "<h2>Collectives of the final graph, in their order</h2>" if dump.collectives else "",
        f"<pre>{escape(chr(10).join(dump.collectives))}</pre>" if dump.collectives else "",
        *_differences(dump, diffs),
    ]
    return _page("Captured backward", parts)


def rank_page(captures: Sequence[tuple[Path, DumpedCapture]]) -> str:
    """The page of a rank: a line for each capture."""
    rows = [
        [
            f'<td><a href="{path.name}/{INDEX_FILE}">{path.name}</a></td>',
            f"<td>{escape(dump.backend)}</td>",
            f'<td class="n">{dump.stages[0].counts.get("nodes", 0) if dump.stages else ""}</td>',
            f'<td class="n">{len(dump.collectives)}</td>',
            f'<td class="faint">{escape(" ".join(dump.notes))}</td>',
        ]
        for path, dump in captures
    ]
    header = ["<th>capture</th>", "<th>compiled by</th>", '<th class="n">nodes captured</th>']
    header += ['<th class="n">collectives</th>', "<th></th>"]
    return _page("Captured backwards", ["<h1>Captured backwards of this rank</h1>", _table(header, rows)])


def counted(stage: DumpedStage) -> dict[str, int]:
    """The counts of a stage that tell most, under names for people."""
    return {name: sum(stage.counts.get(op, 0) for op in ops) for name, ops in _COUNTED.items()}


def changes_between(dump: DumpedCapture) -> dict[int, list[str]]:
    """By the number of a stage, how its counts of ops differ from those of the stage before."""
    graphs = [stage for stage in dump.stages if stage.has_outline]
    return {after.number: count_changes(before.counts, after.counts) for before, after in pairwise(graphs)}


def _header() -> list[str]:
    return ["<th>stage</th>", *(f'<th class="n">{name}</th>' for name in _COUNTED), "<th>text</th>", "<th></th>"]


def _row(stage: DumpedStage, differs: bool) -> list[str]:
    links = [f'<a href="{stage.short_file}">short</a>'] if stage.has_outline else []
    links.append(f'<a href="{stage.full_file}">{"full" if stage.has_outline else "code"}</a>')
    links += [f'<a href="{stage.diff_file}">diff</a>'] if differs else []
    numbers = counted(stage).values() if stage.has_outline else [""] * len(_COUNTED)
    refused = f"{len(stage.refusals)} refused" if stage.refusals else ""
    cells = [f"<td>{escape(stage.label)}</td>", *(f'<td class="n">{number}</td>' for number in numbers)]
    return [*cells, f"<td>{' '.join(links)}</td>", f"<td>{refused}</td>"]


def _differences(dump: DumpedCapture, diffs: Mapping[int, str]) -> list[str]:
    parts: list[str] = []
    for number, changes in changes_between(dump).items():
        diff = diffs.get(number, "")
        parts.append(f"<h2>What {escape(f'{number}-{dump.all_stages[number]}')} changed</h2>")
        parts.append(f"<p>{escape(', '.join(changes))}</p>" if changes else "")
        if diff:
            parts.append(f"<details><summary>as text</summary>{_diff(diff)}</details>")
        elif not changes:
            parts.append('<p class="faint">nothing</p>')
    return parts


def _diff(text: str) -> str:
    kinds = {"+": "a", "-": "r"}
    lines = text.splitlines()
    shown = [
        f'<span class="{kinds[line[0]]}">{escape(line)}</span>' if line[:1] in kinds else escape(line)
        for line in lines[:_MOST_DIFF_LINES]
    ]
    more = len(lines) - len(shown)
    return f"<pre>{chr(10).join([*shown, *([f'... {more} more lines in the file'] if more else [])])}</pre>"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(["<table>", *(f"<tr>{''.join(cells)}</tr>" for cells in [header, *rows]), "</table>"])


def _page(title: str, parts: Sequence[str]) -> str:
    body = "\n".join(part for part in parts if part)
    return (
        f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        f'<meta name="viewport" content="width=device-width">\n<style>\n{_STYLE}</style>\n'
        f"<body>\n{body}\n</body>\n</html>\n"
    )
