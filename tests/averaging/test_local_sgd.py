"""Local SGD through a replicated module: each rank trains by itself, averages, and goes back to reductions."""

from __future__ import annotations

import gc
import os
from functools import partial
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
from dp_compile.averaging import exchange
from dp_compile.config import CHECK_VARIABLE
from dp_compile.passes.crossing import in_flight
from dp_compile.replication.module import replica_of
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


def in_flight_now() -> int:
    """How many buckets are in flight in this process."""
    return len({id(each) for each in in_flight.values()})


class Broken(nn.Tanh):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return super().forward(x)


def crossing_model(
    parts: slice = slice(None), activation: nn.Module | None = None
) -> tuple[Any, Any, torch.optim.Optimizer]:
    torch._dynamo.reset()
    plain = build()
    plain[1] = activation or plain[1]
    model: Any = dp_compile.replicate(plain, config=CONFIG)
    optimizer = torch.optim.SGD(nn.ModuleList(model[parts]).parameters(), lr=0.1, momentum=0.9)
    dp_compile.optim.in_backward(model, optimizer, overlap_forward=True)
    return model, torch.compile(model, backend="dp_compile"), optimizer


@compared
def train(how: str, momenta_too: bool = True, bucket_mb: float = 25.0) -> tuple[list[int], list[torch.Tensor]]:
    """Reduced, then local with averages, then reduced again. The drift check looks at every reduced backward.

    Returns how many buckets are in flight after each local step, and the parameters.
    """
    exchange.BUCKET_MB = bucket_mb  # type: ignore[misc]
    torch._dynamo.reset()
    model: Any
    optimizer: Any
    if how in ("crossing", "broken"):
        model, run, optimizer = crossing_model(activation=Broken() if how == "broken" else nn.Tanh())
    else:
        replicated = dp_compile.DistributedDataParallel if how == "wrapper" else dp_compile.replicate
        model = replicated(build(), config=CONFIG)
        run = model if how == "eager" else torch.compile(model, backend="aot_eager")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    averager = averaging.PeriodicModelAverager(PERIOD, LOCAL_FROM + PERIOD - 1)
    counts, apart = [], 0
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
            counts.append(in_flight_now())
            if step == LOCAL_TO - 1 and momenta_too:
                averaging.PeriodicModelAverager(2).average_parameters(momenta(optimizer))
            if how not in ("crossing", "broken"):
                mine = next(model.parameters()).detach().clone()
                others = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
                dist.all_gather(others, mine)
                apart += not torch.equal(*others)
        # Of the six local steps the third and the last end with an average.
        assert how in ("crossing", "broken") or apart == LOCAL_TO - LOCAL_FROM - 2
        for found, expected in zip(model.parameters(), alone(range(STEPS)).parameters(), strict=True):
            torch.testing.assert_close(found, expected)
    return counts[LOCAL_FROM:LOCAL_TO], [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("how", ["compiled", "eager", "wrapper"])
def test_reduced_then_local_then_reduced(ranks2: Ranks, how: str) -> None:
    """As without this package; no alarm of the checks against steps on gradients that are not reduced, and drift."""
    (_, one), (_, other) = ranks2.run(train, how)
    torch.testing.assert_close(one, other, rtol=0, atol=0)


# --- averages that the next forward waits for ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "bucket_mb", "buckets"), [("crossing", 25.0, 1), ("crossing", 1e-5, 4), ("broken", 25.0, 0)]
)
def test_averages_that_the_next_forward_waits_for(ranks2: Ranks, how: str, bucket_mb: float, buckets: int) -> None:
    """Behind a forward of several graphs nothing stays in flight."""
    for counts, _ in ranks2.run(train, how, True, bucket_mb):
        assert counts == [0, 0, buckets] * 2


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("uncompiled", ()),
        ("reduced", ()),
        ("stepped", ()),
        ("warmed up", ()),
        ("written", ("0.weight changed while an average was in flight", "the average of 0.weight")),
        ("lost", ("average_parameters() at step 0: all ranks were there", "the average of 0.weight")),
        ("lost, several", ("the average of 0.weight", "the average of 0.weight")),
    ],
)
@on_ranks("ranks2")
@compared
def test_what_comes_between(fault: str, said: tuple[str, ...]) -> None:
    """Something happens while averages are in flight; then two forwards."""
    exchange.ASK_S = 1.0  # type: ignore[misc]
    model, run, optimizer = crossing_model(slice(2))
    other = torch.optim.SGD(model[2].parameters(), lr=0.1)  # leaves gradients where they are
    buckets = 4 if fault == "lost, several" else 1
    weight = next(model.parameters())
    averager = averaging.PeriodicModelAverager(2)
    model.set_requires_gradient_sync(False)
    run(batch(0)).sum().backward()
    optimizer.step()
    other.step()
    errors = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "BUCKET_MB", 1e-5 if buckets > 1 else 25.0)
        averager.average_parameters(model.parameters())
        assert in_flight_now() == buckets
        assert not replica_of(model).has_in_flight()  # nothing that clocks of the last backward have not seen
        if fault == "written":
            with torch.no_grad():
                weight += 1
        elif fault.startswith("lost"):
            patch.setattr(exchange, "finished", partial(lose, exchange.finished))
            if buckets > 1:
                with pytest.raises(dp_compile.CommunicationError):  # and not what the other buckets' waits raise
                    model.state_dict()
                assert not in_flight_now()
        elif fault == "stepped":
            weight.grad = torch.ones_like(weight)
            optimizer.step()  # once more: it updates averages
            assert not in_flight_now()
        elif fault == "uncompiled":
            assert not model(batch(1)).isnan().any()
            assert not in_flight_now()
        elif fault == "warmed up":
            dp_compile.warmup(model, [batch(1)], lambda x: run(x)[0, 0], accumulation=False, gradients_kept=False)
            model.set_requires_gradient_sync(True)
        elif fault == "reduced":
            model.set_requires_gradient_sync(True)
        for _ in range(2):
            try:
                run(batch(1))[0, 0].backward()
                optimizer.step()
            except (dp_compile.ReductionError, dp_compile.CommunicationError) as error:
                errors.append(str(error))
    assert len(errors) == len(said)
    assert all(text in error for text, error in zip(said, errors, strict=True)), errors


