"""Mixed precision: the forward of a replicated module uses casts of its floating parameters, no other code does.

    forward begins    each floating parameter is cast once, and the cast replaces it in `_parameters`
    forward ends      the parameters are restored, also after an exception, Ctrl-C or a graph break
    backward          gradients flow through the casts and are accumulated in the parameters' own dtype

Like FSDP2's pre- and post-forward, but Dynamo traces this code: a compiled forward has the casts in its graph. After a
forward that was not compiled as a whole, activation checkpointing recomputes modules during the backward. The casts are
in place during that recomputation too (`recomputing`).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from dp_compile._torch import autograd, compiler
from dp_compile._torch.dtensors import is_dtensor
from dp_compile.config import ReplicateConfig
from dp_compile.errors import UnsupportedModuleError
from dp_compile.replica.module_names import class_name, fully_qualified

ATTRIBUTE: Final = "_dp_compile_precision"  # of a module, with its `Precision`, so that Dynamo finds it

_PYTHON: Final = "a forward in a dtype of a policy is not traced as a whole"

CastSite = tuple[tuple[str, ...], nn.Module | None, str]
"""Path of module names from the root to the owner, the owner (`None`: the root), the name of its parameter. The path is
used first, because Dynamo names graph inputs by it; the owner itself if a wrapper has since changed the path."""


class _Cast(NamedTuple):
    container: dict[str, Any]  # the owner's `_parameters`
    name: str
    original: torch.Tensor
    cast: torch.Tensor


@dataclass(eq=False, slots=True, weakref_slot=True)
class Precision:
    """Mixed-precision state of one module. Copies and pickles of the module have `None` instead."""

    param_dtype: torch.dtype | None  # of casts of floating parameters, and of floating inputs with `cast_inputs`
    output_dtype: torch.dtype | None
    cast_inputs: bool
    sites: tuple[tuple[CastSite, ...], ...]  # of each parameter: several if it is tied
    depth: int = 0  # forwards in progress that are not compiled as a whole, and backwards of such forwards
    _active: list[_Cast] = field(default_factory=list)
    _kept: list[_Cast] = field(default_factory=list)  # of the last forward not compiled as a whole, for recomputation
    _awaited: int = 0  # forwards not compiled as a whole, before their backward

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return (type(None), ())

    def run(
        self, root: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Return `forward(*args, **kwargs)`, computed in this precision with the parameters of `root`."""
        if self.cast_inputs:
            # Each argument separately: a list that the forward fills must remain the caller's object.
            args = tuple(cast_all(each, self.param_dtype) for each in args)
            kwargs = {name: cast_all(each, self.param_dtype) for name, each in kwargs.items()}
        # Dynamo cannot resume after a graph break inside `try`: this frame then runs eagerly, only callees are traced.
        traced = torch.compiler.is_compiling()
        casts: list[_Cast] = []
        try:
            if traced:
                self._cast(root, casts)
            else:
                self._begin(root)
            result = forward(*args, **kwargs)
        finally:
            if traced:
                _restore(casts)
            else:
                self._end()
        return cast_all(result, self.output_dtype)

    def _cast(self, root: nn.Module, casts: list[_Cast]) -> None:
        """Cast each parameter, replace it by its cast at all its sites, and append each replacement to `casts`."""
        for sites in self.sites:
            seen: torch.Tensor | None = None
            cast: torch.Tensor | None = None
            for path, known, name in sites:
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
                casts.append(_Cast(container, name, tensor, cast))
                container[name] = cast

    @compiler.untraced(_PYTHON)
    def _begin(self, root: nn.Module) -> None:
        """Cast the parameters, unless an outer forward has done so."""
        self.depth += 1
        if self.depth == 1:
            self._active = []
            self._cast(root, self._active)

    @compiler.untraced(_PYTHON)
    def _end(self) -> None:
        self.depth -= 1
        if self.depth:
            return
        casts, self._active = self._active, []
        _restore(casts)
        if torch.is_grad_enabled() and casts:
            self._kept, self._awaited = casts, self._awaited + 1
            _recomputed.add(self)
        for each in casts:
            # Inference tensors have no version counter.
            if not each.cast.is_inference() and autograd.version_of(each.cast):
                raise UnsupportedModuleError(
                    f"the forward changed its parameter {each.name} in place. With mixed precision the change is lost: "
                    f"the forward uses a copy cast to {self.param_dtype}. Call replicate() first on the module that "
                    "owns the parameter, without param_dtype."
                )

    @contextlib.contextmanager
    def recomputing(self) -> Iterator[None]:
        """Context manager inside which the casts of the last forward replace the parameters again."""
        self.depth += 1
        if self.depth == 1:
            self._active = [each for each in self._kept if each.container.get(each.name) is each.original]
            for each in self._active:
                each.container[each.name] = each.cast
        try:
            yield
        finally:
            self.depth -= 1
            if self.depth == 0:
                _restore(self._active)
                self._active = []

    def backward_has_ended(self) -> None:
        """Release the casts if this was the last awaited backward. Call it when a backward has freed its graph."""
        self._awaited -= 1
        if self._awaited <= 0:
            self.forget()

    def forget(self) -> None:
        """Release the casts of the last forward: nothing will be recomputed."""
        self._kept, self._awaited = [], 0
        _recomputed.discard(self)


