"""`replicate()`: select parameters, check that all ranks selected the same ones, and install their hooks, in place."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import weakref
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from functools import partial, wraps
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final, NamedTuple, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dp_compile._torch import compiler, distributed
from dp_compile._torch.dtensors import is_dtensor, layout_of
from dp_compile.config import (
    CHECK_VARIABLE,
    HOOK_VARIABLE,
    LINK_VARIABLE,
    NOMINAL,
    ReplicateConfig,
    check_parameters_every,
    link_source,
)
from dp_compile.engine.backward import install_entry
from dp_compile.engine.hooks import install_hooks
from dp_compile.engine.monitor import MONITOR
from dp_compile.engine.plan_sync import describe_plan
from dp_compile.errors import ConfigError, UnsupportedModuleError, require
from dp_compile.plan.reduction import Averaging
from dp_compile.replica.gradients import gradient_specs
from dp_compile.replica.group import Group, group_on, resolve_group
from dp_compile.replica.module_names import class_name
from dp_compile.replica.precision import ATTRIBUTE, make_precision
from dp_compile.replica.replica import Replica, owners
from dp_compile.replica.store_channel import Statement, check_consistent_in_call, propagate_errors
from dp_compile.replica.supported import REDUCE_DTYPE, TWO_LEVELS, check_supported
from dp_compile.replication import module as modules
from dp_compile.replication import selection
from dp_compile.replication.calibration import remembered_cost
from dp_compile.replication.gradient_averaging import make_plan, register_comm_hook

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

logger = logging.getLogger("dp_compile.replicate")
ModuleT = TypeVar("ModuleT", bound=nn.Module)
P = ParamSpec("P")
R = TypeVar("R")
CALL: Final = "replicate()"
OPTIONS: Final = frozenset(each.name for each in dataclasses.fields(ReplicateConfig))
_REMEDIES: Final = {  # for arguments of torch's DDP that an entry point does not have
    "mixed_precision": "pass mp_policy, a torch.distributed.fsdp.MixedPrecisionPolicy",
    "delay_all_reduce_named_params": "leave it out: the planner orders all reductions",
    "param_to_hook_all_reduce": "leave it out: the planner orders all reductions",
    "skip_all_reduce_unused_params": "call requires_grad_(False) on unused parameters first: they are not reduced then",
    "init_sync": "leave it out: ranks start from the first rank's state",
    "forward_sync_buffers": "pass broadcast_buffers, and init_sync_buffers in config",
    "bucket_cap_mb_list": "pass bucket_cap_mb for all buckets, or leave it out: the planner chooses each size",
    "batched_grad_copy": "leave it out: compiled backwards compute gradients in their buckets",
}


def checks_names(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap an entry point: an unknown keyword argument raises a ConfigError with the nearest name or the remedy."""
    allowed = inspect.signature(function).parameters.keys() - {"self"}
    entry = f"{function.__qualname__.removesuffix('.__init__')}()"

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs.keys() - allowed:
            nearest = get_close_matches(name, sorted(allowed | OPTIONS), 1, 0.5)
            if not nearest:
                remedy = f"its arguments are {', '.join(sorted(allowed))}"
            elif nearest[0] in allowed:
                remedy = f"did you mean {nearest[0]}?"
            else:
                remedy = f"pass config=dp_compile.ReplicateConfig({nearest[0]}=...)"
            raise ConfigError(f"{entry} has no argument {name}: {_REMEDIES.get(name, remedy)}")
        return function(*args, **kwargs)

    return call


