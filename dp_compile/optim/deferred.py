"""`Deferred`: work of a backward that the next forward waits for.

A `Pending` is an update whose gradients are being reduced, or an all-gather of updated parameters (`shard.py`). While a
`Pending` is in flight, `passes/crossing.in_flight` has it by the memory address of each of its parameters. Readers of a
parameter first call `complete()` of that `Pending` (`readers.py`).
"""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dp_compile._torch import autograd, compiler, optim
from dp_compile.engine.ranges import UPDATE, WAIT, during, during_bucket
from dp_compile.errors import ReductionError
from dp_compile.optim.readers import put_hooks, take_hooks_off
from dp_compile.optim.setup import Setup, copied, options_of
from dp_compile.passes.crossing import in_flight
from dp_compile.passes.reduction import EagerOps, restored, view_of
from dp_compile.plan.buckets import Bucket
from dp_compile.replica.replica import Replica

_lock = threading.RLock()


class Deferred:
    """The deferred updates or all-gathers of one optimizer on one module that are in flight."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._options: tuple[dict[str, Any], ...] = ()
        self.pending: list[Pending] = []
        self.last: dict[str, Any] = {}  # `OptimizerRecord` fields of the work that the last backward deferred
        self._stays = False  # all code of the last forward waited for updates, so `step()` leaves them to the next

    def begin(self) -> None:
        """Complete all work in flight, and copy the optimizer's current options for the updates of this backward."""
        self.complete()
        self._options = options_of(self._setup.optimizer, copied)

    def leave(
        self, buckets: Sequence[tuple[int, Bucket]], indices: Sequence[int], launched: Sequence[torch.Tensor]
    ) -> None:
        """Defer the update of parameters `indices` with the gradients `launched`; only wait in a dry run."""
        setup = self._setup
        nbytes = sum(tensor.nbytes for tensor in launched)
        pending = PendingUpdate(
            setup=setup, replica=setup.replica, indices=tuple(indices), buckets=tuple(each[0] for each in buckets),
            nbytes=nbytes, optimizer=setup.optimizer, options=self._options,
            launched=tuple((*each, tensor) for each, tensor in zip(buckets, launched, strict=True)),
        )  # fmt: skip
        if setup.replica.state.is_dry_run:
            pending.drop()
        else:
            self.pending.append(pending)

    def ended(self) -> None:
        """Register the work in flight when the backward has ended, and install hooks that let readers wait."""
        pending = self.pending
        self.last = {
            "updates": len(pending),
            "left": tuple(sorted({number for each in pending for number in each.buckets})),
            "left_nbytes": sum(each.nbytes for each in pending),
        }
        for each in pending:
            each.register()
        if pending and (root := self._setup.replica.module.root()) is not None:
            put_hooks(root, self._setup.replica)

    def forward_runs(self, *, whole: bool) -> None:
        self._stays = whole

    def step_ended(self) -> None:
        """Complete the updates of the last backward, unless the next forward is expected to wait for them."""
        self.last["stayed"] = self._stays
        if not self._stays:
            self.complete()
        self._stays = False  # Each forward sets it, except one with a graph break before its first graph.

    @property
    def has_in_flight(self) -> bool:
        return any(not each.is_over for each in self.pending)

    def complete(self) -> None:
        """Complete all work in flight. If one update fails, drop the later ones."""
        pending, self.pending = self.pending, []
        try:
            for each in pending:
                each.complete()
        except BaseException:
            for each in pending:
                with contextlib.suppress(RuntimeError):  # a lost rank fails all collectives: raise the first error
                    each.drop()
            raise

    def release(self) -> None:
        """Complete all work in flight. Remove the hooks by which readers wait, unless another optimizer needs them."""
        self.complete()
        replica = self._setup.find_replica()
        if replica is not None and (root := replica.module.root()) is not None:
            if not any(each.deferred is not None and each.deferred.has_in_flight for each in replica.after.updates):
                take_hooks_off(root)

    def drop(self) -> None:
        """Wait for the collectives in flight without updating, because the backward failed."""
        pending, self.pending = self.pending, []
        for each in pending:
            each.drop()


