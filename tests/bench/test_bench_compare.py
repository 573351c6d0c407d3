"""Results of the benchmark: files, the table, and what counts as a regression. All times are made up."""

from __future__ import annotations

import json
import math
import os
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from expecttest import assert_expected_inline

from dp_compile.bench import compare, picture, ratios, report, results
from dp_compile.bench.beds import Link
from dp_compile.bench.bound import rho
from dp_compile.bench.contract import Facts
from dp_compile.bench.machine import Environment, environment
from dp_compile.bench.results import Cell, ModeResult, Probe, Results
from dp_compile.bench.selfcheck import SelfCheck
from dp_compile.bench.suite import Suite
from dp_compile.cli import main as cli
from dp_compile.errors import ConfigError

HERE = Environment("Some CPU", 2, 24, "none", "Linux 6", "3.11.7", "2.13.0", "abc123")
PROOF = SelfCheck(166.0, 80.0, 0.01, 4 * 2**20, 52.0, 0.1, 1.05, 1.04)
SUITE = Suite(
    name="made-up",
    workloads=("gpt", "resnet"),
    modes=("oracle", "ddp", "ours", "comm"),
    links=(Link("loopback"), Link("shaped", rate_mbit=640.0)),
)
FACTORS = {"oracle": 1.0, "ddp": 1.15, "ours": 1.015, "comm": 0.5}


def run_of(seed: int, factors: dict[str, float] = FACTORS, *, noise: float = 0.02, machine: float = 1.0) -> Results:
    """A run whose steps have a noise of their own, after a slowness that all modes of a turn share."""
    random = np.random.default_rng(seed)
    cells = []
    for workload, link, heat in Results(SUITE, HERE, "2026-11-21T10:00:00+00:00").keys():
        shared = machine * 0.4 * (1 + 0.1 * random.random(15))
        modes = tuple(
            ModeResult(
                name,
                name in ("oracle", "comm"),
                results.MEASURED,
                step_s=tuple(float(x) for x in shared * factor * np.exp(noise * random.standard_normal(15))),
                others=(0.01,) * 15,
                prepare_s=1.0,
                first_backward_s=8.0,
                warmup_s=1.5,
                peak_nbytes=400 * 2**20,
                gradient_error=1e-6,
                gradient_of="weight",
            )
            for name, factor in factors.items()
        )
        cells.append(
            Cell(workload, link, heat, self_check=PROOF, date="2026-11-21T11:00:00+00:00", modes=modes, load=0.1)
        )
    return Results(SUITE, HERE, "2026-11-21T10:00:00+00:00", (Probe("gpt", 0.33, 50 * 2**20),), tuple(cells))


def write(directory: Path, name: str, found: Results) -> str:
    path = directory / name
    results.save(found, path)
    return str(path)


# --- regressions ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_a_tenth_slower_is_found(seed: int) -> None:
    slower = run_of(seed + 100, FACTORS | {"ours": 1.1 * FACTORS["ours"]})
    found = compare.compare(run_of(seed), slower)
    assert len(found.regressions) >= 3  # of 4 cells: 15 steps with a noise of 2% do not show it always
    assert {each.mode for each in found.regressions} == {"ours"}


@pytest.mark.parametrize("seed", range(6))
def test_five_reruns_of_the_same_code_pass(seed: int) -> None:
    baseline = run_of(1000 * seed)
    for rerun in range(1, 6):
        assert not compare.compare(baseline, run_of(1000 * seed + rerun)).regressions


def test_a_slower_machine_is_no_regression_and_a_bound_is_not_compared() -> None:
    found = compare.compare(run_of(1), run_of(2, FACTORS | {"comm": 0.9}, machine=1.5))
    assert not found.regressions
    assert {change.mode for change in found.changes} == {"ddp", "ours"}