@checks_names
def replicate(
    module: ModuleT,
    *,
    ddp_python_hook: bool | None = None,
    process_group: dist.ProcessGroup | None = None,
    device_mesh: DeviceMesh | None = None,
    device_id: int | torch.device | None = None,
    ignored_modules: Iterable[nn.Module] | None = None,
    bucket_cap_mb: float | None = None,
    find_unused_parameters: bool | None = None,
    broadcast_buffers: bool | None = None,
    check_reductions: bool | None = None,
    static_graph: bool | None = None,
    gradient_as_bucket_view: bool | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    bucket_policy: selection.BucketPolicy | None = None,
    config: ReplicateConfig | None = None,
) -> ModuleT:
    """Average the gradients of `module` over a process group in every backward. Returns the same object.

    Call it before or after `torch.compile`, or without it; the training loop does not change. The ranks compare their
    modules and options. Then parameters and buffers of the group's first rank are broadcast to all ranks. A module with
    lazy parameters, or tensors on the meta device, is checked now as far as possible and replicated in its first
    forward. All tensors must have values by then.

    State dict keys, parameters and pickles do not change. The module's class `Net` becomes `DDPNet`, a subclass with
    the methods of `dp_compile.ReplicatedModule`. Submodules that `fully_shard` manages are not replicated.

    To give a submodule other options, call `replicate` on it first, then on the module that contains it, as with
    `fully_shard`. The outer call skips that part's parameters and buffers. Each part keeps its policy, hook, factor and
    plan. A backward through several parts is one graph if their backends are equal. `no_sync`,
    `set_requires_gradient_sync` and `warmup` called on the outer module also apply to its parts. `report`,
    `unreplicate`, `register_comm_hook`, `set_gradient_divide_factor` and `in_backward` apply to one module only.

    Args:
        module: the module to replicate, or the result of `torch.compile` for it.
        ddp_python_hook: as in `ReplicateConfig`; `False`: pass the module to torch's own composable `replicate`, with
            the options it supports.
        process_group: the ranks to average over; the default group if neither this nor `device_mesh` is given.
        device_mesh: alternative to `process_group`. Either one dimension, possibly sliced from a larger mesh, or two:
            between nodes, then inside a node. With two, gradients are reduce-scattered inside nodes, all-reduced
            between them and all-gathered inside: the slow link carries less. A dimension of size one is ignored.
        device_id: a GPU index or a device, on which `module` already is. Input tensors are moved to it if it is no CPU.
        ignored_modules: submodules to skip, with the parameters and buffers of all their descendants.
        bucket_cap_mb: bucket size in MiB; without it the planner chooses the bucket boundaries.
        find_unused_parameters: whether a parameter may have no gradient; see `ReplicateConfig`.
        broadcast_buffers: broadcast the first rank's buffers at the start and after each synchronised backward.
        check_reductions: check that every gradient is reduced exactly once, and more; see `ReplicateConfig`.
        static_graph: every backward uses the same parameters in the same way; see `ReplicateConfig`.
        gradient_as_bucket_view: whether bucket memory is kept between backwards; see `ReplicateConfig`.
        mp_policy: torch's `torch.distributed.fsdp.MixedPrecisionPolicy`, as for `fully_shard` of the installed torch.
        bucket_policy: buckets end with modules: a set of module classes, or a policy of `torch.distributed.fsdp.wrap`.
        config: all options in one object; an argument given here overrides its field.

    Raises:
        ConfigError: an option has an invalid value or does not support sparse gradients, parameters are not on
            `device_id` or are DTensors over several ranks of the group, or no process group is initialised.
        UnsupportedModuleError: the module has no trainable parameter, parameters on several devices or of a type that
            cannot be reduced, a buffer that cannot be copied or a class that cannot be swapped. Or this package,
            torch's DDP or FSDP already manages it.
        DesyncError: the ranks built different modules or gave different options, or a rank is missing.
    """
    arguments = dict(locals())
    del arguments["module"]
    options = {name: arguments.pop(name) for name in OPTIONS & arguments.keys()}
    return replicate_module(module, options, **arguments)


class _Request(NamedTuple):
    """The arguments of `replicate`, validated as far as possible without parameter values."""

    group: Group
    config: ReplicateConfig
    bucket_policy: selection.BucketPolicy | None
    ignored: frozenset[nn.Module]
    device: torch.device | None
    needs_values: bool
    keeps_class: bool


