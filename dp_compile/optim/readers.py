"""Readers of parameters wait for what is in flight of them, by one call: `complete()`.

Where it is called while an optimizer defers updates of a module:

    code of the backend `dp_compile`    an op in front of each first read (`passes/crossing.py`, `forward.py`)
    the module's forward                at its start, for everything, where it is not compiled
    a part's forward, state dicts       a hook of each part, in front of all others
    `parameters()`, `to()`, pickles     methods of the module, by a class made from its class

Code of another backend is refused where it is traced. Code that reads a parameter past all of these calls
`synchronize()` before.
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
"""Of a module, those that hand out parameters; `named_modules` is what a module around this one goes through."""
_KEY: Final = -1
"""Not one of torch's keys, which count up from 0: the hook is there once, and in front of all."""
_classes: weakref.WeakValueDictionary[type, type] = weakref.WeakValueDictionary()


def synchronize(model: nn.Module) -> None:
    """Do now what an optimizer with `overlap_forward=True` has left for the next forward.

    Raises:
        UnsupportedModuleError: the module is not replicated.
    """
    replica_of(model).wait_for_updates()


def let_readers_wait(model: nn.Module, complete: Callable[[], None]) -> None:
    """Let readers of parameters of a replicated module wait for them. The module's class becomes another one.

    When the module goes, `complete` is called: nothing waits for it any more.

    Code that was compiled of its parts until now does not wait, and torch does not look at hooks when it asks whether
    code still fits (`skip_nnmodule_hook_guards`, torch 2.13): all code is forgotten.
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
            take_hooks_off(self)  # A pickle that has them asks for this package. The next forward brings them back.
        return plain(self, *args, **kwargs)

    return method


def _wait_for(module: nn.Module) -> None:
    """Do now what the optimizer has left for the next forward."""
    if torch.compiler.is_dynamo_compiling():
        if not _code_waits():
            _arrive(module)
    elif in_flight:
        replica_of(module).wait_for_updates()


@compiler.untraced("updates of parameters are waited for")
def _arrive(module: nn.Module) -> None:
    replica_of(module).wait_for_updates()


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
            START(self.training, False)
        else:
            _starts(self)
        return plain(self, *args, **kwargs)

    # Its own code object: how often it was compiled is counted for all that share one.
    made: Any = forward
    made.__code__ = made.__code__.replace(co_qualname=f"{kind.__qualname__}.forward")
    return forward


@compiler.untraced("updates of parameters are waited for")
def _starts(module: nn.Module) -> None:
    replica = replica_of(module)
    put_hooks(inner_module(module), replica)  # before its parts are compiled
    replica.wait_for_updates()
    note_forward([replica], whole=True)  # the next one comes here too, or sets it


def note_forward(replicas: Iterable[Replica], *, whole: bool) -> None:
    """A forward of these modules begins; `whole`: nothing of it is outside of the code that waits for updates."""
    for replica in replicas:
        for each in replica.after.updates:
            if each.deferred is not None:
                each.deferred.forward_runs(whole=whole)


class _Waits(Installed):
    """In front of a call that is not compiled, and of state dicts; of the module and of each part of it. Where the
    module is compiled its forward waits by itself, for less; a part's does not."""

    def __init__(self, replica: Replica, *, of_part: bool) -> None:
        self._replica, self._of_part = weakref.ref(replica), of_part

    def __call__(self, *_: Any) -> None:
        if torch.compiler.is_dynamo_compiling():
            _refuse_other_backends()
            if self._of_part:  # Dynamo may compile this by itself, and leave the part alone (torch's own, as `Linear`)
                START(True, True)
        elif in_flight:
            self._arrive()

    @compiler.untraced("updates of parameters are waited for")
    def _arrive(self) -> None:
        replica = self._replica()
        if replica is not None:
            replica.wait_for_updates()


@compiler.constant
def _code_waits() -> bool:
    """Run while Dynamo traces: whether code of the backend that it traces for waits for what it reads."""
    return compiler.traces_for(BACKEND)


@compiler.constant
def _refuse_other_backends() -> bool:
    """Run while Dynamo traces: refuse a backend that does not let the code wait."""
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
        # Not `move_to_end`: guards of torch 2.11 number hooks by `dict.keys`, for which the first one stays the first.
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
