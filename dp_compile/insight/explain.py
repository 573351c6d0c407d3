"""Why a replicated module's step takes as long as it takes."""

from __future__ import annotations

from torch import nn

from dp_compile.insight.explanation import Explanation, explanation_of
from dp_compile.insight.observe import step_of


def explain(module: nn.Module) -> Explanation:
    """What bounds the step of a replicated module, what is exposed and why, and what would help. Print it.

    The figures are predictions from the plan, and say what they start from: ready times and the link may be assumed,
    estimated or measured. What was measured of this rank's steps stands beside them.

    Raises:
        ModuleError: the module is not replicated, or no synchronised backward of it has run yet.
    """
    return explanation_of(step_of(module))
