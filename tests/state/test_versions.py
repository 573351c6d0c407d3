"""Checkpoints that one version of torch wrote are loaded by another one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoint_run import LOADS_FILES

PROGRAM = Path(__file__).parents[1] / "checkpoint_run.py"
ROOT = Path(__file__).parents[2]
# Interpreters with other versions of torch, divided as in PATH. This package they find in this checkout.
OTHERS = [each for each in os.environ.get("DP_COMPILE_OTHER_PYTHONS", "").split(os.pathsep) if each]


def run(python: str, *arguments: object) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    started = [python, str(PROGRAM), *map(str, arguments)]
    done = subprocess.run(started, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_every_version_loads_what_every_version_wrote(tmp_path: Path) -> None:
    """Without other interpreters: this one its own. With four of them these are 25 pairs."""
    pythons = [sys.executable, *OTHERS]
    for number, python in enumerate(pythons):
        (tmp_path / str(number)).mkdir()
        run(python, "write", tmp_path / str(number))
    written = [tmp_path / str(number) for number in range(len(pythons))]
    for python in pythons:
        found = dict(line.split("\t") for line in run(python, "read", *written).splitlines() if "\t" in line)
        assert set(found) == set(map(str, written))
        assert set(found.values()) <= {"loads", LOADS_FILES}, f"{python}: {found}"
        assert python != sys.executable or found[str(written[0])] == "loads"
