"""The weights and batches that every mode of a workload starts with, and the gradients that it has to find."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import nn

from dp_compile.bench.contract import Batch, Workload

SEED: Final = 20_261
GRADIENT_TOLERANCE: Final = 1e-2
"""Of `compare`. Kernels that sum in another order mostly stay far below; a gradient that was not averaged is 0.1 to
above 1."""
ROUNDINGS: Final = 4
MOST_TOLERANCE: Final = 0.25
_NORM_FLOOR: Final = 1e-4


@dataclass(frozen=True, slots=True)
class Average:
    """The average gradient of some ranks, by parameter, and what moving every weight by a rounding makes of it.

    `rounding` is the error of `compare`.
    """

    gradients: Mapping[str, torch.Tensor]
    rounding: float


@dataclass(frozen=True, slots=True)
class Compared:
    """What `compare` said of a first backward that took `wall_s`, and the `allowed_error`."""

    wall_s: float
    error: float
    parameter: str
    allowed: float


def with_fixed_weights(workload: Workload) -> Workload:
    """Whatever a mode does to the generator before it builds, the weights are those of the gradients it has to have."""

    def build() -> nn.Module:
        torch.manual_seed(SEED)
        return workload.build()

    return replace(workload, build=build)


def batches(workload: Workload, rank: int) -> Iterator[Batch]:
    """What a rank trains on, without end."""
    generator = torch.Generator().manual_seed(SEED + rank)
    while True:
        yield workload.batch(generator)


def averages(workload: Workload, ranks: int) -> dict[int, Average]:
    """Of the first batch of one rank and of all, by number of ranks: eagerly, in this process alone."""
    found, moved = (_averages(workload, ranks, by_a_rounding=each) for each in (False, True))
    return {count: Average(found[count], compare(moved[count], found[count])[1]) for count in found}


def _averages(workload: Workload, ranks: int, *, by_a_rounding: bool) -> dict[int, dict[str, torch.Tensor]]:
    model = with_fixed_weights(workload).build().train()
    if by_a_rounding:
        _move_by_a_rounding(model)
    found = {}
    for rank in range(ranks):
        workload.loss(model, next(batches(workload, rank))).backward()
        if rank + 1 in (1, ranks):
            found[rank + 1] = {
                name: each.grad / (rank + 1) for name, each in model.named_parameters() if each.grad is not None
            }
    return found


def _move_by_a_rounding(model: nn.Module) -> None:
    """Each weight up, down or not at all, drawn from a generator of its own: dropout goes on as it would."""
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for parameter in model.parameters():
            direction = torch.randint(-1, 2, parameter.shape, generator=generator)
            parameter.mul_(1 + torch.finfo(parameter.dtype).eps * direction)


def compare(gradients: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> tuple[str, float]:
    """The parameter whose gradient is farthest off, and how far: norm of the difference over norm of the expected.

    Below 1e-4 of the largest gradient's norm a gradient is rounding noise (biases of keys in an attention, whose
    gradient is zero): its difference is divided by that.

    Raises:
        ValueError: a gradient too many or too few.
    """
    if set(gradients) != set(expected):
        missing, extra = sorted(set(expected) - set(gradients)), sorted(set(gradients) - set(expected))
        raise ValueError(f"gradients of other parameters than the workload's: missing {missing}, too many {extra}")
    norms = {name: float(torch.linalg.vector_norm(each)) for name, each in expected.items()}
    floor = _NORM_FLOOR * max(norms.values())
    errors = {
        name: float(torch.linalg.vector_norm(gradients[name].detach().cpu().float() - expected[name]))
        / max(norm, floor, torch.finfo(torch.float32).tiny)
        for name, norm in norms.items()
    }
    # NaN is larger than anything.
    parameter = max(errors, key=lambda name: float("inf") if errors[name] != errors[name] else errors[name])
    return parameter, errors[parameter]


def allowed_error(rounding: float) -> float:
    """Of `compare`, for a mode that is right, where moving every weight by a rounding makes an error of `rounding`.

    A compiled model rounds elsewhere in each kernel and not once: some times that error, but less than what tells a
    gradient that was not averaged. Of ResNet-50 with its first weights and 4 images the error is 0.03, and eager
    float32 gradients are as far from those of float64.
    """
    return min(max(GRADIENT_TOLERANCE, ROUNDINGS * rounding), MOST_TOLERANCE)
