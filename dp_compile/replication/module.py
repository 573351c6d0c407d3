"""The class of a replicated module, its forward pre-hooks, and the lookup of its state.

As with torch's `fully_shard` and `replicate`, a replicated `Net` becomes a `DDPNet`: a dynamically created subclass of
`Net` and `ReplicatedModule`. Otherwise only hooks and a private attribute are added.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any, ClassVar, Final, SupportsIndex

import torch
from torch import nn

from dp_compile._torch import autograd, compiler, distributed
from dp_compile.comm_hooks.comm_hook import HookFunction
from dp_compile.config import HOOK_VARIABLE
from dp_compile.errors import ConfigError, UnsupportedModuleError, require
from dp_compile.replica.module_names import class_name
from dp_compile.replica.precision import ATTRIBUTE, Precision
from dp_compile.replica.replica import Replica
from dp_compile.replication import gradient_averaging


class ReplicatedModule:
    """The methods of a replicated module. The module's own class precedes it in the MRO and takes precedence."""

    _dp_compile_original: ClassVar[type[nn.Module]]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return a module of the original class: containers slice by `type(self)(...)`, and no slice is replicated."""
        return cls._dp_compile_original(*args, **kwargs)

    def set_requires_gradient_sync(self: Any, requires_gradient_sync: bool) -> None:
        """Set whether backwards reduce gradients from now on. Otherwise they accumulate locally, as in `no_sync()`.

        As in FSDP2, it also applies to separately replicated parts.

        Raises:
            ConfigError: the value is neither `True` nor `False`.
        """
        is_switch = isinstance(requires_gradient_sync, bool)
        require(is_switch, "requires_gradient_sync", "True or False", requires_gradient_sync)
        for each in (self, *parts_of(self)):
            state_of(each).state.sync = requires_gradient_sync

    def no_sync(self: Any) -> AbstractContextManager[None]:
        """Accumulate gradients locally inside the context; the first backward after it reduces the sums, as in DDP."""
        return no_sync(self)

    def set_gradient_divide_factor(self: Any, factor: float) -> None:
        """Divide the sum of the gradients by `factor` from now on, instead of by the number of ranks; as in FSDP2.

        Separately replicated parts keep their factor. Every rank must call it with the same factor, between the same
        two backwards. The first factor is a constant in compiled code, fused into the kernels that produce gradients:
        the next backward recompiles. From the second factor on it is a graph input: the next backward recompiles once
        more, later ones never. Gradients are then scaled when they are copied into their buckets.

        Args:
            factor: a number from 1e-30 to 1e30; at most 1e6 with gradients in float16.

        Raises:
            UnsupportedModuleError: the module is not replicated (yet), reduces no gradients, or has a comm hook.
            ConfigError: `factor` is not a number, or outside these limits.
            DesyncError: another rank passes a different factor, or does not call it.
        """
        gradient_averaging.set_gradient_divide_factor(replica_of(self), class_name(self), factor)

    def register_comm_hook(self: Any, state: Any, hook: HookFunction) -> None:
        """Reduce the gradients with a communication hook of torch's DDP.

        Any such hook works, except in the cases below. Backwards are still captured with torch's `allreduce_hook`,
        `fp16_compress_hook`, `bf16_compress_hook` and the two wrappers around the first. Any other hook, such as
        `powerSGD_hook` and `post_localSGD_hook`, is called with each full bucket, an object with the methods of
        `GradBucket`. Then the compiled forward is still used, but no backward is captured. A `FunctionalHook` runs in
        captured graphs and in eager backwards. Every rank must register the same hook; the ranks compare their hooks
        here. Separately replicated parts keep their own hooks.

        Args:
            state: passed to the hook as its first argument; a `HookState` for a functional hook.
            hook: `hook(state, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]`, as in
                `torch.distributed.algorithms.ddp_comm_hooks`; or a `FunctionalHook`.

        Raises:
            UnsupportedModuleError: the module is not replicated, has a hook or sharded optimizer, or ran a backward.
            ConfigError: the hook is not a function of (state, bucket), or does not support the backend, sparse
                gradients, DTensors or a mesh of two levels; or options already set how gradients are averaged.
            DesyncError: another rank registers a different hook, or none.
        """
        owner = state_of(self)
        if isinstance(owner, Pending):  # validated and registered when replication starts, as in torch's `replicate`
            owner.comm_hooks.append((state, hook))
        else:
            gradient_averaging.register_comm_hook(owner, class_name(inner_module(self)), state, hook)

    def __reduce_ex__(self: Any, protocol: SupportsIndex) -> Any:
        """Pickle or copy the module with its original class, without our hooks, to be loaded without this package.

        So `copy.deepcopy`, as in `torch.optim.swa_utils.AveragedModel`, returns a module without reductions."""
        original: Any = original_class(self)
        reduced = original.__reduce_ex__(self, protocol)
        if isinstance(reduced, str):
            return reduced
        rebuild, args, *rest = reduced
        if rest and isinstance(rest[0], dict) and "_forward_pre_hooks" in rest[0]:
            rest[0] = _without_our_hooks(rest[0])
        args = tuple(original if value is type(self) else value for value in args)
        if getattr(rebuild, "__name__", "") == "__newobj__":
            # The pickler rejects `__newobj__` with any class other than the object's current one.
            rebuild = original.__new__
        return (rebuild, args, *rest)


_classes: weakref.WeakValueDictionary[tuple[Any, ...], type] = weakref.WeakValueDictionary()


def replicated_class(module: nn.Module, *, waiting: bool = False, casts: bool = False) -> type[nn.Module]:
    """Return the class `DDP<Name>` for a module of class `<Name>`, one for all such modules: they share compiled code.

    `waiting`: replication starts in the first forward. The class is separate, so code compiled before the start is not
    reused. `casts`: `forward` casts to another dtype (`replica/precision.py`), also when it is called directly.
    """
    kind = original_class(module)
    named_as_ours = tuple(
        (where, name)
        for where in ("_modules", "_parameters", "_buffers")
        for name in vars(ReplicatedModule)
        if name in getattr(module, where)  # only `in`: the mapping of a ScriptModule is not iterable
    )
    key = (kind, waiting, casts, named_as_ours)
    if key in _classes:
        return _classes[key]
    body: dict[str, Any] = {"__module__": kind.__module__, "__doc__": kind.__doc__, "_dp_compile_original": kind}
    body |= {name: vars(ReplicatedModule)[name] for name in ("__new__", "__reduce_ex__")}
    body |= {"forward": _casting_forward(kind)} if casts else {}
    body |= {"__deepcopy__": _deepcopy} if hasattr(kind, "__deepcopy__") else {}
    body |= {"recompile": _recompile} if hasattr(kind, "recompile") else {}
    body |= {name: _own_attribute(where, name) for where, name in named_as_ours}
    now = type(module)
    try:
        made = types.new_class(
            f"DDP{kind.__name__}", (kind, ReplicatedModule), {}, lambda namespace: namespace.update(body)
        )
        give_class(module, made)
        give_class(module, now)
    except Exception as error:
        raise UnsupportedModuleError(
            f"{kind.__name__} cannot be given to replicate(), which changes the class of a module to a subclass: "
            f"{error}. Use dp_compile.DistributedDataParallel(module), which leaves the class alone."
        ) from error
    _classes[key] = made
    return made


def _own_attribute(where: str, name: str) -> property:
    """Return a property for a child, parameter or buffer with the name of one of our methods, which would hide it."""
    return property(lambda module: getattr(module, where)[name])


def _recompile(module: Any, *args: Any, **kwargs: Any) -> Any:
    """Recompile an `fx.GraphModule` under its original class: `recompile` writes methods to the module's class."""
    now = type(module)
    give_class(module, original_class(module))
    try:
        return module.recompile(*args, **kwargs)
    finally:
        give_class(module, now)


