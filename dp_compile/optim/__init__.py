"""What follows a reduction: updates of parameters in the backward, and those that are left for the next forward."""

from dp_compile.optim.checkpoints import full_state_dict as full_state_dict
from dp_compile.optim.checkpoints import load_sharded_state_dict as load_sharded_state_dict
from dp_compile.optim.checkpoints import sharded_state_dict as sharded_state_dict
from dp_compile.optim.clipping import clip_grad_norm_ as clip_grad_norm_
from dp_compile.optim.deferred import synchronize as synchronize
from dp_compile.optim.in_backward import in_backward as in_backward
from dp_compile.optim.in_backward import remove_in_backward as remove_in_backward
