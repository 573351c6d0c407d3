"""Steps made from numbers alone: any count of buckets, with and without measured times."""

from __future__ import annotations

import random
from dataclasses import replace

from graphs import bucket_key

from dp_compile.insight.step import MeasuredBucket, MeasuredStep, Step, planned_buckets
from dp_compile.plan.backends import NCCL
from dp_compile.plan.buckets import Bucket, BucketKey, BucketPlan, GradientSpec, Layout
from dp_compile.plan.cost import AllReduceCost, nominal_cost
from dp_compile.plan.ready_times import MEASURED, ReadyTimes
from dp_compile.plan.reduction import Averaging, Levels

LAYOUT = Layout(64)
PARTS = ("attention.qkv.weight", "attention.qkv.bias", "attention.out.weight", "mlp.expand.weight", "mlp.shrink.weight")


def gradient(index: int, key: BucketKey, name: str | None = None, rows: int = 1024) -> GradientSpec:
    """A gradient of `rows` x 256 float32, named like those of a transformer unless a name is given."""
    layer, part = divmod(index, len(PARTS))
    return GradientSpec(index, name or f"blocks.{layer}.{PARTS[part]}", (rows, 256), (256, 1), 4, key)


def step_of_buckets(n_buckets: int, *, measured: bool = False, backward_s: float = 0.05) -> Step:
    """A backward whose communication takes a quarter longer than its compute, in buckets of varied sizes."""
    shuffled = random.Random(n_buckets)
    key, per_bucket = bucket_key("", "sum", "float32", "cuda"), 4
    total = n_buckets * per_bucket
    buckets: list[Bucket] = []
    for number in range(n_buckets):
        indices = range(total - 1 - number * per_bucket, total - 1 - (number + 1) * per_bucket, -1)
        members = [gradient(index, key, rows=shuffled.choice((64, 256, 1024, 2048))) for index in indices]
        buckets.append(LAYOUT.bucket(key, members, "the predicted end is earliest so"))
    plan = BucketPlan(tuple(buckets))
    shares = {index: (total - index) / total for index in range(total)}
    cost = AllReduceCost(0.2 * backward_s / n_buckets, 1.05 * backward_s / plan.nbytes)
    ready = ReadyTimes(shares, backward_s, MEASURED)
    step = Step("python hooks", "optimal", 8, NCCL, "cuda", plan, ready, cost, "measured on this group")
    return measured_like(step) if measured else step


def two_level_step(n_buckets: int) -> Step:
    """The same on four nodes of eight ranks, with nominal links; 10 ms of compute."""
    step = step_of_buckets(n_buckets, backward_s=0.01)
    levels = Levels("", "", tuple(tuple(range(8 * node, 8 * node + 8)) for node in range(4)))
    reduction = Averaging().reduction("", NCCL, 32, "float32", levels)
    gradients = [replace(each, key=each.key._replace(reduction=reduction)) for each in step.plan.gradients]
    plan = step.plan.with_keys_of(gradients)
    return replace(step, plan=plan, cost=nominal_cost(NCCL, 32, 8), world_size=32)


def measured_like(step: Step) -> Step:
    """The same step with measured times: as predicted, but a tenth slower."""
    buckets, free_s = [], 0.0
    for each in planned_buckets(step):
        finish_s = max(each.finish_s * 1.1, free_s)
        waited_s = max(0.0, finish_s - max(free_s, step.backward_s * 1.02, each.start_s * 1.1))
        buckets.append(MeasuredBucket(each.ready_s * 1.02, finish_s, waited_s))
        free_s = finish_s
    measured = MeasuredStep(max(free_s, step.backward_s * 1.02), tuple(buckets), "torch.profiler trace", 0, 0.02, 0.004)
    return Step(**{name: getattr(step, name) for name in Step.__slots__} | {"measured": measured})
