"""Where buckets end: by policy, by cost, by file. And what contradicts itself."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch.distributed as dist
from graphs import bucket_key
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import dp_compile
from dp_compile.config import ReplicateConfig
from dp_compile.engine.calibration import calibrate
from dp_compile.engine.gradients import gradient_specs
from dp_compile.engine.group import Group
from dp_compile.modules.planning import PlanRequest, make_plan
from dp_compile.plan.backends import FAKE, GLOO, NCCL, Backend
from dp_compile.plan.buckets import UNUSED_FLAGS, BucketKey, BucketPlan, GradientSpec, Layout, plan_buckets
from dp_compile.plan.cost import AllReduceCost, CostFit
from dp_compile.plan.reduction import Averaging
from dp_compile.plan.strategies import Coalesced, Fixed, Optimal, Planned, Wanted, plan_explicit, plan_to_json
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
        ({int}, "must be a function, a set of module classes or a policy of FSDP"),
        (set(), "must be a function, a set of module classes or a policy of FSDP"),
    ],
)
def test_a_policy_that_is_none(policy: Any, message: str) -> None:
    with pytest.raises(dp_compile.ConfigError, match=message):
        plan_of(bucket_policy=policy)


# --- optimal ----------------------------------------------------------------------------------------------------


def test_optimal_is_the_default_and_makes_a_promise() -> None:
    cost = AllReduceCost(1e-6, 1e-9)
    model = dp_compile.replicate(Model(), config=ReplicateConfig(cost=cost))
    report = dp_compile.report(model)
    assert len(report.plan.buckets) > 1
    assert sorted(name for bucket in names(report.plan) for name in bucket) == sorted(
        [UNUSED_FLAGS, *(name for name, _ in model.named_parameters())]
    )
    assert "the best any plan could do" in report.promise
    assert " ms" not in report.promise
    assert report.promise in str(report)


def test_a_network_with_high_latency_gets_fewer_buckets() -> None:
    def buckets(alpha_s: float) -> int:
        return len(plan_of(config=ReplicateConfig(cost=AllReduceCost(alpha_s, 1e-9))).buckets)

    counts = [buckets(alpha_s) for alpha_s in (1e-9, 1e-6, 1e-5, 1e-4, 1.0)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[2] > counts[-1] == 1


# --- coalesced and apart ------------------------------------------------------------------------------------------


class Vision(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.up = nn.Conv2d(3, 8, 3), nn.ConvTranspose1d(4, 4, 2, bias=False)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Conv1d(4, 4, 3))
        self.norm, self.head = nn.BatchNorm2d(8), nn.Linear(8, 5)


def group_with(backend: Backend, fake_group: dist.ProcessGroup) -> Group:
    return Group(fake_group, "0", backend, 2, Averaging())


def apart(plan: BucketPlan) -> set[str]:
    return {member.gradient.name for bucket in plan.buckets for member in bucket.members if member.offset is None}


def plan_with(backend: Backend, fake_group: dist.ProcessGroup, **options: Any) -> BucketPlan:
    module, group = Vision(), group_with(backend, fake_group)
    policy = options.pop("bucket_policy", None)
    named = dict(module.named_parameters())
    parameters = tuple(named.values())
    gradients = gradient_specs(parameters, tuple(named), group)
    request = PlanRequest(ReplicateConfig(**options), policy, None, True)
    return make_plan(module, parameters, gradients, group, request).planned.plan


def test_coalesced_has_the_buckets_of_optimal_and_nothing_flat(fake_group: dist.ProcessGroup) -> None:
    cost = AllReduceCost(1e-6, 1e-9)
    optimal, coalesced = (
        plan_of(config=ReplicateConfig(strategy=each, cost=cost)) for each in ("optimal", "coalesced")
    )
    assert names(coalesced) == names(optimal)
    assert len(coalesced.buckets) > 1
    assert apart(coalesced) == {gradient.name for gradient in coalesced.gradients}
    assert apart(optimal) == set()
    assert sum(bucket.padding_nbytes for bucket in coalesced.buckets) == 0


@pytest.mark.parametrize(
    "options", [{}, {"strategy": "fixed"}, {"bucket_policy": {Vision}}], ids=["optimal", "fixed", "per_module"]
)
def test_with_nccl_weights_of_convolutions_are_apart(fake_group: dist.ProcessGroup, options: dict[str, Any]) -> None:
    """Not those that are made of other parameters: their gradient is no convolution's."""
    assert apart(plan_with(NCCL, fake_group, **options)) == {"stem.weight", "up.weight"}
    for backend in (GLOO, FAKE, Backend("mpi")):
        assert apart(plan_with(backend, fake_group, **options)) == set()


def test_a_backend_that_cannot_group(fake_group: dist.ProcessGroup) -> None:
    with pytest.raises(dp_compile.ConfigError, match="which backend 'mpi' cannot"):
        plan_with(Backend("mpi"), fake_group, strategy="coalesced")
    assert apart(plan_with(GLOO, fake_group, strategy="coalesced"))


