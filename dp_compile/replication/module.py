"""The class that a module has while it is replicated, and how its state is found again.

As torch's `fully_shard` and `replicate` do, a replicated `Net` becomes a `DDPNet`: a class made on the fly from `Net`
and `ReplicatedModule`. Nothing else about the module changes.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import logging
import math
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, ClassVar, Final, SupportsIndex

from torch import nn

from dp_compile._torch.module_calls import is_compiled
from dp_compile.comm_hooks.comm_hook import CommHook, HookFunction, make_comm_hook
from dp_compile.comm_hooks.functional import FunctionalHook
from dp_compile.engine.module_names import class_name
from dp_compile.engine.plan_sync import agree, agree_in_call, meeting, table_in_backward, telling_the_others
from dp_compile.engine.precision import ATTRIBUTE, Precision
from dp_compile.engine.replica import Replica
from dp_compile.errors import ConfigError, ModuleError
from dp_compile.replication.forward_hooks import Installed, Pending
from dp_compile.replication.selection import refuse_sparse
from dp_compile.replication.tensor_parallel import refuse_hook_of_dtensors

logger = logging.getLogger("dp_compile.replicated_module")

_state_of: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Replica | Pending]] = weakref.WeakKeyDictionary()
_wrapped_by: weakref.WeakKeyDictionary[nn.Module, weakref.ref[nn.Module]] = weakref.WeakKeyDictionary()
_wrapper_of: weakref.WeakKeyDictionary[nn.Module, weakref.ref[nn.Module]] = weakref.WeakKeyDictionary()
_wrapped_replicas: weakref.WeakSet[Replica] = weakref.WeakSet()
_classes: weakref.WeakValueDictionary[tuple[Any, ...], type] = weakref.WeakValueDictionary()


class ReplicatedModule:
    """What a module can do while it is replicated. Comes after the module's own class, whose attributes win."""

    _dp_compile_original: ClassVar[type[nn.Module]]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """A plain module: containers make their slices with `type(self)(...)`, and a slice is not replicated."""
        return cls._dp_compile_original(*args, **kwargs)

    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None:
        """Whether backwards reduce gradients from now on; without, they accumulate locally, as in `no_sync()`.

        As FSDP2's, it reaches the parts that were replicated before.

        Raises:
            ConfigError: neither `True` nor `False` was given.
        """
        if not isinstance(requires_gradient_sync, bool):
            raise ConfigError(f"requires_gradient_sync must be True or False, got {requires_gradient_sync!r}.")
        for state in states_in(_module(self)):
            state.sync = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool) -> None:
        """FSDP2's name. `True` is how it is: a backward with synchronisation reduces over all ranks.

        Raises:
            ConfigError: `False`: accumulation inside nodes only, for which FSDP2 keeps a part of the sum on each rank.
        """
        if requires_all_reduce is not True:
            raise ConfigError(
                f"set_requires_all_reduce({requires_all_reduce!r}) is not supported: each rank has whole gradients of "
                f"{class_name(self)}. Use no_sync() or set_requires_gradient_sync(False) for all micro-steps but the "
                "last: nothing is sent in them, and the gradients are the same."
            )

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients locally inside; the first backward after it reduces the sums, as torch's DDP does."""
        return no_sync(_module(self))

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the sum of gradients by `factor`; see `set_gradient_divide_factor` in this file."""
        set_gradient_divide_factor(_module(self), factor)

    def register_comm_hook(self, state: Any, hook: HookFunction) -> None:
        """Let `hook(state, bucket)` reduce the buckets; see `register_comm_hook` in this file."""
        register_comm_hook(_module(self), state, hook)

    def __prepare_scriptable__(self) -> nn.Module:
        """What `torch.jit.script` takes instead: the same parameters without our hooks, which it cannot read."""
        module = _module(self)
        plain = original_class(module).__new__(original_class(module))
        plain.__dict__ = module.__dict__ | _hooks_of_the_user(module.__dict__, _our_hooks(self))
        plain.__dict__.pop("_compiled_call_impl", None)  # what `compile()` set calls this module
        return plain

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """Pickles hold the plain module, of its own class and without our hooks, and load without this package.

        So do copies of `copy.deepcopy`, as `torch.optim.swa_utils.AveragedModel` makes them: nobody reduces theirs.
        """
        original: Any = original_class(_module(self))
        reduced = original.__reduce_ex__(self, protocol)
        if isinstance(reduced, str):
            return reduced
        rebuild, args, *rest = reduced
        if rest and isinstance(rest[0], dict) and "_forward_pre_hooks" in rest[0]:
            rest[0] = rest[0] | _hooks_of_the_user(rest[0], _our_hooks(self))
        args = tuple(original if value is type(self) else value for value in args)
        if getattr(rebuild, "__name__", "") == "__newobj__":
            # The pickler lets that function make nothing but the class that the object has at present.
            rebuild = original.__new__
        return (rebuild, args, *rest)


_FROM_OURS: Final = ("__new__", "__prepare_scriptable__", "__reduce_ex__")
_METHODS: Final = frozenset(name for name in vars(ReplicatedModule) if name[0] != "_")


def replicated_class(module: nn.Module, *, waiting: bool = False, casts: bool = False) -> type[nn.Module]:
    """`DDP<Name>` for a module of class `<Name>`; the same one each time, so that modules can share compiled code.

    Args:
        module: it keeps its class here.
        waiting: it starts with its first forward. Another class until then: what was compiled is not used afterwards.
        casts: its forward computes in a dtype of its own (`engine/precision.py`), also where `forward` is called.

    Raises:
        ModuleError: the class does not allow subclasses, or its objects cannot change their class.
    """
    kind = original_class(module)
    stores = ("_modules", "_parameters", "_buffers")
    taken = tuple((name, store) for store in stores for name in getattr(module, store).keys() if name in _METHODS)
    found = _classes.get((kind, waiting, casts, taken))
    if found is not None:
        return found
    body: dict[str, Any] = {"__module__": kind.__module__, "__doc__": kind.__doc__, "_dp_compile_original": kind}
    body |= {name: vars(ReplicatedModule)[name] for name in _FROM_OURS}
    body |= {"forward": _casting_forward(kind)} if casts else {}
    body |= {"__deepcopy__": _copied_as_its_author_says} if hasattr(kind, "__deepcopy__") else {}
    body |= {"recompile": _recompiled_as_its_own_class} if hasattr(kind, "recompile") else {}
    # nn.Module.__getattr__ runs only where no class has the name: a child called `no_sync` would be hidden.
    body |= {name: property(functools.partial(_of_its_own, store, name)) for name, store in taken}
    now = type(module)
    try:
        made = types.new_class(
            f"DDP{kind.__name__}", (kind, ReplicatedModule), {}, lambda namespace: namespace.update(body)
        )
        give_class(module, made)
        give_class(module, now)
    except Exception as error:
        raise ModuleError(
            f"{kind.__name__} cannot be given to replicate(), which changes the class of a module to a subclass: "
            f"{error}. Use dp_compile.DistributedDataParallel(module), which leaves the class alone."
        ) from error
    _classes[kind, waiting, casts, taken] = made
    return made


def _of_its_own(store: str, name: str, module: nn.Module) -> Any:
    return getattr(module, store)[name]


def give_class(module: nn.Module, kind: type[nn.Module]) -> None:
    object.__setattr__(module, "__class__", kind)  # the module may have a __setattr__ that stores it elsewhere


def _recompiled_as_its_own_class(module: Any, *args: Any, **kwargs: Any) -> Any:
    """`fx.GraphModule` writes its code, and a call that looks for its superclass, to the class that it has now."""
    now = type(module)
    restore_class(module)
    try:
        return module.recompile(*args, **kwargs)
    finally:
        give_class(module, now)


def _copied_as_its_author_says(module: ReplicatedModule, memo: dict[int, Any]) -> Any:
    """A copy of the plain module by its class's own `__deepcopy__`, which may ask for the class and its attributes."""
    return copy.deepcopy(module.__prepare_scriptable__(), memo)


