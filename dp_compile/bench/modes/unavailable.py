"""Peers on PyPI that do not run with the torch of this package. Each says why; what was tried is dated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from dp_compile.bench.contract import Trainer, Workload
from dp_compile.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Unavailable:
    """A peer that is known and cannot run."""

    name: str
    reason: str
    is_bound: bool = False

    def why_not(self) -> str | None:
        return self.reason

    def prepare(self, workload: Workload) -> Trainer:
        raise ConfigError(f"mode '{self.name}' cannot run: {self.reason}")


KINDS: Final = (
    Unavailable(
        "horovod",
        "Horovod 0.28.1, the last on PyPI, does not compile: its build fixes C++14, torch's headers need C++17 or "
        "later (tried with torch 2.13, 2026-11-21).",
    ),
)
