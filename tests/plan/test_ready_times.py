"""When gradients are ready: pure numbers, and what a captured graph says."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from graphs import Grad
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

from dp_compile._torch import distributed
from dp_compile.passes.estimates import Accumulation, ready_shares
from dp_compile.passes.reduction import REDUCE_GRAD
from dp_compile.plan.backends import GLOO
from dp_compile.plan.buckets import PACKED, BucketPlan
from dp_compile.plan.cost import nominal_cost
from dp_compile.plan.ready_times import (
    Launches,
    ModelCollective,
    ReadyTimes,
    assumed_times,
    measured_times,
    slowest,
    typical,
)

SPECS = [Grad(index=0, shape=(8, 4)).spec, Grad(index=1, shape=(4,)).spec, Grad(index=2, shape=(8, 12)).spec]


def test_assumed_from_elements_medians_of_steps_maxima_of_ranks() -> None:
    assert assumed_times(SPECS).shares == {0: 0.25, 1: 0.25, 2: 1.0}
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


@pytest.mark.usefixtures("fake_group")
def test_collectives_of_the_model_take_their_time() -> None:
    """What stands behind one is ready later by what a nominal link takes, in bytes that memory moves meanwhile."""
    grads = [Grad(index=0, shape=(64, 64)), Grad(index=1, shape=(64, 64))]

    def backward(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        first = grads[0].reduce(x.t() @ y)
        summed = torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce(y, "sum", GROUP))
        return [first, grads[1].reduce(x.t() @ summed)]

    assert dist.group.WORLD is not None
    GROUP = distributed.group_name(dist.group.WORLD)
    graph = fx.experimental.proxy_tensor.make_fx(backward, tracing_mode="fake")(*torch.randn(2, 64, 64)).graph
    nodes = graph.find_nodes(op="call_function", target=REDUCE_GRAD)
    values = {node: node.meta["val"] for node in graph.nodes if "val" in node.meta}
    found = ready_shares([Accumulation(node, node.args[0], False) for node in nodes], values)
    product = max(3 * 64 * 64 * 4, 2 * 64**3 / 8.0)
    sent = nominal_cost(GLOO, dist.get_world_size()).seconds(64 * 64 * 4) * 10e9  # of one core's memory, in bytes
    total = 2 * product + sent
    assert found.gradients == pytest.approx([product / total, 1.0])
    (seen,) = found.collectives
    assert seen == ModelCollective("all_reduce", dist.get_world_size(), 64 * 64 * 4, seen.start, seen.end)
    assert (seen.start, seen.end) == pytest.approx((product / total, (product + sent) / total))
