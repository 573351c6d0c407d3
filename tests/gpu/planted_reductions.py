"""Faults in a reduction that G2 has to see: `DP_COMPILE_GPU_PLANT=planted_reductions:factor` plants one of them.

The checks of the pipeline are off: each of these they would refuse themselves.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from torch import fx

from dp_compile.passes import bucketing, pipeline


def factor() -> None:
    """What is reduced is multiplied by two."""
    _without_checks()
    factors = bucketing.GraphOps.factors

    def doubled(self: Any, reduction: Any) -> Any:
        scale, post_scale = factors(self, reduction)
        return scale, 2.0 * post_scale

    # `restored` leaves a factor of 1.0 out.
    bucketing.GraphOps.factors = doubled  # type: ignore[method-assign]


def dropped_wait() -> None:
    """What a collective was given is taken for its result at once."""
    _without_checks()

    def wait(self: Any, launched: tuple[fx.Node, int]) -> list[fx.Node]:
        launch, count = launched
        given = launch.args[0]
        return list(given) if count > 1 else [given]  # type: ignore[arg-type, list-item]

    bucketing.GraphOps.wait = wait  # type: ignore[method-assign]


def swapped_members() -> None:
    """Two gradients of one shape lie in each other's place."""
    _without_checks()
    fill = bucketing.GraphOps.fill

    def swapped(self: Any, members: Sequence[int], *given: Any, **named: Any) -> fx.Node:
        flat = fill(self, members, *given, **named)
        sources: list[Any] = list(flat.args[0])  # type: ignore[arg-type]
        shapes = [each.meta["val"].shape for each in sources]
        for one, other in itertools.combinations(range(len(sources)), 2):
            if shapes[one] == shapes[other]:
                sources[one], sources[other] = sources[other], sources[one]
                break
        flat.args = (sources, *flat.args[1:])
        return flat

    bucketing.GraphOps.fill = swapped  # type: ignore[method-assign]


def _without_checks() -> None:
    pipeline.check_reductions = pipeline.verify = lambda *given, **named: None  # type: ignore[assignment]
