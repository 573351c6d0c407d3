"""The runner of `.ci/gpu`: what it says without a GPU, what it does with processes that die or hang, its table."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import on_a_gpu
import pytest
import torch
from on_a_gpu import FAILED, NEEDS_A_GPU, OUT_OF_TIME, PASSED, PLANNED, WHOLE, Experiment, Machine, Process, Run

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing where there is no GPU")
def test_without_a_gpu_nothing_is_run(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "tests/gpu/on_a_gpu.py"), "first", "--out", str(tmp_path / "results")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300, check=False)
    assert done.returncode == 1
    assert "missing: torch" in done.stderr or "missing: no GPU" in done.stderr
    assert not (tmp_path / "results").exists()
    for seen, text in (
        ({"torch": "2.10.1", "cuda": "13.0", "gpus": 1, "nccl": [2, 28, 9]}, "too old: 2.11 or newer"),
        ({"torch": "2.11.0+cu130", "cuda": "13.0", "gpus": 0, "nccl": [0, 0, 0]}, "no GPU that torch can use"),
    ):
        assert any(text in each for each in on_a_gpu.missing(seen, rehearse=False))


def test_ranks_share_a_card_by_what_their_nccl_has() -> None:
    """Below 2.30.3 each has another host id; from there on NCCL has a variable. With two cards nothing is needed."""
    before = [on_a_gpu.nccl_settings(Machine(1, (2, 28, 9), rehearse=False), rank) for rank in range(2)]
    assert [each.pop("NCCL_HOSTID") for each in before] == ["rank-0", "rank-1"]
    assert before[0] == before[1]
    assert (before[0]["NCCL_NET"], before[0]["NCCL_SOCKET_IFNAME"]) == ("Socket", "lo")
    since = on_a_gpu.nccl_settings(Machine(1, (2, 30, 7), rehearse=False), 0)
    assert (since["NCCL_MULTI_RANK_GPU_ENABLE"], since["NCCL_NVLS_ENABLE"]) == ("1", "0")
    assert "NCCL_HOSTID" not in since
    assert on_a_gpu.nccl_settings(Machine(2, (2, 28, 9), rehearse=False), 0) == {}


@pytest.mark.parametrize(("gpus", "rehearse"), [(1, False), (8, False), (0, True)])
def test_every_experiment_starts_somewhere(gpus: int, rehearse: bool) -> None:
    """Roles and ranks name a process; parts fit their budget."""
    machine = Machine(gpus, (2, 28, 9), rehearse)
    for experiment in on_a_gpu.EXPERIMENTS:
        processes = experiment.processes(machine)
        assert len({(each.role, each.rank, each.wave) for each in processes}) == len(processes) > 0
    assert {each.ranks for each in on_a_gpu.EXPERIMENTS[0].processes(machine)} == {gpus or 1}
    for part in ("first", "second"):
        limits = [each.limit_s for each in on_a_gpu.EXPERIMENTS if each.part == part]
        assert sum(limits) - min(limits) < on_a_gpu.PART_S


Ran = Callable[[str, float], dict[str, tuple[str, str]]]


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ran:
    """Run an experiment whose one process runs this text (`task` is its task) within so many seconds."""
    monkeypatch.setattr(on_a_gpu, "HERE", tmp_path)
    monkeypatch.setattr(on_a_gpu.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))

    def run(script: str, limit_s: float) -> dict[str, tuple[str, str]]:
        head = (
            "import json, os, subprocess, sys, time\nfrom on_a_gpu import *\ntask = Task(**json.loads(sys.argv[1]))\n"
        )
        (tmp_path / "experiments.py").write_text(head + script)
        made = Run(tmp_path, Machine(0, (0, 0, 0), rehearse=False), "cpu", time.monotonic() + 60)
        made.run(Experiment("X", "title", "first", limit_s, lambda _: [Process("one")]))
        return {row["claim"]: (row["status"], row["detail"]) for row in on_a_gpu.rows_of(made.results)}

    return run


def test_a_process_that_dies_fails_what_it_had_planned(ran: Ran, tmp_path: Path) -> None:
    found = ran("task.planned('a', 'b')\ntask.record('a', True, '1 ms')\nsys.exit('what went wrong')\n", 30)
    assert found["a"] == (PASSED, "")
    assert found["b"] == found[WHOLE] == (FAILED, "one.0 ended with 1: what went wrong")
    assert "what went wrong" in (tmp_path / "log.txt").read_text()


def test_one_that_hangs_is_killed_and_its_numbers_stay(ran: Ran, tmp_path: Path) -> None:
    """And what it has started, too."""
    script = "child = subprocess.Popen(['sleep', '300'])\ntask.planned('a', 'b')\ntask.record('a', True)\n"
    found = ran(f"{script}task.publish('../child', child.pid)\ntime.sleep(300)\n", 12)
    assert {claim: status for claim, (status, _) in found.items()} == {
        "a": PASSED,
        "b": OUT_OF_TIME,
        WHOLE: OUT_OF_TIME,
    }
    child = Path("/proc", (tmp_path / "child").read_text(), "stat")
    assert not child.exists() or child.read_text().split()[2] == "Z"


def test_what_killed_a_process_has_failed_and_the_rest_is_run(ran: Ran) -> None:
    script = "if not task.again:\n    task.planned('a', 'b', 'c')\n"
    script += "for claim in ('b', 'c')[: 1 + task.again][task.again :]:\n    task.publish('now.one.0', claim)\n"
    script += "    os.abort() if claim == 'b' else task.record(claim, True)\ntask.record('a', NEEDS_A_GPU)\n"
    found = ran(script, 40)
    expected = {"a": NEEDS_A_GPU, "b": FAILED, "c": PASSED, WHOLE: FAILED}
    assert {claim: status for claim, (status, _) in found.items()} == expected
    assert "killed by SIGABRT" in found["b"][1]


def test_the_worst_rank_counts_and_a_second_run_replaces(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"

    def write(*statuses: str) -> None:
        on_a_gpu.append(results, *(on_a_gpu.line("G1", "c", status, "1 | 2", "d") for status in statuses))

    write(PLANNED, PASSED, FAILED, PASSED)
    results.write_text(results.read_text() + '{"experiment": "G1", "cla')  # killed while it wrote
    (row,) = on_a_gpu.rows_of(results)
    assert row["status"] == FAILED
    table = on_a_gpu.summary([row], "head")
    assert "| **G1** | **one rank: our step, plain compile, DDP, compiled DDP** | | |" in table
    assert "|  | c | **FAILED** | 1 / 2 |" in table
    assert "- G1, c: d" in table
    results.write_text(results.read_text() + "\n")
    write("begun", PASSED)
    assert [row["status"] for row in on_a_gpu.rows_of(results)] == [PASSED]
