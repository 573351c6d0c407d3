"""What happens to a gradient between a rank and all ranks: pure data, part of the key of its bucket.

Everything that reduces goes by it: `passes/reduction.py` says how.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from dp_compile.errors import ConfigError
from dp_compile.plan.backends import LIKE_NCCL

MOST_IN_FLOAT16: Final = 1e6
"""float16 ends at 6e-8."""


class Stage(NamedTuple):
    """One collective. `op`: `all_reduce`; `group`: the name of the process group; `reduce_op`: `sum` or `avg`."""

    op: str
    group: str
    reduce_op: str


@dataclass(frozen=True, slots=True)
class Reduction:
    """Each contribution times `scale` in the dtype `wire`, the stages one after the other, the result times
    `post_scale` in the gradient's dtype again. Factors are applied in the wider of the two dtypes: one rounding each.

    `wire`: name of a floating dtype; `None`: the gradient's own.
    """

    stages: tuple[Stage, ...]
    scale: float
    post_scale: float = 1.0
    wire: str | None = None

    @property
    def reduce_op(self) -> str:
        """For people: the op of each stage."""
        return " ".join(stage.reduce_op for stage in self.stages)

    def __str__(self) -> str:
        return self.reduce_op + (f" in {self.wire}" if self.wire else "")

    def without_groups(self) -> Reduction:
        """Names of groups are a rank's own affair."""
        return replace(self, stages=tuple(stage._replace(group="") for stage in self.stages))

    def to_dict(self) -> dict[str, Any]:
        """Plain data. What is as it mostly is is left out: plans without it keep their signature."""
        more = {"post_scale": self.post_scale} if self.post_scale != 1.0 else {}
        wire = {"wire": self.wire} if self.wire is not None else {}
        return {"stages": [stage._asdict() for stage in self.stages], "scale": self.scale, **more, **wire}

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Reduction:
        return Reduction(**data | {"stages": tuple(Stage(**stage) for stage in data["stages"])})


@dataclass(frozen=True, slots=True)
class Averaging:
    """How the gradients of a module are averaged, whatever their dtype.

    Args:
        wire: dtype in which they are added up; `None`: their own.
        divide_by: what the sum is divided by; `None`: the number of ranks.
        predivide_by: the part of it by which each contribution is divided before it is added, the rest follows behind.
            `None`: everything before, or in a collective that averages; for float16 see `before_the_sum`.
        in_collective: let the collective average where the backend can.
        all_before: divide by all of it before the sum, float16 too.
    """

    wire: str | None = None
    divide_by: float | None = None
    predivide_by: float | None = None
    in_collective: bool = True
    all_before: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether this is what torch's reducer does: the average, in the gradients' own dtype."""
        return self.wire is None and self.divide_by is None and self.predivide_by is None

    def reduction(self, group: str, backend: str, world_size: int, dtype: str) -> Reduction:
        """The reduction of gradients of one dtype over a group.

        Raises:
            ConfigError: in float16 a flag that travels with the gradients would be divided down to nothing.
        """
        wire = None if self.wire == dtype else self.wire
        divisor = float(world_size) if self.divide_by is None else self.divide_by
        predivisor = self.predivide_by
        if predivisor is None and (wire or dtype) == "float16" and not self.all_before:
            predivisor = before_the_sum(divisor)
        elif predivisor is None:
            if self.in_collective and self.divide_by is None and backend in LIKE_NCCL:
                return Reduction((Stage("all_reduce", group, "avg"),), 1.0, wire=wire)
            predivisor = divisor
        if "float16" in (wire, dtype) and max(divisor, predivisor) > MOST_IN_FLOAT16:
            largest = max(divisor, predivisor)
            raise ConfigError(
                f"gradients in float16 can be divided by {MOST_IN_FLOAT16:g} at most, got {largest:g}: "
                "nothing would be left of what ranks tell each other beside them. Send them in bfloat16 or float32."
            )
        return Reduction((Stage("all_reduce", group, "sum"),), 1.0 / predivisor, predivisor / divisor, wire)


def before_the_sum(divisor: float) -> float:
    """The power of two by which float16 is divided before it is added up: near the square root of the whole.

    Neither one large contribution nor the sum of many then leaves the range of float16.
    Source: FSDP, `_get_gradient_divide_factors` of torch's `fsdp/_fully_shard/_fsdp_collectives.py`.
    """
    power = 1.0
    while divisor % power == 0 and divisor / power > power:
        power *= 2
    return power


def mean(group: str, backend: str, world_size: int) -> Reduction:
    """The average over a group. NCCL averages inside the collective; others add what was scaled before."""
    return Averaging().reduction(group, backend, world_size, "float32")
