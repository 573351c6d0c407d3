"""Elements of tensors beside the tensors themselves: numbered elements, random views."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dp_compile.fx import elements
from dp_compile.fx.elements import Elements


def numbers(found: Elements) -> list[int]:
    """The elements one by one: those of source 3 are 3000, 3001, ..."""
    return [
        1000 * run.source + run.offset + sum(i * stride for i, (_, stride) in zip(index, run.loops, strict=True))
        for run in found
        for index in itertools.product(*(range(size) for size, _ in run.loops))
    ]


@st.composite
def shapes(draw: st.DrawFn, numel: int) -> list[int]:
    shape: list[int] = []
    while numel > 1 and draw(st.booleans()):
        shape.append(draw(st.sampled_from([each for each in range(1, numel + 1) if numel % each == 0])))
        numel //= shape[-1]
    return [*shape, numel]


def one_view(data: st.DataObject, held: Elements, truth: torch.Tensor) -> tuple[Elements | None, torch.Tensor]:
    shape = data.draw(shapes(len(truth)))
    order = data.draw(st.permutations(range(len(shape))))
    kind = data.draw(st.sampled_from(["permuted", "sliced", "strided", "in memory", "apart and joined"]))
    if kind == "permuted":
        return elements.permuted(held, shape, order), truth.reshape(shape).permute(order).reshape(-1)
    if kind == "sliced":
        dimension = data.draw(st.integers(0, len(shape) - 1))
        first = data.draw(st.integers(0, shape[dimension] - 1))
        last = data.draw(st.integers(first + 1, shape[dimension]))
        rows = truth.reshape(shape).narrow(dimension, first, last - first)
        return elements.sliced(held, shape, dimension, first, last), rows.reshape(-1)
    stride = torch.empty([shape[each] for each in order]).permute([order.index(each) for each in range(len(order))])
    if kind == "in memory":
        memory = torch.empty_strided(shape, stride.stride(), dtype=torch.int64).copy_(truth.reshape(shape))
        return elements.in_memory(held, shape, stride.stride()), memory.as_strided([len(truth)], [1])
    if kind == "strided":
        more = elements.joined([elements.whole(9, 2), held])
        memory = torch.cat([torch.tensor([9000, 9001]), truth])
        return elements.strided(more, shape, stride.stride(), 2), memory.as_strided(shape, stride.stride(), 2).reshape(
            -1
        )
    cut = data.draw(st.integers(0, len(truth)))
    return elements.joined([elements.between(held, 0, cut), elements.between(held, cut, len(truth))]), truth


@settings(max_examples=150)
@given(data=st.data())
def test_views_hold_the_elements_that_torch_says(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.sampled_from([1, 2, 6, 12, 24]), min_size=1, max_size=2))
    held: Elements | None = elements.joined(elements.whole(number, size) for number, size in enumerate(sizes))
    assert held is not None
    truth = torch.tensor(numbers(held))
    for _ in range(data.draw(st.integers(1, 5))):
        held, truth = one_view(data, held, truth)
        if held is None:
            return
        assert numbers(held) == truth.tolist()
        assert elements.numel_of(held) == len(truth)


@pytest.mark.parametrize("cuts", [(2,), (1, 2, 3), (1,), (3,)])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_rows_that_come_together_again_are_the_whole(cuts: tuple[int, ...], order: tuple[int, int]) -> None:
    shape = [4, 3]
    whole = elements.permuted(elements.whole(0, 12), [(4, 3)[each] for each in order], order)
    assert whole is not None
    bounds = [0, *cuts, 4]
    rows = [elements.sliced(whole, shape, 0, first, last) for first, last in itertools.pairwise(bounds)]
    assert elements.joined([each for each in rows if each is not None]) == whole


def test_views_with_gaps_or_repetitions_are_not_followed() -> None:
    flat = elements.whole(0, 12)
    assert elements.strided(flat, [2, 2], [4, 1], 0) is None
    assert elements.strided(flat, [2, 3], [0, 1], 0) is None
    assert elements.strided(flat, [13], [1], 0) is None
    assert elements.strided(flat, [3], [1], 10) is None
    assert math.isclose(flat[0].times(1 / 3).times(3.0).factor, 1.0)
