"""The cost of an all-reduce: formulas against plain arithmetic, the fit, links, the bound."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dp_compile.errors import ConfigError
from dp_compile.plan.cost import LINKS, AllReduceCost, CostFit, Link, fit, line, link, ring, ring_or_tree

# --- formulas -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3, 8, 64, 1000, 1024, 2**29])
def test_formulas_are_those_of_textbooks(n: int) -> None:
    for formula, hops in ((ring, 2 * (n - 1)), (ring_or_tree, 2 * math.ceil(math.log2(n)))):
        cost = line(formula, n, launch_s=8e-6, hop_s=3e-6, busbw=1e11)
        assert cost.alpha_s == pytest.approx(8e-6 + hops * 3e-6)
        assert cost.beta_s_per_byte == pytest.approx(2 * (n - 1) / n / 1e11)
        assert cost.scaled(2).seconds(10**9) == pytest.approx(2 * cost.seconds(10**9))


# --- costs and links ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [-1.0, math.nan, "1", True])
def test_wrong_costs_and_links(wrong: float) -> None:
    with pytest.raises(ConfigError, match="alpha_s"):
        AllReduceCost(wrong, 1e-11)
    with pytest.raises(ConfigError, match="beta_s_per_byte"):
        AllReduceCost(1e-5, wrong)
    with pytest.raises(ConfigError, match="n_ranks"):
        link("nvlink4").cost(wrong)
    if wrong is not True:
        with pytest.raises(ConfigError, match="busbw_gb_s"):
            Link("mine", 1.0, wrong)


def test_presets() -> None:
    assert len({preset.name for preset in LINKS}) == len(LINKS)
    for preset in LINKS:
        assert link(preset.name) is preset
        assert preset.cost(8).beta_s_per_byte == pytest.approx(1.75 / (preset.busbw_gb_s * 1e9))
        assert preset.cost(1024, formula=ring_or_tree).alpha_s < preset.cost(1024).alpha_s
    assert link("nvlink4").cost(1).beta_s_per_byte == 0
    with pytest.raises(ConfigError, match="nvlink4, infiniband-ndr"):
        link("avian")


# --- the fit --------------------------------------------------------------------------------------------------------


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


def test_a_fit_has_no_negative_latency() -> None:
    assert fit([(1000, 0.5e-6), (2000, 2e-6), (4000, 4e-6)]).cost.alpha_s == 0


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([], "at least 2 sizes, got 0"),
        ([(8, 1.0), (8, 2.0)], "at least 2 sizes, got 1"),
        ([(8, 1.0), (16, math.nan)], "seconds of a sample"),
        ([(8, 1.0), (16, 0.0)], "seconds of a sample"),
        ([(8, 1.0), (0, 1.0)], "nbytes of a sample"),
        ([(8, 1.0), (16, 1.0), (32, 1.0)], "do not grow"),
        ([(8, 2.0), (16, 1.5), (32, 1.0)], "do not grow"),
    ],
)
def test_samples_without_an_answer(samples: list[tuple[int, float]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fit(samples)


FITTED = CostFit(AllReduceCost(1e-5, 1e-11, AllReduceCost(0.2, 0.02), AllReduceCost(0.5, 0.1)), 0.02, 1024, 2**30)


def test_a_fit_is_a_file() -> None:
    assert CostFit.from_json(FITTED.to_json()) == FITTED


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data | {"version": 99}, "version 99"),
        (lambda data: {name: value for name, value in data.items() if name != "version"}, "not a cost file"),
        (lambda data: data | {"cost": {"alpha_s": 1e-5, "beta_s_per_byte": math.nan}}, "beta_s_per_byte"),
        (lambda data: data | {"cost": {"alpha_s": -1.0, "beta_s_per_byte": 1.0}}, "alpha_s"),
        (lambda data: data | {"cost": 3}, "not a cost file"),
    ],
)
def test_files_that_are_wrong(change: Callable[[dict[str, object]], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CostFit.from_json(json.dumps(change(json.loads(FITTED.to_json()))))
