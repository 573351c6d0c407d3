"""Which ranks average their parameters in which step: edges and mixing matrices.

    step t    every rank is in exactly one edge; the parameters x of all ranks become   W(t) x
    edge      of k ranks that mix: each weights its own parameters by `weight`; the others' share the rest equally:

        x_i  <-  own_factor * x_i + share * (sum of x_j over the edge, including i)
                 share = (1 - weight) / (k - 1),   own_factor = weight - share

Four named topologies are those of decent-dp 0.2.3 (arXiv 2410.11998). Any other is a `Topology` of edges.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from dp_compile.errors import require

Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class Edge:
    """Ranks that mix with each other in one step, ascending, and the weight that each gives its own parameters."""

    ranks: tuple[int, ...]
    weight: float

    def __post_init__(self) -> None:
        ranks = tuple(sorted(self.ranks))
        object.__setattr__(self, "ranks", ranks)
        is_set = bool(ranks) and len(set(ranks)) == len(ranks) and ranks[0] >= 0
        require(is_set, "ranks of an edge", "one or more distinct numbers >= 0", ranks)
        is_share = 0 <= self.weight <= 1 and (len(ranks) > 1 or self.weight == 1)
        require(is_share, f"weight of the edge {ranks}", "between 0 and 1, and 1 for a single rank", self.weight)

    @property
    def share(self) -> float:
        """The factor of each rank's parameters in the sum that the ranks exchange."""
        return 0.0 if len(self.ranks) == 1 else (1 - self.weight) / (len(self.ranks) - 1)

    @property
    def own_factor(self) -> float:
        """The factor of a rank's own parameters, in addition to their share in the sum."""
        return self.weight - self.share


Steps = Sequence[Sequence[Edge]]


@dataclass(frozen=True, slots=True)
class Topology:
    """The edges (ranks that mix) in each step of a repeated period; each rank is in exactly one edge of a step."""

    name: str
    world_size: int
    steps: tuple[tuple[Edge, ...], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", tuple(map(tuple, self.steps)))
        require(bool(self.steps), f"steps of topology {self.name!r}", "one or more", self.steps)
        for number, edges in enumerate(self.steps):
            seen = Counter(rank for edge in edges for rank in edge.ranks)
            wrong = [rank for rank in range(self.world_size) if seen[rank] != 1]
            wrong += [rank for rank in seen if rank >= self.world_size]
            allowed = f"edges that contain each rank from 0 to {self.world_size - 1} once, and no other rank"
            found = f"rank {wrong[0]} in {seen[wrong[0]]} edges" if wrong else ""
            require(not wrong, f"step {number} of topology {self.name!r}", allowed, found)

    @property
    def period(self) -> int:
        """Number of steps before the edges repeat."""
        return len(self.steps)

    def edges_of(self, rank: int) -> tuple[Edge, ...]:
        """Return the edge of a rank in each step of a period."""
        return tuple(next(edge for edge in edges if rank in edge.ranks) for edges in self.steps)

    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Return the ranks of each process group, once each, in the order in which every rank creates the groups."""
        edges = (edge.ranks for edges in self.steps for edge in edges)
        return tuple(dict.fromkeys(ranks for ranks in edges if len(ranks) > 1))

    def mixing_matrix(self, step: int) -> Array:
        """Return `W(step)`, a matrix over all ranks: symmetric, rows and columns sum to 1. For any step >= 0."""
        matrix = np.zeros((self.world_size, self.world_size))
        for edge in self.steps[step % self.period]:
            matrix[np.ix_(edge.ranks, edge.ranks)] = edge.share
            matrix[edge.ranks, edge.ranks] = edge.own_factor + edge.share
        return matrix


def topology(name: str, world_size: int, local_world_size: int = 1) -> Topology:
    """Return the topology `complete`, `ring`, `one-peer-exp` or `alternating-exp-ring`. With 1 rank: no neighbours.

    `local_world_size`: ranks per node, for `alternating-exp-ring`; must divide `world_size`. Raises `ConfigError`.
    """
    require(name in _BUILDERS, "topology", f"one of {', '.join(_BUILDERS)}, or a Topology", name)
    sizes = world_size, local_world_size
    is_multiple = world_size >= 1 and local_world_size >= 1 and world_size % local_world_size == 0
    require(is_multiple, "world_size", "a multiple of local_world_size, both >= 1", sizes)
    if world_size == 1:
        return Topology(name, 1, ((Edge((0,), 1.0),),))
    steps = tuple(map(tuple, _BUILDERS[name](world_size, local_world_size)))
    return Topology(name, world_size, steps)


def _ring(world_size: int, local_world_size: int) -> Steps:
    require(world_size % 2 == 0, "world_size of topology 'ring', which pairs neighbours,", "even", world_size)
    return [[Edge((rank, (rank + way) % world_size), 0.5) for rank in range(0, world_size, 2)] for way in (1, -1)]


def _one_peer_exp(world_size: int, local_world_size: int) -> Steps:
    hops = _powers("one-peer-exp", "world_size", world_size)
    return [[Edge((rank, rank + hop), 0.5) for rank in range(world_size) if not rank & hop] for hop in hops]


def _alternating_exp_ring(world_size: int, local_world_size: int) -> Steps:
    """Pair nodes. One pair averages in each node, then over both nodes; the next pair over both, then in each."""
    local, n_nodes = local_world_size, world_size // local_world_size
    nodes = [tuple(range(node * local, (node + 1) * local)) for node in range(n_nodes)]
    steps: list[list[Edge]] = []
    pairs = 0
    for hop in _powers("alternating-exp-ring", "the number of nodes", n_nodes):
        two: tuple[list[Edge], list[Edge]] = ([], [])
        for node in (node for node in range(n_nodes) if not node & hop):
            first, second = nodes[node], nodes[node + hop]
            two[pairs % 2].extend([Edge(first, 1 / local), Edge(second, 1 / local)])
            two[1 - pairs % 2].append(Edge(first + second, 1 / (2 * local)))
            pairs += 1
        steps += two
    return steps


def _powers(name: str, what: str, number: int) -> list[int]:
    require(number > 1 and number.bit_count() == 1, f"{what} of topology {name!r}", "a power of two, 2 or more", number)
    return [1 << bit for bit in range(number.bit_length() - 1)]


# From the number of ranks and of ranks per node to the edges of each step of a period.
_BUILDERS: Final[Mapping[str, Callable[[int, int], Steps]]] = {
    "complete": lambda world_size, _: [[Edge(tuple(range(world_size)), 1 / world_size)]],
    "ring": _ring,
    "one-peer-exp": _one_peer_exp,
    "alternating-exp-ring": _alternating_exp_ring,
}
