"""`.ci/gpu`: rehearsals of its experiments on this CPU."""

import os
import subprocess
import sys
from pathlib import Path

import on_a_gpu
import pytest
import torch
from experiments import PLANT
from on_a_gpu import EXPERIMENTS, FAILED, MEASURED, NEEDS_A_GPU, PASSED, WHOLE, Machine

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


def statuses(out):
    found = {}
    for row in on_a_gpu.rows_of(out / "results.jsonl"):
        found.setdefault(row["experiment"], set()).add(row["status"])
    return found


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


@pytest.mark.nightly
def test_a_fault_in_a_reduction_is_named_by_the_feature(tmp_path):
    out, name = tmp_path / "out", "bucket_cap_mb"
    done = ci_gpu(out, "--rehearse", "--only", "G2", "--features", f"^{name}$", plant="planted_reductions:factor")
    assert done.returncode == 1, done.stdout + done.stderr
    found = {row["claim"]: row["status"] for row in on_a_gpu.rows_of(out / "results.jsonl")}
    ways = {"captured, aot_eager, stand-in": FAILED, "captured, aot_eager, gloo": FAILED}
    ways["eager, aot_eager, stand-in"] = PASSED
    assert found == {WHOLE: PASSED} | {f"{name}: {way}": status for way, status in ways.items()}
    assert "**FAILED**" in (out / "summary.md").read_text()
