"""Golden texts: compared with what a test or a file next to it holds."""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import Final

ACCEPT_VARIABLE: Final = "DP_COMPILE_ACCEPT"
HOW_TO_ACCEPT: Final = "pytest --dp-compile-accept (or DP_COMPILE_ACCEPT=1)"


def assert_text(found: str, expected: str | os.PathLike[str], what: str) -> None:
    """Compare a text (`what`: plan) with a golden one or its file, or write the file if `DP_COMPILE_ACCEPT` is set."""
    where, remedy = "in the test", ""
    if isinstance(expected, str):
        golden = expected
    else:
        path = Path(expected)
        shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
        if os.environ.get(ACCEPT_VARIABLE, "0") not in ("", "0"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(found, encoding="utf-8")
            return
        if not path.exists():
            raise AssertionError(
                f"there is no golden file {shown} for the {what} yet. Make it with {HOW_TO_ACCEPT}, read it, and "
                "commit it."
            )
        where, golden = f"in {shown}", path.read_text(encoding="utf-8")
        remedy = f"\nIf the change is intended: {HOW_TO_ACCEPT}, read what changed in git, and commit it."
    if found != golden:
        changes = list(difflib.unified_diff(golden.splitlines(), found.splitlines(), n=1, lineterm=""))[2:]
        head = f"the {what} is not the one {where} (- expected, + found):"
        raise AssertionError("\n".join([head, *(f"  {line}" for line in changes)]) + remedy)
