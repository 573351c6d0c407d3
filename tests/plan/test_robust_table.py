"""The table that guards the planner: on a few links plans are near the bound."""

from __future__ import annotations

import re

from robust_table import table


def test_plans_are_near_the_bound() -> None:
    """Two of the thirty links; over all of them: median at most 1.015, worst at most 1.12 with speeds off."""
    for line in table(busbw_gb_s=(25, 100), alpha_us=(20,)):
        found = {
            kind: float(worst)
            for kind, worst in re.findall(r"(\w[^;:/]*?) [\d.]+ / ([\d.]+)", line.partition("worst: ")[2])
        }
        assert 1.0 <= found["earliest"] <= found["robust"] <= 1.05
        assert found["robust, speeds off"] <= min(1.08, found["earliest, speeds off"])