def _deepcopy(module: Any, memo: dict[int, Any]) -> Any:
    """Copy the module without replication by its original class's `__deepcopy__`, which may read its attributes."""
    plain = original_class(module).__new__(original_class(module))
    plain.__dict__ = _without_our_hooks(module.__dict__)
    plain.__dict__.pop("_compiled_call_impl", None)  # set by `compile()`; it calls the original module
    return copy.deepcopy(plain, memo)


def _without_our_hooks(attributes: dict[str, Any]) -> dict[str, Any]:
    ours = {key for key, hook in attributes["_forward_pre_hooks"].items() if isinstance(hook, Installed)}
    return attributes | {
        name: OrderedDict((key, value) for key, value in attributes[name].items() if key not in ours)
        for name in ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs")
    }


def _casting_forward(kind: type[nn.Module]) -> Callable[..., Any]:
    # Do not copy attributes: a mark of torch.compile on `kind.forward` would make Dynamo treat this function as marked.
    @functools.wraps(kind.forward, updated=())
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        precision: Precision | None = self.__dict__.get(ATTRIBUTE)
        if precision is None:
            return kind.forward(self, *args, **kwargs)  # looked up each time: GraphModule.recompile() replaces it
        return precision.run(self, functools.partial(kind.forward, self), args, kwargs)

    return forward


