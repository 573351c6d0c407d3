"""Where the ranks of a benchmark meet: loopback, a network whose rate is limited, or one that is only played.

On loopback the network is a copy by the same cores that compute, so hiding it gains nothing. Behind a token bucket
the waiting costs no processor time, and overlap is worth what it is worth between machines. Each node runs in a network
namespace of its own; two are joined by a veth pair, more by a bridge in one further namespace. What leaves a node is
limited by tc-tbf(8). A node is one rank, or several in a row: what those send each other is copied in memory.

A fabric stands for a group that no single machine has: one process, to which `dp_compile.bench.fabric` plays the
others.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, fields
from typing import Final

import torch
import torch.distributed as dist

from dp_compile.bench import fabric
from dp_compile.errors import ConfigError, DPCompileError
from dp_compile.plan import links
from dp_compile.plan.backends import FABRIC
from dp_compile.plan.cost import RING, TREE, AllReduceCost, Formula, check_number

BURST_KIB: Final = 128
"""Holds one packet of 64 KiB that the sender's kernel has not segmented; a smaller bucket makes tbf do it."""

INTERFACE: Final = "DP_COMPILE_BENCH_INTERFACE"
"""The environment variable that tells a rank through which interface everything goes that leaves its node."""

_QUEUE_MIB: Final = 8
_MTU: Final = 65535  # the largest: fewer packets, less processor time for the same bytes
_PREFIX: Final = "dpbench"
_MBIT_PER_GB_S: Final = 8e3
FABRIC_RANKS: Final = (8, 1024)
_FORMULAS: Final = {"ring": RING, "tree": TREE}
_SYSTEM_PATH: Final = "/usr/local/sbin:/usr/sbin:/sbin"  # where `ip` and `tc` are, and often not on a user's PATH


class NoBedError(DPCompileError):
    """This link cannot be made on this machine. The text says why."""


