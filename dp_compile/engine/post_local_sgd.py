"""torch's post-local SGD: gradients are averaged over all ranks, from some iteration on over a subgroup of them.

What differs is the group of a reduction: at the start iteration every rank makes its plan anew, once. As with torch the
user averages parameters from then on, so ranks of two subgroups are not compared any more.

Source: torch's `distributed/algorithms/ddp_comm_hooks/post_localSGD_hook.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState

from dp_compile._torch.distributed import group_name
from dp_compile.engine.hook_state import Agree
from dp_compile.engine.power_sgd import PLAIN
from dp_compile.errors import ConfigError
from dp_compile.passes.functional_hook import State
from dp_compile.plan.reduction import Averaging


class PostLocalSGDMemory:
    """What post-local SGD remembers: the iteration, in the user's own state. It counts up to the start iteration."""

    def __init__(self, state: PostLocalSGDState) -> None:
        self.state = state
        self._is_local = False
        self._agree: Agree | None = None

    @property
    def said(self) -> str:
        state = self.state
        ranks = "torch's own" if state.subgroup is None else f"of {dist.get_world_size(state.subgroup)} ranks"
        return f"from iteration {state.start_localSGD_iter} on in subgroups {ranks}, now at {state.iter}"

    def bind(self, names: Sequence[str], parameters: Sequence[nn.Parameter], agree: Agree) -> None:
        self._agree = agree

    def unbind(self) -> None:
        self._agree = None

    def of(self, name: str) -> State:
        return {}

    def begin(self) -> Averaging | None:
        was, self._is_local = self._is_local, self.state.iter >= self.state.start_localSGD_iter
        if was == self._is_local:
            return None
        assert self._agree is not None
        # A rank that has counted otherwise would reduce with other ranks.
        self._agree(self.said, "backward()")
        if not self._is_local:
            return PLAIN
        if self.state.subgroup is None:
            self.state.subgroup, _ = dist.new_subgroups()
        ranks = dist.get_world_size(self.state.subgroup)
        if ranks < 1:
            raise ConfigError(f"rank {dist.get_rank()} is in no subgroup of its PostLocalSGDState. Give it one.")
        return replace(PLAIN, subgroup=(group_name(self.state.subgroup), ranks))

    def ended(self) -> None:
        if not self._is_local:
            self.state.iter += 1

    def snapshot(self) -> Any:
        return self.state.iter

    def restore(self, snapshot: Any) -> None:
        self.state.iter = snapshot
