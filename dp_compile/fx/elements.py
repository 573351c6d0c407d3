"""Which elements of which sources a tensor holds, row by row: what views, slices, permutations and copies leave alone.

A tensor is a sequence of runs. A run walks over a source with nested loops, outermost first: `((3, 1), (4, 3))` is
the transpose of a source of 4 x 3 elements. Shapes do not matter, so a reshape changes nothing. Equal elements have
equal runs, whatever views they came through, as far as those divide evenly; a function returns `None` where not.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

Loops = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Run:
    """`factor` times the elements of `source` from `offset` on; `loops` are sizes and strides.

    `by`: names of numbers, not known, by which they are multiplied too.
    """

    source: int
    loops: Loops
    offset: int = 0
    factor: float = 1.0
    by: tuple[str, ...] = ()

    @property
    def numel(self) -> int:
        return math.prod(size for size, _ in self.loops)

    def times(self, factor: float | str) -> Run:
        if isinstance(factor, str):
            return replace(self, by=tuple(sorted((*self.by, factor))))
        # Factors that were multiplied in another order differ in the last place.
        return replace(self, factor=float(f"{self.factor * factor:.12g}"))


Elements = tuple[Run, ...]


def whole(source: int, numel: int) -> Elements:
    """All of a source, in its order."""
    return (Run(source, _merged([(numel, 1)])),) if numel else ()


def numel_of(elements: Elements) -> int:
    return sum(run.numel for run in elements)


def joined(parts: Iterable[Elements]) -> Elements:
    """One after the other; neighbours that go on with each other become one run."""
    runs: list[Run] = []
    for run in (run for part in parts for run in part):
        both = _continued(runs[-1], run) if runs else None
        if both is None:
            runs.append(run)
        else:
            runs[-1] = both
    return tuple(runs)


def between(elements: Elements, first: int, last: int) -> Elements:
    """The elements from number `first` up to `last`."""
    found: list[Elements] = []
    start = 0
    for run in elements:
        found.append(_part(run, max(first - start, 0), min(last - start, run.numel)))
        start += run.numel
    return joined(found)


def permuted(elements: Elements, shape: Sequence[int], order: Sequence[int]) -> Elements | None:
    """The dimensions of a tensor of this shape in another order."""
    wide = [dimension for dimension in order if shape[dimension] != 1]
    if wide == sorted(wide) or not elements:
        return elements
    if len(elements) != 1:
        return None
    loops = aligned(elements[0], shape)
    if loops is None:
        return None
    return (replace(elements[0], loops=_merged([loop for dimension in order for loop in loops[dimension]])),)


def sliced(elements: Elements, shape: Sequence[int], dimension: int, first: int, last: int) -> Elements | None:
    """The elements whose index in one dimension is from `first` up to `last`."""
    if first >= last or 0 in shape:
        return ()
    if (first, last) == (0, shape[dimension]):
        return elements
    if math.prod(shape[:dimension]) == 1:
        inner = math.prod(shape[dimension + 1 :])
        return between(elements, first * inner, last * inner)
    loops = aligned(elements[0], shape) if len(elements) == 1 else None
    if loops is None or len(loops[dimension]) != 1:
        return None
    stride = loops[dimension][0][1]
    loops[dimension] = [(last - first, stride)]
    run = elements[0]
    return (replace(run, loops=_merged(itertools.chain.from_iterable(loops)), offset=run.offset + first * stride),)


def strided(elements: Elements, shape: Sequence[int], stride: Sequence[int], offset: int) -> Elements | None:
    """What a view with these strides reads of memory that holds `elements`; `None` if it leaves some out or repeats."""
    order = memory_order_of(shape, stride)
    numel = math.prod(shape)
    if order is None or offset < 0 or offset + numel > numel_of(elements):
        return None
    there = between(elements, offset, offset + numel)
    return permuted(there, [shape[dimension] for dimension in order], [order.index(d) for d in range(len(order))])


def in_memory(elements: Elements, shape: Sequence[int], stride: Sequence[int]) -> Elements | None:
    """The elements of a tensor in the order in which these strides put them into memory."""
    order = memory_order_of(shape, stride)
    return None if order is None else permuted(elements, shape, order)


def memory_order_of(shape: Sequence[int], stride: Sequence[int]) -> list[int] | None:
    """Dimensions from the slowest to the fastest, if a tensor fills its memory without gaps; else `None`."""
    order = sorted(range(len(shape)), key=lambda dimension: (-stride[dimension], dimension))
    step = 1
    if 0 in shape:
        return order
    # A dimension of size one may have any stride.
    for dimension in reversed([each for each in order if shape[each] != 1]):
        if stride[dimension] != step:
            return None
        step *= shape[dimension]
    return order


def aligned(run: Run, shape: Sequence[int]) -> list[list[tuple[int, int]]] | None:
    """The loops of each dimension of a tensor of this shape."""
    waiting = list(run.loops)
    found: list[list[tuple[int, int]]] = []
    for size in reversed(shape):
        loops: list[tuple[int, int]] = []
        while size > 1:
            if not waiting:
                return None
            inner, stride = waiting.pop()
            if inner > size:
                if inner % size:
                    return None
                waiting.append((inner // size, stride * size))
                inner = size
            if size % inner:
                return None
            loops.insert(0, (inner, stride))
            size //= inner
        found.insert(0, loops)
    return None if waiting else found


def _merged(loops: Iterable[tuple[int, int]]) -> Loops:
    found: list[tuple[int, int]] = []
    for size, stride in loops:
        if size == 1:
            continue
        if found and found[-1][1] == size * stride:
            found[-1] = (found[-1][0] * size, stride)
        else:
            found.append((size, stride))
    return tuple(found)


def _part(run: Run, first: int, last: int) -> Elements:
    if first >= last:
        return ()
    if (first, last) == (0, run.numel):
        return (run,)
    (_, stride), *rest = run.loops
    inner = math.prod(each for each, _ in rest)
    low, high = first // inner, last // inner
    if low == (last - 1) // inner and (first % inner or last % inner):
        row = replace(run, loops=tuple(rest), offset=run.offset + low * stride)
        return _part(row, first - low * inner, last - low * inner)
    if first % inner or last % inner:
        up, down = (low + bool(first % inner)) * inner, high * inner
        return (*_part(run, first, up), *_part(run, up, down), *_part(run, down, last))
    return (replace(run, loops=_merged([(high - low, stride), *rest]), offset=run.offset + low * stride),)


def _continued(one: Run, other: Run) -> Run | None:
    """Both as one run, if the second goes on where the first ends: rows of the same kind at the same distance."""
    if (one.source, one.factor, one.by) != (other.source, other.factor, other.by):
        return None
    distance = other.offset - one.offset
    if one.loops == other.loops:
        if one.loops and distance == one.loops[0][0] * one.loops[0][1]:
            return replace(one, loops=_merged([(2 * one.loops[0][0], one.loops[0][1]), *one.loops[1:]]))
        return replace(one, loops=_merged([(2, distance), *one.loops]))
    for rows, row in ((one.loops, other.loops), (other.loops, one.loops)):
        if rows[1:] == row and rows:
            size, stride = rows[0]
            if distance == (size * stride if rows is one.loops else stride):
                return replace(one, loops=_merged([(size + 1, stride), *row]))
    if one.loops[1:] == other.loops[1:] and one.loops and other.loops:
        (size, stride), (more, same) = one.loops[0], other.loops[0]
        if stride == same and distance == size * stride:
            return replace(one, loops=_merged([(size + more, stride), *one.loops[1:]]))
    return None
