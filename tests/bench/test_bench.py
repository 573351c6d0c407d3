"""Runs of the benchmark: with simulated workers for the order of events, and with real ones."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from dp_compile.bench import results, runner, workers
from dp_compile.bench.contract import Batch, Trainer
from dp_compile.bench.networks import Network, Placement
from dp_compile.bench.results import ModeResult, Results
from dp_compile.bench.selfcheck import SelfCheck, measure
from dp_compile.bench.suites import Suite
from dp_compile.bench.workers import ranks_of
from dp_compile.cli import main as cli
from dp_compile.testing.ranks import RankError

TINY = "bench_standins:tiny"
ORACLE, AVERAGED = (f"bench_standins:{name}" for name in ("oracle", "averaged"))
CHECK = SelfCheck(166.0, 80.0, 1.05)
SUITE = Suite("simulated", (TINY,), (ORACLE, AVERAGED), (Network("loopback"),), ORACLE, warmup_steps=2, repetitions=3)
USUAL: Mapping[str, Sequence[Any]] = {
    "expect": [1000],
    "start": [(1.0, 1e-6, "weight"), (2.0, 2e-6, "bias")],
    "steps": [0.1, 0.2],
    "end": [(10, {"collectives": 3}), (20, {"collectives": 3})],
}


@dataclass
class Stage:
    """The simulated ranks: what modes were asked for so far, and answers that are not the usual ones."""

    calls: list[tuple[str, str]] = field(default_factory=list)
    answers: dict[tuple[str, str], Any] = field(default_factory=dict)

    def of(self, method: str) -> list[str]:
        return [mode.removeprefix("bench_standins:") for mode, each in self.calls if each == method]

    def play(self, suite: Suite, path: Path) -> Results:
        return runner.run(suite, path / "out.json")


class SimulatedRanks:
    def __init__(self, stage: Stage) -> None:
        self._stage, self._mode = stage, ""

    def run(self, function: Any, method: str = "", *arguments: Any, **_: Any) -> list[Any]:
        if function is measure:
            return [CHECK, replace(CHECK, matmul_slowdown=1.1)]
        self._mode = arguments[1] if method == "start" else self._mode
        self._stage.calls.append((self._mode, method))
        value = self._stage.answers.get((self._mode, method), USUAL.get(method))
        if isinstance(value, Exception):
            raise value
        return list(value or [])

    def stop(self) -> None: ...

    def __enter__(self) -> SimulatedRanks:
        return self

    def __exit__(self, *_: object) -> None: ...


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    made = Stage()
    monkeypatch.setattr(runner, "ranks_of", lambda *_: SimulatedRanks(made))
    return made


def only(found: Results, mode: str) -> ModeResult:
    (cell,) = found.cells
    return next(each for each in cell.modes if each.name == mode)


def test_modes_take_turns_after_all_are_warm_and_the_slowest_rank_counts(stage: Stage, tmp_path: Path) -> None:
    found = stage.play(SUITE, tmp_path)
    assert [call for call in stage.calls if call[1] in ("start", "steps")] == [
        *((each, "start") for each in SUITE.modes),
        *((each, "steps") for each in SUITE.modes * 3),
    ]
    assert only(found, AVERAGED) == ModeResult(
        AVERAGED,
        step_s=(0.2, 0.2, 0.2),
        starts_s=(2.0,),
        peak_nbytes=20,
        counts={"collectives": 3},
    )
    assert found.cells[0].self_check == replace(CHECK, matmul_slowdown=1.1)
    assert found == results.load(tmp_path / "out.json")


@pytest.mark.parametrize("method", ["start", "end"])
def test_a_mode_that_fails_is_recorded_and_the_others_go_on(stage: Stage, tmp_path: Path, method: str) -> None:
    stage.answers[AVERAGED, method] = RankError("in this order:\nrank 0: finished\nrank 1: fell over\n--- rank 0: ...")
    mode = only(found := stage.play(replace(SUITE, starts=2), tmp_path), AVERAGED)
    assert mode.reason.splitlines()[0] == "rank 1: fell over"
    assert list(found.cells[0].measured()) == [ORACLE]
    assert stage.of("start").count("averaged") == (1 if method == "start" else 2)


def test_wrong_gradients_are_not_timed(stage: Stage, tmp_path: Path) -> None:
    stage.answers[AVERAGED, "start"] = [(1.0, 1e-6, "weight"), (1.0, float("nan"), "bias")]
    mode = only(stage.play(SUITE, tmp_path), AVERAGED)
    assert "gradient of bias differs by nan of its norm" in mode.reason
    assert stage.of("steps") == ["oracle"] * 3


# --- parts ------------------------------------------------------------------------------------------------------


class Sends(Trainer):
    """With a simulated clock: a step computes for 1 s and waits for the communication of its predecessor, 3 s."""

    defers = True

    def __init__(self) -> None:
        self.now, self.arrives = 0.0, 0.0

    def step(self, batch: Batch) -> None:
        self.now = max(self.now + 1, self.arrives)
        self.arrives = self.now + 3

    def wait(self) -> None:
        self.now = max(self.now, self.arrives)


@pytest.mark.parametrize("steps", [1, 4])
def test_deferred_communication_is_in_flight_in_turns_of_its_mode(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """Otherwise it would arrive in those of others: a step of 1 s, and 3 s of traffic in the turn of another mode."""
    trainer = Sends()
    rank = workers.Rank(0, 1, trainer=trainer, batches=itertools.repeat(()))
    monkeypatch.setattr(time, "perf_counter", lambda: trainer.now)
    for _ in range(3):
        assert rank.steps(steps) == 3
        assert trainer.arrives <= trainer.now
        trainer.now += 50  # turns of others


# --- real processes ---------------------------------------------------------------------------------------------


def test_a_rank_that_is_late_is_named() -> None:
    with ranks_of(Placement("gloo", 2, {"GLOO_SOCKET_IFNAME": "lo"}), {}) as ranks:
        assert runner.ask(ranks, "start", TINY, "bench_standins:hangs", "", 0)
        with pytest.raises(RankError, match=r"rank 0: finished\nrank 1: hangs\n(.*\n)* .*in step\n"):
            runner.ask(ranks, "steps", 1, timeout_s=5.0)


def write_suite(directory: Path, *modes: str) -> str:
    path = directory / "tiny.toml"
    path.write_text(
        f'workloads = ["{TINY}"]\nmodes = {json.dumps(modes)}\nnetworks = [{{kind = "loopback"}}]\n'
        f'reference = "{ORACLE}"\nrepetitions = 3\nwarmup_steps = 1\n'
    )
    return str(path)


def test_a_real_run_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    suite, out = write_suite(tmp_path, ORACLE, AVERAGED, "bench_standins:unaveraged"), str(tmp_path / "o.json")
    assert cli.main(["bench", "run", suite, "--out", out]) == 1
    printed, log = capsys.readouterr()
    assert "failed: bench_standins:unaveraged over loopback, bench_standins:tiny: the gradient of " in log
    assert log.endswith(f"written to {out}\n")
    (cell,) = results.load(Path(out)).cells
    assert set(cell.measured()) == {ORACLE, AVERAGED}
    for mode in cell.measured().values():
        assert len(mode.step_s) == 3
        assert mode.peak_nbytes > 2**20
    assert cell.self_check is not None
    assert cell.self_check.mb_per_s > 0
    assert cli.main(["bench", "report", out]) == 0
    assert capsys.readouterr().out == printed
    assert cli.main(["bench", "compare", out, out]) == 0


def test_a_stopped_run_leaves_no_process(tmp_path: Path) -> None:
    suite = write_suite(tmp_path, ORACLE, "bench_standins:hangs")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "dp_compile", "bench", "run", suite]
    process = subprocess.Popen(command, env=environment, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 200
    while not list(tmp_path.glob("dp_compile_ranks_*/rank1.log")) and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=100)
    assert process.returncode == 130
    assert not list(tmp_path.glob("dp*_*"))
    deadline = time.monotonic() + 30
    while (left := _children(tmp_path)) and time.monotonic() < deadline:  # one that lost its parent ends by itself
        time.sleep(0.1)
    assert not left


def _children(tmp_path: Path) -> list[Path]:
    return [path for path in Path("/proc").glob("[0-9]*/environ") if f"TMPDIR={tmp_path}" in _read(path)]


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
