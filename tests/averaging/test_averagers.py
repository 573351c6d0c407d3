"""Averages of parameters: torch's own averagers on their schedule; what they leave out; ranks that differ."""

from __future__ import annotations

import copy
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch import nn
from torch.distributed.algorithms.model_averaging import averagers as theirs

import dp_compile
from dp_compile import averaging
from dp_compile.averaging import exchange
from dp_compile.testing.ranks import Ranks

TheirOptimizer: Any = torch.distributed.optim.PostLocalSGDOptimizer  # loading it warns, unless ours did that before


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))


def go_astray(model: nn.Module, step: int) -> None:
    """What an optimizer does to the parameters of a rank, on its data."""
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
        with torch.no_grad():
            parameter -= 0.1 * parameter.grad


@on_ranks("ranks2")
def test_periodic_as_torchs() -> None:
    """Bit for bit after each step, from parameters and from groups."""
    averaged = 0
    for given in ((1, 0), (3, 0), (2, 3)):
        averagers = averaging.PeriodicModelAverager(*given), theirs.PeriodicModelAverager(*given)
        assert isinstance(averagers[0], theirs.PeriodicModelAverager)
        models = net(), net()
        for step in range(7):
            for model, averager in zip(models, averagers, strict=True):
                go_astray(model, step)
                alone = next(model.parameters()).detach().clone()
                averager.average_parameters(model.parameters() if step % 2 else [{"params": list(model.parameters())}])
            averaged += not torch.equal(alone, next(model.parameters()))
            for mine, other in zip(*(model.parameters() for model in models), strict=True):
                assert torch.equal(mine, other), (given, step)
            assert averagers[0].step == averagers[1].step == step + 1
    assert averaged == 7 + 3 + 2


# --- what torch's leave out, or do to parameters --------------------------------------------------------------------


@on_ranks("ranks2")
def test_in_place_and_each_in_its_own_dtype() -> None:
    """Several dtypes, memory orders, a parameter twice, one without a gradient, frozen ones; views stay views."""
    exchange.BUCKET_MB = 1e-5  # type: ignore[misc]
    rank, flat = dist.get_rank(), torch.zeros(24)
    dtypes = (torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.complex64)
    tensors = [nn.Parameter(torch.full((2, 3, 2, 2), 1.0 + 2 * rank).to(dtype)) for dtype in dtypes]
    tensors.append(nn.Parameter(torch.full((2, 3, 2, 2), 4.0 * rank).to(memory_format=torch.channels_last)))
    tensors.append(nn.Parameter(flat[:12].view(3, 4)))
    tensors.append(nn.Parameter(torch.arange(12.0).view(3, 4).t() * rank, requires_grad=False))
    tensors.append(nn.Parameter(torch.empty(0)))
    with torch.no_grad():
        tensors[6] += 1 + rank
    before = [(tensor, tensor.data_ptr(), tensor.stride()) for tensor in tensors]
    given = [{"params": tensors[:4]}, {"params": tensors[3:]}]
    averaging.PeriodicModelAverager(2).average_parameters(given)
    assert [(tensor, tensor.data_ptr(), tensor.stride()) for tensor in tensors] == before
    for tensor, value in zip(tensors[:7], [2.0] * 5 + [2.0, 1.5], strict=True):
        assert torch.equal(tensor, torch.full_like(tensor, value))
    assert torch.equal(flat, torch.tensor([1.5, 0.0]).repeat_interleave(12))
    assert torch.equal(tensors[7], torch.arange(12.0).view(3, 4).t() / 2)


@on_ranks("ranks2")
def test_parameters_without_a_gradient_are_averaged_too() -> None:
    """A deviation: torch averages what has a gradient, after `zero_grad()` nothing, and does not say so."""
    for kind, second in ((averaging.PeriodicModelAverager, 0.5), (theirs.PeriodicModelAverager, dist.get_rank())):
        parameters = [nn.Parameter(torch.tensor([float(dist.get_rank())])) for _ in range(2)]
        parameters[0].grad = torch.ones(1)
        kind(2).average_parameters(parameters)
        assert [parameter.item() for parameter in parameters] == [0.5, second]


@pytest.mark.usefixtures("fake_group")
def test_what_is_refused() -> None:
    averager = averaging.PeriodicModelAverager(2)
    used_up = net().parameters()
    list(used_up)
    with pytest.raises(dp_compile.ConfigError, match="A generator that was used up"):
        averager.average_parameters(used_up)
    with pytest.raises(dp_compile.ConfigError, match="got str"):
        averager.average_parameters(["weight"])  # type: ignore[list-item]
    for other in (torch.zeros(2, dtype=torch.long), torch.eye(2).to_sparse(), torch.zeros(2, device="meta")):
        with pytest.raises(dp_compile.ConfigError, match=r"parameter 1 of params must be dense .*, got 'a torch"):
            averager.average_parameters([torch.zeros(1), other])
    assert averager.step == 0