def _casting_forward(kind: type[nn.Module]) -> Callable[..., Any]:
    # Not its attributes: torch.compile leaves some on what it decorates, and Dynamo would take this for that.
    @functools.wraps(kind.forward, updated=())
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        precision: Precision | None = self.__dict__.get(ATTRIBUTE)
        if precision is None:
            return kind.forward(self, *args, **kwargs)  # not kept here: recompile() of a GraphModule sets another
        return precision.run(self, functools.partial(kind.forward, self), args, kwargs)

    return forward


def original_class(module: nn.Module) -> type[nn.Module]:
    """The class that the module's author gave it."""
    return _plain(type(module))


def restore_class(module: nn.Module) -> None:
    if isinstance(module, ReplicatedModule):
        give_class(module, original_class(module))


def set_state(module: nn.Module, state: Replica | Pending) -> None:
    """Let the functions below find the state of a module, without holding it alive."""
    _state_of[module] = weakref.ref(state)


def forget_state(module: nn.Module) -> None:
    _state_of.pop(module, None)
    _wrapper_of.pop(module, None)


def wrap(outer: nn.Module, inner: nn.Module) -> None:
    """Let `report`, `no_sync` and `unreplicate` find the state of `inner` through a module that wraps it."""
    _wrapped_by[outer], _wrapper_of[inner] = weakref.ref(inner), weakref.ref(outer)
    state = state_of(inner)
    if isinstance(state, Replica):
        _wrapped_replicas.add(state)


