"""A sharded optimizer: where its parts lie and go, checkpoints, and what is refused. `test_ways.py` has the numbers."""

from __future__ import annotations

import copy
import itertools
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from on_ranks import on_ranks
from parity import batch
from poison import poisoned
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from twins import ADAMW, SGD, SMALL, Last, Make, Net, Twins, assert_same, made

import dp_compile
from dp_compile.optim import full_state_dict, load_sharded_state_dict, sharded_state_dict
from dp_compile.optim import shard as sharded_optimizer
from dp_compile.optim.shard import Shard
from dp_compile.passes.memory import BucketMemory
from dp_compile.replication.module import replica_of
from dp_compile.testing.ranks import Ranks


def sharded(*args: Any, **options: Any) -> Twins:
    return made("sharded", *args, **options)


def one_group(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


Attempts = list[tuple[str, Callable[[], object]]]


def refuse(attempts: Attempts) -> None:
    for text, attempt in attempts:
        with pytest.raises(dp_compile.DPCompileError, match=text):
            attempt()


@pytest.mark.parametrize(
    ("max_norm", "wish"),
    [(0.05, None), *(pytest.param(None, wish, marks=pytest.mark.nightly) for wish in (None, False))],
)
@on_ranks("ranks")
def test_generated_code(max_norm: float | None, wish: bool | None) -> None:
    """Through Inductor, in its own memory, or in that of the step before."""
    config = dp_compile.ReplicateConfig(bucket_cap_mb=1e-4, gradient_as_bucket_view=wish)
    both = sharded(make=ADAMW, config=config, max_norm=max_norm)
    memory, where = replica_of(both.ours).state.bucket_memory, list[dict[Any, int]]()
    for number in range(6):
        both.train(number)
        where.append({key: kept.memory.data_ptr() for key, kept in memory.kept.items()})
    expected = set[tuple[int, int]]()
    for number, bucket in enumerate(dp_compile.report(both.ours).plan.buckets if wish is not False else ()):
        expected.add((number, bucket.numel))
    assert {key[:2] for key in where[-1]} == expected
    for key in where[-1]:  # a thread of gloo's may have it for longer now and then
        addresses = [each[key] for each in where]
        assert any(one == other for one, other in itertools.pairwise(addresses)), (key, addresses)
    assert both.updated == 10


@on_ranks("ranks2")
def test_no_gap_is_sent_where_somebody_looks_for_nan() -> None:
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
    assert len(launched) > 1


def one_small_part() -> None:
    """Ranks without a piece take part in all, with a scaler too."""
    one, two = (torch.amp.GradScaler("cpu", init_scale=2.0**8) for _ in range(2))
    both = sharded(lambda: nn.Linear(6, 1, bias=False), one_group, given={"scaler": one}, max_norm=0.05)
    both.scalers = one, two
    both.train(0, 1)


class HalfFirst(nn.Module):
    """Its first parameter is narrower than the norm of all gradients is large."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.rest = nn.Parameter(torch.zeros(6).half()), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.rest(x) * 1e3 + self.first.float()
        return result


def norm_of_two_dtypes() -> None:
    both = sharded(HalfFirst, make=lambda each: torch.optim.SGD(each, lr=0.1), max_norm=1.0)
    both.train(0, 1)
    assert both.mine.total_norm > 1e5  # type: ignore[attr-defined]


@pytest.mark.parametrize("scenario", [one_small_part, norm_of_two_dtypes])
def test_a_module_smaller_than_its_padding_and_one_of_two_dtypes(ranks2: Ranks, scenario: Callable[[], None]) -> None:
    ranks2.run(scenario)


@on_ranks("ranks")
def test_what_is_not_there_is_said() -> None:
    """Never a norm of 0, a state without its other parts, a step of a rank's own."""
    both = sharded(make=ADAMW)
    both.train(0)
    both.backward(1)
    parameters = [*both.ours.parameters()]
    attempts: Attempts = [
        ("max_norm=", lambda: torch.nn.utils.clip_grad_norm_(parameters, 1.0)),
        ("max_norm=", lambda: torch.nn.utils.clip_grad_value_(parameters, 1.0)),
        ("max_norm=", lambda: [each.grad.norm() for each in parameters if each.grad is not None]),
        ("full_state_dict", lambda: both.mine.state_dict()),
        ("full_state_dict", lambda: copy.deepcopy(both.mine)),
        ("full_state_dict", lambda: pickle.dumps(both.mine)),
        (r"before optimizer.step\(\)", lambda: both.backward(2)),
    ]
    refuse(attempts)
    for keep in (True, False):
        both.mine.zero_grad(set_to_none=keep is False)
    both.mine.step()
    both.other.step()
    both.other.zero_grad()
    both.compare()
    parameters[0].grad = torch.ones_like(parameters[0])
    with pytest.raises(dp_compile.ReductionError, match="that no synchronised backward"):
        both.mine.step()
    parameters[0].grad = None
    both.train(2)


@pytest.mark.parametrize(("way", "max_norm"), [("sharded", None), ("sharded", 0.05), ("next forward", None)])
@on_ranks("ranks")
def test_parameters_in_other_memory(way: str, max_norm: float | None) -> None:
    config = dp_compile.ReplicateConfig(backend="aot_eager")
    both = made(way, make=ADAMW, config=config, max_norm=max_norm)
    both.train(*range(6))
    both.ours.to(torch.float32)
    for each in both.ours.parameters():
        each.data = each.data.clone()  # other memory
    both.train(6)
    fixed = dp_compile.ReplicateConfig(backend="aot_eager", bucket_cap_mb=25)
    other = made(way, make=ADAMW, config=fixed, max_norm=max_norm)
    other.train(*range(7))
    if max_norm is None:
        assert_same(full_state_dict(both.mine), full_state_dict(other.mine))


@pytest.mark.parametrize("way", ["sharded", "next forward"])
@on_ranks("ranks")
def test_parameters_are_waited_for(way: str) -> None:
    """The other ranks are there long before the last one sends what it has updated."""
    gather = Shard._gather

    def late(self: Shard, *args: Any) -> None:
        if dist.get_rank() == dist.get_world_size() - 1:
            time.sleep(0.3)
        gather(self, *args)

    with poisoned(), mock.patch.object(Shard, "_gather", late):
        both = made(way, make=ADAMW)
        both.run(batch(0)).square().mean().backward()
        found = [each.detach().clone() for each in both.ours.parameters()]
    both.backward_of_theirs(0)
    both.other.step()
    for one, other in zip(found, both.theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other)


# --- checkpoints ------------------------------------------------------------------------------------------------------


@on_ranks("ranks")
def test_a_state_of_a_plain_optimizer_and_back() -> None:
    both = sharded(make=ADAMW)
    both.train(0, 1)
    assert_same(full_state_dict(both.mine), both.other.state_dict())
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
    assert all(map(torch.equal, both.ours.parameters(), again.ours.parameters()))
    state = copy.deepcopy(both.other.state_dict())
    moments = next(each for each in state["state"].values() if each["exp_avg"].numel() > 1)
    moments["exp_avg"] = moments["exp_avg"].flatten()[:1].view([1] * moments["exp_avg"].dim())
    with pytest.raises(dp_compile.ConfigError, match=r"exp_avg of shape \[1"):
        both.mine.load_state_dict(state)


STATES: dict[str, tuple[Callable[[], nn.Module], Make]] = {
    "adamw": (Net, ADAMW),
    "channels last": (Last, ADAMW),
    "sgd": (Net, SGD),
}


@pytest.mark.parametrize("name", [*list(STATES)[:-1], pytest.param("sgd", marks=pytest.mark.nightly)])
@on_ranks("ranks4")
def test_saved_on_four_ranks_and_loaded_on_two_and_on_one(tmp_path: Path, name: str) -> None:
    """On all ranks, then gone on from by fewer of them, whose buckets are others."""
    torch.manual_seed(1)
    one_bucket = dp_compile.ReplicateConfig(backend="aot_eager")
    build, make = STATES[name]
    both = sharded(build, make)
    both.train(0, 1)
    state = full_state_dict(both.mine)
    dcp.save({"model": both.ours.state_dict(), "optimizer": sharded_state_dict(both.mine)}, checkpoint_id=str(tmp_path))
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
                load_sharded_state_dict(optimizer, str(tmp_path))
            assert_same(full_state_dict(optimizer), state)
            model(batch(0)).square().mean().backward()  # another plan: the state moves
            optimizer.step()
            assert len(full_state_dict(optimizer)["state"]) == len(state["state"])


def wrong_checkpoint(directory: str) -> None:
    both = sharded(make=ADAMW)
    both.train(0)
    dcp.save({"optimizer": sharded_state_dict(both.mine)}, checkpoint_id=directory)
    before = full_state_dict(both.mine)
    others = [sharded(build, make).mine for build, make in ((lambda: nn.Linear(6, 6), ADAMW), (Net, one_group))]
    attempts: Attempts = [
        ("which this optimizer does not have", lambda: load_sharded_state_dict(others[0], directory)),
        ("parameter groups", lambda: load_sharded_state_dict(others[1], directory)),
        ("no sharded optimizer under 'other'", lambda: load_sharded_state_dict(both.mine, directory, key="other")),
        ("is not sharded", lambda: load_sharded_state_dict(both.other, directory)),
        ("is not sharded", lambda: sharded_state_dict(both.other)),
        ("must be a rank", lambda: full_state_dict(both.mine, to=9)),
        ("full_state_dict", lambda: [sum(each.values()) for each in sharded_state_dict(both.mine)["state"].values()]),
    ]
    refuse(attempts)
    assert_same(full_state_dict(both.mine), before)


def turn(model: nn.Module) -> nn.Module:
    return model.to(memory_format=torch.channels_last if model.stem.weight.is_contiguous() else torch.contiguous_format)  # type: ignore[union-attr,operator,call-overload,no-any-return]


def another_order(directory: str) -> None:
    """Parameters whose elements lie otherwise than their gradients, or than what was saved."""
    both = sharded(Last, make=one_group)
    both.train(0)
    dcp.save({"optimizer": sharded_state_dict(both.mine)}, checkpoint_id=directory)
    turn(both.ours)
    other = sharded(lambda: turn(Last()), make=one_group)
    late = dp_compile.replicate(Last(), config=SMALL)
    turn(late)
    shares = Net()
    shares.layers[3].weight.data = shares.layers[0].weight.data
    dp_compile.replicate(shares, config=SMALL)
    attempts: Attempts = [
        ("stem.weight has strides", lambda: both.backward(1)),
        ("in another order", lambda: load_sharded_state_dict(other.mine, directory)),
        (
            "stem.weight has strides",
            lambda: dp_compile.optim.in_backward(late, one_group(late.parameters()), shard=True),
        ),
        ("shares its memory", lambda: dp_compile.optim.in_backward(shares, one_group(shares.parameters()), shard=True)),
    ]
    refuse(attempts)
    turn(both.ours)
    both.other.zero_grad()
    both.train(1)


@pytest.mark.parametrize("scenario", [wrong_checkpoint, another_order])
def test_a_checkpoint_of_something_else(ranks: Ranks, tmp_path: Path, scenario: Callable[[str], None]) -> None:
    ranks.run(scenario, str(tmp_path))


# --- what cannot be ---------------------------------------------------------------------------------------------------


class Complex(Net):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(2, dtype=torch.complex64))


