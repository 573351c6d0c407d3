"""Original names of modules: without wrappers, and with the name of the class before replication."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, TypeVar

T = TypeVar("T")

WRAPPED: Final = frozenset({"_checkpoint_wrapped_module", "_orig_mod"})  # of activation checkpointing, torch.compile


def fully_qualified(name: str) -> str:
    """Return the name of a parameter or module without wrappers: `blocks.0.weight` for `blocks.0._orig_mod.weight`."""
    return ".".join(part for part in name.split(".") if part not in WRAPPED)


def by_qualified_name(named: Iterable[tuple[str, T]]) -> dict[str, T]:
    """Return a dictionary whose keys are names without wrappers; the original names if two would become equal."""
    as_given = dict(named)
    stripped = {fully_qualified(name): value for name, value in as_given.items()}
    return stripped if len(stripped) == len(as_given) else as_given


def class_name(module: object) -> str:
    """Return the name of a module's class before replication: `Net` for a module of class `DDPNet`."""
    kind = type(module)
    return str(getattr(kind, "_dp_compile_original", kind).__name__)