def test_gaps_are_as_wide_as_asked(fake_group: dist.ProcessGroup) -> None:
    packed, aligned = (plan_with(GLOO, fake_group, alignment_bytes=each) for each in (1, 64))
    assert sum(bucket.padding_nbytes for bucket in packed.buckets) == 0
    assert sum(bucket.padding_nbytes for bucket in aligned.buckets) > 0
    assert packed.signature() != aligned.signature()


# --- explicit ---------------------------------------------------------------------------------------------------


def test_a_saved_plan_is_used_as_it_is(tmp_path: Path) -> None:
    made = plan_of(bucket_policy={Block})
    file = tmp_path / "plan.json"
    file.write_text(plan_to_json(made))
    for plan in (file, str(file), made):
        assert names(plan_of(plan=plan)) == names(made)


KEYS = st.builds(
    bucket_key,
    st.just("0"),
    st.just("sum"),
    st.sampled_from(["float32", "bfloat16"]),
    st.sampled_from(["cpu", "cuda"]),
)


@given(
    st.lists(st.tuples(st.integers(0, 70), KEYS, st.booleans()), min_size=1, max_size=25),
    st.sampled_from([1, 16, 64, 256]),
    st.sampled_from([1e-4, 1e-3, 1.0]),
)
def test_a_plan_comes_back_from_its_file(
    facts: list[tuple[int, BucketKey, bool]], alignment: int, cap_mb: float
) -> None:
    """Members, offsets, gaps and what is apart; only the reasons are the file's."""
    gradients = [
        GradientSpec(index, f"p{index}", (numel,), (1,), 4 if key.dtype == "float32" else 2, key)
        for index, (numel, key, _) in enumerate(facts)
    ]
    kept_apart = frozenset(f"p{index}" for index, (_, _, apart) in enumerate(facts) if apart)
    layout = Layout(alignment, kept_apart)
    plan = plan_buckets(gradients, bucket_cap_mb=cap_mb, first_bucket_cap_mb=cap_mb, layout=layout)
    again = plan_explicit(gradients, plan_to_json(plan), Layout(alignment)).plan
    assert [(bucket.key, bucket.members) for bucket in again.buckets] == [
        (bucket.key, bucket.members) for bucket in plan.buckets
    ]


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
        (lambda: edited(lambda data: data.update(version=99)), "version 99, readable is 2"),
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
        ({"config": ReplicateConfig(strategy="optimal"), "bucket_cap_mb": 1}, "belongs to strategy 'fixed'"),
        (
            {"config": ReplicateConfig(strategy="coalesced"), "bucket_policy": {Block}},
            "belongs to strategy 'per_module'",
        ),
        ({"config": ReplicateConfig(strategy="coalesced"), "bucket_cap_mb": 1}, "bucket_cap_mb belongs to strategy"),
        ({"config": ReplicateConfig(strategy="explicit")}, "strategy 'explicit' needs plan"),
        ({"config": ReplicateConfig(strategy="per_module")}, "strategy 'per_module' needs bucket_policy"),
    ],
)
def test_options_of_two_strategies(options: dict[str, Any], message: str) -> None:
    with pytest.raises(dp_compile.ConfigError, match=message):
        plan_of(**options)


# --- as values ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "options"),
    [
        (Fixed(0.001, 0.001), {"bucket_cap_mb": 0.001, "first_bucket_cap_mb": 0.001}),
        (Optimal(), {}),
        (Optimal(AllReduceCost(1e-3, 1e-9), 5), {"cost": AllReduceCost(1e-3, 1e-9), "replan_after": 5}),
        (Coalesced(), {"strategy": "coalesced"}),
    ],
)
def test_a_value_is_its_name_and_its_options(value: Any, options: dict[str, Any]) -> None:
    by_value, by_name = ReplicateConfig(strategy=value), ReplicateConfig(**{"strategy": value.name} | options)
    assert by_value == by_name
    assert plan_of(config=by_value) == plan_of(config=by_name)


@dataclass(frozen=True)
class Mine:
    """All in one bucket for each key; `leaves_out` so many."""

    leaves_out: int = 0
    name: str = "mine"
    plans_anew: bool = False

    def plan(self, wanted: Wanted) -> Any:
        gradients = list(wanted.gradients)[self.leaves_out :]
        if self.leaves_out < 0:
            return gradients
        return Planned(BucketPlan((wanted.layout.bucket(gradients[0].key, gradients, "all"),)))


