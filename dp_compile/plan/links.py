"""Links between ranks, with public figures: what to plan with before anything was measured."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from dp_compile.errors import ConfigError
from dp_compile.plan.cost import RING, AllReduceCost, Formula, check_number

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
    source: str

    def __post_init__(self) -> None:
        check_number("alpha_us", self.alpha_us, zero_allowed=False)
        check_number("busbw_gb_s", self.busbw_gb_s, zero_allowed=False)

    def cost(self, n_ranks: int, *, formula: Formula = RING, launch_us: float = LAUNCH_US) -> AllReduceCost:
        """What an all-reduce over `n_ranks` costs when every hop is this link.

        Args:
            n_ranks: ranks of the group.
            formula: `RING` or `TREE`.
            launch_us: paid once a collective.

        Raises:
            ConfigError: fewer than one rank.
        """
        if isinstance(n_ranks, bool) or not isinstance(n_ranks, int) or n_ranks < 1:
            raise ConfigError(f"n_ranks must be an integer >= 1, got {n_ranks!r}.")
        return formula.cost(
            alpha_0=launch_us * 1e-6, alpha_hop=self.alpha_us * 1e-6, busbw=self.busbw_gb_s * 1e9, n=n_ranks
        )


_HOP = "latency of a hop as in NCCL's own tuning table (src/graph/tuning.cc, ring, Simple protocol"
LINKS: Final[tuple[Link, ...]] = (
    Link(
        "nvlink4",
        3.4,
        450.0,
        f"H100 SXM, 18 links of 25 GB/s a direction (vendor: 900 GB/s in both); nominal, not measured; {_HOP}: NVLINK)",
    ),
    Link("infiniband-ndr", 14.0, 50.0, f"one port of 400 Gb/s a rank; nominal, not measured; {_HOP}: NET)"),
    Link("infiniband-hdr", 14.0, 25.0, f"one port of 200 Gb/s a rank; nominal, not measured; {_HOP}: NET)"),
    Link("ethernet-100", 14.0, 12.5, f"one port of 100 Gb/s a rank, RoCE; nominal, not measured; {_HOP}: NET)"),
    Link("ethernet-25", 14.0, 3.125, f"one port of 25 Gb/s a rank, RoCE; nominal, not measured; {_HOP}: NET)"),
    Link("pcie4-x16", 5.7, 31.5, f"16 GT/s, 16 lanes, 128b/130b; nominal, not measured; {_HOP}: PCI)"),
    Link(
        "loopback",
        200.0,
        1.0,
        "gloo over TCP on one host, an order of magnitude: an all-reduce of two ranks took 240 to 310 us on two idle "
        "cores (2026-11-25), 410 us where they computed: calibrate",
    ),
)
"""Presets, to plan before anything was measured. A node whose rings use k ports has up to k times the port's figure."""


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
