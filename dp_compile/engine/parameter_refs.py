"""Where parts of a module were found when it was replicated. A user may put others there."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class Outline:
    """A module as it was when it was replicated: the names of its parameters, and the parts that were left alone."""

    root: weakref.ref[nn.Module]
    names: frozenset[str]
    left_alone: weakref.WeakSet[nn.Module]


@dataclass(frozen=True, slots=True)
class ParameterRef:
    """Where a parameter or a buffer was found, and its fully qualified name. A forward may put another buffer there."""

    owner: weakref.ref[nn.Module]
    attribute: str
    name: str

    def find(self) -> torch.Tensor | None:
        owner = self.owner()
        for found in () if owner is None else (owner._parameters, owner._buffers):
            if self.attribute in found:  # of a ScriptModule: no dict, has no get()
                return found[self.attribute]
        return None
