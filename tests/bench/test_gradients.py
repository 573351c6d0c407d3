"""The comparison of gradients in tests of modes: what it lets pass, and its text."""

from __future__ import annotations

import re

import pytest
import torch
from gradients import compare_gradients

EXPECTED = {"head.weight": torch.tensor([[1.0, -2.0]]), "head.bias": torch.tensor([0.5, 0.25])}


def test_noise_of_float32_is_equal_and_the_worst_parameter_is_named() -> None:
    found = {"head.weight": EXPECTED["head.weight"] * (1 + 1e-6), "head.bias": EXPECTED["head.bias"] * (1 + 1e-5)}
    equality = compare_gradients(found, EXPECTED)
    assert equality.is_equal
    assert str(equality).endswith("in head.bias")
    assert not compare_gradients(found | {"more": torch.zeros(1)}, EXPECTED).is_equal


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
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
    assert re.search(rf"1 of 2 gradients differ .*\n  head.weight: {problem}", str(equality))
