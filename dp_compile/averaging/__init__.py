"""Periodic averaging of parameters in place of gradients in every step: local SGD, and outer optimizers.

Import it with `from dp_compile import averaging`. Names, arguments and schedules are torch's.
"""

from dp_compile.averaging.optimizers import OuterOptimizer as OuterOptimizer
from dp_compile.averaging.optimizers import PeriodicModelAverager as PeriodicModelAverager
from dp_compile.averaging.optimizers import PostLocalSGDOptimizer as PostLocalSGDOptimizer

__all__ = ["OuterOptimizer", "PeriodicModelAverager", "PostLocalSGDOptimizer"]
