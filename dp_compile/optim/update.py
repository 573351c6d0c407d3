"""`Update`: an optimizer as a sink of reduced gradients, and the guards around its `step()`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dp_compile._torch import compiler, optim
from dp_compile.engine.guards import forget_comparison
from dp_compile.engine.ranges import UPDATE, during
from dp_compile.errors import ConfigError, ReductionError
from dp_compile.optim.deferred import Deferred
from dp_compile.optim.setup import Setup, check_in_place, noted, options_of, what_changed
from dp_compile.replica.record import IN_BACKWARD, OVERLAP_FORWARD, OptimizerRecord
from dp_compile.replica.sinks import UpdateRequest


class Update:
    """An optimizer that updates in the backward of one module: its interface to the engine and to `step()`.

    Every rank updates whole parameters, with the same gradients. `Shard` updates a part on each rank.
    """

    def __init__(self, setup: Setup, deferred: Deferred | None) -> None:
        self.setup, self.deferred = setup, deferred
        self._handles: list[Any] = []
        self._awaits_step = False  # a backward has updated or deferred updates, and `step()` has not followed
        self._options: tuple[dict[str, Any], ...] = ()  # the groups' options at that backward; empty after `step()`
        self._unmark: Callable[[], object] = lambda: None

    @property
    def is_alive(self) -> bool:
        return self.setup.find_optimizer() is not None

    def install(self) -> None:
        """Register hooks for the optimizer's `step()` and state dicts."""
        optimizer = self.setup.optimizer
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
            optimizer.register_state_dict_pre_hook(self._arrive),
            optimizer.register_load_state_dict_pre_hook(self._arrive),
            optimizer.register_load_state_dict_post_hook(self._loaded),
        ]
        if self.setup.given_scaler is None:
            self._unmark = optim.mark_for_scaler(optimizer)

    def remove(self) -> None:
        """Remove the hooks; the optimizer keeps its whole state. With `shard`, every rank calls it."""
        self._arrive()
        for handle in self._handles:
            handle.remove()
        self.released()

    def released(self) -> None:
        """Update in `step()` again: the module is no longer replicated, or this optimizer was removed."""
        self._unmark()
        self._options = ()
        if self.deferred is not None:
            self.deferred.release()

    def _arrive(self, *_: Any) -> None:
        if self.deferred is not None:
            self.deferred.complete()

    def describe(self) -> str:
        return str(self.record())

    def record(self) -> OptimizerRecord:
        nbytes = sum(self.setup.replica.parameters[index].nbytes for index in self.setup.indices())
        way, last = (IN_BACKWARD, {}) if self.deferred is None else (OVERLAP_FORWARD, self.deferred.last)
        return OptimizerRecord(type(self.setup.optimizer).__name__, way, nbytes, **last)

    # --- for the engine

    def begin(self) -> None:
        if self.deferred is not None:
            self.deferred.begin()
        if self.setup.failed:
            raise ReductionError(self.setup.failed)
        scaler = self.setup.scaler
        if self._awaits_step and (scaler is None or optim.awaits_update(scaler, self.setup.optimizer)):
            calls = "step()" if scaler is None else "scaler.step(optimizer) and scaler.update()"
            raise ReductionError(
                "a second backward started before optimizer.step(), but the optimizer updates in the backward. Call "
                f"{calls} after each synchronised backward; to accumulate, run all backwards but the last under "
                "no_sync(); if the gradients are not for this optimizer, as those of a GAN's other half, freeze the "
                "parameters for that backward; if another optimizer has taken its place, call "
                "dp_compile.optim.remove_in_backward() on this one."
            )
        self.setup.updated.clear()

    def update_request(self, *, keep_graph: bool) -> UpdateRequest:
        if keep_graph:
            raise ReductionError(
                "retain_graph=True or create_graph=True: the optimizer changes parameters in this backward, so its "
                "graph cannot be used a second time. Add the losses, or run all backwards but the last under no_sync()."
            )
        parameters = self.setup.replica.parameters
        real = tuple(index for index in self.setup.indices() if not parameters[index].is_complex())
        return UpdateRequest(real, crosses=self.deferred is not None)

    def apply(
        self, bucket: int, indices: Sequence[int], parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]
    ) -> None:
        check_in_place(self.setup.replica, indices, parameters)
        if not self.setup.replica.state.is_dry_run:
            self._update(indices, gradients)

    def _update(self, indices: Sequence[int], gradients: Sequence[torch.Tensor | None]) -> None:
        setup, replica = self.setup, self.setup.replica
        mine = [replica.parameters[index] for index in indices]
        with setup.only(mine, gradients) as optimizer, replica.state.step_guard.updating(indices):
            setup.updated.update(indices)
            with during(UPDATE, replica):
                optim.step_without_hooks(optimizer)

    def finish(self) -> None:
        """Update the parameters that the backward has not updated."""
        parameters = self.setup.replica.parameters
        left = {i: parameters[i].grad for i in self.setup.indices() if parameters[i].grad is not None}
        if left:
            self._update([*left], [*left.values()])

    @torch.no_grad()
    def ended(self) -> None:
        setup = self.setup
        try:
            self.finish()
        except BaseException as error:
            self.interrupted(error)
            raise
        self._awaits_step, self._options = True, options_of(setup.optimizer, noted)
        if setup.scaler is not None:  # it may skip step(), but not update()
            optim.note_backward(setup.scaler, setup.optimizer)
        if self.deferred is not None:
            self.deferred.ended()

    def interrupted(self, error: BaseException) -> None:
        setup = self.setup
        if self.deferred is not None:
            self.deferred.drop()
        if setup.updated and setup.find_replica() is not None and not setup.failed:
            setup.failed = (
                f"a backward failed ({type(error).__name__}) after the optimizer had updated {len(setup.updated)} of "
                f"{len(setup.covered)} parameters in it: {setup.replica.name_list(sorted(setup.updated))}. Parameters "
                "are partially updated: load a checkpoint, including optimizer.load_state_dict(), which clears this "
                "error."
            )

    def left_out(self, error: BaseException) -> None:
        """Do nothing when only this rank fails: every other rank has the gradients and updates without it."""

    # --- around step()

    def _before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_dynamo_compiling():
            _refuse_compiled_step()
        changed = what_changed(self._options, optimizer)
        if kwargs.get("closure", args[1] if len(args) > 1 else None) is not None:
            problem = (
                "optimizer.step() was given a closure, but the optimizer updates in the backward, before step(). Run "
                "the backward yourself and call step() without a closure."
            )
        elif self.setup.failed:
            problem = self.setup.failed
        elif changed:
            problem = (
                f"{changed} between the backward and optimizer.step(): the backward has updated already, with the old "
                "value. Set options, and step schedulers, before the backward or after optimizer.step()."
            )
        elif self.setup.given_scaler is None and hasattr(optimizer, "found_inf"):
            problem = (
                "a GradScaler steps an optimizer that has updated in the backward already, with gradients that were "
                "still scaled. Pass the scaler: in_backward(model, optimizer, shard=True, scaler=scaler)."
            )
        else:
            problem = self._other_gradients()
        if problem:
            raise ReductionError(problem)

    def _other_gradients(self) -> str:
        """Return an error text if a parameter has a gradient that no synchronised backward has set; else return ""."""
        replica = self.setup.find_replica()
        if replica is None or not self._awaits_step:
            return ""
        given = [index for index in self.setup.indices() if replica.parameters[index].grad is not None]
        if not given:
            return ""
        return (
            f"{replica.name_list(given)} got another gradient between the backward and optimizer.step(). The "
            "backward has already applied the reduced gradient. Run no backward under no_sync() between them, and do "
            "not set .grad. To change reduced gradients, use the optimizer without in_backward(), or a comm hook."
        )

    def check_clipping(self, index: int) -> None:
        """Raise if the last backward has already updated with the gradient to be clipped."""
        if self._awaits_step and self.setup.find_replica() is not None and index in self.setup.covered:
            raise ReductionError(
                f"clip_grad_norm_(): the backward has updated {self.setup.replica.name_list([index])} already. Leave "
                "this call out and clip with in_backward(model, optimizer, shard=True, max_norm=...), or use the "
                "optimizer without in_backward()."
            )

    def _after_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._awaits_step, self._options = False, ()
        self.setup.updated.clear()
        if self.deferred is not None:
            self.deferred.step_ended()

    def _loaded(self, optimizer: torch.optim.Optimizer) -> None:
        replica = self.setup.find_replica()
        if self.setup.failed and replica is not None:
            forget_comparison(replica)
        self.setup.failed, self._awaits_step, self._options = "", False, ()
        self.setup.updated.clear()


@compiler.constant
def _refuse_compiled_step() -> bool:
    """While Dynamo traces: raise. A compiled step rounds parameters outside the module differently and loses hooks."""
    raise ConfigError(
        "optimizer.step() is compiled, but the optimizer updates in the backward: compiled code may round differently. "
        "Call step() outside of compiled code."
    )
