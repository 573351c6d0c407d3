"""A step of a decentralized module: mix, clip, update and send, for each bucket of parameters, in its backward."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.amp import GradScaler
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.hooks import RemovableHandle

from dp_compile._torch import optim
from dp_compile.decentralized.mixing import MixedBucket, Mixer
from dp_compile.decentralized.topologies import Edge
from dp_compile.engine.replica import Replica
from dp_compile.engine.updates import Wanted
from dp_compile.errors import ReductionError
from dp_compile.optim.partial_steps import PartialSteps, check_in_place, clip

CLIPS = ("bucket", "global")


class MixingUpdates:
    """What a backward does with the gradients of each bucket. What ops of a captured graph did not do follows at the
    end of the backward, in the same order, so that every way a backward goes comes to the same bits.

    Args:
        replica: the module.
        optimizer: over its parameters, of all or of some.
        mixer: of its parameters.
        max_norm: clip gradients; 0: no. `clip_by`: those of each `bucket` by themselves, or all together, `global`.
        scaler: unscales, leaves steps out, and is updated, all in the backward.
        scheduler: steps after each step.
    """

    is_alive = True
    deferred = None

    def __init__(
        self,
        replica: Replica,
        optimizer: torch.optim.Optimizer,
        mixer: Mixer,
        *,
        max_norm: float,
        clip_by: str,
        scaler: GradScaler | None,
        scheduler: LRScheduler | None,
    ) -> None:
        self._replica = weakref.ref(replica)
        self.optimizer, self.mixer, self.scheduler = optimizer, mixer, scheduler
        self._max_norm, self._clip_by = max_norm, clip_by
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._whole = self._scaler is not None or (max_norm > 0 and clip_by == "global")
        self._bucket_of = {index: bucket for bucket in mixer.buckets for index in bucket.indices}
        self._steps = PartialSteps()
        self._done: set[int] = set()
        self._sent = 0
        """How many buckets have been updated and sent in the step that is under way; they are sent in their order."""
        self._scale: tuple[torch.Tensor, dist.Work, Edge] | None = None
        """The least scale of the edge, on its way."""
        self._broken = ""
        self.averages_buffers = False
        self.handles: list[RemovableHandle] = []
        self._before_mixing = getattr(optimizer, "pre_average_hook", None)
        if self._before_mixing is not None:
            for bucket in mixer.buckets:
                for parameter, arriving in zip(bucket.parameters, bucket.arriving_parameters(), strict=True):
                    parameter.comm_buffer = arriving  # type: ignore[attr-defined]

    # --- for the engine

    def begin(self) -> None:
        if self._broken:
            raise ReductionError(self._broken)
        if self.mixer.kept:
            raise ReductionError(
                "a backward while parameters are the average of all ranks, which will be taken back: what it learns "
                "would be lost. Train outside of global_average(), or call revert_global_avg() before."
            )

    def wanted(self, *, keep_graph: bool) -> Wanted:
        if keep_graph:
            raise ReductionError(
                "retain_graph=True, but a backward of a decentralized module changes its parameters: it cannot be gone "
                "through once more. Run all backwards of a forward but the last under no_sync(), or add the losses."
            )
        return Wanted() if self._whole else Wanted(tuple(self._bucket_of), mixes=True)

    def apply(
        self, bucket: int, indices: Sequence[int], parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]
    ) -> None:
        replica = self._replica()
        assert replica is not None
        check_in_place(replica, indices, parameters)
        if replica.rehearses:
            return
        for index, gradient in zip(indices, gradients, strict=True):
            replica.parameters[index].grad = gradient
        self._step(self._bucket_of[indices[0]])

    @torch.no_grad()
    def ended(self) -> None:
        try:
            if self._whole:
                self._step_whole()
            for bucket in self.mixer.buckets:
                if bucket.number not in self._done:
                    self._step(bucket)
            if self._scaler is not None:
                self._agree_on_scale(self._scaler)
        except BaseException as error:
            self.interrupted(error)
            raise
        if type(self.optimizer).step.__module__.startswith("torch.optim."):
            self.optimizer.step()  # nothing has a gradient: this is for hooks, and for schedulers that count
        if self.scheduler is not None:
            self.scheduler.step()
        self.mixer.step += 1
        self.mixer.all_equal = False
        self._done.clear()
        self._sent = 0

    def left_out(self, error: BaseException) -> None:
        """Nothing follows reductions, of which there are none."""

    def interrupted(self, error: BaseException) -> None:
        replica = self._replica()
        if not self._done or replica is None or self._broken:
            return
        self._broken = (
            f"a backward failed ({type(error).__name__}) after {len(self._done)} of {len(self.mixer.buckets)} buckets "
            f"of parameters had been updated in step {self.mixer.step}: {replica.name_list(self._updated())}. The "
            "model is of no step now, and other ranks wait for the rest. Load a checkpoint on all ranks and call "
            "decentralize() anew."
        )

    def _updated(self) -> list[int]:
        return [index for number in sorted(self._done) for index in self.mixer.buckets[number].indices]

    def released(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.mixer.close()

    def record(self) -> None:
        """What ranks mix is no optimizer's affair."""

    def describe(self) -> str:
        return (
            f"{self.mixer.topology.describe()}: buckets are of parameters, which are mixed in each step; "
            "no gradient is reduced"
        )

    # --- a step

    @torch.no_grad()
    def _step(self, bucket: MixedBucket) -> None:
        with self._steps.only(self.optimizer, bucket.number, bucket.parameters):
            self.mixer.mix(bucket, self._before_mixing)
            if self._max_norm > 0:
                clip(bucket.parameters, self._max_norm)
            optim.step_without_hooks(self.optimizer)
        self._finish(bucket)

    def _finish(self, bucket: MixedBucket) -> None:
        """Send it, and those behind it that had to wait for it."""
        self._done.add(bucket.number)
        while self._sent in self._done:
            self.mixer.send(self.mixer.buckets[self._sent])
            self._sent += 1

    def _step_whole(self) -> None:
        """Mix all buckets, then update all of them, or none if the scaler found what is not finite."""
        everything = [each for bucket in self.mixer.buckets for each in bucket.parameters]
        for bucket in self.mixer.buckets:
            with self._steps.only(self.optimizer, bucket.number, bucket.parameters, keep_gradients=True):
                self.mixer.mix(bucket, self._before_mixing)
        with self._steps.only(self.optimizer, "all", everything):
            if self._scaler is not None:
                self._scaler.unscale_(self.optimizer)
            if self._max_norm > 0 and self._clip_by == "global":
                self.optimizer.total_norm = clip(everything, self._max_norm)  # type: ignore[attr-defined]
            elif self._max_norm > 0:
                for bucket in self.mixer.buckets:
                    clip(bucket.parameters, self._max_norm)
            if self._scaler is None or not optim.found_inf(self._scaler, self.optimizer):
                optim.step_without_hooks(self.optimizer)
        for bucket in self.mixer.buckets:
            self._finish(bucket)

    def _agree_on_scale(self, scaler: GradScaler) -> None:
        """Take the least scale of the edge: what a rank says arrives a step later, as its parameters do."""
        scaler.update()
        if self._scale is not None:
            least, work, edge = self._scale
            self.mixer.wait(work, edge)
            scaler.update(min(float(least), scaler.get_scale()))
            self._scale = None
        edge = self.mixer.edge_of(self.mixer.step + 1)
        if len(edge.ranks) > 1:
            device = self.mixer.buckets[0].buffer.device
            least = torch.tensor([scaler.get_scale()], device=device)
            self._scale = least, self.mixer.start(least, edge, dist.ReduceOp.MIN), edge
