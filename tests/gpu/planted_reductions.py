"""A fault in a reduction that G2 has to see: `DP_COMPILE_GPU_PLANT=planted_reductions:factor` plants it."""

from __future__ import annotations

from typing import Any

from dp_compile.passes import bucketing, verify


def factor() -> None:
    """What is reduced is multiplied by two. The checks of the pipeline are off: they would refuse it themselves."""
    verify.Checks.run = lambda *given, **named: None
    factors = bucketing.GraphOps.factors

    def doubled(self: Any, reduction: Any) -> Any:
        scale, post_scale = factors(self, reduction)
        return scale, 2.0 * post_scale

    # `restored` leaves a factor of 1.0 out.
    bucketing.GraphOps.factors = doubled