def give_class(module: nn.Module, kind: type[nn.Module]) -> None:
    object.__setattr__(module, "__class__", kind)  # bypasses a __setattr__ of the module


def original_class(module: nn.Module) -> type[nn.Module]:
    """Return the class of the module before replication."""
    return module._dp_compile_original if isinstance(module, ReplicatedModule) else type(module)


# --- forward pre-hooks ------------------------------------------------------------------------------------------


class Installed:
    """Base class of our forward pre-hooks. Copies and pickles have an instance of this class, a no-op, for each one."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[()]]:
        return (Installed, ())

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


class ForwardCheck(Installed):
    """A forward pre-hook: raises if torch's settings or its DDP would drop our hooks or reduce gradients twice."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica

    @compiler.no_graph_of_its_own
    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        refuse_traced_backward()
        around = distributed.parameters_of_active_ddp()
        if around:
            _refuse_torch_ddp(self.replica, module, around)


@compiler.untraced("torch's DistributedDataParallel is around a module that dp_compile replicates")
def _refuse_torch_ddp(replica: Replica, module: nn.Module, around: Sequence[nn.Parameter]) -> None:
    """Raise if torch's DDP wraps a replicated module. Checked in the forward: DDP's constructor does not call us."""
    ours = {id(parameter) for parameter in replica.parameters}
    if any(id(parameter) in ours for parameter in around):
        raise UnsupportedModuleError(
            f"{class_name(module)} is wrapped by torch's DistributedDataParallel and replicated by dp_compile. "
            "Use one: drop torch's, or put dp_compile.DistributedDataParallel in its place, without replicate()."
        )


def refuse_traced_backward() -> None:
    """Raise if `trace_autograd_ops` is on: gradients would not be reduced."""
    if compiler.trace_autograd_ops():
        raise ConfigError(
            "torch._dynamo.config.trace_autograd_ops is on: torch then drops every post-accumulate-grad hook and no "
            "gradient would be reduced. Switch it off and call backward() outside the compiled function."
        )


class InputMover(Installed):
    """A forward pre-hook that moves input tensors to a device, as torch's DDP does with `device_ids`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return moved((args, kwargs), self.device)


def moved(values: Any, device: torch.device) -> Any:
    """Return the same pytree with its tensors on a device."""
    return autograd.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device, non_blocking=True), values)


class Pending(Installed):
    """State of a module whose parameters had no values in `replicate`: its first forward starts the replication.

    Installed on the module and on each submodule that owns parameters. Otherwise a submodule called alone would get
    gradients that no rank reduces.
    """

    def __init__(self, root: nn.Module, start: Callable[[nn.Module, Pending], None]) -> None:
        self._root, self._start = weakref.ref(root), start
        self.state = SimpleNamespace(sync=True)  # the fields of `ReplicaState` that users may set before the start
        self.comm_hooks: list[tuple[Any, HookFunction]] = []  # registered at the start

    @compiler.untraced("a module starts to be replicated with its first forward; run one before compiling fullgraph")
    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        root = self._root()
        if root is not None and find_state(root) is self:  # false after unreplicate()
            self._start(root, self)


def remove_forward_hooks(module: nn.Module, only: Installed | None = None) -> None:
    """Remove this package's forward pre-hooks from a module, or only the given one."""
    for key, hook in list(module._forward_pre_hooks.items()):
        if isinstance(hook, Installed) and only in (None, hook):
            del module._forward_pre_hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)


