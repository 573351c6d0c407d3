"""The op that makes buckets: what it is in a graph, and what it does without a compiler.

    flat_bucket([a, b], scales, strides, offsets, numel)  ->  one flat tensor with a * scale and b * scale at their
                                                              offsets, each in its memory order

Between them are zeros if `zero_gaps`, else undefined values. `dtype`: rounded to it, once. `factor`: a number in a
tensor, by which all are multiplied instead. `lowering.py` has what compiled code makes of it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch

from dp_compile._torch import storages

_SMALL_NUMEL: Final = 2**15
"""Up to here a tensor stays in the processor's cache, and a second pass over it costs next to nothing."""
_EXACT: Final = (torch.float32, torch.float64)


class MemberPlace(NamedTuple):
    """Where a member lies in its bucket."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    numel: int


def places_of(shapes: Sequence[Sequence[int]], strides: Sequence[int], offsets: Sequence[int]) -> list[MemberPlace]:
    """The members' places. `strides` of all members in one list."""
    places, left = [], iter(strides)
    for each, offset in zip(shapes, offsets, strict=True):
        shape = tuple(int(size) for size in each)
        places.append(MemberPlace(shape, tuple(itertools.islice(left, len(shape))), offset, math.prod(shape)))
    return places


def gaps_of(places: Sequence[MemberPlace], numel: int) -> list[tuple[int, int]]:
    """What lies between members: first element and how many."""
    gaps: list[tuple[int, int]] = []
    at = 0
    for place in sorted(places, key=lambda each: each.offset):
        if place.offset > at:
            gaps.append((at, place.offset - at))
        at = max(at, place.offset + place.numel)
    return gaps + ([(at, numel - at)] if numel > at else [])


def dtype_of_product(one: torch.dtype, other: torch.dtype) -> torch.dtype:
    """The dtype in which torch's kernels multiply by a number if the result has the wider of two dtypes."""
    wide = torch.promote_types(one, other)
    return torch.float32 if wide in (torch.float16, torch.bfloat16) else wide


def multiply_into(parts: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], scale: Any) -> None:
    """Let each part be its tensor times `scale`, computed in the wider of their dtypes and rounded once.

    Small tensors go through two calls for all of them: a call for each takes longer than the multiplication. Not in
    half precision: torch's multi-tensor kernels for CPUs round the factor to it (torch 2.13), which others do not.
    """
    together: list[tuple[torch.Tensor, torch.Tensor]] = []
    for part, tensor in zip(parts, tensors, strict=True):
        is_small = tensor.numel() <= _SMALL_NUMEL or not tensor.is_cpu
        if scale == 1.0 or (is_small and part.dtype == tensor.dtype and tensor.dtype in _EXACT):
            together.append((part, tensor))
        else:
            wide = torch.promote_types(tensor.dtype, part.dtype)
            torch.mul(tensor.to(wide), scale, out=part)
    if together:
        targets, values = zip(*together, strict=True)
        storages.copy_all(targets, values)
        if scale != 1.0:
            storages.multiply_all(targets, scale)


def _fill(
    gradients: Sequence[torch.Tensor],
    scales: Sequence[float],
    strides: Sequence[int],
    offsets: Sequence[int],
    numel: int,
    zero_gaps: bool = False,
    dtype: torch.dtype | None = None,
    factor: torch.Tensor | None = None,
) -> torch.Tensor:
    bucket = gradients[0].new_empty(numel, dtype=dtype)
    places = places_of([gradient.shape for gradient in gradients], strides, offsets)
    if gaps_of(places, numel):
        bucket.zero_()
    for gradient, scale, place in zip(gradients, scales, places, strict=True):
        part = bucket.as_strided(place.shape, place.stride, place.offset)
        if factor is None:
            multiply_into([part], [gradient], scale)
        else:
            # Cast: to torch.mul a factor of another dtype counts as a number only if the gradient has dimensions.
            inner = dtype_of_product(gradient.dtype, bucket.dtype)
            torch.mul(gradient.to(inner), factor.to(inner), out=part)
    return bucket


_library = torch.library.Library("dp_compile", "FRAGMENT")
_library.define(
    "flat_bucket(Tensor[] gradients, float[] scales, int[] strides, int[] offsets, int numel, bool zero_gaps=False,"
    " ScalarType? dtype=None, Tensor? factor=None) -> Tensor"
)
_library.impl("flat_bucket", _fill, "CompositeExplicitAutograd")
torch.library.register_fake(
    "dp_compile::flat_bucket",
    lambda gradients, scales, strides, offsets, numel, zero_gaps=False, dtype=None, factor=None: gradients[0].new_empty(
        numel, dtype=dtype
    ),
    lib=_library,
)

FLAT_BUCKET = torch.ops.dp_compile.flat_bucket.default
