"""Runs of the benchmark: with processes that are only played, for every order of events, and once with real ones."""

from __future__ import annotations

import contextlib
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
import torch
from torch import nn

from dp_compile.bench import beds, machine, reference, report, results, runner, worker
from dp_compile.bench.beds import Bed, Link
from dp_compile.bench.contract import Batch, Facts, Workload
from dp_compile.bench.crew import Crew, CrewError
from dp_compile.bench.progress import Progress
from dp_compile.bench.results import Results
from dp_compile.bench.selfcheck import SelfCheck, worst
from dp_compile.bench.suite import Suite
from dp_compile.cli import main as cli
from dp_compile.errors import ConfigError

ORACLE, AVERAGED, MISSING = (f"bench_standins:{name}" for name in ("oracle", "averaged", "missing"))
PROOF = SelfCheck(166.0, 80.0, 0.01, 4 * 2**20, 52.0, 0.1, 1.05, 1.04)
SUITE = Suite(
    name="played",
    workloads=("bench_standins:tiny", "bench_standins:tiny_too"),
    modes=(ORACLE, AVERAGED),
    links=(Link("loopback"),),
    reference=ORACLE,
    repetitions=3,
    warmup_steps=2,
)


@dataclass
class Stage:
    """Where processes are played: what was asked of whom, and what they answer instead of the usual."""

    calls: list[tuple[str, str]] = field(default_factory=list)
    answers: dict[tuple[str, str], Any] = field(default_factory=dict)
    others: list[float] = field(default_factory=list)
    stopped: list[str] = field(default_factory=list)

    def of(self, method: str) -> list[str]:
        return [title.removeprefix("mode bench_standins:") for title, each in self.calls if each == method]

    def answer(self, title: str, method: str) -> list[Any]:
        self.calls.append((title, method))
        value = self.answers.get((title, method)) or USUAL.get(method)
        if isinstance(value, BaseException):
            raise value
        return list(value or [None, None])


USUAL: Mapping[str, Sequence[Any]] = {
    "average_gradients": [1000],
    "self_check": [PROOF, replace(PROOF, matmul_slowdown=1.1)],
    "prepare": [1.0, 2.0],
    "gradients": [reference.Compared(5.0, 1e-6, "weight", 0.01), reference.Compared(6.0, 2e-6, "bias", 0.01)],
    "steps": [worker.Stepped(0.1, 0.1, 300), worker.Stepped(0.2, 0.1, 100)],
    "peak_nbytes": [10, 20],
    "facts": [Facts(collectives=3)],
}


