"""What the documents name is there: links, files, names, tests, texts of errors. What has to stay short is short."""

import ast
import dataclasses
import inspect
import re
from collections import Counter
from pathlib import Path

import api
from docs_scripts import blocks, section
from test_layout import ROOMS

import dp_compile
from dp_compile.cli import main as cli
from dp_compile.config import ReplicateConfig

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "dp_compile"
TEXTS = {path: path.read_text() for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]}
README_LINES, SENTENCE_WORDS = 120, 25
DOCS_PAGES, DOCS_LINES = 7, 1300
NOT_COUNTED = ("README.md", "api.md", "corpus.md", "gpu.md", "removed.md")
WAY_FILES = 12
EVERYDAY = r"\b(?:behind|said|beside|nobody|of its own|told|apart|anew|whatever|somebody|whoever|go round)\b"
PLACES = {"docs", "tests", ".ci", "dp_compile", *(path.name for path in PACKAGE.iterdir() if path.is_dir())}


def without_blocks(text):
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(text):
    """The headings of a document as GitHub names them: lower case, without punctuation, numbered if met before."""
    seen = Counter()
    found = set()
    for heading in re.findall(r"^#+ (.*)$", without_blocks(text), re.MULTILINE):
        slug = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return found


def leads_nowhere(document, text):
    """Links that stay in the repository and have no target there."""
    found = re.findall(r"\]\(([^)\s]+)\)|\b(?:src|srcset|href)=\"([^\"]+)\"", without_blocks(text))
    for link in (target for pair in found for target in pair if target and not re.match(r"https?://", target)):
        path, _, anchor = link.partition("#")
        target = document.parent / path if path else document
        if not target.exists() or (anchor and anchor not in anchors(text if not path else target.read_text())):
            yield link


def named_files(text):
    """Names of files in code font; a star stands for any."""
    return re.findall(r"`([\w./*-]+\.(?:py|md|toml)|\.ci/\w+)(?:::\w+)?`", text)


def is_there(name):
    return any(any(base.glob(name)) for base in (ROOT, PACKAGE))


def test_links_files_and_functions_are_there():
    for path, text in TEXTS.items():
        assert list(leads_nowhere(path, text)) == [], path.name
        named = {name for name in named_files(text) if name.split("/")[0] in PLACES}
        assert [name for name in sorted(named) if not is_there(name)] == [], path.name
        assert set(re.findall(r"`[^`\n]*?\bdp_compile\.(\w+)\(", text)) <= set(dp_compile.__all__), path.name


def test_the_readme_links_every_page_and_documents_are_short():
    readme = TEXTS[ROOT / "README.md"]
    assert {path.name for path in TEXTS} - {"README.md"} <= set(re.findall(r"\]\(docs/(\w+\.md)[)#]", readme))
    assert len(readme.splitlines()) <= README_LINES
    assert [each for each in sentences(readme) if len(each.split()) > SENTENCE_WORDS] == []
    counted = [text for path, text in TEXTS.items() if path.name not in NOT_COUNTED]
    assert len(counted) <= DOCS_PAGES
    assert sum(not line.startswith("|") for text in counted for line in text.splitlines()) <= DOCS_LINES


def sentences(text):
    """Those of paragraphs, items and cells."""
    text = re.sub(r"\]\([^)]*\)", "", without_blocks(text))
    parts = re.split(r"\n\n|\n(?=[-|#])| \| ", text)
    return [each for part in parts for each in re.split(r"(?<=[.:?])\s", part)]


def test_the_documents_are_in_the_words_of_the_field():
    for path, text in TEXTS.items():
        prose = re.sub(r"`[^`\n]*`", "", without_blocks(text))
        assert re.findall(EVERYDAY, prose, re.IGNORECASE) == [], path.name


def names_that_are_gone(part):
    """Names in code font that are in none of the files that a part of the design names."""
    sources = "".join(
        path.read_text() for name in named_files(part) for base in (PACKAGE, ROOT) for path in base.glob(name)
    )
    names = set(re.findall(r"`([A-Za-z_]\w*(?:\.\w+)*)(?:\(\))?`", part)) - set(named_files(part))
    return sorted(name for name in names if not re.search(rf"\b{name.rpartition('.')[2]}\b", sources))


