"""Whether a mode trains the same: its gradients beside those of torch's DDP, parameter by parameter.

A gradient counts as equal if no element is further off than `RTOL` times the largest element of DDP's gradient, plus
`ATOL`. That leaves room for the float32 noise of other kernels in another order (on the tiny workloads up to 3e-6 of
the largest element was seen, 2026-11-21); a missing factor 1/n or reduction is wrong by about the gradient itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import torch

RTOL: Final = 1e-3
ATOL: Final = 1e-7
SHOWN: Final = 5


@dataclass(frozen=True, slots=True)
class Difference:
    """How far the gradient of one parameter is off.

    Args:
        parameter: its fully qualified name.
        max_abs: the largest difference of an element; infinite if the two cannot be compared.
        max_rel: the same over the largest element of the reference.
        problem: what is wrong beside the numbers, or if they are too far apart; `None`: nothing.
    """

    parameter: str
    max_abs: float
    max_rel: float
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Equality:
    """The gradients of a mode beside the reference's, the worst first."""

    differences: tuple[Difference, ...]

    @property
    def problems(self) -> tuple[Difference, ...]:
        return tuple(each for each in self.differences if each.problem is not None)

    @property
    def is_equal(self) -> bool:
        return not self.problems

    @property
    def worst(self) -> Difference:
        return self.differences[0]

    def __str__(self) -> str:
        count, worst = len(self.differences), self.worst
        if self.is_equal:
            return (
                f"{count} gradients equal those of torch's DDP; the largest difference is {worst.max_abs:.2g}, "
                f"{worst.max_rel:.2g} of the largest element, in {worst.parameter}"
            )
        lines = [f"{len(self.problems)} of {count} gradients differ from those of torch's DDP:"]
        lines += [f"  {each.parameter}: {each.problem}" for each in self.problems[:SHOWN]]
        if len(self.problems) > SHOWN:
            lines.append(f"  and {len(self.problems) - SHOWN} more")
        return "\n".join(lines)


def compare_gradients(
    found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], *, rtol: float = RTOL, atol: float = ATOL
) -> Equality:
    """Gradients of a mode beside those of torch's DDP, for the same weights and batches.

    Args:
        found: by parameter name.
        expected: by parameter name, at least one.
        rtol: what is allowed, over the largest element of the expected gradient.
        atol: what is allowed beside that.
    """
    differences = list(_differences(found, expected, rtol, atol))
    differences.sort(key=lambda each: (each.problem is None, -each.max_rel))
    return Equality(tuple(differences))


def _differences(
    found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], rtol: float, atol: float
) -> Iterator[Difference]:
    for name, reference in expected.items():
        if name not in found:
            yield _incomparable(name, "has no gradient, DDP's has one")
        elif found[name].shape != reference.shape:
            yield _incomparable(name, f"has the shape {list(found[name].shape)}, DDP's {list(reference.shape)}")
        else:
            yield _difference(name, found[name], reference, rtol, atol)
    for name in found:
        if name not in expected:
            yield _incomparable(name, "has a gradient, DDP's has none")


def _incomparable(name: str, problem: str) -> Difference:
    return Difference(name, math.inf, math.inf, problem)


def _difference(name: str, mine: torch.Tensor, reference: torch.Tensor, rtol: float, atol: float) -> Difference:
    mine, reference = mine.detach().cpu().double(), reference.detach().cpu().double()
    if not bool(mine.isfinite().all()):
        return _incomparable(name, "is not finite")
    if not mine.numel():
        return Difference(name, 0.0, 0.0)
    scale, off = float(reference.abs().max()), float((mine - reference).abs().max())
    relative = off / scale if scale else (math.inf if off else 0.0)
    problem = None
    if not off <= rtol * scale + atol:
        problem = f"is off by up to {off:.3g}, {relative:.3g} of DDP's largest element {scale:.3g}; allowed is {rtol:g}"
    return Difference(name, off, relative, problem)
