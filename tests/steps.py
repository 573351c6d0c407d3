"""Steps made from numbers alone: any count of buckets, with and without measured times."""

import random
from dataclasses import replace

from graphs import bucket_key

from dp_compile.insight.step import MeasuredBucket, MeasuredStep, Step, planned_buckets
from dp_compile.plan.backends import NCCL
from dp_compile.plan.buckets import BucketPlan, GradientSpec, bucket_of
from dp_compile.plan.cost import AllReduceCost, nominal_cost
from dp_compile.plan.planner import ReadyTimes
from dp_compile.plan.reduction import Averaging, Levels


def step_of_buckets(n_buckets, *, backward_s=0.05):
    """A backward whose communication takes a quarter longer than its compute, in buckets of four varied gradients."""
    shuffled, key, total = random.Random(n_buckets), bucket_key("", "sum", "float32", "cuda"), 4 * n_buckets
    gradients = [
        GradientSpec(index, f"blocks.{index // 4}.part_{index % 4}", (rows, 256), (256, 1), 4, key)
        for index in reversed(range(total))
        for rows in [shuffled.choice((64, 256, 1024, 2048))]
    ]
    parts = [gradients[at : at + 4] for at in range(0, total, 4)]
    plan = BucketPlan(tuple(map(bucket_of, parts)))
    cost = AllReduceCost(0.2 * backward_s / n_buckets, 1.05 * backward_s / plan.nbytes)
    ready = ReadyTimes({index: (total - index) / total for index in range(total)}, backward_s, "measured")
    return Step("dp_compile", "optimal", 8, NCCL, "cuda", plan, ready, cost, "measured on this group")


def two_level_step(n_buckets):
    """The same on four nodes of eight ranks, with nominal links; 10 ms of compute."""
    step = step_of_buckets(n_buckets, backward_s=0.01)
    levels = Levels("", "", tuple(tuple(range(8 * node, 8 * node + 8)) for node in range(4)))
    reduction = Averaging().reduction("", NCCL, 32, "float32", levels)
    gradients = [replace(each, key=each.key._replace(reduction=reduction)) for each in step.plan.gradients]
    plan = step.plan.with_keys_of(gradients)
    return replace(step, plan=plan, cost=nominal_cost(NCCL, 32, 8), world_size=32)


def measured_like(step):
    """The same step with measured times: as predicted, but a tenth slower."""
    buckets, free_s = [], 0.0
    for each in planned_buckets(step):
        finish_s = max(each.finish_s * 1.1, free_s)
        waited_s = max(0.0, finish_s - max(free_s, step.backward_s * 1.02, each.start_s * 1.1))
        launch_s = each.ready_s * 1.02
        buckets.append(MeasuredBucket(launch_s, finish_s, waited_s, max(launch_s, free_s), finish_s - waited_s))
        free_s = finish_s
    measured = MeasuredStep(max(free_s, step.backward_s * 1.02), tuple(buckets), "torch.profiler trace", 0, 0.02, 0.004)
    return replace(step, measured=measured)
