"""The cost of an all-reduce: formulas against plain arithmetic, the fit, links, the bound."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable

import numpy as np
import pytest
from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st

from dp_compile.errors import ConfigError
from dp_compile.plan.cost import (
    RING,
    TREE,
    AllReduceCost,
    CostFit,
    fit,
)
from dp_compile.plan.links import LINKS, Link, link

RANKS = [1, 2, 3, 8, 64, 1000, 1024, 2**29]


# --- formulas -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", RANKS)
def test_ring_and_tree_are_the_textbook_formulas(n: int) -> None:
    values = {"alpha_0": 8e-6, "alpha_hop": 3e-6, "busbw": 1e11, "n": n, "nbytes": 1e8}
    assert RING.evaluate(**values) == pytest.approx(8e-6 + 2 * (n - 1) * 3e-6 + 2 * (n - 1) / n * 1e8 / 1e11)
    assert TREE.evaluate(**values) == pytest.approx(8e-6 + 2 * math.ceil(math.log2(n)) * 3e-6 + 2 * 1e8 / 1e11)


def test_arrays_at_once() -> None:
    sizes = np.array([1e6, 1e7, 1e8])
    seconds = RING.evaluate(alpha_0=1e-5, alpha_hop=1e-6, busbw=1e11, n=8, nbytes=sizes)
    assert seconds == pytest.approx([1e-5 + 14e-6 + 1.75 * size / 1e11 for size in sizes])


def test_the_line_of_a_formula() -> None:
    cost = RING.cost(alpha_0=1e-5, alpha_hop=1e-6, busbw=1e11, n=8)
    assert cost.alpha_s == pytest.approx(24e-6)
    assert cost.beta_s_per_byte == pytest.approx(1.75e-11)
    assert cost.scaled(2).seconds(10**9) == pytest.approx(2 * cost.seconds(10**9))


def test_formulas_are_printed() -> None:
    assert_expected_inline(
        "\n".join(str(formula) for formula in (RING, TREE)),
        """\
ring all-reduce = alpha_0 + alpha_hop*(2*n - 2) + nbytes*(2*n - 2)/(busbw*n)
double binary tree all-reduce = alpha_0 + 2*alpha_hop*ceiling(log2(n)) + 2*nbytes/busbw""",
    )


def test_every_formula_says_where_it_is_from() -> None:
    for formula in (RING, TREE):
        assert formula.source


def test_compiled_functions_belong_to_their_formula() -> None:
    assert hash(RING) != hash(TREE)
    assert RING._compiled is not TREE._compiled


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"busbw": 0.0}, "busbw must be > 0"),
        ({"busbw": -1.0}, "busbw must be > 0"),
        ({"busbw": math.nan}, "busbw must be > 0"),
        ({"busbw": math.inf}, "busbw must be > 0"),
        ({"n": 0}, "n must be > 0"),
        ({"n": 2.5}, "n must be an integer"),
        ({"speed": 1.0}, "needs values for alpha_0, alpha_hop, busbw, n, nbytes"),
    ],
)
def test_wrong_values_of_symbols(wrong: dict[str, float], message: str) -> None:
    values = {"alpha_0": 1e-5, "alpha_hop": 1e-6, "busbw": 1e11, "n": 8, "nbytes": 1e6} | wrong
    with pytest.raises(ConfigError, match=message):
        RING.evaluate(**values)


# --- costs and links ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [-1.0, math.nan, math.inf, "1", True])
def test_wrong_costs(wrong: float) -> None:
    with pytest.raises(ConfigError, match="alpha_s"):
        AllReduceCost(wrong, 1e-11)
    with pytest.raises(ConfigError, match="beta_s_per_byte"):
        AllReduceCost(1e-5, wrong)


@pytest.mark.parametrize("wrong", [0, -1.0, math.nan, math.inf])
def test_wrong_links(wrong: float) -> None:
    with pytest.raises(ConfigError, match="busbw_gb_s"):
        Link("mine", 1.0, wrong, "test")
    with pytest.raises(ConfigError, match="alpha_us"):
        Link("mine", wrong, 1.0, "test")


def test_presets() -> None:
    assert len({preset.name for preset in LINKS}) == len(LINKS)
    for preset in LINKS:
        assert link(preset.name) is preset
        assert "not measured" in preset.source or "calibrate" in preset.source
        assert preset.cost(8).beta_s_per_byte == pytest.approx(1.75 / (preset.busbw_gb_s * 1e9))
        assert preset.cost(1024, formula=TREE).alpha_s < preset.cost(1024).alpha_s
    assert link("nvlink4").cost(1).beta_s_per_byte == 0
    with pytest.raises(ConfigError, match="nvlink4, infiniband-ndr"):
        link("avian")


@pytest.mark.parametrize("wrong", [0, -1, 2.5, True])
def test_wrong_number_of_ranks(wrong: int) -> None:
    with pytest.raises(ConfigError, match="n_ranks"):
        link("nvlink4").cost(wrong)


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


def test_a_fit_tolerates_sizes_that_are_wrong_throughout() -> None:
    samples = [(2**k, (2e-5 + 2**k / 1e10) * (3.0 if k in (12, 19, 25) else 1.0)) for k in range(10, 31)]
    found = fit(samples)
    assert (found.cost.alpha_s, found.cost.beta_s_per_byte) == pytest.approx((2e-5, 1e-10))
    assert found.residual == pytest.approx(3 * (2 / 3) / 21)
    assert (found.smallest_nbytes, found.largest_nbytes) == (2**10, 2**30)


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


FITTED = CostFit(AllReduceCost(1e-5, 1e-11), 0.02, 1024, 2**30)


def test_a_fit_is_a_file() -> None:
    assert CostFit.from_json(FITTED.to_json()) == FITTED


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data | {"version": 99}, "version 99"),
        (lambda data: {name: value for name, value in data.items() if name != "version"}, "not a cost file"),
        (lambda data: {name: value for name, value in data.items() if name != "cost"}, "not a cost file"),
        (lambda data: data | {"more": 1}, "not a cost file"),
        (lambda data: data | {"cost": {"alpha_s": 1e-5, "beta_s_per_byte": math.nan}}, "beta_s_per_byte"),
        (lambda data: data | {"cost": {"alpha_s": -1.0, "beta_s_per_byte": 1.0}}, "alpha_s"),
        (lambda data: [1, 2], "not a cost file"),
        (lambda data: data | {"cost": 3}, "not a cost file"),
    ],
)
def test_files_that_are_wrong(change: Callable[[dict[str, object]], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CostFit.from_json(json.dumps(change(json.loads(FITTED.to_json()))))


def test_a_file_that_is_not_json() -> None:
    with pytest.raises(ConfigError, match="not a cost file"):
        CostFit.from_json("alpha = 3")