def replicate_module(
    module: ModuleT,
    given: Mapping[str, Any],
    *,
    process_group: dist.ProcessGroup | None = None,
    device_mesh: DeviceMesh | None = None,
    config: ReplicateConfig | None = None,
    device_id: int | torch.device | None = None,
    ignored_modules: Iterable[nn.Module] | None = None,
    bucket_policy: selection.BucketPolicy | None = None,
    needs_values: bool = True,
    keeps_class: bool = False,
) -> ModuleT:
    """Implementation of `replicate`.

    Args:
        given: options that override those of `config`; `None` means not given.
        needs_values: `True`: replication of meta-device parameters waits until they have values. `False`: parameters
            may stay on the meta device or be fake tensors, to inspect backwards that compute nothing. That needs the
            fake process group and `check_reductions=False`, as flags cannot be read there.
        keeps_class: do not change the module's class, because a wrapper has the methods, as with torch's DDP.
    """
    group, inner = resolve_group(process_group, device_mesh), modules.unwrap(module)
    with propagate_errors(group, CALL):
        options = merge_options(config, given)
        if not isinstance(inner, nn.Module):
            raise UnsupportedModuleError(f"replicate() takes an nn.Module, got {type(module).__name__}.")
    if not options.uses_python_hook():
        distributed.replicate_by_torch(
            inner,
            ignored_modules=ignored_modules,
            device_id=device_id,
            process_group=process_group,
            device_mesh=device_mesh,
            **options_of_torch(options, group, bucket_policy),
        )
        return module
    with propagate_errors(group, CALL):
        if state := modules.find_state(inner):
            waits = " (awaits its first forward)" * isinstance(state, modules.Pending)
            raise UnsupportedModuleError(
                f"{class_name(inner)} is replicated already{waits}. Remove this call. To change options, call "
                "dp_compile.unreplicate() on it, or on its DistributedDataParallel, first."
            )
        parts = frozenset(modules.parts_of(inner))
        ignored = selection.check_ignored(ignored_modules) | parts
        device = None if device_id is None else selection.device_of(device_id, "device_id")
        request = _Request(group, options, bucket_policy, ignored, device, needs_values, keeps_class)
        selection.check_not_managed(inner, ignored, parts)
        waiting = needs_values and selection.is_waiting(inner, ignored)
        if waiting:
            kind = modules.replicated_class(inner, waiting=True, casts=options.casts)  # a wrapper never waits
            pending = modules.Pending(inner, partial(_start, request))
            for owner in dict.fromkeys((inner, *selection.owning_modules(inner, ignored))):
                owner.register_forward_pre_hook(pending)
            modules.states[inner] = weakref.ref(pending)
            modules.give_class(inner, kind)
    if not waiting:
        _start(request, inner)
    if device is not None and device.type != "cpu":
        inner.register_forward_pre_hook(modules.InputMover(device), with_kwargs=True)
    return module


def unreplicate(module: ModuleT) -> ModuleT:
    """Undo one call of `replicate`: remove everything it installed. Parameters keep their values.

    Separately replicated parts stay replicated: call it on each of them.

    Raises:
        UnsupportedModuleError: the module is not replicated.
    """
    state, inner = modules.state_of(module), modules.inner_module(module)
    if isinstance(state, Replica):
        for handle in state.module.hook_handles:
            handle.remove()
        state.module.hook_handles = ()
        for each in state.after.updates:
            each.released()
        if state.hook_memory is not None:
            state.hook_memory.is_used = False
        owners.remove(state)
    else:
        for submodule in inner.modules():
            modules.remove_forward_hooks(submodule, only=state)  # parts keep theirs
    modules.remove_forward_hooks(inner)
    if (precision := vars(inner).pop(ATTRIBUTE, None)) is not None:
        precision.forget()
    modules.give_class(inner, modules.original_class(inner))
    modules.states.pop(inner, None)
    return module


# --- options ----------------------------------------------------------------------------------------------------


def merge_options(config: ReplicateConfig | None, given: Mapping[str, Any]) -> ReplicateConfig:
    """Return `config` with the options in `given` overriding its fields; `None` means not given."""
    require(isinstance(config, ReplicateConfig | None), "config", "a ReplicateConfig", type(config))
    options = dataclasses.replace(
        config or ReplicateConfig(), **{name: value for name, value in given.items() if value is not None}
    )
    if options.uses_python_hook():
        modules.refuse_traced_backward()
        if compiler.python_reducer_mode():
            raise ConfigError(
                "torch._dynamo.config.optimize_ddp is 'python_reducer': torch's DDP would then add Python hooks to its "
                "reducer. Leave it at its default, True."
            )
    return options


def options_of_torch(
    options: ReplicateConfig, group: Group, bucket_policy: selection.BucketPolicy | None = None
) -> dict[str, Any]:
    """Check that every rank has `ddp_python_hook=False`, and return the keyword arguments for torch's DDP.

    Options of plans and captured backwards are dropped. Raises a ConfigError for options that change numerics or checks
    and that torch's DDP does not have.
    """
    refused = {
        "mp_policy": options.mp_policy is not None,
        "gradient_divide_factor": options.gradient_divide_factor is not None,
        "check_nan": options.check_nan,
        "init_sync_buffers": options.init_sync_buffers is not None,
        "bucket_policy": bucket_policy is not None,
        "a device_mesh with two dimensions": group.levels is not None,
    }
    with propagate_errors(group, CALL):
        if asked := [what for what, is_given in refused.items() if is_given]:
            raise ConfigError(
                f"torch's DDP, selected by ddp_python_hook=False or {HOOK_VARIABLE}=0, does not have "
                f"{' and '.join(asked)}. Leave that out, or pass ddp_python_hook=True."
            )
    check_consistent_in_call(group, {HOOK_VARIABLE: False}, CALL)
    theirs = {
        # torch's DDP does not accept math.inf.
        "bucket_cap_mb": None if options.bucket_cap_mb is None else min(options.bucket_cap_mb, 2.0**20),
        "find_unused_parameters": options.may_be_unused and not options.static_graph,
        "static_graph": options.static_graph,
        "gradient_as_bucket_view": bool(options.gradient_as_bucket_view),
        # Passed only if it is False: torch 2.13 warns about it, as `forward_sync_buffers` replaces it there.
        "broadcast_buffers": None if options.broadcast_buffers else False,
    }
    return {name: value for name, value in theirs.items() if value is not None}


