"""The guide shows what its commands say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from docs_scripts import script

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "docs" / "make_guide.py"


@pytest.fixture(scope="module")
def make_guide() -> ModuleType:
    return script("make_guide")


def check(*options: str) -> None:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    ended = subprocess.run(
        [sys.executable, str(SCRIPT), "--check", *options],
        env=os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_outputs_and_pictures_are_those_of_today() -> None:
    check()


@pytest.mark.nightly
def test_the_first_training_says_what_the_guide_shows() -> None:
    check("--first-only")


def test_a_changed_output_is_seen(make_guide: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    guide = tmp_path / "guide.md"
    text = "```console\n$ dp-compile explain fast.json\nno text\n```\n"
    guide.write_text(text)
    monkeypatch.setattr(make_guide, "GUIDE", guide)
    assert make_guide.main(["--check"]) == 1
    assert guide.read_text() == text
    monkeypatch.setattr(make_guide, "_made", lambda directory: [])
    assert make_guide.main([]) == 0
    assert "no text" not in guide.read_text()
    assert make_guide.main(["--check"]) == 0


def test_figures_of_a_training_are_not_compared_but_words_are(make_guide: ModuleType) -> None:
    assert make_guide.without_figures("took 1.2e+03 ms\ntook  17 ms") == ["took # ms"]
    assert make_guide.without_figures("took 17 ms") != make_guide.without_figures("took 17 s")


def test_lines_that_are_left_out(make_guide: ModuleType) -> None:
    said = "[rank 1] 2026-11-21 16:18:25,045 INFO dp_compile.{}: the plan\n"
    text = f"W1121 16:18 torchrun\n{said.format('replicate')}{said.format('drift')}"
    assert make_guide._NOISE.sub("", text) == said.format("replicate")


def test_a_picture_for_dark_screens_has_no_other_colours(make_guide: ModuleType) -> None:
    assert (
        make_guide.in_the_dark('<rect fill="#ffffff" stroke="#d9dee3"/>') == '<rect fill="#15181c" stroke="#353b42"/>'
    )
    with pytest.raises(KeyError):
        make_guide.in_the_dark('<rect fill="#123456"/>')


def test_the_readme_links_to_the_guide() -> None:
    assert "(docs/guide.md)" in (ROOT / "README.md").read_text()


def test_every_picture_of_the_guide_is_there() -> None:
    text = (ROOT / "docs" / "guide.md").read_text()
    pictures = [line.split("](")[1].rstrip(")") for line in text.splitlines() if line.startswith("![")]
    assert pictures
    assert all((ROOT / "docs" / picture).is_file() for picture in pictures)