def test_the_design_names_what_is_there_and_the_way_of_one_gradient_is_short():
    way = re.findall(r"^\d+\. `([^`]+)`", section("design.md", "The way of one gradient"), re.MULTILINE)
    assert 1 < len(set(way)) == len(way) <= WAY_FILES
    assert [name for name in way if not (PACKAGE / name).is_file()] == []
    steps = re.split(r"^\d+\. ", section("design.md", "The way of one gradient"), flags=re.MULTILINE)[1:]
    for part in (*steps, *section("design.md", "Where to add").split("### ")[1:]):
        assert [name for name in named_files(part) if not is_there(name)] == []
        assert names_that_are_gone(part) == []


def test_the_rooms_are_those_of_the_layout():
    rows = re.findall(r"^\| (`.*?) \|", section("design.md", "Rooms"), re.MULTILINE)
    listed = [tuple(re.findall(r"`(\w+)(?:/|\.py)`", row)) for row in rows]
    assert [set(rooms) for rooms in listed] == [set(rooms) for rooms in ROOMS if not rooms[0].startswith("__")]


def test_the_page_of_names_is_that_of_today_and_explains_every_option_and_argument():
    assert (ROOT / "docs" / "api.md").read_text() == api.document(), "run python docs/api.py"
    assert list(api.options()) == [field.name for field in dataclasses.fields(ReplicateConfig)]
    assert all(text.startswith("`") and ", default" in text for text in api.options().values())
    for function in (getattr(dp_compile, name) for name in dp_compile.__all__):
        if inspect.isfunction(function):
            explained, arguments = inspect.getdoc(function) or "", inspect.signature(function).parameters
            for each in set(arguments) - {"module", "model", "modules"}:
                assert re.search(rf"^ +{each}: ", explained, re.MULTILINE), (function.__name__, each)


def test_every_section_with_python_is_run_by_a_test():
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    for path, text in TEXTS.items():
        parts = re.split(r"^## ", text, flags=re.MULTILINE)
        headings = [part.partition("\n")[0] for part in parts if "```python" in part]
        assert [each for each in headings if f'python_of("{path.name}", "{each}"' not in tests] == [], path.name


def names_in(file):
    """The tests of a file: `name` or `Class::name`."""
    found = set()
    for node in ast.parse(file.read_text()).body:
        inside = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}::" if isinstance(node, ast.ClassDef) else ""
        found |= {prefix + each.name for each in inside if isinstance(each, ast.FunctionDef)}
    return found


def test_every_line_of_the_semantics_has_tests_that_exist():
    text = section("semantics.md", "Line by line")
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines() if line[:1] == "|"]
    lines = [cells for cells in rows if not set("".join(cells)) <= set("-| ") and cells[0] != "line"]
    assert len(lines) > 50
    found = {path.name: names_in(path) for path in (ROOT / "tests").rglob("test_*.py")}
    for cells in lines:
        named = re.findall(r"`(test_\w+\.py)::([\w:]+)`", cells[-1])
        assert len(cells) == 4, cells[0]
        assert len(named) == cells[-1].count("`") // 2 > 0, cells[0]
        for file, name in named:
            assert name in found[file], (cells[0], file, name)


def test_the_messages_that_troubleshooting_quotes_are_texts_of_the_package():
    cells = re.findall(r"^\| (`[^|]*`) \|", section("troubleshooting.md", "Errors and warnings"), re.MULTILINE)
    # Texts run over lines, and names are put into them: pieces between quotes are joined, calls are left out.
    texts = re.sub(r'"\s*\n\s*f?"', "", "".join(path.read_text() for path in sorted(PACKAGE.rglob("*.py"))))
    quoted = [each for cell in cells for each in re.findall(r"`([^`]+)`", cell)]
    assert len(quoted) >= 30
    for each in quoted:
        assert re.sub(r"has not called \w+\(\)", "called", each) in texts, each


def test_the_step_on_the_page_is_what_the_commands_print(capsys, monkeypatch, tmp_path):
    """`docs/timeline.py` records docs/step.json; the page shows it as the commands do."""
    monkeypatch.chdir(ROOT / "docs")
    _, *shown = (block for _, block in blocks(section("quickstart.md", "Inspect a step")))
    for block, what in zip(shown, ("explain", "predict"), strict=True):
        command, _, printed = block.removeprefix("$ dp-compile ").partition("\n")
        assert command.startswith(what)
        assert cli.main(command.split()) == 0
        assert capsys.readouterr().out == printed
    assert cli.main(["timeline", "step.json", "-o", str(tmp_path / "step.svg")]) == 0
    assert (tmp_path / "step.svg").read_text() == Path("step.svg").read_text()
