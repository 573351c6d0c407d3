"""The benchmark from end to end, as a user runs it. The result is kept: in `$DP_COMPILE_BENCH_KEEP`, or bench_results/.

No time is looked at; the machines that run the tests are shared. Each mode by itself is run every day, in
`test_bench_modes.py`, and the command in `test_bench.py`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dp_compile.bench import results, suite

pytestmark = pytest.mark.nightly

KEPT = Path(os.environ.get("DP_COMPILE_BENCH_KEEP") or Path(__file__).parents[1] / "bench_results")
LINKS = ("loopback", "fabric 64 x 10 us, 8000 mbit")


def bench(*arguments: str | Path, directory: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dp_compile", "bench", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=550)


@pytest.fixture(scope="module")
def result() -> Path:
    """What `run smoke` wrote; whatever was there is replaced."""
    KEPT.mkdir(parents=True, exist_ok=True)
    path = KEPT / "bench-smoke.json"
    done = bench("run", "smoke", "--out", path, "--fresh", "--quiet", directory=KEPT)
    assert done.returncode == 0, done.stdout + done.stderr
    return path


def test_everything_was_measured(result: Path) -> None:
    found = results.load(result)
    assert found.suite == suite.load("smoke")
    assert not found.missing
    assert tuple(cell.link for cell in found.cells) == LINKS
    for cell in found.cells:
        assert set(cell.measured()) == {"oracle", "ddp", "python_reducer", "ours"}
        for mode in cell.modes:
            assert len(mode.step_s) == 5
            assert mode.is_bound or mode.gradient_error is not None
    stated = [cell.self_check.stated_mb_per_s if cell.self_check is not None else None for cell in found.cells]
    assert stated == [0.0, pytest.approx(1e3 * 64 / 126)]


def test_it_is_reported(result: Path) -> None:
    picture, table = result.with_suffix(".svg"), result.with_suffix(".md")
    done = bench("report", result, "--picture", picture, "--out", table, directory=KEPT)
    assert done.returncode == 0, done.stderr
    assert picture.read_text().startswith("<svg")
    assert all(link in table.read_text() for link in LINKS)


def test_it_is_no_slower_than_itself(result: Path) -> None:
    done = bench("compare", result, result, directory=KEPT)
    assert done.returncode == 0, done.stdout + done.stderr
