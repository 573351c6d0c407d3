"""Who mixes with whom: every rank once, doubly stochastic."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dp_compile.decentralized.topologies import Edge, Topology, topology
from dp_compile.errors import ConfigError

NAMED = ("complete", "ring", "one-peer-exp", "alternating-exp-ring")


@st.composite
def weighted_topologies(draw: st.DrawFn) -> Topology:
    """Any edges of any size, and any weight."""
    world_size = draw(st.integers(1, 9))
    steps = []
    for _ in range(draw(st.integers(1, 3))):
        order = draw(st.permutations(range(world_size)))
        cuts = sorted(draw(st.sets(st.integers(1, max(1, world_size - 1)), max_size=3)) | {0, world_size})
        groups = [order[a:b] for a, b in pairwise(cuts) if order[a:b]]
        steps.append([Edge(tuple(g), draw(st.floats(0, 1)) if len(g) > 1 else 1.0) for g in groups])
    return Topology("drawn", world_size, tuple(map(tuple, steps)))


BUILT_IN = st.builds(
    lambda name, bits, local: topology(name, local << bits, local),
    st.sampled_from(NAMED),
    st.integers(1, 4),
    st.sampled_from([1, 2, 4]),
)


@given(st.one_of(weighted_topologies(), BUILT_IN), st.integers(0, 99))
def test_what_every_topology_has(chosen: Topology, step: int) -> None:
    n = chosen.world_size
    for edges in chosen.steps:
        assert sorted(rank for edge in edges for rank in edge.ranks) == list(range(n))
    matrix = chosen.mixing_matrix(step)
    assert np.all(matrix >= -1e-15)
    np.testing.assert_allclose(matrix.sum(0), 1)
    np.testing.assert_allclose(matrix, matrix.T)
    edges = chosen.steps[step % chosen.period]
    for rank, edge in enumerate(each[step % chosen.period] for each in map(chosen.edges_of, range(n))):
        assert edge in edges
        assert matrix[rank, rank] == pytest.approx(edge.weight)
        for other in set(edge.ranks) - {rank}:
            assert matrix[rank, other] == pytest.approx((1 - edge.weight) / (len(edge.ranks) - 1))
    used = {edge.ranks for edges in chosen.steps for edge in edges if len(edge.ranks) > 1}
    assert set(chosen.groups()) == used
    assert len(chosen.groups()) == len(used)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: topology("ring", 5), "must be even, got 5"),
        (lambda: topology("one-peer-exp", 6), "world_size .* must be a power of two, 2 or more, got 6"),
        (lambda: topology("alternating-exp-ring", 12, 4), "number of nodes .* must be a power of two, .*, got 3"),
        (lambda: topology("complete", 6, 4), "a multiple of local_world_size"),
        (lambda: topology("torus", 4), r"one of complete, ring, one-peer-exp, alternating-exp-ring.*got 'torus'"),
        (lambda: Edge((1, 1), 0.5), r"different numbers >= 0.*\(1, 1\)"),
        (lambda: Edge((0, 1), 1.5), "between 0 and 1"),
        (lambda: Topology("own", 2, ()), "steps of topology 'own' must be one or more"),
        (lambda: Topology("own", 3, ((Edge((0, 1), 0.5),),)), "step 0, must be .*, got 'rank 2 in 0 edges'"),
        (
            lambda: Topology("own", 2, ((Edge((0, 1), 0.5),), (Edge((0, 1), 0.5), Edge((1,), 1.0)))),
            "step 1, must be .*, got 'rank 1 in 2 edges'",
        ),
    ],
)
def test_what_is_refused(make: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make()
