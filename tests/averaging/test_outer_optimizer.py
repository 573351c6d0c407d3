"""An outer optimizer over averaged changes, against its formula in NumPy."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import dp_compile
from dp_compile import averaging
from dp_compile.testing.ranks import Ranks

SHAPES = ((3, 2), (4,))
LR = 0.1


def gradients(step: int, rank: int) -> list[np.ndarray]:
    random = np.random.default_rng(100 * step + rank)
    return [random.standard_normal(shape) for shape in SHAPES]


def start() -> list[np.ndarray]:
    return gradients(999, 999)


def by_formula(world: int, steps: int, every: int, lr: float, momentum: float, nesterov: bool) -> list[np.ndarray]:
    """arXiv 2311.08105, algorithm 1, with SGD inside. The parameters of rank 0 after all steps."""
    outer, velocity = start(), [np.zeros(shape) for shape in SHAPES]
    local = [list(outer) for _ in range(world)]
    for step in range(steps):
        for rank in range(world):
            local[rank] = [x - LR * g for x, g in zip(local[rank], gradients(step, rank), strict=True)]
        if step % every == every - 1:
            for place in range(len(SHAPES)):
                delta = np.mean([outer[place] - local[rank][place] for rank in range(world)], axis=0)
                velocity[place] = momentum * velocity[place] + delta
                ahead = delta + momentum * velocity[place] if nesterov else velocity[place]
                outer[place] = outer[place] - lr * ahead
            local = [list(outer) for _ in range(world)]
    return local[0]


def make(every: int, **options: Any) -> tuple[list[nn.Parameter], averaging.OuterOptimizer]:
    parameters = [nn.Parameter(torch.tensor(each)) for each in start()]
    return parameters, averaging.OuterOptimizer(torch.optim.SGD(parameters, lr=LR), every, **options)


def steps(parameters: list[nn.Parameter], optimizer: averaging.OuterOptimizer, first: int, last: int) -> None:
    for step in range(first, last):
        for parameter, gradient in zip(parameters, gradients(step, dist.get_rank()), strict=True):
            parameter.grad = torch.tensor(gradient)
        optimizer.step()


def train(options: dict[str, Any], n_steps: int, reload_at: int) -> list[np.ndarray]:
    parameters, optimizer = make(3, **options)
    addresses = [parameter.data_ptr() for parameter in parameters]
    steps(parameters, optimizer, 0, reload_at)
    state = copy.deepcopy(optimizer.state_dict())
    kept = [parameter.detach().clone() for parameter in parameters]
    steps(parameters, optimizer, reload_at, n_steps)
    assert [parameter.data_ptr() for parameter in parameters] == addresses
    again, other = make(3, **options)
    with torch.no_grad():
        for parameter, value in zip(again, kept, strict=True):
            parameter.copy_(value)
    other.load_state_dict(state)
    steps(again, other, reload_at, n_steps)
    assert all(map(torch.equal, again, parameters))
    return [parameter.detach().numpy() for parameter in parameters]


CASES = ({}, {"outer_lr": 0.3, "momentum": 0.5, "nesterov": False}, {"outer_lr": 1.0, "momentum": 0.0})


@pytest.mark.parametrize("options", CASES, ids=str)
def test_as_the_formula_and_from_a_checkpoint(ranks2: Ranks, options: dict[str, Any]) -> None:
    """Also saved between two averagings, when parameters differ between ranks."""
    given = {"outer_lr": 0.7, "momentum": 0.9, "nesterov": True} | options
    expected = by_formula(2, 9, 3, given["outer_lr"], given["momentum"], given["nesterov"])
    for found in ranks2.run(train, options, 9, 5):
        for mine, theirs in zip(found, expected, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-12)


def grow() -> None:
    """Parameters that come later start where they are then."""
    parameters, optimizer = make(2)
    steps(parameters, optimizer, 0, 2)
    added = nn.Parameter(torch.zeros(3))
    optimizer.add_param_group({"params": [added]})
    added.grad = torch.full((3,), 1.0 + dist.get_rank())
    steps(parameters, optimizer, 2, 4)
    expected = torch.full((3,), -0.7 * 1.9 * 2 * LR * 1.5)  # two local steps, from rest
    torch.testing.assert_close(added.detach(), expected)


def astray() -> None:
    """Rank 1 starts elsewhere."""
    parameters, optimizer = make(2)
    if dist.get_rank() == 1:
        with torch.no_grad():
            parameters[1][2] += 1
        optimizer = averaging.OuterOptimizer(optimizer.optim, 2)
    with pytest.raises(dp_compile.DesyncError, match=r"rank 1 differs from rank 0: outer_parameters\[1\] is"):
        steps(parameters, optimizer, 0, 1)


def of_another_shape() -> None:
    parameters, optimizer = make(2)
    steps(parameters, optimizer, 0, 2)
    good = copy.deepcopy(optimizer.state_dict())
    for where in ("parameters", "velocities"):
        bad = copy.deepcopy(good)
        bad["outer"][where][1] = bad["outer"][where][1][:1]  # of a model with one output: would fit by broadcasting
        bad["step"] = 100
        text = rf"outer {where} of state_dict must be .*\[1\] \[1\], here \[4\]"
        with pytest.raises(dp_compile.ConfigError, match=text):
            optimizer.load_state_dict(bad)
        torch.testing.assert_close(optimizer.state_dict(), good)
    bad["outer"]["parameters"] = bad["outer"]["parameters"][:1]
    with pytest.raises(dp_compile.ConfigError, match=r"outer parameters .*\[1\] None, here \[4\]"):
        optimizer.load_state_dict(bad)
    optimizer.load_state_dict(good)
    with pytest.warns(UserWarning, match="step counter"):
        optimizer.load_state_dict(optimizer.optim.state_dict())
    assert torch.equal(optimizer.state_dict()["outer"]["parameters"][0], parameters[0])


@pytest.mark.parametrize("scenario", [grow, astray, of_another_shape])
def test_growth_ranks_astray_and_other_states(ranks2: Ranks, scenario: Callable[[], None]) -> None:
    ranks2.run(scenario)


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize("options", [{"every": 0}, {"outer_lr": 0.0}])
def test_options_that_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(dp_compile.ConfigError, match=next(iter(options))):
        make(**{"every": 2} | options)
