"""Protocols between the engine and consumers of reduced gradients, such as optimizers in the backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch

from dp_compile.plan.buckets import Bucket
from dp_compile.replica.record import OptimizerRecord


class UpdateRequest(NamedTuple):
    """What one optimizer asks to update in one backward, if that backward is captured."""

    indices: tuple[int, ...] = ()  # parameters of the module, in the optimizer's order
    crosses: bool = False  # updates of whole buckets may be deferred to the next forward (`passes/crossing.py`)
    parts: bool = False  # the optimizer receives this rank's shard of every bucket in every backward


class Deferred(Protocol):
    """Updates that an optimizer has deferred to the next forward (`passes/crossing.py`)."""

    def leave(
        self, buckets: Sequence[tuple[int, Bucket]], indices: Sequence[int], launched: Sequence[torch.Tensor]
    ) -> None:
        """Keep launched reductions of numbered buckets, whose results update these parameters before the next read."""

    @property
    def has_in_flight(self) -> bool:
        """Whether updates of a backward are pending."""

    def complete(self) -> None:
        """Wait for the pending reductions and do the deferred updates."""

    def forward_runs(self, *, whole: bool) -> None:
        """Note the start of forward code that waits for updates. `whole`: the code is all of the forward."""


class Sink(Protocol):
    """What consumes reduced gradients in place of `.grad`."""

    def apply(
        self, bucket: int, indices: Sequence[int], parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]
    ) -> None:
        """Update the module's parameters `indices` now. `parameters`: their tensors in the captured graph.

        If the bucket is scattered, `gradients` are this rank's shards. `parameters` is empty if the backward does not
        have all gradients of the bucket, or is not captured.
        """


class Updates(Sink, Protocol):
    """Updates of one module by one optimizer in the backward. By default alive; requests nothing and does nothing."""

    @property
    def deferred(self) -> Deferred | None:
        """The updates deferred to the next forward, `None` if the optimizer defers none."""
        return None

    @property
    def is_alive(self) -> bool:
        """Whether the optimizer still exists."""
        return True

    def begin(self) -> None:
        """Start a backward. Raise `ReductionError` if the last step has not ended, or updated some parameters only."""

    def update_request(self, *, keep_graph: bool) -> UpdateRequest:
        """Return the updates of this backward. May raise `ReductionError` if the graph is kept for another backward."""
        return UpdateRequest()

    def ended(self) -> None:
        """Do the remaining updates after a successful synchronised backward."""

    def interrupted(self, error: BaseException) -> None:
        """Clean up after a backward that failed on this rank."""
        return

    def left_out(self, error: BaseException) -> None:
        """Join the later collectives of a backward that failed on this rank, if other ranks have its gradients."""
        return

    def released(self) -> None:
        """Clean up after `unreplicate` of the module."""

    def describe(self) -> str:
        """Return text for users: where parameters are updated, and the savings."""

    def record(self) -> OptimizerRecord | None:
        """Return as data what `describe` returns as text, `None` if no optimizer consumes the gradients."""
        return None


@dataclass(eq=False, slots=True)
class AfterReduction:
    """What consumes a module's reduced gradients in place of `.grad`, mostly optimizers (`optim/`)."""

    updates: list[Updates] = field(default_factory=list)  # in the backward, of disjoint sets of parameters
    scattered: frozenset[int] = frozenset()  # parameters whose gradients are reduce-scattered
    parts_to: Sink | None = None  # receives this rank's shards of scattered buckets
