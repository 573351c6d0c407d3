"""What a step takes at least: the release-time bound of theory, with the times and the link of the same run."""

from __future__ import annotations

import statistics
from typing import Final

from dp_compile.bench.contract import Facts
from dp_compile.bench.results import Cell, ModeResult, Results
from dp_compile.bench.selfcheck import SelfCheck
from dp_compile.plan.cost import AllReduceCost
from dp_compile.plan.network import ReadyGradient, release_time_bound

COMPUTE: Final = "compute"
"""The mode that is a step without communication."""


def rho(results: Results, cell: Cell, mode: str) -> float | None:
    """A mode's step over the least that a step can take; below 1.00 an input is wrong.

    The least is the step of `compute` with its backward replaced by the release-time bound (`plan.network`): when each
    gradient is ready is what the mode says of itself, a share of the backward by its FLOPs and bytes; the cost of a
    collective is that of the link's self-check. Processor time that communication takes from compute is not in it. If
    `compute` was measured in another heat of the same workload and link, its ratio to the reference is carried over.

    `None` where one of these is not known, as with modes that do not say when their gradients are ready.
    """
    measured, reference = cell.measured(), results.suite.reference
    if mode not in measured or reference not in measured or cell.self_check is None:
        return None
    facts, check = measured[mode].facts, cell.self_check
    if not facts.ready or not check.mb_per_s:
        return None
    ratio = _median_s(measured[mode]) / _median_s(measured[reference])
    for beside in (each.measured() for each in results.cells if each.key[:2] == cell.key[:2]):
        if COMPUTE in beside and reference in beside and (backward_s := beside[COMPUTE].facts.backward_s) is not None:
            least_s = _median_s(beside[COMPUTE]) - backward_s + _bound_s(facts, backward_s, check)
            return ratio * _median_s(beside[reference]) / least_s
    return None


def _median_s(mode: ModeResult) -> float:
    return statistics.median(mode.step_s)


def _bound_s(facts: Facts, backward_s: float, check: SelfCheck) -> float:
    return release_time_bound(
        [ReadyGradient(nbytes, share * backward_s) for share, nbytes in facts.ready],
        cost=AllReduceCost(check.alpha_us * 1e-6, 1e-6 / check.mb_per_s),
        backward_s=backward_s,
    )
