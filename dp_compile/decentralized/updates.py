"""A step of a decentralized module, at the end of each of its synchronised backwards: mix, clip, update, send."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.amp import GradScaler
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.hooks import RemovableHandle

from dp_compile.decentralized.mixing import Mixer
from dp_compile.decentralized.topologies import Edge
from dp_compile.engine.sinks import UpdateRequest, Updates
from dp_compile.errors import ReductionError
from dp_compile.plan.words import count


class MixingUpdates(Updates):
    """What follows a backward of a module whose gradients are not reduced (`engine/sinks.py`).

    Args:
        optimizer: over parameters of the module, of all or of some.
        mixer: of its parameters.
        max_norm: clip the gradients of each bucket by themselves; 0: no.
        scaler: unscales, leaves steps out, and is updated, all at the end of the backward.
        scheduler: steps after each step.
        averages_buffers: averages over all ranks are of buffers, too.
    """

    is_alive = True
    deferred = None

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        mixer: Mixer,
        *,
        max_norm: float,
        scaler: GradScaler | None,
        scheduler: LRScheduler | None,
        averages_buffers: bool,
    ) -> None:
        self.optimizer, self.mixer, self.scheduler = optimizer, mixer, scheduler
        self.averages_buffers = averages_buffers
        self.handles: list[RemovableHandle] = []
        self._max_norm = max_norm
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._scale: tuple[torch.Tensor, dist.Work, Edge] | None = None
        """The least scale of the edge, on its way."""
        self._broken = ""
        self._before_mixing = getattr(optimizer, "pre_average_hook", None)
        if self._before_mixing is not None:
            for bucket in mixer.buckets:
                for parameter, received in zip(bucket.parameters, bucket.views, strict=True):
                    parameter.comm_buffer = received  # type: ignore[attr-defined]

    # --- for the engine

    def begin(self) -> None:
        if self._broken:
            raise ReductionError(self._broken)
        if self.mixer.kept:
            raise ReductionError(
                "a backward ran while parameters hold the global average. Reverting the average would discard its "
                "update. Train outside of global_average(), or call revert_global_avg() first."
            )

    def update_request(self, *, keep_graph: bool) -> UpdateRequest:
        return UpdateRequest()  # all of it comes at the end

    def apply(self, *_: object) -> None:
        raise AssertionError("no backward of a decentralized module is captured")

    @torch.no_grad()
    def ended(self) -> None:
        self.mixer.mix(self._before_mixing)
        try:
            self._update()
            self.mixer.send()
            if self._scaler is not None:
                self._agree_on_scale(self._scaler)
        except BaseException as error:
            self._broken = (
                f"step {self.mixer.step} of a decentralized module failed ({type(error).__name__}) after parameters "
                "had been mixed: they are partially updated, and other ranks wait for them. Restore a checkpoint on "
                "all ranks and call decentralize() on a new module."
            )
            raise
        self.mixer.step += 1
        self.mixer.all_equal = False
        if self.scheduler is not None:
            self.scheduler.step()

    def released(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.mixer.close()

    def describe(self) -> str:
        topology = self.mixer.topology
        return (
            f"topology {topology.name}, period {count(topology.period, 'step')}: buckets are of parameters, which are "
            "mixed in each step; no gradient is reduced"
        )

    # --- a step

    def _update(self) -> None:
        """Update all parameters, or none if the scaler found a gradient that is not finite."""
        if self._scaler is not None:
            self._scaler.unscale_(self.optimizer)
        for bucket in self.mixer.buckets if self._max_norm > 0 else ():
            torch.nn.utils.clip_grad_norm_(bucket.parameters, self._max_norm)
        if self._scaler is not None:
            self._scaler.step(self.optimizer)
        else:
            self.optimizer.step()
        for bucket in self.mixer.buckets:
            for parameter in bucket.parameters:
                parameter.grad = None

    def _agree_on_scale(self, scaler: GradScaler) -> None:
        """Take the least scale of the edge: what another rank has arrives a step later, as its parameters do."""
        scaler.update()
        if self._scale is not None:
            least, work, edge = self._scale
            self.mixer.wait(work, edge)
            scaler.update(min(float(least), scaler.get_scale()))
            self._scale = None
        edge = self.mixer.edge_of(self.mixer.step + 1)
        if len(edge.ranks) > 1:
            least = torch.tensor([scaler.get_scale()], device=self.mixer.buckets[0].buffer.device)
            self._scale = least, self.mixer.start(least, edge, dist.ReduceOp.MIN), edge
