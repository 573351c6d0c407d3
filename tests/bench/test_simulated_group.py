"""The simulated group: values as if all ranks held the same, times as stated, and modes that train on it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bench_standins import tiny

from dp_compile.bench import simulated_group
from dp_compile.bench.modes import mode
from dp_compile.bench.simulated_group import SimulatedGroup
from dp_compile.errors import ConfigError
from dp_compile.plan.cost import AllReduceCost
from dp_compile.testing import Ranks

RANKS = 64
FAST = AllReduceCost(1e-4, 1e-12)
NEVER = AllReduceCost(1e6, 0.0)


def reduced(group: SimulatedGroup, tensor: torch.Tensor, op: Any) -> torch.Tensor:
    options = dist.AllreduceOptions()
    options.reduceOp = op
    group.allreduce([tensor], options).wait()
    return tensor


# --- values and times, without a default group -------------------------------------------------------------------


def test_all_ranks_hold_the_same() -> None:
    group, ops = SimulatedGroup(0, RANKS, FAST), dist.ReduceOp
    for op, factor in ((ops.SUM, RANKS), (ops.AVG, 1), (ops.MAX, 1), (ops.MIN, 1)):
        assert reduced(group, torch.tensor([1.5, -2.0]), op).tolist() == [1.5 * factor, -2.0 * factor]
    with pytest.raises(ConfigError, match=r"must be SUM, AVG, MIN, MAX, BAND or BOR, got .*PRODUCT"):
        reduced(group, torch.ones(2), ops.PRODUCT)


def test_a_collective_lasts_as_long_as_stated_and_waits_its_turn() -> None:
    """From below only: a machine may be late, never early."""
    group, data = SimulatedGroup(0, RANKS, AllReduceCost(0.02, 1e-6)), torch.zeros(2500)
    start = time.monotonic()
    works = [group.allreduce([data]), group.broadcast([data]), group.barrier()]
    works[0].wait()
    assert time.monotonic() - start >= 0.02 + 0.01
    works[2].wait()
    assert time.monotonic() - start >= (0.02 + 0.01) * 1.5 + 0.02
    assert works[1].is_completed()
    assert not SimulatedGroup(0, RANKS, NEVER).allreduce([data]).is_completed()


# --- as a default group -----------------------------------------------------------------------------------------


@pytest.fixture
def fresh() -> Iterator[Ranks]:
    """A new process: modes change settings of the compiler."""
    ranks = Ranks(1, "forkserver")
    yield ranks
    ranks.stop()


def on_simulated(function: Callable[..., Any], *arguments: Any, cost: AllReduceCost = FAST) -> Any:
    """In that process, with the simulated group in place of its group."""
    dist.destroy_process_group()
    os.environ.update(simulated_group.environment(cost))
    dist.init_process_group("fabric", store=dist.HashStore(), rank=0, world_size=RANKS)
    return function(*arguments)


def gradients_of(name: str) -> dict[str, torch.Tensor]:
    """Of the first batch, by a mode, and after three steps."""
    torch.manual_seed(0)
    chosen = mode(name)
    if hasattr(chosen, "backend"):
        object.__setattr__(chosen, "backend", "aot_eager")
    trainer = chosen.prepare(tiny())
    batch = tiny().batch(torch.Generator().manual_seed(1))
    found = {f"first {key}": value.cpu() for key, value in trainer.gradients(batch).items()}
    for _ in range(3):
        trainer.step(batch)
    return found | {f"later {key}": value.cpu() for key, value in trainer.gradients(batch).items()}


@pytest.mark.parametrize(
    "name",
    ["ours", "python_reducer", *(pytest.param(each, marks=pytest.mark.nightly) for each in ("ddp", "ddp_compiled"))],
)
def test_modes_train_as_one_process_does(fresh: Ranks, name: str) -> None:
    """No mode waits for a rank that does not exist, and averages are the gradients of this process."""
    (found,) = fresh.run(on_simulated, gradients_of, name)
    alone = of_one_process()
    assert found.keys() == alone.keys()
    for key, value in alone.items():
        torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-6)


@cache
def of_one_process() -> dict[str, torch.Tensor]:
    ranks = Ranks(1, "forkserver")
    try:
        (found,) = ranks.run(gradients_of, "compute")
    finally:
        ranks.stop()
    return dict(found)
