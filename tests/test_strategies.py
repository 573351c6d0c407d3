"""Where buckets end: by policy, by cost, by file. And what contradicts itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from ranks import Ranks
from torch import nn

import dp_compile
from dp_compile.calibration import calibrate
from dp_compile.cost_model import AllReduceCost, CostFit
from dp_compile.plan import UNUSED_FLAGS, BucketPlan
from dp_compile.strategies import plan_to_json

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


# --- per module -------------------------------------------------------------------------------------------------


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
    assert plan.buckets[1].reason == "end of blocks.2"
    assert plan.buckets[0].reason == "end of the outermost module"


def test_a_function_is_a_policy() -> None:
    plan = plan_of(bucket_policy=lambda name, module: name == "blocks.1" or isinstance(module, nn.Embedding))
    assert [bucket.reason for bucket in plan.buckets] == [
        "end of the outermost module",
        "end of blocks.1",
        "end of the outermost module",
        "end of embed",
    ]


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (lambda name, module: None, "must return True or False, returned None for ''"),
        ({int}, "must be a function or a set of module classes"),
        (set(), "must be a function or a set of module classes"),
    ],
)
def test_a_policy_that_is_none(policy: Any, message: str) -> None:
    with pytest.raises(dp_compile.ConfigError, match=message):
        plan_of(bucket_policy=policy)


# --- optimal ----------------------------------------------------------------------------------------------------


def test_optimal_is_the_default_and_makes_a_promise() -> None:
    cost = AllReduceCost(1e-6, 1e-9)
    model = dp_compile.replicate(Model(), config=dp_compile.ReplicateConfig(cost=cost))
    report = dp_compile.report(model)
    assert len(report.plan.buckets) > 1
    assert sorted(name for bucket in names(report.plan) for name in bucket) == sorted(
        [UNUSED_FLAGS, *(name for name, _ in model.named_parameters())]
    )
    assert "bound" in report.promise
    assert report.promise in str(report)


def test_a_network_with_high_latency_gets_fewer_buckets() -> None:
    def buckets(alpha_s: float) -> int:
        return len(plan_of(config=dp_compile.ReplicateConfig(cost=AllReduceCost(alpha_s, 1e-9))).buckets)

    counts = [buckets(alpha_s) for alpha_s in (1e-9, 1e-6, 1e-5, 1e-4, 1.0)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[2] > counts[-1] == 1


# --- explicit ---------------------------------------------------------------------------------------------------


def test_a_saved_plan_is_used_as_it_is(tmp_path: Path) -> None:
    made = plan_of(bucket_policy={Block})
    file = tmp_path / "plan.json"
    file.write_text(plan_to_json(made))
    for plan in (file, str(file), made):
        assert names(plan_of(plan=plan)) == names(made)


def edited(change: Any) -> str:
    data = json.loads(plan_to_json(plan_of(bucket_policy={Block})))
    change(data)
    return json.dumps(data)


def rename(data: Any) -> None:
    data["buckets"][0]["members"][0]["gradient"]["name"] = "tail.bias"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (lambda: edited(rename), "does not have: tail.bias"),
        (lambda: edited(lambda data: data["buckets"].pop(0)), "misses: head.bias, head.weight"),
        (lambda: edited(lambda data: data["buckets"].append(data["buckets"][0])), "more than once: head.bias"),
        (lambda: edited(lambda data: data.update(version=99)), "version 99, readable is 1"),
        (lambda: edited(lambda data: data["buckets"].append({"members": []})), "bucket 5 of the plan file is empty"),
        (lambda: "{}", "not a plan file"),
        (lambda: "no json", "not a plan file"),
    ],
)
def test_a_plan_file_that_does_not_fit(tmp_path: Path, text: Any, message: str) -> None:
    file = tmp_path / "plan.json"
    file.write_text(text())
    with pytest.raises(dp_compile.ConfigError, match=message):
        plan_of(plan=file)


def test_a_plan_file_that_mixes_keys(tmp_path: Path) -> None:
    model = Model()
    model.head.bfloat16()
    made = dp_compile.report(dp_compile.replicate(model)).plan
    data = made.to_dict()
    data["buckets"] = [{"members": [member for bucket in data["buckets"] for member in bucket["members"]]}]
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(data))
    other = Model()
    other.head.bfloat16()
    with pytest.raises(dp_compile.ConfigError, match="mixes keys in bucket 0"):
        dp_compile.replicate(other, plan=file)


def test_a_plan_file_that_is_not_there() -> None:
    with pytest.raises(dp_compile.ConfigError, match=r"path of a plan file, got 'nowhere\.json'"):
        plan_of(plan="nowhere.json")


# --- contradictions ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bucket_cap_mb": 1, "bucket_policy": {Block}}, "bucket_policy belongs to strategy 'per_module'"),
        ({"config": dp_compile.ReplicateConfig(strategy="optimal"), "bucket_cap_mb": 1}, "belongs to strategy 'fixed'"),
        ({"config": dp_compile.ReplicateConfig(strategy="explicit")}, "strategy 'explicit' needs plan"),
        ({"config": dp_compile.ReplicateConfig(strategy="per_module")}, "strategy 'per_module' needs bucket_policy"),
    ],
)
def test_options_of_two_strategies(options: dict[str, Any], message: str) -> None:
    with pytest.raises(dp_compile.ConfigError, match=message):
        plan_of(**options)


def test_unknown_strategy_and_cost() -> None:
    with pytest.raises(
        dp_compile.ConfigError, match="strategy must be one of fixed, per_module, optimal, coalesced, explicit"
    ):
        dp_compile.ReplicateConfig(strategy="best")
    with pytest.raises(dp_compile.ConfigError, match="cost must be an AllReduceCost, got float"):
        dp_compile.ReplicateConfig(cost=1.0)  # type: ignore[arg-type]


# --- calibration ------------------------------------------------------------------------------------------------


def calibrate_here() -> tuple[str, str]:
    fitted = calibrate()
    try:
        calibrate(dist.new_group([dist.get_rank()], use_local_synchronization=True))
    except dp_compile.ConfigError as error:
        return fitted.to_json(), str(error)
    return fitted.to_json(), "no error"


def test_all_ranks_calibrate_to_the_same_cost(ranks2: Ranks) -> None:
    (first, alone), (second, _) = ranks2.run(calibrate_here)
    assert first == second
    assert "at least 2 ranks" in alone
    fitted = CostFit.from_json(first)
    assert fitted.cost.beta_s_per_byte > 0
    assert fitted.largest_nbytes == 2**24
