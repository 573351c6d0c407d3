"""Who mixes with whom: every rank once, doubly stochastic, known gaps; edge by edge as decent-dp, if installed."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
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


@given(st.one_of(weighted_topologies(), BUILT_IN))
@settings(max_examples=50)
def test_gaps_are_those_of_numpy(chosen: Topology) -> None:
    """Formula and dense matrix against singular values of the product of all matrices."""
    n, product = chosen.world_size, np.eye(chosen.world_size)
    for step in range(chosen.period):
        product = chosen.mixing_matrix(step) @ product
    singular = np.linalg.svd(product, compute_uv=False)
    expected = 1.0 if n == 1 else 1 - singular[1]
    assert chosen.spectral_gap() == pytest.approx(expected, abs=1e-7)
    assert Topology("numeric", n, chosen.steps).spectral_gap() == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: topology("ring", 5), "an even world_size, got 5"),
        (lambda: topology("one-peer-exp", 6), "world_size to be a power of two, 2 or more, got 6"),
        (lambda: topology("alternating-exp-ring", 12, 4), "number of nodes to be a power of two, 2 or more, got 3"),
        (lambda: topology("complete", 6, 4), "a multiple of local_world_size"),
        (lambda: topology("torus", 4), r"one of complete, ring, one-peer-exp, alternating-exp-ring.*got 'torus'"),
        (lambda: Edge((1, 1), 0.5), r"different numbers >= 0.*\(1, 1\)"),
        (lambda: Edge((0, 1), 1.5), "between 0 and 1"),
        (lambda: Topology("own", 2, ()), "'own' has no step"),
        (lambda: Topology("own", 3, ((Edge((0, 1), 0.5),),)), "step 0 rank 2 is in 0 edges"),
        (
            lambda: Topology("own", 2, ((Edge((0, 1), 0.5),), (Edge((0, 1), 0.5), Edge((1,), 1.0)))),
            "step 1 rank 1 is in 2 edges",
        ),
    ],
)
def test_what_is_refused(make: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make()


@pytest.mark.parametrize(("world_size", "local"), [(2, 1), (6, 2), (8, 4), (24, 3)])
@pytest.mark.parametrize("name", NAMED)
def test_as_decent_dp(name: str, world_size: int, local: int) -> None:
    """The same edges in the same steps, and errors for the same numbers of ranks."""
    theirs = pytest.importorskip("decent_dp.topo", reason="decent-dp is not installed: pip install decent-dp==0.2.3")
    pytest.importorskip("loguru").logger.disable("decent_dp")
    build = theirs.TopologyReg.registry[name]._get_topo_edges
    asked = SimpleNamespace(_world_size=world_size, _local_world_size=local, _n_nodes=world_size // local)
    try:
        expected = build(asked)
    except ValueError:
        with pytest.raises(ValueError, match="needs"):
            topology(name, world_size, local)
        return
    theirs.Topology._validate_edges(asked, expected)  # also sorts the ranks
    ours = topology(name, world_size, local)
    found = [[(list(edge.ranks), edge.weight) for edge in edges] for edges in ours.steps]
    order = [sorted((edge.ranks, edge.weight) for edge in edges) for edges in expected]
    assert [sorted(edges) for edges in found] == order