def test_more_noise_hides_what_less_noise_shows() -> None:
    slower = FACTORS | {"ours": 1.08 * FACTORS["ours"]}
    assert compare.compare(run_of(1, noise=0.01), run_of(2, slower, noise=0.01)).regressions
    assert not compare.compare(run_of(1, noise=0.2), run_of(2, slower, noise=0.2)).regressions
    lost_in_noise = compare.compare(run_of(1, noise=1.0), run_of(2, slower, noise=1.0))
    assert {change.verdict for change in lost_in_noise.changes} == {"unclear"}
    assert "too noisy to tell" in compare.text(lost_in_noise)


def test_below_the_tolerance_nothing_is_a_regression() -> None:
    slower = run_of(2, FACTORS | {"ours": 1.02 * FACTORS["ours"]}, noise=0.0001)
    assert not compare.compare(run_of(1, noise=0.0001), slower).regressions
    assert len(compare.compare(run_of(1, noise=0.0001), slower, tolerance=0.01).regressions) == 4


def test_faster_is_said() -> None:
    found = compare.compare(run_of(1), run_of(2, FACTORS | {"ddp": 1.0}))
    assert {change.verdict for change in found.changes if change.mode == "ddp"} == {"faster"}


def test_a_mode_that_fails_now_is_a_regression() -> None:
    new = run_of(2)
    broken = tuple(
        replace(mode, status=results.FAILED, reason="mode ours: rank 1 died", step_s=(), others=())
        if mode.name == "ours"
        else mode
        for mode in new.cells[0].modes
    )
    found = compare.compare(run_of(1), replace(new, cells=(replace(new.cells[0], modes=broken), *new.cells[1:])))
    assert [(each.mode, each.verdict, each.reason) for each in found.regressions] == [
        ("ours", "lost", "mode ours: rank 1 died")
    ]
    assert "lost: gpt, loopback, ours: mode ours: rank 1 died" in compare.text(found)


def counted(found: Results, **counts: int) -> Results:
    """The same run whose `ours` says how often it did something."""
    cells = []
    for cell in found.cells:
        modes = [
            replace(mode, facts=Facts(**counts, ready=((0.5, 8), (1.0, 8)))) if mode.name == "ours" else mode
            for mode in cell.modes
        ]
        cells.append(replace(cell, modes=tuple(modes)))
    return replace(found, cells=tuple(cells))


@pytest.mark.parametrize("what", ["collectives", "reduced_nbytes", "copied_nbytes", "captures"])
def test_one_more_of_anything_is_a_regression(what: str) -> None:
    """Times tell nothing here: the runs are the same but for what they count."""
    before = counted(run_of(1), collectives=4, reduced_nbytes=1000, copied_nbytes=0, captures=1)
    counts = {"collectives": 4, "reduced_nbytes": 1000, "copied_nbytes": 0, "captures": 1}
    after = counted(run_of(1), **(counts | {what: counts[what] + 1}))
    found = compare.compare(before, after)
    assert [(each.what, each.verdict) for each in found.counts] == [(what, "more")] * 4
    assert len(found.regressions) == 4
    assert f"more: gpt, loopback, ours: {what} {counts[what]:,} -> {counts[what] + 1:,}" in compare.text(found)
    assert not compare.compare(after, before).regressions
    assert "fewer: " in compare.text(compare.compare(after, before))


def test_counts_that_one_run_does_not_know_are_not_compared() -> None:
    assert not compare.compare(counted(run_of(1), collectives=4), counted(run_of(1), copied_nbytes=9)).counts


def test_other_references() -> None:
    found = compare.compare(run_of(1), run_of(2), reference="ddp")
    assert found.reference == "ddp"
    assert {change.mode for change in found.changes} == {"ours"}
    with pytest.raises(ConfigError, match=r"nothing in common|no workload, link and mode in common .* 'horovod'"):
        compare.compare(run_of(1), run_of(2), reference="horovod")


