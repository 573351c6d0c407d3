"""Plans that no option asks for, in the place of the planner's: for tests of what realises a plan."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

from dp_compile.engine import plan_sync
from dp_compile.plan.planner import Planned, plan_optimal
from dp_compile.replication import planning


@contextlib.contextmanager
def _planner(plan: Callable[..., Planned]) -> Iterator[None]:
    with mock.patch.object(planning, "plan_optimal", plan), mock.patch.object(plan_sync, "plan_optimal", plan):
        yield


def uncoalesced(every: int = 1) -> contextlib.AbstractContextManager[None]:
    """Here every so many gradients keep their own memory, as with NCCL those of convolutions: buckets are grouped."""

    def plan(gradients: Any, cost: Any, times: Any, layout: Any, **options: Any) -> Planned:
        layout = replace(layout, uncoalesced=frozenset(gradient.name for gradient in gradients[::every]))
        return plan_optimal(gradients, cost, times, layout, **options)

    return _planner(plan)
