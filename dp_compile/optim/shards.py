"""The pieces into which an optimizer's parameters are cut over ranks, where the reduce-scatter cuts buckets.

    bucket of 3 parameters      a a a a a a b b b . c c c c c c        . : padding
    ranks                       |---- 0 ----|---- 1 ----|-- ...
    pieces of rank 1            b[0:3] at 0, c[0:2] at 4

Numbers only.
"""

from __future__ import annotations

from dataclasses import dataclass

from dp_compile.plan.buckets import BucketPlan


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements of a parameter, in the order of its memory, that one rank looks after.

    `index`: of the parameter; from element `start` up to `stop`; in the rank's part of `bucket` they lie at `offset`.
    """

    index: int
    start: int
    stop: int
    bucket: int
    offset: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


def pieces_of(plan: BucketPlan, rank: int) -> tuple[Piece, ...]:
    """What a rank looks after, of the buckets of which each rank has a part. What lies between members is nobody's."""
    found: list[Piece] = []
    for number, bucket in enumerate(plan.buckets):
        if not bucket.key.reduction.is_scattered:
            continue
        first = rank * numel_of_part(plan, number)
        last = first + numel_of_part(plan, number)
        for member in bucket.members:
            offset = member.offset or 0
            start, stop = max(first, offset), min(last, offset + member.numel)
            if start < stop:
                found.append(Piece(member.gradient.index, start - offset, stop - offset, number, start - first))
    return tuple(found)


def pieces_of_others(plan: BucketPlan, number: int, rank: int) -> tuple[Piece, ...]:
    """What all other ranks look after of a bucket of which each rank has a part; `offset`: in the whole bucket."""
    first = rank * numel_of_part(plan, number)
    last = first + numel_of_part(plan, number)
    found: list[Piece] = []
    for member in plan.buckets[number].members:
        offset = member.offset or 0
        end = offset + member.numel
        for start, stop in ((offset, min(end, first)), (max(offset, last), end)):
            if start < stop:
                found.append(Piece(member.gradient.index, start - offset, stop - offset, number, start))
    return tuple(found)


def numel_of_part(plan: BucketPlan, bucket: int) -> int:
    """How many elements of a bucket each rank has, padding included."""
    (numel,), parts = plan.buckets[bucket].tensor_numels, plan.buckets[bucket].key.reduction.parts
    return numel // parts


def layout_of(plan: BucketPlan) -> tuple[object, ...]:
    """Equal for plans that cut parameters in the same places."""
    return tuple(
        (number, numel_of_part(plan, number), [(member.gradient.index, member.offset) for member in bucket.members])
        for number, bucket in enumerate(plan.buckets)
        if bucket.key.reduction.is_scattered
    )
