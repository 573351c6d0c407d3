"""The interface of passes, and their results: names and numbers only, never nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

from torch import fx

from dp_compile.plan.buckets import BucketPlan
from dp_compile.plan.words import format_bytes


@dataclass(frozen=True, slots=True)
class Refusal:
    """A node that a pass left unchanged, and why."""

    node: str
    reason: str


@dataclass(frozen=True, slots=True)
class PeakMemory:
    """The simulated peak of a backward in bytes, over all tensors that it reads or creates, and that of torch's DDP.

    The peak of DDP is for the same graph in its original order with `gradient_as_bucket_view=True`.
    """

    nbytes: int
    ddp_nbytes: int

    def __str__(self) -> str:
        return f"simulated peak memory: {format_bytes(self.nbytes)}, with torch's DDP {format_bytes(self.ddp_nbytes)}"


class PassResult(NamedTuple):
    """The result of one pass, or of all. `memory`: with the new node order. `collectives`: stages, after all passes."""

    refusals: tuple[Refusal, ...] = ()
    memory: PeakMemory | None = None
    collectives: int | None = None


class GraphPass(Protocol):
    """A pass: a frozen dataclass whose fields are options. A call transforms a valid graph and leaves it valid.

    A pass does not communicate, has no state and does not depend on the rank. A node with a provenance (`fx/edit.py`)
    belongs to communication. Its `unit` is the position of the module in the backward and of the bucket in the plan.
    `ScheduleCollectives` moves such a node as early as possible, or after a wait as late as possible.
    """

    name: ClassVar[str]

    def __call__(self, graph: fx.Graph, plans: Sequence[BucketPlan]) -> PassResult: ...
