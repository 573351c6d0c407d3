"""What happens to a gradient between a rank and all ranks: pure data, part of the key of its bucket.

Everything that reduces goes by it: `passes/reduction.py` says how.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from dp_compile.plan.backends import LIKE_NCCL


class Stage(NamedTuple):
    """One collective. `op`: `all_reduce`; `group`: the name of the process group; `reduce_op`: `sum` or `avg`."""

    op: str
    group: str
    reduce_op: str


@dataclass(frozen=True, slots=True)
class Reduction:
    """Each contribution times `scale`, then the stages, one after the other."""

    stages: tuple[Stage, ...]
    scale: float

    @property
    def reduce_op(self) -> str:
        """For people: the op of each stage."""
        return " ".join(stage.reduce_op for stage in self.stages)

    def without_groups(self) -> Reduction:
        """Names of groups are a rank's own affair."""
        return replace(self, stages=tuple(stage._replace(group="") for stage in self.stages))

    def to_dict(self) -> dict[str, Any]:
        return {"stages": [stage._asdict() for stage in self.stages], "scale": self.scale}

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Reduction:
        return Reduction(**data | {"stages": tuple(Stage(**stage) for stage in data["stages"])})


def mean(group: str, backend: str, world_size: int) -> Reduction:
    """The average over a group. NCCL averages inside the collective; others add what was scaled before."""
    if backend in LIKE_NCCL:
        return Reduction((Stage("all_reduce", group, "avg"),), 1.0)
    return scaled_sum(group, world_size)


def scaled_sum(group: str, world_size: int) -> Reduction:
    """The average as torch's DDP computes it, whatever the backend could do: scaled first, then added."""
    return Reduction((Stage("all_reduce", group, "sum"),), 1.0 / world_size)