def test_another_machine_is_refused_unless_forced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here = write(tmp_path, "here.json", run_of(1))
    there = write(tmp_path, "there.json", replace(run_of(2), environment=replace(HERE, cpu="Other CPU", torch="2.12")))
    assert cli.main(["bench", "compare", there, here]) == 2
    assert "from another machine: cpu 'Other CPU' and 'Some CPU'. Make a baseline here" in capsys.readouterr().err
    assert cli.main(["bench", "compare", there, here, "--force"]) == 0
    out = capsys.readouterr().out
    assert "note: another machine, compared all the same" in out
    assert "note: torch was 2.12 and is 2.13.0" in out


def test_what_malloc_was_told_is_a_part_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """With memory that is kept a step was seen to take a tenth less."""
    for name in [name for name in os.environ if name.startswith(("MALLOC_", "GLIBC_", "LD_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("LD_PRELOAD", "libsomething.so")
    plain = environment()
    assert plain.malloc == ""
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "-1")
    monkeypatch.setenv("LD_PRELOAD", "libjemalloc.so.2")
    told = environment()
    assert told.malloc == "LD_PRELOAD=libjemalloc.so.2 MALLOC_TRIM_THRESHOLD_=-1"
    assert str(told).endswith(told.malloc)
    with pytest.raises(ConfigError, match="another machine: malloc '' and 'LD_PRELOAD"):
        compare.compare(replace(run_of(1), environment=plain), replace(run_of(2), environment=told))


def test_a_link_that_is_another_now_is_said() -> None:
    old, new = (
        replace(found, cells=tuple(replace(cell, rate_mbit=rate) for cell in found.cells))
        for found, rate in ((run_of(1), 640.0), (run_of(2), 500.0))
    )
    failed = replace(new.cells[3], self_check=replace(PROOF, matmul_slowdown=1.6))
    notes = compare.compare(old, replace(new, cells=(*new.cells[:3], failed))).notes
    assert "gpt over loopback: the rate was 640 mbit and is 500; rate_mbit in the suite keeps it" in notes
    assert "resnet over 640 mbit: the link did not pass its self-check in the new run" in notes
    assert len(notes) == 5
    assert not compare.compare(old, old).notes


def test_other_settings_are_refused() -> None:
    other = replace(run_of(2), suite=replace(SUITE, threads=2))
    with pytest.raises(ConfigError, match="threads was 1 and is 2"):
        compare.compare(run_of(1), other)


def test_exit_status_and_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = write(tmp_path, "before.json", run_of(1))
    after = write(tmp_path, "after.json", run_of(2, FACTORS | {"ours": 1.2}))
    assert cli.main(["bench", "compare", before, before]) == 0
    assert "no regressions in 8 comparisons of step / oracle" in capsys.readouterr().out
    assert cli.main(["bench", "compare", before, after]) == 1
    assert "4 regressions in 8 comparisons" in capsys.readouterr().out
    assert cli.main(["bench", "compare", before, after, "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert data["regressions"] == 4
    assert data["changes"][0]["verdict"] == "slower"


def test_the_error_of_a_ratio_is_that_of_drawing_again() -> None:
    random = np.random.default_rng(0)
    spread = [
        math.log(
            np.median(np.exp(0.02 * random.standard_normal(15))) / np.median(np.exp(0.02 * random.standard_normal(15)))
        )
        for _ in range(400)
    ]
    times = np.exp(0.02 * random.standard_normal((2, 15)))
    found = ratios.ratio(list(times[0]), list(times[1]))
    # One sample of 15 tells the true spread of the ratio within a factor of two.
    assert 0.5 < found.log_error / np.std(spread) < 2


# --- the computed bound -----------------------------------------------------------------------------------------


def bounded(*, heats: bool = False) -> Results:
    """A step of 100 ms without communication, 60 of them backward; 4 MB ready half way, 4 MB at its end; ours: 160.

    The link takes 166 us and 50 ms for 4 MB: 0.166 + 100 ms from the middle of the backward on, which is 30 ms in. So
    the backward takes 130.166 ms at least, 70.166 more than it computes, and the step 170.166.
    """

    def timed(name: str, step_s: float, facts: Facts) -> ModeResult:
        is_bound = name != "ours"
        return ModeResult(name, is_bound, results.MEASURED, step_s=(step_s,) * 3, others=(0.0,) * 3, facts=facts)

    oracle = timed("oracle", 0.15, Facts())
    compute = timed("compute", 0.1, Facts(backward_s=0.06))
    ours = timed("ours", 0.18, Facts(ready=((0.5, 4_000_000), (1.0, 4_000_000))))
    suite = replace(SUITE, workloads=("gpt",), modes=("oracle", "compute", "ours"), links=(Link("loopback"),))
    parts = ((oracle, compute), (oracle, ours)) if heats else ((oracle, compute, ours),)
    cells = (
        Cell("gpt", "loopback", heat, self_check=PROOF, date="2026-11-21", modes=part)
        for heat, part in enumerate(parts)
    )
    return Results(suite, HERE, "2026-11-21T10:00:00+00:00", cells=tuple(cells))


@pytest.mark.parametrize("heats", [False, True])
def test_rho(heats: bool) -> None:
    """PROOF says 80 MB/s: 50 ms for 4 MB."""
    found = bounded(heats=heats)
    assert rho(found, found.cells[-1], "ours") == pytest.approx(0.18 / 0.170166)
    assert rho(found, found.cells[0], "compute") is None
    assert rho(found, found.cells[0], "horovod") is None
    assert "| step / computed bound | loopback |" in report.markdown(found)
    assert "1.058" in report.markdown(found)
    (row,) = [row for row in report.rows(found) if row["mode"] == "ours"]
    assert row["rho"] == pytest.approx(0.18 / 0.170166)


def test_what_compute_does_not_hide() -> None:
    """Steps of 100, 150 and 180 ms."""
    found = bounded()
    assert "step - compute" not in report.markdown(found)
    found = replace(found, suite=replace(found.suite, reference="compute"))
    text = report.markdown(found)
    title, _, *lines = text[text.index("| step - compute") :].splitlines()
    assert title.split() == "| step - compute (over that of oracle) | loopback |".split()
    assert [line.split() for line in lines[:2]] == [
        "| oracle | 50 ms (1.00) |".split(),
        "| ours | 80 ms (1.60) |".split(),
    ]
    alone = replace(found, suite=replace(found.suite, ranks=1))
    assert "step - compute" not in report.markdown(alone)


def test_what_leaves_a_node() -> None:
    found = bounded()
    assert "leave a node" not in report.markdown(found)
    (cell,) = found.cells
    sizes = {"oracle": 2 * 2**20, "compute": 100, "ours": 2**20}
    modes = tuple(replace(mode, left_nbytes=sizes[mode.name]) for mode in cell.modes)
    text = report.markdown(replace(found, cells=(replace(cell, modes=modes),)))
    title, _, *lines = text[text.index("| bytes that leave") :].splitlines()
    assert title.split() == "| bytes that leave a node in a step (over those of oracle) | loopback |".split()
    assert [line.split() for line in lines[:3]] == [
        "| oracle | 2.0 MiB (1.00) |".split(), "| ours | 1.0 MiB (0.50) |".split(), [],
    ]  # fmt: skip


def test_no_rho_without_compute_or_proof() -> None:
    found = bounded()
    cell = found.cells[0]
    assert rho(found, replace(cell, self_check=None), "ours") is None
    alone = replace(found, cells=(replace(cell, modes=(cell.modes[0], cell.modes[2])),))
    assert rho(alone, alone.cells[0], "ours") is None
    assert "computed bound" not in report.markdown(alone)


# --- files ------------------------------------------------------------------------------------------------------


def test_a_file_comes_back_as_it_was(tmp_path: Path) -> None:
    before = run_of(3)
    assert results.load(Path(write(tmp_path, "one.json", before))) == before
    explained = counted(before, collectives=3, captures=1)
    assert results.load(Path(write(tmp_path, "two.json", explained))) == explained
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.json", "two.json"]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "is not JSON: .*It should be what `dp-compile bench run` wrote"),
        ("[1]", "is of version None, readable is 2"),
        ('{"version": 1}', "is of version 1, readable is 2. Run the benchmark again"),
        ('{"version": 2}', r"is not a result of dp-compile bench: KeyError\('suite'\)"),
        ('{"version": 2, "suite": []}', "is not a result of dp-compile bench"),
    ],
)
def test_a_bad_file_is_refused(tmp_path: Path, text: str, error: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    assert cli.main(["bench", "report", str(path)]) == 2
    assert re.search(error, capsys.readouterr().err)


def test_a_file_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "report", str(tmp_path / "gone.json")]) == 2
    assert "gone.json cannot be read" in capsys.readouterr().err


def test_times_without_proof_of_the_link_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run_of(1)
    unproved = replace(found, cells=(*found.cells[:-1], replace(found.cells[-1], self_check=None)))
    path = write(tmp_path, "unproved.json", unproved)
    assert cli.main(["bench", "report", path]) == 2
    assert "resnet over 640 mbit has times but no self-check of the link" in capsys.readouterr().err
    assert cli.main(["bench", "compare", path, path]) == 2


def test_a_run_that_has_only_begun_has_nothing_to_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "report", write(tmp_path, "begun.json", replace(run_of(1), cells=()))]) == 2
    assert "holds no cell yet" in capsys.readouterr().err


