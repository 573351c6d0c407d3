"""`Update`: an optimizer as a sink of reduced gradients, and the guards around its `step()`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from dp_compile._torch import autograd, compiler, optim
from dp_compile.engine.guards import forget_comparison
from dp_compile.engine.ranges import UPDATE, during
from dp_compile.engine.record import IN_BACKWARD, OVERLAP_FORWARD, OptimizerRecord
from dp_compile.engine.sinks import Wanted
from dp_compile.errors import ConfigError, ReductionError
from dp_compile.optim.deferred import Deferred
from dp_compile.optim.partial_steps import check_in_place, clip, options_to_compare, what_changed
from dp_compile.optim.setup import Setup


class Part:
    """Which elements an `Update` updates on this rank.

    In a backward `begin` is called, `apply` for buckets, and then `finish`; after an error `drop`, and `left_out` where
    other ranks have the gradients. `remove` leaves the optimizer with all of its state; `released`: the module is not
    replicated any more; `loaded`: the optimizer has another state.
    """

    leaves_to_step = True
    """What a backward does not update has its gradient in `.grad`, for `step()`."""

    def __init__(self, setup: Setup, deferred: Deferred | None) -> None:
        self.setup, self.deferred = setup, deferred

    def wanted(self, *, keep_graph: bool) -> Wanted:
        raise NotImplementedError

    def apply(
        self, bucket: int, indices: Sequence[int], parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]
    ) -> None:
        raise NotImplementedError

    def record(self) -> OptimizerRecord:
        raise NotImplementedError

    def install(self) -> None: ...
    def begin(self) -> None: ...
    def finish(self) -> None: ...
    def drop(self) -> None: ...
    def left_out(self, error: BaseException) -> None: ...
    def before_step(self) -> None: ...
    def before_state_dict(self) -> None: ...
    def loaded(self) -> None: ...
    def released(self) -> None: ...
    def remove(self) -> None: ...


class Whole(Part):
    """Whole parameters: every rank updates all of them, with the same gradients."""

    def wanted(self, *, keep_graph: bool) -> Wanted:
        setup, indices = self.setup, self.setup.indices()
        replica = setup.replica
        if keep_graph:
            return Wanted(obstacle="retain_graph=True, the graph may be gone through once more")
        if replica.state.uneven is not None:
            return Wanted(obstacle="inputs may be uneven: gradients are divided after the backward")
        if replica.config.check_nan:
            return Wanted(obstacle="check_nan looks at the gradients after the backward")
        if setup.looks_at_all:
            if others := self._others(indices):
                what = f"the norm or the check is over {others} more parameters, not of this module or frozen"
                return Wanted(obstacle=what)
            if any(replica.parameters[index].is_complex() for index in indices):
                return Wanted(obstacle="complex parameters")
            return Wanted(indices, whole=True)
        real = (index for index in indices if not replica.parameters[index].is_complex())
        return Wanted(tuple(index for index in real if index in setup.alone), crosses=self.deferred is not None)

    def _others(self, indices: Sequence[int]) -> int:
        """How many parameters have a gradient in `step()` that this module's backward does not bring."""
        mine = {id(self.setup.replica.parameters[index]) for index in indices}
        return sum(
            each.requires_grad or each.grad is not None for each in self.setup.parameters if id(each) not in mine
        )

    def apply(
        self, bucket: int, indices: Sequence[int], parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]
    ) -> None:
        setup = self.setup
        replica, optimizer, scaler = setup.replica, setup.optimizer, setup.scaler
        mine = [replica.parameters[index] for index in indices]
        check_in_place(replica, indices, parameters)
        with setup.steps.only(optimizer, mine), replica.state.local.updating(indices):
            for parameter, gradient in zip(mine, gradients, strict=True):
                parameter.grad = gradient
            if replica.state.rehearses:
                return
            if scaler is not None:
                scaler.unscale_(optimizer)
            if setup.max_norm is not None:
                optimizer.total_norm = clip(mine, setup.max_norm)  # type: ignore[attr-defined]
            if scaler is None or not optim.found_inf(scaler, optimizer):
                setup.updated.update(indices)
                with during(UPDATE, replica):
                    optim.step_without_hooks(optimizer)

    def before_step(self) -> None:
        setup = self.setup
        if setup.max_norm is not None and not setup.updated:
            every = [each for group in setup.optimizer.param_groups for each in group["params"]]
            setup.optimizer.total_norm = clip(every, setup.max_norm)  # type: ignore[attr-defined]

    def record(self) -> OptimizerRecord:
        sizes, indices = self.setup.sizes(), self.setup.indices()
        way = IN_BACKWARD if self.deferred is None else OVERLAP_FORWARD
        return OptimizerRecord(type(self.setup.optimizer).__name__, way, sum(sizes[index] for index in indices))


