"""Ways to train data parallel: this package's, its peers', and the bounds for both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

from dp_compile.bench.contract import Mode, imported
from dp_compile.bench.modes import bounds, ours, peers
from dp_compile.errors import ConfigError

_ALL: Final[tuple[Mode, ...]] = (*ours.KINDS, *peers.KINDS, *bounds.KINDS)
MODES: Final[Mapping[str, Mode]] = MappingProxyType({kind.name: kind for kind in _ALL})


def mode(name: str) -> Mode:
    """One of `MODES`, with another bucket cap in MiB as `NAME:MIB`; or a user's, `package.module:function`.

    Raises:
        ConfigError: unknown, a cap that is not allowed, or the user's function does not return a mode.
    """
    base, _, argument = name.rpartition(":")
    if name in MODES:
        return MODES[name]
    kind: Any = MODES.get(base)
    if base and kind is None and base.split(":")[0] not in MODES:
        found: Mode = imported(name, Mode)
        return found
    if hasattr(kind, "cap_mb") and base != "compute":
        least = 1.0 if base == "ddp_compiled" else 0.0
        try:
            cap_mb = float(argument)
        except ValueError:
            cap_mb = -1.0
        if not (0 < cap_mb < float("inf") and cap_mb >= least):
            raise ConfigError(f"mode {name!r}: a number of MiB > 0 is needed, for 'ddp_compiled' >= 1, as in 'ddp:5'.")
        changed: Mode = replace(kind, name=name, cap_mb=cap_mb)
        return changed
    raise ConfigError(
        f"unknown mode {name!r}. Built in: {', '.join(MODES)}, those with buckets also as 'NAME:MIB'. Your own: "
        "'package.module:function'."
    )
