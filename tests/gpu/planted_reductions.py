"""A fault in a reduction that G2 has to see: `DP_COMPILE_GPU_PLANT=planted_reductions:factor` plants it."""

from dp_compile.passes import bucketing, verify


def factor():
    """What is reduced is multiplied by two. The checks of the pipeline are off: they would refuse it themselves."""
    verify.Checks.run = lambda *given, **named: None
    fill = bucketing.GraphOps.fill
    bucketing.GraphOps.fill = lambda self, scale, *rest: fill(self, 2.0 * scale, *rest)
