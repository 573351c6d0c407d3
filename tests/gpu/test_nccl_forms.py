"""The forms of reductions that are made for NCCL, on CPUs: every feature with torch's, on a stand-in for NCCL."""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import nccl_stand_in
import pytest
import torch
import torch.distributed as dist
from features import CAPTURED, FEATURES, Difference, Feature, Net, Place, Verdict, run_feature
from meshes import keep_groups
from torch import nn

import dp_compile
from dp_compile.plan.backends import GLOO, NCCL
from dp_compile.plan.crossing import plan_crossing
from dp_compile.plan.reduction import Averaging, Levels
from dp_compile.replication.module import replica_of
from dp_compile.testing.ranks import Ranks

BY_NAME = {feature.name: feature for feature in FEATURES}
INT8 = "QuantizedHook int8, error feedback"


@pytest.fixture(scope="module")
def stand_in() -> Iterator[Ranks]:
    """Two ranks whose default group is to be a stand-in for NCCL."""
    ranks = Ranks(2, "forkserver")
    yield ranks
    ranks.stop()


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    ranks = Ranks(4, "forkserver")
    yield ranks
    ranks.stop()


# --- every feature ------------------------------------------------------------------------------------------------

BY_DAY = {
    *("bucket_cap_mb", "bf16 on the wire", INT8),
    *("shard=True", "shard=True, clipped, scaled, inf on one rank", "shard=True, overlap_forward=True"),
}
"""Captured; what is eager costs little and is run for all."""
AVERAGED, SCATTERED = {"all_reduce avg"}, {"reduce_scatter avg", "all_gather"}
FORMS: dict[str, set[str]] = {
    **dict.fromkeys(("default", "bucket_cap_mb", "convolutions", "bf16 on the wire", "in_backward"), AVERAGED),
    **dict.fromkeys(("param_dtype bf16, as FSDP2", "overlap_forward=True"), AVERAGED),
    INT8: {"all_to_all", "all_gather"},
    **dict.fromkeys(("shard=True", "shard=True, as ZeroRedundancyOptimizer"), SCATTERED),
    **dict.fromkeys(("shard=True, bf16 on the wire", "shard=True, overlap_forward=True"), SCATTERED),
    "two levels of network, 2 x 2": AVERAGED | SCATTERED,
    "two levels of network, bf16 on the wire": AVERAGED | SCATTERED,
}
"""What has to be launched; torch's DDP in the same run launches `all_reduce sum` and broadcasts."""


def run_one(name: str, captured: bool) -> tuple[Verdict, Counter[str]]:
    keep_groups()
    nccl_stand_in.use()
    before = Counter(nccl_stand_in.launched)
    verdict = run_feature(BY_NAME[name], "cpu", captured=captured, within_s=180.0)  # on cores that are shared
    return verdict, nccl_stand_in.launched - before


def check(ranks: Ranks, name: str, way: str) -> None:
    for verdict, launched in ranks.run(run_one, name, way == CAPTURED):
        assert verdict.passed, verdict
        assert FORMS.get(name, set()) <= set(launched), launched
        assert name == INT8 or "all_to_all" not in launched, "a reduce-scatter in two steps, as for gloo"


def cases(ranks: int) -> Iterator[Any]:
    for feature in (each for each in FEATURES if ranks in each.ranks):
        for way in feature.ways:
            by_night = ranks == 4 or (way == CAPTURED and feature.name not in BY_DAY)
            needs = pytest.mark.skipif(bool(feature.needs), reason=f"needs {feature.needs}")
            marks = (needs, pytest.mark.nightly) if by_night else (needs,)
            yield pytest.param(feature.name, way, marks=marks, id=f"{feature.name}-{way}")


@pytest.mark.parametrize(("name", "way"), list(cases(2)))
def test_as_torch(stand_in: Ranks, name: str, way: str) -> None:
    check(stand_in, name, way)


@pytest.mark.parametrize(("name", "way"), list(cases(4)))
def test_as_torch_on_four_ranks(four: Ranks, name: str, way: str) -> None:
    check(four, name, way)


@pytest.mark.parametrize("way", ["captured", "eager"])
def test_two_levels_by_day(four: Ranks, way: str) -> None:
    check(four, "two levels of network, 2 x 2", way)


# --- by any name --------------------------------------------------------------------------------------------------


def plan_by(name: str, default: bool) -> tuple[list[Any], dict[str, Any], list[str], str]:
    """The stages of each bucket, the plan, what a backward launches, and what torch calls the backend."""
    nccl_stand_in.use(name, default=default)
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Net()
    dp_compile.replicate(model, config=dp_compile.ReplicateConfig(backend="aot_eager"))
    before = Counter(nccl_stand_in.launched)
    torch.compile(model, backend="aot_eager")(torch.randn(3, 16)).square().mean().backward()
    plan = replica_of(model).plan
    stages = [bucket.key.reduction.without_groups().to_dict() for bucket in plan.buckets]
    dp_compile.unreplicate(model)
    return stages, plan.to_dict(), sorted(nccl_stand_in.launched - before), dist.get_backend()


