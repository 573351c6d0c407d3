"""`replicate()`: make a module data parallel, in place."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from dp_compile import _torch
from dp_compile.agreement import Statement, agree
from dp_compile.backward import BROADCAST_BYTES, install_entry
from dp_compile.config import ReplicateConfig
from dp_compile.errors import ConfigError, DPCompileError, ModuleError
from dp_compile.grad_reduction import Averaging, averaging_for
from dp_compile.graph_pass import GraphPass
from dp_compile.hooks import install_hooks
from dp_compile.passes import DEFAULT_PASSES
from dp_compile.plan import BucketPlan
from dp_compile.planning import BucketPolicy, PlanRequest, make_plan
from dp_compile.replica import Group, Replica, gradient_specs, owners
from dp_compile.report import Report
from dp_compile.settling import table_of

ModuleT = TypeVar("ModuleT", bound=nn.Module)

_replica_of: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Replica]] = weakref.WeakKeyDictionary()
_meetings: Counter[str] = Counter()


def replicate(
    module: ModuleT,
    *,
    ddp_python_hook: bool | None = None,
    process_group: dist.ProcessGroup | None = None,
    device_mesh: DeviceMesh | None = None,
    ignored_modules: Iterable[nn.Module] | None = None,
    bucket_cap_mb: float | None = None,
    find_unused_parameters: bool | None = None,
    broadcast_buffers: bool | None = None,
    check_reductions: bool | None = None,
    passes: Iterable[GraphPass] | None = None,
    bucket_policy: BucketPolicy | None = None,
    plan: BucketPlan | str | os.PathLike[str] | None = None,
    config: ReplicateConfig | None = None,
) -> ModuleT:
    """Average the gradients of `module` over a process group in every backward. Returns the same object.

    Call it with or without `torch.compile`, before or after; the training loop stays as it is. State dict keys,
    parameters and the module's class do not change. Parameters and buffers of the group's first rank are copied to
    all ranks, after the ranks have compared what they replicate.

    Args:
        module: what to replicate; a module that `torch.compile` returned is fine too.
        ddp_python_hook: `True`: hooks that are traced with the backward (the point of this package). `False`: torch's
            C++ reducer. `None`: as `config` says, then the environment variable `DP_COMPILE_DDP_PYTHON_HOOK`, then
            `True`.
        process_group: whom to average with; the default group if neither this nor `device_mesh` is given.
        device_mesh: a mesh with one dimension, in place of `process_group`.
        ignored_modules: submodules whose parameters and buffers are left alone, with all below them.
        bucket_cap_mb: asks for buckets of a fixed size: MiB at which a bucket is closed.
        find_unused_parameters: what a parameter without a gradient means; see `ReplicateConfig`.
        broadcast_buffers: copy the first rank's buffers to all ranks after each synchronised backward.
        check_reductions: check after each backward that every gradient was reduced exactly once.
        passes: passes over the captured backward instead of the default ones; `()` for none.
        bucket_policy: asks for buckets that end where modules end: a set of module classes, or a function of a module's
            fully qualified name and the module that returns whether it is a unit.
        plan: asks for exactly these buckets: a plan (`report(model).plan`), or the path of a plan file.
        config: all options in one value; an argument given here wins over its field.

    Raises:
        ConfigError: an option has a value that is not allowed, or no process group is initialised.
        ModuleError: the module cannot be replicated: no trainable parameter, meta or several devices, sparse or
            complex gradients, already managed by this package, torch's DDP or FSDP.
        DesyncError: the ranks built different modules or gave different options, or a rank is missing.
    """
    given: dict[str, Any] = {
        "ddp_python_hook": ddp_python_hook,
        "bucket_cap_mb": bucket_cap_mb,
        "find_unused_parameters": find_unused_parameters,
        "broadcast_buffers": broadcast_buffers,
        "check_reductions": check_reductions,
    }
    group = _resolve_group(process_group, device_mesh)
    try:
        options = dataclasses.replace(
            config or ReplicateConfig(), **{name: value for name, value in given.items() if value is not None}
        )
        if options.uses_python_hook():
            _refuse_traced_backward()
        _refuse_python_reducer()
        target = _select(unwrap(module), frozenset(ignored_modules or ()))
        _check_selection(target)
        chosen = _check_passes(DEFAULT_PASSES if passes is None else tuple(passes))
        bucketed = any(graph_pass.realises_plan for graph_pass in chosen)
        replica = _make_replica(target, group, PlanRequest(options, bucket_policy, plan, bucketed), chosen)
    except DPCompileError as error:
        _compare(group, {"error": str(error)}, timeout_s=ReplicateConfig().timeout_s, own_error=error)
        raise
    replica.topic = _compare(group, _statement(target, replica), timeout_s=options.timeout_s)
    _broadcast(replica)
    _install(target.module, replica)
    return module


@contextlib.contextmanager
def no_sync(module: nn.Module) -> Iterator[None]:
    """Accumulate gradients locally inside; the first backward after it reduces the sums, as torch's DDP does.

    Raises:
        ModuleError: the module is not replicated.
    """
    replica = replica_of(module)
    before, replica.sync = replica.sync, False
    try:
        yield
    finally:
        replica.sync = before


def report(module: nn.Module) -> Report:
    """The plan of a replicated module, what was captured, and which way its backwards went.

    Raises:
        ModuleError: the module is not replicated.
    """
    replica = replica_of(module)
    if replica.hooks is not None:
        mode = "python hooks"
    elif replica.reducer is not None:
        mode = "torch's C++ reducer"
    else:
        mode = "not decided, no backward yet"
    promise = ""
    if replica.certificate is not None and replica.ready is not None:
        promise = "\n".join([*str(replica.certificate).splitlines()[:2], replica.ready.basis])
    captures = tuple(replica.captures.values())
    return Report(mode, replica.group.world_size, replica.plan, captures, dict(replica.backwards), promise)


def unreplicate(module: ModuleT) -> ModuleT:
    """Undo `replicate`: take off everything it installed. Parameters keep their values.

    Raises:
        ModuleError: the module is not replicated.
    """
    replica = replica_of(module)
    _detach(unwrap(module))
    if replica.hooks is not None:
        replica.hooks.remove()
    if replica.reducer is not None:
        replica.reducer.close()
    replica.hooks = replica.reducer = replica.make_reducer = None
    owners.remove(replica)
    return module


def replica_of(module: nn.Module) -> Replica:
    """The state behind a replicated module.

    Raises:
        ModuleError: the module is not replicated.
    """
    module = unwrap(module)
    found = _replica_of.get(module)
    replica = found() if found else None
    if replica is None:
        raise ModuleError(f"{type(module).__name__} is not replicated. Call dp_compile.replicate(module) first.")
    return replica


def share_replica(outer: nn.Module, inner: nn.Module) -> None:
    """Let `report`, `no_sync` and `unreplicate` find the replica of `inner` through a module that wraps it."""
    _replica_of[outer] = weakref.ref(replica_of(inner))


def unwrap(module: nn.Module) -> nn.Module:
    """The module inside what `torch.compile(module)` returned, or the module itself."""
    inner = getattr(module, "_orig_mod", module)
    return inner if isinstance(inner, nn.Module) else module


# --- which group ------------------------------------------------------------------------------------------------


def _resolve_group(process_group: dist.ProcessGroup | None, device_mesh: DeviceMesh | None) -> Group:
    if process_group is not None and device_mesh is not None:
        raise ConfigError("give process_group or device_mesh, not both.")
    if not dist.is_available() or not dist.is_initialized():
        raise ConfigError(
            "no process group is initialised. Call torch.distributed.init_process_group() before replicate()."
        )
    if device_mesh is not None:
        if device_mesh.ndim != 1:
            raise ConfigError(
                f"device_mesh must have one dimension, got {device_mesh.ndim}. Take a slice: mesh['name']."
            )
        process_group = device_mesh.get_group()
    process_group = process_group if process_group is not None else dist.group.WORLD
    if process_group is None or dist.get_rank(process_group) < 0:
        raise ConfigError("this rank is not in the given process group. Only its members call replicate() with it.")
    backend, world_size = str(dist.get_backend(process_group)), dist.get_world_size(process_group)
    return Group(
        process_group, _torch.group_name(process_group), backend, world_size, averaging_for(backend, world_size)
    )


# --- which parameters -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Selection:
    """What of a module is replicated, by fully qualified name."""

    module: nn.Module
    trainable: dict[str, nn.Parameter]
    frozen: dict[str, nn.Parameter]
    buffers: dict[str, torch.Tensor]
    ignored: tuple[str, ...]


def _select(module: nn.Module, ignored_modules: frozenset[nn.Module]) -> _Selection:
    if not isinstance(module, nn.Module):
        raise ModuleError(f"replicate() takes an nn.Module, got {type(module).__name__}.")
    foreign = [each for each in ignored_modules if not isinstance(each, nn.Module)]
    if foreign:
        raise ConfigError(f"ignored_modules must hold modules, got {type(foreign[0]).__name__}.")
    skipped = {id(tensor) for each in ignored_modules for tensor in (*each.parameters(), *each.buffers())}
    named = dict(module.named_parameters())
    kept = {name: parameter for name, parameter in named.items() if id(parameter) not in skipped}
    named_buffers = dict(module.named_buffers())
    return _Selection(
        module,
        {name: parameter for name, parameter in kept.items() if parameter.requires_grad},
        {name: parameter for name, parameter in kept.items() if not parameter.requires_grad},
        {name: buffer for name, buffer in named_buffers.items() if id(buffer) not in skipped},
        tuple(name for name, tensor in {**named, **named_buffers}.items() if id(tensor) in skipped),
    )


def _check_selection(target: _Selection) -> None:
    _check_not_managed(target.module)
    if not target.trainable:
        raise ModuleError(
            f"{type(target.module).__name__} has no parameter that requires a gradient (outside ignored_modules); "
            "there is nothing to reduce."
        )
    tensors = {**target.trainable, **target.frozen, **target.buffers}
    on_meta = [name for name, tensor in tensors.items() if tensor.is_meta]
    if on_meta:
        raise ModuleError(
            f"{on_meta[0]} is on the meta device. Materialise the module first: module.to_empty(device=...), then "
            "initialise it."
        )
    devices = {name: parameter.device for name, parameter in {**target.trainable, **target.frozen}.items()}
    first_name, first = next(iter(devices.items()))
    elsewhere = [name for name, device in devices.items() if device != first]
    if elsewhere:
        raise ModuleError(
            f"parameters are on several devices: {first_name} on {first}, {elsewhere[0]} on {devices[elsewhere[0]]}. "
            "Move the module to one device: module.to(device)."
        )
    _check_kinds(target)


def _check_not_managed(module: nn.Module) -> None:
    managers = {
        nn.parallel.DistributedDataParallel: "torch's DistributedDataParallel",
        FSDPModule: "fully_shard",
        FullyShardedDataParallel: "FullyShardedDataParallel",
    }
    for name, submodule in module.named_modules():
        place = f"submodule {name}" if name else type(module).__name__
        for kind, label in managers.items():
            if isinstance(submodule, kind):
                raise ModuleError(f"{place} is managed by {label} already. Use one of the two, not both.")
        if "replicate" in _torch.composable_apis(submodule):
            raise ModuleError(f"{place} is managed by torch's replicate already. Use one of the two, not both.")


def _check_kinds(target: _Selection) -> None:
    for name, parameter in target.trainable.items():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ModuleError(f"{name} is lazy. Run one forward with an example input before replicate().")
        if type(parameter.data) is not torch.Tensor and not isinstance(parameter.data, nn.Parameter):
            raise ModuleError(f"{name} is a {type(parameter.data).__name__}; only plain tensors are supported.")
        if not parameter.is_floating_point():
            raise ModuleError(f"{name} is {parameter.dtype}; gradients of real floating dtypes are supported.")
        if owners.find(parameter) is not None:
            raise ModuleError(
                f"parameter {name} is replicated already. Call replicate() once, on the outermost module."
            )
    for name, submodule in target.module.named_modules():
        if isinstance(submodule, (nn.Embedding, nn.EmbeddingBag)) and submodule.sparse:
            raise ModuleError(f"{name or 'the module'} makes sparse gradients. Build it with sparse=False.")


def _check_passes(passes: tuple[GraphPass, ...]) -> tuple[GraphPass, ...]:
    for graph_pass in passes:
        if not isinstance(graph_pass, GraphPass):
            raise ConfigError(
                f"passes must hold graph passes (name, realises_plan, __call__), got {type(graph_pass).__name__}."
            )
    return passes


# --- putting it together ----------------------------------------------------------------------------------------


def _make_replica(target: _Selection, group: Group, request: PlanRequest, passes: tuple[GraphPass, ...]) -> Replica:
    config = request.config
    parameters, names = tuple(target.trainable.values()), tuple(target.trainable)
    if config.strategy == "ddp":  # torch's DDP multiplies before it adds up, whatever the backend could do
        group = dataclasses.replace(group, averaging=Averaging("sum", 1.0 / group.world_size))
    planning = make_plan(target.module, parameters, gradient_specs(parameters, names, group), group, request)
    replica = Replica(
        parameters=parameters,
        names=names,
        frozen=tuple(target.frozen.items()),
        buffers=tuple(target.buffers.values()),
        group=group,
        config=config,
        plan=planning.planned.plan,
        certificate=planning.planned.certificate,
        ready=planning.ready,
        revise=planning.revise,
        revisions=planning.revisions,
        passes=passes,
    )
    replica.make_reducer = lambda: _torch.TorchReducer(
        target.module,
        target.ignored,
        process_group=group.process_group,
        bucket_cap_mb=config.caps_mb()[0],
        find_unused_parameters=config.unused != "error",
    )
    return replica


def _statement(target: _Selection, replica: Replica) -> Statement:
    def describe(tensors: Mapping[str, torch.Tensor]) -> list[str]:
        return [
            f"{name}: {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} strides {list(tensor.stride())}"
            for name, tensor in tensors.items()
        ]

    return {
        "dp_compile": version("dp_compile"),
        "torch": torch.__version__,
        "trainable parameters": describe(target.trainable),
        "frozen parameters": describe(target.frozen),
        "buffers": describe(target.buffers),
        "options": dataclasses.asdict(replica.config) | {"ddp_python_hook": replica.config.uses_python_hook()},
        "passes": [repr(graph_pass) for graph_pass in replica.passes],
        "plan": replica.plan.signature(),
    }


def _compare(group: Group, statement: Statement, *, timeout_s: float, own_error: DPCompileError | None = None) -> str:
    """Compare with the other ranks; a rank that found an error itself only tells the others and raises its own.

    Returns the topic of the meeting, which no other call of `replicate` has.
    """
    _meetings[group.name] += 1
    topic = f"dp_compile.replicate/{group.name}/{_meetings[group.name]}"
    table = table_of(group, timeout_s)
    if table is None:
        return topic
    try:
        agree(table, topic, statement)
    except DPCompileError:
        if own_error is None:
            raise
    return topic


def _broadcast(replica: Replica) -> None:
    states = [tensor.detach() for tensor in (*replica.parameters, *(p for _, p in replica.frozen), *replica.buffers)]
    if replica.group.world_size > 1:
        _torch.broadcast_state(states, replica.group.process_group, BROADCAST_BYTES)


def _install(module: nn.Module, replica: Replica) -> None:
    owners.add(replica)
    if replica.config.uses_python_hook():
        replica.hooks = install_hooks(replica)
    _replica_of[module] = weakref.ref(replica)
    module.register_forward_pre_hook(_ForwardCheck(replica))
    install_entry()


class _ForwardCheck:
    """Ties a replica's life to its module's, and refuses a tracing mode that would drop the hooks.

    Copies and pickles of the module carry an empty check: a copy is not replicated.
    """

    def __init__(self, replica: Replica | None) -> None:
        self.replica = replica

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        _refuse_traced_backward()

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[None]]:
        return (_ForwardCheck, (None,))


def _refuse_python_reducer() -> None:
    if _torch.python_reducer_mode():
        raise ConfigError(
            "torch._dynamo.config.optimize_ddp is 'python_reducer': torch's DDP would then put hooks of its own beside "
            "its reducer. Leave it at its default, True."
        )


def _refuse_traced_backward() -> None:
    if _torch.trace_autograd_ops():
        raise ConfigError(
            "torch._dynamo.config.trace_autograd_ops is on: torch then drops every post-accumulate-grad hook and no "
            "gradient would be reduced. Switch it off and call backward() outside the compiled function."
        )


def _detach(module: nn.Module) -> None:
    for key, hook in list(module._forward_pre_hooks.items()):
        if isinstance(hook, _ForwardCheck):
            del module._forward_pre_hooks[key]
    _replica_of.pop(module, None)