class PlayedCrew:
    """In the place of `Crew`."""

    def __init__(self, stage: Stage, title: str) -> None:
        self._stage, self.title = stage, title

    def start(self) -> None:
        self._stage.answer(self.title, "start")

    def started(self, timeout_s: float) -> None: ...

    def meet(self, timeout_s: float) -> None: ...

    def ask(self, method: str, *_: Any, timeout_s: float, ranks: Any = None) -> list[Any]:
        return self._stage.answer(self.title, method)

    def stop(self) -> None:
        self._stage.stopped.append(self.title)

    def __enter__(self) -> PlayedCrew:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class PlayedWatch:
    """In the place of `Watch`."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage

    def start(self) -> PlayedWatch:
        return self

    def others(self, ranks_cpu_s: float) -> float:
        return self._stage.others.pop(0) if self._stage.others else 0.0


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    """Instead of processes and of a look at the machine."""
    played = Stage()
    monkeypatch.setattr(runner, "Crew", lambda title, bed, **_: PlayedCrew(played, title))
    monkeypatch.setattr(runner, "Watch", PlayedWatch(played))
    return played


def play(suite: Suite, path: Path, **options: Any) -> Results:
    return runner.run(suite, path, show_progress=False, **options)


ONE = replace(SUITE, workloads=SUITE.workloads[:1])


def only(found: Results, mode: str) -> results.ModeResult:
    (cell,) = found.cells
    return next(each for each in cell.modes if each.name == mode)


def test_modes_take_turns_after_all_are_warm_and_the_slowest_rank_counts(stage: Stage, tmp_path: Path) -> None:
    found = play(ONE, tmp_path / "one.json")
    assert stage.of("steps") == ["oracle", "averaged"] + ["oracle", "averaged"] * 3
    assert stage.of("gradients") == ["averaged"]  # never of a bound
    assert stage.calls.index(("mode bench_standins:averaged", "gradients")) < stage.calls.index(
        ("mode bench_standins:averaged", "steps")
    )
    mode = only(found, AVERAGED)
    assert mode == results.ModeResult(
        AVERAGED,
        False,
        results.MEASURED,
        step_s=(0.2, 0.2, 0.2),
        others=(0.0, 0.0, 0.0),
        prepare_s=2.0,
        first_backward_s=6.0,
        warmup_s=0.4,
        peak_nbytes=20,
        gradient_error=2e-6,
        gradient_of="bias",
        facts=Facts(collectives=3),
        left_nbytes=300,
        starts_s=(8.4,),
    )
    assert found.cells[0].self_check == replace(PROOF, matmul_slowdown=1.1)
    assert found == results.load(tmp_path / "one.json")
    assert not found.missing


def test_starts_are_timed_in_turns_and_one_before_them_fills_the_cache(stage: Stage, tmp_path: Path) -> None:
    takes = iter([100.0, 100.0, 1.0, 10.0, 2.0, 30.0, 3.0, 20.0])  # oracle, averaged, oracle, ...

    def prepare(_: PlayedCrew, method: str, *arguments: Any, **__: Any) -> list[Any]:
        return [next(takes)] * 2 if method == "prepare" else stage.answer(_.title, method)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PlayedCrew, "ask", prepare)
        suite = replace(ONE, starts=3, caches="warm", warmup_steps=0)
        found = play(suite, tmp_path / "one.json")
    assert stage.of("start")[2:] == ["oracle", "averaged"] * 4
    assert stage.of("steps") == ["oracle", "averaged"] * 3  # of the last start alone
    assert [only(found, mode).starts_s for mode in (ORACLE, AVERAGED)] == [(1.0, 2.0, 3.0), (16.0, 36.0, 26.0)]
    assert only(found, AVERAGED).until_warm_s == 26.0
    (ratio,) = [row["until_warm_ratio"] for row in report.rows(found) if "until_warm_ratio" in row]
    assert ratio == 26.0 / 2.0
    text = report.markdown(found)
    assert "3 starts of each mode, in turns, found in a cache what a start before left there" in text
    assert "| 26.0 s, 13.00 +-" in text


def test_a_mode_that_fails_in_a_later_start_is_not_started_again(stage: Stage, tmp_path: Path) -> None:
    starts = iter([None, CrewError("mode averaged: it fell over")])

    class Falling(PlayedCrew):
        def start(self) -> None:
            super().start()
            if self.title.endswith("averaged") and (error := next(starts)) is not None:
                raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "Crew", lambda title, bed, **_: Falling(stage, title))
        found = play(replace(ONE, starts=4, caches="cold"), tmp_path / "one.json")
    assert (only(found, AVERAGED).status, only(found, AVERAGED).reason) == ("failed", "mode averaged: it fell over")
    assert len(only(found, ORACLE).starts_s) == 4
    assert stage.of("start").count("averaged") == 2


def test_busy_turns_are_set_aside_and_repeated_up_to_a_limit(stage: Stage, tmp_path: Path) -> None:
    stage.others = [0.0, 0.3, 0.2, 0.01]
    mode = only(play(ONE, tmp_path / "one.json"), AVERAGED)
    assert (mode.others, mode.set_aside) == ((0.01, 0.0, 0.0), 2)
    stage.others = [0.5] * 1000
    mode = only(play(replace(ONE, repeat_limit=2), tmp_path / "two.json"), AVERAGED)
    assert (mode.others, mode.set_aside) == ((0.5, 0.5, 0.5), 6)


@pytest.mark.parametrize("method", ["start", "prepare", "gradients", "steps", "peak_nbytes"])
def test_a_mode_that_fails_is_recorded_and_the_others_go_on(stage: Stage, tmp_path: Path, method: str) -> None:
    stage.answers["mode bench_standins:averaged", method] = CrewError("mode averaged: rank 1 fell over")
    found = play(ONE, tmp_path / "one.json")
    assert only(found, AVERAGED).status == results.FAILED
    assert only(found, AVERAGED).reason == "mode averaged: rank 1 fell over"
    assert only(found, ORACLE).status == results.MEASURED
    assert "mode bench_standins:averaged" in stage.stopped
    assert found.failures() == ((found.cells[0], only(found, AVERAGED)),)


def test_wrong_gradients_are_not_timed(stage: Stage, tmp_path: Path) -> None:
    wrong = [reference.Compared(5.0, 1e-6, "weight", 0.01), reference.Compared(6.0, float("nan"), "bias", 0.01)]
    stage.answers["mode bench_standins:averaged", "gradients"] = wrong
    mode = only(play(ONE, tmp_path / "one.json"), AVERAGED)
    assert mode.status == results.FAILED
    assert "wrong gradients: that of bias is nan of its norm away" in mode.reason
    assert stage.of("steps") == ["oracle"] * 4


def test_a_mode_that_cannot_run_is_skipped_with_its_reason(stage: Stage, tmp_path: Path) -> None:
    mode = only(play(replace(ONE, modes=(ORACLE, MISSING)), tmp_path / "one.json"), MISSING)
    assert (mode.status, mode.reason) == (results.SKIPPED, "the package horovod is not installed")
    assert not [title for title, _ in stage.calls if "missing" in title]


def test_a_link_that_cannot_be_made_skips_its_cells_and_is_tried_again(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite = replace(ONE, links=(Link("shaped", rate_mbit=640.0), Link("loopback")))
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 1000)
        found = play(suite, tmp_path / "one.json")
    assert [cell.link for cell in found.cells if cell.measured()] == ["loopback"]
    assert found.cells[0].skipped.startswith("link 640 mbit: ")
    assert found.missing == (("bench_standins:tiny", "640 mbit", 0),)
    stage.calls.clear()
    monkeypatch.setattr(runner, "open_bed", lambda link, **_: beds._loopback(Link("loopback"), 2, None))
    assert not play(suite, tmp_path / "one.json").missing
    assert len(stage.of("self_check")) == 1  # only what was missing


def test_an_interrupted_run_goes_on_where_it_stopped(stage: Stage, tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    second = ("workload bench_standins:tiny_too", "average_gradients")
    stage.answers[second] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        play(SUITE, path)
    before = results.load(path)
    assert before.missing == (("bench_standins:tiny_too", "loopback", 0),)
    assert stage.stopped[-1] == second[0]
    del stage.answers[second]
    stage.calls.clear()
    after = play(SUITE, path)
    assert {title for title, _ in stage.calls if "workload" in title} == {second[0]}
    assert after.cells[0] == before.cells[0]
    assert not after.missing
    assert after.started == before.started
    stage.calls.clear()
    assert play(SUITE, path) == after
    assert not stage.calls


def test_what_a_killed_run_wrote_is_removed_by_the_next(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    names = ["dpbench_99999999_x", f"dpbench_{os.getpid()}_x", "dpbench_of_users"]  # no process has the first id
    for name in names:
        (tmp_path / name).mkdir()
    play(ONE, tmp_path / "one.json")
    assert sorted(path.name for path in tmp_path.glob("dpbench_*")) == sorted(names[1:])


def test_a_file_of_something_else_is_not_continued(stage: Stage, tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    found = play(ONE, path)
    with pytest.raises(
        ConfigError, match=r"other settings than this suite\. Name another --out, or start anew: --fresh"
    ):
        play(SUITE, path)
    results.save(replace(found, environment=replace(found.environment, commit="old")), path)
    with pytest.raises(ConfigError, match=r"cannot be continued: commit was 'old' and is "):
        play(ONE, path)
    assert play(ONE, path, fresh=True).cells[0].modes == found.cells[0].modes


def test_a_workload_that_fails_by_itself_is_said_once_for_all_modes(stage: Stage, tmp_path: Path) -> None:
    stage.answers["workload bench_standins:tiny", "average_gradients"] = CrewError("no such weights")
    found = play(SUITE, tmp_path / "one.json")
    assert found.cells[0].skipped == "the workload itself fails: no such weights"
    assert not found.cells[1].skipped


def test_a_link_that_does_not_prove_itself_is_asked_three_times(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.answers["self-check", "self_check"] = [replace(PROOF, matmul_slowdown=1.6)] * 2
    play(ONE, tmp_path / "one.json")
    assert len(stage.of("self_check")) == 1  # loopback cannot, so once is enough
    monkeypatch.setattr(runner, "open_bed", lambda link, **_: _unlimited())
    found = play(ONE, tmp_path / "two.json")
    assert len(stage.of("self_check")) == 4
    assert found.cells[0].self_check is not None
    assert not found.cells[0].self_check.passed


def _unlimited() -> Any:
    return contextlib.nullcontext(Bed("gloo", "127.0.0.1", ((), ())))


def test_the_rate_follows_from_compute_and_bytes(stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def opened(link: Link, *, ranks: int, rate_mbit: float | None) -> Any:
        asked.append((link.kind, rate_mbit))
        return _unlimited()

    monkeypatch.setattr(runner, "open_bed", opened)
    found = play(replace(ONE, links=(Link("shaped", comm_over_compute=0.5),)), tmp_path / "one.json")
    # 1000 bytes in half of 0.2 s.
    assert asked == [("loopback", None), ("shaped", pytest.approx(0.08))]
    assert found.cells[0].rate_mbit == pytest.approx(0.08)
    assert found.probes == (results.Probe("bench_standins:tiny", 0.2, 1000),)


def test_modes_that_do_not_fit_in_memory_are_measured_in_parts(stage: Stage, tmp_path: Path) -> None:
    suite = replace(ONE, modes=(ORACLE, AVERAGED, MISSING, "bench_standins:unaveraged"), modes_at_once=2)
    found = play(suite, tmp_path / "one.json")
    assert [[mode.name.partition(":")[2] for mode in cell.modes] for cell in found.cells] == [
        ["oracle", "averaged"],
        ["oracle", "missing"],
        ["oracle", "unaveraged"],
    ]
    assert not found.missing


# --- parts ------------------------------------------------------------------------------------------------------


def test_gradients_are_compared_by_the_norm_of_their_difference() -> None:
    expected = {"large": torch.ones(4), "noise": torch.full((4,), 1e-9)}
    name, error = reference.compare({"large": torch.ones(4) * 1.5, "noise": torch.zeros(4)}, expected)
    assert (name, error) == ("large", pytest.approx(0.5))
    name, error = reference.compare({"large": torch.ones(4), "noise": torch.zeros(4)}, expected)
    assert (name, error) == ("noise", pytest.approx(1e-5))
    name, error = reference.compare({"large": torch.ones(4) * torch.nan, "noise": torch.ones(4)}, expected)
    assert name == "large"
    assert error != error
    with pytest.raises(ValueError, match=r"missing \['noise'\], too many \['bias'\]"):
        reference.compare({"large": torch.ones(4), "bias": torch.ones(4)}, expected)


class Chaotic(nn.Module):
    """Doubles what a rounding makes of its weights, `layers` times over."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers, self.start = layers, nn.Parameter(torch.rand(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.start
        for _ in range(self.layers):
            x = 4 * x * (1 - x)
        return x


