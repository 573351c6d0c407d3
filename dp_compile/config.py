"""Every option of `dp_compile`, declared once: name, default, unit, check.

Sizes in `*_mb` are MiB (2**20 bytes), as in torch's DDP. Times in `*_s` are seconds.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from dp_compile.errors import ConfigError

HOOK_VARIABLE: Final = "DP_COMPILE_DDP_PYTHON_HOOK"
BACKENDS: Final = ("inductor", "aot_eager")
BYTES_PER_MB: Final = 2**20

_TRUE: Final = frozenset({"1", "true", "yes", "on"})
_FALSE: Final = frozenset({"0", "false", "no", "off"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicateConfig:
    """How a module is replicated. The same on every rank; ranks compare it at the start.

    Raises:
        ConfigError: a value is not allowed.
    """

    ddp_python_hook: bool | None = None
    """One Python hook per parameter, traced with the backward. `None`: the environment variable
    `DP_COMPILE_DDP_PYTHON_HOOK` decides, and without it the answer is yes. `False`: torch's C++ reducer."""

    bucket_cap_mb: float = 25.0
    """A bucket is closed when it holds at least this many MiB. `math.inf`: one bucket per key."""

    first_bucket_cap_mb: float = 1.0
    """The same for the first bucket of each key, if it is less: small, so that communication starts early."""

    find_unused_parameters: bool = False
    """`False`: a parameter without a gradient is an error on every rank. `True`: as torch's DDP, gradients that no
    rank produced stay untouched, gradients that some ranks produced become the average over all ranks."""

    broadcast_buffers: bool = True
    """Copy the buffers of the group's first rank to all ranks after each synchronised backward."""

    check_reductions: bool = True
    """After each backward, check that every gradient was reduced exactly once on every rank."""

    backend: str = "inductor"
    """What compiles the backward: `inductor`, or `aot_eager` (same graph and passes, no code generation)."""

    timeout_s: float = 300.0
    """How long a rank waits for the others when they compare what they replicate."""

    def __post_init__(self) -> None:
        for name in ("bucket_cap_mb", "first_bucket_cap_mb"):
            _check_positive(name, getattr(self, name), "Use math.inf for one bucket per key.")
        _check_positive("timeout_s", self.timeout_s, "It is in seconds.")
        for name in ("ddp_python_hook", "find_unused_parameters", "broadcast_buffers", "check_reductions"):
            value = getattr(self, name)
            if not isinstance(value, bool) and not (value is None and name == "ddp_python_hook"):
                raise ConfigError(f"{name} must be True or False, got {value!r}.")
        if self.backend not in BACKENDS:
            raise ConfigError(f"backend must be one of {', '.join(BACKENDS)}, got {self.backend!r}.")

    def uses_python_hook(self, environ: Mapping[str, str] = os.environ) -> bool:
        """The value of `ddp_python_hook` after the environment variable was asked.

        Raises:
            ConfigError: the variable holds something that is neither yes nor no.
        """
        if self.ddp_python_hook is not None:
            return self.ddp_python_hook
        text = environ.get(HOOK_VARIABLE, "1").strip().lower()
        if text not in _TRUE | _FALSE:
            allowed = ", ".join(sorted(_TRUE | _FALSE))
            raise ConfigError(f"environment variable {HOOK_VARIABLE} must be one of {allowed}, got {text!r}.")
        return text in _TRUE


def _check_positive(name: str, value: object, hint: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"{name} must be a number > 0, got {value!r}. {hint}")
    if math.isnan(value) or value <= 0:
        raise ConfigError(f"{name} must be > 0, got {value!r}. {hint}")
