"""How readers of parameters wait for deferred updates in flight: they first call `complete()` of each update.

While an optimizer defers updates of a module, these readers wait:

    code of the backend `dp_compile`    an op before each first read (`passes/crossing.py`, `forward.py`)
    the module's uncompiled forward     at its start, for all parameters
    a part's forward, state dicts       a hook of each part, before all other hooks
    `parameters()`, `to()`, pickles     methods of a generated subclass of the module's class

Tracing for another backend raises an error. Any other code that reads a parameter must call `synchronize()` first.
"""

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import torch
from torch import nn

from dp_compile._torch import compiler
from dp_compile.errors import ConfigError
from dp_compile.passes.crossing import START, in_flight
from dp_compile.replica.replica import Replica
from dp_compile.replication.module import Installed, inner_module, replica_of

BACKEND: Final = "dp_compile"
METHODS: Final = ("named_parameters", "get_parameter", "named_modules", "apply", "_apply", "__reduce_ex__")
"""Methods that give access to parameters. An enclosing module reaches them through `named_modules`."""
_KEY: Final = -1  # the key of our hook in each dictionary of hooks; torch's keys count up from 0
_classes: weakref.WeakValueDictionary[type, type] = weakref.WeakValueDictionary()


def synchronize(model: nn.Module) -> None:
    """Complete the updates that an optimizer with `overlap_forward=True` has deferred to the next forward.

    Raises:
        UnsupportedModuleError: the module is not replicated.
        ReductionError: a parameter was changed while its update was in flight.
    """
    replica_of(model).wait_for_updates()


def let_readers_wait(model: nn.Module, complete: Callable[[], None]) -> None:
    """Make readers of a replicated module's parameters wait: replace its class by a subclass, and install hooks.

    `complete` is called when the module is freed, because no reader waits afterwards. Drops all compiled code: that of
    submodules does not wait, and Dynamo does not guard on new hooks (`skip_nnmodule_hook_guards`, torch 2.13).
    """
    root = inner_module(model)
    kind = type(root)
    weakref.finalize(root, complete).atexit = False
    compiler.forget_compiled()
    if kind in _classes.values():
        return
    found = _classes.get(kind)
    if found is None:
        body: dict[str, Any] = {name: _waits_first(getattr(kind, name)) for name in METHODS}
        body |= {"__module__": kind.__module__, "__doc__": kind.__doc__, "synchronize": _wait_for}
        found = _classes[kind] = type(kind.__name__, (kind,), body | {"forward": _forward_of(kind)})
    root.__class__ = found
    put_hooks(root, replica_of(root))


def _waits_first(plain: Callable[..., Any]) -> Callable[..., Any]:
    pickles = plain.__name__ == "__reduce_ex__"

    @functools.wraps(plain, updated=())
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        _wait_for(self)
        if pickles:
            take_hooks_off(self)  # Unpickling them would need this package. `Deferred.ended` restores them.
        return plain(self, *args, **kwargs)

    return method


def _wait_for(module: nn.Module) -> None:
    """Complete the updates of this module that optimizers have deferred to the next forward."""
    if torch.compiler.is_dynamo_compiling():
        if not _code_waits():
            _arrive(module)
    elif in_flight:
        replica_of(module).wait_for_updates()


@compiler.untraced("it waits for parameter updates in flight")
def _arrive(module: nn.Module) -> None:
    replica_of(module).wait_for_updates()


def _forward_of(kind: type[nn.Module]) -> Callable[..., Any]:
    """Return a forward for a subclass of `kind` that waits for all parameters, except in compiled code.

    A hook cannot do this: Dynamo compiles hooks separately, and may leave the forward uncompiled, at the recompile
    limit or if a graph break precedes all computation."""
    plain = kind.forward

    # Copy no attributes: a mark of torch.compile on `kind.forward` would make Dynamo treat this function as marked.
    @functools.wraps(plain, updated=())
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            _refuse_other_backends()
            START(self.training, False)
        else:
            _starts(self)
        return plain(self, *args, **kwargs)

    # A code object for each class, because Dynamo counts recompilations per code object.
    made: Any = forward
    made.__code__ = made.__code__.replace(co_qualname=f"{kind.__qualname__}.forward")
    return forward


@compiler.untraced("it waits for parameter updates in flight")
def _starts(module: nn.Module) -> None:
    replica = replica_of(module)
    put_hooks(inner_module(module), replica)  # before its parts are compiled
    replica.wait_for_updates()
    note_forward([replica], whole=True)  # the next forward waits here too, or in its graphs, which set `whole`


def note_forward(replicas: Iterable[Replica], *, whole: bool) -> None:
    """Record that a forward of these modules begins. `whole`: all code of the forward waits for updates."""
    for replica in replicas:
        for each in replica.after.updates:
            if each.deferred is not None:
                each.deferred.forward_runs(whole=whole)


class _Waits(Installed):
    """Hook that waits before an uncompiled call and before state dicts, of the module and of each part. A compiled
    forward of the module waits by itself, at lower cost; a part's does not."""

    def __init__(self, replica: Replica, *, of_part: bool) -> None:
        self._replica, self._of_part = weakref.ref(replica), of_part

    def __call__(self, *_: Any) -> None:
        if torch.compiler.is_dynamo_compiling():
            _refuse_other_backends()
            if self._of_part:  # Dynamo may compile this hook separately, and skip the part if it is torch's (`Linear`)
                START(True, True)
        elif in_flight:
            self._arrive()

    @compiler.untraced("it waits for parameter updates in flight")
    def _arrive(self) -> None:
        replica = self._replica()
        if replica is not None:
            replica.wait_for_updates()


@compiler.constant
def _code_waits() -> bool:
    """While Dynamo traces: return whether code of the chosen backend waits for the parameters that it reads."""
    return compiler.traces_for(BACKEND)


@compiler.constant
def _refuse_other_backends() -> bool:
    """While Dynamo traces: raise if code of the chosen backend does not wait for parameter updates."""
    if not compiler.traces_for(BACKEND):
        raise ConfigError(
            "a module whose optimizer was given overlap_forward=True is compiled by a backend that would read "
            f"parameters before they are updated. Use torch.compile(model, backend={BACKEND!r})."
        )
    return True


def put_hooks(root: nn.Module, replica: Replica) -> None:
    if _KEY in root._forward_pre_hooks:
        return
    for hooks in _hooks_of(root):
        # Not `move_to_end`: guards of torch 2.11 number hooks by `dict.keys`, which keeps the insertion order.
        others = list(hooks.items())
        hooks.clear()
        hooks[_KEY] = _Waits(replica, of_part=hooks is not root._forward_pre_hooks)
        hooks.update(others)


def take_hooks_off(root: nn.Module) -> None:
    for hooks in _hooks_of(root):
        hooks.pop(_KEY, None)


def _hooks_of(root: nn.Module) -> Iterator[OrderedDict[int, Any]]:
    for _, module in nn.Module.named_modules(root):  # `root.modules()` waits
        for name in ("_forward_pre_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks"):
            yield getattr(module, name)
