"""`.ci/gpu`: its runner with processes that die or hang, and rehearsals of its experiments on this CPU."""

import os
import subprocess
import sys
import time
from pathlib import Path

import on_a_gpu
import pytest
import torch
from experiments import PLANT
from on_a_gpu import EXPERIMENTS, FAILED, MEASURED, NEEDS_A_GPU, OUT_OF_TIME, PASSED, WHOLE, Machine

ROOT = Path(__file__).parents[2]


def ci_gpu(out, *arguments, plant=""):
    own = {"PYTHON": sys.executable, PLANT: plant, "DP_COMPILE_GPU_CACHE": str(out.parent / "cache")}
    command = [str(ROOT / ".ci/gpu"), *arguments, "--out", str(out)]
    more = {"capture_output": True, "text": True, "timeout": 1500, "check": False}
    return subprocess.run(command, cwd=ROOT, env=os.environ | own, **more)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing where there is no GPU")
def test_without_a_gpu_nothing_is_run(tmp_path):
    done = ci_gpu(tmp_path / "results", "first")
    assert done.returncode == 1
    assert "missing: " in done.stderr
    assert not (tmp_path / "results").exists()


def test_ranks_share_a_card_by_what_their_nccl_has():
    """Below 2.30.3 each has another host id; from there on NCCL has a variable. With two cards nothing is needed."""
    before = [on_a_gpu.nccl_settings(Machine(gpus=1, nccl=(2, 28, 9)), rank) for rank in range(2)]
    assert [each.pop("NCCL_HOSTID") for each in before] == ["rank-0", "rank-1"]
    assert before[0] == before[1]
    assert (before[0]["NCCL_NET"], before[0]["NCCL_SOCKET_IFNAME"]) == ("Socket", "lo")
    since = on_a_gpu.nccl_settings(Machine(gpus=1, nccl=(2, 30, 7)), 0)
    assert (since["NCCL_MULTI_RANK_GPU_ENABLE"], since["NCCL_NVLS_ENABLE"]) == ("1", "0")
    assert on_a_gpu.nccl_settings(Machine(gpus=2, nccl=(2, 28, 9)), 0) == {}


@pytest.fixture
def ran(tmp_path, monkeypatch):
    """Run an experiment whose one process runs this text (`task` is its task) within so many seconds."""
    monkeypatch.setattr(on_a_gpu, "HERE", tmp_path)
    monkeypatch.setattr(on_a_gpu.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))

    def run(script, limit_s):
        imports = "import json, os, subprocess, sys, time\nfrom on_a_gpu import *\n"
        (tmp_path / "experiments.py").write_text(f"{imports}task = Task(**json.loads(sys.argv[1]))\n{script}")
        made = on_a_gpu.Experiment("X", "title", "first", limit_s, lambda _: on_a_gpu.roles("one"))
        on_a_gpu.run(made, Machine(), tmp_path, time.monotonic() + 60)
        rows = on_a_gpu.rows_of(tmp_path / "results.jsonl")
        return {row["claim"]: (row["status"], row["detail"]) for row in rows}

    return run


def test_a_process_that_dies_fails_what_it_had_planned(ran, tmp_path):
    script = "task.planned('a', 'b', 'c')\ntask.record('a', True, '1 ms')\n"
    script += "for passed in (True, False, True):\n    task.record('c', passed)\n"  # as of three ranks
    found = ran(f"{script}sys.exit('what went wrong')\n", 30)
    assert (found["a"], found["c"][0]) == ((PASSED, ""), FAILED)
    assert found["b"] == found[WHOLE] == (FAILED, "one.0 ended with 1: what went wrong")
    assert "what went wrong" in (tmp_path / "log.txt").read_text()


def test_one_that_hangs_is_killed_and_its_numbers_stay(ran, tmp_path):
    """And what it has started, too."""
    script = "child = subprocess.Popen(['sleep', '300'])\ntask.planned('a', 'b')\ntask.record('a', True)\n"
    found = ran(f"{script}task.publish('../child', child.pid)\ntime.sleep(300)\n", 12)
    assert [found[claim][0] for claim in ("a", "b", WHOLE)] == [PASSED, OUT_OF_TIME, OUT_OF_TIME]
    child = Path("/proc", (tmp_path / "child").read_text(), "stat")
    assert not child.exists() or child.read_text().split()[2] == "Z"


def test_what_killed_a_process_has_failed_and_the_rest_is_run(ran):
    """By a signal, or by an error that the process has noted."""
    script = "if not task.again:\n    task.planned('a', 'b', 'c', 'd')\n    task.record('a', NEEDS_A_GPU)\n"
    script += "for claim in task.waiting():\n    task.publish('now.one.0', claim)\n"
    script += "    os.abort() if claim == 'b' else task.record(claim, claim == 'd')\n    claim == 'd' or sys.exit(1)\n"
    found = ran(script, 40)
    expected = {"a": NEEDS_A_GPU, "b": FAILED, "c": FAILED, "d": PASSED, WHOLE: FAILED}
    assert {claim: status for claim, (status, _) in found.items()} == expected
    assert "killed by SIGABRT" in found["b"][1]


def statuses(out):
    found = {}
    for row in on_a_gpu.rows_of(out / "results.jsonl"):
        found.setdefault(row["experiment"], set()).add(row["status"])
    return found


def test_some_experiments_by_day(tmp_path):
    """Failures on purpose, the simulated network. G2 runs in the test of a fault."""
    out = tmp_path / "out"
    done = ci_gpu(out, "--rehearse", "--only", "G3,G5")
    assert done.returncode == 0, done.stdout + done.stderr + (out / "summary.md").read_text()
    assert statuses(out) == {"G3": {PASSED}, "G5": {PASSED, MEASURED}}
    names = "log.txt machine.txt results.jsonl summary.md timeline.svg trace.json.gz"
    assert sorted(path.name for path in out.iterdir()) == names.split()


@pytest.mark.nightly
@pytest.mark.timeout(1600)
def test_all_experiments_at_night(tmp_path):
    out = tmp_path / "out"
    done = ci_gpu(out, "--rehearse")
    assert done.returncode == 0, done.stdout + done.stderr + (out / "summary.md").read_text()
    found = statuses(out)
    assert list(found) == [each.name for each in EXPERIMENTS]
    assert set().union(*found.values()) == {PASSED, MEASURED, NEEDS_A_GPU}
    assert {name for name, seen in found.items() if NEEDS_A_GPU in seen} == {"G2", "G4", "G7", "G8"}
    assert len(list(out.iterdir())) <= 8


def test_a_fault_in_a_reduction_is_named_by_the_feature(tmp_path):
    out, name = tmp_path / "out", "bucket_cap_mb"
    done = ci_gpu(out, "--rehearse", "--only", "G2", "--features", f"^{name}$", plant="planted_reductions:factor")
    assert done.returncode == 1, done.stdout + done.stderr
    found = {row["claim"]: row["status"] for row in on_a_gpu.rows_of(out / "results.jsonl")}
    ways = {"captured, aot_eager, stand-in": FAILED, "captured, aot_eager, gloo": FAILED}
    ways["eager, aot_eager, stand-in"] = PASSED
    assert found == {WHOLE: PASSED} | {f"{name}: {way}": status for way, status in ways.items()}
    assert "**FAILED**" in (out / "summary.md").read_text()
