"""A sharded optimizer: the same parameters as without, in every way, on every rank; a part of the state on each."""

from __future__ import annotations

import copy
import itertools
import pickle
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from beside import Block, Untraceable, batch, compile_blocks, compile_whole, mlp, not_compiled
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint
from twins import ADAMW, SGD, SMALL, LateReader, Make, Net, Twins, poisoned, twins, two_groups

import dp_compile
from dp_compile.modules.replicated_module import replica_of
from dp_compile.optim import full_state_dict, load_sharded_state_dict, sharded_state_dict
from dp_compile.optim import sharded as sharded_optimizer
from dp_compile.optim.sharded import Sharded
from dp_compile.passes.bucket_memory import BucketMemory
from dp_compile.testing.ranks import Ranks

OPTIMIZERS: dict[str, Make] = {
    "sgd": SGD,
    "adamw": ADAMW,
    "rmsprop": two_groups(torch.optim.RMSprop, lr=0.01, momentum=0.5),
    "adagrad": two_groups(torch.optim.Adagrad, lr=0.01),
    "adafactor": two_groups(torch.optim.Adafactor, lr=0.01),
}


GIVEN: dict[str, Any] = {"shard": True}
"""What `in_backward` is given in all that follows."""


def sharded(*args: Any, **options: Any) -> Twins:
    overlaps = GIVEN.get("overlap_forward", False)
    compiled = {"compile_model": partial(torch.compile, backend="dp_compile")} if overlaps else {}
    both = twins(*args, **{"given": {**GIVEN, **options.pop("given", {})}} | compiled | options)
    # The norm is added up in another order; of more than two ranks gradients are too.
    both.nearly = both.max_norm is not None or dist.get_world_size() > 2
    return both


# --- the same numbers -------------------------------------------------------------------------------------------------


def train(name: str, max_norm: float | None, compile_model: Callable[[nn.Module], Any]) -> tuple[int, int]:
    both = sharded(make=OPTIMIZERS[name], beside_ddp=True, compile_model=compile_model, max_norm=max_norm)
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 2, gamma=0.5) for each in (both.mine, both.other)]
    for number in range(5):
        both.backward(number)
        both.step()
        for scheduler in schedulers:
            scheduler.step()
        both.compare()
    mine, whole = (sum(_numels(optimizer)) for optimizer in (both.mine, both.other))
    total = torch.tensor(mine)
    dist.all_reduce(total)
    assert int(total) == whole, (int(total), whole)
    if name != "adafactor":  # whole matrices
        assert mine <= 1.2 * whole / dist.get_world_size() + 64
    assert f"sharded over {dist.get_world_size()} ranks" in str(dp_compile.report(both.ours))
    return both.updated, len(dp_compile.report(both.ours).captures)


def _numels(optimizer: torch.optim.Optimizer) -> list[int]:
    return [each.numel() for state in optimizer.state.values() for each in state.values() if each.dim()]


BY_DAY = {("sgd", None), ("adamw", 0.05), ("adafactor", 0.05)}


@pytest.mark.parametrize(
    ("name", "max_norm"),
    [
        pytest.param(name, max_norm, marks=() if (name, max_norm) in BY_DAY else pytest.mark.nightly)
        for name in OPTIMIZERS
        for max_norm in (None, 0.05)
    ],
)
def test_the_same_parameters_as_ddp(ranks: Ranks, name: str, max_norm: float | None) -> None:
    assert set(ranks.run(train, name, max_norm, compile_whole)) == {(10, 1)}


@pytest.mark.parametrize("max_norm", [None, 0.05, 1e3])
def test_the_same_parameters_if_nothing_is_compiled(ranks: Ranks, max_norm: float | None) -> None:
    assert set(ranks.run(train, "adamw", max_norm, not_compiled)) == {(0, 0)}


