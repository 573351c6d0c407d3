"""The measured tables that are kept: they come from their result files, and the README's figures from them."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
from docs_scripts import script

from dp_compile.bench import picture, report
from dp_compile.bench.results import MEASURED, check_proved, load

ROOT = Path(__file__).parents[2]
KEPT = sorted((ROOT / "docs" / "results").rglob("*.json"))


@pytest.fixture(scope="module")
def make_results() -> ModuleType:
    return script("make_results")


def test_there_are_results() -> None:
    assert "full.json" in {path.name for path in KEPT}


@pytest.mark.parametrize("path", KEPT, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_tables_and_pictures_are_those_of_the_file(path: Path) -> None:
    found = load(path)
    check_proved(found, path)
    assert not found.missing
    assert any(mode.status == MEASURED for cell in found.cells for mode in cell.modes)
    assert "+changes" not in found.environment.commit
    assert path.with_suffix(".md").read_text() == report.markdown(found)
    assert path.with_suffix(".svg").read_text() == picture.svg(found)


@pytest.mark.parametrize("path", [path for path in KEPT if path.stem == "full"], ids=lambda path: path.parent.name)
def test_the_readme_has_the_figures(path: Path, make_results: ModuleType) -> None:
    readme = (ROOT / "README.md").read_text()
    assert make_results.summary(load(path)) in readme
    assert f"docs/results/{path.parent.name}" in readme


def test_an_unknown_suite_is_refused(make_results: ModuleType) -> None:
    with pytest.raises(SystemExit, match=r"no suite fulll\. Packaged: .*full"):
        make_results.main(["fulll"])
