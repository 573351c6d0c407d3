"""torch's PowerSGD in the captured graph: what torch's DDP computes with the same hook and the same seeds."""

from __future__ import annotations

import copy
import math
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from beside import AOT, batch, compile_whole, mlp, not_compiled, train_beside
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import dp_compile
from dp_compile.testing.ranks import Ranks

ONE_BUCKET = replace(AOT, bucket_cap_mb=math.inf)
OPTIONS: dict[str, Any] = {"matrix_approximation_rank": 1, "start_powerSGD_iter": 5, "min_compression_rate": 1.5}


class Net(nn.Module):
    """Matrices of two shapes, worth compressing and not, and vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(mlp(12), nn.Linear(6, 2), nn.Tanh(), nn.Linear(2, 6), mlp(12))
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layers(x) * self.scale
        return result


def pair(
    options: dict[str, Any], config: dp_compile.ReplicateConfig = ONE_BUCKET
) -> tuple[Any, DistributedDataParallel, PowerSGDState]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    ours = Net()
    theirs = DistributedDataParallel(copy.deepcopy(ours))
    theirs.register_comm_hook(PowerSGDState(None, **OPTIONS | options), powerSGD_hook)
    dp_compile.replicate(ours, config=config)
    state = PowerSGDState(None, **OPTIONS | options)
    ours.register_comm_hook(state, powerSGD_hook)  # type: ignore[operator]
    return ours, theirs, state


def train(ours: Any, run: Any, theirs: Any, steps: range, broken: tuple[int, ...] = (), micro: int = 1) -> None:
    """In the steps `broken` the second rank's backward is not captured."""
    by_hooks = lambda step: step in broken and dist.get_rank() == 1  # noqa: E731
    train_beside(ours, run, theirs, steps, by_hooks, micro, rows=8, rtol=1e-4, atol=1e-6)


def twenty_steps(options: dict[str, Any], compiled: bool, broken: tuple[int, ...], micro: int) -> Any:
    ours, theirs, state = pair(options)
    steps = 20 if not options else 10
    train(ours, (compile_whole if compiled else not_compiled)(ours), theirs, range(steps), broken, micro)
    assert state.iter == steps
    assert all(isinstance(name, str) for name in (*state.q_memory_dict, *state.error_dict))
    assert set(state.q_memory_dict) >= {f"layers.{each}.weight" for each in ("0.0", "0.2", "4.0", "4.2")}
    assert bool(state.error_dict) is state.use_error_feedback
    report = dp_compile.report(ours)
    dp_compile.unreplicate(ours)
    return dict(report.backwards), sum(each.synced for each in report.captures), state.compression_stats()


CASES: dict[str, tuple[dict[str, Any], bool, tuple[int, ...], int]] = {
    "captured": ({}, True, (), 1),
    "one rank by hooks": ({}, True, (3, 5, 8, 9), 1),
    "not compiled": ({"matrix_approximation_rank": 2, "orthogonalization_epsilon": 1e-8}, False, (), 1),
    "accumulated, rank 3": ({"matrix_approximation_rank": 3, "min_compression_rate": 0.9}, True, (7,), 2),
    "no memory": ({"use_error_feedback": False, "warm_start": False, "start_powerSGD_iter": 2}, True, (4,), 1),
    "batched": ({"batch_tensors_with_same_shape": True, "random_seed": 3}, True, (6,), 1),
}


AT_NIGHT = ("no memory", "batched", "accumulated, rank 3")


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.nightly] if case in AT_NIGHT else []) for case in CASES],
)
def test_as_torch_s_ddp(ranks2: Ranks, case: str) -> None:
    (ways, graphs, rate), (others, _, _) = ranks2.run(twenty_steps, *CASES[case])
    if case == "captured":
        assert ways == others == {"captured": 20}
        assert graphs == 2
        assert rate[0] > 1
    if case == "one rank by hooks":
        assert others == {"captured": 16, "eager hooks": 4}


@pytest.mark.nightly
@pytest.mark.parametrize("pool", ["ranks3", "ranks4"])
def test_as_torch_s_ddp_on_more_ranks(request: pytest.FixtureRequest, pool: str) -> None:
    """Ten steps, through the start iteration, one rank by hooks in some of them."""
    found = request.getfixturevalue(pool).run(twenty_steps, {"min_compression_rate": 1.4}, True, (4, 6), 1)
    ways = [each for each, _, _ in found]
    assert ways == [{"captured": 10}, {"captured": 8, "eager hooks": 2}, *[{"captured": 10}] * (len(ways) - 2)]


def saved_and_loaded(rank_1_has_counted: int) -> str:
    """As users save torch's state: a pickle of it. Loaded into other buckets, in the middle of it all."""
    ours, theirs, state = pair({}, replace(AOT, bucket_cap_mb=1e-5))
    train(ours, compile_whole(ours), theirs, range(7))
    weights, saved = copy.deepcopy(ours.state_dict()), pickle.dumps(state)
    dp_compile.unreplicate(ours)
    again, loaded = Net(), pickle.loads(saved)
    again.load_state_dict(weights)
    dp_compile.replicate(again, config=ONE_BUCKET)
    loaded.iter += rank_1_has_counted * dist.get_rank()
    try:
        again.register_comm_hook(loaded, powerSGD_hook)  # type: ignore[operator]
        train(again, compile_whole(again), theirs, range(7, 12), (8,))
        assert loaded.iter == 12
    except dp_compile.DesyncError as error:
        return str(error)
    finally:
        dp_compile.unreplicate(again)
    return ""