def as_zero() -> None:
    """torch's ZeroRedundancyOptimizer: whole parameters, all-reduces, a step of its own; the same training."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # loading it uses what torch itself deprecates
        from torch.distributed.optim import ZeroRedundancyOptimizer
    both = sharded(make=lambda parameters: torch.optim.AdamW(parameters, lr=0.01), beside_ddp=True)
    zero = ZeroRedundancyOptimizer(both.theirs.parameters(), torch.optim.AdamW, lr=0.01)
    both.other = zero
    both.train(0, 1, 2)
    zero.consolidate_state_dict(to=0)
    mine = full_state_dict(both.mine, to=0)
    if dist.get_rank() == 0:
        theirs = zero.state_dict()
        assert mine["state"].keys() == theirs["state"].keys()
        for index, state in theirs["state"].items():
            for key, value in state.items():
                torch.testing.assert_close(mine["state"][index][key], value, rtol=1e-4, atol=1e-7)


def test_torch_s_own_sharded_optimizer(ranks: Ranks) -> None:
    ranks.run(as_zero)


def several_modules() -> None:
    pairs = [sharded(make=ADAMW), sharded(make=SGD, max_norm=0.05)]
    for number in range(3):
        for ours in (True, False):
            first, second = (each.run if ours else each.run_theirs for each in pairs)
            second(first(batch(number))).square().mean().backward()
        for each in pairs:
            each.step()
            each.nearly = True
            each.compare()


@pytest.mark.nightly
def test_several_modules_in_one_backward(ranks: Ranks) -> None:
    ranks.run(several_modules)


# --- every way that a backward goes -----------------------------------------------------------------------------------


def one_rank_falls_back(name: str, max_norm: float | None, in_flight: int | None) -> int:
    """Bit by bit as a run in which nothing falls back: the same kernels on the same elements."""
    both = [sharded(make=OPTIMIZERS[name], max_norm=max_norm, given={"buckets_in_flight": in_flight}) for _ in range(2)]
    for number in range(5):
        for way, each in enumerate(both):
            each.backward(number, broken=way == 0 and number in (1, 3) and dist.get_rank() == 0)
            each.step()
            each.compare()
        for one, other in zip(both[0].ours.parameters(), both[1].ours.parameters(), strict=True):
            assert torch.equal(one, other)
    states = [full_state_dict(each.mine) for each in both]
    assert_same(*states)
    return both[0].updated


@pytest.mark.parametrize(
    ("name", "max_norm", "in_flight"),
    [("adamw", None, 1), pytest.param("sgd", 0.05, None, marks=pytest.mark.nightly), ("adafactor", None, None)],
)
def test_one_rank_is_not_captured_now_and_then(
    ranks: Ranks, name: str, max_norm: float | None, in_flight: int | None
) -> None:
    assert set(ranks.run(one_rank_falls_back, name, max_norm, in_flight)) == {10}


def assert_same(one: Any, other: Any) -> None:
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert_same(value, other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for pair in zip(one, other, strict=True):
            assert_same(*pair)
    else:
        assert one == other


class Last(nn.Module):
    """Memory in the order of channels-last, a scalar, sizes that nothing divides."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.rest, self.scale = nn.Linear(5, 6), nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        images = x.repeat(1, 8).view(len(x), 3, 4, 4)
        result: torch.Tensor = self.rest(self.stem(images).mean((2, 3))) * self.scale
        return result


class Mixed(nn.Module):
    """Two dtypes: buckets of each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.factor = nn.ModuleList(mlp(5) for _ in range(2)), nn.Parameter(torch.ones(7).double())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) * self.factor.prod().float()
        return x


def generated(max_norm: float | None, wish: bool | None) -> int:
    """Through Inductor, in its own memory, or in that of the step before."""
    config = dp_compile.ReplicateConfig(bucket_cap_mb=1e-4, gradient_as_bucket_view=wish)
    both = sharded(make=ADAMW, config=config, max_norm=max_norm, given={"buckets_in_flight": 1})
    memory, where = replica_of(both.ours).bucket_memory, list[dict[Any, int]]()
    for number in range(6):
        both.train(number)
        where.append({key: kept.memory.data_ptr() for key, kept in memory.kept.items()})
    expected = set[tuple[int, int]]()
    for number, bucket in enumerate(dp_compile.report(both.ours).plan.buckets if wish is not False else ()):
        expected.add((number, bucket.numel))
        if bucket.key.reduction.is_scattered:
            expected.add((-1 - number, bucket.numel))
    assert {key[:2] for key in where[-1]} == expected
    for key in where[-1]:  # a thread of gloo's may have it for longer now and then
        addresses = [each[key] for each in where]
        assert any(one == other for one, other in itertools.pairwise(addresses)), (key, addresses)
    return both.updated


class Broken(Net):
    """Its backward has a graph break, so hooks reduce eagerly."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = super().forward(Untraceable.apply(super().forward(x)))
        return result


class Reentrant(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True) + x
        result: torch.Tensor = self.norm(x)
        return result


