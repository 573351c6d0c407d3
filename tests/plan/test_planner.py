"""The earliest partition and the robust one, near brute force and bound; and for reductions that may end later."""

import itertools

import pytest
from graphs import bucket_key
from hypothesis import given, settings
from hypothesis import strategies as st

from dp_compile.plan import crossing
from dp_compile.plan.backends import NCCL
from dp_compile.plan.buckets import PACKED, UNUSED_FLAGS, GradientSpec, bucket_of, partition_by_size, plan_buckets
from dp_compile.plan.cost import AllReduceCost
from dp_compile.plan.crossing import Job, arrivals, in_order_of_need, plan_crossing, ratios, step_seconds
from dp_compile.plan.network import ReadyGradient, finish_time, jobs_of, release_time_bound, release_times
from dp_compile.plan.planner import (
    CAPS_MB,
    ERROR_BAND,
    FIRST_CAP_MB,
    PlanResult,
    ReadyTimes,
    certify,
    earliest_partition,
    robust_partition,
)
from dp_compile.plan.reduction import Averaging, Levels
from dp_compile.plan.words import BYTES_PER_MB

CLOSE = 1e-9
MOST_OFF = 1.05
"""Of 1,500 random cases with two keys 6 were not the best in the worst case, by 3.2 % at most; with one key none."""

costs = st.builds(
    AllReduceCost,
    st.sampled_from([0.0, 0.1, 1.0, 3.0]) | st.floats(0, 10),
    st.sampled_from([0.0, 0.01, 0.05, 0.2]) | st.floats(0, 1),
)


@st.composite
def gradient_lists(draw, most=10, keys=1):
    """Ready times mostly grow, with ties and the odd step back; sizes from nothing to huge."""
    now, gradients = 0.0, []
    for _ in range(draw(st.integers(1, most))):
        now += draw(st.sampled_from([0.0, 0.0, 1.0]) | st.floats(0, 5))
        ready = max(0.0, now - draw(st.sampled_from([0.0, 0.0, 0.0, 2.0])))
        nbytes = draw(st.sampled_from([0, 1, 5, 50]) | st.integers(1, 100))
        gradients.append(ReadyGradient(nbytes, ready, draw(st.integers(0, keys - 1))))
    return gradients


def finish(gradients, partition, cost):
    return finish_time(jobs_of(gradients, partition, cost))


def all_partitions(gradients):
    """All 2**(n-1) ways to cut each key."""

    def cuts(positions):
        for where in itertools.product((False, True), repeat=len(positions) - 1):
            edges = [0, *(place for place, cut in enumerate(where, start=1) if cut), len(positions)]
            yield tuple(tuple(positions[start:stop]) for start, stop in itertools.pairwise(edges))

    keys = {gradient.key for gradient in gradients}
    of_key = [[position for position, gradient in enumerate(gradients) if gradient.key == key] for key in keys]
    for parts in itertools.product(*(list(cuts(positions)) for positions in of_key)):
        yield tuple(sorted(itertools.chain(*parts), key=lambda bucket: bucket[-1]))


def check_partition(gradients, partition):
    """Every gradient once, no bucket mixes keys, ascending inside, launched by last member."""
    assert sorted(itertools.chain(*partition)) == list(range(len(gradients)))
    assert all(len({gradients[position].key for position in bucket}) == 1 for bucket in partition)
    assert all(list(bucket) == sorted(bucket) for bucket in partition)
    assert [bucket[-1] for bucket in partition] == sorted(bucket[-1] for bucket in partition)


@given(gradient_lists(most=8), costs)
@settings(max_examples=150)
def test_one_key_ends_as_early_as_by_brute_force(gradients, cost):
    partition = earliest_partition(gradients, cost=cost)
    check_partition(gradients, partition)
    end = finish(gradients, partition, cost)
    earliest = min(finish(gradients, each, cost) for each in all_partitions(gradients))
    assert end <= earliest * (1 + CLOSE)
    assert end >= release_time_bound(gradients, cost=cost, backward_s=0.0) * (1 - CLOSE)


