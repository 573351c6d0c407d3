"""Names of modules as their author gave them: without wrappers, and of the class before it was replicated."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, TypeVar

T = TypeVar("T")

WRAPPED: Final = frozenset({"_checkpoint_wrapped_module", "_orig_mod"})
"""Where torch's activation checkpointing and `torch.compile` keep the module that they wrap."""


def fully_qualified(name: str) -> str:
    """The name that a parameter or module has without wrappers: `blocks.0._orig_mod.weight` is `blocks.0.weight`."""
    return ".".join(part for part in name.split(".") if part not in WRAPPED)


def by_qualified_name(named: Iterable[tuple[str, T]]) -> dict[str, T]:
    """A dictionary by name without wrappers; names stay as they are if two would become the same."""
    as_given = dict(named)
    stripped = {fully_qualified(name): value for name, value in as_given.items()}
    return stripped if len(stripped) == len(as_given) else as_given


def class_name(module: object) -> str:
    """The name of a module's class; `Net` also while the module is replicated and of class `DDPNet`."""
    kind = type(module)
    return str(getattr(kind, "_dp_compile_original", kind).__name__)
