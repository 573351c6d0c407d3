"""Who averages parameters with whom in which step: edges, mixing matrices, how fast all ranks come to agree.

    step t    every rank is in exactly one edge, and takes   W(t) x    of the parameters x of all ranks
    edge      each of its k ranks keeps `weight` of its own, the others share the rest:

        x_i  <-  own_factor * x_i + share * (sum of x_j over the edge, i too)
                 share = (1 - weight) / (k - 1),   own_factor = weight - share

Four topologies have the patterns of decent-dp 0.2.3 (arXiv 2410.11998): `complete`, `ring`, `one-peer-exp`,
`alternating-exp-ring`. Others are made from a graph (`metropolis`) or a seed (`random_matchings`), or registered.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from dp_compile.errors import ConfigError
from dp_compile.plan.words import count

Array = np.ndarray[Any, np.dtype[np.float64]]

EXACT_RANKS: Final = 512
"""Up to so many ranks a gap that nobody knows is that of the dense matrix: a second or less."""
LANCZOS_STEPS: Final = 64
DOUBT: Final = 1e-6
"""The probability with which a bound from `LANCZOS_STEPS` steps may not hold."""


@dataclass(frozen=True, slots=True)
class Edge:
    """Ranks that mix with each other in one step, in rising order, and the part of its own that each keeps.

    Raises:
        ConfigError: no ranks, a rank twice, a weight that is not between 0 and 1, or not 1 for a rank alone.
    """

    ranks: tuple[int, ...]
    weight: float

    def __post_init__(self) -> None:
        ranks = tuple(sorted(self.ranks))
        object.__setattr__(self, "ranks", ranks)
        if not ranks or len(set(ranks)) < len(ranks) or ranks[0] < 0:
            raise ConfigError(f"ranks of an edge must be different numbers >= 0, and one at least, got {ranks}.")
        if not 0 <= self.weight <= 1 or (len(ranks) == 1 and self.weight != 1):
            raise ConfigError(
                f"weight of the edge {ranks} must be between 0 and 1, and 1 for a rank alone, got {self.weight!r}."
            )

    @property
    def share(self) -> float:
        """With what the parameters of each rank go into the sum that the ranks exchange."""
        return 0.0 if len(self.ranks) == 1 else (1 - self.weight) / (len(self.ranks) - 1)

    @property
    def own_factor(self) -> float:
        """What a rank multiplies its own parameters by, beside what comes back of them in the sum."""
        return self.weight - self.share


Steps = Sequence[Sequence[Edge]]


@dataclass(frozen=True, slots=True)
class SpectralGap:
    """How much nearer all ranks come in one period: their distance from the average shrinks to `1 - gap` or less.

    1: they agree after a period; 0: they never do. Exact if `low` and `high` are the same.
    """

    low: float
    high: float
    how: str


@dataclass(frozen=True, slots=True)
class Topology:
    """The edges of all steps of a period, which then starts again.

    Args:
        name: for people, and for what ranks compare.
        world_size: ranks, from 0.
        steps: of each step all edges.
        known_gap: the spectral gap over a period, where there is a formula.

    Raises:
        ConfigError: there is no step, or some rank is not in exactly one edge of a step.
    """

    name: str
    world_size: int
    steps: tuple[tuple[Edge, ...], ...]
    known_gap: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", tuple(map(tuple, self.steps)))
        if not self.steps:
            raise ConfigError(f"topology {self.name!r} has no step. Give edges for one at least.")
        for number, edges in enumerate(self.steps):
            seen = Counter(rank for edge in edges for rank in edge.ranks)
            wrong = [rank for rank in range(self.world_size) if seen[rank] != 1]
            wrong += [rank for rank in seen if rank >= self.world_size]
            if wrong:
                raise ConfigError(
                    f"topology {self.name!r}: in step {number} rank {wrong[0]} is in {seen[wrong[0]]} edges. "
                    f"Every rank from 0 to {self.world_size - 1} has to be in exactly one edge of each step, no other."
                )

    @property
    def period(self) -> int:
        """Steps until it starts again."""
        return len(self.steps)

    def edges_of(self, rank: int) -> tuple[Edge, ...]:
        """The edge that a rank is in, for each step of a period."""
        return tuple(next(edge for edge in edges if rank in edge.ranks) for edges in self.steps)

    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of every process group that is needed, once each, in the order in which every rank makes them."""
        edges = (edge.ranks for edges in self.steps for edge in edges)
        return tuple(dict.fromkeys(ranks for ranks in edges if len(ranks) > 1))

    def mixed(self, values: Array, step: int) -> Array:
        """What ranks have after a step: `values` has a row for each, before the step; any step >= 0."""
        return _Mixing.of(self.steps[step % self.period])(values)

    def mixing_matrix(self, step: int) -> Array:
        """`W(step)`, `(world_size, world_size)`: symmetric, rows and columns add up to 1."""
        return self.mixed(np.eye(self.world_size), step)

    def describe(self) -> str:
        """For people, in a line: name, period, and how fast ranks come to agree."""
        gap = self.spectral_gap()
        size = f"{gap.low:.3g}" if gap.low == gap.high else f"{gap.low:.3g} to {gap.high:.3g}"
        return f"topology {self.name}, period {count(self.period, 'step')}, spectral gap {size} a period (by {gap.how})"

    def spectral_gap(self, *, exact_ranks: int = EXACT_RANKS) -> SpectralGap:
        """1 minus the largest singular value of `W(period - 1) ... W(0)` beside that of the average.

        From a formula; else, up to `exact_ranks` ranks, from the dense matrix, to rounding; else between two bounds:
        `high` always holds, `low` but for one start in a million.
        """
        if self.known_gap is not None:
            return SpectralGap(self.known_gap, self.known_gap, "a formula")
        mixings = [_Mixing.of(edges) for edges in self.steps]
        if self.world_size <= exact_ranks:
            matrix = np.eye(self.world_size)
            for mixing in mixings:
                matrix = mixing(matrix)
            gap = _clipped(1 - float(np.linalg.norm(matrix - 1 / self.world_size, 2)))
            return SpectralGap(gap, gap, "the dense matrix")
        squared = _largest_eigenvalue(mixings, self.world_size)
        error = (math.log(1.648 * math.sqrt(self.world_size) / DOUBT) / (2 * LANCZOS_STEPS - 1)) ** 2
        low, high = (_clipped(1 - math.sqrt(each)) for each in (squared / (1 - error), squared))
        return SpectralGap(low, high, f"{LANCZOS_STEPS} Lanczos steps")