_recomputed: Final[weakref.WeakSet[Precision]] = weakref.WeakSet()  # with a forward that may be recomputed


def recomputing() -> contextlib.ExitStack:
    """Return a context in which modules use the casts of their last forward, of which checkpoints recompute parts."""
    stack = contextlib.ExitStack()  # faster than a generator: every backward of the process runs this
    for each in list(_recomputed):
        stack.enter_context(each.recomputing())
    return stack


def _restore(casts: list[_Cast]) -> None:
    for each in casts:
        if each.container.get(each.name) is each.cast:
            each.container[each.name] = each.original


def cast_all(values: Any, dtype: torch.dtype | None) -> Any:
    """Return the pytree with floating tensors cast to `dtype`, or the same object if no tensor needs a cast."""

    def is_other(value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != dtype

    if dtype is None or not any(map(is_other, autograd.tree_leaves(values))):
        return values
    return autograd.tree_map_only(
        torch.Tensor, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, values
    )


# --- from a policy to cast sites --------------------------------------------------------------------------------


def make_precision(
    module: nn.Module, config: ReplicateConfig, chosen: Collection[nn.Parameter], left_alone: Collection[nn.Module]
) -> Precision | None:
    """Return the `Precision` that a module's options require, `None` if nothing is cast.

    `chosen`: the replicated parameters; `left_alone`: excluded modules, each with all its submodules.
    """
    policy = config.mp_policy
    if policy is None or not config.casts:
        return None
    if "forward" in vars(module):
        raise UnsupportedModuleError(
            f"{class_name(module)} has a forward() set on the instance, as accelerate does, which bypasses mp_policy. "
            "Call replicate() before forward() is set."
        )
    sites: tuple[tuple[CastSite, ...], ...] = ()
    if policy.param_dtype is not None:
        sites = _cast_sites(module, policy.param_dtype, {id(each) for each in chosen}, left_alone)
        if not sites:
            raise UnsupportedModuleError(
                f"{class_name(module)} has no floating parameter that param_dtype={policy.param_dtype} could "
                "cast. Leave the policy out."
            )
    return Precision(policy.param_dtype, policy.output_dtype, policy.cast_forward_inputs, sites)


def _cast_sites(
    module: nn.Module, dtype: torch.dtype, chosen: set[int], left_alone: Collection[nn.Module]
) -> tuple[tuple[CastSite, ...], ...]:
    below = {id(inner) for each in left_alone for inner in each.modules()}
    ignored = {id(parameter) for each in left_alone for parameter in each.parameters()}
    found: dict[int, list[CastSite]] = {}
    for prefix, owner in module.named_modules():
        own = owner.named_parameters(recurse=False, remove_duplicate=False) if id(owner) not in below else ()
        for name, parameter in own:
            full = fully_qualified(f"{prefix}.{name}" if prefix else name)
            is_other = parameter.is_floating_point() and parameter.dtype != dtype
            if id(parameter) in ignored and is_other:  # only some of its uses would be cast
                raise UnsupportedModuleError(
                    f"{full} is shared with an ignored module: it would be cast to {dtype} in one of them only. Ignore "
                    "both, or none."
                )
            # Skip subclasses with another representation of their values, such as frozen quantised weights.
            plain = type(parameter.data) is torch.Tensor or isinstance(parameter.data, nn.Parameter)
            if not (plain or autograd.is_fake(parameter) or is_dtensor(parameter)):
                continue
            if id(parameter) not in chosen or not parameter.is_floating_point():
                continue
            if name == "weight" and getattr(owner, "max_norm", None) is not None and is_other:
                raise UnsupportedModuleError(
                    f"{full} is changed in place by its module's forward (max_norm). With mixed precision the change "
                    "would be lost: the forward uses a cast copy. Call replicate() first on that module, without "
                    "param_dtype."
                )
            site = (tuple(prefix.split(".")) if prefix else (), owner if prefix else None, name)
            found.setdefault(id(parameter), []).append(site)
    return tuple(map(tuple, found.values()))