@pytest.mark.parametrize(("layers", "least", "most"), [(1, 1e-2, 1e-2), (16, 2e-2, 0.24), (40, 0.25, 0.25)])
def test_a_workload_that_amplifies_roundings_is_allowed_more_than_others(
    layers: int, least: float, most: float
) -> None:
    def batch(generator: torch.Generator) -> tuple[torch.Tensor]:
        return (torch.rand(64, generator=generator),)

    chaotic = Workload("chaotic", lambda: Chaotic(layers), batch, lambda call, batch: call(*batch).sum())
    averages = reference.averages(chaotic, 2)
    assert list(averages) == [1, 2]
    assert least <= reference.allowed_error(averages[2].rounding) <= most
    again = reference.averages(chaotic, 1)
    assert again[1].rounding == averages[1].rounding
    assert torch.equal(again[1].gradients["start"], averages[1].gradients["start"])


def test_the_worst_rank_counts_in_a_self_check() -> None:
    found = worst([replace(PROOF, waiting_cpu_share=0.5), replace(PROOF, matmul_slowdown=2.0)])
    assert (found.waiting_cpu_share, found.matmul_slowdown) == (0.5, 2.0)
    assert not found.passed
    assert PROOF.passed


def test_time_that_others_had_is_told_from_our_own() -> None:
    watch = machine.Watch.start()
    start = time.process_time()
    while time.process_time() - start < 0.05:
        pass
    # All of the machine's time that is not claimed is that of others: claim more than there can be, and none is left.
    assert watch.others(ranks_cpu_s=1e6) == 0.0
    assert machine.Watch(watch.wall_s, watch.machine_s - 1e6, watch.own_s).others(0.0) > 1.0


