"""`in_backward()`: the updates of a stock optimizer run in the backward, each behind the reduction of its gradients."""

from __future__ import annotations

import gc
import operator
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler

from dp_compile._torch import autograd, compiler, optim
from dp_compile.engine.events import UPDATE, listeners_of
from dp_compile.engine.record import IN_BACKWARD, OVERLAP_FORWARD, OptimizerRecord
from dp_compile.engine.replica import Replica
from dp_compile.engine.supported import OPTIMIZER, check_supported
from dp_compile.engine.updates import Wanted
from dp_compile.errors import ConfigError, ReductionError
from dp_compile.optim.deferred import Deferred, plan_for, watch
from dp_compile.optim.partial_steps import PartialSteps, check_in_place, check_kind, clip, said_of, what_changed
from dp_compile.replication.module import replica_of
from dp_compile.replication.tensor_parallel import refuse_dtensors

_known: weakref.WeakKeyDictionary[torch.optim.Optimizer, InBackward] = weakref.WeakKeyDictionary()


def in_backward(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    max_norm: float | None = None,
    scaler: GradScaler | None = None,
    *,
    overlap_forward: bool = False,
    shard: bool = False,
) -> torch.optim.Optimizer:
    """Let the backward of a replicated module update its parameters. Returns the same optimizer.

    The loop stays: backward, `optimizer.step()`, `optimizer.zero_grad()`. In a captured backward the update of each
    bucket stands behind its reduction, and `.grad` is `None` after it. Whatever the backward did not update has its
    reduced gradient in `.grad`, and `step()` does it, with the same kernels; then it ends the step. After `step()`
    the `.grad` of the module's parameters is `None` in every way. There is one synchronised backward for each `step()`.

    Args:
        model: a module that was given to `replicate`, or a `DistributedDataParallel`.
        optimizer: one of `torch.optim` over parameters of `model`, of all or of some; it may have others too.
        max_norm: clip the gradients of all its parameters together, as `torch.nn.utils.clip_grad_norm_` does. The norm
            before is then in `optimizer.total_norm`. Do not call that function beside it: there is nothing to clip.
        scaler: the `torch.amp.GradScaler` of the loop, if there is one.
        overlap_forward: leave updates whose gradients are on their way when a backward ends for the next forward, which
            does each right before it reads the parameter; with `shard` it waits there for parameters that go round. For
            `torch.compile(model, backend="dp_compile")`; behind any other forward `step()` waits. All that Dynamo has
            compiled in this process is compiled anew. Whoever reads a parameter past the module's methods calls
            `model.synchronize()` before (`optim/deferred.py` has who waits). Every rank gives the same.
        shard: each rank reduces, updates and remembers a part of the elements of each bucket, with an optimizer that
            updates each element by itself. All of `step()` is then in the backward, on every rank. Every rank calls
            this. `optimizer.state_dict()` is `full_state_dict(optimizer)` then, `load_state_dict()` stays.

    Raises:
        ConfigError: the optimizer is none of those that update each parameter by itself, or is `differentiable`; it
            has no parameter of `model`, or another optimizer updates one already; or an option is not allowed; or
            parameters are DTensors; or, with `shard`, something of the module or the optimizer cannot be cut.
        DesyncError: ranks shard other optimizers, or some do not; or another rank gives another `overlap_forward`.
        ModuleError: `model` is not replicated, or waits for its first forward.
    """
    replica = replica_of(model)
    check_supported(replica, (OPTIMIZER,))
    refuse_dtensors(model, "in_backward()")
    _check(optimizer, max_norm, scaler)
    _check_ways(overlap_forward, shard, "max_norm" if max_norm is not None else "scaler" if scaler is not None else "")
    before = _known.get(optimizer)
    if before is not None:
        if before.replica is not None and before in before.replica.after.updates:
            raise ConfigError("this optimizer updates in the backward already. Call in_backward() once for it.")
        before.remove()
    kind = InBackward
    if shard:
        from dp_compile.optim.shard import Sharded  # a subclass of what is below

        kind = Sharded
    updates = kind(replica, optimizer, max_norm, scaler, overlaps=overlap_forward)
    mine = updates.indices()
    if not mine:
        raise ConfigError(f"{type(optimizer).__name__} has no trainable parameter of this module. Give it some.")
    _check_only(replica, mine)
    updates.install()
    replica.after.updates.append(updates)
    if updates.deferred is not None:
        if not shard:  # else reductions end in the backward
            plan_for(replica)
        watch(model, updates.deferred)
    _known[optimizer] = updates
    return optimizer


