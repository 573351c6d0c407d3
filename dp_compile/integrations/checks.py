"""What every integration refuses: versions that were not tried, and models that somebody else reduces already."""

from __future__ import annotations

from importlib.metadata import version
from typing import Final

from torch import nn
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP

from dp_compile.engine.module_names import class_name
from dp_compile.errors import ConfigError, ModuleError
from dp_compile.replication.ddp import DistributedDataParallel
from dp_compile.replication.module import is_replicated, unwrap
from dp_compile.replication.replicate import release_abandoned

TESTED: Final = {
    "accelerate": ((1, 15), (2,)),
    "transformers": ((5,), (6,)),
    "lightning": ((2, 6), (2, 7)),
    "pytorch_lightning": ((2, 6), (2, 7)),
    "torchtitan": ((0, 3), (0, 4)),
}
"""From which release on, and below which one; the extras `test-integrations` and `test-torchtitan` say the same."""


def refuse_other_versions(package: str) -> None:
    """Refuse releases that were not tried: what integrations override there is no promise of its authors.

    Raises:
        ConfigError: another release is installed.
    """
    installed, (first, end) = version(package), TESTED[package]
    if not first <= _numbers(installed) < end:
        span = f"{package}>={_dotted(first)},<{_dotted(end)}"
        raise ConfigError(
            f"{package} {installed} is installed; dp_compile's integration was tried with {span}. Install one of "
            f"those: pip install '{span}'."
        )


def refuse_managed(module: nn.Module, by: str) -> None:
    """Refuse a model that is reduced already. What a wrapper did that is gone since does not count.

    Args:
        module: what a framework is about to wrap.
        by: what wraps it, for the text.

    Raises:
        ModuleError: it is wrapped or replicated.
    """
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


def _numbers(text: str) -> tuple[int, ...]:
    """The release of a version: `1.15.0rc1+cpu` is (1, 15), the last number may have letters."""
    return tuple(int(part) for part in text.split("+")[0].split(".")[:2] if part.isdigit())


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