# --- report -----------------------------------------------------------------------------------------------------


def shown() -> Results:
    """Three cells: two measured, one that was skipped; a mode that failed, one that is not installed."""
    found = run_of(4)
    first, second, third, _ = found.cells
    missing = ModeResult("horovod", False, results.SKIPPED, "the package horovod is not installed")
    failed = ModeResult(
        "thunder", False, results.FAILED, "mode thunder: rank 0 failed: Traceback\n  line 3\nKeyError: 'x'"
    )
    first = replace(first, modes=(*first.modes, missing, failed), self_check=replace(PROOF, matmul_slowdown=1.4))
    second = replace(second, modes=(*second.modes, missing), rate_mbit=640.0)
    third = replace(third, modes=(), self_check=None, skipped="link loopback: no sockets")
    return replace(found, cells=(first, second, third))


def test_the_table() -> None:
    assert_expected_inline(
        report.markdown(shown()),
        """\
# Benchmark `made-up`

2026-11-21 10:00 to 2026-11-21 11:00 UTC, commit abc123. Some CPU, 2 cores, 24 GiB, torch 2.13.0, Python
3.11.7.
2 ranks of 1 thread, 15 turns a mode, modes in turns, slowest rank.
Not finished or skipped: 2 of 4 cells.

Figures are median step / median step of `oracle` in the same run, +- 1.96 standard errors; of `oracle` itself
the median in ms with its quartiles. *Italic*: a bound, nothing trains there. !: gradients wrong, or failed,
see below.

## gpt

50.0 MiB of gradients, compute 330 ms.

| mode     | loopback         | 640 mbit         | until warm | peak memory |
|----------|------------------|------------------|------------|-------------|
| *oracle* | 420 ms (410-434) | 422 ms (408-426) | 10.5 s     | 400.0 MiB   |
| ddp      | 1.166 +-0.028    | 1.143 +-0.029    | 10.5 s     | 400.0 MiB   |
| ours     | 1.035 +-0.026    | 1.025 +-0.028    | 10.5 s     | 400.0 MiB   |
| *comm*   | 0.504 +-0.014    | 0.489 +-0.013    | 10.5 s     | 400.0 MiB   |
| thunder  | !                |                  |            |             |

## resnet

Not measured, see below.

## What the links proved before they were used

| workload | link     | rate     | alpha  | MB/s | all-reduce         | waiting costs | matmul beside it | proof  |
|----------|----------|----------|--------|------|--------------------|---------------|------------------|--------|
| gpt      | loopback | -        | 166 us | 80   | 4.0 MiB in 52.0 ms | 10% of a core | 1.40x as slow    | FAILED |
| gpt      | 640 mbit | 640 mbit | 166 us | 80   | 4.0 MiB in 52.0 ms | 10% of a core | 1.05x as slow    | passed |

Passed: a rank that waits for an all-reduce costs <= 15% of a core, and a matmul beside it takes <= 1.15x as
long. Where that failed (as on loopback) communication is a copy by the cores that compute: hiding it gains
little, and ratios say what a mode costs, not what it hides.

## Not measured

- horovod, skipped (gpt over loopback, gpt over 640 mbit): the package horovod is not installed
- thunder, failed (gpt over loopback): mode thunder: rank 0 failed: Traceback ... KeyError: 'x'
- all modes, skipped (resnet over loopback): link loopback: no sockets

0 turns were set aside and repeated because other processes had more than 5% of the machine; 0 of the 120 that
count are no quieter.
""",
    )


