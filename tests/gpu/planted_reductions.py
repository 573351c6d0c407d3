"""A fault in a reduction that G2 has to see: `DP_COMPILE_GPU_PLANT=planted_reductions:factor` plants it."""

from dp_compile.passes import bucketing, verify


def factor():
    """What is reduced is multiplied by two. The checks of the pipeline are off: they would refuse it themselves."""
    verify.Checks.run = lambda *given, **named: None
    factors = bucketing.GraphOps.factors

    def doubled(self, reduction):
        scale, post_scale = factors(self, reduction)
        return scale, 2.0 * post_scale

    # `restored` leaves a factor of 1.0 out.
    bucketing.GraphOps.factors = doubled
