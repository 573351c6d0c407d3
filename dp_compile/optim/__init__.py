"""What follows a reduction: updates of parameters in the backward."""

from dp_compile.optim.in_backward import in_backward as in_backward
