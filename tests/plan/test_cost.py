"""The cost of an all-reduce: formulas against plain arithmetic, the fit, links."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dp_compile.errors import ConfigError
from dp_compile.plan.cost import LINKS, AllReduceCost, TimesDoNotGrow, fit, line, link, ring, ring_or_tree


@pytest.mark.parametrize("n", [1, 8, 1000, 2**29])
def test_formulas_are_those_of_textbooks(n: int) -> None:
    for formula, hops in ((ring, 2 * (n - 1)), (ring_or_tree, 2 * math.ceil(math.log2(n)))):
        cost = line(formula, n, launch_s=8e-6, hop_s=3e-6, busbw=1e11)
        assert cost.alpha_s == pytest.approx(8e-6 + hops * 3e-6)
        assert cost.beta_s_per_byte == pytest.approx(2 * (n - 1) / n / 1e11)
        assert cost.scaled(2).seconds(10**9) == pytest.approx(2 * cost.seconds(10**9))


def test_wrong_costs_and_links() -> None:
    for wrong in (-1.0, math.nan, "1", True):
        with pytest.raises(ConfigError, match="alpha_s must be a finite number >= 0"):
            AllReduceCost(wrong, 1e-11)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="nvlink4, infiniband-ndr"):
        link("avian")
    assert all(link(preset.name) is preset for preset in LINKS)


@given(st.floats(1e-6, 1e-3), st.floats(1e8, 1e12), st.integers(0, 2**32))
def test_a_fit_finds_the_line_through_outliers(alpha: float, rate: float, seed: int) -> None:
    """One in three sweeps was disturbed: its samples take up to ten times as long."""
    randomness = random.Random(seed)
    samples = [
        (size, (alpha + size / rate) * (randomness.uniform(1, 10) if sweep == 0 else 1.0))
        for size in (2**k for k in range(10, 31))
        for sweep in range(3)
    ]
    found = fit(samples)
    for size in (2**10, 2**20, 2**30):
        assert found.cost.seconds(size) == pytest.approx(alpha + size / rate, rel=1e-6)
    assert found.residual < 1e-6


def test_a_fit_has_a_latency_and_a_slope_or_says_so() -> None:
    assert fit([(1000, 0.5e-6), (2000, 2e-6), (4000, 4e-6)]).cost.alpha_s == 0
    with pytest.raises(TimesDoNotGrow):
        fit([(8, 2.0), (16, 1.5), (32, 1.0)])
