"""The errors of `dp_compile`. Each says what was given, what is allowed and what to do."""

import math
from typing import TypeGuard


class DPCompileError(Exception):
    """Base of all errors that `dp_compile` raises on purpose."""


class ConfigError(DPCompileError, ValueError):
    """An option has a value that is not allowed."""


class UnsupportedModuleError(DPCompileError, ValueError):
    """A module cannot be replicated, or not in this way."""


class DesyncError(DPCompileError, RuntimeError):
    """The ranks of a group disagree, or one of them did not arrive in time."""


class CommunicationError(DPCompileError, RuntimeError):
    """A collective of a backward failed: another rank is dead, late, cut off, or did something else."""


class VoidBackwardError(CommunicationError):
    """The backward of some rank failed, and all ranks have taken part in it: they can go on."""


class ReductionError(DPCompileError, RuntimeError):
    """A gradient of a replicated module was not reduced exactly once."""


class InvalidGraphError(DPCompileError, RuntimeError):
    """A graph breaks a contract that every pass has to keep."""


class UnsupportedTorchError(DPCompileError, ImportError):
    """The installed torch lacks a private name that `dp_compile` needs."""


def require(condition: bool, name: str, allowed: str, got: object, hint: str = "") -> None:
    """A ConfigError unless the condition holds. Of a class that was `got` the message has the name."""
    if not condition:
        found = got.__name__ if isinstance(got, type) else repr(got)
        raise ConfigError(f"{name} must be {allowed}, got {found}.{hint}")


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value is a number: no bool, and not NaN."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value)


def require_integer(name: str, value: object, least: int) -> None:
    """Refuse what is no integer or less than `least`."""
    require(type(value) is int and value >= least, name, f"an integer >= {least}", value)