def test_small_cases_by_hand():
    cost = AllReduceCost(1.0, 1.0)
    assert earliest_partition([], cost=cost) == ()
    # Ready together: one latency. Far apart: one each, the first is sent while the second is made.
    assert earliest_partition([ReadyGradient(1, 1.0), ReadyGradient(1, 1.0)], cost=cost) == ((0, 1),)
    late = [ReadyGradient(1, 1.0), ReadyGradient(1, 9.0)]
    assert earliest_partition(late, cost=cost) == ((0,), (1,))
    # Of two keys that are ready together each has a bucket, and the next ones of each key their own.
    assert earliest_partition([ReadyGradient(1, at, key) for at in (1.0, 9.0) for key in "ab"], cost=cost) == (
        (0,), (1,), (2,), (3,),
    )  # fmt: skip
    # All of it is over before the backward is, at any speed: one bucket for each key.
    at_ease = [ReadyGradient(1, at, key) for at in (1.0, 9.0) for key in "ab"]
    assert robust_partition(at_ease, cost=cost, backward_s=90.0)[0] == ((0, 2), (1, 3))
    # The first two can be one without a later end at any speed; the third cannot, as the last would wait for it.
    times = [ReadyGradient(nbytes, at) for nbytes, at in ((1, 2.0), (5, 4.0), (5, 6.0), (2, 11.0))]
    assert robust_partition(times, cost=cost, backward_s=11.0)[0] == ((0, 1), (2,), (3,))
    # A gradient is not launched before the ones in front of it are ready.
    assert release_times([ReadyGradient(1, 5.0), ReadyGradient(1, 3.0)]) == [5.0, 5.0]


@given(gradient_lists(most=6, keys=2), costs, st.floats(0, 60))
@settings(max_examples=80)
def test_the_robust_one_is_near_brute_force(gradients, cost, backward_s):
    """And no worse than any fixed cap, or the earliest at any speed."""
    partition, certificate = robust_partition(gradients, cost=cost, backward_s=backward_s)
    check_partition(gradients, partition)
    assert certificate.makespan_s >= certificate.bound_s * (1 - CLOSE)
    assert certificate.worst_ratio >= certificate.ratio * (1 - CLOSE)
    keys, sizes = zip(*((gradient.key, gradient.nbytes) for gradient in gradients), strict=True)
    rivals = [partition_by_size(keys, sizes, cap * BYTES_PER_MB, FIRST_CAP_MB * BYTES_PER_MB) for cap in CAPS_MB]
    rivals += [earliest_partition(gradients, cost=cost.scaled(slower)) for slower in ERROR_BAND]
    for rival in rivals:
        assert certificate.worst_ratio <= certify(gradients, rival, cost=cost, backward_s=backward_s).worst_ratio * (
            1 + CLOSE
        )
    every = (certify(gradients, each, cost=cost, backward_s=backward_s) for each in all_partitions(gradients))
    assert certificate.worst_ratio <= min(each.worst_ratio for each in every) * MOST_OFF


def test_ten_thousand_gradients_are_planned():
    """No recursion, no cubic time; and every gradient lies in a bucket, once."""
    gradients = [ReadyGradient((place * 7919) % 10**6, place * 1e-5, 0) for place in range(10_000)]
    partition, _ = robust_partition(gradients, cost=AllReduceCost(3e-5, 1e-11), backward_s=0.1)
    assert sorted(place for bucket in partition for place in bucket) == list(range(10_000))


def test_no_certificate_is_below_its_bound():
    two = Averaging().reduction("all", NCCL, 4, "float32", Levels("in", "out", ((0, 1), (2, 3))))
    cost = AllReduceCost(9.0, 9.0, inside=AllReduceCost(0.2, 0.02), between=AllReduceCost(0.5, 0.1))
    one = [ReadyGradient(50, float(place)) for place in range(4)]
    several = [ReadyGradient(50, place + 1.0, loads=two.loads(50)) for place in range(4)]
    proven, tried = (robust_partition(each, cost=cost, backward_s=4.0)[1] for each in (one, several))
    for certificate in (proven, tried):
        assert certificate.bound_s <= certificate.makespan_s


