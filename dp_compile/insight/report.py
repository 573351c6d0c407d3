"""What was done, what was left alone, and why: names and numbers only, never a node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dp_compile.engine.record import CaptureRecord
from dp_compile.plan.buckets import BucketPlan
from dp_compile.plan.words import count, in_columns


@dataclass(frozen=True, slots=True)
class Report:
    """The state of one replicated module: its plan, what was captured, how many backwards took which way.

    `promise`: what the plan was predicted to reach, if it was made from a cost. `measured`: how long the backward took,
    if it was timed, as `explain` says too. `divided_by`: the `gradient_divide_factor`; `None`: the number of ranks, or
    as a comm hook does. `why_not_captured`: why the comm hook is called with each bucket, if it is. `updates`: what
    follows a backward on each rank, as an optimizer that updates in it, and what that spares.
    `memory`: what stays allocated for buckets between backwards.
    """

    mode: str
    world_size: int
    plan: BucketPlan
    captures: tuple[CaptureRecord, ...]
    backwards: Mapping[str, int] = field(default_factory=dict)
    promise: str = ""
    divided_by: float | None = None
    why_not_captured: str = ""
    updates: str = ""
    measured: str = ""
    memory: str = ""

    def __str__(self) -> str:
        ways = ", ".join(f"{count} {way}" for way, count in self.backwards.items()) or "none yet"
        lines = [f"mode: {self.mode}, {count(self.world_size, 'rank')}, backwards: {ways}"]
        lines[0] += "" if self.divided_by is None else f", gradients divided by {self.divided_by:g}"
        lines += [text for text in (self.updates, self.why_not_captured, self.measured, self.promise) if text]
        lines.append(str(self.plan))
        for number, record in enumerate(self.captures):
            lines.append(f"captured backward {number}: {record}")
        lines += [self.memory] if self.memory else []
        return in_columns("\n".join(lines))