# --- ranks that differ ----------------------------------------------------------------------------------------------


FAULTS: dict[str, tuple[int, str]] = {
    "period": (0, "period is 3 there, 2 on rank 0"),
    "step": (2, "step is 4 there, 2 on rank 0"),
    "order": (2, 'parameters[1] is "float32 (2, 2) strides (1, 2)" there, "float32 (2, 2)" on rank 0'),
    "dtype": (2, 'parameters[0] is "float64 (4,)" there'),
}


@pytest.mark.parametrize("fault", FAULTS)
@on_ranks("ranks2")
def test_ranks_that_differ_are_named_at_once(fault: str) -> None:
    """On both ranks; also what rank 1 alone changes after the first call, where only it knows."""
    there, (wrong_call, said) = dist.get_rank() == 1, FAULTS[fault]
    parameters = [nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(2, 2))]
    averager = averaging.PeriodicModelAverager(3 if there and fault == "period" else 2)
    for _ in range(wrong_call):
        averager.average_parameters(parameters)
    if there:
        averager.step = 4 if fault == "step" else averager.step
        parameters = {
            "order": [parameters[0], nn.Parameter(torch.zeros(2, 2).t())],
            "dtype": [nn.Parameter(torch.zeros(4, dtype=torch.float64)), parameters[-1]],
        }.get(fault, parameters)
    with pytest.raises(dp_compile.DesyncError) as error:
        averager.average_parameters(parameters)
    assert "average_parameters(): rank 1 differs from rank 0" in str(error.value)
    assert said in str(error.value)


def missing() -> str:
    """Rank 1 is a step late, and ends."""
    exchange.ASK_S = 2.0  # type: ignore[misc]
    group = dist.new_group(timeout=timedelta(seconds=2))
    averager = averaging.PeriodicModelAverager(1, process_group=group)
    model = net()
    averager.average_parameters(model.parameters())
    if dist.get_rank() == 1:
        return ""
    with pytest.raises(dp_compile.CommunicationError, match="step 1") as raised:
        averager.average_parameters(model.parameters())
    return str(raised.value)


def test_a_rank_that_does_not_come_is_named(own_ranks: Ranks) -> None:
    said, _ = own_ranks.run(missing)
    assert "rank(s) 1 did not reach this step" in said


# --- post-local SGD -------------------------------------------------------------------------------------------------


@on_ranks("ranks2")
def test_post_local_sgd_as_torchs() -> None:
    """A checkpoint of one loads in the other."""
    kind = averaging.PostLocalSGDOptimizer
    models = net(), net()
    optimizers = (
        kind(torch.optim.SGD(models[0].parameters(), lr=0.1, momentum=0.9), averaging.PeriodicModelAverager(2, 1)),
        TheirOptimizer(
            torch.optim.SGD(models[1].parameters(), lr=0.1, momentum=0.9), theirs.PeriodicModelAverager(2, 1)
        ),
    )
    assert isinstance(optimizers[0], TheirOptimizer)
    for step in range(5):
        if step == 3:
            states = [copy.deepcopy(optimizer.state_dict()) for optimizer in optimizers]
            assert states[0]["step"] == states[1]["step"] == 3
            for optimizer, state in zip(optimizers, reversed(states), strict=True):
                optimizer.averager.step = 0
                optimizer.load_state_dict(state)
                assert optimizer.averager.step == 3
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            x = torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
            model(x).square().sum().backward()
            optimizer.step()
        for mine, other in zip(*(model.parameters() for model in models), strict=True):
            assert torch.equal(mine, other)


@pytest.mark.usefixtures("fake_group")
def test_closures_and_schedulers_after_a_load() -> None:
    """A deviation: torch's keeps the groups from before a load, and a scheduler changes those."""
    averager = theirs.PeriodicModelAverager(100, 50)
    optimizer: Any = averaging.PostLocalSGDOptimizer(torch.optim.SGD(net().parameters(), lr=0.1), averager)
    optimizer.load_state_dict(optimizer.state_dict())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert optimizer.step(lambda: 2.5) == 2.5
    scheduler.step()
    assert optimizer.optim.param_groups[0]["lr"] == pytest.approx(0.01)
