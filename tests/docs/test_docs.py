"""The table of semantics names tests, and they exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "docs" / "semantics.md"
HEADER = ["line", "torch's DDP", "dp_compile", "tests"]


def rows(text: str) -> list[list[str]]:
    """The cells of every row of every table, without rulers."""
    split = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines() if line[:1] == "|"]
    return [cells for cells in split if not set("".join(cells)) <= set("-| ")]


def named_tests(cell: str) -> list[str]:
    return re.findall(r"`(test_\w+\.py::[\w:]+)`", cell)


def names_in(file: Path) -> set[str]:
    """The tests of a file: `name` or `Class::name`."""
    found = set()
    for node in ast.parse(file.read_text()).body:
        inside = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}::" if isinstance(node, ast.ClassDef) else ""
        found |= {prefix + each.name for each in inside if isinstance(each, ast.FunctionDef)}
    return {name for name in found if name.split("::")[-1].startswith("test_")}


LINES = [cells for cells in rows(TABLE.read_text()) if cells != HEADER]


@pytest.mark.parametrize("cells", LINES, ids=[cells[0] for cells in LINES])
def test_every_line_has_tests_that_exist(cells: list[str]) -> None:
    assert len(cells) == len(HEADER)
    named = named_tests(cells[-1])
    assert len(named) == cells[-1].count("`") // 2 > 0
    for each in named:
        file, name = each.split("::", 1)
        (path,) = (ROOT / "tests").rglob(file)
        assert name in names_in(path), each


def test_a_wrong_name_is_seen() -> None:
    assert named_tests("`test_docs.py::test_a_wrong_name_is_seen`, words") == [
        "test_docs.py::test_a_wrong_name_is_seen"
    ]
    assert "test_a_wrong_name_is_seen" in names_in(Path(__file__))
    assert "test_that_is_not_there" not in names_in(Path(__file__))
    assert rows("| a | b |\n|---|---|\ntext\n| c | d |") == [["a", "b"], ["c", "d"]]


def test_the_readme_links_to_the_table() -> None:
    assert "(docs/semantics.md)" in (ROOT / "README.md").read_text()