@dataclass(eq=False, slots=True, kw_only=True)
class Pending(ABC):
    """A deferred update or all-gather in flight. Keeps its parameters alive.

    `indices`: of the parameters. `buckets`: numbers of their buckets. `nbytes`: size of the tensors in flight.
    `versions`: address and version counter of each parameter at `register()`.
    """

    setup: Setup
    replica: Replica
    indices: tuple[int, ...]
    buckets: tuple[int, ...]
    nbytes: int
    versions: tuple[tuple[int, int], ...] = ()
    is_over: bool = False

    @abstractmethod
    def wait(self) -> None:
        """Wait for the collectives without updating parameters."""

    @abstractmethod
    def finish(self) -> None:
        """Wait for the collectives and write the updated parameters."""

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [self.replica.parameters[index] for index in self.indices]

    def register(self) -> None:
        self.versions = self._versions_now()
        in_flight.update((address, self) for address, _ in self.versions if address)  # 0: an empty parameter

    def _end(self) -> None:
        self.is_over = True
        for address, _ in self.versions:
            in_flight.pop(address, None)

    def _versions_now(self) -> tuple[tuple[int, int], ...]:
        return tuple((parameter.data_ptr(), autograd.version_of(parameter)) for parameter in self.parameters)

    def complete(self) -> None:
        with _lock:
            if self.is_over:
                return
            self._end()
            try:
                # A user's write would be lost (all-gather), or be updated with a gradient of the previous value.
                pairs = zip(self.indices, self.versions, self._versions_now(), strict=True)
                written = [index for index, before, now in pairs if before != now]
                if written:
                    raise ReductionError(
                        f"{self.replica.name_list(written)} changed while an update was in flight "
                        "(overlap_forward=True). Call dp_compile.optim.synchronize(model) before changing parameters "
                        "directly."
                    )
                # The first reader may run in inference mode (but optimizer state must be normal tensors), in Dynamo,
                # which reads buffers while it traces, under a fake tensor mode, or in a torch.func transform.
                with (
                    compiler.not_compiling(),
                    autograd.as_outermost_code(),
                    torch.inference_mode(mode=False),
                    torch.no_grad(),
                    self.replica.state.step_guard.updating(self.indices),
                ):
                    self.finish()
            except BaseException as error:
                names = self.replica.name_list(self.indices)
                self.setup.failed = self.setup.failed or (
                    f"the deferred update of {names} failed ({type(error).__name__}). Parameters are partially "
                    "updated: load a checkpoint, including optimizer.load_state_dict(), which clears this error."
                )
                raise

    def drop(self) -> None:
        with _lock:
            if not self.is_over:
                self._end()
                self.wait()


@dataclass(eq=False, slots=True, kw_only=True)
class PendingUpdate(Pending):
    """An update whose gradients are being reduced. Keeps `optimizer` alive. `launched`: number, bucket and tensor of
    each launched reduction."""

    optimizer: torch.optim.Optimizer
    options: tuple[dict[str, Any], ...]
    launched: tuple[tuple[int, Bucket, torch.Tensor], ...]

    def wait(self) -> None:
        for _, _, tensor in self.launched:
            torch.ops._c10d_functional.wait_tensor.default(tensor)

    def finish(self) -> None:
        parameters, gradients = self.parameters, dict[int, torch.Tensor]()
        for number, bucket, launched in self.launched:
            with during_bucket(WAIT, self.replica, number, bucket):
                tensor: torch.Tensor = torch.ops._c10d_functional.wait_tensor.default(launched)
            tensor = restored(bucket, tensor, EagerOps(bucket, (), tensor.device))
            gradients |= {member.gradient.index: view_of(member, tensor) for member in bucket.members}
        kept, given = [parameter.grad for parameter in parameters], [gradients[index] for index in self.indices]
        with during(UPDATE, self.replica), self.setup.only(parameters, given, options=self.options) as optimizer:
            optim.step_without_hooks(optimizer)
        for parameter, grad in zip(parameters, kept, strict=True):
            parameter.grad = grad