def is_of_a_module_that_is_gone(replica: Replica) -> bool:
    """Whether a wrapper replicated a module that is gone, and the wrapper with it."""
    return replica in _wrapped_replicas and replica.outline.root() is None


def has_lost_its_wrapper(module: nn.Module) -> bool:
    """Whether a module was replicated by a wrapper that is gone since."""
    wrapper = _wrapper_of.get(module)
    if wrapper is None:
        return False
    if wrapper() is not None:
        gc.collect()  # perhaps only this keeps it, on this rank and not on others
    return wrapper() is None


def behind(module: nn.Module) -> nn.Module:
    """The module that is replicated, inside what `torch.compile` returned and inside the wrapper."""
    inner = unwrap(module)
    wrapped = _wrapped_by.get(inner) if isinstance(inner, nn.Module) else None
    return (wrapped() if wrapped else None) or inner


def state_of(module: nn.Module) -> Replica | Pending:
    """The state behind a replicated module, whether it has started or not.

    Raises:
        ModuleError: the module is not replicated.
    """
    found = _state_of.get(behind(module))
    state = found() if found else None
    if state is None:
        raise ModuleError(f"{class_name(unwrap(module))} is not replicated. Call dp_compile.replicate(module) first.")
    return state


def replica_of(module: nn.Module) -> Replica:
    """The replica behind a replicated module.

    Raises:
        ModuleError: the module is not replicated, or waits for its first forward.
    """
    state = state_of(module)
    if isinstance(state, Pending):
        name = class_name(unwrap(module))
        raise ModuleError(
            f"{name} is not replicated yet: it has parameters without values and starts with its forward."
        )
    return state


def is_replicated(module: nn.Module) -> bool:
    """Whether the module is replicated, or will be with its first forward."""
    found = _state_of.get(behind(module))
    return found is not None and found() is not None


def parts_of(module: nn.Module) -> list[nn.Module]:
    """The submodules on which `replicate` was called, and wrappers of such, the outermost first."""
    if len(_state_of) <= is_replicated(module):
        return []  # the only one: no walk in each micro step
    return [each for each in module.modules() if each is not module and is_replicated(each)]


def states_in(module: nn.Module) -> list[Replica | Pending]:
    """The state of a replicated module, then those of its parts.

    Raises:
        ModuleError: the module is not replicated.
    """
    return list(dict.fromkeys([state_of(module), *map(state_of, parts_of(behind(module)))]))


def is_pending(module: nn.Module) -> bool:
    """Whether the module was replicated and waits for its first forward."""
    found = _state_of.get(module)
    return found is not None and isinstance(found(), Pending)


def unwrap(module: nn.Module) -> nn.Module:
    """The module inside what `torch.compile(module)` returned, or the module itself."""
    while is_compiled(module):
        module = module._orig_mod  # type: ignore[assignment]
    return module


