"""Links of the benchmark: what is said where they cannot be made, and that nothing of them stays behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dp_compile.bench import beds

SHAPED = beds.Link("shaped", rate_mbit=100.0)


def spaces() -> set[str]:
    done = subprocess.run([beds._tool("ip"), "netns", "list"], capture_output=True, text=True)
    return {line.split()[0] for line in done.stdout.splitlines() if line.startswith(beds._PREFIX)}


def can_make_networks() -> bool:
    try:
        with beds.open_bed(SHAPED, ranks=2, rate_mbit=100.0):
            return True
    except beds.NoBedError:
        return False


needs_rights = pytest.mark.skipif(not can_make_networks(), reason="cannot make network namespaces here")


def test_without_iproute2_the_reason_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beds, "_SYSTEM_PATH", "/nowhere")
    monkeypatch.setenv("PATH", "/nowhere")
    with (
        pytest.raises(beds.NoBedError, match="ip and tc not found: install iproute2"),
        beds.open_bed(SHAPED, ranks=2, rate_mbit=100.0),
    ):
        raise AssertionError("there is no bed")


def test_without_rights_the_reason_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for tool in ("ip", "tc"):
        (tmp_path / tool).write_text("#!/bin/sh\n")
        (tmp_path / tool).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with (
        pytest.raises(beds.NoBedError, match=r"needs root: run the benchmark as root"),
        beds.open_bed(SHAPED, ranks=2, rate_mbit=100.0),
    ):
        raise AssertionError("there is no bed")


def test_what_fails_half_way_is_taken_down_and_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    log = tmp_path / "log"
    (tmp_path / "ip").write_text(
        f'#!/bin/sh\necho "$@" >> {log}\n[ "$1" != link ] || {{ echo "no veth here" >&2; exit 2; }}\n'
    )
    (tmp_path / "tc").write_text("#!/bin/sh\n")
    for tool in ("ip", "tc"):
        (tmp_path / tool).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with (
        pytest.raises(beds.NoBedError, match=r"`ip link add eth0 .*` failed: no veth here"),
        beds.open_bed(SHAPED, ranks=2, rate_mbit=100.0),
    ):
        raise AssertionError("there is no bed")
    calls = log.read_text().splitlines()
    added = {call.split()[-1] for call in calls if call.startswith("netns add")}
    deleted = {call.split()[-1] for call in calls if call.startswith("netns del")}
    assert added == deleted == {f"{beds._PREFIX}{os.getpid()}-{rank}" for rank in (0, 1)}


@needs_rights
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_reach_each_other_through_the_limited_link(ranks: int) -> None:
    with beds.open_bed(SHAPED, ranks=ranks, rate_mbit=123.0) as bed:
        mine = spaces()
        for prefix in bed.prefixes:
            limit = subprocess.run(
                [*prefix, beds._tool("tc"), "qdisc", "show", "dev", "eth0"], capture_output=True, text=True
            )
            assert "tbf" in limit.stdout
            assert "rate 123Mbit" in limit.stdout
        assert len({prefix[-1] for prefix in bed.prefixes} & mine) == ranks
        reached = "import socket, sys; socket.create_connection((sys.argv[1], 9), timeout=5)"
        for prefix in bed.prefixes[1:]:
            # Nobody listens: that this is said, and not waited for, shows that the other end is there.
            tried = subprocess.run([*prefix, sys.executable, "-c", reached, bed.host], capture_output=True, text=True)
            assert "ConnectionRefusedError" in tried.stderr
    assert not {name for name in spaces() if str(os.getpid()) in name}


@needs_rights
def test_only_what_leaves_a_node_passes_the_limited_link() -> None:
    link = beds.Link("shaped", rate_mbit=123.0, ranks_inside=2)
    assert link.name == "123 mbit between nodes of 2"
    send = (
        "import socket, sys\n"
        "there = socket.create_server((sys.argv[1], 0))\n"
        "socket.create_connection(there.getsockname()).sendall(bytes(1 << 16))\n"
        "from dp_compile.bench.worker import _left_nbytes\n"
        "print(_left_nbytes())\n"
    )
    leave = (
        "import socket, sys, time\n"
        "from dp_compile.bench.worker import _left_nbytes\n"
        "before = _left_nbytes()\n"
        "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(bytes(1 << 13), (sys.argv[1], 9))\n"
        "time.sleep(0.2)\n"  # it waits for the other end's hardware address
        "print(_left_nbytes() - before)\n"
    )
    with beds.open_bed(link, ranks=4, rate_mbit=123.0) as bed:
        nodes = [prefix[-1] for prefix in bed.prefixes]
        assert nodes == [nodes[0], nodes[0], nodes[2], nodes[2]]
        assert nodes[0] != nodes[2]
        command = [*bed.prefixes[1], sys.executable, "-c", send, bed.host]
        environment = os.environ | bed.environment
        inside = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
        assert int(inside.stdout) < 1 << 14, inside.stderr
        command = [*bed.prefixes[2], sys.executable, "-c", leave, bed.host]
        left = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
        assert 1 << 13 < int(left.stdout) < 1 << 14, left.stderr
    with pytest.raises(beds.NoBedError, match="3 ranks do not fill two nodes or more with 2 each"):
        with beds.open_bed(link, ranks=3, rate_mbit=123.0):
            raise AssertionError("there is no bed")


@needs_rights
def test_networks_of_a_killed_run_are_removed_by_the_next() -> None:
    program = (
        "import os, signal\nfrom dp_compile.bench import beds\nlink = beds.Link('shaped', rate_mbit=100.0)\n"
        "with beds.open_bed(link, ranks=2, rate_mbit=100.0):\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    killed = subprocess.Popen([sys.executable, "-c", program], env=environment)
    killed.wait(timeout=120)
    left = {name for name in spaces() if str(killed.pid) in name}
    assert len(left) == 2
    beds.remove_stale()
    assert not left & spaces()
