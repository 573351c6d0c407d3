"""Links between ranks, with public figures: what to plan with before anything was measured."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from dp_compile.errors import ConfigError
from dp_compile.plan.cost import AllReduceCost, Formula, check_number, line, ring

LAUNCH_US: Final = 8.4
"""What a collective costs once, however many hops it takes: in NCCL's tuning table for its `Simple` protocol."""


@dataclass(frozen=True, slots=True)
class Link:
    """One kind of link. `alpha_us` is the latency of one hop, `busbw_gb_s` in 1e9 bytes per second and direction.

    Raises:
        ConfigError: zero, negative or NaN where that is no link.
    """

    name: str
    alpha_us: float
    busbw_gb_s: float

    def __post_init__(self) -> None:
        check_number("alpha_us", self.alpha_us, zero_allowed=False)
        check_number("busbw_gb_s", self.busbw_gb_s, zero_allowed=False)

    def cost(self, n_ranks: int, *, formula: Formula = ring, launch_us: float = LAUNCH_US) -> AllReduceCost:
        """What an all-reduce over `n_ranks` costs when every hop is this link.

        Args:
            n_ranks: ranks of the group.
            formula: `ring` or `ring_or_tree`.
            launch_us: paid once a collective.

        Raises:
            ConfigError: fewer than one rank.
        """
        if isinstance(n_ranks, bool) or not isinstance(n_ranks, int) or n_ranks < 1:
            raise ConfigError(f"n_ranks must be an integer >= 1, got {n_ranks!r}.")
        hop_s, busbw = self.alpha_us * 1e-6, self.busbw_gb_s * 1e9
        return line(formula, n_ranks, launch_s=launch_us * 1e-6, hop_s=hop_s, busbw=busbw)


LINKS: Final[tuple[Link, ...]] = (
    Link("nvlink4", 3.4, 450.0),  # H100 SXM, 18 links of 25 GB/s a direction (vendor: 900 GB/s in both)
    Link("infiniband-ndr", 14.0, 50.0),  # one port of 400 Gb/s a rank
    Link("infiniband-hdr", 14.0, 25.0),
    Link("ethernet-100", 14.0, 12.5),  # one port of 100 Gb/s a rank, RoCE
    Link("ethernet-25", 14.0, 3.125),
    Link("pcie4-x16", 5.7, 31.5),  # 16 GT/s, 16 lanes, 128b/130b
    Link("loopback", 200.0, 1.0),  # gloo over TCP; two ranks on two idle cores took 240 to 310 us: calibrate
)
"""Presets, to plan before anything was measured: nominal. A node whose rings use k ports has up to k times the port's
figure. Latencies of a hop as in NCCL's tuning table (src/graph/tuning.cc, ring, Simple protocol)."""


def with_levels(whole: AllReduceCost, inside: Link, between: Link, *, ranks_inside: int, nodes: int) -> AllReduceCost:
    """The cost of an all-reduce over all ranks, with what it costs on each of two levels of network.

    Args:
        whole: over all ranks, on one level.
        inside: every hop inside a node; `between`: every hop between nodes, one such link for each rank of a node.
        ranks_inside: ranks of a node.
        nodes: how many of them.

    Raises:
        ConfigError: a number of ranks or nodes is no integer above zero.
    """
    twice_us = 2 * LAUNCH_US  # a reduce-scatter, and later an all-gather
    return replace(whole, inside=inside.cost(ranks_inside, launch_us=twice_us), between=between.cost(nodes))


def link(name: str) -> Link:
    """A preset by its name.

    Raises:
        ConfigError: there is no such preset.
    """
    for preset in LINKS:
        if preset.name == name:
            return preset
    raise ConfigError(f"link must be one of {', '.join(preset.name for preset in LINKS)}, got {name!r}.")
