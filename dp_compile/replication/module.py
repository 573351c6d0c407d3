"""The class of a module while it is replicated, its forward pre-hooks, and how its state is found.

As with torch's `fully_shard` and `replicate`, a replicated `Net` becomes a `DDPNet`: a class made on the fly from `Net`
and `ReplicatedModule`. Nothing else about the module changes.
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
from typing import Any, ClassVar, SupportsIndex

import torch
from torch import nn

from dp_compile._torch import autograd, compiler, distributed
from dp_compile.comm_hooks.comm_hook import HookFunction
from dp_compile.config import HOOK_VARIABLE
from dp_compile.errors import ConfigError, UnsupportedModuleError, require
from dp_compile.replica.module_names import class_name
from dp_compile.replica.precision import ATTRIBUTE, Precision
from dp_compile.replica.replica import Replica, Switches
from dp_compile.replication import gradient_averaging


class ReplicatedModule:
    """The methods of a replicated module. Comes after the module's own class, whose attributes win."""

    _dp_compile_original: ClassVar[type[nn.Module]]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """A plain module: containers make their slices with `type(self)(...)`, and a slice is not replicated."""
        return cls._dp_compile_original(*args, **kwargs)

    def set_requires_gradient_sync(self: Any, requires_gradient_sync: bool) -> None:
        """Whether backwards reduce gradients from now on; without, they accumulate locally, as in `no_sync()`.

        As FSDP2's, it reaches the parts that were replicated before.

        Raises:
            ConfigError: neither `True` nor `False` was given.
        """
        is_switch = isinstance(requires_gradient_sync, bool)
        require(is_switch, "requires_gradient_sync", "True or False", requires_gradient_sync)
        for each in (self, *parts_of(self)):
            state_of(each).state.sync = requires_gradient_sync

    def no_sync(self: Any) -> AbstractContextManager[None]:
        """Accumulate gradients locally inside; the first backward after it reduces the sums, as torch's DDP does."""
        return no_sync(self)

    def set_gradient_divide_factor(self: Any, factor: float) -> None:
        """Divide the sum of the gradients by `factor` from now on, not by the number of ranks; as FSDP2.

        Of the module's own parameters: parts that were replicated before keep their factor. Every rank calls it, with
        the same factor, between the same two backwards. The first factor is a constant of compiled code, which products
        take in at no cost: the next backward is compiled again. From the second one on factors are inputs: that
        compiles once more and then never again, and gradients are multiplied on their way into their buckets.

        Args:
            factor: a finite number above zero.

        Raises:
            UnsupportedModuleError: the module is not replicated, has not started yet, or has a comm hook.
            ConfigError: not such a number.
            DesyncError: another rank gives another factor, or none.
        """
        gradient_averaging.set_gradient_divide_factor(replica_of(self), class_name(self), factor)

    def register_comm_hook(self: Any, state: Any, hook: HookFunction) -> None:
        """Reduce the gradients with a communication hook of torch's DDP.

        Any such hook works. torch's own `allreduce_hook`, `fp16_compress_hook`, `bf16_compress_hook` and the two
        wrappers around the first are known: backwards are captured as before. Any other, as `powerSGD_hook` and
        `post_localSGD_hook`, is called with each bucket once that is full, with an object that has the methods of
        `GradBucket`; the compiled forward is used as before, but no backward is captured. A `FunctionalHook` runs in
        the captured graph, and in eager backwards. Every rank registers the same hook: they compare them here. Parts
        that were replicated before keep their own hooks.

        Args:
            state: handed to the hook as its first argument; of a functional hook a `HookState`.
            hook: `hook(state, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]`, as in
                `torch.distributed.algorithms.ddp_comm_hooks`; or a `FunctionalHook`.

        Raises:
            UnsupportedModuleError: the module is not replicated, has a hook already, or has run a backward already.
            ConfigError: the hook is not a function of (state, bucket) or not offered for the group's backend; options
                say how gradients are averaged already; or there are two levels of network, and the hook is not known.
            DesyncError: another rank registers another hook, or none.
        """
        owner = state_of(self)
        if isinstance(owner, Pending):  # as with torch's `replicate`, it is registered, and refused, when that starts
            owner.comm_hooks.append((state, hook))
        else:
            gradient_averaging.register_comm_hook(owner, class_name(inner_module(self)), state, hook)

    def __reduce_ex__(self: Any, protocol: SupportsIndex) -> Any:
        """Pickles hold the plain module, of its original class, without our hooks, and load without this package. So do
        copies of `copy.deepcopy`, as `torch.optim.swa_utils.AveragedModel` makes them: theirs are not reduced."""
        original: Any = original_class(self)
        reduced = original.__reduce_ex__(self, protocol)
        if isinstance(reduced, str):
            return reduced
        rebuild, args, *rest = reduced
        if rest and isinstance(rest[0], dict) and "_forward_pre_hooks" in rest[0]:
            rest[0] = _without_our_hooks(rest[0])
        args = tuple(original if value is type(self) else value for value in args)
        if getattr(rebuild, "__name__", "") == "__newobj__":
            # The pickler lets that function make nothing but the class that the object has at present.
            rebuild = original.__new__
        return (rebuild, args, *rest)


