"""What becomes of reduced gradients: what the engine asks of an optimizer that updates parameters in the backward."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from dp_compile.engine.record import OptimizerRecord
from dp_compile.passes.updates import Leaves, RunsUpdates, Sink


@dataclass(frozen=True, slots=True)
class Wanted:
    """What one optimizer updates in one backward, if that is captured.

    Args:
        indices: parameters of the module, in the optimizer's order.
        whole: all of them at once, at the end, or none: it looks at all gradients before it updates any.
        crosses: updates of whole buckets may be left for the next forward (`passes/crossing.py`).
        parts: it gets this rank's part of each bucket, and all of them in every backward.
        obstacle: why nothing is updated in this backward, whichever way it goes; empty if something may be.
    """

    indices: tuple[int, ...] = ()
    whole: bool = False
    crosses: bool = False
    parts: bool = False
    obstacle: str = ""


class Deferred(Leaves, Protocol):
    """What an optimizer has left for the next forward."""

    @property
    def has_in_flight(self) -> bool:
        """Whether there is something of a backward."""

    def arrive(self) -> None:
        """Do it now."""

    def forward_runs(self, *, whole: bool) -> None:
        """Code of a forward begins that waits for updates; `whole`: nothing of the forward is outside of it."""


class Updates(RunsUpdates, Protocol):
    """One optimizer of one module."""

    @property
    def deferred(self) -> Deferred | None: ...

    @property
    def is_alive(self) -> bool:
        """Whether the optimizer still exists."""

    def begin(self) -> None:
        """A backward of the module begins.

        Raises:
            ReductionError: the step before has not ended, or a backward broke off between two updates.
        """

    def wanted(self, *, keep_graph: bool) -> Wanted: ...

    def ended(self) -> None:
        """A synchronised backward that may update has ended well."""

    def interrupted(self, error: BaseException) -> None: ...

    def left_out(self, error: BaseException) -> None:
        """This rank failed in a backward whose gradients other ranks have: take part in what follows there."""

    def released(self) -> None:
        """The module is not replicated any more."""

    def describe(self) -> str:
        """For people: what becomes of parameters, and what that spares."""

    def record(self) -> OptimizerRecord | None:
        """The same of an optimizer as data; `None` where none follows reductions."""


@dataclass(eq=False, slots=True)
class AfterReduction:
    """What becomes of reduced gradients, other than `.grad` (`optim/`).

    Args:
        updates: optimizers that update its parameters in the backward, each its own.
        scattered: the parameters of whose reduced gradients each rank keeps a part only.
        parts_to: who gets this rank's part of each bucket of those.
    """

    updates: list[Updates] = field(default_factory=list)
    scattered: frozenset[int] = frozenset()
    parts_to: Sink | None = None
