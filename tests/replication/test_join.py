"""Uneven inputs: the same training as in torch's DDP inside its `join()`, on real ranks.

In every way and with all other options: `tests/harness/parity.py`.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from parity import same_on_all_ranks
from reference_hooks import as_torch_s
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import dp_compile
from dp_compile.replication.join import joinable
from dp_compile.testing.ranks import Ranks

CONFIG = dp_compile.ReplicateConfig(backend="aot_eager", bucket_cap_mb=0.0005)


class Net(nn.Module):
    """With running statistics, and a branch that not every batch takes."""

    def __init__(self, branches: bool = False) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Linear(12, 4)
        self.side = nn.Linear(6, 12) if branches else None
        self.double()  # differences are differences, not rounding that a small batch's statistics blow up

    def forward(self, x: torch.Tensor, side: bool = False) -> torch.Tensor:
        hidden = self.first(x)
        if side and self.side is not None:
            hidden = hidden + self.side(x)
        out: torch.Tensor = self.last(self.norm(hidden).relu())
        return out


def batches(count: int, salt: int = 0) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * dist.get_rank() + salt)
    for _ in range(count):
        yield torch.randn(5, 6, generator=generator, dtype=torch.float64)


def twins() -> tuple[Any, Any, Any]:
    """Our wrapper, what to call, and torch's DDP, all from the same start."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Net()
    theirs = TorchDDP(copy.deepcopy(model))
    ours = dp_compile.DistributedDataParallel(model, config=CONFIG)
    return ours, torch.compile(ours, backend="aot_eager"), theirs


def train(model: Any, run: Any, count: int, *, micro_steps: int = 1, **options: bool) -> tuple[int, str]:
    """Train inside `join`; the number of steps, and what was raised."""
    optimizer, steps = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5), 0
    try:
        with model.join(**options):
            for number, x in enumerate(batches(count * micro_steps)):
                local = (number + 1) % micro_steps != 0
                with model.no_sync() if local else nullcontext():
                    run(x).square().mean().backward()
                if not local:
                    optimizer.step()
                    optimizer.zero_grad()
                    steps += 1
    except RuntimeError as error:
        return steps, str(error)
    return steps, ""


def same_state(ours: nn.Module, theirs: nn.Module) -> None:
    for (name, mine), other in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, other, msg=lambda text, n=name: f"{n}: {text}")


def run_uneven(counts: Sequence[int], settings: dict[str, Any], hook: bool = False) -> str:
    """What is raised, if ranks stop with the first one. `hook`: both sides have a comm hook that remembers."""
    ours, run, theirs = twins()
    for each in (ours, theirs) if hook else ():
        each.register_comm_hook({}, as_torch_s)
    count = counts[dist.get_rank()]
    steps = train(ours, run, count, **settings)
    assert steps == train(theirs, theirs, count, **settings)
    if steps[1]:
        assert steps[0] == min(counts)
        torch.testing.assert_close(list(ours.parameters()), list(theirs.parameters()))
        return steps[1]
    assert steps[0] == count
    same_state(ours, theirs)
    same_on_all_ranks(ours)
    # And what follows is ordinary training again.
    for each, call in ((ours, run), (theirs, theirs)):
        each.zero_grad()
        call(next(batches(1, salt=7))).square().mean().backward()
    return ""


@pytest.mark.parametrize(
    ("counts", "divide", "micro_steps", "hook"),
    [((2, 5), True, 1, False), ((0, 3), False, 2, False), ((2, 5), False, 1, True)],
)
def test_two_ranks(ranks2: Ranks, counts: tuple[int, int], divide: bool, micro_steps: int, hook: bool) -> None:
    ranks2.run(run_uneven, counts, {"divide_by_initial_world_size": divide, "micro_steps": micro_steps}, hook)


def test_throw_on_early_termination(ranks2: Ranks) -> None:
    first, second = ranks2.run(run_uneven, (2, 4), {"throw_on_early_termination": True})
    assert "Rank 0 exhausted all inputs" in first
    assert "Detected at least one rank that exhausted inputs" in second