@dataclass(frozen=True, slots=True)
class Link:
    """What a suite asks for.

    Args:
        kind: `loopback`, `shaped`, `fabric` or `nccl-1`.
        rate_mbit: 1e6 bits per second that leave a node.
        comm_over_compute: choose the rate so that all gradients in one all-reduce take this many times as long as the
            workload's compiled step without communication (mode `compute`).
        ranks_inside: ranks of a node of a shaped link, which share what may leave it; one if not given.
        ranks: of a fabric.
        link: of a fabric, what each hop is: a name of `dp_compile.links`.
        latency_us: of a hop of a fabric, in place of `link`; then its rate is given as a shaped link's is.
        algorithm: of a fabric's all-reduce, `ring` (if not given) or `tree`.

    Raises:
        ConfigError: an unknown kind or name; something is missing, or given that this kind does not have.
    """

    kind: str
    rate_mbit: float | None = None
    comm_over_compute: float | None = None
    ranks: int | None = None
    link: str | None = None
    latency_us: float | None = None
    algorithm: str | None = None
    ranks_inside: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise ConfigError(f"kind must be one of {', '.join(_KINDS)}, got {self.kind!r}.")
        _, allowed = _KINDS[self.kind]
        for name in (each.name for each in fields(self) if each.name not in ("kind", *allowed)):
            if getattr(self, name) is not None:
                others = [repr(kind) for kind, (_, keys) in _KINDS.items() if name in keys]
                raise ConfigError(f"{name} is for kind = {' or '.join(others)}, not for {self.kind!r}.")
        for name in ("rate_mbit", "comm_over_compute", "latency_us"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), zero_allowed=False)
        if self.kind == FABRIC.name:
            self._check_fabric()
        elif self.kind == "shaped":
            self._check_rate("a shaped link")
            inside = 1 if self.ranks_inside is None else self.ranks_inside
            if isinstance(inside, bool) or not isinstance(inside, int) or inside < 1:
                raise ConfigError(f"ranks_inside of a shaped link must be an integer >= 1, got {inside!r}.")

    def _check_fabric(self) -> None:
        low, high = FABRIC_RANKS
        if isinstance(self.ranks, bool) or not isinstance(self.ranks, int) or not low <= self.ranks <= high:
            raise ConfigError(f"ranks of a fabric must be an integer from {low} to {high}, got {self.ranks!r}.")
        if self.algorithm is not None and self.algorithm not in _FORMULAS:
            raise ConfigError(f"algorithm must be one of {', '.join(_FORMULAS)}, got {self.algorithm!r}.")
        if self.link is None:
            if self.latency_us is None:
                raise ConfigError("a fabric needs link, or latency_us and a rate; neither is given.")
            self._check_rate("a fabric with latency_us")
        else:
            links.link(self.link)
            for name in ("latency_us", "rate_mbit", "comm_over_compute"):
                if getattr(self, name) is not None:
                    raise ConfigError(f"link {self.link!r} has a latency and a rate; {name} is given beside it.")

    def _check_rate(self, which: str) -> None:
        given = [name for name in ("rate_mbit", "comm_over_compute") if getattr(self, name) is not None]
        if len(given) != 1:
            both = "both are" if given else "neither is"
            raise ConfigError(f"{which} needs rate_mbit or comm_over_compute, one of them; {both} given.")

    @property
    def name(self) -> str:
        is_fabric = self.kind == FABRIC.name
        parts = [f"fabric {self.ranks} x {self.link or self._hop_name}"] if is_fabric else [self._rate_name]
        parts += [f"between nodes of {self.ranks_inside}"] if self.ranks_inside is not None else []
        return " ".join([*parts, *([self.algorithm] if self.algorithm is not None else [])])

    @property
    def _hop_name(self) -> str:
        return f"{self.latency_us:g} us, {self._rate_name}"

    @property
    def _rate_name(self) -> str:
        if self.rate_mbit is not None:
            return f"{self.rate_mbit:g} mbit"
        if self.comm_over_compute is not None:
            return f"comm/compute {self.comm_over_compute:g}"
        return self.kind

    @property
    def formula(self) -> Formula:
        return _FORMULAS[self.algorithm or "ring"]

    def cost(self, rate_mbit: float | None) -> AllReduceCost:
        """Of an all-reduce over a fabric; `rate_mbit` counts if the link has no name."""
        assert self.ranks is not None
        if self.link is not None:
            return links.link(self.link).cost(self.ranks, formula=self.formula)
        assert rate_mbit is not None
        assert self.latency_us is not None
        hop = links.Link(self.name, self.latency_us, rate_mbit / _MBIT_PER_GB_S, "the suite")
        return hop.cost(self.ranks, formula=self.formula)


def rate_of(link: Link, *, compute_s: float, gradient_nbytes: int, ranks: int) -> float | None:
    """The rate of a link in mbit, found if the link asks for that; `None` if it has a name instead.

    Args:
        link: whose.
        compute_s: of the workload's step in mode `compute`.
        gradient_nbytes: of all its gradients.
        ranks: processes that meet, if it is not a fabric.

    Raises:
        NoBedError: there is nobody to communicate with.
    """
    if link.comm_over_compute is None:
        return link.rate_mbit
    group = link.ranks or ranks
    if group < 2:
        raise NoBedError("a network needs at least 2 ranks.")
    return rate_for(
        link.comm_over_compute,
        compute_s=compute_s,
        gradient_nbytes=gradient_nbytes,
        ranks=group,
        formula=link.formula,
    )


