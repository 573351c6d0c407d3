"""Optimizers as sinks of reduced gradients: updates in the backward, or left for the next forward.

The engine knows a sink by its protocol only (`replica/sinks.py`): `update_request` says what a backward updates,
`apply` takes reduced gradients, `ended` and `interrupted` close the backward. Here a sink is composed of

    Update      updates of whole parameters, and guards around the optimizer's `step()` (`update.py`)
      setup     one module and one optimizer, weakly, with the options that were given (`setup.py`)
      deferred  None, or Deferred: work that is left for the next forward (`deferred.py`, `readers.py`, `forward.py`)
    Shard       an Update by which each rank updates its elements of parameters, with their state (`shard.py`)

`in_backward()` makes one, `remove_in_backward()` takes it out again.
"""

from dp_compile.optim.clipping import clip_grad_norm_ as clip_grad_norm_
from dp_compile.optim.in_backward import full_state_dict as full_state_dict
from dp_compile.optim.in_backward import in_backward as in_backward
from dp_compile.optim.in_backward import remove_in_backward as remove_in_backward
from dp_compile.optim.readers import synchronize as synchronize