@on_ranks("ranks2")
def test_what_is_refused() -> None:
    def ready(build: Callable[[], nn.Module] = Net, **options: Any) -> Any:
        return dp_compile.replicate(build(), **{"config": SMALL} | options)

    def shard(model: Any, kind: Any = torch.optim.AdamW) -> Any:
        return dp_compile.optim.in_backward(model, kind(model.parameters(), lr=0.1), shard=True)

    def foreign() -> None:
        model = ready()
        everything = [*model.parameters(), nn.Parameter(torch.ones(2))]
        dp_compile.optim.in_backward(model, torch.optim.SGD(everything, lr=0.1), shard=True)

    hooked, twice, joined = ready(), ready(), ready()
    hooked.register_comm_hook(None, default_hooks.fp16_compress_hook)
    parameters = [*twice.parameters()]
    dp_compile.optim.in_backward(twice, torch.optim.SGD(parameters[:4], lr=0.1), shard=True)
    shard(joined)
    attempts: Attempts = [
        ("check_nan", lambda: shard(ready(config=dp_compile.ReplicateConfig(backend="aot_eager", check_nan=True)))),
        ("comm hook", lambda: shard(hooked)),
        ("factor is complex", lambda: shard(ready(Complex))),
        ("is not in the module", foreign),
        (
            "has a sharded optimizer already",
            lambda: dp_compile.optim.in_backward(twice, torch.optim.SGD(parameters[4:], lr=0.1), shard=True),
        ),
        ("needs whole gradients", lambda: joined.register_comm_hook(None, default_hooks.fp16_compress_hook)),
        (r"join\(\) needs whole gradients", lambda: dp_compile.join(joined).__enter__()),
        ("retain_graph=True", lambda: joined(batch(0)).square().mean().backward(retain_graph=True)),
        (
            r"in_backward\(shard=True\)",
            lambda: shard(ready(), torch.optim.SGD if dist.get_rank() else torch.optim.Adam),
        ),
    ]
    refuse(attempts)
