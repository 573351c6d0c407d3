"""Where buckets end: by policy, by cost, by size. And what contradicts itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

import dp_compile
from dp_compile.config import ReplicateConfig
from dp_compile.engine.calibration import calibrate
from dp_compile.plan.buckets import UNUSED_FLAGS, BucketPlan
from dp_compile.plan.cost import AllReduceCost, CostFit
from dp_compile.testing.ranks import Ranks

pytestmark = pytest.mark.usefixtures("fake_group")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)


class Model(nn.Module):
    def __init__(self, width: int = 16, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, 50)


def names(plan: BucketPlan) -> list[list[str]]:
    return [[member.gradient.name for member in bucket.members] for bucket in plan.buckets]


def plan_of(**options: Any) -> BucketPlan:
    return dp_compile.report(dp_compile.replicate(Model(), **options)).plan


def test_a_set_of_classes_is_a_policy() -> None:
    plan = plan_of(bucket_policy={Block})
    assert [bucket[0].rpartition(".")[0] for bucket in names(plan)] == [
        "head",
        "blocks.2.down",
        "blocks.1.down",
        "blocks.0.down",
        "embed",
    ]
    assert names(plan)[-1] == ["embed.weight", UNUSED_FLAGS]


def test_optimal_is_the_default_and_makes_a_promise() -> None:
    cost = AllReduceCost(1e-6, 1e-9)
    model = dp_compile.replicate(Model(), config=ReplicateConfig(cost=cost))
    report = dp_compile.report(model)
    assert len(report.plan.buckets) > 1
    assert {name for each in names(report.plan) for name in each} == {UNUSED_FLAGS, *dict(model.named_parameters())}
    assert "the best any plan could do" in report.promise
    assert " ms" not in report.promise
    assert " ".join(report.promise.split()) in " ".join(str(report).split())
    assert max(map(len, str(report).splitlines())) <= 80


def test_options_of_two_rules() -> None:
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        (
            {"bucket_policy": {Block}, "config": ReplicateConfig(cost=AllReduceCost(1e-3, 1e-9))},
            "bucket_policy and cost",
        ),
    )
    for options, message in wrong:
        with pytest.raises(dp_compile.ConfigError, match=f"{message} exclude each other"):
            plan_of(**options)


def calibrate_here() -> tuple[CostFit, str]:
    fitted = calibrate()
    try:
        calibrate(dist.new_group([dist.get_rank()], use_local_synchronization=True))
    except dp_compile.ConfigError as error:
        return fitted, str(error)
    return fitted, "no error"


def test_all_ranks_calibrate_to_the_same_cost(ranks: Ranks) -> None:
    (first, alone), (second, _), *_ = ranks.run(calibrate_here)
    assert first == second
    assert "at least 2 ranks" in alone
    assert first.cost.beta_s_per_byte > 0
