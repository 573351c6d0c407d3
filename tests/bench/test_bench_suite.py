"""Suite files of `dp-compile bench`: what they may say, and what is said to those that are wrong."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from dp_compile.bench import catalogue, suite
from dp_compile.bench.beds import Link, rate_for
from dp_compile.errors import ConfigError

GOOD = """\
workloads = ["bench_standins:tiny"]
modes = ["bench_standins:oracle", "bench_standins:averaged"]
links = [{kind = "loopback"}, {kind = "shaped", comm_over_compute = 1}]
reference = "bench_standins:oracle"
repetitions = 4
"""


def write(directory: Path, text: str, name: str = "mine.toml") -> str:
    path = directory / name
    path.write_text(text)
    return str(path)


def test_a_file_becomes_values(tmp_path: Path) -> None:
    found = suite.load(write(tmp_path, GOOD))
    assert found == suite.Suite(
        name="mine",
        workloads=("bench_standins:tiny",),
        modes=("bench_standins:oracle", "bench_standins:averaged"),
        links=(Link("loopback"), Link("shaped", comm_over_compute=1)),
        reference="bench_standins:oracle",
        repetitions=4,
    )
    assert [link.name for link in found.links] == ["loopback", "comm/compute 1"]


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("repetition = 3", r"mine\.toml: unknown key 'repetition'\. Allowed: name, workloads, .*repetitions"),
        ("threads = 0", r"mine\.toml: threads must be >= 1, got 0"),
        ("threads = 1.5", r"threads must be an int, got 1\.5"),
        ("warmup_steps = true", r"warmup_steps must be an int, got True"),
        ("turn_timeout_s = 'long'", r"turn_timeout_s must be a float, got 'long'"),
        ("repetitions = = 3", r"mine\.toml: not TOML: .*line 1"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        suite.load(write(tmp_path, f"{line}\n{GOOD.replace('repetitions = 4', '')}"))


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ('"bench_standins:tiny"', '"no-such"', r"mine\.toml: unknown workload 'no-such'\. Built in: .*Your own: "),
        ('"bench_standins:tiny"', '"nowhere:tiny"', r"workload 'nowhere:tiny' cannot be made: ModuleNotFoundError"),
        ('"bench_standins:tiny"', '"bench_standins:nothing"', r"returned a object without name, build, batch"),
        ('"bench_standins:tiny"', "3", r"workloads must be a list of names, got \[3\]"),
        ('["bench_standins:tiny"]', "[]", r"workloads is empty"),
        ('reference = "bench_standins:oracle"', "", r"reference must be one of the modes .*got none, .*oracle or ddp"),
        ('reference = "bench_standins:oracle"', 'reference = "ddp"', r"must be one of the modes .*got 'ddp'"),
        (':averaged"]', ':oracle"]', r"modes names bench_standins:oracle more than once"),
        (
            'kind = "loopback"',
            'kind = "wifi"',
            r"links\[0\]: kind must be one of loopback, shaped, fabric, nccl-1, got 'wifi'",
        ),
        ('kind = "loopback"', 'kind = "loopback", rate_mbit = 5', r"links\[0\]: rate_mbit is for kind = 'shaped'"),
        ("comm_over_compute = 1", "rate_mbit = 1, ranks_inside = 0", r"ranks_inside .* must be an integer >= 1, got 0"),
        (
            'kind = "loopback"',
            'kind = "loopback", ranks_inside = 2',
            r"links\[0\]: ranks_inside is for kind = 'shaped'",
        ),
        ("comm_over_compute = 1", "rate = 1", r"unknown key 'links\[1\]\.rate'\. Allowed: kind, rate_mbit"),
        (", comm_over_compute = 1", "", r"needs rate_mbit or comm_over_compute, one of them; neither is given"),
        ("comm_over_compute = 1", "comm_over_compute = -1", r"comm_over_compute must be > 0, got -1"),
        ("comm_over_compute = 1", "comm_over_compute = 1, rate_mbit = 9", r"one of them; both are given"),
        ('links = [{kind = "loopback"}, {kind = "shaped", comm_over_compute = 1}]', "", r"the key 'links' is missing"),
    ],
)
def test_a_wrong_value_is_named(tmp_path: Path, old: str, new: str, error: str) -> None:
    assert old in GOOD
    with pytest.raises(ConfigError, match=error):
        suite.load(write(tmp_path, GOOD.replace(old, new)))


def test_own_code_lies_beside_the_file(tmp_path: Path) -> None:
    (tmp_path / "own_bench_models.py").write_text("from bench_standins import tiny as mine\n")
    found = suite.load(write(tmp_path, GOOD.replace("bench_standins:tiny", "own_bench_models:mine")))
    assert catalogue.workload(found.workloads[0]).name == "tiny"


def test_a_suite_that_is_not_there(tmp_path: Path) -> None:
    packaged = ", ".join(suite.packaged())
    with pytest.raises(ConfigError, match=rf"no suite 'shrt'\. Packaged: {packaged}; or the path of a TOML file"):
        suite.load("shrt")
    with pytest.raises(ConfigError, match="no suite"):
        suite.load(str(tmp_path / "gone.toml"))


@pytest.mark.parametrize("name", suite.packaged())
def test_packaged_suites(name: str) -> None:
    data = tomllib.loads((suite.PACKAGED / f"{name}.toml").read_text())
    assert suite.load(name) == suite.from_dict({"name": name} | data)


def test_the_suites_that_are_named_in_texts_are_there() -> None:
    named = set("short smoke full models wire nodes decentralized one-rank cold warm everything".split())
    assert named <= set(suite.packaged())


def test_modes_that_do_not_fit_at_once_each_meet_the_reference() -> None:
    modes = ("a", "b", "oracle", "c")
    one = suite.Suite(name="x", workloads=("w",), modes=modes, links=(Link("loopback"),))
    assert one.heats() == (("oracle", "a", "b", "c"),)
    three = suite.Suite(name="x", workloads=("w",), modes=modes, links=(Link("loopback"),), modes_at_once=3)
    assert three.heats() == (("oracle", "a", "b"), ("oracle", "c"))
    alone = suite.Suite(name="x", workloads=("w",), modes=("ddp",), links=(Link("loopback"),))
    assert alone.reference == "ddp"
    assert alone.heats() == (("ddp",),)


def test_the_rate_that_makes_communication_take_its_share() -> None:
    # 80 MB/s are 640 mbit: two ranks send as many bytes as the gradients have, four half as many again.
    assert rate_for(0.5, compute_s=1.0, gradient_nbytes=40_000_000, ranks=2) == pytest.approx(640.0)
    assert rate_for(0.5, compute_s=1.0, gradient_nbytes=40_000_000, ranks=4) == pytest.approx(960.0)