# --- select, check, compare, install ----------------------------------------------------------------------------


def _start(request: _Request, module: nn.Module, pending: modules.Pending | None = None) -> None:
    """Replicate a module whose parameters have values."""
    config, policy = request.config, request.bucket_policy
    with propagate_errors(request.group, CALL):
        target = selection.select(module, request.ignored)
        copies_buffers = config.copies_buffers_at_start or config.broadcast_buffers
        selection.check(target, request.device, copies_buffers=copies_buffers, needs_values=request.needs_values)
        selection.check_dtensors(target, request.group.process_group)
        precision = make_precision(module, config, target.parameters.values(), target.left_alone)
        kind = type(module) if request.keeps_class else modules.replicated_class(module, casts=config.casts)
        parameters, names, refs = tuple(target.trainable.values()), tuple(target.trainable), target.refs(precision)
        wire = config.wire_dtype(parameters)
        averaging = Averaging(None if wire is None else str(wire).removeprefix("torch."), config.gradient_divide_factor)
        group = group_on(request.group.process_group, parameters[0].device.type)
        group = dataclasses.replace(group, averaging=averaging, levels=request.group.levels)
        gradients = gradient_specs(parameters, names, group, refs.sparse)
        units = None if policy is None else selection.units_of(module, policy, target.left_alone)
        plan, planning = make_plan(gradients, group, config, units)
        replica = Replica(
            parameters=parameters, names=names, module=refs, group=group, config=config, plan=plan, planning=planning
        )
        check_supported(replica, (*[TWO_LEVELS] * (group.levels is not None), *[REDUCE_DTYPE] * (wire is not None)))
        statement = _statement(target, replica)
    # Not in propagate_errors(), which reports errors of this rank alone: this check raises on all ranks.
    replica.module.topic = check_consistent_in_call(request.group, statement, CALL)
    if replica.planning.awaits_graph and config.cost is None and replica.group.has_others and link_source() != NOMINAL:
        replica.group = dataclasses.replace(replica.group, measured=remembered_cost(replica))
    buffers = replica.buffers if config.copies_buffers_at_start else ()
    states = [*replica.parameters, *(parameter for _, parameter in replica.module.frozen), *buffers]
    if replica.group.world_size > 1:
        distributed.broadcast(states, replica.group.process_group)
    owners.add(replica)
    install_hooks(replica)
    modules.states[module] = weakref.ref(replica)
    # Not module.register_...: a ScriptModule's own method rejects hooks not scripted with it. This way it runs them.
    nn.Module.register_forward_pre_hook(module, modules.ForwardCheck(replica))
    install_entry()
    MONITOR.watch(replica)
    if precision is not None:
        vars(module)[ATTRIBUTE] = precision
    modules.give_class(module, kind)
    logger.info("the plan: %s", describe_plan(replica))
    if pending is not None:
        replica.state.sync = pending.state.sync
        for state, hook in pending.comm_hooks:
            register_comm_hook(replica, class_name(module), state, hook)
        for submodule in module.modules():
            modules.remove_forward_hooks(submodule, only=pending)
        compiler.forget_calls_that_broke()


def _statement(target: selection.Selection, replica: Replica) -> Statement:
    """Return the facts that must be equal on all ranks, as plain data."""

    def describe(tensors: Mapping[str, torch.Tensor]) -> list[str]:
        return [
            f"{name}: {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} strides {list(tensor.stride())}"
            + (f" {layout_of(tensor)}" if is_dtensor(tensor) else "")
            for name, tensor in tensors.items()
        ]

    return {
        HOOK_VARIABLE: True,
        "dp_compile": version("dp_compile"),
        "torch": torch.__version__,
        "trainable parameters": describe(target.trainable),
        "frozen parameters": describe(target.frozen),
        "buffers": describe(target.buffers) if replica.config.copies_buffers_at_start else [],
        "options": dataclasses.asdict(replica.config) | {"mp_policy": repr(replica.config.mp_policy)},
        CHECK_VARIABLE: check_parameters_every(),
        LINK_VARIABLE: link_source(),
        "plan": replica.plan.signature(),
        "device_mesh": None if replica.group.levels is None else replica.group.levels.ranks,
    }
