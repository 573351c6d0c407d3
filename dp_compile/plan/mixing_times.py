"""How long a step takes in which ranks mix parameters with few neighbours. Pure numbers.

    rank      forward | backward, up to where a bucket's gradients are there | wait | update, send | further | ...
    network                    what was sent in the step before, one bucket after the other

The model: a rank's network carries one exchange at a time, in the order in which buckets are sent; an exchange starts
when all ranks of its edge have come to it. A rank that waits computes nothing. What one rank waits for, the others of
its next edge wait for later, so all ranks are played, until what they do repeats.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from dp_compile.plan.topologies import Array, Edge, Topology

STEPS_PLAYED: Final = 64
"""At least so many before, and so many that count, in whole periods."""


class SentBucket(NamedTuple):
    """Parameters that travel together: bytes, seconds of the backward until their gradients are there, their update."""

    nbytes: float
    ready_s: float
    update_s: float = 0.0


class MixedStep(NamedTuple):
    """A step of a long training, in seconds, on average over a period.

    `compute_s`: without any waiting. `communication_s`: how long the network of the busiest rank is busy.
    """

    step_s: float
    compute_s: float
    communication_s: float


def mixed_step(
    topology: Topology,
    buckets: Sequence[SentBucket],
    *,
    forward_s: float,
    backward_s: float,
    seconds: Callable[[Edge, float], float],
) -> MixedStep:
    """Play all ranks.

    Args:
        topology: who mixes with whom.
        buckets: in the order in which they are sent, which is that of their `ready_s`.
        forward_s: what a step computes before its backward, and behind it.
        backward_s: what its backward computes, updates left out.
        seconds: what an all-reduce of so many bytes takes on an edge.
    """
    played = _Played(topology, buckets, forward_s, backward_s, seconds)
    periods = -(-STEPS_PLAYED // topology.period)
    for number in range(periods * topology.period):
        played.step(number)
    start_s = played.clock.max()
    for number in range(periods * topology.period):
        played.step(number)
    compute_s = forward_s + backward_s + sum(bucket.update_s for bucket in buckets)
    busy_s = sum(exchange.seconds[:, exchange.edge].sum(axis=0) for exchange in played.exchanges)
    return MixedStep(
        float(played.clock.max() - start_s) / (periods * topology.period),
        compute_s,
        float(np.max(busy_s)) / topology.period,
    )


@dataclass(frozen=True, slots=True)
class _Exchange:
    """Edges of a step. `order`: ranks, edge after edge; `edge` and `alone`: of each rank; `seconds`: bucket by edge."""

    order: np.ndarray[Any, Any]
    starts: np.ndarray[Any, Any]
    edge: np.ndarray[Any, Any]
    alone: np.ndarray[Any, Any]
    seconds: Array

    @staticmethod
    def of(edges: Sequence[Edge], buckets: Sequence[SentBucket], seconds: Callable[[Edge, float], float]) -> _Exchange:
        sizes = np.array([len(edge.ranks) for edge in edges])
        order = np.array([rank for edge in edges for rank in edge.ranks])
        edge_of = np.empty_like(order)
        edge_of[order] = np.repeat(np.arange(len(edges)), sizes)
        times = [[0.0 if len(edge.ranks) == 1 else seconds(edge, each.nbytes) for edge in edges] for each in buckets]
        starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
        return _Exchange(order, starts, edge_of, sizes[edge_of] == 1, np.array(times))


class _Played:
    """All ranks at once. `clock`: where each is; `free`: when its network is; `arrives`: when each bucket does."""

    def __init__(
        self,
        topology: Topology,
        buckets: Sequence[SentBucket],
        forward_s: float,
        backward_s: float,
        seconds: Callable[[Edge, float], float],
    ) -> None:
        self._buckets, self._forward_s, self._backward_s = buckets, forward_s, backward_s
        self.exchanges = [_Exchange.of(edges, buckets, seconds) for edges in topology.steps]
        self.clock = np.zeros(topology.world_size)
        self._free = np.zeros(topology.world_size)
        self._arrives = np.zeros((len(buckets), topology.world_size))

    def step(self, number: int) -> None:
        """Every rank's."""
        exchange = self.exchanges[(number + 1) % len(self.exchanges)]
        self.clock += self._forward_s
        computed_s = 0.0
        for place, bucket in enumerate(self._buckets):
            ready_s = max(computed_s, bucket.ready_s)
            self.clock = np.maximum(self.clock + (ready_s - computed_s), self._arrives[place]) + bucket.update_s
            computed_s = ready_s
            self._send(place, exchange)
        self.clock += self._backward_s - computed_s

    def _send(self, place: int, exchange: _Exchange) -> None:
        come = np.maximum(self.clock, self._free)
        ends = (np.maximum.reduceat(come[exchange.order], exchange.starts) + exchange.seconds[place])[exchange.edge]
        self._arrives[place] = np.where(exchange.alone, self.clock, ends)
        self._free = np.where(exchange.alone, self._free, ends)