def lose(finish: Any, reducing: Any) -> None:
    finish(reducing)
    raise RuntimeError("Operation timed out!")  # gloo's


@compared
def without_the_optimizer() -> torch.Tensor:
    """The optimizer that crosses the step is gone, and a backward reaches parameters past the forward."""
    model, run, optimizer = crossing_model()
    parameters = list(model.parameters())
    model.set_requires_gradient_sync(False)
    run(batch(0)).sum().backward()
    optimizer.step()
    averaging.PeriodicModelAverager(2).average_parameters(parameters)
    assert in_flight_now()
    del optimizer
    gc.collect()
    torch.stack([each.sum() for each in parameters]).sum().backward()
    assert not in_flight_now()
    return torch.cat([each.detach().flatten() for each in model.state_dict().values()])


@compared
def with_one_memory() -> torch.Tensor:
    """Two parameters in one memory, averaged in two buckets: one that arrives is no change of the other."""
    model, run, optimizer = crossing_model(activation=nn.Linear(5, 5))
    model[1].bias.data = model[0].bias.data
    averager = averaging.PeriodicModelAverager(1)
    with mock.patch.object(exchange, "BUCKET_MB", 1e-5):
        model.set_requires_gradient_sync(False)
        for step in range(3):
            run(batch(step)).sum().backward()
            optimizer.step()
            averager.average_parameters(model.parameters())
            assert in_flight_now() == 4
    return torch.cat([each.detach().flatten() for each in model.state_dict().values()])


@pytest.mark.parametrize("scenario", [without_the_optimizer, with_one_memory])
def test_averages_without_their_optimizer_and_in_one_memory(ranks2: Ranks, scenario: Any) -> None:
    here, there = ranks2.run(scenario)
    assert torch.equal(here, there)


def test_momenta_that_were_not_averaged_are_found(ranks2: Ranks) -> None:
    """A true alarm: parameters were equal, but each rank's optimizer goes on in a direction of its own."""
    for ok, said in ranks2.outcomes(train, "eager", False):
        assert not ok
        assert "DesyncError: parameters differ between ranks after 5 synchronised backwards" in said


@pytest.mark.parametrize("averaged", ["none", "some", "alone", "by torch", "all", "by an outer optimizer"])
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
        if step == 1 and averaged not in ("none", "by an outer optimizer"):
            averager.average_parameters([next(model.parameters())] if averaged == "some" else model.parameters())
    assert bool(errors) == (averaged not in ("all", "by an outer optimizer"))
    assert not errors or "changed before the gradient was reduced" in errors[0]