def test_one_plan_by_any_name(stand_in: Ranks) -> None:
    """Nothing decides by a name: not that of torch 2.14 and later, nor `undefined`, nor that of another device."""
    names = [("stand-in", False), ("nccl2", False), ("nccl-lazy", False), ("nccl-lazy", True)]
    found = [stand_in.run(plan_by, *each) for each in [*names, ("cpu:nccl2,cuda:gloo", False)]]
    first, *others = (each[0] for each in found)
    assert {stage["reduce_op"] for each in first[0] for stage in each["stages"]} == {"avg"}
    assert [launched for launched in first[2] if launched.startswith("all_reduce avg")]
    assert all(other[:3] == first[:3] for other in others)
    assert found[3][0][3] == "undefined"
    assert first[1]["buckets"]


def test_one_rank_asks_for_no_average() -> None:
    """NCCL may return anything for AVG over one rank; FSDP2 avoids it."""
    for averaging in (Averaging(), Averaging(scattered=True)):
        alone = averaging.reduction("0", NCCL, 1, "float32")
        assert (alone.reduce_op, alone.scale * alone.post_scale) == ("sum", 1.0)
        assert averaging.reduction("0", NCCL, 2, "float32").reduce_op == "avg"
        assert averaging.reduction("0", GLOO, 2, "float32").reduce_op == "sum"
    stages = Averaging().reduction("0", NCCL, 4, "float32", Levels("inside", "between", ((0, 1), (2, 3)))).stages
    assert [stage.reduce_op for stage in stages] == ["avg", "avg", ""]


def lanes(backend: str) -> int:
    """How many collectives at a time updates that are left for the next forward are planned for."""
    if backend != "gloo":
        nccl_stand_in.use(backend)
    model = nn.Linear(64, 64)
    dp_compile.replicate(model, config=dp_compile.ReplicateConfig(backend="aot_eager"))
    crossing = sys.modules["dp_compile.optim.in_backward"]
    with mock.patch.object(crossing, "plan_crossing", wraps=plan_crossing) as planner:
        dp_compile.optim.in_backward(model, torch.optim.SGD(model.parameters()), overlap_forward=True)
    dp_compile.unreplicate(model)
    return planner.call_args.kwargs["lanes"]


def test_lanes_of_a_backend(stand_in: Ranks, ranks2: Ranks) -> None:
    """gloo carries two collectives of a group at a time; NCCL one."""
    assert ranks2.run(lanes, "gloo") == [2, 2]
    assert stand_in.run(lanes, "stand-in") == [1, 1]


# --- the table itself ---------------------------------------------------------------------------------------------


def fails(place: Place) -> Difference:
    dist.all_reduce(torch.ones(1))
    raise ValueError(f"on purpose, rank {dist.get_rank()}")


def differs(place: Place) -> Difference:
    return Difference(0.5, 0.1, "layers.0.weight" if dist.get_rank() == 1 else "")


def after_a_failure() -> tuple[list[Verdict], str]:
    nccl_stand_in.use()
    runs = [Feature("fails", fails), Feature("differs", differs), BY_NAME["bucket_cap_mb"]]
    verdicts = [run_feature(each, "cpu", captured=False) for each in runs]
    if dist.get_rank() == 0:  # has been held up
        return verdicts, ""
    with pytest.raises(RuntimeError) as raised:
        run_feature(Feature("differs", differs), "cpu", captured=False, within_s=1.0)
    return verdicts, str(raised.value)


def test_one_failure_does_not_stop_the_others() -> None:
    """Ranks agree about each, and the next feature is right. If one never ends the process has to end."""
    ranks = Ranks(2, "forkserver")
    try:
        (first, _), (second, ended) = ranks.run(after_a_failure)
    finally:
        ranks.stop()
    for one, other in zip(first, second, strict=True):
        assert dataclasses.replace(one, seconds=0.0) == dataclasses.replace(other, seconds=0.0)
    failed, different, right = first
    assert [each.passed for each in first] == [False, False, True], first
    assert all(f"rank {rank}: ValueError: on purpose, rank {rank}" in failed.detail for rank in (0, 1))
    assert different.detail == "rank 1: layers.0.weight differs, the largest difference is 0.5, allowed is 0.1"
    assert right.detail == "equal bits"
    assert "rank 0 has not ended 'differs', eager. This rank: layers.0.weight differs" in ended
