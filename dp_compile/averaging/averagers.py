"""torch's `PeriodicModelAverager` on the same schedule, in place and of every parameter.

It is torch's own class with another `average_parameters`, so that what takes torch's takes this one.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Any

import torch
from torch.distributed.algorithms.model_averaging import averagers

from dp_compile.averaging.exchange import Exchange, note_equal, parameters_in

Params = Iterable[torch.Tensor] | Iterable[dict[str, Any]]
"""Parameters of a model, or groups of an optimizer."""


class PeriodicModelAverager(averagers.PeriodicModelAverager):
    """Averages parameters in every `period`-th call of `average_parameters`, from call number `warmup_steps` on.

    As torch's, but for what `docs/algorithms.md` lists: every parameter is averaged, in place, by dtype.
    """

    @cached_property
    def _exchange(self) -> Exchange:
        # Not made with the averager: torch's constructor is left alone, so that its warnings name the user's line.
        schedule = {"averager": type(self).__name__, "period": self.period, "warmup_steps": self.warmup_steps}
        return Exchange(self.process_group, schedule)

    def average_parameters(self, params: Params) -> None:
        """Average if the step is due, and count it. Called after each optimizer step, on every rank.

        Args:
            params: parameters, or parameter groups of an optimizer. Each is averaged once, in place, whether it has a
                gradient or not.

        Raises:
            DesyncError: on every rank, others were given other parameters, or are at another step.
            CommunicationError: a rank did not come within the group's time-out.
            ConfigError: neither parameters nor groups, no parameters, or one that cannot be averaged.
        """
        is_due = self.step >= self.warmup_steps and (self.step - self.warmup_steps) % self.period == 0
        if is_due or not self._exchange.has_met:
            parameters = parameters_in(params)
            if not self._exchange.has_met:  # the first call compares what all ranks were given, due or not
                self._exchange.meet(parameters, self.step)
            if is_due:
                self._exchange.average(parameters, self.step)
                note_equal(parameters, self.process_group)
        self.step += 1
