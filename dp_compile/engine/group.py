"""A process group, and how gradients are averaged over it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from dp_compile.plan.backends import PLAYED
from dp_compile.plan.reduction import Averaging, Levels, Reduction


@dataclass(frozen=True, slots=True)
class Group:
    """A process group with the facts that are asked for in every backward."""

    process_group: dist.ProcessGroup
    name: str
    backend: str
    world_size: int
    averaging: Averaging
    levels: Levels | None = None
    """Its ranks by node, if the network between nodes is another one than inside."""

    def reduction(self, dtype: torch.dtype) -> Reduction:
        """How gradients of a dtype are averaged over it; of a complex one, their real and imaginary parts."""
        averaging = replace(self.averaging, wire=None, hook=None) if dtype.is_complex else self.averaging
        name = str(dtype.to_real()).removeprefix("torch.")
        return averaging.reduction(self.name, self.backend, self.world_size, name, self.levels)

    def reduction_of_flags(self, dtype: torch.dtype) -> Reduction:
        """As that of the gradients of this dtype, but over all ranks, and never by a hook, which may lose some."""
        return replace(self, averaging=replace(self.averaging, hook=None, subgroup=None)).reduction(dtype)

    @property
    def ranks_inside(self) -> int | None:
        """Ranks of a node, on two levels."""
        return None if self.levels is None else self.levels.ranks_inside

    @property
    def has_others(self) -> bool:
        """Whether there are other ranks that really exist."""
        return self.world_size > 1 and self.backend not in PLAYED
