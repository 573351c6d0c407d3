"""`.ci/gpu --rehearse`: every experiment runs on this CPU, and G2 names the feature in which a fault is planted.

By day the experiments that cost little; at night all of them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from experiments import PLANT
from on_a_gpu import EXPERIMENTS, FAILED, MEASURED, NEEDS_A_GPU, PASSED, WHOLE, rows_of

ROOT = Path(__file__).parents[2]


def ci_gpu(out: Path, *arguments: str, plant: str = "") -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PYTHON": sys.executable,
        PLANT: plant,
        "DP_COMPILE_GPU_CACHE": str(out.parent / "cache"),
    }
    command = [str(ROOT / ".ci/gpu"), *arguments, "--out", str(out)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=1500, check=False)


def statuses(out: Path) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for row in rows_of(out / "results.jsonl"):
        found.setdefault(row["experiment"], set()).add(row["status"])
    return found


def test_some_experiments_by_day(tmp_path: Path) -> None:
    """Failures on purpose, the simulated network. G2 runs in the test of a fault."""
    out = tmp_path / "out"
    done = ci_gpu(out, "--rehearse", "--only", "G3,G5")
    assert done.returncode == 0, done.stdout + done.stderr + (out / "summary.md").read_text()
    assert statuses(out) == {"G3": {PASSED}, "G5": {PASSED, MEASURED}}
    names = "log.txt machine.txt results.jsonl summary.md timeline.svg trace.json.gz"
    assert sorted(path.name for path in out.iterdir()) == names.split()


@pytest.mark.nightly
@pytest.mark.timeout(1600)
def test_all_experiments_at_night(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = ci_gpu(out, "--rehearse")
    assert done.returncode == 0, done.stdout + done.stderr + (out / "summary.md").read_text()
    found = statuses(out)
    assert list(found) == [each.name for each in EXPERIMENTS]
    assert set().union(*found.values()) == {PASSED, MEASURED, NEEDS_A_GPU}
    assert {name for name, seen in found.items() if NEEDS_A_GPU in seen} == {"G2", "G4", "G7", "G8"}
    assert len(list(out.iterdir())) <= 8


def test_a_fault_in_a_reduction_is_named_by_the_feature(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = ci_gpu(out, "--rehearse", "--only", "G2", "--features", "^bucket_cap_mb$", plant="planted_reductions:factor")
    assert done.returncode == 1, done.stdout + done.stderr
    found = {row["claim"]: row["status"] for row in rows_of(out / "results.jsonl")}
    assert found == {
        "bucket_cap_mb: captured, aot_eager, stand-in": FAILED,
        "bucket_cap_mb: captured, aot_eager, gloo": FAILED,
        "bucket_cap_mb: eager, aot_eager, stand-in": PASSED,
        WHOLE: PASSED,
    }
    assert "**FAILED**" in (out / "summary.md").read_text()
    assert json.loads((out / "results.jsonl").read_text().splitlines()[0])["experiment"] == "G2"
