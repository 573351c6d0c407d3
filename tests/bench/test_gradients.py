"""The comparison of gradients before anything is timed: what it lets pass, and what it says."""

from __future__ import annotations

import pytest
import torch
from gradients import compare_gradients

EXPECTED = {"head.weight": torch.tensor([[1.0, -2.0]]), "head.bias": torch.tensor([0.5, 0.25])}


def test_noise_of_float32_is_equal_and_the_worst_parameter_is_named() -> None:
    found = {"head.weight": EXPECTED["head.weight"] * (1 + 1e-6), "head.bias": EXPECTED["head.bias"] * (1 + 1e-5)}
    equality = compare_gradients(found, EXPECTED)
    assert equality.is_equal
    assert equality.worst.parameter == "head.bias"
    assert equality.worst.max_rel == pytest.approx(1e-5, rel=0.1)
    assert str(equality).startswith("2 gradients equal those of torch's DDP; the largest difference is 5")
    assert str(equality).endswith("in head.bias")


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        (EXPECTED["head.weight"] * 2, "is off by up to 2, 1 of DDP's largest element 2; allowed is 0.001"),
        (EXPECTED["head.weight"] * 1.002, "is off by up to 0.004, 0.002 of DDP's largest element 2"),
        (torch.tensor([[1.0, torch.nan]]), "is not finite"),
        (torch.zeros(2, 1), r"has the shape \[2, 1\], DDP's \[1, 2\]"),
        (None, "has no gradient, DDP's has one"),
    ],
)
def test_a_difference_is_a_sentence_about_its_parameter(changed: torch.Tensor | None, problem: str) -> None:
    found = {"head.bias": EXPECTED["head.bias"]} | ({} if changed is None else {"head.weight": changed})
    equality = compare_gradients(found, EXPECTED)
    assert not equality.is_equal
    assert [each.parameter for each in equality.problems] == ["head.weight"]
    with pytest.raises(AssertionError, match=rf"1 of 2 gradients differ .*\n  head.weight: {problem}"):
        raise AssertionError(str(equality))


def test_gradients_that_ddp_does_not_have_and_gradients_of_zeros() -> None:
    zeros = {"frozen": torch.zeros(3)}
    assert compare_gradients({"frozen": torch.zeros(3)}, zeros).is_equal
    assert not compare_gradients({"frozen": torch.ones(3)}, zeros).is_equal
    extra = compare_gradients({"frozen": torch.zeros(3), "more": torch.zeros(1)}, zeros)
    assert "more: has a gradient, DDP's has none" in str(extra)


def test_long_lists_are_cut() -> None:
    expected = {f"p{index}": torch.ones(1) for index in range(9)}
    text = str(compare_gradients({name: -value for name, value in expected.items()}, expected))
    assert text.count("is off by") == 5
    assert text.endswith("and 4 more")