@pytest.mark.parametrize("bytes_per_s", [25e9, 100e9])
def test_plans_are_near_the_bound(bytes_per_s):
    """GPT-2's twelve blocks among 64 ranks; at other speeds better than the plan that is best at this one."""
    layers = [(768 * 3072, 768), (3072 * 768, 3072), (768, 768), (768 * 768, 768), (768 * 2304, 2304), (768, 768)]
    numels = [numel for _ in range(12) for layer in layers for numel in layer]
    ready = itertools.accumulate(5e-6 + 1e-10 * numel for numel in numels)
    gradients = [ReadyGradient(4 * numel, at) for numel, at in zip(numels, ready, strict=True)]
    cost, backward_s = AllReduceCost(20e-6, 2 * 63 / 64 / bytes_per_s), gradients[-1].ready_s
    _, robust = robust_partition(gradients, cost=cost, backward_s=backward_s)
    earliest = certify(gradients, earliest_partition(gradients, cost=cost), cost=cost, backward_s=backward_s)
    assert earliest.ratio <= robust.ratio <= 1.07
    assert robust.worst_ratio <= 1.07 < 1.12 < earliest.worst_ratio


KEY = bucket_key("0", "sum", "float32", "cpu")
SECOND_A_BYTE = AllReduceCost(0.0, 1.0)