@dataclass(frozen=True, slots=True)
class _Mixing:
    """One step as arrays, edge after edge."""

    order: np.ndarray[Any, Any]
    starts: np.ndarray[Any, Any]
    sizes: np.ndarray[Any, Any]
    shares: Array
    own: Array

    @staticmethod
    def of(edges: Sequence[Edge]) -> _Mixing:
        sizes = np.array([len(edge.ranks) for edge in edges])
        return _Mixing(
            np.array([rank for edge in edges for rank in edge.ranks]),
            np.concatenate([[0], np.cumsum(sizes)[:-1]]),
            sizes,
            np.array([edge.share for edge in edges]),
            np.repeat([edge.own_factor for edge in edges], sizes),
        )

    def __call__(self, values: Array) -> Array:
        column = (-1, *(1 for _ in values.shape[1:]))
        given = values[self.order]
        sums = np.add.reduceat(given, self.starts, axis=0) * self.shares.reshape(column)
        result = np.empty_like(values)
        result[self.order] = given * self.own.reshape(column) + np.repeat(sums, self.sizes, axis=0)
        return result


def _clipped(gap: float) -> float:
    return min(1.0, max(0.0, gap))


def _largest_eigenvalue(mixings: Sequence[_Mixing], n: int) -> float:
    """Of `P^T P` for vectors that add up to 0, from below: `P` is all steps after each other, each is symmetric.

    Source of the bound from above: Kuczynski, Wozniakowski, Estimating the largest eigenvalue by the power and Lanczos
    algorithms with a random start, 1992: the relative error of k steps is more than e with a probability of at most
    1.648 sqrt(n) exp(-sqrt(e) (2k - 1)).
    """
    vector = np.random.default_rng(0).standard_normal(n)
    basis: list[Array] = [np.full(n, 1 / math.sqrt(n))]
    diagonal: list[float] = []
    beside: list[float] = []
    for _ in range(min(LANCZOS_STEPS, n - 1)):
        for _ in range(2):  # twice is enough: once loses orthogonality to rounding
            for other in basis:
                vector = vector - (other @ vector) * other
        length = float(np.linalg.norm(vector))
        if length < 1e-10:
            break  # all that can be reached was seen
        beside += [length] if diagonal else []
        basis.append(vector / length)
        image = basis[-1]
        for mixing in (*mixings, *reversed(mixings)):
            image = mixing(image)
        diagonal.append(float(basis[-1] @ image))
        vector = image
    tridiagonal = np.diag(diagonal) + np.diag(beside, 1) + np.diag(beside, -1)
    return max(0.0, float(np.linalg.eigvalsh(tridiagonal)[-1])) if diagonal else 0.0


