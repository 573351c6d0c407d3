"""Who mixes with whom: every rank once, doubly stochastic, known gaps; edge by edge as decent-dp, if installed."""

from __future__ import annotations

import math
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dp_compile.errors import ConfigError
from dp_compile.plan import topologies
from dp_compile.plan.topologies import Edge, Topology, metropolis, metropolis_weights, random_matchings, topology

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


@st.composite
def graphs(draw: st.DrawFn) -> Topology:
    """A tree and more links."""
    n = draw(st.integers(1, 9))
    links = {(draw(st.integers(0, rank - 1)), rank) for rank in range(1, n)}
    ends = st.integers(0, n - 1)
    links |= {pair for pair in draw(st.sets(st.tuples(ends, ends))) if pair[0] != pair[1]}
    return metropolis(n, links)


MATCHINGS = st.builds(random_matchings, st.integers(1, 9), st.integers(0, 99))
BUILT_IN = st.builds(
    lambda name, bits, local: topology(name, local << bits, local),
    st.sampled_from(NAMED),
    st.integers(1, 4),
    st.sampled_from([1, 2, 4]),
)


@given(st.one_of(weighted_topologies(), graphs(), MATCHINGS, BUILT_IN), st.integers(0, 99))
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
    gap = chosen.spectral_gap()
    assert 0 <= gap.low == gap.high <= 1
    used = {edge.ranks for edges in chosen.steps for edge in edges if len(edge.ranks) > 1}
    assert set(chosen.groups()) == used
    assert len(chosen.groups()) == len(used)


@given(st.one_of(weighted_topologies(), graphs(), MATCHINGS, BUILT_IN))
@settings(max_examples=50)
def test_gaps_are_those_of_numpy(chosen: Topology) -> None:
    """Formula, dense matrix and Lanczos against singular values of the product of all matrices."""
    n, product = chosen.world_size, np.eye(chosen.world_size)
    for step in range(chosen.period):
        product = chosen.mixing_matrix(step) @ product
    singular = np.linalg.svd(product, compute_uv=False)
    expected = 1.0 if n == 1 else 1 - singular[1]
    assert chosen.spectral_gap().low == pytest.approx(expected, abs=1e-7)
    numeric = Topology("numeric", n, chosen.steps)
    assert numeric.spectral_gap().low == pytest.approx(expected, abs=1e-7)
    bounds = numeric.spectral_gap(exact_ranks=0)
    assert bounds.low - 1e-7 <= expected <= bounds.high + 1e-7
    assert bounds.high == pytest.approx(expected, abs=1e-6)  # so few ranks are seen whole


@pytest.mark.parametrize("n", [2, 4, 6, 8, 64])
def test_known_gaps(n: int) -> None:
    assert topology("complete", n).spectral_gap().low == 1
    ring = topology("ring", n)
    assert ring.spectral_gap().low == pytest.approx(1 - max(0.0, math.cos(2 * math.pi / n)) if n > 4 else 1)
    for name in ("one-peer-exp", "alternating-exp-ring") if n & (n - 1) == 0 else ():
        assert topology(name, n).spectral_gap().low == 1


@pytest.mark.parametrize("name", [*NAMED, "random"])
def test_as_many_ranks_as_anybody_has(name: str) -> None:
    """16,384: no dense matrix, and as many process groups as n log n."""
    n = 16_384
    chosen = random_matchings(n, 1, period=6) if name == "random" else topology(name, n, 8)
    gap = chosen.spectral_gap()
    assert 0 < gap.low <= gap.high <= 1
    assert (gap.low == gap.high) == (name != "random")
    assert len(chosen.groups()) <= n * math.log2(n)
    assert name != "ring" or gap.low == pytest.approx(2 * math.pi**2 / n**2, rel=1e-6)
    assert name != "random" or gap.high - gap.low < 0.02