def gradient(index, nbytes, name=""):
    return GradientSpec(index, name or f"p{index}", (nbytes // 4,), (1,), 4, KEY)


def planned(sizes, cap=1):
    """Gradients in the order in which they are ready, then the flags; a bucket ends at `cap` bytes."""
    every = [gradient(index, size) for index, size in enumerate(sizes)]
    every.append(gradient(len(sizes), 4, UNUSED_FLAGS))
    return PlanResult(plan_buckets(every, bucket_cap_mb=cap / 2**20, alignment_bytes=PACKED))


def times(shares, backward_s, own=()):
    return ReadyTimes(dict(enumerate(shares)), backward_s, "said", dict(enumerate(own)))


def members(plan):
    return [[member.gradient.index for member in bucket.members] for bucket in plan.buckets]


def jobs_with(sizes, shares, backward_s):
    buckets = [bucket_of([gradient(index, size)]) for index, size in enumerate(sizes)]
    return crossing.jobs_of(buckets, times(shares, backward_s), SECOND_A_BYTE, backward_s)


def test_what_is_read_first_goes_first_and_the_flags_alone_before_all():
    """Each takes 40 s, and they are ready after 25, 50, 75 and 100: the second is sent behind the third and fourth."""
    plan = plan_crossing(planned([40] * 4), times([0.25, 0.5, 0.75, 1.0], 100.0), SECOND_A_BYTE, cuts=False).plan
    assert members(plan) == [[4], [0], [2], [3], [1]]


def test_products_of_later_layers_are_computed_while_the_first_gradient_is_sent():
    """Of 100 s each gradient needs 10 alone. The last, launched first, is ready after 70 of them, and there at 110."""
    said, sizes = times([0.25, 0.5, 0.75, 1.0], 100.0, [0.1] * 4), [4, 4, 4, 40]
    assert said.launches([[gradient(index, 4)] for index in (3, 0, 1, 2)]) == pytest.approx([0.7, 0.8, 0.9, 1.0])
    assert members(plan_crossing(planned(sizes), said, SECOND_A_BYTE, cuts=False).plan) == [[4], [3], [2], [1], [0]]
    in_order = plan_crossing(planned(sizes), times([0.25, 0.5, 0.75, 1.0], 100.0), SECOND_A_BYTE, cuts=False).plan
    assert members(in_order)[-1] == [3]


def test_buckets_are_cut_smaller_where_that_pays():
    """One bucket could only be sent at the end of the backward."""
    one, said = planned([40] * 8, cap=10**6), times([each / 8 for each in range(1, 9)], 320.0)
    assert len(one.plan.buckets) == 1
    kept, cut = (plan_crossing(one, said, SECOND_A_BYTE, cuts=cuts).plan for cuts in (False, True))
    assert (len(kept.buckets), len(cut.buckets)) == (2, 9)
    assert sorted(index for bucket in members(cut) for index in bucket) == [*range(9)]


def test_who_waits_for_whom_by_hand():
    """Read at 100, 110 and 140 s; there at 120, 160 and 164 s: after the first wait of 20 s the others shift by it."""
    jobs = [
        Job(bucket_of([gradient(index, 4)]), ready_s, needed_s, seconds)
        for index, (ready_s, needed_s, seconds) in enumerate(
            [(80.0, 100.0, 40.0), (90.0, 110.0, 40.0), (0.0, 140.0, 4.0)]
        )
    ]
    found = [(each.start_s, each.finish_s, each.needed_s, each.waited_s) for each in arrivals(jobs)]
    assert found == [(80.0, 120.0, 100.0, 20.0), (120.0, 160.0, 130.0, 30.0), (160.0, 164.0, 190.0, 0.0)]


@given(data=st.data(), lanes=st.integers(1, 2))
def test_waits_add_up_to_the_step(data, lanes):
    """`step_seconds` goes by the latest of all, `arrivals` by what each wait adds."""
    sizes = data.draw(st.lists(st.integers(1, 15).map(lambda each: 4 * each), min_size=1, max_size=6))
    shares = data.draw(st.lists(st.floats(0.05, 1.0), min_size=len(sizes), max_size=len(sizes)))
    jobs, backward_s = jobs_with(sizes, shares, float(sum(sizes))), float(sum(sizes))
    waited_s = sum(each.waited_s for each in arrivals(jobs, lanes=lanes))
    assert backward_s * 1.5 + waited_s == pytest.approx(step_seconds(jobs, backward_s, lanes=lanes))


def test_what_a_plan_for_two_halves_promises():
    """The bound is all compute, 150 s, or all communication."""
    said = times([0.25, 0.5, 0.75, 1.0], 100.0)
    for nbytes, bound_s in ((4, 150.0), (40, 160.004)):
        one = planned([nbytes] * 4)
        ready = [ReadyGradient(nbytes, 25.0 * each, KEY) for each in range(1, 5)]
        before = certify(ready, ((0,), (1,), (2,), (3,)), cost=SECOND_A_BYTE, backward_s=100.0)
        promise = plan_crossing(one._replace(certificate=before), said, SECOND_A_BYTE, cuts=False).certificate
        assert promise.bound_s == pytest.approx(bound_s, rel=1e-3)
        assert 1.0 <= promise.ratio <= promise.worst_ratio
    assert plan_crossing(planned([4]), said, SECOND_A_BYTE, cuts=False).certificate is None


SIZES = st.lists(st.integers(1, 15).map(lambda each: 4 * each), min_size=1, max_size=6)


@given(sizes=SIZES, share=st.sampled_from([0.3, 1.0, 3.0]), data=st.data())
def test_close_to_the_best_of_all_orders(sizes, share, data):
    """Earliest deadline first is the best order if a job can be interrupted; else it loses at most one job."""
    shares = sorted(data.draw(st.lists(st.floats(0.05, 1.0), min_size=len(sizes), max_size=len(sizes))))
    backward_s = sum(sizes) * share
    jobs = jobs_with(sizes, shares, backward_s)
    best = min(step_seconds(order, backward_s) for order in itertools.permutations(jobs))
    found = step_seconds(in_order_of_need(jobs), backward_s)
    assert best - 1e-9 <= found <= best + max(sizes) + 1e-9


@given(sizes=SIZES, data=st.data())
def test_what_is_chosen_is_never_worse_than_what_was_given(sizes, data):
    shares = sorted(data.draw(st.lists(st.floats(0.05, 1.0), min_size=len(sizes), max_size=len(sizes))))
    backward_s = float(sum(sizes))
    said, before = times(shares, backward_s), planned(sizes)
    plan = plan_crossing(before, said, SECOND_A_BYTE, cuts=True).plan
    now, then = (
        sum(ratios(crossing.jobs_of(buckets, said, SECOND_A_BYTE, backward_s), backward_s))
        for buckets in (plan.buckets[1:], [bucket_of([each]) for each in before.plan.gradients[:-1]])
    )
    assert now <= then + 1e-9