# --- by name --------------------------------------------------------------------------------------------------------

Builder = Callable[[int, int], Steps]
"""From the number of ranks, and of ranks on each node, to the edges of each step of a period."""

_builders: Final[dict[str, Builder]] = {}
_gaps: Final[dict[str, Callable[[int], float]]] = {}


def register(name: str) -> Callable[[Builder], Builder]:
    """Let `topology(name, ...)` find the edges of the decorated function.

    Raises:
        ConfigError: there is one of that name.
    """
    if name in _builders:
        raise ConfigError(f"topology {name!r} is registered already. Take another name.")

    def take(builder: Builder) -> Builder:
        _builders[name] = builder
        return builder

    return take


def names() -> tuple[str, ...]:
    """Those that `topology` knows."""
    return tuple(_builders)


def topology(name: str, world_size: int, local_world_size: int = 1) -> Topology:
    """A topology by its name. One rank is alone, whatever the name.

    Args:
        name: `complete`, `ring`, `one-peer-exp`, `alternating-exp-ring`, or one that was registered.
        world_size: ranks, >= 1.
        local_world_size: ranks on each node, for those that ask for it.

    Raises:
        ConfigError: no such name, not for so many ranks, or some rank is not in exactly one edge of a step.
    """
    if name not in _builders:
        raise ConfigError(f"topology must be one of {', '.join(names())}, got {name!r}. Others are registered first.")
    if world_size < 1 or local_world_size < 1 or world_size % local_world_size:
        raise ConfigError(
            f"world_size must be a multiple of local_world_size, both >= 1, got {world_size} and {local_world_size}."
        )
    if world_size == 1:
        return Topology(name, 1, ((Edge((0,), 1.0),),), 1.0)
    gap = _gaps[name](world_size) if name in _gaps else None
    return Topology(name, world_size, tuple(map(tuple, _builders[name](world_size, local_world_size))), gap)


@register("complete")
def _complete(world_size: int, local_world_size: int) -> Steps:
    return [[Edge(tuple(range(world_size)), 1 / world_size)]]


@register("ring")
def _ring(world_size: int, local_world_size: int) -> Steps:
    if world_size % 2:
        raise ConfigError(f"topology 'ring' pairs neighbours and needs an even world_size, got {world_size}.")
    return [[Edge((rank, (rank + way) % world_size), 0.5) for rank in range(0, world_size, 2)] for way in (1, -1)]


@register("one-peer-exp")
def _one_peer_exp(world_size: int, local_world_size: int) -> Steps:
    hops = _powers("one-peer-exp", "world_size", world_size)
    return [[Edge((rank, rank + hop), 0.5) for rank in range(world_size) if not rank & hop] for hop in hops]


@register("alternating-exp-ring")
def _alternating_exp_ring(world_size: int, local_world_size: int) -> Steps:
    """Pairs of nodes: one averages inside of each node first and with the other then, its neighbour pair reversed."""
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
    """1, 2, 4, up to below a power of two."""
    if number < 2 or number & (number - 1):
        raise ConfigError(f"topology {name!r} needs {what} to be a power of two, 2 or more, got {number}.")
    return [1 << bit for bit in range(number.bit_length() - 1)]


