"""What a comm hook is taken to send: what it hands out, not the bucket."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from steps import step_of_buckets

import dp_compile
from dp_compile._torch import distributed
from dp_compile.engine.gradients import gradient_specs
from dp_compile.engine.group import Group
from dp_compile.engine.power_sgd import PowerSGD
from dp_compile.insight.predict import predict
from dp_compile.insight.step import Step
from dp_compile.passes.functional_hook import HookBucket, HookRun, Reduced, register, sent_nbytes
from dp_compile.plan.backends import GLOO
from dp_compile.plan.buckets import PACKED, BucketPlan
from dp_compile.plan.reduction import ALL_REDUCE, Averaging

KEY, POWER_SGD = register(PowerSGD(2, 2.0, True, 0.0, True))
SHAPES = [(64, 32), (7,), (64, 32), (16, 4, 3, 3)]


pytestmark = pytest.mark.usefixtures("fake_group")


def specs(key: str, rounds: int) -> list[dp_compile.GradientSpec]:
    averaging = Averaging(hook=key, rounds=(ALL_REDUCE,) * rounds)
    world = dist.group.WORLD
    assert world is not None
    group = Group(world, distributed.group_name(world), GLOO, 2, averaging)
    parameters = [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    return list(gradient_specs(parameters, [f"p{number}" for number in range(len(SHAPES))], group))


def test_power_sgd_sends_its_thin_matrices() -> None:
    """By hand: rank 2, so rows * 2 numbers first, columns * 2 then; a vector goes whole, in the first round."""
    assert [each.sent for each in specs(KEY, 2)[:-1]] == [
        (16 * 2 * 4, 36 * 2 * 4),
        (64 * 2 * 4, 32 * 2 * 4),
        (7 * 4, 0),
        (64 * 2 * 4, 32 * 2 * 4),
    ]


def test_a_bucket_sends_what_its_gradients_do() -> None:
    """As the hook hands it out where it reduces, with real tensors."""
    gradients = [torch.randn(shape) for shape in SHAPES]
    run = HookRun(KEY, HookBucket(gradients, [POWER_SGD.initial_state(each) for each in gradients], 2, 0))
    (first,) = run.step([])
    (second,) = run.step([first])
    sent = [each.sent for each in specs(KEY, 2)[:-1]]
    assert (first.nbytes, second.nbytes) == tuple(map(sum, zip(*sent, strict=True)))


@dataclass(frozen=True)
class Looking(dp_compile.FunctionalHook):
    """Hands out what depends on values, which nobody may."""

    def reduce(self, bucket: HookBucket) -> Generator[torch.Tensor, torch.Tensor, Reduced]:
        first = bucket.gradients[0]
        total = yield first if float(first.flatten()[0]) > 0 else first[:1]
        return [total], [{}]


def test_of_a_hook_that_needs_values_nothing_is_known() -> None:
    key, _hook = register(Looking())
    assert [each.sent for each in specs(key, 1)] == [()] * 5
    reduction = specs(key, 1)[0].key.reduction
    assert sent_nbytes(reduction, (4, 4), torch.float32) == ()
    assert [load.nbytes for load in reduction.loads(64)] == [64]


def test_predictions_count_what_is_handed_out_and_step_files_keep_it() -> None:
    gradients = specs(KEY, 2)
    hooked, flags = (
        PACKED.bucket(gradients[0].key, gradients[:-1], ""),
        PACKED.bucket(gradients[-1].key, gradients[-1:], ""),
    )
    base = step_of_buckets(1)
    step = Step("python hooks", "fixed", 4, GLOO, "cpu", BucketPlan((hooked, flags)), base.ready, base.cost, "stated")
    sent = [sum(each) for each in zip(*(each.sent for each in gradients[:-1]), strict=True)]
    expected = sum(step.cost.seconds(nbytes) for nbytes in (*sent, flags.nbytes))
    assert step.communication_s == pytest.approx(expected, rel=1e-9)
    assert predict(step).communication_s == step.communication_s
    again = Step.from_json(step.to_json())
    assert again.communication_s == step.communication_s
    assert again.plan.to_dict() == step.plan.to_dict()
    # In the place of the hook: all bytes, in one round.
    plain = predict(step, dtype="float32")
    assert plain.step.plan.gradients[0].key.reduction.hook is None
    assert plain.communication_s == pytest.approx(
        sum(step.cost.seconds(each.nbytes) for each in (hooked, flags)), rel=1e-9
    )
