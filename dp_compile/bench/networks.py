"""Networks between the ranks of a benchmark: loopback, shaped (rate-limited), and simulated.

On loopback the cores that compute also copy the data, so overlap gains nothing. On a shaped network waiting costs no
CPU time, as between machines: two ranks run in network namespaces connected by a veth pair, and tc-tbf(8) limits their
send rate. On a simulated network one process acts as one of many ranks (`simulated_group`).
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from typing import Final, NamedTuple

from dp_compile.bench import simulated_group
from dp_compile.config import LINK_VARIABLE
from dp_compile.errors import DPCompileError, require, require_integer
from dp_compile.plan.backends import FABRIC
from dp_compile.plan.cost import AllReduceCost, check_number

ADDRESSES: Final = ("10.77.0.1", "10.77.0.2")
_KEYS: Final[Mapping[str, tuple[str, ...]]] = {  # the allowed lists of keys, by kind
    "loopback": ("",),
    "shaped": ("rate_mbit", "comm_over_compute"),
    "simulated": ("rate_mbit, ranks, latency_us",),
}
_LAUNCH_S: Final = 8.4e-6  # of a collective with any number of hops: NCCL's tuning table, protocol `Simple`
_BURST_KIB: Final = 128  # room for one unsegmented packet of 64 KiB; tbf segments larger packets
_QUEUE_MIB: Final = 8
_MTU: Final = 65535  # the maximum: fewer packets need less CPU time
_PREFIX: Final = "dpbench"
_SYSTEM_PATH: Final = "/usr/local/sbin:/usr/sbin:/sbin"  # has `ip` and `tc`, but is often not on a user's PATH
_NEW_LINK: Final = {LINK_VARIABLE: "measured"}  # no cached cost: each rate is another link
_SETTINGS: Final = {
    # Not bbr, which paces with timers. A namespace does not allow cubic.
    "ipv4/tcp_congestion_control": "reno",
    "ipv4/tcp_slow_start_after_idle": "0",
    "ipv6/conf/all/disable_ipv6": "1",
}


class NetworkError(DPCompileError):
    """A network cannot be created on this machine. The text of the error has the reason."""


@dataclass(frozen=True, slots=True)
class Network:
    """A network as specified by a suite.

    `rate_mbit`: send rate of a rank in 1e6 bits per second. `comm_over_compute`: in place of `rate_mbit`, the time of
    one all-reduce of all gradients, without latency, divided by the time of the workload's compiled step without
    communication (mode `compute`). `ranks`: size of a simulated group. `latency_us`: latency of a hop of its ring.
    """

    kind: str
    rate_mbit: float | None = None
    comm_over_compute: float | None = None
    ranks: int | None = None
    latency_us: float | None = None

    def __post_init__(self) -> None:
        require(self.kind in _KEYS, "kind", f"one of {', '.join(_KEYS)}", self.kind)
        given = [each.name for each in fields(self)[1:] if getattr(self, each.name) is not None]
        keys, allowed = ", ".join(given), _KEYS[self.kind]
        require(keys in allowed, f"options of kind {self.kind!r}", " or ".join(allowed) or "none", keys)
        for name in given:
            check_number(name, getattr(self, name), zero_allowed=False)
        if self.ranks is not None:
            require_integer("ranks", self.ranks, 2)

    @property
    def name(self) -> str:
        if self.kind == "loopback":
            return self.kind
        rate = f"comm/compute {self.comm_over_compute:g}" if self.rate_mbit is None else f"{self.rate_mbit:g} mbit"
        return rate if self.kind == "shaped" else f"simulated {self.ranks} x {self.latency_us:g} us, {rate}"

    @property
    def cost(self) -> AllReduceCost:
        """The cost of a ring all-reduce over the simulated group, in which each rank sends 2 (n-1)/n of the bytes."""
        ranks, latency_us, rate_mbit = self.ranks or 0, self.latency_us or 0.0, self.rate_mbit or 0.0
        hops = 2 * (ranks - 1)
        return AllReduceCost(_LAUNCH_S + hops * latency_us * 1e-6, hops / ranks * 8e-6 / rate_mbit)


class Placement(NamedTuple):
    """How to start the ranks of one cell (a workload over a network)."""

    backend: str
    processes: int
    environment: Mapping[str, str]
    spaces: tuple[str, ...] = ()  # network namespace of each process, or empty
    group_ranks: int | None = None  # size of the process group if it is simulated


@contextmanager
def open_network(network: Network, *, ranks: int, rate_mbit: float | None = None) -> Iterator[Placement]:
    """Create a network, and remove it on exit. `rate_mbit`: replaces `network.rate_mbit`. Raises `NetworkError`."""
    if network.kind == "loopback":
        yield Placement("gloo", ranks, {"GLOO_SOCKET_IFNAME": "lo", **_NEW_LINK})
        return
    if network.kind == "simulated":
        # The barrier of `init_process_group` would wait for simulated ranks in the store.
        environment = {**simulated_group.environment(network.cost), "TORCH_DIST_INIT_BARRIER": "0"}
        yield Placement(FABRIC.name, 1, environment, group_ranks=network.ranks)
        return
    rate_mbit = rate_mbit or network.rate_mbit
    assert rate_mbit is not None
    missing = [tool for tool in ("ip", "tc") if _tool(tool) == ""]
    obstacles = {
        f"a shaped network joins 2 ranks, not {ranks}.": ranks != len(ADDRESSES),
        f"{' and '.join(missing)} not found: install iproute2.": missing,
        "creating network namespaces needs root: run the benchmark as root, for instance with sudo.": os.geteuid(),
    }
    for reason, applies in obstacles.items():
        if applies:
            raise NetworkError(reason)
    for line in _run("ip netns list").splitlines():  # remove namespaces of killed runs
        match = re.fullmatch(rf"{_PREFIX}(\d+)-\w+", line.split()[0])
        if match and not os.path.exists(f"/proc/{match[1]}"):
            _run(f"ip netns del {match[0]}")
    with ExitStack() as stack:
        spaces = [f"{_PREFIX}{os.getpid()}-{rank}" for rank in range(ranks)]
        for space in spaces:
            _run(f"ip netns add {space}")
            stack.callback(_run, f"ip netns del {space}")
        _run(f"ip link add eth0 netns {spaces[0]} type veth peer name eth0 netns {spaces[1]}")
        for space, address in zip(spaces, ADDRESSES, strict=True):
            for name, value in _SETTINGS.items():
                shell = f"test ! -e /proc/sys/net/{name} || echo {value} > /proc/sys/net/{name}"
                _run(f"ip netns exec {space} sh -c", shell)
            _run(f"ip -n {space} link set lo up")
            _run(f"ip -n {space} addr add {address}/16 dev eth0")
            _run(f"ip -n {space} link set eth0 mtu {_MTU} up")
            shape = f"rate {round(rate_mbit * 1e6)}bit burst {_BURST_KIB}k limit {_QUEUE_MIB}m"
            _run(f"tc -n {space} qdisc replace dev eth0 root tbf {shape}")
        yield Placement("gloo", ranks, {"GLOO_SOCKET_IFNAME": "eth0", **_NEW_LINK}, tuple(spaces))


def enter(space: str) -> None:
    """Move this thread and its later child threads into a network namespace (`CLONE_NEWNET`)."""
    with open(f"/run/netns/{space}") as file:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(file.fileno(), 0x40000000) != 0:
            raise NetworkError(f"network namespace {space} cannot be entered: {os.strerror(ctypes.get_errno())}.")


def _tool(name: str) -> str:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:{_SYSTEM_PATH}") or ""


def _run(command: str, *last: str) -> str:
    tool, *arguments = command.split()
    done = subprocess.run([_tool(tool), *arguments, *last], capture_output=True, text=True, timeout=30)
    if done.returncode != 0:
        raise NetworkError(f"`{command}` failed: {done.stderr.strip() or f'exit status {done.returncode}'}")
    return done.stdout
