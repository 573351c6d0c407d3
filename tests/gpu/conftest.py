"""Code for a GPU, generated once for all tests of it: torch's CPU build, Triton's wheel and a played CUDA."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from generate import CASES, Results

HERE = Path(__file__).parent


def missing() -> str:
    """What this environment lacks, and what to do; nothing if all is there."""
    if torch.version.cuda is not None:
        return "CUDA is played for torch's CPU build only, and this torch was built for CUDA: .ci/gpu tests it itself"
    if shutil.which("g++") is None:
        return "g++ is not installed, which compiles the played CUDA"
    if importlib.util.find_spec("triton") is None and "DP_COMPILE_TRITON" not in os.environ:
        return (
            "triton is not installed: pip install -c constraints.txt -e '.[gpu-code]', or triton alone into a folder "
            "that DP_COMPILE_TRITON names, as .ci/setup does"
        )
    return ""


@pytest.fixture(scope="session")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Made by the first who asks, of all of pytest's workers, in a process that sees Triton."""
    if missing():
        pytest.skip(missing())
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    target, part = shared / "generated.json", shared / "generated.part"
    folders = [str(HERE.parents[1]), str(HERE.parent), os.environ.get("DP_COMPILE_TRITON", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*folders, os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, str(HERE / "generate.py"), str(part), *CASES]
    with (shared / "generated.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=1200, check=False)
            assert done.returncode == 0, done.stderr[-4000:]
            part.rename(target)
    results: Results = json.loads(target.read_text())
    failed = {name: result["failed"] for name, result in results.items() if "failed" in result}
    assert not failed, "\n".join(f"{name}: {text}" for name, text in failed.items())
    return results
