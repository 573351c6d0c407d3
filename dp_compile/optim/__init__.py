"""Optimizers as sinks of reduced gradients: updates in the backward, or left for the next forward.

The engine knows a sink by its protocol only (`replica/sinks.py`): `update_request` says what a backward updates,
`apply` takes reduced gradients, `ended` and `interrupted` close the backward. Here a sink is composed of

    Update      guards around the optimizer's `step()`, of one module and one optimizer (`update.py`)
      setup     both, weakly, with the options that were given (`setup.py`)
      part      Whole: each rank updates whole parameters; Shard: its elements of them, with their state (`shard.py`)
      deferred  None, or Deferred: work that is left for the next forward (`deferred.py`, `readers.py`, `forward.py`)

`in_backward()` makes one, `remove_in_backward()` takes it out again. Nothing here inherits from another sink.
"""

from dp_compile.optim.clipping import clip_grad_norm_ as clip_grad_norm_
from dp_compile.optim.in_backward import full_state_dict as full_state_dict
from dp_compile.optim.in_backward import in_backward as in_backward
from dp_compile.optim.in_backward import remove_in_backward as remove_in_backward
from dp_compile.optim.readers import synchronize as synchronize