def _check_only(replica: Replica, mine: Sequence[int]) -> None:
    """Refuse a second optimizer of the same parameters."""
    others = [each for each in replica.after.updates if isinstance(each, InBackward)]
    if any(other.is_alive for other in others):
        gc.collect()  # perhaps only a cycle keeps it, as a scheduler makes one, on this rank and not on others
    for other in others:
        if other.is_alive and (both := sorted({*mine} & {*other.indices()})):
            raise ConfigError(
                f"another optimizer updates {replica.name_list(both)} in the backward already. Call "
                "dp_compile.optim.remove_in_backward(other_optimizer) before."
            )


def remove_in_backward(optimizer: torch.optim.Optimizer) -> None:
    """Undo `in_backward`: `step()` updates again, from reduced gradients. Every rank calls it, between two steps.

    Raises:
        ConfigError: the optimizer was not given to `in_backward`, or was removed; or it is sharded: then load
            `full_state_dict(optimizer)` into another one after `unreplicate(model)`.
    """
    updates = _known.get(optimizer)
    if updates is None or updates.replica is None or updates not in updates.replica.after.updates:
        raise ConfigError("this optimizer does not update in the backward. Nothing has to be removed.")
    if updates.replica.after.parts_to is not None:
        raise ConfigError(
            "an optimizer with shard=True has a part of the state on each rank. Save full_state_dict(optimizer), call "
            "unreplicate(model) and replicate(model), and load it into another optimizer."
        )
    updates.remove()
    updates.released()
    updates.replica.after.updates.remove(updates)
    del _known[optimizer]


def known(optimizer: torch.optim.Optimizer) -> InBackward | None:
    """What stands around an optimizer that was given to `in_backward`."""
    return _known.get(optimizer)


def _check(optimizer: Any, max_norm: Any, scaler: Any) -> None:
    kind = type(optimizer)
    check_kind(optimizer)
    if not f"{kind.__module__}.".startswith("torch.optim."):
        raise ConfigError(
            f"{kind.__name__} is not of torch.optim: it cannot be verified that it updates parameters independently. "
            "Use it without in_backward(), or an optimizer of torch.optim."
        )
    is_number = isinstance(max_norm, (int, float)) and not isinstance(max_norm, bool)
    if max_norm is not None and not (is_number and max_norm > 0):
        raise ConfigError(f"max_norm must be a number > 0 or None, got {max_norm!r}.")
    if scaler is not None and not isinstance(scaler, GradScaler):
        raise ConfigError(f"scaler must be a torch.amp.GradScaler or None, got {type(scaler).__name__}.")
    if scaler is not None and any(group.get("fused") for group in optimizer.param_groups):
        raise ConfigError(f"{kind.__name__}(fused=True) unscales by itself. With scaler= pass fused=False.")


def _check_ways(overlap_forward: object, shard: object, looks_at_all: str) -> None:
    for name, value in (("shard", shard), ("overlap_forward", overlap_forward)):
        if not isinstance(value, bool):
            raise ConfigError(f"{name} must be True or False, got {value!r}.")
    if overlap_forward and looks_at_all and not shard:
        raise ConfigError(
            f"overlap_forward=True together with {looks_at_all}: that looks at all gradients before the first update, "
            "so no update can be left for the next forward. Leave one of them out, or add shard=True: updated "
            "parameters are then all-gathered under the next forward."
        )


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