_classes: weakref.WeakValueDictionary[tuple[Any, ...], type] = weakref.WeakValueDictionary()


def replicated_class(module: nn.Module, *, waiting: bool = False, casts: bool = False) -> type[nn.Module]:
    """`DDP<Name>` for a module of class `<Name>`, which it keeps here; the same one for all, to share compiled code.

    `waiting`: it starts with its first forward. Another class until then: what was compiled is not used afterwards.
    `casts`: its forward computes in another dtype (`replica/precision.py`), also where `forward` itself is called.
    """
    kind = original_class(module)
    named_as_ours = tuple(
        (where, name)
        for where in ("_modules", "_parameters", "_buffers")
        for name in vars(ReplicatedModule)
        if name in getattr(module, where)  # a ScriptModule's cannot be iterated over
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
    """A child, parameter or buffer with the name of a method of ours: `nn.Module.__getattr__` would come too late."""
    return property(lambda module: getattr(module, where)[name])


def _recompile(module: Any, *args: Any, **kwargs: Any) -> Any:
    """`fx.GraphModule` writes its code, and a call that looks for its superclass, to the class that it has now."""
    now = type(module)
    give_class(module, original_class(module))
    try:
        return module.recompile(*args, **kwargs)
    finally:
        give_class(module, now)


def _deepcopy(module: Any, memo: dict[int, Any]) -> Any:
    """A copy by the class's own `__deepcopy__`, which may use class and attributes: those of a plain one."""
    plain = original_class(module).__new__(original_class(module))
    plain.__dict__ = _without_our_hooks(module.__dict__)
    plain.__dict__.pop("_compiled_call_impl", None)  # what `compile()` set calls this module
    return copy.deepcopy(plain, memo)


def _without_our_hooks(attributes: dict[str, Any]) -> dict[str, Any]:
    ours = {key for key, hook in attributes["_forward_pre_hooks"].items() if isinstance(hook, Installed)}
    return attributes | {
        name: OrderedDict((key, value) for key, value in attributes[name].items() if key not in ours)
        for name in ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs")
    }


def _casting_forward(kind: type[nn.Module]) -> Callable[..., Any]:
    # Not its attributes: torch.compile leaves some on what it decorates, and Dynamo would take this for that.
    @functools.wraps(kind.forward, updated=())
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        precision: Precision | None = self.__dict__.get(ATTRIBUTE)
        if precision is None:
            return kind.forward(self, *args, **kwargs)  # not kept here: recompile() of a GraphModule sets another
        return precision.run(self, functools.partial(kind.forward, self), args, kwargs)

    return forward


def give_class(module: nn.Module, kind: type[nn.Module]) -> None:
    object.__setattr__(module, "__class__", kind)  # the module may have a __setattr__ that stores it elsewhere


def original_class(module: nn.Module) -> type[nn.Module]:
    """The class that the module's author gave it."""
    return module._dp_compile_original if isinstance(module, ReplicatedModule) else type(module)


# --- forward pre-hooks ------------------------------------------------------------------------------------------


class Installed:
    """A forward pre-hook of ours. Copies and pickles of the module have one of this class, which does nothing."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[()]]:
        return (Installed, ())

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


class ForwardCheck(Installed):
    """Refuses what would drop the gradients' hooks or reduce twice."""

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
    """Refuse torch's DDP around a replicated module. Its constructor calls nothing of ours, but its forward does."""
    ours = {id(parameter) for parameter in replica.parameters}
    if any(id(parameter) in ours for parameter in around):
        raise UnsupportedModuleError(
            f"{class_name(module)} is wrapped by torch's DistributedDataParallel and replicated by dp_compile. "
            "Use one. Leave it out, or put dp_compile.DistributedDataParallel in its place, without replicate()."
        )


def refuse_traced_backward() -> None:
    """Refuse a mode of Dynamo in which no gradient would be reduced."""
    if compiler.trace_autograd_ops():
        raise ConfigError(
            "torch._dynamo.config.trace_autograd_ops is on: torch then drops every post-accumulate-grad hook and no "
            "gradient would be reduced. Switch it off and call backward() outside the compiled function."
        )


class InputMover(Installed):
    """Moves the tensors among a module's inputs to a device, as torch's DDP does with `device_ids`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return moved((args, kwargs), self.device)


def moved(values: Any, device: torch.device) -> Any:
    """The same with the tensors among them on a device."""
    return autograd.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device, non_blocking=True), values)


class Pending(Installed):
    """A module that was given to `replicate` before its parameters had values: it starts with its first forward.

    Installed on the module and on each submodule that owns parameters: a part that ran before the start would get
    gradients that no rank reduces.
    """

    def __init__(self, root: nn.Module, start: Callable[[nn.Module, Pending], None]) -> None:
        self._root, self._start = weakref.ref(root), start
        self.state = Switches()
        self.comm_hooks: list[tuple[Any, HookFunction]] = []
        """What `register_comm_hook` was given: registered after the start."""

    @compiler.untraced("a module starts to be replicated with its first forward; run one before compiling fullgraph")
    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        root = self._root()
        if root is not None and find_state(root) is self:  # not of a module that was taken out before the start
            self._start(root, self)


def remove_forward_hooks(module: nn.Module, only: Installed | None = None) -> None:
    """Take off this package's forward pre-hooks of a module, or only one of them."""
    for key, hook in list(module._forward_pre_hooks.items()):
        if isinstance(hook, Installed) and only in (None, hook):
            del module._forward_pre_hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)


