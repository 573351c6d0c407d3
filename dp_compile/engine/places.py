"""Where parts of a module were found when it was replicated. A user may put others there."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class BufferPlace:
    """Where a buffer is found. A forward may put another tensor there, as `self.scale = ...` does."""

    owner: weakref.ref[nn.Module]
    name: str

    def find(self) -> torch.Tensor | None:
        found = getattr(self.owner(), self.name, None)
        return found if isinstance(found, torch.Tensor) else None


@dataclass(frozen=True, slots=True)
class Outline:
    """A module as it was when it was replicated: the names of its parameters, and the parts that were left alone."""

    root: weakref.ref[nn.Module]
    names: frozenset[str]
    left_alone: weakref.WeakSet[nn.Module]


@dataclass(frozen=True, slots=True)
class ParameterPlace:
    """Where a parameter was found, and its fully qualified name. The user may put another one there."""

    owner: weakref.ref[nn.Module]
    attribute: str
    name: str

    def find(self) -> nn.Parameter | None:
        owner = self.owner()
        found = {} if owner is None else owner._parameters
        return found[self.attribute] if self.attribute in found else None  # of a ScriptModule: no dict, has no get()