FEATURES: dict[str, tuple[dict[str, Any], int]] = {
    "tied weights": ({"build": lambda: Net(tied=True), "given": {"buckets_in_flight": 1}}, 9),
    "channels last": ({"build": Last, "make": lambda each: torch.optim.AdamW(each, lr=0.01)}, 5),
    "two dtypes": ({"build": Mixed, "make": lambda each: torch.optim.AdamW(each, lr=0.01)}, 9),
    "two dtypes, whole": ({"build": Mixed, "make": lambda each: torch.optim.Adafactor(each, lr=0.01)}, 9),
    "read late": ({"build": LateReader, "given": {"buckets_in_flight": 1}}, 9),
    "reduced in bfloat16": ({"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)}, 10),
    "mixed precision": ({"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}, 10),
    "divided by 3": ({"config": dp_compile.ReplicateConfig(backend="aot_eager", gradient_divide_factor=3.0)}, 10),
    "optimal buckets": ({"config": dp_compile.ReplicateConfig(backend="aot_eager")}, 10),
    "static graph": ({"static_graph": True}, 10),
    "unused are found": ({"find_unused_parameters": True}, 10),
    "compiled in parts": ({"build": lambda: nn.Sequential(Block(), Block()), "compile_model": compile_blocks}, 8),
    "not one graph": ({"build": Broken}, 0),
    "reentrant checkpoint": ({"build": Reentrant, "compile_theirs": True}, 10),
}


def feature(name: str) -> int:
    options, _ = FEATURES[name]
    both = sharded(**options)
    for number in range(4):
        both.backward(number)
        both.step()
        both.compare()
    return both.updated


AT_NIGHT = {
    "mixed precision",
    "divided by 3",
    "grouped",
    "static graph",
    "unused are found",
    "two dtypes",
    "two dtypes, whole",
    "tied weights",
    "channels last",
    "as torch's DDP",
    "read late",
    "reduced in bfloat16",
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.nightly if name in AT_NIGHT else ()) for name in FEATURES]
)
def test_beside_what_else_there_is(ranks: Ranks, name: str) -> None:
    assert set(ranks.run(feature, name)) == {FEATURES[name][1]}


AT_NIGHT_BY_CODE = [(None, None), (None, False), (0.05, False), (0.05, True)]


@pytest.mark.parametrize(
    ("max_norm", "wish"), [(0.05, None), *(pytest.param(*each, marks=pytest.mark.nightly) for each in AT_NIGHT_BY_CODE)]
)
def test_generated_code(ranks: Ranks, max_norm: float | None, wish: bool | None) -> None:
    """Each bucket's gradients, what comes in while they are sent, and its parameters on their way: the same memory."""
    assert set(ranks.run(generated, max_norm, wish)) == {10}


# --- the step ---------------------------------------------------------------------------------------------------------


def accumulate(max_norm: float | None) -> None:
    both = sharded(max_norm=max_norm)
    for number in range(3):
        both.backward(10 * number, sync=False)
        both.backward(10 * number + 1)
        both.step()
        both.compare()


@pytest.mark.parametrize("max_norm", [pytest.param(None, marks=pytest.mark.nightly), 0.05])
def test_accumulation(ranks: Ranks, max_norm: float | None) -> None:
    ranks.run(accumulate, max_norm)


class Spare(Net):
    """In some steps no rank uses `spare`, in some the first rank only."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(6, 6)
        self.users = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.spare(x) if dist.get_rank() < self.users else x)


def unused(name: str, max_norm: float | None, compile_model: Callable[[nn.Module], Any] | None) -> None:
    options = {} if compile_model is None else {"compile_model": compile_model}
    both = sharded(Spare, OPTIMIZERS[name], max_norm=max_norm, find_unused_parameters=True, **options)
    for number, users in enumerate((2, 0, 1, 2, 0)):
        both.ours.users = both.theirs.users = users  # type: ignore[assignment]
        before = both.ours.spare.weight.clone()  # type: ignore[union-attr,operator]
        both.backward(number)
        assert (both.ours.spare.weight.grad is None) is (users == 0)  # type: ignore[union-attr]
        both.step()
        both.compare()
        assert torch.equal(before, both.ours.spare.weight) is (users == 0)  # type: ignore[union-attr,arg-type]


@pytest.mark.parametrize(
    ("name", "max_norm", "compile_model"),
    [
        ("adamw", None, compile_whole),
        ("adafactor", 0.05, not_compiled),
        pytest.param("adamw", 0.05, compile_whole, marks=pytest.mark.nightly),
        pytest.param("adafactor", None, compile_whole, marks=pytest.mark.nightly),
        ("adamw", None, not_compiled),
    ],
)
def test_unused_parameters(
    ranks2: Ranks, name: str, max_norm: float | None, compile_model: Callable[[nn.Module], Any]
) -> None:
    """What no rank uses is not updated: no weight decay, no moments."""
    ranks2.run(unused, name, max_norm, compile_model)


def frozen(name: str) -> None:
    both = sharded(make=OPTIMIZERS[name], find_unused_parameters=True)
    both.train(0)
    for requires in (False, True):
        for model in (both.ours, both.theirs):
            model.layers[1].weight.requires_grad_(requires)  # type: ignore[index,union-attr]
        both.train(1, 2)


@pytest.mark.parametrize("name", ["adamw", pytest.param("adafactor", marks=pytest.mark.nightly)])
def test_parameters_that_are_frozen_in_between(ranks: Ranks, name: str) -> None:
    ranks.run(frozen, name)


def scaled(name: str, max_norm: float | None, broken: bool) -> int:
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2) for _ in range(2)]
    both = sharded(make=OPTIMIZERS[name], max_norm=max_norm, given={"scaler": scalers[0]})
    for number in range(6):
        # The first rank alone has numbers that are too large, in the last parameter only: of one rank's part.
        before = [each.clone() for each in both.ours.parameters()]
        falls_back = broken and number in (2, 4) and dist.get_rank() == 0
        for scaler, run, model in zip(scalers, (both.run, both.run_theirs), (both.ours, both.theirs), strict=True):
            breaks = run is both.run and falls_back
            (*_, last) = model.parameters()
            with warnings.catch_warnings(), torch.autograd.detect_anomaly(check_nan=False) if breaks else nullcontext():
                warnings.simplefilter("ignore")
                outputs = run(batch(number))
                spoiled = (
                    last.register_hook(lambda grad: grad * torch.inf) if number == 2 and not dist.get_rank() else None
                )
                scaler.scale(outputs.square().mean()).backward()
                if spoiled is not None:
                    spoiled.remove()
        if max_norm is not None:
            scalers[1].unscale_(both.other)
            torch.nn.utils.clip_grad_norm_(both.theirs.parameters(), max_norm)
        for scaler, optimizer in zip(scalers, (both.mine, both.other), strict=True):
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        both.compare()
        assert scalers[0].get_scale() == scalers[1].get_scale()
        same = all(map(torch.equal, before, both.ours.parameters()))
        assert same is (number == 2)
    return both.updated


@pytest.mark.parametrize(
    ("name", "max_norm", "broken"),
    [
        # With a norm all ranks see by that what is not finite.
        pytest.param("adamw", 0.05, True, marks=pytest.mark.nightly),
        ("adamw", None, True),
        pytest.param("adamw", None, False, marks=pytest.mark.nightly),
        pytest.param("adafactor", None, True, marks=pytest.mark.nightly),
    ],
)
def test_a_grad_scaler(ranks: Ranks, name: str, max_norm: float | None, broken: bool) -> None:
    """A step is left out on all ranks, though one of them alone has seen what is not finite."""
    ranks.run(scaled, name, max_norm, broken)


def no_nan_is_sent() -> int:
    """What lies in gaps is whatever was there; where NCCL looks for NaN in all that it sends, zeros."""
    launched: list[torch.Tensor] = []
    launch = sharded_optimizer.launch_gather

    def seen(stage: Any, gathered: torch.Tensor) -> Any:
        launched.append(gathered.clone())
        return launch(stage, gathered)

    def garbage(self: Any, number: int, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.full((numel,), torch.nan, dtype=dtype, device=device)

    with (
        mock.patch.dict("os.environ", TORCH_NCCL_NAN_CHECK="1"),
        mock.patch.object(sharded_optimizer, "launch_gather", seen),
        mock.patch.object(BucketMemory, "take", garbage),
    ):
        both = sharded(make=ADAMW)
        both.train(0)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    assert all(each.view(ranks, -1)[rank].isfinite().all() for each in launched)
    return len(launched)


def test_no_gap_is_sent_where_somebody_looks_for_nan(ranks2: Ranks) -> None:
    assert min(ranks2.run(no_nan_is_sent)) > 1


def one_small_part() -> None:
    """Ranks without a piece take part in all, with a scaler too."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    both = sharded(lambda: nn.Linear(6, 1, bias=False), ADAMW_ONE, given={"scaler": scaler}, max_norm=0.05)
    for number in range(2):
        scaler.scale(both.run(batch(number)).square().mean()).backward()
        both.backward_of_theirs(number)
        torch.nn.utils.clip_grad_norm_(both.theirs.parameters(), 0.05)
        both.other.step()
        scaler.step(both.mine)
        scaler.update()
        both.other.zero_grad()
        both.compare()


def ADAMW_ONE(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def test_a_module_smaller_than_its_padding(ranks: Ranks) -> None:
    ranks.run(one_small_part)


def hands_off() -> list[str]:
    both = sharded(make=ADAMW)
    both.train(0)
    both.backward(1)
    compiled_between = torch.compile(both.ours, backend="aot_eager", dynamic=False)
    with torch.no_grad():
        compiled_between(torch.ones(5, 6))
    said = []
    attempts: list[Callable[[], object]] = [
        lambda: torch.nn.utils.clip_grad_norm_(both.ours.parameters(), 1.0),
        lambda: torch.nn.utils.clip_grad_value_(both.ours.parameters(), 1.0),
        lambda: [each.grad.norm() for each in both.ours.parameters() if each.grad is not None],
        lambda: both.mine.state_dict(),
        lambda: copy.deepcopy(both.mine),
        lambda: pickle.dumps(both.mine),
        lambda: both.backward(2),
    ]
    for attempt in attempts:
        with pytest.raises(dp_compile.ReductionError) as error:
            attempt()
        said.append(str(error.value))
    for keep in (True, False):
        both.mine.zero_grad(set_to_none=keep is False)
    both.mine.step()
    both.other.step()
    both.other.zero_grad()
    both.compare()
    parameter = next(both.ours.parameters())
    parameter.grad = torch.ones_like(parameter)
    with pytest.raises(dp_compile.ReductionError) as error:
        both.mine.step()
    said.append(str(error.value))
    parameter.grad = None
    both.train(2)
    return said


def test_what_is_not_there_is_said(ranks: Ranks) -> None:
    """Never a norm of 0, a state without its other parts, a step of a rank's own."""
    expected = ["max_norm=", "max_norm=", "max_norm=", "full_state_dict", "full_state_dict", "full_state_dict",
                "before optimizer.step()", "that no synchronised backward"]  # fmt: skip
    for said in ranks.run(hands_off):
        for text, part in zip(said, expected, strict=True):
            assert part in text


def warmed_up() -> int:
    both = sharded(make=ADAMW, max_norm=0.05)
    before = [each.clone() for each in both.ours.parameters()]
    dp_compile.warmup(both.ours, [batch(0)], lambda x: both.run(x).square().mean())
    assert all(map(torch.equal, before, both.ours.parameters()))
    assert not both.mine.state
    both.train(0, 1)
    return both.updated


def test_a_warm_up_updates_nothing(ranks: Ranks) -> None:
    assert set(ranks.run(warmed_up)) == {10}


def beside_another(name: str) -> None:
    """One optimizer of a module is sharded, another is not; a group is added later."""

    def half(number: int, model: Any) -> list[nn.Parameter]:
        return [each for place, each in enumerate(model.parameters()) if place % 2 == number]

    kind = torch.optim.AdamW if name == "adamw" else torch.optim.Adafactor
    both = sharded(make=lambda parameters: kind([*parameters][:8:2], lr=0.01))
    more = [torch.optim.SGD(half(1, model), lr=0.1, momentum=0.9) for model in (both.ours, both.theirs)]
    dp_compile.optim.in_backward(both.ours, more[0])
    for number in range(4):
        if number == 2:
            for model, optimizer in ((both.ours, both.mine), (both.theirs, both.other)):
                optimizer.add_param_group({"params": half(0, model)[4:], "lr": 0.5})
        both.backward(number)
        both.step()
        for optimizer in more:
            optimizer.step()
            optimizer.zero_grad()
        for model in (both.ours, both.theirs):
            model.zero_grad()
        both.compare()
    state = full_state_dict(both.mine)
    assert len(state["state"]) == 5
    fresh = sharded(make=lambda parameters: kind([*parameters][:8:2], lr=0.01))
    fresh.mine.add_param_group({"params": half(0, fresh.ours)[4:]})
    fresh.mine.load_state_dict(state)  # before any backward
    assert_same(full_state_dict(fresh.mine), state)


@pytest.mark.parametrize("name", [pytest.param("adamw", marks=pytest.mark.nightly), "adafactor"])
def test_another_optimizer_and_another_group(ranks: Ranks, name: str) -> None:
    ranks.run(beside_another, name)


def planned_anew(max_norm: float | None = None) -> None:
    """The state goes with its elements."""
    config = dp_compile.ReplicateConfig(backend="aot_eager", replan_after=2)
    both = sharded(make=ADAMW, config=config, max_norm=max_norm)
    plans = []
    for number in range(6):
        both.train(number)
        plans.append(str(dp_compile.report(both.ours).plan))
    both.ours.to(torch.float32)
    for each in both.ours.parameters():
        each.data = each.data.clone()  # other memory
    both.train(6)
    fixed = dp_compile.ReplicateConfig(backend="aot_eager", bucket_cap_mb=25)
    other = sharded(make=ADAMW, config=fixed, max_norm=max_norm)
    for number in range(7):
        other.train(number)
    if max_norm is None:
        assert_same(full_state_dict(both.mine), full_state_dict(other.mine))


@pytest.mark.parametrize("max_norm", [None, 0.05])
def test_a_plan_that_is_made_anew(ranks: Ranks, max_norm: float | None) -> None:
    ranks.run(planned_anew, max_norm)


def taken_off() -> None:
    both = sharded(make=ADAMW)
    both.train(0)
    for model in (both.ours, both.theirs):
        dp_compile.unreplicate(model)
    both.ours(torch.ones(3, 6)).square().mean().backward()
    with pytest.raises(dp_compile.ReductionError, match="not replicated any more"):
        both.mine.step()
    both.mine.zero_grad()
    for model in (both.ours, both.theirs):
        dp_compile.replicate(model, config=SMALL)
    dp_compile.optim.in_backward(both.ours, both.mine, shard=True)
    both.train(1)
    for model in (both.ours, both.theirs):
        dp_compile.unreplicate(model)
        dp_compile.replicate(model, config=SMALL)
    dp_compile.optim.in_backward(both.ours, both.mine)
    both.train(2)
    assert len(both.mine.state_dict()["state"]) == 10


def test_a_module_that_is_not_replicated_any_more(ranks: Ranks) -> None:
    ranks.run(taken_off)


# --- checkpoints ------------------------------------------------------------------------------------------------------


def whole_states() -> None:
    both = sharded(make=ADAMW)
    both.train(0, 1)
    state = full_state_dict(both.mine)
    assert_same(state, both.other.state_dict())
    assert (full_state_dict(both.mine, to=0) == {}) is (dist.get_rank() != 0)
    both.train(2)
    again = sharded(make=ADAMW)
    for model in (again.ours, again.theirs):
        model.load_state_dict(both.ours.state_dict())
    # From sharded to plain, from plain to sharded.
    again.other.load_state_dict(full_state_dict(both.mine))
    again.mine.load_state_dict(both.other.state_dict())
    for number in (3, 4):
        both.train(number)
        again.train(number)
    for one, other in zip(both.ours.parameters(), again.ours.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_state_of_a_plain_optimizer_and_back(ranks: Ranks) -> None:
    ranks.run(whole_states)


STATES: dict[str, tuple[Callable[[], nn.Module], Make]] = {
    "adamw": (Net, ADAMW),
    "channels last": (Last, ADAMW),
    "adafactor": (Net, OPTIMIZERS["adafactor"]),
    "sgd": (Net, SGD),
}


def saved(directory: str, name: str) -> None:
    """On all ranks, then gone on from by fewer of them, whose buckets are others."""
    torch.manual_seed(1)
    one_bucket = dp_compile.ReplicateConfig(backend="aot_eager")
    build, make = STATES[name]
    both = sharded(build, make)
    both.train(0, 1)
    state = full_state_dict(both.mine)
    dcp.save({"model": both.ours.state_dict(), "optimizer": sharded_state_dict(both.mine)}, checkpoint_id=directory)
    groups = [dist.new_group([0, 1]), dist.new_group([2])]
    for group in groups:
        if dist.get_rank() not in dist.get_process_group_ranks(group):
            continue
        for way in ("whole", "parts"):
            torch._dynamo.reset()
            model = build()
            dp_compile.replicate(model, config=one_bucket, process_group=group)
            optimizer = make(model.parameters())
            dp_compile.optim.in_backward(model, optimizer, shard=True)
            for each in optimizer.param_groups:
                each["lr"] = 7.0
            if way == "whole":
                optimizer.load_state_dict(state)
            else:
                load_sharded_state_dict(optimizer, directory)
            assert_same(full_state_dict(optimizer), state)
            model(batch(0)).square().mean().backward()  # another plan: the state moves
            optimizer.step()
            assert len(full_state_dict(optimizer)["state"]) == len(state["state"])


@pytest.mark.parametrize("name", [*list(STATES)[:-1], pytest.param("sgd", marks=pytest.mark.nightly)])
def test_saved_on_four_ranks_and_loaded_on_two_and_on_one(ranks4: Ranks, name: str, tmp_path: Path) -> None:
    ranks4.run(saved, str(tmp_path), name)


def wrong_checkpoint(directory: str) -> list[str]:
    both = sharded(make=ADAMW)
    both.train(0)
    dcp.save({"optimizer": sharded_state_dict(both.mine)}, checkpoint_id=directory)
    before = full_state_dict(both.mine)
    said = []
    others = [sharded(lambda: nn.Linear(6, 6), ADAMW).mine, sharded(lambda: Net(tied=True), ADAMW).mine,
              sharded(make=ADAMW_ONE).mine]  # fmt: skip
    attempts: list[Callable[[], object]] = [
        *(lambda each=each: load_sharded_state_dict(each, directory) for each in others),
        lambda: load_sharded_state_dict(both.mine, directory, key="other"),
        lambda: load_sharded_state_dict(both.other, directory),
        lambda: sharded_state_dict(both.other),
        lambda: full_state_dict(both.mine, to=9),
        lambda: [sum(each.values()) for each in sharded_state_dict(both.mine)["state"].values()],
    ]
    for attempt in attempts:
        with pytest.raises(dp_compile.DPCompileError) as error:
            attempt()
        said.append(str(error.value))
    assert_same(full_state_dict(both.mine), before)
    return said


def test_a_checkpoint_of_something_else(ranks: Ranks, tmp_path: Path) -> None:
    expected = ["which this optimizer does not have", "which this optimizer does not have", "parameter groups",
                "no sharded optimizer under 'other'", "is not sharded", "is not sharded", "must be a rank"]  # fmt: skip
    for said in ranks.run(wrong_checkpoint, str(tmp_path)):
        for text, part in zip(said, expected, strict=False):
            assert part in text


# --- what cannot be ---------------------------------------------------------------------------------------------------


def turn(model: nn.Module) -> nn.Module:
    return model.to(memory_format=torch.channels_last if model.stem.weight.is_contiguous() else torch.contiguous_format)  # type: ignore[union-attr,operator,call-overload,no-any-return]


def another_order(directory: str) -> list[str]:
    """Cut parameters whose elements lie otherwise than their gradients, or than what was saved."""
    both = sharded(Last, make=ADAMW_ONE)
    both.train(0)
    dcp.save({"optimizer": sharded_state_dict(both.mine)}, checkpoint_id=directory)
    turn(both.ours)
    other = sharded(lambda: turn(Last()), make=ADAMW_ONE)
    late = dp_compile.replicate(Last(), config=SMALL)
    turn(late)
    shares = Net()
    shares.layers[3].weight.data = shares.layers[0].weight.data
    dp_compile.replicate(shares, config=SMALL)
    said = []
    attempts: list[Callable[[], object]] = [
        lambda: both.backward(1),
        lambda: load_sharded_state_dict(other.mine, directory),
        lambda: dp_compile.optim.in_backward(late, ADAMW_ONE(late.parameters()), shard=True),
        lambda: dp_compile.optim.in_backward(shares, ADAMW_ONE(shares.parameters()), shard=True),
    ]
    for attempt in attempts:
        with pytest.raises(dp_compile.DPCompileError) as error:
            attempt()
        said.append(str(error.value))
    turn(both.ours)
    both.other.zero_grad()
    both.train(1)
    return said


def test_elements_in_another_order(ranks: Ranks, tmp_path: Path) -> None:
    """Silently, ranks updated elements with the gradients of others."""
    expected = ["stem.weight has strides", "in another order", "stem.weight has strides", "shares its memory"]
    for said in ranks.run(another_order, str(tmp_path)):
        for text, part in zip(said, expected, strict=True):
            assert part in text


class HalfFirst(nn.Module):
    """Its first parameter is narrower than the norm of all gradients is large."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.rest = nn.Parameter(torch.zeros(6).half()), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.rest(x) * 1e3 + self.first.float()
        return result


def of_two_dtypes() -> None:
    both = sharded(HalfFirst, make=lambda each: torch.optim.SGD(each, lr=0.1), max_norm=1.0)
    for number in range(2):
        both.backward(number)
        both.step()
        both.compare()
    assert both.mine.total_norm > 1e5  # type: ignore[attr-defined]


def test_the_norm_of_two_dtypes(ranks2: Ranks) -> None:
    ranks2.run(of_two_dtypes)


def refused() -> list[str]:
    def ready(**options: Any) -> Any:
        return dp_compile.replicate(Net(), **{"config": SMALL} | options)

    def shard(model: Any, kind: Any = torch.optim.AdamW, **options: Any) -> Any:
        return dp_compile.optim.in_backward(model, kind(model.parameters(), lr=0.1), **{"shard": True} | options)

    class Complex(Net):
        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.ones(2, dtype=torch.complex64))

    hooked, twice, joined = ready(), ready(), ready()
    hooked.register_comm_hook(None, default_hooks.fp16_compress_hook)
    dp_compile.optim.in_backward(twice, kept := torch.optim.SGD([*twice.parameters()][:4], lr=0.1), shard=True)
    shard(joined)
    foreign = [*ready().parameters(), nn.Parameter(torch.ones(2))]
    said = []
    attempts: list[Callable[[], object]] = [
        lambda: shard(ready(), torch.optim.LBFGS),
        lambda: shard(ready(passes=())),
        lambda: shard(ready(config=dp_compile.ReplicateConfig(backend="aot_eager", check_nan=True))),
        lambda: shard(ready(ddp_python_hook=False)),
        lambda: shard(hooked),
        lambda: shard(dp_compile.replicate(Complex(), config=SMALL)),
        lambda: dp_compile.optim.in_backward(
            model := ready(), torch.optim.SGD([*model.parameters(), *foreign], lr=0.1), shard=True
        ),
        lambda: dp_compile.optim.in_backward(twice, torch.optim.SGD([*twice.parameters()][4:], lr=0.1), shard=True),
        lambda: dp_compile.optim.in_backward(twice, kept, shard=True),
        lambda: shard(ready(), shard=1),
        lambda: joined.register_comm_hook(None, default_hooks.fp16_compress_hook),
        lambda: dp_compile.join(joined).__enter__(),
        lambda: joined(batch(0)).square().mean().backward(retain_graph=True),
        lambda: shard(ready(), torch.optim.SGD if dist.get_rank() else torch.optim.Adam),
    ]
    for attempt in attempts:
        try:
            attempt()
        except dp_compile.DPCompileError as error:
            said.append(str(error))
        else:
            said.append("nothing")
    return said


def test_what_is_refused(ranks2: Ranks) -> None:
    expected = [
        "LBFGS cannot update in the backward",
        "none that makes buckets",
        "check_nan",
        "ddp_python_hook is False",
        "comm hook",
        "factor is complex",
        "is not in the module",
        "has a sharded optimizer already",
        "updates in the backward already",
        "shard must be True or False",
        "a comm hook needs whole gradients",
        "join() needs whole gradients",
        "retain_graph=True",
        "in_backward(shard=True)",
    ]
    for said in ranks2.run(refused):
        for text, part in zip(said, expected, strict=True):
            assert part in text


def on_two_levels() -> str:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("nodes", "inside"))
    with pytest.raises(dp_compile.ConfigError) as error:
        sharded(device_mesh=mesh)
    return str(error.value)


def fails_between() -> str:
    """The model is of no step until a state is loaded."""
    both = sharded(make=ADAMW)
    both.train(0)
    state = full_state_dict(both.mine), copy.deepcopy(both.ours.state_dict())
    for group in both.mine.param_groups:
        group["betas"] = (0.9, None)
    with pytest.raises(TypeError):
        both.backward(1)
    said = []
    for act in (both.mine.step, lambda: both.backward(2)):
        with pytest.raises(dp_compile.ReductionError) as error:
            act()
        said.append(str(error.value))
    both.mine.load_state_dict(state[0])
    both.ours.load_state_dict(state[1])
    both.other.zero_grad()
    both.backward(1)
    both.step()
    both.compare()
    return said[0]


def test_an_update_that_fails(ranks: Ranks) -> None:
    for text in ranks.run(fails_between):
        assert "load_state_dict" in text


def test_two_levels_of_network_are_refused(ranks4: Ranks) -> None:
    for text in ranks4.run(on_two_levels):
        assert "two levels of network" in text


def late_rounds(overlaps: bool) -> None:
    """The other ranks are there long before the last one sends what it has updated."""
    gather = Sharded._gather

    def late(self: Sharded, *args: Any) -> None:
        if dist.get_rank() == dist.get_world_size() - 1:
            time.sleep(0.3)
        gather(self, *args)

    with poisoned(), mock.patch.dict(GIVEN, overlap_forward=overlaps), mock.patch.object(Sharded, "_gather", late):
        both = sharded(make=ADAMW)
        both.run(batch(0)).square().mean().backward()
        found = [each.detach().clone() for each in both.ours.parameters()]
    both.backward_of_theirs(0)
    both.other.step()
    for one, other in zip(found, both.theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("overlaps", [False, True])
def test_parameters_are_waited_for(ranks: Ranks, overlaps: bool) -> None:
    ranks.run(late_rounds, overlaps)


# --- and with parameters that go round under the next forward ---------------------------------------------------------


def in_the_next_forward(scenario: Callable[..., Any], *args: Any) -> None:
    with poisoned(), mock.patch.dict(GIVEN, overlap_forward=True):
        scenario(*args)


@pytest.mark.parametrize(
    ("scenario", "args"),
    [
        (one_rank_falls_back, ("adamw", 0.05, None)),
        pytest.param(one_rank_falls_back, ("adafactor", None, None), marks=pytest.mark.nightly),
        (unused, ("adamw", None, None)),
        pytest.param(unused, ("adamw", 0.05, not_compiled), marks=pytest.mark.nightly),
        pytest.param(accumulate, (0.05,), marks=pytest.mark.nightly),
        pytest.param(frozen, ("adafactor",), marks=pytest.mark.nightly),
        (scaled, ("adamw", None, True)),
        (beside_another, ("adafactor",)),
        pytest.param(several_modules, (), marks=pytest.mark.nightly),
        pytest.param(one_small_part, (), marks=pytest.mark.nightly),
        pytest.param(warmed_up, (), marks=pytest.mark.nightly),
        (planned_anew, ()),
        pytest.param(whole_states, (), marks=pytest.mark.nightly),
        (fails_between, ()),
    ],
    ids=lambda each: each.__name__ if callable(each) else None,
)
def test_parameters_that_go_round_under_the_next_forward(
    ranks: Ranks, scenario: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    """The same in all of these cases with `overlap_forward`, and NaN in what is in flight."""
    ranks.run(in_the_next_forward, scenario, *args)


def of_another_shape() -> str:
    both = sharded()
    both.train(0)
    state = copy.deepcopy(both.other.state_dict())
    moments = next(each for each in state["state"].values() if each["momentum_buffer"].numel() > 1)
    moments["momentum_buffer"] = moments["momentum_buffer"].flatten()[:1].view([1] * moments["momentum_buffer"].dim())
    with pytest.raises(dp_compile.ConfigError) as error:
        both.mine.load_state_dict(state)
    return str(error.value)


def test_a_state_of_another_shape(ranks: Ranks) -> None:
    for text in ranks.run(of_another_shape):
        assert "momentum_buffer of shape [1" in text