def test_a_state_is_saved_and_goes_on_in_other_buckets(ranks2: Ranks) -> None:
    assert ranks2.run(saved_and_loaded, 0) == ["", ""]


def test_ranks_that_have_counted_otherwise(ranks2: Ranks) -> None:
    for text in ranks2.run(saved_and_loaded, 1):
        assert "rank 1 differs from rank 0" in text
        assert "now at 8" in text


def other_seeds() -> str:
    model = dp_compile.replicate(Net(), config=ONE_BUCKET)
    try:
        model.register_comm_hook(PowerSGDState(None, random_seed=dist.get_rank()), powerSGD_hook)  # type: ignore[operator]
    except dp_compile.DesyncError as error:
        return str(error)
    finally:
        dp_compile.unreplicate(model)
    return ""


def test_ranks_with_other_seeds(ranks2: Ranks) -> None:
    for text in ranks2.run(other_seeds):
        assert "register_comm_hook(): rank 1 differs from rank 0" in text


def uneven_inputs() -> None:
    ours, theirs, state = pair({"start_powerSGD_iter": 2})
    run = compile_whole(ours)
    train(ours, run, theirs, range(3))
    for context, model, call in ((dp_compile.join(ours), ours, run), (theirs.join(), theirs, theirs)):
        with context:
            for number in range(2 + 2 * dist.get_rank()):
                model.zero_grad()
                call(batch(number, rows=8)).square().mean().backward()
    assert state.iter == 3 + 4
    train(ours, run, theirs, range(7, 9))
    dp_compile.unreplicate(ours)


def test_join(ranks2: Ranks) -> None:
    ranks2.run(uneven_inputs)


@pytest.mark.usefixtures("fake_group")
class TestAlone:
    @pytest.mark.nightly
    def test_a_warm_up_through_the_start_iteration_leaves_no_trace(self) -> None:
        torch._dynamo.reset()
        model = dp_compile.replicate(Net(), config=ONE_BUCKET)
        state = PowerSGDState(None, **OPTIONS | {"start_powerSGD_iter": 2})
        model.register_comm_hook(state, powerSGD_hook)
        numbers, run = state.rng.get_state()[2], compile_whole(model)
        dp_compile.warmup(model, [batch(0)], lambda x: run(x).sum(), accumulation=False)
        assert (state.iter, state.error_dict, state.q_memory_dict) == (0, {}, {})
        assert state.rng.get_state()[2] == numbers
        hooks = []
        for _ in range(4):
            run(batch(0)).sum().backward()
            hooks.append(any(each.key.reduction.hook for each in dp_compile.report(model).plan.buckets))
        assert hooks == [False, False, True, True]
        assert len(state.error_dict) == 4
        dp_compile.unreplicate(model)

    def test_a_state_of_torch_s_ddp(self) -> None:
        model = dp_compile.replicate(Net(), config=ONE_BUCKET)
        state = PowerSGDState(None)
        state.error_dict[0] = torch.zeros(3)
        with pytest.raises(dp_compile.ConfigError, match="by bucket, as of bucket 0: nobody knows"):
            model.register_comm_hook(state, powerSGD_hook)
        model.register_comm_hook(state := PowerSGDState(None), powerSGD_hook)
        with pytest.raises(dp_compile.ModuleError, match="belongs to a replicated module already"):
            dp_compile.replicate(Net(), config=ONE_BUCKET).register_comm_hook(state, powerSGD_hook)
        dp_compile.unreplicate(model)

    def test_settings_that_torch_refuses(self) -> None:
        """Where a state is made; and in one that was changed since."""
        with pytest.raises(ValueError, match="start_powerSGD_iter"):
            PowerSGDState(None, start_powerSGD_iter=1)
        model = dp_compile.replicate(Net(), config=ONE_BUCKET)
        state = PowerSGDState(None)
        state.start_powerSGD_iter = 1
        with pytest.raises(dp_compile.ConfigError, match=r"PowerSGDState\.start_powerSGD_iter is 1: with use"):
            model.register_comm_hook(state, powerSGD_hook)
        dp_compile.unreplicate(model)

    def test_where_torch_s_reducer_calls_it(self, caplog: pytest.LogCaptureFixture) -> None:
        model = dp_compile.replicate(Net(), config=replace(AOT, ddp_python_hook=False))
        with caplog.at_level("INFO", "dp_compile"):
            model.register_comm_hook(PowerSGDState(None), powerSGD_hook)
        why = "with ddp_python_hook=False torch's C++ reducer reduces"
        assert f"backwards are not captured: {why}" in caplog.text
        assert dp_compile.report(model).why_not_captured.endswith(why)
        assert dp_compile.report(model).mode == "torch's C++ reducer with comm hook powerSGD_hook"
        dp_compile.unreplicate(model)