@contextlib.contextmanager
def no_sync(module: nn.Module) -> Iterator[None]:
    """Accumulate gradients locally inside; the first backward after it reduces the sums, as torch's DDP does.

    It reaches the parts that were replicated before, too.

    Raises:
        ModuleError: the module is not replicated.
    """
    before = {each: state_of(each).sync for each in (module, *parts_of(behind(module)))}
    for each in before:
        state_of(each).sync = False
    try:
        yield
    finally:
        for each, sync in before.items():
            state_of(each).sync = sync  # the module may have started meanwhile


def register_comm_hook(module: nn.Module, state: Any, hook: HookFunction) -> None:
    """Reduce the gradients of a replicated module with a communication hook of torch's DDP.

    Any such hook works. What torch's own `allreduce_hook`, `fp16_compress_hook`, `bf16_compress_hook` and the two
    wrappers around the first do is known: backwards are captured as before, and gradients travel so. Any other, as
    `powerSGD_hook` and `post_localSGD_hook`, is called with each bucket once that is full, with an object that has the
    methods of `GradBucket`; what torch compiled of the forward is used as before, but no backward is captured. A
    `FunctionalHook` runs in the captured graph, and in every other way that a backward goes. Every rank registers the
    same hook: they compare them here. Parts that were replicated before keep their own hooks.

    Args:
        state: handed to the hook as its first argument; of a functional hook a `HookState`.
        hook: `hook(state, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]`, as in
            `torch.distributed.algorithms.ddp_comm_hooks`; or a `FunctionalHook`.

    Raises:
        ModuleError: the module is not replicated, has a hook already, or has run a backward already.
        ConfigError: see `make_comm_hook`; or options say how gradients are averaged already; or there are two levels
            of network, and the hook is not one that is known.
        DesyncError: another rank registers another hook, or none.
    """
    owner = state_of(module)
    if isinstance(owner, Pending):  # as with torch's `replicate`, it is registered, and refused, when that starts
        owner.comm_hooks.append((state, hook))
        return
    with telling_the_others(owner, "register_comm_hook()"):
        name = class_name(unwrap(module))
        refuse_mixed(owner, name)
        refuse_parts(owner, "a comm hook")
        if owner.comm_hook is not None:
            raise ModuleError(f"{name} has a comm hook already, {owner.comm_hook.name}. Register one, once.")
        if owner.history.backwards.total():
            raise ModuleError(f"a backward of {name} has run already. Register comm hooks before the first one.")
        made = make_comm_hook(state, hook, owner.group.process_group, owner.group.backend)
        if made.memory is not None:
            _check_functional(owner, made.name)
        if made.is_called and owner.group.levels is not None:
            raise ConfigError(
                f"comm hook {made.name} reduces over one group, but the device_mesh of {name} has two dimensions. Use "
                "a hook of torch's that only casts, or one dimension."
            )
        policy = owner.config.mp_policy
        given = "a reduce_dtype in its mp_policy" if policy is not None and policy.reduce_dtype is not None else ""
        given = given if owner.config.gradient_divide_factor is None else "gradient_divide_factor"
        if given:
            raise ConfigError(
                f"{name} has {given}: a comm hook would say otherwise how gradients are averaged. Give one."
            )
        refuse_hook_of_dtensors(owner, made)
        refuse_sparse(owner.names, owner.sparse, f"comm hook {made.name}")
        _take(owner, made)
    if made.is_called:
        logger.warning(
            "%s has comm hook %s: it is called with each bucket by hooks that run eagerly, backwards are not captured: "
            "%s.",
            name,
            made.name,
            made.why_called,
        )


def _take(replica: Replica, hook: CommHook) -> None:
    """Reduce by a hook from now on, if all ranks do."""
    replica.comm_hook = hook
    try:
        said = hook.said
        if hook.memory is not None:
            assert isinstance(hook.function, FunctionalHook)
            compare = functools.partial(_compare_memory, weakref.ref(replica))
            hook.memory.bind(hook.function, replica.names, replica.parameters, compare)
        agree_in_call(replica, {"comm hook": said}, "register_comm_hook()")
    except BaseException:
        replica.comm_hook = None
        if hook.memory is not None:
            hook.memory.unbind()
        raise
    assert replica.revisions.average_by is not None
    replica.revisions.average_by(hook.averaging)


