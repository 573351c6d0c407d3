"""The page on Ray Train, run on a local cluster of two workers on CPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from docs_scripts import python_of

SCRIPT = Path(__file__).with_name("ray_run.py")


@pytest.mark.nightly
@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: pip install -e '.[test-ray]'")
def test_the_page(tmp_path: Path) -> None:
    """A worker dies, all go on from the checkpoint and end where one process does on the joint batch."""
    program = tmp_path / "program.py"
    program.write_text(python_of("integrations.md", "Ray Train"))
    environ = {**os.environ, "PYTHONPATH": str(SCRIPT.parents[2]), "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path), str(program)],
        env=environ,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "through"
