"""torch's model averagers on the same schedule, in place and of every parameter.

They are torch's own classes with another `average_parameters`, so that what takes torch's takes these.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.model_averaging import averagers
from torch.distributed.algorithms.model_averaging import hierarchical_model_averager as hierarchical

from dp_compile.averaging.exchange import Exchange, note_equal, parameters_in
from dp_compile.errors import ConfigError

Params = Iterable[torch.Tensor] | Iterable[dict[str, Any]]
"""Parameters of a model, or groups of an optimizer."""


class PeriodicModelAverager(averagers.PeriodicModelAverager):
    """Averages parameters in every `period`-th call of `average_parameters`, from call number `warmup_steps` on.

    As torch's, but for what `docs/algorithms.md` lists: every parameter is averaged, in place, by dtype.
    """

    @cached_property
    def _exchange(self) -> Exchange:
        # Not made with the averager: torch's constructor is left alone, so that its warnings name the user's line.
        said = {"averager": type(self).__name__, "period": self.period, "warmup_steps": self.warmup_steps}
        return Exchange(self.process_group, said)

    def average_parameters(self, params: Params) -> None:
        """Average if the step is due, and count it. Called after each optimizer step, on every rank.

        Args:
            params: parameters, or parameter groups of an optimizer. Each is averaged once, in place, whether it has a
                gradient or not.

        Raises:
            DesyncError: on every rank, others were given other parameters, or are at another step.
            CommunicationError: a rank did not come within the group's time-out.
            ConfigError: no parameters, or one that has no average.
            NotImplementedError: neither parameters nor groups.
        """
        is_due = self.step >= self.warmup_steps and (self.step - self.warmup_steps) % self.period == 0
        _average(self._exchange, params, self.step, self.process_group if is_due else None)
        self.step += 1


class HierarchicalModelAverager(hierarchical.HierarchicalModelAverager):
    """Averages in small groups often, in larger ones rarely: hierarchical SGD, arXiv 2010.12998.

    At a step that several periods divide, only the group of the largest averages. As in torch, periods count from step
    0, not from the end of the warm-up. Every rank of the default group makes the averager.

    Args:
        period_group_size_dict: from periods to sizes of groups of consecutive ranks, both growing; the last size is
            that of `process_group`.
    """

    def __init__(
        self,
        period_group_size_dict: Mapping[int, int] | None = None,
        warmup_steps: int = 0,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        given = dict(period_group_size_dict or {})
        for (period, size), (longer, larger) in pairwise(given.items()):
            if longer <= period or larger < size or larger % size:
                raise ConfigError(
                    "period_group_size_dict must go from short periods and small groups to long periods and groups "
                    f"made of them, got {given}: {period}: {size} stands before {longer}: {larger}."
                )
        super().__init__(given, warmup_steps, process_group)  # type: ignore[no-untyped-call]

    @cached_property
    def _exchange(self) -> Exchange:
        sizes = {str(period): dist.get_world_size(group) for period, group in self.period_process_group_dict.items()}
        said = {"averager": type(self).__name__, "period_group_size_dict": sizes, "warmup_steps": self.warmup_steps}
        return Exchange(self.process_group, said)

    def average_parameters(self, params: Params) -> None:
        """As that of `PeriodicModelAverager`, over the largest group whose period divides the step."""
        group = None
        if self.step >= self.warmup_steps:
            due = [size for period, size in self.period_process_group_dict.items() if self.step % period == 0]
            group = due[-1] if due else None
        _average(self._exchange, params, self.step, group)
        self.step += 1


def _average(exchange: Exchange, params: Params, step: int, process_group: dist.ProcessGroup | None) -> None:
    """Average over a group, if one is due; the first call compares what all ranks were given, due or not."""
    if process_group is None and exchange.has_met:
        return
    parameters = parameters_in(params)
    if not exchange.has_met:
        exchange.meet(parameters, step)
    if process_group is not None:
        exchange.average(parameters, step, process_group)
        note_equal(parameters, process_group)
