"""The forms of reductions that are made for NCCL, on CPUs: every feature with torch's, on a stand-in for NCCL."""

import sys
from collections import Counter
from unittest import mock

import nccl_stand_in
import pytest
import torch
import torch.distributed as dist
from features import CAPTURED, EAGER, FEATURES, Net, run_feature
from meshes import keep_groups
from torch import nn

import dp_compile
from dp_compile.plan.backends import GLOO, NCCL
from dp_compile.plan.crossing import plan_crossing
from dp_compile.plan.reduction import Averaging, Levels
from dp_compile.replication.module import replica_of
from dp_compile.testing.ranks import Ranks

INT8 = "QuantizedHook int8, error feedback"
AVERAGED, SCATTERED = {"all_reduce avg"}, {"reduce_scatter avg", "all_gather"}
FORMS = {
    **dict.fromkeys(("default", "bucket_cap_mb", "convolutions", "bf16 on the wire", "in_backward"), AVERAGED),
    **dict.fromkeys(("param_dtype bf16, as FSDP2", "overlap_forward=True"), AVERAGED),
    INT8: {"all_to_all", "all_gather"},
    **dict.fromkeys(("shard=True", "shard=True, as ZeroRedundancyOptimizer"), SCATTERED),
    **dict.fromkeys(("shard=True, bf16 on the wire", "shard=True, overlap_forward=True"), SCATTERED),
    "two levels of network, 2 x 2": AVERAGED | SCATTERED,
    "two levels of network, bf16 on the wire": AVERAGED | SCATTERED,
}
"""What has to be launched; torch's DDP in the same run launches `all_reduce sum` and broadcasts."""
BY_DAY = {CAPTURED: {"bucket_cap_mb", "shard=True"}, EAGER: {*FORMS, "torch's powerSGD_hook"}}


@pytest.fixture(scope="module")
def pools():
    """Two and four ranks, whose default group is to be a stand-in for NCCL."""
    with Ranks(2, "forkserver") as two, Ranks(4, "forkserver") as four:
        yield {2: two, 4: four}


def run_one(name, way):
    keep_groups()
    nccl_stand_in.use()
    before = Counter(nccl_stand_in.launched)
    difference = run_feature(FEATURES[name], torch.device("cpu"), way)
    return difference, nccl_stand_in.launched - before


def check(ranks, name, way):
    for difference, launched in ranks.run(run_one, name, way):
        assert not difference.name, str(difference)
        assert FORMS.get(name, set()) <= set(launched), launched
        assert name == INT8 or "all_to_all" not in launched, "a reduce-scatter in two steps, as for gloo"


def cases(ranks):
    for name, feature in FEATURES.items():
        for way in feature.ways if ranks in feature.ranks else ():
            by_night = ranks == 4 or name not in BY_DAY[way]
            needs = pytest.mark.skipif(bool(feature.needs), reason=f"needs {feature.needs}")
            yield pytest.param(name, way, marks=[needs, pytest.mark.nightly][: 1 + by_night], id=f"{name}-{way}")


@pytest.mark.parametrize(("name", "way"), list(cases(2)))
def test_as_torch(pools, name, way):
    check(pools[2], name, way)


@pytest.mark.parametrize(("name", "way"), list(cases(4)))
def test_as_torch_on_four_ranks(pools, name, way):
    check(pools[4], name, way)


@pytest.mark.parametrize("way", [CAPTURED, EAGER])
def test_two_levels_by_day(pools, way):
    check(pools[4], "two levels of network, 2 x 2", way)


def plan_by(name, default):
    """The stages of each bucket, the plan, what a backward launches, and what torch calls the backend."""
    nccl_stand_in.use(name, default=default)
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Net()
    dp_compile.replicate(model, config=dp_compile.ReplicateConfig(backend="aot_eager"))
    before = Counter(nccl_stand_in.launched)
    torch.compile(model, backend="aot_eager")(torch.randn(3, 16)).square().mean().backward()
    plan = replica_of(model).plan
    stages = [bucket.key.reduction.to_dict() for bucket in plan.buckets]
    dp_compile.unreplicate(model)
    return stages, plan.to_dict(), sorted(nccl_stand_in.launched - before), dist.get_backend()


def test_one_plan_by_any_name(pools):
    """Nothing decides by a name: not that of torch 2.14 and later, nor `undefined`, nor that of another device."""
    names = [("stand-in", False), ("nccl2", False), ("nccl-lazy", False), ("nccl-lazy", True)]
    found = [pools[2].run(plan_by, *each) for each in [*names, ("cpu:nccl2,cuda:gloo", False)]]
    first, *others = (each[0] for each in found)
    assert {stage["reduce_op"] for each in first[0] for stage in each["stages"]} == {"avg"}
    assert [launched for launched in first[2] if launched.startswith("all_reduce avg")]
    assert all(other[:3] == first[:3] for other in others)
    assert found[3][0][3] == "undefined"
    assert first[1]["buckets"]


def test_one_rank_asks_for_no_average():
    """NCCL may return anything for AVG over one rank; FSDP2 avoids it."""
    for averaging in (Averaging(), Averaging(scattered=True)):
        alone = averaging.reduction("0", NCCL, 1, "float32")
        assert (alone.reduce_op, alone.scale * alone.post_scale) == ("sum", 1.0)
        assert averaging.reduction("0", NCCL, 2, "float32").reduce_op == "avg"
        assert averaging.reduction("0", GLOO, 2, "float32").reduce_op == "sum"
    stages = Averaging().reduction("0", NCCL, 4, "float32", Levels("inside", "between", ((0, 1), (2, 3)))).stages
    assert [stage.reduce_op for stage in stages] == ["avg", "avg", ""]


def lanes(backend):
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


def test_lanes_of_a_backend(pools, ranks2):
    """gloo carries two collectives of a group at a time; NCCL one."""
    assert ranks2.run(lanes, "gloo") == [2, 2]
    assert pools[2].run(lanes, "stand-in") == [1, 1]
