"""What a comm hook is taken to send: what it hands out, not the bucket."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from steps import step_of_buckets

import dp_compile
from dp_compile._torch import distributed
from dp_compile.comm_hooks.functional import HookBucket, HookRun, Reduced, register
from dp_compile.engine.gradients import gradient_specs
from dp_compile.engine.group import Group
from dp_compile.insight.predict import predict
from dp_compile.insight.step import Step
from dp_compile.plan.backends import GLOO
from dp_compile.plan.buckets import PACKED, BucketPlan
from dp_compile.plan.reduction import Averaging

SHAPES = [(64, 32), (7,), (16, 4, 3, 3)]


pytestmark = pytest.mark.usefixtures("fake_group")


@dataclass(frozen=True)
class Twice(dp_compile.FunctionalHook):
    """The average in bfloat16, then what that lost of each first row."""

    rounds: ClassVar[tuple[str, ...]] = ("all_reduce", "all_reduce")

    def reduce(self, bucket: HookBucket) -> Generator[torch.Tensor, torch.Tensor, Reduced]:
        yield torch.cat([each.flatten() for each in bucket.gradients]).bfloat16()
        yield torch.cat([each[0].flatten() for each in bucket.gradients])
        return bucket.gradients, bucket.state


KEY, _HOOK = register(Twice())


def test_a_bucket_sends_what_its_hook_hands_out() -> None:
    """As where it reduces real tensors; predictions count that, and step files keep it."""
    world = dist.group.WORLD
    assert world is not None
    group = Group(world, distributed.group_name(world), GLOO, 2, Averaging(hook=KEY, rounds=Twice.rounds))
    parameters = [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    *gradients, flags = gradient_specs(parameters, [f"p{number}" for number in range(len(SHAPES))], group)
    assert [each.sent for each in gradients] == [(16 * 36 * 2, 36 * 4), (7 * 2, 4), (64 * 32 * 2, 32 * 4)]
    sent = [sum(each) for each in zip(*(each.sent for each in gradients), strict=True)]
    run = HookRun(KEY, HookBucket([torch.randn(shape) for shape in SHAPES], [{}] * len(SHAPES), 2, 0))
    (first,) = run.step([])
    (second,) = run.step([first])
    assert [first.nbytes, second.nbytes] == sent

    buckets = PACKED.bucket(gradients), PACKED.bucket([flags])
    base = step_of_buckets(1)
    step = Step("python hooks", "fixed", 4, GLOO, "cpu", BucketPlan(buckets), base.ready, base.cost, "stated")
    expected = sum(step.cost.seconds(nbytes) for nbytes in (*sent, flags.nbytes))
    assert step.communication_s == pytest.approx(expected, rel=1e-9)
    assert Step.from_json(step.to_json()).communication_s == predict(step).communication_s == step.communication_s
    # In the place of the hook: all bytes, in one round.
    plain = predict(step, dtype="float32")
    assert plain.step.plan.gradients[0].key.reduction.hook is None
    assert plain.communication_s == pytest.approx(sum(step.cost.seconds(each.nbytes) for each in buckets), rel=1e-9)