def _check_functional(replica: Replica, name: str) -> None:
    """Whether a functional hook can reduce every backward of a module.

    Raises:
        ConfigError: it cannot, for an option says otherwise.
    """
    obstacles = {
        "the device_mesh has two dimensions": replica.group.levels is not None,
        "no pass makes buckets": replica.strategy == "single",
    }
    if said := [obstacle for obstacle, stands in obstacles.items() if stands]:
        raise ConfigError(
            f"comm hook {name} reduces the buckets of a plan, over all ranks at once: {' and '.join(said)}. Leave that "
            "option as it is by default, or use another hook."
        )


def _compare_memory(of: weakref.ref[Replica], said: str, call: str) -> None:
    """Compare what a functional hook remembers with the other ranks. The user holds the memory, so not the replica."""
    owner = of()
    assert owner is not None
    table = table_in_backward(owner)
    if table is not None:
        agree(table, meeting(owner, call), {"state of the comm hook": said}, call=call)


def set_gradient_divide_factor(module: nn.Module, factor: float) -> None:
    """Divide the sum of the gradients by `factor` from now on, not by the number of ranks; as FSDP2.

    Of the module's own parameters, as FSDP2: parts that were replicated before keep their factor.
    Every rank calls it, with the same factor, between the same two backwards. The first factor is a constant of what is
    compiled, which products take in for nothing: the next backward is compiled anew. From the second one on factors are
    inputs: that compiles once more and then never again, and gradients are multiplied on their way into their buckets.

    Args:
        factor: a finite number above zero.

    Raises:
        ModuleError: the module is not replicated, has not started yet, or has a comm hook.
        ConfigError: not such a number.
        DesyncError: another rank gives another factor, or none.
    """
    owner = replica_of(module)
    with telling_the_others(owner, "set_gradient_divide_factor()"):
        if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 0 < factor < math.inf:
            raise ConfigError(f"gradient_divide_factor must be a finite number > 0, got {factor!r}.")
        name = class_name(unwrap(module))
        refuse_mixed(owner, name)
        if owner.comm_hook is not None:
            raise ModuleError(f"{name} has comm hook {owner.comm_hook.name}, which says what gradients are divided by.")
    agree_in_call(owner, {"gradient divide factor": float(factor)}, "set_gradient_divide_factor()")
    assert owner.revisions.average_by is not None
    averaging = owner.group.averaging
    if averaging.divide_by != factor:
        given = averaging.given or averaging.divide_by is not None
        owner.revisions.average_by(replace(averaging, divide_by=float(factor), given=given))


def refuse_mixed(owner: Replica, name: str) -> None:
    """Whether gradients are reduced at all.

    Raises:
        ModuleError: the module is decentralized.
    """
    if owner.is_mixed:
        raise ModuleError(f"{name} is decentralized: no gradient of it is reduced, nothing can be said on how.")


def refuse_parts(owner: Replica, what: str) -> None:
    """Whether every rank gets all of each reduced gradient.

    Raises:
        ModuleError: a sharded optimizer gets parts of them.
    """
    if owner.after.parts_to is not None:
        raise ModuleError(
            f"{what} needs whole gradients, but the module of {owner.names[0]} has a sharded optimizer, for which "
            "each rank reduces a part. Use in_backward() without shard=True."
        )


def _plain(kind: type[nn.Module]) -> type[nn.Module]:
    return kind._dp_compile_original if issubclass(kind, ReplicatedModule) else kind


def _module(replicated: ReplicatedModule) -> nn.Module:
    assert isinstance(replicated, nn.Module)
    return replicated


def _hooks_of_the_user(attributes: dict[str, Any], ours: set[int]) -> dict[str, Any]:
    return {
        name: OrderedDict((key, value) for key, value in attributes[name].items() if key not in ours)
        for name in ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs")
    }


def _our_hooks(replicated: ReplicatedModule) -> set[int]:
    hooks = _module(replicated)._forward_pre_hooks
    return {key for key, hook in hooks.items() if isinstance(hook, Installed)}