def test_remaining_time_is_told_by_kind() -> None:
    with Progress(show=False) as progress:
        progress.expect("preparation", 2)
        progress.expect("turn", 10)
        assert progress.left_s() is None
        now = time.monotonic()
        progress.did("preparation", now - 20)
        progress.did("turn", now - 1)
        assert progress.left_s() == pytest.approx(20 + 9, rel=0.01)
        progress.expect("preparation", -1)
        assert progress.left_s() == pytest.approx(9, rel=0.01)


# --- real processes ---------------------------------------------------------------------------------------------


def real_crew(directory: Path) -> Crew:
    bed = Bed("gloo", "127.0.0.1", ((), ()), {"GLOO_SOCKET_IFNAME": "lo"})
    path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return Crew("mode x", bed, threads=1, timeout_s=60.0, environment=path, directory=directory)


def test_whoever_is_missing_is_named(tmp_path: Path) -> None:
    with real_crew(tmp_path) as ranks:
        ranks.start()
        ranks.started(200.0)
        ranks.meet(60.0)
        assert ranks.ask("prepare", "bench_standins:tiny", "bench_standins:hangs", timeout_s=60.0)
        with pytest.raises(CrewError, match=r"mode x: rank 1 did not answer to 'steps' within 1 s; rank 0 did\."):
            ranks.ask("steps", 1, timeout_s=1.0)
        os.kill(ranks._processes[1].pid, signal.SIGKILL)
        with pytest.raises(CrewError, match=r"rank 1 failed in 'steps': the process ended \(killed by SIGKILL\)"):
            ranks.ask("steps", 1, timeout_s=60.0)
        processes = [process.pid for process in ranks._processes]
    assert not [pid for pid in processes if os.path.exists(f"/proc/{pid}")]