@on_ranks("ranks2")
def test_beside_a_joinable_of_torch() -> None:
    """With a joinable of torch: an optimizer whose ranks each hold a part of the state."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # importing it warns of something torch deprecates

    ours, run, theirs = twins()
    for model, call in ((ours, run), (theirs, theirs)):
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
        with Join([model, optimizer]):
            for x in batches((2, 4)[dist.get_rank()]):
                call(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    same_state(ours, theirs)


@on_ranks("ranks2")
def test_a_plan_is_settled_while_a_rank_has_no_inputs() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = dp_compile.replicate(Net(), config=dp_compile.ReplicateConfig(backend="aot_eager"))
    call = torch.compile(model, backend="aot_eager")
    with dp_compile.join(model):
        for x in batches((6, 0)[dist.get_rank()]):
            model.zero_grad()
            call(x).square().mean().backward()
    model.zero_grad()
    call(next(batches(1))).square().mean().backward()
    report = dp_compile.report(model)
    assert sum(report.backwards.values()) == (7, 1)[dist.get_rank()]
    plans: list[Any] = [None, None]
    dist.all_gather_object(plans, report.plan)
    assert plans[0] == plans[1]


@pytest.mark.parametrize("kind", ["unused", "nan"])
@on_ranks("ranks2")
def test_errors_reach_a_rank_without_inputs(kind: str) -> None:
    """Rank 1 goes on alone, and leaves parameters out, or has a loss that is not a number."""
    torch._dynamo.reset()
    model = dp_compile.replicate(Net(branches=True), config=dataclasses.replace(CONFIG, check_nan=kind == "nan"))
    call = torch.compile(model, backend="aot_eager")

    def train_on() -> None:
        with dp_compile.join(model):
            for number, x in enumerate(batches((1, 3)[dist.get_rank()])):
                factor = float("nan") if kind == "nan" and number else 1.0
                (factor * call(x, kind == "nan" or number == 0).square().mean()).backward()

    text = r"not finite: first\.weight \(nan\).*The loss was not finite on rank 1"
    if kind == "unused":
        text = f"on {'this rank' if dist.get_rank() else 'rank 1'}: side.weight, side.bias"
    with pytest.raises(dp_compile.ReductionError, match=text):
        train_on()


@pytest.mark.usefixtures("fake_group")
def test_refusals() -> None:
    torch._dynamo.reset()
    inside, outside = (dp_compile.replicate(nn.Linear(2, 2), config=CONFIG) for _ in range(2))
    call = torch.compile(lambda x: outside(inside(x)), backend="aot_eager")
    with dp_compile.join(inside, enable=False):
        call(torch.ones(1, 2)).sum().backward()
    reaches = pytest.raises(dp_compile.ConfigError, match="reaches the replicated modules of weight, weight")
    with dp_compile.join(inside), reaches:
        call(torch.ones(1, 2)).sum().backward()
    call(torch.ones(1, 2)).sum().backward()
    second = pytest.raises(dp_compile.ConfigError, match="is the first member of its context")
    with Join([joinable(outside), joinable(inside)]), second, dp_compile.compiled_backward():
        inside(torch.ones(1, 2)).sum().backward()
    whole = dp_compile.replicate(nn.Sequential(dp_compile.replicate(nn.Linear(2, 2)), nn.Linear(2, 2)))
    with pytest.raises(dp_compile.ConfigError, match="separately replicated parts"):
        dp_compile.join(whole).__enter__()


@on_ranks("ranks2")
def test_a_divide_factor_is_what_sums_are_divided_by() -> None:
    torch._dynamo.reset()
    config = dp_compile.ReplicateConfig(backend="aot_eager", gradient_divide_factor=1.0)
    model = dp_compile.replicate(nn.Linear(1, 1, bias=False), config=config)
    run = torch.compile(model, backend="aot_eager")
    with dp_compile.join(model, divide_by_initial_world_size=False):
        for expected in (2.0, 1.0) if dist.get_rank() == 0 else (2.0,):
            model.zero_grad()
            run(torch.ones(1, 1)).sum().backward()
            assert float(model.weight.grad) == expected
