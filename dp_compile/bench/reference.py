"""The batches of every mode, and the gradients that it has to compute."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch

from dp_compile.bench.contract import SEED, Batch, Workload
from dp_compile.errors import require


def batches(workload: Workload, rank: int) -> Iterator[Batch]:
    """The batches of a rank, without end."""
    generator = torch.Generator().manual_seed(SEED + rank)
    while True:
        yield workload.batch(generator)


def average_gradients(workload: Workload, ranks: int) -> dict[str, torch.Tensor]:
    """Of the first batches of so many ranks, by parameter: eagerly, in this process alone."""
    torch.manual_seed(SEED)
    model = workload.build().train()
    for rank in range(ranks):
        workload.loss(model, next(batches(workload, rank))).backward()
    return {name: each.grad / ranks for name, each in model.named_parameters() if each.grad is not None}


def compare(gradients: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> tuple[str, float]:
    """The parameter with the largest error of its gradient, and that: norm of the difference over norm of the expected.

    A gradient below 1e-4 of the largest gradient's norm is rounding noise (biases of keys in an attention, whose
    gradient is zero): its difference is divided by that.

    Raises:
        ConfigError: a gradient too many or too few.
    """
    differing = sorted(set(gradients) ^ set(expected))
    require(not differing, "gradients", "of all parameters of the workload and no other", differing)
    norms = {name: float(torch.linalg.vector_norm(each)) for name, each in expected.items()}
    floor = max(1e-4 * max(norms.values()), torch.finfo(torch.float32).tiny)

    def error(name: str) -> float:
        difference = gradients[name].detach().cpu().float() - expected[name]
        found = float(torch.linalg.vector_norm(difference)) / max(norms[name], floor)
        return math.inf if math.isnan(found) else found

    return max(((name, error(name)) for name in expected), key=lambda each: each[1])