def _gap_of_ring(world_size: int) -> float:
    """Both steps are projections; their ranges have the principal angles 2 pi k / n."""
    return 1.0 if world_size <= 4 else 2 * math.sin(math.pi / world_size) ** 2


_gaps.update(dict.fromkeys(("complete", "one-peer-exp", "alternating-exp-ring"), lambda _: 1.0), ring=_gap_of_ring)


# --- from a graph, from a seed --------------------------------------------------------------------------------------


def metropolis_weights(world_size: int, links: Iterable[tuple[int, int]]) -> dict[tuple[int, int], float]:
    """For each link of a graph what its two ranks give each other: 1 / (1 + the larger number of links of the two).

    Raises:
        ConfigError: a link of a rank with itself or with one that is not there, or ranks that no links join.
    """
    found = sorted({(min(link), max(link)) for link in links})
    for one, other in found:
        if one == other or one < 0 or other >= world_size:
            raise ConfigError(f"links must join two of the ranks 0 to {world_size - 1}, got ({one}, {other}).")
    neighbours: dict[int, list[int]] = defaultdict(list)
    for one, other in found:
        neighbours[one].append(other)
        neighbours[other].append(one)
    reached, new = {0}, [0]
    while new:
        new = [rank for rank in dict.fromkeys(r for each in new for r in neighbours[each]) if rank not in reached]
        reached |= set(new)
    if apart := [rank for rank in range(world_size) if rank not in reached]:
        raise ConfigError(f"no links join rank 0 and rank {apart[0]}, so they would never agree. Add links.")
    return {(one, other): 1 / (1 + max(len(neighbours[one]), len(neighbours[other]))) for one, other in found}


def metropolis(world_size: int, links: Iterable[tuple[int, int]], name: str = "metropolis") -> Topology:
    """Metropolis weights on any connected graph, its links taken in steps in which no rank has two.

    A rank is in one edge a step, so the links of a graph are one period, not one step: at most twice as many steps as
    a rank has links.

    Args:
        world_size: ranks.
        links: pairs of ranks, in any order.
        name: of the topology.

    Raises:
        ConfigError: as `metropolis_weights`.
    """
    steps: list[list[Edge]] = []
    busy: list[set[int]] = []
    for link, weight in metropolis_weights(world_size, links).items():
        number = next((step for step, ranks in enumerate(busy) if not ranks & set(link)), len(steps))
        if number == len(steps):
            steps.append([])
            busy.append(set())
        steps[number].append(Edge(link, 1 - weight))
        busy[number] |= set(link)
    for edges, ranks in zip(steps, busy, strict=True):
        edges += [Edge((rank,), 1.0) for rank in range(world_size) if rank not in ranks]
    return Topology(name, world_size, tuple(map(tuple, steps or [[Edge((0,), 1.0)]])))


def random_matchings(world_size: int, seed: int, period: int | None = None, name: str | None = None) -> Topology:
    """Pairs drawn anew in each step, the same on every rank, machine and version; with an odd number one is alone.

    Args:
        world_size: ranks.
        seed: the same on every rank.
        period: steps until the same pairs come again; each needs process groups of its own. `None`: twice the binary
            logarithm of the ranks.
        name: of the topology; `None`: says the seed.

    Raises:
        ConfigError: fewer than 1 rank, or a period below 1.
    """
    period = max(1, 2 * (world_size - 1).bit_length()) if period is None else period
    if world_size < 1 or period < 1:
        raise ConfigError(f"world_size and period must be >= 1, got {world_size} and {period}.")
    steps = []
    for step in range(period):
        # Not a generator of NumPy's: what it draws may change with its version, and ranks have to draw alike.
        drawn = {r: hashlib.blake2b(f"{seed}/{step}/{r}".encode(), digest_size=8).digest() for r in range(world_size)}
        order = sorted(drawn, key=lambda rank: (drawn[rank], rank))
        edges = [Edge((one, other), 0.5) for one, other in zip(order[::2], order[1::2], strict=False)]
        steps.append(tuple(edges + ([Edge((order[-1],), 1.0)] if world_size % 2 else [])))
    return Topology(name or f"random matchings, seed {seed}", world_size, tuple(steps))
