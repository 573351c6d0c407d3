"""Updates that a backward has left: kept until their gradients arrive, done before anybody reads the parameters.

Readers wait (`docs/optimizers.md` lists them): a forward in one graph of the backend `dp_compile` by an op before each
first read; any other forward, methods of the module that hand out parameters, calls of its parts, the next backward and
the optimizer's `state_dict()` for everything.

A forward of another backend is refused where it is traced. Code that reads a parameter past all of these calls
`synchronize()` before.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import nn

from dp_compile._torch import autograd, compiler, optim
from dp_compile.engine.events import NO_LISTENERS, UPDATE, WAIT, Listeners, listeners_of
from dp_compile.engine.plan_sync import agree_in_call, is_of_other_ranks
from dp_compile.engine.replica import Replica, Revision
from dp_compile.errors import ConfigError, ReductionError
from dp_compile.optim.partial_steps import PartialSteps, options_of
from dp_compile.passes.crossing import PART_STARTS, START, in_flight
from dp_compile.passes.reduction import EagerOps, restored, view_of
from dp_compile.plan.buckets import ALIGNMENT_BYTES, Bucket, Layout
from dp_compile.plan.cost import nominal_cost
from dp_compile.plan.crossing import plan_crossing
from dp_compile.plan.planner import Planned
from dp_compile.replication.module import Installed, behind, replica_of

BACKEND: Final = "dp_compile"
_lock = threading.RLock()


def synchronize(model: nn.Module) -> None:
    """Do now what an optimizer with `overlap_forward=True` has left for the next forward.

    Raises:
        ModuleError: the module is not replicated.
    """
    replica_of(model).arrive()


class Deferred:
    """What one optimizer has in flight of one module.

    Args:
        replica: the module.
        optimizer: held only as long as something is in flight.
        steps: its steps over some parameters.
    """

    def __init__(self, replica: Replica, optimizer: torch.optim.Optimizer, steps: PartialSteps) -> None:
        self._replica, self._optimizer, self._steps = weakref.ref(replica), weakref.ref(optimizer), steps
        self._options: tuple[dict[str, Any], ...] = ()
        self._left: list[Pending] = []
        self.last = DeferredWork()
        """What the last backward did not wait for."""
        self.failed = ""
        """Why an update was not done, or not all of it: the model is of no step."""
        self._stays = False
        """The last forward was one graph that waits for each parameter by itself: the next one may be so too."""

    def begin(self) -> None:
        """A backward begins: what nobody has read is done, and steps are as the optimizer's options are now."""
        self.arrive()
        optimizer = self._optimizer()
        self._options = () if optimizer is None else options_of(optimizer)

    def leave(
        self, buckets: Sequence[tuple[int, Bucket]], indices: Sequence[int], launched: Sequence[torch.Tensor]
    ) -> None:
        """Keep what is on its way, and what it updates."""
        replica, optimizer = self._replica(), self._optimizer()
        assert replica is not None
        assert optimizer is not None
        on_its_way = tuple((*each, tensor) for each, tensor in zip(buckets, launched, strict=True))
        left = PendingUpdate(
            deferred=self, replica=replica, indices=tuple(indices), buckets=tuple(number for number, _ in buckets),
            told=listeners_of(replica), optimizer=optimizer, steps=self._steps, options=self._options,
            on_its_way=on_its_way,
        )  # fmt: skip
        if replica.rehearses:
            left.drop()
        else:
            self.keep(left)

    def keep(self, left: Pending) -> None:
        """Keep something until it arrives, or a reader waits for it."""
        self._left.append(left)

    def ended(self) -> None:
        """The backward has ended: from here on others may read."""
        self.last = DeferredWork(
            len(self._left),
            tuple(sorted({number for left in self._left for number in left.buckets})),
            sum(left.nbytes for left in self._left),
            frozenset(index for left in self._left for index in left.indices),
        )
        for left in self._left:
            left.depart()
        if self._left and (root := self._left[0].replica.outline.root()) is not None:
            _put_hooks(root, self._left[0].replica)

    def forward_runs(self, *, whole: bool) -> None:
        self._stays = whole

    def step_ended(self) -> None:
        """The step of the last backward has: its updates stay in flight if the next forward waits for them."""
        self.last = replace(self.last, stayed=self._stays)
        if not self._stays:
            self.arrive()
        self._stays = False  # Each forward says it anew: one that breaks before its first graph says nothing.

    @property
    def has_in_flight(self) -> bool:
        return any(not each.is_over for each in self._left)

    def arrive(self) -> None:
        """Let nothing be in flight."""
        left, self._left = self._left, []
        try:
            for each in left:
                each.arrive()
        except BaseException:
            if not self.failed:  # nothing was written: the next read tries again
                self._left = [each for each in left if not each.is_over]
                raise
            for each in left:
                with contextlib.suppress(RuntimeError):  # of a lost rank, as what is raised is: said once, by name
                    each.drop()
            raise

    def release(self) -> None:
        """The module is not replicated any more: it is left as it was."""
        self.arrive()
        replica = self._replica()
        root = None if replica is None else replica.outline.root()
        if root is not None:
            _take_hooks_off(root)

    def drop(self) -> None:
        """Wait for what is in flight, and update nothing: the backward has failed."""
        left, self._left = self._left, []
        for each in left:
            each.drop()


