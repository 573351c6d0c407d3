"""NaN in parameters as long as an update or an average of them is in flight: what reads one too early reads that."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from dp_compile.optim.deferred import Pending


@contextmanager
def poisoned() -> Iterator[None]:
    """Inside, that is so in this process."""
    before: dict[Pending, list[torch.Tensor]] = {}
    depart = Pending.depart

    def departs(left: Pending) -> None:
        depart(left)
        before[left] = [each.detach().clone() for each in left.parameters]
        with torch.no_grad(), left.replica.local.updating(left.indices):
            for each in left.parameters:
                each.fill_(torch.nan)
        left.versions = left._versions_now()

    def restoring(finish: Callable[[Any], None]) -> Callable[[Any], None]:
        def finishes(left: Pending) -> None:
            for each, value in zip(left.parameters, before.pop(left, ()), strict=False):
                each.copy_(value)
            finish(left)

        return finishes

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(Pending, "depart", departs))
        for kind in Pending.__subclasses__():
            stack.enter_context(mock.patch.object(kind, "finish", restoring(kind.finish)))
        yield
