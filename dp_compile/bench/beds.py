"""Where the ranks of a benchmark meet: loopback, or a network on this machine whose rate is limited.

On loopback the network is a copy by the same cores that compute, so hiding it gains nothing. Behind a token bucket
the waiting costs no processor time, and overlap is worth what it is worth between machines. Rank r runs in a network
namespace of its own; two are joined by a veth pair, more by a bridge in one further namespace. What leaves a rank is
limited by tc-tbf(8).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Final

from dp_compile.cost_model import check_number
from dp_compile.errors import ConfigError, DPCompileError

BURST_KIB: Final = 128
"""Holds one packet of 64 KiB that the sender's kernel has not segmented; a smaller bucket makes tbf do it."""

_QUEUE_MIB: Final = 8
_MTU: Final = 65535  # the largest: fewer packets, less processor time for the same bytes
_PREFIX: Final = "dpbench"
_SYSTEM_PATH: Final = "/usr/local/sbin:/usr/sbin:/sbin"  # where `ip` and `tc` are, and often not on a user's PATH


class NoBedError(DPCompileError):
    """This link cannot be made on this machine. The text says why."""


@dataclass(frozen=True, slots=True)
class Link:
    """What a suite asks for.

    Args:
        kind: `loopback`, or `shaped`.
        rate_mbit: 1e6 bits per second that leave a rank.
        comm_over_compute: choose the rate so that all gradients in one all-reduce take this many times as long as the
            workload's compiled forward and backward.

    Raises:
        ConfigError: an unknown kind; a rate for loopback; not exactly one of the two for a shaped link.
    """

    kind: str
    rate_mbit: float | None = None
    comm_over_compute: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in _BEDS:
            raise ConfigError(f"kind must be one of {', '.join(_BEDS)}, got {self.kind!r}.")
        given = [name for name in ("rate_mbit", "comm_over_compute") if getattr(self, name) is not None]
        for name in given:
            check_number(name, getattr(self, name), zero_allowed=False)
        if self.kind == "loopback" and given:
            raise ConfigError(f"{given[0]} is for kind = 'shaped'; loopback is as fast as it is.")
        if self.kind == "shaped" and len(given) != 1:
            both = "both are" if given else "neither is"
            raise ConfigError(f"a shaped link needs rate_mbit or comm_over_compute, one of them; {both} given.")

    @property
    def name(self) -> str:
        if self.rate_mbit is not None:
            return f"{self.rate_mbit:g} mbit"
        if self.comm_over_compute is not None:
            return f"comm/compute {self.comm_over_compute:g}"
        return self.kind


def rate_for(comm_over_compute: float, *, compute_s: float, gradient_nbytes: int, ranks: int) -> float:
    """The rate in mbit at which one all-reduce of all gradients takes `comm_over_compute * compute_s`.

    Each rank sends 2 (n-1)/n of the bytes (Patarasuk and Yuan, JPDC 2009). Latency is not in it: the self-check
    measures what came out.
    """
    sent_nbytes = 2 * (ranks - 1) / ranks * gradient_nbytes
    return 8e-6 * sent_nbytes / (comm_over_compute * compute_s)


