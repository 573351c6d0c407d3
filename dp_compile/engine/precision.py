"""The dtype in which a replicated module computes: its forward sees its parameters cast, no other code does.

    forward begins    each floating parameter is cast, once, and the cast stands where the parameter stood
    forward ends      the parameters are back, whatever happened: an exception, Ctrl-C, a graph break
    backward          gradients go through the casts to the parameters, in the parameters' own dtype

It is plain Python that Dynamo traces with the forward: a compiled forward has the casts in its graph. A forward that
was not compiled as a whole is recomputed by activation checkpointing in Python, in the backward; so its casts stand
there once more as long as that runs (`recomputing`).
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from dp_compile._torch import autograd, compiler
from dp_compile.errors import ModuleError

ATTRIBUTE: Final = "_dp_compile_precision"
"""Where a module keeps it: Dynamo finds it there."""

_PYTHON: Final = "a forward in a dtype of a policy is not traced as a whole"

CastSite = tuple[tuple[str, ...], nn.Module | None, str]
"""The names of the modules from the root to a submodule; that one, `None` if it is the root itself; the name of one of
its own parameters. By the names, graphs get the names that users know; they lead nowhere once a wrapper was put
around."""


class _Standing(NamedTuple):
    """A cast that stands where a parameter stood."""

    container: dict[str, Any]
    name: str
    original: torch.Tensor
    cast: torch.Tensor


@dataclass(eq=False, slots=True, weakref_slot=True)
class Precision:
    """How one module computes. Copies and pickles of the module have `None` in its place.

    Args:
        param_dtype: floating parameters are cast to it, and floating inputs with `cast_inputs`.
        output_dtype: floating outputs are cast to it.
        parameters: the places that are cast, those of one tied parameter together.
    """

    param_dtype: torch.dtype | None
    output_dtype: torch.dtype | None
    cast_inputs: bool
    parameters: tuple[tuple[CastSite, ...], ...]
    depth: int = 0
    """How many forwards that are not compiled as a whole, and backwards of them, are under way."""
    _standing: list[_Standing] = field(default_factory=list)
    _kept: list[_Standing] = field(default_factory=list)
    """What recomputation needs of the last forward that was not compiled as a whole."""
    _awaited: int = 0
    """How many such forwards still have their backward before them."""

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return (type(None), ())

    @property
    def stands(self) -> bool:
        """Whether the module holds casts at the moment."""
        return self.depth > 0

    def run(
        self, root: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """`forward(*args, **kwargs)`, which computes with `root`, as this says."""
        if self.cast_inputs:
            # One by one: a list that the forward is to fill stays the caller's.
            args = tuple(cast_all(each, self.param_dtype) for each in args)
            kwargs = {name: cast_all(each, self.param_dtype) for name, each in kwargs.items()}
        # Dynamo cannot go on after a graph break inside `try`: then this runs as Python, and what it calls is traced.
        traced = torch.compiler.is_compiling()
        standing: list[_Standing] = []
        try:
            if traced:
                self._enter(root, standing)
            else:
                self._enter_untraced(root)
            result = forward(*args, **kwargs)
        finally:
            if traced:
                _leave(standing)
            else:
                self._leave_untraced()
        return cast_all(result, self.output_dtype)

    def _enter(self, root: nn.Module, standing: list[_Standing]) -> None:
        """Let the cast of each parameter stand in all its places, and note them in `standing`."""
        for places in self.parameters:
            seen: torch.Tensor | None = None
            cast: torch.Tensor | None = None
            for path, known, name in places:
                owner: nn.Module | None = root
                for part in path:
                    owner = None if owner is None else owner._modules.get(part)
                owner = known if owner is None else owner
                assert owner is not None
                container: dict[str, Any] = owner._parameters
                tensor: torch.Tensor | None = container.get(name)
                if tensor is None or tensor.dtype == self.param_dtype or not tensor.is_floating_point():
                    continue
                if tensor is not seen:  # the user may have untied it
                    seen, cast = tensor, tensor.to(self.param_dtype)
                assert cast is not None
                standing.append(_Standing(container, name, tensor, cast))
                container[name] = cast

    @compiler.untraced(_PYTHON)
    def _enter_untraced(self, root: nn.Module) -> None:
        """As `_enter`. Of forwards that are one inside another, or in two threads, the first one casts for all."""
        with _lock:
            self.depth += 1
            if self.depth == 1:
                self._standing = []
                self._enter(root, self._standing)
            for each in self._standing if torch.is_grad_enabled() else ():
                if each.original.requires_grad and not each.cast.requires_grad:
                    raise ModuleError(
                        f"a forward with gradients began while one without was under way, of the module that has "
                        f"{each.name}. With a mixed precision policy they use the same casts: run one after the other."
                    )

    @compiler.untraced(_PYTHON)
    def _leave_untraced(self) -> None:
        with _lock:
            self.depth -= 1
            if self.depth:
                return
            standing, self._standing = self._standing, []
            _leave(standing)
            if torch.is_grad_enabled() and standing:
                self._kept, self._awaited = standing, self._awaited + 1
                _recomputed.add(self)
        for each in standing:  # as far as torch keeps count
            if not each.cast.is_inference() and autograd.version_of(each.cast):
                raise ModuleError(
                    f"the forward changed its parameter {each.name} in place, which mixed precision would lose: it is "
                    f"a cast to {self.param_dtype} there. Call replicate() first on its module, without param_dtype."
                )

    # --- recomputation

    def stand_again(self) -> None:
        """Let the casts of the last forward stand where they stood, until `step_back`."""
        with _lock:
            self.depth += 1
            if self.depth == 1:
                self._standing = [each for each in self._kept if each.container.get(each.name) is each.original]
                for each in self._standing:
                    each.container[each.name] = each.cast

    def step_back(self) -> None:
        """Undo `stand_again`."""
        with _lock:
            self.depth -= 1
            if self.depth == 0:
                _leave(self._standing)
                self._standing = []

    def backward_has_ended(self) -> None:
        """A backward through the module has ended, and none will go through the same graph again."""
        self._awaited -= 1
        if self._awaited <= 0:
            self.forget()

    def forget(self) -> None:
        """Nothing of the last forward will be recomputed."""
        self._kept, self._awaited = [], 0
        _recomputed.discard(self)


_lock: Final = threading.RLock()
"""Held while casts are put there and taken away, never while something runs."""
_recomputed: Final[weakref.WeakSet[Precision]] = weakref.WeakSet()
"""Those with a forward that may be recomputed."""


_NOTHING: Final = contextlib.nullcontext()


def recomputing() -> contextlib.AbstractContextManager[None]:
    """Inside, modules compute as in their last forward: a part of it may be called again, by a checkpoint."""
    return _recomputing() if _recomputed else _NOTHING  # every backward of the process asks


@contextlib.contextmanager
def _recomputing() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for each in list(_recomputed):
            stack.callback(each.step_back)
            each.stand_again()
        yield


def _leave(standing: Sequence[_Standing]) -> None:
    """Put back what the casts stood for."""
    for each in standing:
        if each.container.get(each.name) is each.cast:
            each.container[each.name] = each.original


def cast_all(values: Any, dtype: torch.dtype | None) -> Any:
    """The same with floating tensors in a dtype; the same object if there is nothing to cast."""

    def is_other(value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != dtype

    if dtype is None or not any(map(is_other, autograd.tree_leaves(values))):
        return values
    return autograd.tree_map_only(
        torch.Tensor, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, values
    )
