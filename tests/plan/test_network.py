"""What reductions cost: formulas, the fit, links; stages, their timeline and bound; and when gradients are ready."""

import math
import random

import pytest
import torch
import torch.distributed as dist
from graphs import Grad, trace
from hypothesis import given
from hypothesis import strategies as st

from dp_compile._torch import distributed
from dp_compile.errors import ConfigError
from dp_compile.passes.estimates import Accumulation, ready_shares
from dp_compile.passes.reduction import REDUCE_GRAD
from dp_compile.plan.backends import GLOO, NCCL
from dp_compile.plan.buckets import PACKED, BucketKey, GradientSpec, bucket_of, plan_buckets
from dp_compile.plan.cost import (
    LINKS,
    AllReduceCost,
    Link,
    fit,
    link,
    nominal_cost,
    ring,
    ring_or_tree,
    with_levels,
)
from dp_compile.plan.network import Job, Leg, ReadyGradient, finish_time, launches, legs_of, release_time_bound
from dp_compile.plan.planner import assumed_times
from dp_compile.plan.reduction import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BETWEEN,
    INSIDE,
    WHOLE,
    Averaging,
    Levels,
    Stage,
    launch_order,
)

LEVELS = Levels("in", "out", ((0, 1, 2), (3, 4, 5)))


def levels(count):
    """So many stages, the last of them over another link."""
    return [*([Stage(ALL_REDUCE, "out", link=BETWEEN)] * (count - 1)), Stage(ALL_GATHER, "in", link=INSIDE)]


@given(st.lists(st.sampled_from([1, 2, 3, 4]), max_size=6))
def test_each_stage_once_and_in_its_order(stages):
    order = list(launch_order([levels(count) for count in stages]))
    assert sorted(order) == [(bucket, stage) for bucket, count in enumerate(stages) for stage in range(count)]
    for bucket, count in enumerate(stages):
        assert [stage for each, stage in order if each == bucket] == list(range(count))
    assert [bucket for bucket, stage in order if stage == 0] == list(range(len(stages)))
    lasts = [bucket for bucket, stage in order if stage and stage == stages[bucket] - 1]
    assert order[len(order) - len(lasts) :] == [(bucket, stages[bucket] - 1) for bucket in lasts]


def test_over_one_link_the_last_stage_is_one_bucket_late_too():
    two = Averaging(hook="a hook", rounds=(ALL_TO_ALL, ALL_GATHER)).reduction("0", GLOO, 3, "float32").stages
    assert two == (Stage(ALL_TO_ALL, "0", parts=3), Stage(ALL_GATHER, "0", parts=3))
    assert list(launch_order([two, two, levels(1)])) == [(0, 0), (1, 0), (0, 1), (2, 0), (1, 1)]


def specs(levels, *numels):
    key = BucketKey(Averaging().reduction("all", GLOO, 6, "float32", levels), "float32", "cpu")
    return [GradientSpec(index, f"p{index}", (numel,), (1,), 4, key) for index, numel in enumerate(numels)]


def test_a_bucket_divides_into_parts_of_16_elements():
    """So that each rank's part starts at 16 bytes, whatever is sent: NCCL is slow where it does not."""
    plan = plan_buckets(specs(LEVELS, 4, 48, 49), bucket_cap_mb=16 / 2**20, alignment_bytes=PACKED)
    assert [bucket.numel for bucket in plan.buckets] == [48, 48, 96]
    assert [bucket.padding_nbytes for bucket in plan.buckets] == [176, 0, 188]
    for levels, numel, padded in ((LEVELS, 0, 0), (None, 49, 49)):
        (spec,) = specs(levels, numel)
        assert bucket_of([spec]).numel == padded


def test_two_levels_cost_their_three_stages():
    """Four nodes of eight: rings of eight inside, rings of four between for an eighth of the bytes."""
    fast, slow = Link(2.0, 400.0), Link(10.0, 50.0)
    cost = with_levels(AllReduceCost(1.0, 1.0), fast, slow, ranks_inside=8, nodes=4)
    levels = Levels("", "", tuple(tuple(range(8 * node, 8 * node + 8)) for node in range(4)))
    reduction = Averaging().reduction("", NCCL, 32, "float32", levels)
    nbytes = 2**30
    legs = legs_of([reduction.loads(nbytes)], cost)
    half_inside = 8.4e-6 + 7 * (2e-6 + nbytes / 8 / 400e9)
    all_between = 8.4e-6 + 2 * 3 * (10e-6 + nbytes / 8 / 4 / 50e9)
    assert [leg.link for leg in legs] == [INSIDE, BETWEEN, INSIDE]
    assert [leg.seconds for leg in legs] == pytest.approx([half_inside, all_between, half_inside], rel=1e-12)
    # A slow link between nodes is what two levels are for.
    nominal = legs_of([reduction.loads(nbytes)], nominal_cost(NCCL, 32, 8))
    assert sum(leg.seconds for leg in nominal) < 0.5 * nominal_cost(NCCL, 32).seconds(nbytes)


