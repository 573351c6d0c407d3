"""Shared by all integrations: checks of versions and models, choice of options, cleanup."""

from __future__ import annotations

from importlib.metadata import version
from typing import Final

from torch import nn
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP

from dp_compile.config import BACKENDS, ReplicateConfig
from dp_compile.errors import ConfigError, UnsupportedModuleError, require
from dp_compile.replica.module_names import class_name
from dp_compile.replication.ddp import DistributedDataParallel
from dp_compile.replication.module import is_replicated, unwrap
from dp_compile.replication.replicate import unreplicate

TESTED: Final = {  # first release, and first one not supported, as in extras test-integrations and test-torchtitan
    "accelerate": ((1, 15), (2,)),
    "transformers": ((5,), (6,)),
    "lightning": ((2, 6), (2, 7)),
    "pytorch_lightning": ((2, 6), (2, 7)),
    "torchtitan": ((0, 3), (0, 4)),
}


def refuse_other_versions(package: str) -> None:
    """Raise if the installed release is untested, because integrations override methods that are not public API."""
    installed, (first, end) = version(package), TESTED[package]
    # `1.15.0rc1+cpu` is (1, 15): the last number may have letters.
    release = tuple(int(part) for part in installed.split("+")[0].split(".")[:2] if part.isdigit())
    if not first <= release < end:
        span = f"{package}>={'.'.join(map(str, first))},<{'.'.join(map(str, end))}"
        raise ConfigError(
            f"{package} {installed} is installed; dp_compile's integration was tried with {span}. Install one of "
            f"those: pip install '{span}'."
        )


def options(given: ReplicateConfig | None, backend: str | None = None) -> ReplicateConfig:
    """Return the user's options. By default `backend`, that of the forward, also compiles the backward."""
    require(isinstance(given, ReplicateConfig | None), "replicate_config", "a ReplicateConfig", type(given))
    return given or (ReplicateConfig(backend=backend) if backend in BACKENDS else ReplicateConfig())


def refuse_managed(module: nn.Module, by: str) -> None:
    """Raise if a model is wrapped or replicated already. `by`: the caller that would wrap it again."""
    inner = unwrap(module)
    if isinstance(inner, DistributedDataParallel | TorchDDP):
        owner = "dp_compile.DistributedDataParallel" if isinstance(inner, DistributedDataParallel) else "torch's DDP"
        raise UnsupportedModuleError(
            f"{class_name(unwrap(inner.module))} is wrapped by {owner} already, and {by} wraps it too. Pass the "
            "model without that wrapper."
        )
    if is_replicated(inner):
        raise UnsupportedModuleError(
            f"{class_name(inner)} is replicated already, and {by} replicates it too. Leave out "
            "dp_compile.replicate(), or call dp_compile.unreplicate(model) first."
        )


def take_off(wrapper: nn.Module | None) -> None:
    """Unreplicate the model in a wrapper, if it is a wrapper of this package."""
    if isinstance(wrapper, DistributedDataParallel) and is_replicated(wrapper):
        unreplicate(wrapper)
