"""What a pass is, and its result: names and numbers only, never a node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

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
    """The simulated peak of a backward in bytes, of all tensors that it reads or makes, and that of torch's DDP.

    DDP is the same graph in its own order with `gradient_as_bucket_view=True`.
    """

    nbytes: int
    ddp_nbytes: int

    def __str__(self) -> str:
        return f"simulated peak memory: {format_bytes(self.nbytes)}, as torch's DDP {format_bytes(self.ddp_nbytes)}"


class PassResult(NamedTuple):
    """What came of a pass, or of all of them, which count the `collectives` that reduce. `memory`: in the new order."""

    refusals: tuple[Refusal, ...] = ()
    memory: PeakMemory | None = None
    collectives: int | None = None


class GraphPass(Protocol):
    """A frozen value whose fields are its options, with a pure call.

    Valid graph in, valid graph out. No communication, no rank, no state. A node with a provenance (`fx/edit.py`)
    belongs to communication: its `unit` is the position of the module in the backward and that of the bucket in its
    plan, and `ScheduleCollectives` moves it as early as it can, or after a wait as late.
    """

    name: ClassVar[str]

    def __call__(self, graph: fx.Graph, plans: Sequence[BucketPlan]) -> PassResult: ...