def test_the_two_links_carry_stages_beside_each_other():
    """By hand, with 1 s a leg: the second stage of a bucket goes beside the first one of the next.

    inside   0 1 2     0 1 2
    between    0 1 2
    """
    jobs = [Job(float(number), (Leg(INSIDE, 1.0), Leg(BETWEEN, 1.0), Leg(INSIDE, 1.0))) for number in range(3)]
    found = list(launches(jobs, backward_s=2.0))
    assert [[tuple(stage)[:3] for stage in each.stages] for each in found] == [
        [(INSIDE, 0.0, 1.0), (BETWEEN, 1.0, 2.0), (INSIDE, 3.0, 4.0)],
        [(INSIDE, 1.0, 2.0), (BETWEEN, 2.0, 3.0), (INSIDE, 4.0, 5.0)],
        [(INSIDE, 2.0, 3.0), (BETWEEN, 3.0, 4.0), (INSIDE, 5.0, 6.0)],
    ]
    assert finish_time(jobs, backward_s=2.0) == 6.0
    # From 2 to 4 compute waits for the first two stages of the last bucket, then for what is gathered.
    assert [each.waited_s for each in found] == [0.0, 1.0, 3.0]


def test_who_launches_a_stage_waits_for_the_one_before_and_compute_with_it():
    """The first stage of the first bucket takes longer than compute needs to come to the second bucket."""
    jobs = [
        Job(0.0, (Leg(INSIDE, 5.0), Leg(BETWEEN, 1.0), Leg(INSIDE, 1.0))),
        Job(1.0, (Leg(WHOLE, 1.0),)),
        Job(3.0, (Leg(WHOLE, 1.0),)),
    ]
    first, second, third = launches(jobs, backward_s=4.0)
    assert (second.ready_s, second.start_s) == (1.0, 5.0)
    # The second stage is launched after bucket 1 and waits until 5; compute goes on from 1 there.
    assert third.ready_s == 3.0 + 4.0
    assert [stage.start_s for stage in first.stages] == [0.0, 6.0, 8.0]
    assert first.waited_s + second.waited_s + third.waited_s == pytest.approx(finish_time(jobs, backward_s=4.0) - 4.0)


def bound_of(given, backward_s, keys="aa"):
    gradients = [ReadyGradient(nbytes, ready, key) for (ready, nbytes), key in zip(given, keys, strict=False)]
    return release_time_bound(gradients, cost=AllReduceCost(0.5, 0.1), backward_s=backward_s)


def test_the_bound_by_hand():
    assert bound_of([], 3.0) == 3.0
    assert bound_of([(1.0, 10), (2.0, 1)], 2.0) == pytest.approx(1.0 + 0.5 + 1.1)
    assert bound_of([(1.0, 10), (9.0, 1)], 2.0) == pytest.approx(9.0 + 0.5 + 0.1)
    assert bound_of([(1.0, 10), (2.0, 1)], 2.0, keys="ab") == pytest.approx(3.1)
    assert bound_of([(1.0, 1), (2.0, 1)], 99.0) == 99.0


@pytest.mark.parametrize("n", [1, 8, 1000, 2**29])
def test_formulas_are_those_of_textbooks(n):
    for formula, hops in ((ring, 2 * (n - 1)), (ring_or_tree, 2 * math.ceil(math.log2(n)))):
        cost = Link(3.0, 100.0).cost(n, hops=formula, launch_us=8.0)
        assert cost.alpha_s == pytest.approx(8e-6 + hops * 3e-6)
        assert cost.beta_s_per_byte == pytest.approx(2 * (n - 1) / n / 1e11)
        assert cost.scaled(2).seconds(10**9) == pytest.approx(2 * cost.seconds(10**9))


def test_wrong_costs_and_links():
    for wrong in (-1.0, math.nan, "1", True):
        with pytest.raises(ConfigError, match="alpha_s must be a finite number >= 0"):
            AllReduceCost(wrong, 1e-11)
    with pytest.raises(ConfigError, match="nvlink4, infiniband-ndr"):
        link("avian")
    assert all(link(name) is preset for name, preset in LINKS.items())


