"""Networks and suites of the benchmark: what they may hold, errors, and that nothing of a network is left over."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dp_compile.bench import networks, suites
from dp_compile.bench.networks import Network, NetworkError, open_network
from dp_compile.bench.workloads import workload
from dp_compile.errors import ConfigError

SHAPED = Network("shaped", rate_mbit=123.0)


def spaces(pid: int) -> set[str]:
    done = subprocess.run([networks._tool("ip"), "netns", "list"], capture_output=True, text=True)
    names = {line.split()[0] for line in done.stdout.splitlines()}
    return {name for name in names if name.startswith(f"{networks._PREFIX}{pid}-")}


def can_make_networks() -> bool:
    try:
        with open_network(SHAPED, ranks=2):
            return True
    except NetworkError:
        return False


needs_rights = pytest.mark.skipif(not can_make_networks(), reason="cannot make network namespaces here")


def test_without_iproute2_or_rights_the_error_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(networks, "_SYSTEM_PATH", "/nowhere")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NetworkError, match="ip and tc not found: install iproute2"), open_network(SHAPED, ranks=2):
        pass


@needs_rights
def test_ranks_reach_each_other_through_the_limited_network() -> None:
    with open_network(SHAPED, ranks=2) as place:
        assert len(spaces(os.getpid())) == 2
        inside = [[networks._tool("ip"), "netns", "exec", space] for space in place.spaces]
        for prefix in inside:
            command = [*prefix, networks._tool("tc"), "qdisc", "show", "dev", "eth0"]
            limit = subprocess.run(command, capture_output=True, text=True).stdout
            assert "tbf" in limit
            assert "rate 123Mbit" in limit
        reached = "import socket, sys; socket.create_connection((sys.argv[1], 9), timeout=5)"
        # No process listens: a refusal, and no time-out, shows that the other end is there.
        command = [*inside[1], sys.executable, "-c", reached, networks.ADDRESSES[0]]
        assert "ConnectionRefusedError" in subprocess.run(command, capture_output=True, text=True).stderr
    assert not spaces(os.getpid())


# --- suites -----------------------------------------------------------------------------------------------------

GOOD = """\
workloads = ["bench_standins:tiny"]
modes = ["bench_standins:oracle", "bench_standins:averaged"]
networks = [{kind = "loopback"}, {kind = "shaped", comm_over_compute = 1}]
reference = "bench_standins:oracle"
repetitions = 4
"""


def write(directory: Path, text: str) -> str:
    (directory / "mine.toml").write_text(text)
    return str(directory / "mine.toml")


def test_a_file_becomes_values_and_user_code_is_found_in_its_directory(tmp_path: Path) -> None:
    (tmp_path / "own_bench_models.py").write_text("from bench_standins import tiny as mine\n")
    found = suites.load(write(tmp_path, GOOD.replace("bench_standins:tiny", "own_bench_models:mine")))
    assert found == suites.Suite(
        name="mine",
        workloads=("own_bench_models:mine",),
        modes=("bench_standins:oracle", "bench_standins:averaged"),
        networks=(Network("loopback"), Network("shaped", comm_over_compute=1)),
        reference="bench_standins:oracle",
        repetitions=4,
    )
    assert workload("own_bench_models:mine").name == "tiny"


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ("repetitions = 4", "repetition = 3", r"mine\.toml: .*unexpected keyword argument 'repetition'"),
        ("repetitions = 4", "repetitions = true", r"repetitions must be an integer >= 3, got True"),
        ('"bench_standins:tiny"', '"no-such"', r"mine\.toml: a workload must be one of gpt-6l, .*, got 'no-such'"),
        (
            'kind = "loopback"',
            'kind = "loopback", rate_mbit = 5',
            "what kind 'loopback' has must be nothing else",
        ),
    ],
)
def test_a_wrong_value_is_named(tmp_path: Path, old: str, new: str, error: str) -> None:
    assert old in GOOD
    with pytest.raises(ConfigError, match=error):
        suites.load(write(tmp_path, GOOD.replace(old, new)))
    assert [suites.load(name).name for name in suites.PACKAGED] == list(suites.PACKAGED)
