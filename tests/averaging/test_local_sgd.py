"""Local SGD through a replicated module: each rank trains by itself, averages, and goes back to reductions."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from poison import poisoned
from torch import nn
from torch.distributed.algorithms.model_averaging import averagers as theirs

import dp_compile
from dp_compile import averaging
from dp_compile.config import CHECK_VARIABLE
from dp_compile.testing.ranks import Ranks

CONFIG = dp_compile.ReplicateConfig(backend="aot_eager")
compared = mock.patch.dict(os.environ, {CHECK_VARIABLE: "1"})
"""Parameters, after each synchronised backward."""
LOCAL_FROM, LOCAL_TO, STEPS = 3, 9, 12
PERIOD = 3


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def batch(step: int) -> torch.Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))


def alone(steps: range) -> nn.Module:
    """No module of this package: gradients averaged by hand outside of the local phase, torch's averager inside."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    averager = theirs.PeriodicModelAverager(PERIOD, LOCAL_FROM + PERIOD - 1)
    for step in steps:
        optimizer.zero_grad()
        model(batch(step)).square().sum().backward()
        if not LOCAL_FROM <= step < LOCAL_TO:
            for parameter in model.parameters():
                parameter.grad /= dist.get_world_size()
                dist.all_reduce(parameter.grad)
        optimizer.step()
        if step < LOCAL_TO:
            averager.average_parameters(model.parameters())
        for momentum in momenta(optimizer) if step == LOCAL_TO - 1 else ():
            momentum /= dist.get_world_size()
            dist.all_reduce(momentum)
    return model


def momenta(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [state["momentum_buffer"] for state in optimizer.state.values()]


@compared
def train(how: str, momenta_too: bool = True) -> list[torch.Tensor]:
    """Reduced, then local with averages, then reduced again. The drift check looks at every reduced backward."""
    torch._dynamo.reset()
    model: Any = (dp_compile.DistributedDataParallel if how == "wrapper" else dp_compile.replicate)(
        build(), config=CONFIG
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run = model
    if how == "crossing":  # averages wait for updates that were left for the next forward
        dp_compile.optim.in_backward(model, optimizer, overlap_forward=True)
    if how in ("crossing", "compiled"):
        run = torch.compile(model, backend="dp_compile" if how == "crossing" else "aot_eager")
    averager = averaging.PeriodicModelAverager(PERIOD, LOCAL_FROM + PERIOD - 1)
    apart = 0
    with poisoned():
        for step in range(STEPS):
            is_local = LOCAL_FROM <= step < LOCAL_TO
            if how == "wrapper":
                model.require_backward_grad_sync = not is_local
            else:
                model.set_requires_gradient_sync(not is_local)
            optimizer.zero_grad()
            run(batch(step)).square().sum().backward()
            optimizer.step()
            if step < LOCAL_TO:
                averager.average_parameters(model.parameters())
            if step == LOCAL_TO - 1 and momenta_too:
                averaging.PeriodicModelAverager(2).average_parameters(momenta(optimizer))
            own = next(model.parameters()).detach().clone()
            others = [torch.empty_like(own) for _ in range(dist.get_world_size())]
            dist.all_gather(others, own)
            apart += not torch.equal(*others)
    # Of the six local steps the third and the last end with an average.
    assert apart == LOCAL_TO - LOCAL_FROM - 2
    for found, expected in zip(model.parameters(), alone(range(STEPS)).parameters(), strict=True):
        torch.testing.assert_close(found, expected)
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("how", ["compiled", "eager", "wrapper", "crossing"])
def test_reduced_then_local_then_reduced(ranks2: Ranks, how: str) -> None:
    """As without this package; no alarm of the checks against steps on gradients that are not reduced, and drift."""
    one, other = ranks2.run(train, how)
    torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_momenta_that_were_not_averaged_are_found(ranks2: Ranks) -> None:
    """A true alarm: parameters were equal, but each rank's optimizer goes on in a direction of its own."""
    for ok, said in ranks2.outcomes(train, "eager", False):
        assert not ok
        assert "DesyncError: parameters differ between ranks after 5 synchronised backwards" in said


@pytest.mark.parametrize("averaged", ["some", "alone", "by torch", "all", "by an outer optimizer"])
@on_ranks("ranks2")
@compared
def test_no_average_before_reductions_is_an_error(averaged: str) -> None:
    """Local steps, then reductions; `averaged`: which parameters, over this rank alone, or by torch's averager."""
    torch._dynamo.reset()
    model: Any = dp_compile.replicate(build(), config=CONFIG)
    group = {True: None, False: [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]}[averaged != "alone"]
    averager = (theirs if averaged == "by torch" else averaging).PeriodicModelAverager(2, 0, group)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    if averaged == "by an outer optimizer":
        optimizer = averaging.OuterOptimizer(optimizer, 2, outer_lr=1.0, momentum=0.0)
    errors = []
    for step in range(4):
        optimizer.zero_grad()
        model.set_requires_gradient_sync(step >= 2)
        try:
            model(batch(step)).square().sum().backward()
        except (dp_compile.ReductionError, dp_compile.DesyncError) as error:
            errors.append(str(error))
        optimizer.step()
        if step == 1 and averaged != "by an outer optimizer":
            averager.average_parameters([next(model.parameters())] if averaged == "some" else model.parameters())
    assert bool(errors) == (averaged not in ("all", "by an outer optimizer"))
    assert not errors or "changed before the gradient was reduced" in errors[0]
