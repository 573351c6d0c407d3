"""What a pass is, and what it says of itself: names and numbers only, never a node.

Replicas carry passes, the pipeline runs them, users may write their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

from torch import fx

from dp_compile.plan.buckets import BucketPlan
from dp_compile.plan.words import format_bytes


@dataclass(frozen=True, slots=True)
class Refusal:
    """Something a pass did not recognise and left alone."""

    node: str
    reason: str


@dataclass(frozen=True, slots=True)
class PeakMemory:
    """The simulated peak of a backward in bytes, the node at which it is reached, and that of torch's DDP.

    All tensors that the backward reads or makes, parameters included. DDP is the same graph in its own order with
    `gradient_as_bucket_view=True`.
    """

    nbytes: int
    node: str
    ddp_nbytes: int

    def __str__(self) -> str:
        return f"simulated peak memory: {format_bytes(self.nbytes)}, as torch's DDP {format_bytes(self.ddp_nbytes)}"


@dataclass(frozen=True, slots=True)
class PassResult:
    """What a pass says of itself. `memory`: of a backward in the order that the pass gave it."""

    changed: bool
    refusals: tuple[Refusal, ...] = ()
    memory: PeakMemory | None = None


def count_changes(before: Mapping[str, int], after: Mapping[str, int]) -> list[str]:
    """How the counts of ops differ, `mm 4 -> 3`, by name; the number of all `nodes` last."""
    return [
        f"{name} {before.get(name, 0)} -> {after.get(name, 0)}"
        for name in [*sorted({*before, *after} - {"nodes"}), "nodes"]
        if before.get(name, 0) != after.get(name, 0)
    ]


@dataclass(frozen=True, slots=True)
class PassRecord:
    """One run of one pass, as the pipeline saw it. `duration_ms` is wall time.

    `collectives`: how many reductions the graph runs after it, counted in the graph; none that the model itself has.
    """

    name: str
    result: PassResult
    before: Mapping[str, int]
    after: Mapping[str, int]
    duration_ms: float
    collectives: int = 0

    def __str__(self) -> str:
        changes = count_changes(self.before, self.after)
        did = ", ".join(changes) if changes else "moved nodes" if self.result.changed else "nothing to do"
        return f"{self.name}: {did} ({self.duration_ms:.1f} ms of compilation)"


@runtime_checkable
class GraphPass(Protocol):
    """A frozen value whose fields are its options, with a pure call.

    Valid graph in, valid graph out. No communication, no rank, no state. `realises_plan` says that every reduction
    of a plan leaves this pass in the plan's buckets and order.

    A node with a provenance (`fx/edit.py`) belongs to communication: its `unit` is "replica.bucket", the positions of
    the module in the backward and of the bucket in its plan, and `ScheduleCollectives` moves it as early as it can, or
    behind a wait as late.
    """

    name: ClassVar[str]
    realises_plan: ClassVar[bool]

    def __call__(self, graph: fx.Graph, plans: Sequence[BucketPlan]) -> PassResult: ...
