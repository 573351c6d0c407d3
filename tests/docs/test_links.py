"""What the documents point at is there: links, files, names in files; and what has to stay short is short."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_layout import ROOMS

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "dp_compile"
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
DESIGN = (ROOT / "docs" / "design.md").read_text()
README_LINES = 200
WAY_FILES = 12
PLACES = {"docs", "tests", ".ci", "dp_compile", *(path.name for path in PACKAGE.iterdir() if path.is_dir())}


def without_blocks(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(text: str) -> set[str]:
    """The headings of a document as GitHub names them: lower case, without punctuation, numbered if met before."""
    seen: Counter[str] = Counter()
    found = set()
    for heading in re.findall(r"^#+ (.*)$", without_blocks(text), re.MULTILINE):
        slug = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return found


def links(text: str) -> list[str]:
    """Those that stay in the repository."""
    found = re.findall(r"\]\(([^)\s]+)\)|\b(?:src|srcset|href)=\"([^\"]+)\"", without_blocks(text))
    return [target for pair in found for target in pair if target and not re.match(r"https?://", target)]


def leads_nowhere(document: Path, text: str) -> Iterator[str]:
    for link in links(text):
        path, _, anchor = link.partition("#")
        target = document.parent / path if path else document
        if not target.exists() or (anchor and anchor not in anchors(text if not path else target.read_text())):
            yield link


def named_files(text: str) -> list[str]:
    """Names of files in code font; a star stands for any."""
    return re.findall(r"`([\w./*-]+\.(?:py|md|toml)|\.ci/\w+)(?:::\w+)?`", text)


def is_there(name: str) -> bool:
    return any(any(base.glob(name)) for base in (ROOT, PACKAGE))


def section(title: str, text: str = DESIGN) -> str:
    """A section of the design, with those below it."""
    (found,) = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    return str(found)


def way(text: str) -> list[str]:
    """The files of the way of one gradient."""
    return re.findall(r"^\d+\. `([^`]+)`", section("The way of one gradient", text), re.MULTILINE)


def names_that_are_gone(part: str) -> list[str]:
    """Names in code font that are in none of the files that a part of the design names."""
    sources = "".join(
        path.read_text() for name in named_files(part) for base in (PACKAGE, ROOT) for path in base.glob(name)
    )
    names = set(re.findall(r"`([A-Za-z_]\w*(?:\.\w+)*)(?:\(\))?`", part)) - set(named_files(part))
    return sorted(name for name in names if not re.search(rf"\b{name.rpartition('.')[2]}\b", sources))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    assert list(leads_nowhere(document, document.read_text())) == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_files_are_there(document: Path) -> None:
    named = {name for name in named_files(document.read_text()) if name.split("/")[0] in PLACES}
    assert [name for name in sorted(named) if not is_there(name)] == []


def test_the_index_lists_every_document() -> None:
    listed = re.findall(r"^- \[(\S+)\]\(\1\): \S", (ROOT / "docs" / "index.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(path.name for path in DOCUMENTS[1:] if path.name != "index.md")


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES


def test_the_way_of_one_gradient_is_short() -> None:
    files = way(DESIGN)
    assert 1 < len(files) <= WAY_FILES
    assert len(set(files)) == len(files)
    assert [name for name in files if not (PACKAGE / name).is_file()] == []


def test_the_way_and_where_to_add_name_what_is_there() -> None:
    steps = re.split(r"^\d+\. ", section("The way of one gradient"), flags=re.MULTILINE)[1:]
    answers = section("Where to add").split("### ")[1:]
    assert [answer.split("\n")[0] for answer in answers] == ["A pass", "A wire dtype", "An observer"]
    for part in (*steps, *answers):
        assert [name for name in named_files(part) if not is_there(name)] == []
        assert names_that_are_gone(part) == []


def test_the_rooms_are_those_of_the_layout() -> None:
    rows = re.findall(r"^\| (`.*?) \|", section("Rooms"), re.MULTILINE)
    listed = [tuple(re.findall(r"`(\w+)(?:/|\.py)`", row)) for row in rows]
    assert [set(rooms) for rooms in listed] == [set(rooms) for rooms in ROOMS if not rooms[0].startswith("__")]


def test_what_leads_nowhere_is_seen() -> None:
    here = ROOT / "docs" / "index.md"
    text = (
        "# A `b` c's\n# A b cs\n[1](#a-b-cs) [2](#a-b-cs-1) [3](index.md#documents) [4](https://x.y)\n"
        '[5](#a) [6](gone.md) [7](index.md#gone) <img src="gone.svg">\n```\n[8](gone.md)\n```\n'
    )
    assert list(leads_nowhere(here, text)) == ["#a", "gone.md", "index.md#gone", "gone.svg"]
    assert named_files("`engine/gone.py` `tests/mutants/*.toml` `.ci/run` `a::b` `x.py::test`") == [
        "engine/gone.py", "tests/mutants/*.toml", ".ci/run", "x.py"
    ]  # fmt: skip
    assert not is_there("engine/gone.py")
    assert is_there("tests/mutants/*.toml")
    assert names_that_are_gone("`plan/words.py` has `BYTES_PER_MB`, `words.gone` and `gone()`") == [
        "gone",
        "words.gone",
    ]