@dataclass(frozen=True, slots=True)
class Bed:
    """How to start the ranks of one cell.

    A bed that needs a process group of its own kind names its `backend` and, in `imports`, the module whose import
    registers it; the ranks import it first.

    Args:
        backend: for `init_process_group`.
        host: rank 0's address as the others see it.
        prefixes: by rank, what comes before the command of its process.
        environment: for every rank.
        imports: modules that a rank imports before it makes its process group.
        asynchronous: whether waiting is meant to leave the processors alone. Loopback cannot.
    """

    backend: str
    host: str
    prefixes: tuple[tuple[str, ...], ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    imports: tuple[str, ...] = ()
    asynchronous: bool = True


@contextmanager
def _loopback(ranks: int, rate_mbit: float | None) -> Iterator[Bed]:
    yield Bed("gloo", "127.0.0.1", ((),) * ranks, {"GLOO_SOCKET_IFNAME": "lo"}, asynchronous=False)


@contextmanager
def _shaped(ranks: int, rate_mbit: float | None) -> Iterator[Bed]:
    assert rate_mbit is not None
    if ranks < 2:
        raise NoBedError("a network needs at least 2 ranks.")
    _check_tools()
    remove_stale()
    with ExitStack() as stack:
        spaces = [_add_space(stack, str(rank)) for rank in range(ranks)]
        if ranks == 2:
            _run(
                "ip",
                "link",
                "add",
                "eth0",
                "netns",
                spaces[0],
                "type",
                "veth",
                "peer",
                "name",
                "eth0",
                "netns",
                spaces[1],
            )
        else:
            _join_by_bridge(_add_space(stack, "bridge"), spaces)
        for rank, space in enumerate(spaces):
            _settle(space, _address(rank), rate_mbit)
        prefixes = tuple((_tool("ip"), "netns", "exec", space) for space in spaces)
        yield Bed("gloo", _address(0), prefixes, {"GLOO_SOCKET_IFNAME": "eth0"})


_BEDS: Final[Mapping[str, Callable[[int, float | None], AbstractContextManager[Bed]]]] = {
    "loopback": _loopback,
    "shaped": _shaped,
}
KINDS: Final = tuple(_BEDS)


def open_bed(kind: str, *, ranks: int, rate_mbit: float | None) -> AbstractContextManager[Bed]:
    """Make a link, and take it down again at the end of the `with`.

    Raises:
        NoBedError: on entering, if this machine, or this user's rights on it, cannot make it.
    """
    return _BEDS[kind](ranks, rate_mbit)


def remove_stale() -> None:
    """Delete the network namespaces of runs that were killed."""
    for line in _run("ip", "netns", "list").splitlines():
        name = line.split()[0]
        match = re.fullmatch(rf"{_PREFIX}(\d+)-\w+", name)
        if match and not os.path.exists(f"/proc/{match[1]}"):
            _run("ip", "netns", "del", name)


def _check_tools() -> None:
    missing = [tool for tool in ("ip", "tc") if _tool(tool) == ""]
    if missing:
        raise NoBedError(f"{' and '.join(missing)} not found: install iproute2.")
    if os.geteuid() != 0:
        raise NoBedError("making network namespaces needs root: run the benchmark as root, for instance with sudo.")


def _tool(name: str) -> str:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:{_SYSTEM_PATH}") or ""


def _run(tool: str, *arguments: str) -> str:
    done = subprocess.run([_tool(tool), *arguments], capture_output=True, text=True, timeout=30)
    if done.returncode != 0:
        reason = done.stderr.strip() or f"exit status {done.returncode}"
        raise NoBedError(f"`{tool} {' '.join(arguments)}` failed: {reason}")
    return done.stdout


def _add_space(stack: ExitStack, suffix: str) -> str:
    name = f"{_PREFIX}{os.getpid()}-{suffix}"
    _run("ip", "netns", "add", name)
    stack.callback(_run, "ip", "netns", "del", name)
    return name


def _join_by_bridge(bridge: str, spaces: list[str]) -> None:
    _run("ip", "-n", bridge, "link", "add", "br0", "type", "bridge")
    for rank, space in enumerate(spaces):
        port = f"port{rank}"
        _run("ip", "link", "add", "eth0", "netns", space, "type", "veth", "peer", "name", port, "netns", bridge)
        _run("ip", "-n", bridge, "link", "set", port, "master", "br0", "mtu", str(_MTU), "up")
    _run("ip", "-n", bridge, "link", "set", "br0", "mtu", str(_MTU), "up")


def _address(rank: int) -> str:
    return f"10.77.{rank // 250}.{rank % 250 + 1}"


def _settle(space: str, address: str, rate_mbit: float) -> None:
    settings = {
        # bbr paces itself with timers, and cubic is refused inside a namespace.
        "net/ipv4/tcp_congestion_control": "reno",
        "net/ipv4/tcp_slow_start_after_idle": "0",
        "net/ipv6/conf/all/disable_ipv6": "1",
    }
    for name, value in settings.items():
        _run("ip", "netns", "exec", space, "sh", "-c", f"test ! -e /proc/sys/{name} || echo {value} > /proc/sys/{name}")
    _run("ip", "-n", space, "link", "set", "lo", "up")
    _run("ip", "-n", space, "addr", "add", f"{address}/16", "dev", "eth0")
    _run("ip", "-n", space, "link", "set", "eth0", "mtu", str(_MTU), "up")
    shape = ("rate", f"{round(rate_mbit * 1e6)}bit", "burst", f"{BURST_KIB}k", "limit", f"{_QUEUE_MIB}m")
    _run("tc", "-n", space, "qdisc", "replace", "dev", "eth0", "root", "tbf", *shape)
