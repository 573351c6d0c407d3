"""Text for display: counts, sizes and ranks, tables, and lines of at most 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from functools import partial
from typing import Final

BYTES_PER_MB: Final = 2**20
WIDTH: Final = 80
SHORTEST_CELL: Final = 12


def count(number: int, noun: str) -> str:
    """Return a number with its noun: `1 bucket`, `2 buckets`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def format_bytes(nbytes: float) -> str:
    """Return a number of bytes with its unit: `1.5 MiB`."""
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} GiB"


def ranks_in_words(ranks: Sequence[int], most: int = 8) -> str:
    """Return ranks as text: `rank 1`, or `ranks 0, 2 and 12 more`."""
    named = ", ".join(map(str, ranks[:most])) + (f" and {len(ranks) - most} more" if len(ranks) > most else "")
    return f"rank{'s' * (len(ranks) > 1)} {named}"


def table(rows: Sequence[Sequence[str]], *, left: Sequence[int], width: int = WIDTH, between: str = "  ") -> list[str]:
    """Return rows of cells as lines, with the columns `left` aligned to the left.

    To keep lines within `width`, the middle of long cells in the widest `left` column is omitted: `blocks..bias`.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    widest = max(left, key=widths.__getitem__)
    room = max(SHORTEST_CELL, width - sum(widths) - len(between) * (len(widths) - 1) + widths[widest])
    widths[widest] = min(widths[widest], room)

    def padded(number: int, text: str) -> str:
        if len(text) > widths[number]:
            text = f"{text[: room // 2 - 1]}..{text[-(room - room // 2 - 1) :]}"
        return text.ljust(widths[number]) if number in left else text.rjust(widths[number])

    return [between.join(map(padded, range(len(row)), row)).rstrip() for row in rows]


def in_columns(text: str) -> str:
    """Wrap lines that are longer than `WIDTH`; continuation lines are indented by two more."""
    lines = ((line, " " * (len(line) - len(line.lstrip()) + 2)) for line in text.splitlines())
    fill = partial(textwrap.fill, width=WIDTH, break_long_words=False, break_on_hyphens=False)
    return "\n".join(fill(line, subsequent_indent=indent) for line, indent in lines)