class Sends:
    """On a clock of its own: a step computes for 1 s and waits for what the one before sent, 3 s on the wire."""

    def __init__(self) -> None:
        self.now, self.arrives, self.steps = 0.0, 0.0, 0

    def step(self, batch: Batch) -> None:
        self.now = max(self.now + 1, self.arrives)
        self.arrives = self.now + 3
        self.steps += 1

    def left_nbytes(self) -> int:
        """100 bytes in each second."""
        return 300 * self.steps - round(100 * max(0.0, self.arrives - self.now))

    def gradients(self, batch: Batch) -> Mapping[str, torch.Tensor]:
        return {}

    def arrive(self) -> None:
        self.now = max(self.now, self.arrives)


@pytest.mark.parametrize("steps", [1, 4])
def test_what_crosses_a_step_travels_in_turns_of_its_own_mode(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """Else it would arrive in those of others: a step of 1 s, and 3 s of traffic in somebody else's."""
    trainer = Sends()
    rank = worker.Rank(worker.Place(0, 1, 1, "gloo", "", 1.0), trainer=trainer, batches=itertools.repeat(()))
    monkeypatch.setattr(time, "perf_counter", lambda: trainer.now)
    monkeypatch.setattr(worker, "_left_nbytes", trainer.left_nbytes)
    for _ in range(3):
        stepped = rank.steps(steps)
        assert (stepped.wall_s, stepped.left_nbytes) == (3, 300)
        assert trainer.arrives <= trainer.now
        trainer.now += 50  # turns of others


def write_suite(directory: Path, *modes: str) -> str:
    path = directory / "tiny.toml"
    path.write_text(
        f'workloads = ["bench_standins:tiny"]\nmodes = {json.dumps(modes)}\nlinks = [{{kind = "loopback"}}]\n'
        f'reference = "{ORACLE}"\nrepetitions = 3\nwarmup_steps = 1\n'
    )
    return str(path)


def test_the_command_says_what_failed(stage: Stage, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "run", write_suite(tmp_path, ORACLE, AVERAGED), "--out", str(tmp_path / "o.json"), "--quiet"]
    assert cli.main([*command, "--json"]) == 0
    assert [row["status"] for row in json.loads(capsys.readouterr().out)] == ["measured", "measured"]
    stage.answers["mode bench_standins:averaged", "steps"] = CrewError("rank 1 failed\n  line 3\nKeyError: 1")
    assert cli.main([*command, "--fresh"]) == 1
    printed, said = capsys.readouterr()
    assert f"failed: bench_standins:tiny over loopback, {AVERAGED}: rank 1 failed ... KeyError: 1\n" in said
    assert f"- {AVERAGED}, failed (bench_standins:tiny over loopback): rank 1 failed ... KeyError: 1\n" in printed


def test_a_real_run_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    suite, out = write_suite(tmp_path, ORACLE, AVERAGED, MISSING), tmp_path / "tiny.json"
    assert cli.main(["bench", "run", suite, "--out", str(out), "--quiet"]) == 0
    printed, said = capsys.readouterr()
    assert said == f"written to {out}\n"
    assert "the package horovod is not installed" in printed
    (cell,) = results.load(out).cells
    assert set(cell.measured()) == {ORACLE, AVERAGED}
    assert all(len(mode.step_s) == 3 and mode.peak_nbytes > 2**20 for mode in cell.measured().values())
    assert cell.self_check is not None
    assert cell.self_check.nbytes > 0
    error = cell.measured()[AVERAGED].gradient_error
    assert error is not None
    assert error < 1e-5
    assert cli.main(["bench", "compare", str(out), str(out)]) == 0


def test_help_teaches_by_example(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["bench"], ["bench", "run"], ["bench", "compare"], ["bench", "report"]):
        with pytest.raises(SystemExit) as stopped:
            cli.main([*command, "--help"])
        assert stopped.value.code == 0
        assert "\nexamples:\n  " in capsys.readouterr().out


def test_a_stopped_run_leaves_no_process(tmp_path: Path) -> None:
    suite = write_suite(tmp_path, ORACLE, "bench_standins:hangs")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "dp_compile", "bench", "run", suite]
    process = subprocess.Popen(command, env=environment, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 200
    while not list(tmp_path.glob("dpbench_*/*/rank1.log")) and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=100)
    assert process.returncode == 130
    assert "finished cells are in bench-tiny.json; the same command goes on from there" in said
    assert json.loads((tmp_path / "bench-tiny.json").read_text())["cells"] == []
    assert not list(tmp_path.glob("dpbench_*"))
    deadline = time.monotonic() + 30
    while (left := _children(tmp_path)) and time.monotonic() < deadline:  # one that has lost its parent ends by itself
        time.sleep(0.1)
    assert not left


def _children(tmp_path: Path) -> list[Path]:
    return [path for path in Path("/proc").glob("[0-9]*/environ") if f"TMPDIR={tmp_path}" in _read(path)]


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