# --- from a module to its state ---------------------------------------------------------------------------------

states: Final[weakref.WeakKeyDictionary[nn.Module, weakref.ref[Replica | Pending]]] = weakref.WeakKeyDictionary()


def unwrap(module: nn.Module) -> nn.Module:
    """Return the module inside a `torch.compile` result, or `module` itself."""
    while compiler.is_compiled(module):
        module = module._orig_mod  # type: ignore[assignment]
    return module


def inner_module(module: nn.Module) -> nn.Module:
    """Return the replicated module inside a `torch.compile` result and inside the wrapper class."""
    inner: Any = unwrap(module)
    return unwrap(inner.module) if hasattr(type(inner), "_dp_compile_wraps") else inner


def find_state(module: nn.Module) -> Replica | Pending | None:
    """Return the state of a replicated or pending module, `None` for other modules."""
    found = states.get(inner_module(module))
    return found() if found else None


def state_of(module: nn.Module) -> Replica | Pending:
    """Return the state of a replicated or pending module. Raises UnsupportedModuleError for other modules."""
    state = find_state(module)
    if state is None and distributed.is_reduced_by_torch(unwrap(module)):
        raise UnsupportedModuleError(
            f"torch's own DDP reduces the gradients of {class_name(unwrap(module))}, e.g. by the off-switch "
            f"{HOOK_VARIABLE}=0 or ddp_python_hook=False. This call needs dp_compile's hooks: leave it out, or switch "
            "them on. no_sync(), warmup() and report() work in both modes."
        )
    if state is None:
        raise UnsupportedModuleError(
            f"{class_name(unwrap(module))} is not replicated. Call dp_compile.replicate(module) first."
        )
    return state


def replica_of(module: nn.Module) -> Replica:
    """Return a module's replica. Raises UnsupportedModuleError if the module is not replicated, or not yet."""
    state = state_of(module)
    if isinstance(state, Pending):
        raise UnsupportedModuleError(
            f"{class_name(unwrap(module))} is not replicated yet: it has lazy parameters, or tensors on the meta "
            "device. Replication starts with its first forward."
        )
    return state


def is_replicated(module: nn.Module) -> bool:
    """Return whether the module is replicated, or will be in its first forward."""
    return find_state(module) is not None


def parts_of(module: nn.Module) -> list[nn.Module]:
    """Return the separately replicated submodules and wrappers of such submodules, outermost first."""
    if len(states) <= is_replicated(module):
        return []  # nothing else is replicated: avoids a traversal in each micro step
    return [each for each in module.modules() if each is not module and is_replicated(each)]


@contextlib.contextmanager
def no_sync(module: nn.Module) -> Iterator[None]:
    """Accumulate gradients locally inside the context; the first backward after it reduces the sums, as torch's DDP.

    Also applies to separately replicated parts, and to torch's DDP if that reduces the gradients.

    Raises:
        UnsupportedModuleError: the module is not replicated.
    """
    inner = unwrap(module)
    if distributed.is_reduced_by_torch(inner) and not is_replicated(inner):
        with distributed.no_sync_of_torch(inner):
            yield
        return
    before = {each: state_of(each).state.sync for each in (module, *parts_of(inner_module(module)))}
    for each in before:
        state_of(each).state.sync = False
    try:
        yield
    finally:
        for each, sync in before.items():
            state_of(each).state.sync = sync  # looked up again: a pending module may have started