# --- from a module to its state ---------------------------------------------------------------------------------

_state_of: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Replica | Pending]] = weakref.WeakKeyDictionary()
_wrapped_by: weakref.WeakKeyDictionary[nn.Module, weakref.ref[nn.Module]] = weakref.WeakKeyDictionary()


def set_state(module: nn.Module, state: Replica | Pending | None) -> None:
    """Let the functions below find the state of a module, without holding it alive."""
    if state is None:
        _state_of.pop(module, None)
    else:
        _state_of[module] = weakref.ref(state)


def wrap(outer: nn.Module, inner: nn.Module) -> None:
    """Let `report`, `no_sync` and `unreplicate` find the state of `inner` through a module that wraps it."""
    _wrapped_by[outer] = weakref.ref(inner)


def unwrap(module: nn.Module) -> nn.Module:
    """The module inside what `torch.compile(module)` returned, or the module itself."""
    while compiler.is_compiled(module):
        module = module._orig_mod  # type: ignore[assignment]
    return module


def inner_module(module: nn.Module) -> nn.Module:
    """The module that is replicated, inside what `torch.compile` returned and inside the wrapper."""
    inner = unwrap(module)
    wrapped = _wrapped_by.get(inner) if isinstance(inner, nn.Module) else None
    return (wrapped() if wrapped else None) or inner


def find_state(module: nn.Module) -> Replica | Pending | None:
    """The state of a replicated module, of one that will be with its first forward; `None` of others."""
    found = _state_of.get(inner_module(module))
    return found() if found else None


def state_of(module: nn.Module) -> Replica | Pending:
    """As `find_state`; a UnsupportedModuleError if there is none."""
    state = find_state(module)
    if state is None and distributed.is_reduced_by_torch(unwrap(module)):
        raise UnsupportedModuleError(
            f"torch's own DDP reduces the gradients of {class_name(unwrap(module))}, as ddp_python_hook=False or "
            f"{HOOK_VARIABLE}=0 asks. Of this package only no_sync(), warmup() and report() work then; leave this "
            "call out."
        )
    if state is None:
        raise UnsupportedModuleError(
            f"{class_name(unwrap(module))} is not replicated. Call dp_compile.replicate(module) first."
        )
    return state


def replica_of(module: nn.Module) -> Replica:
    """The replica of a module; a UnsupportedModuleError if it is not replicated, or waits for its first forward."""
    state = state_of(module)
    if isinstance(state, Pending):
        raise UnsupportedModuleError(
            f"{class_name(unwrap(module))} is not replicated yet: it has lazy or meta parameters. Replication starts "
            "with its first forward."
        )
    return state


def is_replicated(module: nn.Module) -> bool:
    """Whether the module is replicated, or will be with its first forward."""
    return find_state(module) is not None


def parts_of(module: nn.Module) -> list[nn.Module]:
    """The submodules on which `replicate` was called, and wrappers of such, the outermost first."""
    if len(_state_of) <= is_replicated(module):
        return []  # the only one: no walk in each micro step
    return [each for each in module.modules() if each is not module and is_replicated(each)]


@contextlib.contextmanager
def no_sync(module: nn.Module) -> Iterator[None]:
    """Accumulate gradients locally inside; the first backward after it reduces the sums, as torch's DDP does.

    It reaches the parts that were replicated before, too; and torch's DDP, where that reduces the gradients.

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
            state_of(each).state.sync = sync  # the module may have started meanwhile