def rate_for(
    comm_over_compute: float, *, compute_s: float, gradient_nbytes: int, ranks: int, formula: Formula = RING
) -> float:
    """The rate in mbit at which one all-reduce of all gradients takes `comm_over_compute * compute_s`.

    Each rank sends 2 (n-1)/n of the bytes in a ring, 2 in a tree (sources: `cost_model`). Latency is not in it: the
    self-check measures what came out.
    """
    sent_nbytes = formula.cost(alpha_0=1.0, alpha_hop=1.0, busbw=1.0, n=ranks).beta_s_per_byte * gradient_nbytes
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
        group_ranks: of the process group, if that has more than there are processes.
    """

    backend: str
    host: str
    prefixes: tuple[tuple[str, ...], ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    imports: tuple[str, ...] = ()
    asynchronous: bool = True
    group_ranks: int | None = None

    @property
    def processes(self) -> int:
        return len(self.prefixes)


@contextmanager
def _loopback(link: Link, ranks: int, rate_mbit: float | None) -> Iterator[Bed]:
    yield Bed("gloo", "127.0.0.1", ((),) * ranks, {"GLOO_SOCKET_IFNAME": "lo"}, asynchronous=False)


@contextmanager
def _shaped(link: Link, ranks: int, rate_mbit: float | None) -> Iterator[Bed]:
    assert rate_mbit is not None
    inside = link.ranks_inside or 1
    nodes, rest = divmod(ranks, inside)
    if nodes < 2 or rest:
        raise NoBedError(
            f"{ranks} ranks do not fill two nodes or more with {inside} each."
            if inside > 1
            else "a network needs at least 2 ranks."
        )
    _check_tools()
    remove_stale()
    with ExitStack() as stack:
        spaces = [_add_space(stack, str(node)) for node in range(nodes)]
        if nodes == 2:
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
        for node, space in enumerate(spaces):
            _settle(space, _address(node), rate_mbit)
        prefixes = tuple((_tool("ip"), "netns", "exec", space) for space in spaces for _ in range(inside))
        yield Bed("gloo", _address(0), prefixes, {"GLOO_SOCKET_IFNAME": "eth0", INTERFACE: "eth0"})


@contextmanager
def _fabric(link: Link, ranks: int, rate_mbit: float | None) -> Iterator[Bed]:
    if link.comm_over_compute is not None and torch.cuda.is_available():
        raise NoBedError("compute is timed on the CPU, the fabric would run on the GPU: give rate_mbit or link.")
    yield Bed(
        FABRIC.name,
        "127.0.0.1",
        ((),),
        # That barrier would wait in the store for ranks that are only played.
        {**fabric.environment(link.cost(rate_mbit)), "TORCH_DIST_INIT_BARRIER": "0"},
        imports=(fabric.__name__,),
        group_ranks=link.ranks,
    )


@contextmanager
def _nccl_alone(link: Link, ranks: int, rate_mbit: float | None) -> Iterator[Bed]:
    if not torch.cuda.is_available():
        raise NoBedError("NCCL needs a GPU, and torch sees none here.")
    yield Bed(dist.get_default_backend_for_device("cuda"), "127.0.0.1", ((),))


_Opener = Callable[[Link, int, float | None], AbstractContextManager[Bed]]
_RATES: Final = ("rate_mbit", "comm_over_compute")
_KINDS: Final[Mapping[str, tuple[_Opener, tuple[str, ...]]]] = {
    "loopback": (_loopback, ()),
    "shaped": (_shaped, (*_RATES, "ranks_inside")),
    FABRIC.name: (_fabric, (*_RATES, "ranks", "link", "latency_us", "algorithm")),
    "nccl-1": (_nccl_alone, ()),
}
"""By kind, what makes it, and the keys that it has."""
KINDS: Final = tuple(_KINDS)


def open_bed(link: Link, *, ranks: int, rate_mbit: float | None) -> AbstractContextManager[Bed]:
    """Make a link for so many ranks, and take it down again at the end of the `with`. A fabric has its own.

    Raises:
        NoBedError: on entering, if this machine, or this user's rights on it, cannot make it.
    """
    make, _ = _KINDS[link.kind]
    return make(link, ranks, rate_mbit)


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


def _address(node: int) -> str:
    return f"10.77.{node // 250}.{node % 250 + 1}"


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