def test_a_strategy_of_ones_own() -> None:
    assert [len(bucket) for bucket in names(plan_of(config=ReplicateConfig(strategy=Mine())))] == [16]
    with pytest.raises(dp_compile.ConfigError, match=r"plan of strategy 'mine' misses head\.bias, head\.weight\. Each"):
        plan_of(config=ReplicateConfig(strategy=Mine(2)))
    with pytest.raises(dp_compile.ConfigError, match="strategy 'mine' must return a Planned, got list"):
        plan_of(config=ReplicateConfig(strategy=Mine(-1)))
    with pytest.raises(dp_compile.ConfigError, match="belongs to strategy 'fixed', but the strategy is 'mine'"):
        plan_of(config=ReplicateConfig(strategy=Mine(), bucket_cap_mb=1.0))
    with pytest.raises(dp_compile.ConfigError, match="a value with name, plans_anew and plan"):
        ReplicateConfig(strategy=3)  # type: ignore[arg-type]
    with pytest.raises(dp_compile.ConfigError, match="has an address in its repr"):
        ReplicateConfig(strategy=type("Its", (), {"name": "a", "plans_anew": False, "plan": print})())
    with pytest.raises(dp_compile.ConfigError, match="cost is given beside strategy=Optimal"):
        ReplicateConfig(strategy=Optimal(), cost=AllReduceCost(1.0, 1.0), replan_after=1)


@dataclass(frozen=True)
class Spoilt:
    """One bucket, of which one thing is not as it has to be."""

    what: str
    name: ClassVar[str] = "spoilt"
    plans_anew: ClassVar[bool] = False

    def plan(self, wanted: Wanted) -> Planned:
        gradients = list(wanted.gradients)
        bucket = wanted.layout.bucket(gradients[0].key, gradients, "all")
        first, second, *rest = bucket.members
        if self.what == "place":
            second = replace(second, offset=first.offset)
        elif self.what == "gradient":
            first = replace(first, gradient=replace(first.gradient, itemsize=2))
        elif self.what == "rows":
            second = replace(second, rows=(0, 1))
        elif self.what == "key":
            bucket = replace(bucket, key=bucket.key._replace(dtype="float64"))
        buckets = [replace(bucket, members=(first, second, *rest))]
        return Planned(BucketPlan((*buckets, *([replace(bucket, members=())] if self.what == "empty" else []))))


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("place", r"has head\.bias and head\.weight in the same place of a bucket"),
        ("gradient", r"has another shape, dtype or key for head\.bias"),
        ("rows", r"has pieces of head\.weight that overlap or miss rows"),
        ("key", r"mixes keys in a bucket of head\.bias"),
        ("empty", "has an empty bucket, 1"),
    ],
)
def test_buckets_of_a_strategy_that_would_add_up_what_does_not_belong_together(what: str, said: str) -> None:
    with pytest.raises(dp_compile.ConfigError, match=f"the plan of strategy 'spoilt' {said}"):
        plan_of(config=ReplicateConfig(strategy=Spoilt(what)))


@dataclass(frozen=True)
class Other(Optimal):
    """One of ours, with a plan of its own and our name."""

    def plan(self, wanted: Wanted) -> Planned:
        raise AssertionError


def test_a_strategy_made_from_one_of_ours_is_not_taken_for_it() -> None:
    for taken in (Other(), Mine(name="ddp")):
        with pytest.raises(dp_compile.ConfigError, match=r"has the name '.*', which is one of dp_compile's"):
            ReplicateConfig(strategy=taken)


def replicate_otherwise_on_the_first() -> str:
    config = ReplicateConfig(strategy=Mine(name="mine" if dist.get_rank() else "yours"), timeout_s=30)
    try:
        dp_compile.replicate(Model(), config=config)
    except dp_compile.DesyncError as error:
        return str(error)
    return ""


def test_ranks_with_other_strategies(ranks: Ranks) -> None:
    for text in ranks.run(replicate_otherwise_on_the_first):
        assert "strategy" in text
        assert "name='yours'" in text


def test_unknown_strategy_and_cost() -> None:
    with pytest.raises(
        dp_compile.ConfigError, match="must be one of fixed, per_module, optimal, coalesced, ddp, explicit"
    ):
        ReplicateConfig(strategy="best")
    with pytest.raises(dp_compile.ConfigError, match="cost must be an AllReduceCost, got float"):
        ReplicateConfig(cost=1.0)  # type: ignore[arg-type]


# --- calibration ------------------------------------------------------------------------------------------------


def calibrate_here() -> tuple[str, str]:
    fitted = calibrate()
    try:
        calibrate(dist.new_group([dist.get_rank()], use_local_synchronization=True))
    except dp_compile.ConfigError as error:
        return fitted.to_json(), str(error)
    return fitted.to_json(), "no error"


def test_all_ranks_calibrate_to_the_same_cost(ranks: Ranks) -> None:
    (first, alone), (second, _), *_ = ranks.run(calibrate_here)
    assert first == second
    assert "at least 2 ranks" in alone
    fitted = CostFit.from_json(first)
    assert fitted.cost.beta_s_per_byte > 0
    assert fitted.largest_nbytes == 2**24
