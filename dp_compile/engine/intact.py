"""Is a module still the one that was replicated? Parameters may be replaced, added, unfrozen or moved later.

A captured backward is looked at when its graph or the tensors in it are new (`hooks.check_gradients_have_hooks`,
`compilation`); every other backward before it runs. To walk through a large module takes milliseconds. It is done when
the module holds other objects than at the last walk, which a short look tells; a backward of other modules costs that
look only if it has parameters that were not met before.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Final

import torch
from torch import nn

from dp_compile.engine.module_names import fully_qualified
from dp_compile.engine.owners import owners
from dp_compile.engine.replica import Replica
from dp_compile.errors import ReductionError

_FROZEN: Final = (
    "It was frozen (requires_grad=False) when replicate() was called, so it has no hook. Unfreeze before replicate()."
)
_REPLACED: Final = (
    "The parameter was replaced after replicate() was called, so the new one has no hook. Copy values into the old one "
    "(parameter.data.copy_()), or replace it before replicate()."
)
_ADDED: Final = (
    "The parameter was added after replicate() was called, so it has no hook. Add it before replicate(), or call "
    "unreplicate() and replicate() again."
)
_SHARE: Final = 1e-3
"""The part of its time that a process may spend on looking at parameters that were met before."""


@dataclass(frozen=True, slots=True)
class _Look:
    """What a module holds at one moment. Equal looks: nothing that is checked here has changed between them."""

    modules: tuple[weakref.ref[nn.Module], ...] = field(compare=False)
    held: list[int]
    """How many modules are alive, which makes identities safe; parameters and submodules by identity."""
    trainable: list[bool]
    kinds: list[Any]
    """Dtypes and devices of the parameters that were replicated."""
    replicas: int


@dataclass(slots=True)
class _Others:
    """Parameters that were met in backwards, and are not of the module."""

    known: dict[int, weakref.ref[torch.Tensor]] = field(default_factory=dict)
    look: _Look | None = None
    look_again_at: float = 0.0

    def add(self, tensors: Collection[torch.Tensor]) -> None:
        self.known = {key: ref for key, ref in self.known.items() if ref() is not None}
        self.known.update((id(tensor), weakref.ref(tensor)) for tensor in tensors)


_intact: Final[weakref.WeakKeyDictionary[Replica, _Look]] = weakref.WeakKeyDictionary()
"""The look at each module when it was found intact."""
_others: Final[weakref.WeakKeyDictionary[Replica, _Others]] = weakref.WeakKeyDictionary()


def check_intact(replica: Replica) -> None:
    """Compare the module with what was replicated.

    Raises:
        ReductionError: a parameter was replaced, added, unfrozen or moved.
    """
    if not replica.config.check_reductions:
        return
    before = _intact.get(replica)
    if before is not None and _look(replica, before.modules) == before:
        return
    _check(replica)
    _intact[replica] = _look(replica, _modules(replica))


def _modules(replica: Replica) -> tuple[weakref.ref[nn.Module], ...]:
    root = replica.outline.root()
    modules = [] if root is None else list(root.modules())
    modules += [owner for place in replica.parameter_places if (owner := place.owner()) is not None]
    return tuple(map(weakref.ref, dict.fromkeys(modules)))


def _look(replica: Replica, modules: tuple[weakref.ref[nn.Module], ...]) -> _Look:
    """Half a millisecond for a thousand modules."""
    alive = [module for ref in modules if (module := ref()) is not None]
    parameters = [each for module in alive for each in module._parameters.values() if each is not None]
    children = [id(child) for module in alive if (below := module._modules) for child in below.values()]
    held = [len(alive), *map(id, parameters), *children]
    kinds = [*map(attrgetter("dtype"), replica.parameters), *map(attrgetter("is_cpu"), replica.parameters)]
    return _Look(modules, held, list(map(attrgetter("requires_grad"), parameters)), kinds, len(owners))


def _check(replica: Replica) -> None:
    check_not_moved(replica)
    _refuse(_FROZEN, [name for name, parameter in replica.frozen if parameter.requires_grad])
    _refuse(_REPLACED, [name for name, _ in _strangers(replica)])
    _refuse(_ADDED, [name for name, _ in _added(replica)])


def check_not_moved(replica: Replica) -> None:
    """Compare dtypes and devices with those of the plan.

    Raises:
        ReductionError: a parameter has another dtype, or is on another type of device.
    """
    for gradient in replica.plan.gradients:
        if gradient.index == len(replica.parameters):
            continue
        parameter = replica.parameters[gradient.index]
        dtype, device = str(parameter.dtype.to_real()).removeprefix("torch."), parameter.device.type
        if (dtype, device) != (gradient.key.dtype, gradient.key.device):
            change = (
                f"{gradient.name} is on {device}, it was on {gradient.key.device}"
                if device != gradient.key.device
                else f"{gradient.name} is {dtype}, it was {gradient.key.dtype}"
            )
            raise ReductionError(
                f"{change} when replicate() was called. Move or convert the module before replicate(), or call "
                "unreplicate(), change it, and call replicate() again."
            )


def refuse_unreduced(replica: Replica, accumulated: Collection[torch.Tensor]) -> None:
    """Refuse gradients of the module that no hook reduces.

    Args:
        accumulated: tensors that get a gradient and have no hook of the replica.

    Raises:
        ReductionError: one of them was frozen when the module was replicated, or replaced a parameter since, or was
            added since.
    """
    others = _others.get(replica) or _others.setdefault(replica, _Others())
    known, start_s = others.known, time.monotonic()
    new = [tensor for tensor in accumulated if (ref := known.get(id(tensor))) is None or ref() is not tensor]
    if not new and start_s < others.look_again_at:
        return
    look = _look(replica, _modules(replica))
    if look != others.look:
        new = list(accumulated)
    ours = {*look.held, *(id(parameter) for _, parameter in replica.frozen)}
    _refuse_those(replica, {id(tensor) for tensor in new} & ours)
    others.look = look
    others.add(new)
    others.look_again_at = start_s + (time.monotonic() - start_s) / _SHARE


def _refuse_those(replica: Replica, present: Collection[int]) -> None:
    """Refuse gradients of tensors with these identities."""
    if not present:
        return
    _refuse(_FROZEN, [name for name, parameter in replica.frozen if id(parameter) in present])
    _refuse(_REPLACED, [name for name, parameter in _strangers(replica) if id(parameter) in present])
    _refuse(_ADDED, [name for name, parameter in _added(replica) if id(parameter) in present])


def _refuse(why: str, names: Sequence[str]) -> None:
    if names:
        raise ReductionError(f"not reduced: {', '.join(names[:8])}. {why}")


def _strangers(replica: Replica) -> Iterator[tuple[str, nn.Parameter]]:
    """Trainable parameters that stand where others stood when the module was replicated."""
    known = _known(replica)
    for place in replica.parameter_places:
        parameter = place.find()
        if parameter is not None and parameter.requires_grad and id(parameter) not in known:
            yield place.name, parameter


def _added(replica: Replica) -> Iterator[tuple[str, nn.Parameter]]:
    """Trainable parameters under new names, as adapters bring them. Not those that somebody else keeps in step."""
    outline, known = replica.outline, _known(replica)
    root = outline.root()
    left_alone = {id(module) for each in outline.left_alone for module in each.modules()}
    for prefix, owner in () if root is None else root.named_modules():
        for attribute, parameter in () if id(owner) in left_alone else owner.named_parameters(recurse=False):
            name = fully_qualified(f"{prefix}.{attribute}" if prefix else attribute)
            is_new = name not in outline.names and id(parameter) not in known
            if is_new and parameter.requires_grad and owners.find(parameter) is None:
                yield name, parameter


def _known(replica: Replica) -> set[int]:
    return {id(parameter) for parameter in (*replica.parameters, *(parameter for _, parameter in replica.frozen))}