def test_a_played_link_says_what_was_stated() -> None:
    found = shown()
    played = replace(PROOF, stated_alpha_us=170.0, stated_mb_per_s=81.0)
    link = Link("fabric", ranks=64, latency_us=10, rate_mbit=8000)
    text = report.markdown(
        replace(
            found,
            suite=replace(SUITE, links=(link,)),
            cells=(replace(found.cells[0], link=link.name, self_check=played),),
        )
    )
    assert "2 ranks (one process on a played link) of 1 thread" in text
    assert "fabric 64 x 10 us, 8000 mbit is played: stated 170 us and 81 MB/s" in text


def test_rows_are_the_same_figures() -> None:
    rows = report.rows(shown())
    (ours,) = [row for row in rows if (row["workload"], row["link"], row["mode"]) == ("gpt", "640 mbit", "ours")]
    assert f"{ours['ratio']:.3f} +-{ours['plus_minus']:.3f}" in report.markdown(shown())
    assert ours["until_warm_s"] == 10.5
    (horovod, _) = [row for row in rows if row["mode"] == "horovod"]
    assert horovod["status"] == "skipped"
    assert "ratio" not in horovod


def test_the_picture_has_every_ratio_in_its_place() -> None:
    text = picture.svg(shown())
    root = ElementTree.fromstring(text)
    width = float(root.attrib["width"])
    space = "{http://www.w3.org/2000/svg}"
    dots = root.findall(f"{space}circle")
    assert len(dots) == 2 * 3
    assert all(0 < float(dot.attrib["cx"]) < width for dot in dots)
    labels = [label.text for label in root.iter(f"{space}text")]
    assert labels.count("ours") == 2
    assert "gpt, 640 mbit" in labels
    by_value = sorted(
        ((float(dot.attrib["cx"]), ratio.value) for dot, ratio in zip(dots, _drawn(), strict=True)),
    )
    assert [value for _, value in by_value] == sorted(value for _, value in by_value)


def _drawn() -> list[ratios.Ratio]:
    """Ratios in the order in which they are drawn."""
    return [
        value
        for cell in shown().cells
        for value in sorted(ratios.ratios(cell, "oracle").values(), key=lambda ratio: ratio.value)
    ]


def test_report_writes_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, "one.json", shown())
    out, drawing = tmp_path / "table.md", tmp_path / "table.svg"
    assert cli.main(["bench", "report", path, "--out", str(out), "--picture", str(drawing)]) == 0
    assert out.read_text() == report.markdown(shown())
    assert drawing.read_text() == picture.svg(shown())
    assert capsys.readouterr().out == ""
    assert cli.main(["bench", "report", path, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == report.rows(shown())


@pytest.mark.parametrize(
    ("value", "text"), [(0.1234, "0.123 ms"), (1.234, "1.23 ms"), (12.34, "12.3 ms"), (1234.5, "1234 ms")]
)
def test_milliseconds_have_three_digits(value: float, text: str) -> None:
    assert report.milliseconds(value) == text