@given(st.floats(1e-6, 1e-3), st.floats(1e8, 1e12), st.integers(0, 2**32))
def test_a_fit_finds_the_line_through_outliers(alpha, rate, seed):
    """One in three sweeps was disturbed: its samples take up to ten times as long."""
    randomness = random.Random(seed)
    samples = [
        (size, (alpha + size / rate) * (randomness.uniform(1, 10) if sweep == 0 else 1.0))
        for size in (2**k for k in range(10, 31))
        for sweep in range(3)
    ]
    found = fit(samples)
    for size in (2**10, 2**20, 2**30):
        assert found.cost.seconds(size) == pytest.approx(alpha + size / rate, rel=1e-6)
    assert found.residual < 1e-6


def test_a_fit_has_a_latency_and_a_slope_or_says_so():
    assert fit([(1000, 0.5e-6), (2000, 2e-6), (4000, 4e-6)]).cost.alpha_s == 0
    with pytest.raises(ConfigError):
        fit([(8, 2.0), (16, 1.5), (32, 1.0)])


def test_a_fit_of_a_network_that_sends_the_first_bytes_at_once():
    """Microseconds of gloo on 200 Mbit/s by tc-tbf(8), 2026-11-28. The least deviation from all sizes has 1 GB/s."""
    taken_us = {2**10: 266, 2**12: 266, 2**14: 307, 2**16: 333, 2**18: 10204, 2**20: 41484}
    found = fit((nbytes, each * 1e-6) for nbytes, each in taken_us.items()).cost
    assert found.seconds(25 * 2**20) == pytest.approx(25 * 41484e-6, rel=0.1)
    assert found.alpha_s == pytest.approx(266e-6, rel=0.2)


def test_assumed_from_elements():
    shapes = ((8, 4), (4,), (8, 12))
    specs = [Grad(index=index, shape=shape).spec for index, shape in enumerate(shapes)]
    assert assumed_times(specs).shares == {0: 0.25, 1: 0.25, 2: 1.0}


def shares_of(backward, *inputs):
    graph = trace(backward, *inputs).graph
    nodes = graph.find_nodes(op="call_function", target=REDUCE_GRAD)
    values = {node: node.meta["val"] for node in graph.nodes if "val" in node.meta}
    return ready_shares([Accumulation(node, node.args[0], False) for node in nodes], values)


@pytest.mark.usefixtures("fake_group")
def test_collectives_of_the_model_take_their_time():
    """What stands behind one is ready later by what a nominal link takes, in bytes that memory moves meanwhile."""
    grads = [Grad(index=0, shape=(64, 64)), Grad(index=1, shape=(64, 64))]

    def backward(x, y):
        first = grads[0].reduce(x.t() @ y)
        summed = torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce(y, "sum", GROUP))
        return [first, grads[1].reduce(x.t() @ summed)]

    GROUP = distributed.group_name(dist.group.WORLD)
    found = shares_of(backward, *torch.randn(2, 64, 64))
    product = max(3 * 64 * 64 * 4, 2 * 64**3 / 8.0)
    sent = nominal_cost(GLOO, dist.get_world_size()).seconds(64 * 64 * 4) * 15e9  # of one core's memory, in bytes
    total = 2 * product + sent
    assert [each.ready for each in found] == pytest.approx([product / total, 1.0])


def test_what_nothing_but_one_gradient_needs():
    """A product that both need, one that the second needs, and that of each gradient."""
    grads = [Grad(index=0, shape=(64, 64)), Grad(index=1, shape=(64, 64))]

    def backward(x, y):
        both = x @ y
        second = both @ x
        return [grads[0].reduce(both @ y), grads[1].reduce(second @ y)]

    first, second = shares_of(backward, *torch.randn(2, 64, 64))
    seconds = 4 * 2 * 64**3 / 8.0 / 15e9  # of one core
    # What the second needs alone comes after the launch of the first. `both`, `x` and `y` are no larger than what the
    # backward was given and its gradients.
    assert first == pytest.approx((0.5, 0.25, seconds, True))
    assert second == pytest.approx((1.0, 0.5, seconds, True))


def test_what_may_wait_until_the_end_of_a_backward():
    """Four products of tensors that the backward makes, as where activations are computed again."""
    grads = [Grad(index=index, shape=(8, 8)) for index in range(4)]

    def backward(x):
        found, kept = [], x
        for each in grads:
            kept = kept * 2.0
            found.append(each.reduce(kept.t() @ kept))
        return found

    found = shares_of(backward, torch.randn(64, 8))
    # The activation that is given is as large as each of these, a gradient an eighth of that. The last two read one.
    assert [each.may_wait for each in found] == [False, False, True, True]
