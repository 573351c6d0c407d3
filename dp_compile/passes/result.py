"""What a pass is, and its result: names and numbers only, never a node. Users may write their own."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
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


@dataclass(frozen=True, slots=True)
class PassRecord:
    """One run of one pass, as the pipeline saw it.

    `changes`: how the counts of ops differ after it, as text. `duration_ms` is wall time. `collectives`: how many
    reductions the graph runs after it, without those of the model itself.
    """

    name: str
    result: PassResult
    changes: tuple[str, ...]
    duration_ms: float
    collectives: int = 0

    def __str__(self) -> str:
        did = ", ".join(self.changes) or ("moved nodes" if self.result.changed else "nothing to do")
        return f"{self.name}: {did} ({self.duration_ms:.1f} ms of compilation)"


@runtime_checkable
class GraphPass(Protocol):
    """A frozen value whose fields are its options, with a pure call.

    Valid graph in, valid graph out. No communication, no rank, no state. `realises_plan` says that every reduction
    of a plan leaves this pass in the plan's buckets and order.

    A node with a provenance (`fx/edit.py`) belongs to communication: its `unit` is "replica.bucket", the positions of
    the module in the backward and of the bucket in its plan, and `ScheduleCollectives` moves it as early as it can, or
    after a wait as late.
    """

    name: ClassVar[str]
    realises_plan: ClassVar[bool]

    def __call__(self, graph: fx.Graph, plans: Sequence[BucketPlan]) -> PassResult: ...


_numbers = itertools.count()


def is_ours(graph_pass: GraphPass) -> bool:
    return type(graph_pass).__module__.startswith(f"{__package__}.")


def code_key(graph_pass: GraphPass) -> str:
    """A key of what a pass does. A user's gets another one each time: what it calls may have been defined again."""
    name = type(graph_pass).__qualname__
    return name if is_ours(graph_pass) else f"{name}:{next(_numbers)}"
