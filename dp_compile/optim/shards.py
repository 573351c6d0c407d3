"""Pieces of parameters and of their state for each rank, cut where the reduce-scatter cuts buckets.

    bucket of 3 parameters      a a a a a a b b b . c c c c c c        . : padding
    ranks                       |---- 0 ----|---- 1 ----|-- ...
    pieces of rank 1            b[0:3] at 6, c[0:2] at 10 (`Piece.offset`)

The plan sets the bounds of buckets, so chunks of a parameter differ in size, and `Shard(0)` of `DTensor` has no such
layout. A DTensor of the flat bucket would tie a checkpoint to a plan, which depends on the number of ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from dp_compile.errors import ConfigError
from dp_compile.plan.buckets import BucketPlan
from dp_compile.replica.gradients import dense_strides

State = dict[str, Any]  # of one parameter, by the optimizer's names
States = Mapping[int, State]  # by the parameter's index in the module
_OF_ALL_ELEMENTS: Final = frozenset({"step", "mu_product", "eta", "mu"})
"""Entries with one number per parameter; any other tensor of an element-wise optimizer has the parameter's shape."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements `start` to `stop` of parameter `index`, in memory order, which one rank updates. `offset`: of element
    `start` in the whole bucket."""

    index: int
    start: int
    stop: int
    offset: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


Pieces = dict[int, tuple[list[Piece], list[Piece]]]  # by bucket number: the pieces of a rank, and of the others


def pieces_of(plan: BucketPlan, rank: int) -> Pieces:
    """Return for each scattered bucket the pieces of `rank` and those of the others. Padding belongs to no piece."""
    found: Pieces = {}
    for number, bucket in enumerate(plan.buckets):
        if bucket.key.reduction.is_scattered:
            found[number] = [], []
            numel = bucket.numel // bucket.key.reduction.parts
            for of, member in itertools.product(range(bucket.key.reduction.parts), bucket.members):
                offset = member.offset
                start, stop = max(of * numel, offset), min((of + 1) * numel, offset + member.gradient.numel)
                if start < stop:
                    found[number][of != rank].append(Piece(member.gradient.index, start - offset, stop - offset, start))
    return found


def is_cut(key: str, value: object) -> bool:
    """Return whether an entry of an optimizer's state has one value per element."""
    return key not in _OF_ALL_ELEMENTS and isinstance(value, torch.Tensor)


def cut(state: State, parameter: nn.Parameter, piece: Piece) -> State:
    """Return the state of a piece in new memory. Raise if the state has another shape than the parameter."""
    found: State = {}
    for key, value in state.items():
        if is_cut(key, value):
            if value.shape != parameter.shape:
                raise ConfigError(
                    f"the loaded state has {key} of shape {list(value.shape)} for a parameter of shape "
                    f"{list(parameter.shape)}. Load the state of an optimizer over the same parameters."
                )
            laid = torch.empty_strided(value.shape, dense_strides(parameter), dtype=value.dtype, device=value.device)
            value = laid.copy_(value).as_strided((value.numel(),), (1,))[piece.start : piece.stop].to(parameter.device)
        found[key] = value.clone() if isinstance(value, torch.Tensor) else value
    return found