def test_weights_of_a_graph() -> None:
    """A star of four: the middle has three links."""
    links = [(0, 1), (2, 0), (0, 3)]
    assert metropolis_weights(4, links) == {(0, 1): 0.25, (0, 2): 0.25, (0, 3): 0.25}
    star = metropolis(4, links)
    assert [edges[0] for edges in star.steps] == [Edge((0, other), 0.75) for other in (1, 2, 3)]
    assert star.steps[0][1:] == (Edge((2,), 1.0), Edge((3,), 1.0))
    assert star.mixed(np.array([4.0, 0.0, 0.0, 1.0]), 0).tolist() == [3.0, 1.0, 0.0, 1.0]
    path = metropolis(5, [(i, i + 1) for i in range(4)])
    assert path.period == 2


def test_seeds() -> None:
    assert random_matchings(8, 1) == random_matchings(8, 1)
    assert random_matchings(8, 1).steps != random_matchings(8, 2).steps
    drawn = random_matchings(8, 3, period=4)
    assert drawn.period == 4
    assert len(set(drawn.steps)) > 1
    # The same for ever: ranks of two versions would wait for each other.
    assert [edge.ranks for edge in drawn.steps[0]] == [(0, 4), (5, 6), (1, 3), (2, 7)]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: topology("ring", 5), "an even world_size, got 5"),
        (lambda: topology("one-peer-exp", 6), "world_size to be a power of two, 2 or more, got 6"),
        (lambda: topology("alternating-exp-ring", 12, 4), "number of nodes to be a power of two, 2 or more, got 3"),
        (lambda: topology("alternating-exp-ring", 4, 4), "power of two, 2 or more, got 1"),
        (lambda: topology("complete", 6, 4), "a multiple of local_world_size"),
        (lambda: topology("torus", 4), r"one of complete, ring, one-peer-exp, alternating-exp-ring.*got 'torus'"),
        (lambda: topologies.register("ring"), "'ring' is registered already"),
        (lambda: Edge((1, 1), 0.5), r"different numbers >= 0.*\(1, 1\)"),
        (lambda: Edge((), 0.5), "one at least"),
        (lambda: Edge((0, 1), 1.5), "between 0 and 1"),
        (lambda: Edge((0,), 0.5), "1 for a rank alone"),
        (lambda: Topology("own", 2, ()), "'own' has no step"),
        (lambda: Topology("own", 3, ((Edge((0, 1), 0.5),),)), "step 0 rank 2 is in 0 edges"),
        (
            lambda: Topology("own", 2, ((Edge((0, 1), 0.5),), (Edge((0, 1), 0.5), Edge((1,), 1.0)))),
            "step 1 rank 1 is in 2 edges",
        ),
        (lambda: Topology("own", 2, ((Edge((0, 1), 0.5), Edge((2,), 1.0)),)), "rank 2 is in 1 edges.*from 0 to 1"),
        (lambda: metropolis(3, [(0, 3)]), r"ranks 0 to 2, got \(0, 3\)"),
        (lambda: metropolis(3, [(1, 1)]), r"got \(1, 1\)"),
        (lambda: metropolis(4, [(0, 1), (2, 3)]), "no links join rank 0 and rank 2"),
        (lambda: random_matchings(4, 0, period=0), "must be >= 1, got 4 and 0"),
    ],
)
def test_what_is_refused(make: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make()


def test_own_topologies() -> None:
    @topologies.register("own of a test")
    def star(world_size: int, local_world_size: int) -> list[list[Edge]]:
        alone = [Edge((rank,), 1.0) for rank in range(2, world_size)]
        return [[Edge((0, 1), 0.9), *alone]]

    try:
        assert topology("own of a test", 3).steps == ((Edge((0, 1), 0.9), Edge((2,), 1.0)),)
        assert topology("own of a test", 3).spectral_gap().low == pytest.approx(0)
    finally:
        del topologies._builders["own of a test"]
    with pytest.raises(ConfigError, match="got 'own of a test'"):
        topology("own of a test", 3)


def test_one_rank_is_alone() -> None:
    """A deviation: decent-dp divides by zero, or refuses."""
    for name in NAMED:
        alone = topology(name, 1)
        assert alone.steps == ((Edge((0,), 1.0),),)
        assert alone.groups() == ()
        assert alone.spectral_gap().low == 1


@pytest.mark.parametrize(("world_size", "local"), [(2, 1), (4, 2), (6, 2), (8, 1), (8, 2), (8, 4), (24, 3), (32, 4)])
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
