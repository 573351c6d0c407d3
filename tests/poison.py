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
    register = Pending.register

    def registers(pending: Pending) -> None:
        register(pending)
        before[pending] = [each.detach().clone() for each in pending.parameters]
        with torch.no_grad(), pending.replica.state.step_guard.updating(pending.indices):
            for each in pending.parameters:
                each.fill_(torch.nan)
        pending.versions = pending._versions_now()

    def restoring(finish: Callable[[Any], None]) -> Callable[[Any], None]:
        def finishes(pending: Pending) -> None:
            for each, value in zip(pending.parameters, before.pop(pending, ()), strict=False):
                each.copy_(value)
            finish(pending)

        return finishes

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(Pending, "register", registers))
        for kind in Pending.__subclasses__():
            stack.enter_context(mock.patch.object(kind, "finish", restoring(kind.finish)))
        yield
