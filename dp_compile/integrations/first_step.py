"""What an integration says once, when the first step has been: which way the backwards go, and that ranks are equal.

A framework stands between the user and the model, so a model that is not reduced is not seen until the training is
bad. One comparison of sums over all parameters, one line in the log.
"""

from __future__ import annotations

import logging
from functools import partial

import torch.distributed as dist
from torch import nn

from dp_compile.engine.guards import compare_first_step
from dp_compile.engine.replica import Replica
from dp_compile.replication.module import is_replicated, replica_of

logger = logging.getLogger("dp_compile.integrations")

_WAYS = {
    "captured": "captured, with their reductions in one compiled graph",
    "eager hooks": "reduced by hooks that run eagerly",
}


def watch_first_step(module: nn.Module, framework: str) -> None:
    """Compare the parameters of a replicated module once, after its first step, and say how it went.

    In the second synchronised backward: then every rank has ended the first step, whatever belongs to it. Does nothing
    if torch's own DDP reduces the module, as with `ddp_python_hook=False`.

    Args:
        module: a replicated module.
        framework: who wrapped it, for the log.

    Raises:
        ModuleError: the module waits for its first forward.
    """
    if is_replicated(module):
        compare_first_step(replica_of(module), partial(_say, framework))


def _say(framework: str, replica: Replica, compared: str) -> None:
    if dist.get_rank(replica.group.process_group) == 0:
        done = [(name, times) for name, times in replica.history.backwards.most_common() if name in _WAYS]
        ways = ", and ".join(f"{_WAYS[name]} ({times})" for name, times in done)
        logger.info("%s: backwards are %s; after the first step %s", framework, ways, compared)
