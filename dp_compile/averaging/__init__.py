"""Periodic averaging of parameters, in place of averaging gradients in every step: local SGD, and outer optimizers.

Use `from dp_compile import averaging`. Names, arguments and schedules are torch's, except for `OuterOptimizer`.
"""

from dp_compile.averaging.optimizers import OuterOptimizer, PeriodicModelAverager, PostLocalSGDOptimizer

__all__ = ["OuterOptimizer", "PeriodicModelAverager", "PostLocalSGDOptimizer"]