class InBackward:
    """An optimizer whose updates run in the backward of one module."""

    def __init__(
        self,
        replica: Replica,
        optimizer: torch.optim.Optimizer,
        max_norm: float | None,
        scaler: GradScaler | None,
        *,
        overlaps: bool = False,
    ) -> None:
        self._replica, self._optimizer = weakref.ref(replica), weakref.ref(optimizer)
        self._max_norm, self._given_scaler = max_norm, scaler
        self._handles: list[Any] = []
        self._parameters: list[nn.Parameter] = []
        """All of the optimizer, as they were last seen, and where in the module they are."""
        self._indices: tuple[int, ...] = ()
        self._alone: frozenset[int] = frozenset()
        """Those of which no other parameter has the memory: else it matters which is updated first."""
        self._steps = PartialSteps()
        self.deferred = Deferred(replica, optimizer, self._steps) if overlaps else None
        self._updated: set[int] = set()
        """Parameters that were updated since the last `step()`."""
        self._done: frozenset[int] = frozenset()
        """Those of the last backward, with what it left for the next forward."""
        self._unstepped: frozenset[int] = frozenset()
        """The same until `step()` ends."""
        self._stepped_at: int | None = None
        """How many nodes of autograd this thread had made at the last `step()`; `None` after a backward."""
        self._awaits_step = False
        self._options: tuple[dict[str, Any], ...] = ()
        """Of the optimizer's groups, as the last synchronised backward found them; nothing behind its `step()`."""
        self._loaded_before_step = False
        """Whether another state was loaded behind a backward that could update, and in front of its `step()`."""
        self._unmark: Callable[[], object] = lambda: None
        self._failed = ""

    @property
    def replica(self) -> Replica | None:
        """`None` once the module is not replicated any more."""
        return self._replica()

    @property
    def is_alive(self) -> bool:
        return self._optimizer() is not None

    @property
    def _broken(self) -> str:
        """Why the model is of no step."""
        return self._failed or ("" if self.deferred is None else self.deferred.failed)

    @property
    def _scaler(self) -> GradScaler | None:
        return self._given_scaler if self._given_scaler is not None and self._given_scaler.is_enabled() else None

    def install(self) -> None:
        """Stand around the optimizer's `step()`."""
        optimizer = self._alive()
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
            optimizer.register_load_state_dict_post_hook(self._loaded),
        ]
        if self.deferred is not None:
            self._handles += [
                optimizer.register_state_dict_pre_hook(self._arrive),
                optimizer.register_load_state_dict_pre_hook(self._arrive),
            ]
        if self._given_scaler is None:
            self._unmark = optim.mark_for_scaler(optimizer)

    def _arrive(self, *_: Any) -> None:
        if self.deferred is not None:
            self.deferred.arrive()

    def remove(self) -> None:
        """Leave the optimizer alone."""
        self._arrive()
        self._unmark()
        for handle in self._handles:
            handle.remove()

    def describe(self) -> str:
        return str(self.record())

    def record(self) -> OptimizerRecord:
        indices, here = self.indices(), self._sizes()
        nbytes = sum(here[index] for index in indices)
        kept = sum(here[index] for index in indices if index not in self._done)
        way = IN_BACKWARD if self.deferred is None else OVERLAP_FORWARD
        return self._with_what_is_left(OptimizerRecord(type(self._alive()).__name__, way, nbytes, kept_nbytes=kept))

    def _with_what_is_left(self, record: OptimizerRecord) -> OptimizerRecord:
        if self.deferred is None:
            return record
        left = self.deferred.last
        return replace(record, updates=left.updates, left=left.buckets, left_nbytes=left.nbytes, stayed=left.stayed)

    def _sizes(self) -> list[int]:
        """Bytes of each parameter of the module, and so of its gradient."""
        replica = self._replicated()
        return [parameter.numel() * parameter.element_size() for parameter in replica.parameters]

    def released(self) -> None:
        """The optimizer goes on as it is, in `step()`."""
        self._unmark()
        self._options, self._loaded_before_step = (), False
        if self.deferred is not None:
            self.deferred.release()

    def indices(self) -> tuple[int, ...]:
        """The trainable parameters that it updates, by their places in the module, in the optimizer's order."""
        now = [parameter for group in self._alive().param_groups for parameter in group["params"]]
        replica = self._replicated()
        if len(now) != len(self._parameters) or not all(map(operator.is_, now, self._parameters)):
            place = {id(parameter): index for index, parameter in enumerate(replica.parameters)}
            self._parameters = now
            self._steps.forget()
            self._indices = tuple(place[id(each)] for each in now if id(each) in place)
            at = Counter(each.data_ptr() for each in now if each.numel())
            self._alone = frozenset(index for index in self._indices if at[replica.parameters[index].data_ptr()] <= 1)
        return tuple(index for index in self._indices if replica.parameters[index].requires_grad)

    # --- for the engine

    def begin(self) -> None:
        if self.deferred is not None:
            self.deferred.begin()
        if self._broken:
            raise ReductionError(self._broken)
        scaler = self._scaler
        if self._awaits_step and (scaler is None or optim.awaits_update(scaler, self._alive())):
            calls = "step()" if scaler is None else "scaler.step(optimizer) and scaler.update()"
            raise ReductionError(
                "a second backward of a module whose optimizer updates in the backward, before optimizer.step(). Call "
                f"{calls} after each synchronised backward; to accumulate, run all backwards but the last under "
                "no_sync(); if the gradients are not for this optimizer, as those of a GAN's other half, freeze the "
                "parameters for that backward; if another optimizer has taken its place, call "
                "dp_compile.optim.remove_in_backward() on this one."
            )
        self._updated.clear()
        self._loaded_before_step = False

    def wanted(self, *, keep_graph: bool) -> Wanted:
        replica = self._replicated()
        indices = self.indices()
        whole = self._max_norm is not None or self._scaler is not None
        obstacle = ""
        if keep_graph:
            obstacle = "retain_graph=True, the graph may be gone through once more"
        elif replica.uneven is not None:
            obstacle = "inputs may be uneven: gradients are divided after the backward"
        elif replica.config.check_nan:
            obstacle = "check_nan looks at the gradients behind the backward"
        elif whole and (others := self._others(indices)):
            obstacle = f"the norm or the check is over {others} more parameters, not of this module or frozen"
        self._options = () if obstacle else said_of(self._alive())
        if obstacle:
            return Wanted(obstacle=obstacle)
        if whole:
            complex_ones = any(replica.parameters[index].is_complex() for index in indices)
            return Wanted(indices, whole=True) if not complex_ones else Wanted(obstacle="complex parameters")
        real = tuple(index for index in indices if index in self._alone and not replica.parameters[index].is_complex())
        return Wanted(real, crosses=self.deferred is not None)

    def _others(self, indices: Sequence[int]) -> int:
        """How many parameters have a gradient in `step()` that this module's backward does not bring."""
        replica = self._replicated()
        mine = {id(replica.parameters[index]) for index in indices}
        return sum(each.requires_grad or each.grad is not None for each in self._parameters if id(each) not in mine)

    def ended(self) -> None:
        self._awaits_step, self._stepped_at = True, None
        if self._scaler is not None:  # it may leave step() out, but not update()
            optim.note_backward(self._scaler, self._alive())
        self._done = frozenset(self._updated)
        if self.deferred is not None:
            self.deferred.ended()
            self._done |= self.deferred.last.indices
        self._unstepped = self._done

    def interrupted(self, error: BaseException) -> None:
        replica = self.replica
        if self.deferred is not None:
            self.deferred.drop()
        if not self._updated:
            self._options = ()  # nothing has used them: a step may follow that has others, and no backward
            return
        if replica is None or self._broken:
            return
        names = replica.name_list(sorted(self._updated))
        self._failed = (
            f"a backward failed ({type(error).__name__}) after the optimizer had updated {len(self._updated)} of "
            f"{len(self._indices)} parameters in it: {names}. The model is of no step now: load a checkpoint, with "
            "optimizer.load_state_dict() too, which ends this state."
        )

    def left_out(self, error: BaseException) -> None:
        """Nothing follows: each rank updates all by itself."""

    def apply(
        self, bucket: int, indices: Sequence[int], parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]
    ) -> None:
        replica, optimizer = self._replicated(), self._alive()
        mine = [replica.parameters[index] for index in indices]
        check_in_place(replica, indices, parameters)
        with self._steps.only(optimizer, tuple(indices), mine), replica.local.updating(indices):
            for parameter, gradient in zip(mine, gradients, strict=True):
                parameter.grad = gradient
            if not replica.rehearses and self._may_step(optimizer, mine):
                self._updated.update(indices)
                with listeners_of(replica).during(UPDATE):
                    optim.step_without_hooks(optimizer)

    def _may_step(self, optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> bool:
        scaler = self._scaler
        if scaler is not None:
            scaler.unscale_(optimizer)
        if self._max_norm is not None:
            optimizer.total_norm = clip(parameters, self._max_norm)  # type: ignore[attr-defined]
        return scaler is None or not optim.found_inf(scaler, optimizer)

    # --- around step()

    def _before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._check_step(optimizer, args, kwargs)
        self._check_gradients(optimizer)
        if self._max_norm is not None and not self._updated:
            every = [each for group in optimizer.param_groups for each in group["params"]]
            optimizer.total_norm = clip(every, self._max_norm)

    def _check_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_dynamo_compiling():
            _refuse_compiled_step()
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is not None:
            raise ReductionError(
                "optimizer.step() was given a closure, but the optimizer updates in the backward, before step(). Run "
                "the backward yourself and call step() without it."
            )
        if self._broken:
            raise ReductionError(self._broken)
        if self._options and (changed := what_changed(self._options, optimizer)):
            raise ReductionError(
                f"{changed} between the backward and optimizer.step(): the backward has updated already, with what it "
                "found. Set options, and step schedulers, before the backward or behind optimizer.step()."
            )
        if self._loaded_before_step:
            raise ReductionError(
                "a state was loaded into the optimizer between the backward and optimizer.step(): the backward has "
                "updated already, with the state of before. Load before the backward or behind optimizer.step(); a "
                "step that is not to count ends without optimizer.step()."
            )
        if self._given_scaler is None and hasattr(optimizer, "found_inf"):
            raise ReductionError(
                "a GradScaler steps an optimizer that has updated in the backward already, with gradients that were "
                "still scaled. Give it to in_backward(model, optimizer, scaler=scaler)."
            )

    def _check_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse what would be a second update of the same backward, or none at all."""
        replica = self.replica
        if replica is None:
            return
        if again := [index for index in sorted(self._unstepped) if replica.parameters[index].grad is not None]:
            raise ReductionError(
                f"{replica.name_list(again)} was updated in the backward, and has another gradient since: step() would "
                "update it twice. Between the backward and step() run no backward under no_sync() and set no .grad. To "
                "change reduced gradients, use the optimizer without in_backward(), or a comm hook; to clip, max_norm."
            )
        gradients = any(each.grad is not None for group in optimizer.param_groups for each in group["params"])
        if self._stepped_at == autograd.nodes_made() and not gradients:
            raise ReductionError(
                "optimizer.step() is called twice after one backward, which has updated already. Call it once for each "
                "synchronised backward."
            )

    def check_clipping(self, index: int) -> None:
        """Whether the gradient of a parameter is still to be used.

        Raises:
            ReductionError: the last backward has used it.
        """
        replica = self.replica
        if replica is not None and index in self._unstepped:
            raise ReductionError(
                f"clip_grad_norm_(): the backward has updated {replica.name_list([index])} already, without clipping. "
                "Leave the call out and pass in_backward(model, optimizer, max_norm=...)."
            )

    def _after_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._awaits_step, self._options, self._unstepped = False, (), frozenset()
        self._stepped_at = autograd.nodes_made()
        self._updated.clear()
        if self.deferred is not None:
            self.deferred.step_ended()
        if (replica := self.replica) is not None:
            # As after a backward that has updated: the next one starts anew in every way, on every rank.
            for index in self.indices():
                replica.parameters[index].grad = None

    def _has_another_state(self) -> None:
        # A rank that has updated has done so with the state before, one that falls back would with that of now.
        self._loaded_before_step = bool(self._options) and not self._broken
        self._failed, self._awaits_step, self._options = "", False, ()
        self._unstepped, self._stepped_at = frozenset(), None

    def _loaded(self, optimizer: torch.optim.Optimizer) -> None:
        self._has_another_state()
        if self.deferred is not None:
            self.deferred.failed = ""
        self._updated.clear()

    def _replicated(self) -> Replica:
        replica = self.replica
        assert replica is not None
        return replica

    def _alive(self) -> torch.optim.Optimizer:
        optimizer = self._optimizer()
        assert optimizer is not None
        return optimizer
