"""For which modules compiled code runs. It holds none of them, as modules of one shape share it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dp_compile.errors import InvalidGraphError
from dp_compile.plan.buckets import BucketPlan, GradientSpec

if TYPE_CHECKING:
    from dp_compile.passes.bucket_memory import BucketMemory
    from dp_compile.passes.updates import RunsUpdates


class Running:
    """Inside, code of this thread runs for these modules, by their positions among those of a backward.

    Args:
        plans: by which code that still holds `reduce_grad` reduces.
        memories: what its buckets are filled in.
        optimizers: who updates parameters, of each module.

    A class and no generator: every backward enters it.
    """

    __slots__ = ("_before", "_gradients", "memories", "optimizers", "plans")

    def __init__(
        self,
        plans: Sequence[BucketPlan] = (),
        memories: Sequence[BucketMemory] = (),
        optimizers: Sequence[Sequence[RunsUpdates]] = (),
    ) -> None:
        self.plans, self.memories, self.optimizers = plans, memories, optimizers
        self._gradients: list[dict[int, GradientSpec]] | None = None

    def __enter__(self) -> None:
        self._before, _here.running = _here.running, self

    def __exit__(self, *error: object) -> None:
        _here.running = self._before

    def gradient(self, replica: int, index: int) -> GradientSpec:
        """What a plan says of a gradient.

        Raises:
            InvalidGraphError: no such module runs.
        """
        if self._gradients is None:
            self._gradients = [{each.index: each for each in plan.gradients} for plan in self.plans]
        if replica >= len(self._gradients):
            raise InvalidGraphError(
                f"gradient {index} of module {replica} is reduced outside a backward of dp_compile's"
            )
        return self._gradients[replica][index]


class _Here(threading.local):
    running = Running()


_here = _Here()


def running() -> Running:
    """What runs in this thread; outside of all it has no modules."""
    return _here.running
