"""What the page on trouble quotes is what the package says."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
QUOTED = re.compile(r"^\| (`[^|]*`) \|", re.MULTILINE)


def quoted() -> list[str]:
    """What stands in the first column of a table in code font, and what is said in the last one of the second kind."""
    cells = QUOTED.findall(PAGE) + re.findall(r"^\|[^|]*\| (?:the same, or )?(`[^|]*`) \|$", PAGE, re.MULTILINE)
    return [each for cell in cells for each in re.findall(r"`([^`]+)`", cell)]


def test_what_is_quoted_is_said() -> None:
    files = sorted((ROOT / "dp_compile").rglob("*.py"))
    # Texts run over lines, and names are put into them: pieces between quotes are joined, calls are left out.
    said = re.sub(r'"\s*\n\s*f?"', "", "".join(path.read_text() for path in files))
    assert len(quoted()) >= 12
    for each in quoted():
        words = each.replace("replicate()", "").replace("warmup()", "").replace("has not called", "called").strip()
        assert words in said, each


def test_a_name_that_is_made_up_is_not_there() -> None:
    assert "has gone fishing" not in "".join(path.read_text() for path in (ROOT / "dp_compile").rglob("*.py"))
