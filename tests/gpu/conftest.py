"""Code for a GPU, generated once for all tests of it: torch's CPU build, Triton's wheel and a played CUDA."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import LARGE, SMALL, Results

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


def run(script: str, *arguments: str, **variables: str) -> None:
    """One of the scripts beside this file, in a process of its own that sees Triton."""
    root = HERE.parents[1]
    folders = [str(root), str(HERE.parent), os.environ.get("DP_COMPILE_TRITON", ""), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, **variables, "PYTHONPATH": os.pathsep.join(filter(None, folders))}
    command = [sys.executable, str(HERE / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=1200, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


def made_anew(part: Path, names: tuple[str, ...]) -> Results:
    """Small cases share a process; attention is replaced for a whole process, if at all."""
    apart = [name for name in names if name in LARGE]
    results: Results = {}
    for group in filter(None, ([name for name in names if name not in apart], *([name] for name in apart))):
        run("generate.py", str(part), *group)
        results.update(json.loads(part.read_text()))
    part.write_text(json.dumps(results))
    binaries = part.with_suffix(".binaries")
    run("cubins.py", str(part), str(binaries))
    for name, found in json.loads(binaries.read_text()).items():
        results[name]["binaries"] = found
    return results


def made_once(factory: pytest.TempPathFactory, which: str, make: Callable[[Path], Any]) -> Any:
    """What is made by the first who asks, whichever of pytest's workers it is in. `make` may write to a file."""
    if missing():
        pytest.skip(missing())
    base = factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    target = shared / f"generated_{which}.json"
    with (shared / f"generated_{which}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            target.write_text(json.dumps(make(shared / f"{which}.part")))
    return json.loads(target.read_text())


def generated(factory: pytest.TempPathFactory, which: str, names: tuple[str, ...]) -> Results:
    """Results of these cases."""
    results: Results = made_once(factory, which, lambda part: made_anew(part, names))
    failed = {name: result["failed"] for name, result in results.items() if "failed" in result}
    assert not failed, "\n".join(f"{name}: {text}" for name, text in failed.items())
    return results


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return generated(tmp_path_factory, "small", tuple(name for name, case in SMALL.items() if case.every_day))


@pytest.fixture(scope="session")
def more(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return generated(tmp_path_factory, "more", tuple(name for name, case in SMALL.items() if not case.every_day))


@pytest.fixture(scope="session")
def large(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return generated(tmp_path_factory, "large", tuple(LARGE))