@dataclass(frozen=True, slots=True)
class DeferredWork:
    """What one backward did not wait for.

    `updates`: how many. `buckets`: their numbers in the plan. `nbytes`: of what was on its way. `indices`: of the
    parameters. `stayed`: it was so behind `step()` too; `None`: there was none yet.
    """

    updates: int = 0
    buckets: tuple[int, ...] = ()
    nbytes: int = 0
    indices: frozenset[int] = frozenset()
    stayed: bool | None = None


@dataclass(eq=False, slots=True, kw_only=True)
class Pending(ABC):
    """What a backward has left of some parameters. Holds them as long as that is so.

    `indices`: of the parameters. `buckets`: by their numbers in the plan, those that it is of. `told`: who hears of the
    backward.
    """

    deferred: Deferred
    replica: Replica
    indices: tuple[int, ...]
    buckets: tuple[int, ...]
    told: Listeners = NO_LISTENERS
    addresses: tuple[int, ...] = ()
    """Of its parameters, when it was left."""
    versions: tuple[tuple[int, int], ...] = ()
    """Where each of them lay then, and how often it had been written to."""
    is_over: bool = False

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Of what is on its way."""

    @abstractmethod
    def wait(self) -> None:
        """Let nothing be on its way."""

    @abstractmethod
    def finish(self) -> None:
        """Wait, and let the parameters be those of the step."""

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [self.replica.parameters[index] for index in self.indices]

    def written_to(self) -> object:
        """Equal as long as nothing of what `finish` writes to has changed; `None`: it cannot be tried twice."""
        return None

    def _fly(self) -> None:
        self.is_over = False
        in_flight.update(dict.fromkeys(self.addresses, self))

    def depart(self) -> None:
        self.addresses = tuple(parameter.data_ptr() for parameter in self.parameters if parameter.numel())
        self._fly()
        self.versions = self._versions_now()

    def _versions_now(self) -> tuple[tuple[int, int], ...]:
        return tuple((parameter.data_ptr(), autograd.version_of(parameter)) for parameter in self.parameters)

    def arrive(self) -> None:
        with _lock:
            if self.is_over:
                return
            self._land()
            before = None
            try:
                self._check_not_written()
                before = self.written_to()
                self._finish()
            except BaseException as error:
                if before is not None and before == self.written_to() and not is_of_other_ranks(error):
                    self._fly()
                    raise
                names = self.replica.name_list(self.indices)
                self.deferred.failed = self.deferred.failed or (
                    f"the update of {names} failed ({type(error).__name__}), which was left for the next forward. "
                    "The model is of no step now: load a checkpoint, with optimizer.load_state_dict() too, which ends "
                    "this state."
                )
                raise

    def drop(self) -> None:
        with _lock:
            if not self.is_over:
                self._land()
                self.wait()

    def _land(self) -> None:
        """Nobody comes for it any more."""
        self.is_over = True
        for address in self.addresses:
            in_flight.pop(address, None)

    def _check_not_written(self) -> None:
        """What was written would be lost, or get an update on top that belongs to what was there before.

        Raises:
            ReductionError: somebody has written to parameters.
        """
        pairs = zip(self.indices, self.versions, self._versions_now(), strict=True)
        written = [index for index, before, now in pairs if before != now]
        if written:
            raise ReductionError(
                f"{self.replica.name_list(written)} changed while an update was in flight (overlap_forward=True). "
                "Call dp_compile.optim.synchronize(model) before parameters are changed past the module's methods."
            )

    def _finish(self) -> None:
        numbers = " and ".join(map(str, self.buckets))
        # The first read may be in inference mode; what the optimizer remembers must not be of that. Or in Dynamo, which
        # looks at the module's buffers while it traces; under a mode of fake tensors; or in a transform of torch.func.
        with (
            compiler.not_compiling(),
            autograd.as_outermost_code(),
            autograd.named_range(f"dp_compile::bucket {numbers} update, in the next forward"),
            torch.inference_mode(mode=False),
            torch.no_grad(),
            self.replica.local.updating(self.indices),
        ):
            self.finish()


@dataclass(eq=False, slots=True, kw_only=True)
class PendingUpdate(Pending):
    """An update whose gradients are on their way."""

    optimizer: torch.optim.Optimizer
    steps: PartialSteps
    options: tuple[dict[str, Any], ...]
    on_its_way: tuple[tuple[int, Bucket, torch.Tensor], ...]
    """Buckets with their numbers in the plan, and what each was launched with."""

    @property
    def nbytes(self) -> int:
        return sum(launched.nbytes for _, _, launched in self.on_its_way)

    def written_to(self) -> object:
        states = [self.optimizer.state.get(parameter, {}) for parameter in self.parameters]
        tensors = [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
        return self._versions_now(), [(id(each), autograd.version_of(each)) for each in tensors]

    def wait(self) -> None:
        for _, _, launched in self.on_its_way:
            torch.ops._c10d_functional.wait_tensor.default(launched)

    def finish(self) -> None:
        parameters, gradients = self.parameters, self._reduced()
        kept = [parameter.grad for parameter in parameters]
        with (
            self.told.during(UPDATE),
            self.steps.only(self.optimizer, self.indices, parameters, options=self.options),
        ):
            for index, parameter in zip(self.indices, parameters, strict=True):
                parameter.grad = gradients[index]
            optim.step_without_hooks(self.optimizer)
        for parameter, grad in zip(parameters, kept, strict=True):
            parameter.grad = grad

    def _reduced(self) -> dict[int, torch.Tensor]:
        """The gradients by index in the module, once they are here."""
        gradients: dict[int, torch.Tensor] = {}
        for number, bucket, launched in self.on_its_way:
            with self.told.during(WAIT, number):
                tensor: torch.Tensor = torch.ops._c10d_functional.wait_tensor.default(launched)
            ops = EagerOps(bucket, (), tensor.device)
            _, post_scale = ops.factors(bucket.key.reduction)
            (tensor,) = restored(bucket, [tensor], post_scale, ops)
            for member, place in zip(bucket.members, bucket.places, strict=True):
                gradients[member.gradient.index] = view_of(member, tensor, place.offset)
        return gradients


# --- who reads --------------------------------------------------------------------------------------------------------


def _arrive_at(module: nn.Module) -> None:
    if torch.compiler.is_dynamo_compiling():
        if not _code_waits():
            _arrive_between_graphs(module)
    elif in_flight:
        replica_of(module).arrive()


@compiler.constant
def _code_waits() -> bool:
    """Run while Dynamo traces: whether code of the backend that it traces for waits for what it reads."""
    return compiler.traces_for(BACKEND)


@compiler.untraced("updates of parameters are waited for")
def _arrive_between_graphs(module: nn.Module) -> None:
    replica_of(module).arrive()


class _Reads(nn.Module):
    """What a module does while updates of it may be in flight: whatever hands out its parameters waits for them."""

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        _arrive_at(self)
        return super().named_parameters(*args, **kwargs)

    def synchronize(self) -> None:
        """Do now what the optimizer has left for the next forward."""
        _arrive_at(self)

    def get_parameter(self, target: str) -> nn.Parameter:
        _arrive_at(self)
        return super().get_parameter(target)

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """What any module around this one goes through to find its parameters."""
        _arrive_at(self)
        found: Iterator[tuple[str, nn.Module]] = super().named_modules(*args, **kwargs)
        return found

    def apply(self, fn: Any) -> Any:
        _arrive_at(self)
        return super().apply(fn)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        _arrive_at(self)
        return super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]

    def __reduce_ex__(self, protocol: Any) -> Any:
        _arrive_at(self)
        _take_hooks_off(self)  # A pickle that has them asks for this package. The next forward brings them back.
        return super().__reduce_ex__(protocol)


_classes: weakref.WeakValueDictionary[type, type] = weakref.WeakValueDictionary()


def watch(model: nn.Module, deferred: Deferred) -> None:
    """Let whatever reads parameters of a replicated module wait for them. When the module goes, nothing waits any more.

    Code that was compiled of its parts until now does not wait, and torch does not look at hooks when it asks whether
    code still fits (`skip_nnmodule_hook_guards`, torch 2.13): all code is forgotten. The module's class becomes another
    one.
    """
    root = behind(model)
    kind = type(root)
    weakref.finalize(root, deferred.arrive).atexit = False
    compiler.forget_compiled()
    if issubclass(kind, _Reads):
        return
    found = _classes.get(kind)
    if found is None:
        body = {"__module__": kind.__module__, "__doc__": kind.__doc__, "forward": _forward_of(kind)}
        found = _classes[kind] = type(kind.__name__, (_Reads, kind), body)
    root.__class__ = found
    _put_hooks(root, replica_of(root))


def _forward_of(kind: type[nn.Module]) -> Callable[..., Any]:
    """The forward of a class, which waits for everything wherever it is not compiled itself.

    In the forward and not in front of it: Dynamo compiles hooks by themselves, and may then leave the forward alone. It
    was recompiled too often, say, or breaks before anything is computed.
    """
    plain = kind.forward

    # Not its attributes: torch.compile leaves some on what it decorates, and Dynamo would take this for that.
    @functools.wraps(plain, updated=())
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            _refuse_other_backends()
            START(self.training)
        else:
            _starts(self)
        return plain(self, *args, **kwargs)

    # Code of its own: how often it was compiled is counted for all that share it.
    made: Any = forward
    made.__code__ = made.__code__.replace(co_qualname=f"{kind.__qualname__}.forward")
    return forward


@compiler.untraced("updates of parameters are waited for")
def _starts(module: nn.Module) -> None:
    replica = replica_of(module)
    _put_hooks(behind(module), replica)  # before its parts are compiled
    replica.arrive()
    for each in replica.after.updates:
        if each.deferred is not None:
            each.deferred.forward_runs(whole=True)  # the next one comes here too, or says what it is


def plan_for(replica: Replica) -> None:
    """Let buckets be launched in the order in which the next forward needs them, from now on; on every rank.

    Raises:
        DesyncError: another rank does not, or has made another plan.
    """
    if replica.strategy == "single":
        return
    group = replica.group
    layout = Layout(ALIGNMENT_BYTES) if replica.strategy == "optimal" else None
    cost = replica.config.cost or nominal_cost(group.backend, group.world_size, group.ranks_inside)
    replica.revisions.for_next_forward = True
    # When buckets are launched says little of when gradients are ready: launches wait for each other.
    replica.revisions.due = tuple(each for each in replica.revisions.due if each is not Revision.FROM_LAUNCHES)
    as_it_is = Planned(replica.plan, replica.certificate)
    planned = plan_crossing(as_it_is, replica.ready, cost, layout, lanes=group.backend.lanes)
    said = {"the plan with overlap_forward": planned.plan.signature()}
    agree_in_call(replica, said, "in_backward(overlap_forward=True)")
    replica.adopt(planned, replica.ready)


class _Waits(Installed):
    """In front of a call that is not compiled, and of state dicts; of the module and of each part of it.

    Where the module is compiled its forward waits by itself, for less; a part's does not.
    """

    def __init__(self, replica: Replica, *, of_part: bool) -> None:
        self._replica, self._of_part = weakref.ref(replica), of_part

    def __call__(self, *_: Any) -> None:
        if torch.compiler.is_dynamo_compiling():
            _refuse_other_backends()
            if self._of_part:  # Dynamo may compile this by itself, and leave the part alone (torch's own, as `Linear`)
                PART_STARTS()
        elif in_flight:
            self._arrive()

    @compiler.untraced("updates of parameters are waited for")
    def _arrive(self) -> None:
        replica = self._replica()
        if replica is not None:
            replica.arrive()


@compiler.constant
def _refuse_other_backends() -> bool:
    """Run while Dynamo traces.

    Raises:
        ConfigError: what it traces is for a backend that does not let the code wait.
    """
    if not compiler.traces_for(BACKEND):
        raise ConfigError(
            "a module whose optimizer was given overlap_forward=True is compiled by a backend that would read "
            f"parameters before they are updated. Use torch.compile(model, backend={BACKEND!r})."
        )
    return True


_KEY: Final = -1
"""Not one of torch's keys, which count up from 0: the hook is there once, and in front of all."""


def _put_hooks(root: nn.Module, replica: Replica) -> None:
    if _KEY in root._forward_pre_hooks:
        return
    for hooks in _hooks_of(root):
        # Not `move_to_end`: guards of torch 2.11 number hooks by `dict.keys`, for which the first one stays the first.
        others = list(hooks.items())
        hooks.clear()
        hooks[_KEY] = _Waits(replica, of_part=hooks is not root._forward_pre_hooks)
        hooks.update(others)


def _take_hooks_off(root: nn.Module) -> None:
    for hooks in _hooks_of(root):
        hooks.pop(_KEY, None)


def _hooks_of(root: nn.Module) -> Iterator[OrderedDict[int, Any]]:
    for _, module in nn.Module.named_modules(root):  # `root.modules()` waits
        for name in ("_forward_pre_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks"):
            yield getattr(module, name)
