"""torch's blob of everything that was compiled, with a kind of ours in it. Loading this loads no compiler."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from dp_compile._torch.missing import named

with named():
    from torch.compiler._cache import CacheArtifact as _CacheArtifact
    from torch.compiler._cache import CacheArtifactFactory as _Factory
    from torch.compiler._cache import CacheArtifactManager as _Manager

KIND = "dp_compile"

_writers: list[Callable[[str, bytes], None]] = []


class _Artifact(_CacheArtifact):
    def populate_cache(self) -> None:
        _writers[-1](self.key, self.content)

    @staticmethod
    def type() -> str:
        return KIND


def _register() -> None:
    if KIND not in _Factory._artifact_types:
        _Factory.register(_Artifact)


def save(ours: Iterable[tuple[str, bytes]]) -> Any:
    """`torch.compiler.save_cache_artifacts`, with names and contents of ours."""
    _register()
    for name, content in ours:
        _Manager.record_artifact(KIND, name, content)
    return torch.compiler.save_cache_artifacts()


def load(blob: bytes, write: Callable[[str, bytes], None]) -> Any:
    """`torch.compiler.load_cache_artifacts`; what is ours goes to `write`."""
    _register()
    _writers.append(write)
    try:
        return torch.compiler.load_cache_artifacts(blob)
    finally:
        _writers.pop()
