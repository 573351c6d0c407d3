"""What becomes of reduced gradients: what the engine asks of an optimizer that updates parameters in the backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch

from dp_compile.plan.buckets import Bucket
from dp_compile.replica.record import OptimizerRecord


class UpdateRequest(NamedTuple):
    """What one optimizer updates in one backward, if that is captured."""

    indices: tuple[int, ...] = ()  # parameters of the module, in the optimizer's order
    crosses: bool = False  # updates of whole buckets may be left for the next forward (`passes/crossing.py`)
    parts: bool = False  # it gets this rank's part of each bucket, and all of them in every backward


class Deferred(Protocol):
    """What an optimizer has left for the next forward (`passes/crossing.py`)."""

    def leave(
        self, buckets: Sequence[tuple[int, Bucket]], indices: Sequence[int], launched: Sequence[torch.Tensor]
    ) -> None:
        """Keep reductions that have been launched, of buckets by number, to update these parameters before a read."""

    @property
    def has_in_flight(self) -> bool:
        """Whether there is something of a backward."""

    def complete(self) -> None:
        """Do it now."""

    def forward_runs(self, *, whole: bool) -> None:
        """Code of a forward begins that waits for updates; `whole`: nothing of the forward is outside of it."""


class Sink(Protocol):
    """Where reduced gradients go, other than to `.grad`."""

    def apply(
        self, bucket: int, indices: Sequence[int], parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]
    ) -> None:
        """Update these parameters of its module now; `parameters` is what the graph has for them.

        Where each rank gets a part of a bucket, each gradient is that part. No parameters: the backward does not have
        all gradients of the bucket, or is not captured.
        """


class Updates(Sink, Protocol):
    """One optimizer of one module. A subclass without a method lives on, asks for nothing and does nothing there."""

    @property
    def deferred(self) -> Deferred | None:
        """What it has left for the next forward, if it can."""
        return None

    @property
    def is_alive(self) -> bool:
        """Whether the optimizer still exists."""
        return True

    def begin(self) -> None:
        """A backward begins; a `ReductionError` if the step before has not ended, or broke off between two updates."""

    def update_request(self, *, keep_graph: bool) -> UpdateRequest:
        """May raise `ReductionError` if the graph is kept, for another backward with parameters of before."""
        return UpdateRequest()

    def ended(self) -> None:
        """A synchronised backward has ended well: update what it has not updated."""

    def interrupted(self, error: BaseException) -> None:
        """The backward failed on this rank."""
        return

    def left_out(self, error: BaseException) -> None:
        """This rank failed in a backward whose gradients other ranks have: take part in what follows there."""
        return

    def released(self) -> None:
        """The module is not replicated any more."""

    def describe(self) -> str:
        """For people: what becomes of parameters, and what that spares."""

    def record(self) -> OptimizerRecord | None:
        """The same of an optimizer as data; `None` where none follows reductions."""
        return None


@dataclass(eq=False, slots=True)
class AfterReduction:
    """What becomes of reduced gradients, other than `.grad` (`optim/`)."""

    updates: list[Updates] = field(default_factory=list)  # that update parameters in the backward, each its own
    scattered: frozenset[int] = frozenset()  # parameters of whose reduced gradients each rank keeps a part only
    parts_to: Sink | None = None  # gets this rank's part of each bucket of those
