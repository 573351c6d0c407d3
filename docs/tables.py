"""All tables of the documentation, from one command: `python docs/tables.py docs`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import api
import pass_table
import plan_table

DOCUMENTS: Final[dict[str, Callable[[], str]]] = {
    "api.md": api.document,
    "plan_table.md": plan_table.document,
    "pass_table.md": pass_table.document,
}


def main(arguments: Sequence[str]) -> None:
    """Write every table into the directory that is named."""
    if len(arguments) != 1:
        raise SystemExit("usage: python docs/tables.py DIRECTORY")
    directory = Path(arguments[0])
    directory.mkdir(parents=True, exist_ok=True)
    for name, document in DOCUMENTS.items():
        (directory / name).write_text(document())


if __name__ == "__main__":
    main(sys.argv[1:])
