"""Optimizers that take reduced gradients in place of `.grad` (sinks): they update in the backward or the next forward.

The engine uses only the sink protocol (`replica/sinks.py`): `update_request` names the parameters that a backward
updates, `apply` takes reduced gradients, `ended` and `interrupted` close the backward. A sink consists of

    Update      updates whole parameters, and guards the optimizer's `step()` (`update.py`)
      setup     weak references to one module and one optimizer, and the options (`setup.py`)
      deferred  None, or Deferred: work that the next forward waits for (`deferred.py`, `readers.py`, `forward.py`)
    Shard       an Update in which each rank updates its elements of parameters and holds their state (`shard.py`)

`in_backward()` installs a sink, `remove_in_backward()` removes it.
"""

from dp_compile.optim.clipping import clip_grad_norm_ as clip_grad_norm_
from dp_compile.optim.in_backward import full_state_dict as full_state_dict
from dp_compile.optim.in_backward import in_backward as in_backward
from dp_compile.optim.in_backward import remove_in_backward as remove_in_backward
from dp_compile.optim.readers import synchronize as synchronize
