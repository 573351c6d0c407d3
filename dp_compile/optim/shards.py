"""Who looks after what: the parts into which an optimizer's parameters are cut over ranks. Numbers only.

    bucket of 3 parameters      a a a a a a b b b . c c c c c c        . : padding
    ranks                       |---- 0 ----|---- 1 ----|-- ...
    pieces of rank 1            b[0:3] at 0, c[0:2] at 4

An element-wise optimizer is cut where the reduce-scatter cuts a bucket. One that looks at a parameter as a whole gets
whole parameters, each on one rank.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
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
    bucket: int = -1
    offset: int = 0

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


def owners_of(numels: Sequence[int], ranks: int) -> tuple[int, ...]:
    """For each parameter the rank that looks after it: the largest first, each on the rank that has least."""
    loads = [(0, rank) for rank in range(ranks)]
    owners = [0] * len(numels)
    for place in sorted(range(len(numels)), key=lambda place: (-numels[place], place)):
        load, rank = heapq.heappop(loads)
        owners[place] = rank
        heapq.heappush(loads, (load + numels[place], rank))
    return tuple(owners)
