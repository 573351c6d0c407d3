"""The runner of `.ci/gpu`: what it says without a GPU, what it does with processes that die or hang, its table."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import on_a_gpu
import pytest
import torch
from on_a_gpu import (
    FAILED,
    NEEDS_A_GPU,
    OUT_OF_TIME,
    PASSED,
    PLANNED,
    WHOLE,
    Experiment,
    Machine,
    Process,
    Run,
)

ROOT = Path(__file__).parents[2]
ONE_CARD = Machine(gpus=1, nccl=(2, 28, 9), rehearse=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing where there is no GPU")
def test_without_a_gpu_nothing_is_run(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "tests/gpu/on_a_gpu.py"), "first", "--out", str(tmp_path / "results")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300, check=False)
    assert done.returncode == 1
    assert "missing: torch" in done.stderr or "missing: no GPU" in done.stderr
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize(
    ("seen", "text"),
    [
        ({"torch": "2.10.1", "cuda": "13.0", "gpus": 1, "nccl": [2, 28, 9]}, "too old: 2.11 or newer"),
        ({"torch": "2.11.0+cu130", "cuda": "13.0", "gpus": 0, "nccl": [0, 0, 0]}, "no GPU that torch can use"),
    ],
)
def test_what_is_missing(seen: dict[str, Any], text: str) -> None:
    assert any(text in each for each in on_a_gpu.missing(seen, rehearse=False))


def test_ranks_share_a_card_by_what_their_nccl_has() -> None:
    """Below 2.30.3 each is a host of its own; from there on NCCL has a variable. With two cards nothing is needed."""
    before = [on_a_gpu.nccl_settings(ONE_CARD, rank) for rank in range(2)]
    assert [each.pop("NCCL_HOSTID") for each in before] == ["rank-0", "rank-1"]
    assert before[0] == before[1]
    assert (before[0]["NCCL_NET"], before[0]["NCCL_SOCKET_IFNAME"]) == ("Socket", "lo")
    since = on_a_gpu.nccl_settings(Machine(1, (2, 30, 7), rehearse=False), 0)
    assert (since["NCCL_MULTI_RANK_GPU_ENABLE"], since["NCCL_NVLS_ENABLE"]) == ("1", "0")
    assert "NCCL_HOSTID" not in since
    assert on_a_gpu.nccl_settings(Machine(2, (2, 28, 9), rehearse=False), 0) == {}


@pytest.mark.parametrize("gpus", [1, 2, 8])
@pytest.mark.parametrize("rehearse", [False, True])
def test_every_experiment_starts_somewhere(gpus: int, rehearse: bool) -> None:
    """Roles and ranks name a process; parts fit their budget."""
    machine = Machine(0 if rehearse else gpus, (2, 28, 9), rehearse)
    for experiment in on_a_gpu.EXPERIMENTS:
        processes = experiment.processes(machine)
        assert len({(each.role, each.rank, each.wave) for each in processes}) == len(processes) > 0
    ranks = {each.ranks for each in on_a_gpu.EXPERIMENTS[0].processes(machine)}
    assert ranks == {1 if rehearse else gpus}
    for part in ("first", "second"):
        limits = [each.limit_s for each in on_a_gpu.EXPERIMENTS if each.part == part]
        assert sum(limits) - min(limits) < on_a_gpu.PART_S


def run_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> Run:
    """One whose processes run this text; `task` is theirs."""
    head = "import json, os, sys, time\nfrom on_a_gpu import *\ntask = Task(**json.loads(sys.argv[1]))\n"
    (tmp_path / "experiments.py").write_text(head + script)
    monkeypatch.setattr(on_a_gpu, "HERE", tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    run = Run(tmp_path, Machine(0, (0, 0, 0), rehearse=False), "cpu")
    run.end_s = time.monotonic() + 60
    return run


def rows(run: Run) -> dict[str, tuple[str, str]]:
    return {row["claim"]: (row["status"], row["detail"]) for row in on_a_gpu.rows_of(run.out / "results.jsonl")}


def experiment(limit_s: float, *roles: str) -> Experiment:
    return Experiment("X", "title", "first", limit_s, lambda _: [Process(each) for each in roles])


def test_a_process_that_dies_fails_what_it_had_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = "task.planned('a', 'b')\ntask.record('a', True, '1 ms')\nsys.exit('what went wrong')\n"
    run = run_of(tmp_path, monkeypatch, script)
    run.run(experiment(30, "one"))
    found = rows(run)
    assert found["a"] == (PASSED, "")
    assert found["b"] == found[WHOLE] == (FAILED, "one.0 ended with 1: what went wrong")
    assert "what went wrong" in (tmp_path / "log.txt").read_text()


def test_one_that_hangs_is_killed_and_its_numbers_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what it has started, too."""
    script = "import subprocess\nchild = subprocess.Popen(['sleep', '300'])\ntask.planned('a', 'b')\n"
    script += "task.record('a', True)\ntask.publish('../child', child.pid)\ntime.sleep(300)\n"
    run = run_of(tmp_path, monkeypatch, script)
    monkeypatch.setattr(on_a_gpu.tempfile, "tempdir", str(tmp_path))
    run.run(experiment(12, "one"))
    assert {claim: status for claim, (status, _) in rows(run).items()} == {
        "a": PASSED,
        "b": OUT_OF_TIME,
        WHOLE: OUT_OF_TIME,
    }
    child = Path("/proc", (tmp_path / "child").read_text(), "stat")
    assert not child.exists() or child.read_text().split()[2] == "Z"


def test_what_killed_a_process_has_failed_and_the_rest_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = "if not task.again:\n    task.planned('a', 'b', 'c')\n"
    script += "for claim in ('b', 'c')[: 1 + task.again][task.again :]:\n    task.publish('now.one.0', claim)\n"
    script += "    os.abort() if claim == 'b' else task.record(claim, True)\ntask.record('a', NEEDS_A_GPU)\n"
    run = run_of(tmp_path, monkeypatch, script)
    run.run(experiment(40, "one"))
    found = {claim: status for claim, (status, _) in rows(run).items()}
    assert found == {"a": NEEDS_A_GPU, "b": FAILED, "c": PASSED, WHOLE: FAILED}
    assert "killed by SIGABRT" in rows(run)["b"][1]


def test_the_worst_rank_counts_and_a_second_run_replaces(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"

    def line(status: str, claim: str = "c") -> None:
        on_a_gpu.append(
            results, {"experiment": "G1", "claim": claim, "status": status, "figure": "1 | 2", "detail": "d"}
        )

    for status in (PLANNED, PASSED, FAILED, PASSED):
        line(status)
    results.write_text(results.read_text() + '{"experiment": "G1", "cla')  # killed while it wrote
    (row,) = on_a_gpu.rows_of(results)
    assert row["status"] == FAILED
    table = on_a_gpu.summary([row], "head")
    assert "| **G1** | **one rank: our step, plain compile, DDP, compiled DDP** | | |" in table
    assert "|  | c | **FAILED** | 1 / 2 |" in table
    assert "- G1, c: d" in table
    results.write_text(results.read_text() + "\n")
    line("begun", "title")
    line(PASSED)
    assert [row["status"] for row in on_a_gpu.rows_of(results)] == [PASSED]
