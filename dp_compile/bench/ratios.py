"""Ratios of a mode to the reference of the same cell, and how far repetitions let one trust them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from dp_compile.bench.results import Cell, ModeResult

RESAMPLES: Final = 2000
_SEED: Final = 7


@dataclass(frozen=True, slots=True)
class Ratio:
    """Median step of a mode over the median step of the reference, and the standard error of its logarithm."""

    value: float
    log_error: float

    @property
    def plus_minus(self) -> float:
        """Half of an interval that covers about 95%."""
        return self.value * 1.96 * self.log_error


def ratio(step_s: Sequence[float], reference_s: Sequence[float]) -> Ratio:
    """Turns that belong together are drawn together: what slowed both down is not noise of the ratio.

    The standard error is that of the bootstrap (Efron and Tibshirani, An Introduction to the Bootstrap, 1993,
    chapter 6), with a fixed seed.
    """
    turns = min(len(step_s), len(reference_s))
    times = np.array([step_s[:turns], reference_s[:turns]])
    drawn = np.random.default_rng(_SEED).integers(0, turns, size=(RESAMPLES, turns))
    logs = np.log(np.median(times[:, drawn], axis=2))
    value = float(np.median(times[0]) / np.median(times[1]))
    return Ratio(value, float(np.std(logs[0] - logs[1], ddof=1)))


def ratios(cell: Cell, reference: str) -> dict[str, Ratio]:
    """Of every measured mode of a cell but the reference; empty if that was not measured."""
    measured = cell.measured()
    if reference not in measured:
        return {}
    steps = measured[reference].step_s
    return {name: ratio(mode.step_s, steps) for name, mode in measured.items() if name != reference}


def start_ratio(cell: Cell, mode: ModeResult, reference: str) -> Ratio | None:
    """Of how long a mode and the reference took until they were warm; `None` of fewer than three starts each."""
    other = cell.measured().get(reference)
    if other is None or other is mode or min(len(mode.starts_s), len(other.starts_s)) < 3:
        return None
    return ratio(mode.starts_s, other.starts_s)


def quartiles_ms(mode: ModeResult) -> tuple[float, float, float]:
    """First quartile, median and third quartile of a mode's steps in milliseconds."""
    low, middle, high = np.quantile(mode.step_s, [0.25, 0.5, 0.75])
    return float(low) * 1e3, float(middle) * 1e3, float(high) * 1e3


def log_change(old: Ratio, new: Ratio) -> tuple[float, float]:
    """Logarithm of new over old, and its standard error; the runs are independent."""
    return math.log(new.value / old.value), math.hypot(old.log_error, new.log_error)
