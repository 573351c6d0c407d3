"""The weights and batches with which every mode starts, and the gradients that it has to compute."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Final

import torch
from torch import nn

from dp_compile.bench.contract import Batch, Workload

SEED: Final = 20_261
_NORM_FLOOR: Final = 1e-4


def with_fixed_weights(workload: Workload) -> Workload:
    """The workload with the weights of `SEED`, independent of random numbers that a mode drew before it builds."""

    def build() -> nn.Module:
        torch.manual_seed(SEED)
        return workload.build()

    return replace(workload, build=build)


def batches(workload: Workload, rank: int) -> Iterator[Batch]:
    """The batches of a rank, without end."""
    generator = torch.Generator().manual_seed(SEED + rank)
    while True:
        yield workload.batch(generator)


def average_gradients(workload: Workload, ranks: int) -> dict[str, torch.Tensor]:
    """Of the first batches of so many ranks, by parameter: eagerly, in this process alone."""
    model = with_fixed_weights(workload).build().train()
    for rank in range(ranks):
        workload.loss(model, next(batches(workload, rank))).backward()
    return {name: each.grad / ranks for name, each in model.named_parameters() if each.grad is not None}


def compare(gradients: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> tuple[str, float]:
    """The parameter with the largest error of its gradient, and that: norm of the difference over norm of the expected.

    A gradient below 1e-4 of the largest gradient's norm is rounding noise (biases of keys in an attention, whose
    gradient is zero): its difference is divided by that.

    Raises:
        ValueError: a gradient too many or too few.
    """
    if set(gradients) != set(expected):
        missing, extra = sorted(set(expected) - set(gradients)), sorted(set(gradients) - set(expected))
        raise ValueError(f"gradients of other parameters than the workload's: missing {missing}, too many {extra}")
    norms = {name: float(torch.linalg.vector_norm(each)) for name, each in expected.items()}
    floor = max(_NORM_FLOOR * max(norms.values()), torch.finfo(torch.float32).tiny)
    errors = {
        name: float(torch.linalg.vector_norm(gradients[name].detach().cpu().float() - each)) / max(norms[name], floor)
        for name, each in expected.items()
    }
    # NaN counts as larger than any number.
    parameter = max(errors, key=lambda name: float("inf") if errors[name] != errors[name] else errors[name])
    return parameter, errors[parameter]
