"""The errors of `dp_compile`. Each says what was given, what is allowed and what to do."""

import math
from typing import TypeGuard


class DPCompileError(Exception):
    """Base class of the errors that `dp_compile` itself raises."""


class ConfigError(DPCompileError, ValueError):
    """An argument or option is unknown, has a value that is not allowed, or cannot be combined with others."""


class UnsupportedModuleError(DPCompileError, ValueError):
    """A module cannot be replicated, or its structure or state does not allow a call."""


class DesyncError(DPCompileError, RuntimeError):
    """The ranks of a group disagree, or one did not reach a synchronisation point in time."""


class CommunicationError(DPCompileError, RuntimeError):
    """A collective failed: another rank is dead, late, unreachable or out of step, or the group or store is gone."""


class VoidBackwardError(CommunicationError):
    """The backward of one rank failed. All ranks completed its collectives. On CPUs without `in_backward`, training can
    continue. Otherwise ranks may have stepped before they read its flag: restore a checkpoint."""


class ReductionError(DPCompileError, RuntimeError):
    """A gradient was not reduced exactly once or is not finite, or a step or call would use wrong or partial values."""


class InvalidGraphError(DPCompileError, RuntimeError):
    """A graph violates a contract that every pass must keep."""


class UnsupportedTorchError(DPCompileError, ImportError):
    """The installed torch lacks an internal function or class that `dp_compile` needs."""


def require(condition: bool, name: str, allowed: str, got: object, hint: str = "") -> None:
    """Raise ConfigError unless `condition` holds. The message has the name of `got` if it is a class, else its repr."""
    if not condition:
        found = got.__name__ if isinstance(got, type) else repr(got)
        raise ConfigError(f"{name} must be {allowed}, got {found}.{hint}")


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is an int or a float, but neither a bool nor NaN."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value)


def require_integer(name: str, value: object, least: int) -> None:
    """Raise ConfigError unless `value` is an integer of at least `least`."""
    require(type(value) is int and value >= least, name, f"an integer >= {least}", value)
