"""What every integration does: it refuses versions and models, chooses options, watches the first step, cleans up."""

from __future__ import annotations

import logging
from functools import partial
from importlib.metadata import version
from typing import Final

import torch.distributed as dist
from torch import nn
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP

from dp_compile.config import BACKENDS, ReplicateConfig
from dp_compile.engine.guards import compare_first_step
from dp_compile.engine.module_names import class_name
from dp_compile.engine.replica import Replica
from dp_compile.errors import ConfigError, ModuleError
from dp_compile.replication.ddp import DistributedDataParallel
from dp_compile.replication.module import is_replicated, replica_of, unwrap
from dp_compile.replication.replicate import release_abandoned, unreplicate

logger = logging.getLogger("dp_compile.integrations")

TESTED: Final = {
    "accelerate": ((1, 15), (2,)),
    "transformers": ((5,), (6,)),
    "lightning": ((2, 6), (2, 7)),
    "pytorch_lightning": ((2, 6), (2, 7)),
    "torchtitan": ((0, 3), (0, 4)),
}
"""From which release on, and below which one; the extras `test-integrations` and `test-torchtitan` say the same."""

_WAYS: Final = {
    "captured": "captured, with their reductions in one compiled graph",
    "eager hooks": "reduced by hooks that run eagerly",
}


def refuse_other_versions(package: str) -> None:
    """Refuse releases that were not tried: what integrations override there is no promise of its authors."""
    installed, (first, end) = version(package), TESTED[package]
    # The release: `1.15.0rc1+cpu` is (1, 15), the last number may have letters.
    release = tuple(int(part) for part in installed.split("+")[0].split(".")[:2] if part.isdigit())
    if not first <= release < end:
        span = f"{package}>={'.'.join(map(str, first))},<{'.'.join(map(str, end))}"
        raise ConfigError(
            f"{package} {installed} is installed; dp_compile's integration was tried with {span}. Install one of "
            f"those: pip install '{span}'."
        )


def options(given: ReplicateConfig | None, backend: str | None = None) -> ReplicateConfig:
    """The options that the user gave; without any, the backend of the forward compiles the backward as well."""
    if not isinstance(given, ReplicateConfig | None):
        raise ConfigError(f"replicate_config must be a ReplicateConfig, got {type(given).__name__}.")
    if given is None:
        return ReplicateConfig(backend=backend) if backend in BACKENDS else ReplicateConfig()
    return given


def refuse_managed(module: nn.Module, by: str) -> None:
    """Refuse a model that is reduced already, naming what is about to wrap it. Wrappers that are gone do not count."""
    inner = unwrap(module)
    release_abandoned(inner)
    if isinstance(inner, DistributedDataParallel | TorchDDP):
        owner = "dp_compile.DistributedDataParallel" if isinstance(inner, DistributedDataParallel) else "torch's DDP"
        raise ModuleError(
            f"{class_name(unwrap(inner.module))} is wrapped by {owner} already, and {by} wraps it too. Give it the "
            "model as it was before."
        )
    if is_replicated(inner):
        raise ModuleError(
            f"{class_name(inner)} is replicated already, and {by} does that too. Give it the model without "
            "dp_compile.replicate(), or call dp_compile.unreplicate(model) first."
        )


def take_off(wrapper: nn.Module | None) -> None:
    """Take everything of this package off the model in a wrapper, if it is one of this package."""
    if isinstance(wrapper, DistributedDataParallel) and is_replicated(wrapper):
        unreplicate(wrapper)


def watch_first_step(module: nn.Module, framework: str) -> None:
    """Compare the parameters of a replicated module once, after its first step, and log how its backwards go.

    A framework stands between user and model, so a model that is not reduced shows only once the training is bad. The
    comparison is in the second synchronised backward: every rank has ended the first step then. Nothing happens if
    torch's own DDP reduces the module, as with `ddp_python_hook=False`.
    """
    if is_replicated(module):
        compare_first_step(replica_of(module), partial(_log, framework))


def _log(framework: str, replica: Replica, compared: str) -> None:
    if dist.get_rank(replica.group.process_group) == 0:
        done = [(name, times) for name, times in replica.history.backwards.most_common() if name in _WAYS]
        ways = ", and ".join(f"{_WAYS[name]} ({times})" for name, times in done)
        logger.info("%s: backwards are %s; after the first step %s", framework, ways, compared)
