"""Two runs of a suite: is a mode slower by more than noise, or does it do more than before?"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Final

from dp_compile.bench.machine import MACHINE
from dp_compile.bench.results import Cell, ModeResult, Ratio, Results, ratios
from dp_compile.errors import ConfigError

FALSE_ALARMS: Final = 0.01  # probability of a regression in two runs of the same code, if turns show all of the noise
TOO_NOISY: Final = 0.25  # with a wider noise band, `same` would be a claim without evidence
# Two starts of the same code differ (memory layout, order of compilation), which turns of one start cannot show:
# Kalibera and Jones, Rigorous Benchmarking in Reasonable Time, ISMM 2013. Smaller changes are no regression.
TOLERANCE: Final = 0.03
_SETTINGS: Final = ("reference", "ranks", "steps_per_turn", "caches")


def compare(baseline: Results, new: Results) -> tuple[list[str], int]:
    """Ratios to the reference inside each run, one run against the other, and counts. Bounds are not compared.

    A change of time counts when it is larger than `TOLERANCE` and than the noise band: the normal quantile of one-sided
    error `FALSE_ALARMS` over the number of comparisons (Bonferroni), times the standard error. Counts have no noise:
    one more is a regression. Returns lines for people, the worst change first, and the number of regressions.

    Raises:
        ConfigError: another machine, other settings, or nothing in common.
    """
    _check_comparable(baseline, new)
    reference, pairs = baseline.suite.reference, list(zip(baseline.cells, new.cells, strict=True))
    times = [each for pair in pairs for each in _times(*pair, reference)]
    if not times:
        raise ConfigError(f"no mode was measured in both runs together with the reference {reference!r}.")
    sure = NormalDist().inv_cdf(1 - FALSE_ALARMS / len(times))
    found = sorted((_judged(*each, sure) for each in times), key=lambda each: -each[0])
    lines = [line for _, line in found] + [line for pair in pairs for line in _counts(*pair)]
    regressions = sum(line.startswith(("slower", "lost", "more")) for line in lines)
    lines.append(
        f"{regressions or 'no'} regression{'' if regressions == 1 else 's'} in {len(times)} comparisons of times over "
        f"{reference}, above {TOLERANCE:.0%} and above the noise, and in all counts"
    )
    return lines, regressions


def _check_comparable(baseline: Results, new: Results) -> None:
    old, here = (
        {name: each.environment[name] for name in MACHINE}
        | {name: getattr(each.suite, name) for name in _SETTINGS}
        | {"cells": ", ".join(f"{cell.workload} over {cell.network}" for cell in each.cells)}
        for each in (baseline, new)
    )
    if differing := [f"{name} {old[name]!r} and {here[name]!r}" for name in old if old[name] != here[name]]:
        raise ConfigError(f"these runs cannot be compared: {'; '.join(differing)}.")


_Times = tuple[str, Ratio, Ratio | None, str]


def _times(old: Cell, new: Cell, reference: str) -> list[_Times]:
    """A title, and the ratios of both runs; `None` with a reason where the new run has none."""
    after, found = ratios(new, reference), []
    for (name, what), value in ratios(old, reference).items():
        if not old.measured()[name].is_bound:
            failed = next((mode for mode in new.modes if mode.name == name), ModeResult(name))
            reason = (new.skipped or failed.reason or "not measured").splitlines()[0]
            found.append((f"{old.workload}, {old.network}, {name}, {what}", value, after.get((name, what)), reason))
    return found


def _judged(title: str, old: Ratio, new: Ratio | None, reason: str, sure: float) -> tuple[float, str]:
    if new is None:
        return math.inf, f"lost: {title}: {old.value:.3f} -> {reason}"
    change, band = math.log(new.value / old.value), sure * math.hypot(old.log_error, new.log_error)
    verdict = "unclear" if math.expm1(band) > TOO_NOISY else "same"
    if abs(change) > max(band, math.log1p(TOLERANCE)):
        verdict = "slower" if change > 0 else "faster"
    text = f"{old.value:.3f} -> {new.value:.3f}, {math.expm1(change):+.1%} (noise {math.expm1(band):.1%})"
    return change, f"{verdict}: {title}: {text}"


def _counts(old: Cell, new: Cell) -> list[str]:
    lines = []
    for name, mode in old.measured().items():
        after = new.measured().get(name, mode).counts
        for what, count in mode.counts.items():
            if (now := after.get(what, count)) != count:
                verdict = "more" if now > count else "fewer"
                lines.append(f"{verdict}: {old.workload}, {old.network}, {name}: {what} {count:,} -> {now:,}")
    return lines
