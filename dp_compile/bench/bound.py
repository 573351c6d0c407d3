"""What a step takes at least: the release-time bound of theory, with the times and the link of the same run."""

from __future__ import annotations

import statistics
from typing import Final

from dp_compile.bench.contract import Facts
from dp_compile.bench.ratios import ratios
from dp_compile.bench.results import Cell, Results
from dp_compile.bench.selfcheck import SelfCheck
from dp_compile.cost_model import AllReduceCost, release_time_bound

COMPUTE: Final = "compute"
"""The mode that is a step without communication."""


def rho(results: Results, cell: Cell, mode: str) -> float | None:
    """A mode's step over the least that a step can take; below 1.00 an input is wrong.

    The least is the step of `compute` with its backward replaced by the release-time bound (`cost_model`): when each
    gradient is ready is what the mode says of itself, a share of the backward by its FLOPs and bytes; the cost of a
    collective is that of the link's self-check. Processor time that communication takes from compute is not in it. If
    `compute` was measured in another heat of the same workload and link, its ratio to the reference is carried over.

    `None` where one of these is not known, as with modes that do not say when their gradients are ready.
    """
    measured = cell.measured()
    reference = measured.get(results.suite.reference)
    least = _least(results, cell, measured[mode].facts) if mode in measured and cell.self_check is not None else None
    if reference is None or least is None:
        return None
    return statistics.median(measured[mode].step_s) / statistics.median(reference.step_s) / least


def _least(results: Results, cell: Cell, facts: Facts) -> float | None:
    """The least step over the reference's step."""
    check = cell.self_check
    if not facts.ready or check is None or not check.mb_per_s:
        return None
    for beside in (cell, *(each for each in results.cells if each.key[:2] == cell.key[:2])):
        compute, found = beside.measured().get(COMPUTE), ratios(beside, results.suite.reference)
        if compute is None or COMPUTE not in found or compute.facts.backward_s is None:
            continue
        step_s = statistics.median(compute.step_s)
        least_s = step_s - compute.facts.backward_s + _bound_s(facts, compute.facts.backward_s, check)
        return found[COMPUTE].value * least_s / step_s
    return None


def _bound_s(facts: Facts, backward_s: float, check: SelfCheck) -> float:
    return release_time_bound(
        [share * backward_s for share, _ in facts.ready],
        [nbytes for _, nbytes in facts.ready],
        cost=AllReduceCost(check.alpha_us * 1e-6, 1e-6 / check.mb_per_s),
        backward_s=backward_s,
    )
