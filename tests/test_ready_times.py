"""When gradients are ready: pure numbers, and what a captured graph says."""

from __future__ import annotations

import math

import pytest
import torch
from graphs import Grad
from hypothesis import given
from hypothesis import strategies as st
from torch import fx, nn

from dp_compile.grad_reduction import REDUCE_GRAD
from dp_compile.passes.ready_times import ready_shares
from dp_compile.plan import PACKED, BucketPlan
from dp_compile.ready_times import (
    Estimate,
    Launches,
    ReadyTimes,
    assumed_times,
    in_ready_order,
    measured_times,
    slowest,
    typical,
)

SPECS = [Grad(index=0, shape=(8, 4)).spec, Grad(index=1, shape=(4,)).spec, Grad(index=2, shape=(8, 12)).spec]


def test_assumed_from_elements() -> None:
    times = assumed_times(SPECS)
    assert times.shares == {0: 0.25, 1: 0.25, 2: 1.0}
    assert times.backward_s is None


def test_an_unknown_gradient_is_ready_at_the_end() -> None:
    times = ReadyTimes({0: 0.5}, None, "")
    assert [gradient.index for gradient in in_ready_order(SPECS[::-1], times)] == [0, 2, 1]


@given(st.dictionaries(st.integers(0, 99), st.floats(0, 1)), st.none() | st.floats(1e-6, 1e3))
def test_json_keeps_every_bit(shares: dict[int, float], backward_s: float | None) -> None:
    times = ReadyTimes(shares, backward_s, "somehow")
    assert ReadyTimes.from_json(times.to_json()) == times


def test_medians_of_steps_and_maxima_of_ranks() -> None:
    steps = [Launches((1.0, 5.0), 9.0), Launches((2.0, 4.0), 8.0), Launches((9.0, 4.5), 7.0)]
    assert typical(steps) == Launches((2.0, 4.5), 8.0)
    assert slowest(steps) == Launches((9.0, 5.0), 9.0)


def plan_of(*buckets: list[int]) -> BucketPlan:
    specs = {spec.index: spec for spec in SPECS}
    return BucketPlan(tuple(PACKED.bucket(SPECS[0].key, [specs[index] for index in bucket], "") for bucket in buckets))


def test_measured_between_two_launches() -> None:
    before = ReadyTimes({0: 0.2, 1: 0.4, 2: 0.6}, None, "")
    times = measured_times(plan_of([0], [1, 2]), Launches((3.0, 7.0), 10.0), before)
    assert times.backward_s == 10.0
    assert times.shares == pytest.approx({0: 0.3, 1: 0.5, 2: 0.7})


@given(
    st.lists(st.floats(0, 1), min_size=3, max_size=3),
    st.lists(st.floats(0, 20), min_size=2, max_size=2),
    st.sampled_from([([0], [1, 2]), ([2, 0], [1]), ([1, 0], [2])]),
)
def test_measured_times_are_possible(
    shares: list[float], launch_s: list[float], buckets: tuple[list[int], list[int]]
) -> None:
    """Whatever was believed and seen: shares of a backward, and no bucket is ready after a later one."""
    before = ReadyTimes(dict(enumerate(shares)), None, "")
    times = measured_times(plan_of(*buckets), Launches((launch_s[0], launch_s[1]), 10.0), before)
    assert all(0 <= share <= 1 and math.isfinite(share) for share in times.shares.values())
    first, second = (max(times.shares[index] for index in bucket) for bucket in buckets)
    assert first <= second


def captured(function: nn.Module, *shapes: tuple[int, ...]) -> fx.Graph:
    """A graph of aten ops with fake tensors, as Dynamo leaves the backward."""
    graph = fx.experimental.proxy_tensor.make_fx(function, tracing_mode="fake")(*map(torch.randn, shapes)).graph
    for node in graph.nodes:
        node.meta["example_value"] = node.meta.get("val")
    return graph


def test_shares_of_a_graph() -> None:
    grads = [Grad(index=0, shape=(64, 64)), Grad(index=1, shape=(64, 64)), Grad(index=2, shape=(64, 64), replica=1)]

    def backward(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        first = grads[0].reduce(x.t() @ y)
        second = grads[1].reduce((y.t() @ x).t())  # a view costs nothing
        return [first, second, grads[2].reduce(x.t() @ x + y.t() @ y)]

    graph = captured(backward, (64, 64), (64, 64))
    assert len(graph.find_nodes(op="call_function", target=REDUCE_GRAD)) == 3
    shares = ready_shares(graph)
    product, addition = max(3 * 64 * 64 * 4, 2 * 64**3 / 8.0), 3 * 64 * 64 * 4
    total = 4 * product + addition
    assert {place: estimate.share for place, estimate in shares.items()} == pytest.approx(
        {(0, 0): product / total, (0, 1): 2 * product / total, (1, 2): 1.0}
    )


def test_a_graph_without_work() -> None:
    grad = Grad(index=0, shape=(4,))
    assert ready_shares(captured(lambda x: grad.reduce(x), (4,))) == {(0, 0): Estimate(1.0)}
