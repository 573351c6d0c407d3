"""The suite in docs/example_suite, which docs/quickstart.md links, passes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dp_compile.testing.golden import ACCEPT_VARIABLE

ROOT = Path(__file__).parents[2]
SUITE = ROOT / "docs" / "example_suite"


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """The suite where no configuration of this project holds."""
    return Path(shutil.copytree(SUITE, tmp_path / "suite", ignore=shutil.ignore_patterns("__pycache__")))


def run_suite(directory: Path, *options: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != ACCEPT_VARIABLE}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options],
        cwd=directory,
        env=environment | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
    )


@pytest.mark.nightly
def test_the_suite_passes(copied: Path) -> None:
    ended = run_suite(copied)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "5 passed" in ended.stdout


def test_golden_files_are_made_by_the_option(copied: Path) -> None:
    shutil.rmtree(copied / "golden")
    ended = run_suite(copied, "--dp-compile-accept", "-k", "reduced_together or launched")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert texts(copied / "golden") == texts(SUITE / "golden")


def texts(golden: Path) -> dict[str, str]:
    """But for how many ops compute between reductions: torch 2.15 has others for a product."""
    return {path.name: re.sub(r"\d+ nodes", "nodes", path.read_text()) for path in golden.iterdir()}
