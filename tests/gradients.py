"""Whether a mode trains the same: its gradients compared with those of torch's DDP, parameter by parameter.

A gradient counts as equal if no element is further off than `RTOL` times the largest element of DDP's gradient, plus
`ATOL`. That leaves room for the float32 noise of other kernels in another order (on the tiny workloads up to 3e-6 of
the largest element was seen, 2026-11-21); a missing factor 1/n or reduction is wrong by about the gradient itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

import torch

RTOL: Final = 1e-3
ATOL: Final = 1e-7


class Equality(NamedTuple):
    """A sentence for each parameter whose gradients differ."""

    problems: tuple[str, ...]

    @property
    def is_equal(self) -> bool:
        return not self.problems

    def __str__(self) -> str:
        return "\n".join(self.problems)


def compare_gradients(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> Equality:
    """Gradients of a mode and DDP's, for the same weights and batches, by parameter name."""
    problems = [f"{name}: one side only has a gradient" for name in sorted(set(found) ^ set(expected))]
    for name in sorted(set(found) & set(expected)):
        mine, reference = (each[name].detach().cpu().double() for each in (found, expected))
        if mine.shape != reference.shape:
            problems.append(f"{name}: has the shape {list(mine.shape)}, DDP's {list(reference.shape)}")
        elif mine.numel():
            scale, off = float(reference.abs().max()), float((mine - reference).abs().max())
            if not off <= RTOL * scale + ATOL:  # nor is NaN
                problems.append(f"{name}: is off by up to {off:.3g}; DDP's largest element is {scale:.3g}")
    return Equality(tuple(problems))