class Update:
    """An optimizer whose updates run in the backward of one module: what the engine and `step()` see of it."""

    def __init__(self, setup: Setup, part: Part, deferred: Deferred | None) -> None:
        self.setup, self.part, self.deferred = setup, part, deferred
        self.apply = part.apply
        self._handles: list[Any] = []
        self._done: frozenset[int] = frozenset()
        """The parameters that the last backward updated, or left to the next forward."""
        self._gradients: dict[int, tuple[torch.Tensor | None, int]] = {}
        """`.grad` of each parameter as a backward left it, and how often it was written to; nothing after `step()`."""
        self._stepped_at: int | None = None
        """How many nodes of autograd this thread had made at the last `step()`; `None` after a backward."""
        self._awaits_step = False
        self._begun = False
        """`step()` has begun and not ended: a hook of the user's failed in it, and it may be called again."""
        self._options: tuple[dict[str, Any], ...] = ()
        """Of the optimizer's groups, as the last synchronised backward found them; nothing after its `step()`."""
        self._loaded_before_step = False
        """Whether another state was loaded between a backward that could update and its `step()`."""
        self._unmark: Callable[[], object] = lambda: None
        self._failed = ""

    @property
    def is_alive(self) -> bool:
        return self.setup.is_alive

    @property
    def _broken(self) -> str:
        """Why parameters are updated in part."""
        return self._failed or ("" if self.deferred is None else self.deferred.failed)

    def install(self) -> None:
        """Stand around the optimizer's `step()`."""
        self.part.install()
        optimizer = self.setup.optimizer
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
            optimizer.register_state_dict_pre_hook(self._before_state_dict),
            optimizer.register_load_state_dict_pre_hook(self._arrive),
            optimizer.register_load_state_dict_post_hook(self._loaded),
        ]
        if self.setup.given_scaler is None:
            self._unmark = optim.mark_for_scaler(optimizer)

    def remove(self) -> None:
        """Leave the optimizer alone. With `shard`, every rank calls it."""
        self._arrive()
        for handle in self._handles:
            handle.remove()
        self.part.remove()
        self.released()

    def released(self) -> None:
        """The module is not replicated any more: the optimizer goes on as it is, in `step()`."""
        self._unmark()
        self._options, self._gradients, self._loaded_before_step = (), {}, False
        if self.deferred is not None:
            self.deferred.release()
        self.part.released()

    def _arrive(self, *_: Any) -> None:
        if self.deferred is not None:
            self.deferred.arrive()

    def _before_state_dict(self, optimizer: torch.optim.Optimizer) -> None:
        self._arrive()
        self.part.before_state_dict()

    def describe(self) -> str:
        return str(self.record())

    def record(self) -> OptimizerRecord:
        record, sizes = self.part.record(), self.setup.sizes()
        if self.part.leaves_to_step:
            kept = sum(sizes[index] for index in self.setup.indices() if index not in self._done)
            record = replace(record, kept_nbytes=kept)
        if self.deferred is None:
            return record
        left = self.deferred.last
        return replace(record, updates=left.updates, left=left.buckets, left_nbytes=left.nbytes, stayed=left.stayed)

    # --- for the engine

    def begin(self) -> None:
        if self.deferred is not None:
            self.deferred.begin()
        if self._broken:
            raise ReductionError(self._broken)
        scaler = self.setup.scaler
        if self._awaits_step and (scaler is None or optim.awaits_update(scaler, self.setup.optimizer)):
            calls = "step()" if scaler is None else "scaler.step(optimizer) and scaler.update()"
            raise ReductionError(
                "a second backward of a module whose optimizer updates in the backward, before optimizer.step(). Call "
                f"{calls} after each synchronised backward; to accumulate, run all backwards but the last under "
                "no_sync(); if the gradients are not for this optimizer, as those of a GAN's other half, freeze the "
                "parameters for that backward; if another optimizer has taken its place, call "
                "dp_compile.optim.remove_in_backward() on this one."
            )
        self.setup.updated.clear()
        self._loaded_before_step = False
        self.part.begin()

    def wanted(self, *, keep_graph: bool) -> Wanted:
        wanted = self.part.wanted(keep_graph=keep_graph)
        self._options = () if wanted.obstacle else options_to_compare(self.setup.optimizer)
        return wanted

    @torch.no_grad()
    def ended(self) -> None:
        setup = self.setup
        try:
            self.part.finish()
        except BaseException as error:
            self.interrupted(error)
            raise
        self._awaits_step, self._stepped_at, self._begun = True, None, False
        if setup.scaler is not None:  # it may leave step() out, but not update()
            optim.note_backward(setup.scaler, setup.optimizer)
        self._done = frozenset(setup.updated)
        if self.deferred is not None:
            self.deferred.ended()
            self._done |= self.deferred.last.indices
        self._gradients = {index: self._gradient(index) for index in setup.covered}

    def interrupted(self, error: BaseException) -> None:
        setup = self.setup
        self.part.drop()
        if self.deferred is not None:
            self.deferred.drop()
        if not setup.updated:
            self._options = ()  # nothing has used them: a step may follow that has others, and no backward
        elif setup.replica_if_alive is not None and not self._broken:
            self._failed = (
                f"a backward failed ({type(error).__name__}) after the optimizer had updated {len(setup.updated)} of "
                f"{len(setup.covered)} parameters in it: {setup.replica.name_list(sorted(setup.updated))}. Parameters "
                "are partially updated: load a checkpoint, with optimizer.load_state_dict() too, which ends this state."
            )

    def left_out(self, error: BaseException) -> None:
        self.part.left_out(error)

    # --- around step()

    def _before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_dynamo_compiling():
            _refuse_compiled_step()
        if kwargs.get("closure", args[1] if len(args) > 1 else None) is not None:
            raise ReductionError(
                "optimizer.step() was given a closure, but the optimizer updates in the backward, before step(). Run "
                "the backward yourself and call step() without it."
            )
        if self._broken:
            raise ReductionError(self._broken)
        if self._options and (changed := what_changed(self._options, optimizer)):
            raise ReductionError(
                f"{changed} between the backward and optimizer.step(): the backward has updated already, with what it "
                "found. Set options, and step schedulers, before the backward or after optimizer.step()."
            )
        if self._loaded_before_step:
            raise ReductionError(
                "a state was loaded into the optimizer between the backward and optimizer.step(): the backward has "
                "updated already, with the state of before. Load before the backward or after optimizer.step(); a "
                "step that is not to count ends without optimizer.step()."
            )
        if self.setup.given_scaler is None and hasattr(optimizer, "found_inf"):
            raise ReductionError(
                "a GradScaler steps an optimizer that has updated in the backward already, with gradients that were "
                "still scaled. Give it to in_backward(model, optimizer, scaler=scaler)."
            )
        self._check_gradients(optimizer)
        if not self._begun:
            self.part.before_step()
            self._gradients = {index: self._gradient(index) for index in self._gradients}  # it may have clipped them
            self._begun = True

    def _gradient(self, index: int) -> tuple[torch.Tensor | None, int]:
        grad = self.setup.replica.parameters[index].grad
        # A scaler writes to gradients before it calls step(); a placeholder is never written to.
        counts = grad is not None and self.setup.scaler is None and self.part.leaves_to_step
        return grad, autograd.version_of(grad) if counts and grad is not None else 0

    def _check_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse what would be a second update of the same backward, another one than on other ranks, or none."""
        replica = self.setup.replica_if_alive
        if replica is None:
            return
        # A gradient that was used has gone, and may be zeroed; one that was left to step() has to be what it was.
        changed = list[int]()
        for index, (then, writes) in self._gradients.items():
            now, written = self._gradient(index)
            if (now is not then or written != writes) and (now is not None or self.part.leaves_to_step):
                changed.append(index)
        if changed:
            raise ReductionError(
                f"{replica.name_list(changed)} got another gradient between the backward and optimizer.step(). The "
                "backward updates with the reduced one, on this rank or on others. Run no backward under no_sync() "
                "between them, and set no .grad. To change reduced gradients, use the optimizer without in_backward(), "
                "or a comm hook; to clip, max_norm."
            )
        gradients = any(each.grad is not None for group in optimizer.param_groups for each in group["params"])
        if self._stepped_at == autograd.nodes_made() and not gradients:
            raise ReductionError(
                "optimizer.step() is called twice after one backward, which has updated already. Call it once for each "
                "synchronised backward."
            )

    def check_clipping(self, index: int) -> None:
        """Whether gradients of a parameter may be clipped by the loop.

        Raises:
            ReductionError: the last backward has used them, on this rank or on others.
        """
        replica = self.setup.replica_if_alive
        if replica is not None and index in self._gradients:
            raise ReductionError(
                f"clip_grad_norm_(): the backward has updated {replica.name_list([index])} already, without clipping. "
                "Leave the call out and pass in_backward(model, optimizer, max_norm=...)."
            )

    def _after_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._awaits_step, self._options, self._gradients, self._begun = False, (), {}, False
        self._stepped_at = autograd.nodes_made()
        self.setup.updated.clear()
        if self.deferred is not None:
            self.deferred.step_ended()
        if self.setup.replica_if_alive is not None:
            # As after a backward that has updated: the next one starts from none in every way, on every rank.
            for index in self.setup.indices():
                self.setup.replica.parameters[index].grad = None

    def _loaded(self, optimizer: torch.optim.Optimizer) -> None:
        self.has_another_state()
        if self.deferred is not None:
            self.deferred.failed = ""
        self.setup.updated.clear()
        self.part.loaded()

    def has_another_state(self) -> None:
        replica = self.setup.replica_if_alive
        if self._broken and replica is not None:
            forget_comparison(replica)
        # A rank that has updated has done so with the state before, one that falls back would with that of now.
        self._loaded_before_step = bool(self._options) and not self._broken
        self._failed, self._awaits_step, self._options = "", False, ()
        self._gradients, self._stepped_at, self._begun = {}, None, False


@compiler.constant
def _refuse_compiled_step() -> bool:
    """Run while Dynamo traces.

    Raises:
        ConfigError: compiled, the step of a rank that falls back rounds otherwise than updates in backwards.
    """
    raise ConfigError(
        "optimizer.step() is compiled, but the optimizer updates in the backward, with its own kernels on every rank. "
        "Call step() as it is: there is nothing left to compile."
    )
