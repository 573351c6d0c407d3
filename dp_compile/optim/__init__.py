"""What follows a reduction: updates of parameters in the backward, and those that are left for the next forward."""

from dp_compile.optim.crossing import synchronize as synchronize
from dp_compile.optim.in_backward import in_backward as in_backward
