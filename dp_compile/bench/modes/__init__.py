"""Ways to train data parallel: this package's, its peers', and the bounds for both."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

from dp_compile.bench.contract import Mode, imported
from dp_compile.bench.modes import bounds, ours, peers
from dp_compile.errors import require

_ALL: Final[tuple[Mode, ...]] = (*ours.KINDS, *peers.KINDS, *bounds.KINDS)
MODES: Final[Mapping[str, Mode]] = MappingProxyType({kind.name: kind for kind in _ALL})


def mode(name: str) -> Mode:
    """One of `MODES`, with another bucket cap in MiB as `NAME:MIB`; or a user's, `package.module:function`.

    Raises:
        ConfigError: unknown, a cap that is not allowed, or the user's function does not return a mode.
    """
    base, _, argument = name.rpartition(":")
    kind: Any = MODES.get(name) or MODES.get(base)
    if base.split(":")[0] in MODES and name not in MODES:
        least = 1.0 if base == "ddp_compiled" else 0.0
        cap_mb = float(argument) if re.fullmatch(r"\d+(\.\d*)?", argument) else 0.0
        has_cap = hasattr(kind, "cap_mb") and base != "compute" and cap_mb > 0 and cap_mb >= least
        require(has_cap, f"mode {name!r}", "one with buckets, and a number of MiB, for 'ddp_compiled' >= 1", argument)
        kind = replace(kind, name=name, cap_mb=cap_mb)
    if kind is None:
        known = f"one of {', '.join(MODES)}, some of them with a bucket cap, 'NAME:MIB', or 'package.module:function'"
        require(bool(base), "a mode", known, name)
        kind = imported(name, Mode)
    found: Mode = kind
    return found
