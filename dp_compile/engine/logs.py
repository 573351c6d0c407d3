"""What `dp_compile` logs, and at which level.

| level   | logger              | what, each once                                                                  |
|---------|---------------------|----------------------------------------------------------------------------------|
| WARNING | `backward`          | a backward is not captured                                                       |
|         |                     | gradients of torch.autograd.grad, which are those of one rank                    |
|         | `compilation`       | a backward that is compiled late                                                 |
|         | `guards`            | parameters are not compared between ranks, for machines differ                   |
|         | `dumps`             | graphs are not dumped any more, and why                                          |
|         | `plan_sync`         | the plan stays although it was to be made anew; the cost of the link stays       |
|         | `replicated_module` | a comm hook reduces                                                              |
|         | `replicate`         | units of `bucket_policy` that have frozen parameters beside trainable ones       |
|         | `measuring`         | nothing was measured, and why                                                    |
|         | `monitor`           | a backward waits for other ranks; again each time the wait has doubled           |
|         | `integrations`      | options of a framework that say nothing of the backward                          |
| INFO    | `warmup`            | each backward that compiled something, with the time so far                      |
|         | `replicate`         | the first plan: strategy, buckets, how far from the best possible end, basis      |
|         | `plan_sync`         | each plan that is made anew, in the same words                                   |
|         | `guards`            | after how many backwards parameters are compared                                 |
|         | `measuring`         | what `measure()` saw                                                             |
|         | `integrations`      | in a framework: which way backwards go, parameters are equal after the first step |
| DEBUG   | `compilation`       | each graph that is compiled                                                      |
|         | `capture`           | a graph that does not say when its gradients are ready                           |

A fallback is said once for each module, not in each step. Nothing is installed and no level is set here: your own
`logging` configuration counts, and without any Python shows warnings on stderr (`logging.lastResort`; a `NullHandler`
would hide them). torch's own switch knows this package too: `TORCH_LOGS=dp_compile` shows all loggers from INFO on,
with the rank, `TORCH_LOGS=+dp_compile` from DEBUG on. Names are `dp_compile.<logger>`, for Python's `logging`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Protocol


class Module(Protocol):
    """What something can be said of once."""

    @property
    def said(self) -> set[str]: ...


def warn_once(logger: logging.Logger, modules: Iterable[Module], message: str, *args: object, key: str = "") -> None:
    """Warn, unless that was said of each of these modules before.

    Args:
        logger: who warns.
        modules: whom it is about.
        message: with places for `args`.
        key: what may not be said twice; `message` as it stands if not given, so that `args` do not count.
    """
    new = [module for module in modules if (key or message) not in module.said]
    for module in new:
        module.said.add(key or message)
    if new:
        logger.warning(message, *args)
