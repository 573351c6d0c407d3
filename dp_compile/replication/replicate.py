"""`replicate()`: make a module data parallel, in place."""

from __future__ import annotations

import dataclasses
import logging
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dp_compile._torch import compiler, distributed
from dp_compile._torch.dtensors import is_dtensor, layout_of
from dp_compile.config import (
    CHECK_VARIABLE,
    HOOK_VARIABLE,
    ReplicateConfig,
    check_parameters_every,
    has_address,
)
from dp_compile.engine.backward import BROADCAST_BYTES, install_entry
from dp_compile.engine.calibration import LaunchesForPlan
from dp_compile.engine.gradients import gradient_specs
from dp_compile.engine.group import Group, group_on, resolve_group
from dp_compile.engine.hooks import install_hooks
from dp_compile.engine.module_names import class_name
from dp_compile.engine.monitor import MONITOR
from dp_compile.engine.owners import owners
from dp_compile.engine.plan_sync import Meeting, Statement, describe_plan
from dp_compile.engine.replica import Replica, Revision, Revisions
from dp_compile.errors import ConfigError, ModuleError
from dp_compile.passes import DEFAULT_PASSES
from dp_compile.passes.result import GraphPass
from dp_compile.plan.buckets import BucketPlan, GradientSpec
from dp_compile.plan.planner import Planned
from dp_compile.plan.reduction import Averaging
from dp_compile.replication.forward_hooks import (
    ForwardCheck,
    InputMover,
    Pending,
    refuse_traced_backward,
    remove_forward_hooks,
)
from dp_compile.replication.module import (
    behind,
    forget_state,
    give_class,
    has_lost_its_wrapper,
    is_of_a_module_that_is_gone,
    is_pending,
    is_replicated,
    parts_of,
    register_comm_hook,
    replicated_class,
    restore_class,
    set_state,
    state_of,
    unwrap,
)
from dp_compile.replication.planning import PlanRequest, make_plan
from dp_compile.replication.precision import install_precision, make_precision, precision_of, take_precision_off
from dp_compile.replication.selection import (
    Selection,
    check_copied,
    check_ignored,
    check_not_managed,
    check_not_tied,
    check_selection,
    device_of,
    is_waiting,
    owning_modules,
    refuse_sparse,
    select,
    sparse_parameters,
)
from dp_compile.replication.tensor_parallel import check_dtensors
from dp_compile.replication.units import BucketPolicy

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

logger = logging.getLogger("dp_compile.replicate")
ModuleT = TypeVar("ModuleT", bound=nn.Module)


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
    passes: Iterable[GraphPass] | None = None,
    bucket_policy: BucketPolicy | None = None,
    config: ReplicateConfig | None = None,
) -> ModuleT:
    """Average the gradients of `module` over a process group in every backward. Returns the same object.

    Call it with or without `torch.compile`, before or after; the training loop stays as it is. Parameters and buffers
    of the group's first rank are copied to all ranks, after the ranks have compared what they replicate. A module
    whose parameters have no values yet (on the meta device, or lazy) starts with its first forward instead, by when
    they have to have some; all that can be checked before is checked now.

    State dict keys, parameters and pickles do not change. The module's class `Net` becomes `DDPNet`, a subclass with
    the methods of `dp_compile.ReplicatedModule`. Submodules that `fully_shard` manages are left to it.

    Parts of a model with other options, as with `fully_shard`: call `replicate` on a part first, with its options, then
    on the module around it, which leaves out the part's parameters and buffers. Each keeps its policy, hook, factor and
    plan; a backward through several is one graph if their passes and backends are equal. `no_sync`,
    `set_requires_gradient_sync`, `join` and `warmup` of the whole reach its parts; `report`, `unreplicate`,
    `register_comm_hook`, `set_gradient_divide_factor` and `in_backward` are each module's own.

    Args:
        module: what to replicate; a module that `torch.compile` returned is fine too.
        ddp_python_hook: `True`: hooks that are traced with the backward (the point of this package). `False`: torch's
            own composable `replicate` gets the module, with the options that it has, and nothing of this package acts
            on it. `None`: as `config` says, then the environment variable `DP_COMPILE_DDP_PYTHON_HOOK`, then `True`.
        process_group: whom to average with; the default group if neither this nor `device_mesh` is given.
        device_mesh: in place of `process_group`: a mesh with one dimension, also a slice of a larger one; or with two,
            between nodes and inside a node. Gradients are then reduce-scattered inside nodes, all-reduced between them
            and gathered inside: the slow link carries less. A dimension of size one counts as none.
        device_id: the number of a GPU, or a device: tensors among the inputs of `module` are moved there. The module
            has to be there already. A CPU is allowed and moves nothing, as in torch.
        ignored_modules: submodules whose parameters and buffers are left alone, with all below them.
        bucket_cap_mb: asks for buckets by size: MiB at which a bucket is closed.
        find_unused_parameters: what a parameter without a gradient means; see `ReplicateConfig`.
        broadcast_buffers: copy the first rank's buffers to all ranks at the start and after each synchronised backward;
            `False`: neither, each rank keeps its own.
        check_reductions: check after each backward that every gradient was reduced exactly once.
        static_graph: every backward uses the same parameters in the same way; see `ReplicateConfig`.
        gradient_as_bucket_view: whether buckets live from one backward to the next; see `ReplicateConfig`. Gradients
            are views of their buckets, whatever is said, and a bucket never writes over one that somebody kept.
        mp_policy: torch's `torch.distributed.fsdp.MixedPrecisionPolicy`, which means here what it means for
            `fully_shard` of the installed torch: the dtype of compute, of what is sent, of outputs.
        passes: passes over the captured backward instead of the default ones; `()` for none.
        bucket_policy: asks for buckets that end where modules end: a set of module classes, a function of a module's
            fully qualified name and the module that returns whether it is a unit, or a policy of
            `torch.distributed.fsdp.wrap`.
        config: all options in one value; an argument given here wins over its field.

    Raises:
        ConfigError: an option has a value that is not allowed, or no process group is initialised.
        ModuleError: the module cannot be replicated: no trainable parameter, several devices, sparse gradients
            with what they cannot be combined with, a buffer that cannot be copied, a class that cannot be swapped,
            already managed by this package, torch's DDP or FSDP.
        DesyncError: the ranks built different modules or gave different options, or a rank is missing.
    """
    given: dict[str, Any] = {
        "ddp_python_hook": ddp_python_hook,
        "bucket_cap_mb": bucket_cap_mb,
        "find_unused_parameters": find_unused_parameters,
        "broadcast_buffers": broadcast_buffers,
        "check_reductions": check_reductions,
        "static_graph": static_graph,
        "gradient_as_bucket_view": gradient_as_bucket_view,
        "mp_policy": mp_policy,
    }
    return replicate_module(
        module,
        given,
        process_group=process_group,
        device_mesh=device_mesh,
        device_id=device_id,
        ignored_modules=ignored_modules,
        passes=passes,
        bucket_policy=bucket_policy,
        config=config,
    )


def replicate_module(
    module: ModuleT,
    given: dict[str, Any],
    *,
    process_group: dist.ProcessGroup | None = None,
    device_mesh: DeviceMesh | None = None,
    config: ReplicateConfig | None = None,
    device_id: int | torch.device | None = None,
    ignored_modules: Iterable[nn.Module] | None = None,
    passes: Iterable[GraphPass] | None = None,
    bucket_policy: BucketPolicy | None = None,
    needs_values: bool = True,
    keeps_class: bool = False,
) -> ModuleT:
    """As `replicate`.

    Args:
        given: options that were given beside `config`, `None` if not.
        needs_values: parameters on the meta device wait for their values; `False`: they stay there.
        keeps_class: the module's class stays; a wrapper has the methods.

    Raises:
        ConfigError, ModuleError, DesyncError: as in `replicate`.
    """
    meeting, inner = Meeting.of_this_call(resolve_group(process_group, device_mesh)), unwrap(module)
    with meeting.telling_the_others():
        options = _merge_options(config, given)
        if not isinstance(inner, nn.Module):
            raise ModuleError(f"replicate() takes an nn.Module, got {type(module).__name__}.")
    if not options.uses_python_hook():
        distributed.replicate_by_torch(
            inner,
            ignored_modules=ignored_modules,
            device_id=device_id,
            process_group=process_group,
            device_mesh=device_mesh,
            **options_of_torch(options, meeting, bucket_policy),
        )
        return module
    with meeting.telling_the_others():
        release_abandoned(inner)
        _check_not_replicated(inner)
        parts = frozenset(parts_of(inner))
        check_not_tied(inner, parts)
        ignored = check_ignored(ignored_modules) | parts
        chosen, request = _requested(options, bucket_policy, passes)
        device = None if device_id is None else device_of(device_id, "device_id")
        order = _Order(meeting, request, chosen, ignored, device, needs_values, keeps_class)
        check_not_managed(inner, ignored)
        waiting = needs_values and is_waiting(inner, ignored)
        if waiting:
            _wait_for_forward(inner, order)
    if not waiting:
        _start(inner, order)
    return module


def replicate_without_values(module: ModuleT, config: ReplicateConfig, **options: Any) -> ModuleT:
    """As `replicate`, for a module that stays on the meta device, or of fake tensors: its backwards compute nothing.

    To look at them on the fake process group, with `check_reductions=False`: flags cannot be read there.

    Args:
        options: `device_mesh`, `passes`, `bucket_policy` as of `replicate`.

    Raises:
        ConfigError, ModuleError: as in `replicate`.
    """
    return replicate_module(module, {}, config=config, needs_values=False, **options)


def unreplicate(module: ModuleT) -> ModuleT:
    """Undo one call of `replicate`: take off everything it installed. Parameters keep their values.

    Parts that were replicated before stay replicated: call it on each.

    Raises:
        ModuleError: the module is not replicated.
    """
    state = state_of(module)
    if isinstance(state, Replica):
        _release(state)
    inner = behind(module)
    for submodule in inner.modules() if isinstance(state, Pending) else ():
        assert isinstance(state, Pending)
        remove_forward_hooks(submodule, only=state)  # not those of parts
    remove_forward_hooks(inner)
    take_precision_off(inner)
    restore_class(inner)
    forget_state(inner)
    return module


def replicate_with_gradients(module: nn.Module, config: ReplicateConfig) -> None:
    """Replicate a copy with its first forward that computes gradients, over the default group; its class stays.

    One rank may make or load a copy alone, to evaluate it: only with gradients the others are needed.

    Raises:
        ConfigError: no process group is initialised.
    """
    passes, request = _requested(config, None, None)
    group = resolve_group(None, None)
    install_precision(module, make_precision(select(module, frozenset()), config))
    order = _Order(Meeting(group), request, passes, frozenset(), None, keeps_class=True, is_copy=True)
    _wait_for_forward(module, order)


# --- what was asked for -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Order:
    """What the user asked for, checked as far as that needs no parameters."""

    meeting: Meeting
    request: PlanRequest
    passes: tuple[GraphPass, ...]
    ignored: frozenset[nn.Module]
    device: torch.device | None
    needs_values: bool = True
    keeps_class: bool = False
    """A wrapper stands around it, whose `.module` keeps its class, as in torch."""
    is_copy: bool = False
    """It belongs to a copy of the wrapper: nothing happens without gradients."""


def _merge_options(config: ReplicateConfig | None, given: Mapping[str, Any]) -> ReplicateConfig:
    if config is not None and not isinstance(config, ReplicateConfig):
        raise ConfigError(f"config must be a ReplicateConfig, got {type(config).__name__}.")
    options = dataclasses.replace(
        config or ReplicateConfig(), **{name: value for name, value in given.items() if value is not None}
    )
    if not options.uses_python_hook():
        return options
    refuse_traced_backward()
    if compiler.python_reducer_mode():
        raise ConfigError(
            "torch._dynamo.config.optimize_ddp is 'python_reducer': torch's DDP would then put hooks of its own beside "
            "its reducer. Leave it at its default, True."
        )
    return options


def _check_not_replicated(module: nn.Module) -> None:
    if is_replicated(module):
        waits = ", it starts with its first forward" * is_pending(module)
        raise ModuleError(
            f"{class_name(module)} is replicated already{waits}. Call dp_compile.unreplicate() on it, or on its "
            "DistributedDataParallel, to give other options."
        )


def _requested(
    config: ReplicateConfig,
    bucket_policy: BucketPolicy | None,
    passes: Iterable[GraphPass] | None,
) -> tuple[tuple[GraphPass, ...], PlanRequest]:
    """The passes that run, and what is asked of the plan that they may realise."""
    chosen = _check_passes(DEFAULT_PASSES if passes is None else passes)
    return chosen, PlanRequest(config, bucket_policy, any(each.realises_plan for each in chosen))


def _check_passes(passes: Iterable[GraphPass]) -> tuple[GraphPass, ...]:
    if not isinstance(passes, Iterable):
        raise ConfigError(f"passes must be a tuple of graph passes, got {type(passes).__name__}.")
    chosen = tuple(passes)
    for graph_pass in chosen:
        if not isinstance(graph_pass, GraphPass):
            raise ConfigError(
                f"passes must hold graph passes (name, realises_plan, __call__), got {type(graph_pass).__name__}."
            )
        if has_address(graph_pass):
            raise ConfigError(
                f"pass {graph_pass.name} has the repr {graph_pass!r}, with an address that is another on each rank: "
                "ranks compare passes, and compiled code is kept, by repr. Make it a frozen dataclass, with fields "
                "whose repr says their value."
            )
    return chosen


def options_of_torch(
    options: ReplicateConfig, meeting: Meeting, bucket_policy: BucketPolicy | None = None
) -> dict[str, Any]:
    """What torch's DDP is given where `ddp_python_hook` is `False` on every rank, by its names.

    The other options are about plans and captured backwards, of which there are none then.

    Raises:
        ConfigError: an option changes numbers, or what is checked, and torch's DDP does not have it.
        DesyncError: another rank is to use hooks, or is missing.
    """
    refused = {
        "mp_policy": options.mp_policy is not None,
        "gradient_divide_factor": options.gradient_divide_factor is not None,
        "check_nan": options.check_nan,
        "init_sync_buffers": options.init_sync_buffers is not None,
        "bucket_policy": bucket_policy is not None,
        "a device_mesh with two dimensions": meeting.group.levels is not None,
    }
    with meeting.telling_the_others():
        if said := [what for what, is_given in refused.items() if is_given]:
            raise ConfigError(
                f"torch's DDP, which ddp_python_hook=False asks for, does not have {' and '.join(said)}. Leave that "
                "out, or leave ddp_python_hook at its default."
            )
    meeting.compare({HOOK_VARIABLE: False})
    return {
        # torch's DDP takes no math.inf.
        "bucket_cap_mb": None if options.bucket_cap_mb is None else min(options.bucket_cap_mb, 2.0**20),
        "find_unused_parameters": options.may_be_unused and not options.static_graph,
        "static_graph": options.static_graph,
        "gradient_as_bucket_view": bool(options.gradient_as_bucket_view),
        # Given, it warns on torch 2.13, where `forward_sync_buffers` takes its place.
        "broadcast_buffers": None if options.broadcast_buffers else False,
    }


# --- putting it together ----------------------------------------------------------------------------------------


def _start(module: nn.Module, order: _Order, pending: Pending | None = None) -> None:
    """Replicate a module whose parameters have values."""
    with order.meeting.telling_the_others():
        target = select(module, order.ignored)
        check_selection(target, order.device, needs_values=order.needs_values)
        order = dataclasses.replace(order, request=order.request.of(target))
        config = order.request.config
        check_copied(target, buffers=config.copies_buffers_at_start or config.broadcast_buffers)
        check_dtensors(target, order.meeting.group)
        precision = precision_of(module) if order.is_copy else make_precision(target, config)
        swapped = None if order.keeps_class else replicated_class(module, casts=config.casts)
        replica = _make_replica(target, order)
        replica.precision = precision
        statement = _statement(target, replica)
    # Outside of the block above: that tells the others of an error of this rank's own, this compares what all say.
    replica.topic = order.meeting.compare(statement)
    _broadcast(replica)
    if pending is None:
        _move_inputs(module, order.device)
    else:
        replica.sync = pending.sync
    _install(module, replica)
    if not order.is_copy:
        install_precision(module, precision)
    if swapped is not None:
        give_class(module, swapped)
    for state, hook in () if pending is None else pending.comm_hooks:
        register_comm_hook(module, state, hook)


def _make_replica(target: Selection, order: _Order) -> Replica:
    config = order.request.config
    parameters, names = tuple(target.trainable.values()), tuple(target.trainable)
    group, levels = group_on(order.meeting.group.process_group, parameters[0].device.type), order.meeting.group.levels
    averaging = _averaging(config, parameters)
    group = dataclasses.replace(group, averaging=averaging, levels=levels)
    request = order.request
    sparse = sparse_parameters(target)
    refused = {
        "a device_mesh with two dimensions": levels is not None,
        "reduce_dtype": averaging.wire is not None,
    }
    for what in (what for what, is_given in refused.items() if is_given):
        refuse_sparse(names, sparse, what)
    gradients = gradient_specs(parameters, names, group, sparse)
    planning = make_plan(target.module, gradients, group, request)
    replica = Replica(
        parameters=parameters,
        names=names,
        frozen=tuple(target.frozen.items()),
        buffer_places=target.buffer_places(),
        parameter_places=target.parameter_places(),
        group=group,
        config=config,
        plan=planning.planned.plan,
        certificate=planning.planned.certificate,
        ready=planning.ready,
        strategy=planning.strategy,
        outline=target.outline(),
        revisions=Revisions(planning.revisions, planning.layout),
        passes=order.passes,
        beside_shards=target.sharded,
        sparse=sparse,
    )
    replica.revisions.average_by = partial(_average_by, weakref.ref(replica), weakref.ref(target.module), request)
    replica.revisions.scatter = partial(_scatter, weakref.ref(replica), weakref.ref(target.module), request)
    if Revision.FROM_LAUNCHES in planning.revisions:
        replica.observers.append(LaunchesForPlan(weakref.ref(replica)))
    return replica


def _average_by(
    of: weakref.ref[Replica], within: weakref.ref[nn.Module], request: PlanRequest, averaging: Averaging
) -> None:
    """Average otherwise from now on; neither the replica nor its module must be held alive by this.

    The buckets stay what they are, with all that was learnt of backwards, unless gradients get another size.
    """
    replica, module = of(), within()
    assert replica is not None
    assert module is not None
    was = replica.group.averaging
    # Where nothing but the divisor is another one, perhaps in each step, plans are made as before: it takes long.
    as_before = dataclasses.replace(was, divide_by=averaging.divide_by, given=averaging.given) == averaging
    _reduce_by(replica, dataclasses.replace(replica.group, averaging=averaging), module, None if as_before else request)
    replica.config = dataclasses.replace(replica.config, gradient_divide_factor=averaging.divide_by)


def _scatter(
    of: weakref.ref[Replica], within: weakref.ref[nn.Module], request: PlanRequest, names: frozenset[str]
) -> None:
    """As `_average_by`, for what `Replica.scatter` says. Of no names: all as it was before."""
    replica, module = of(), within()
    assert replica is not None
    assert module is not None
    _reduce_by(replica, dataclasses.replace(replica.group, scattered=names), module, request)
    replica.after.scattered = frozenset(index for index, name in enumerate(replica.names) if name in names)


def _reduce_by(replica: Replica, group: Group, module: nn.Module, request: PlanRequest | None) -> None:
    """Reduce as the group says from now on. `request`: how a plan is made for it; `None`: as it was."""
    gradients = gradient_specs(replica.parameters, replica.names, group, replica.sparse)
    planning = None if request is None else make_plan(module, gradients, group, request)
    replica.group = group
    if planning is not None:
        replica.revisions.layout = planning.layout
    if planning is None or _keep_together(replica.plan, gradients):
        replica.adopt(Planned(replica.plan.with_keys_of(gradients), replica.certificate), replica.ready)
    else:
        replica.revisions.due = planning.revisions
        replica.adopt(planning.planned, planning.ready)


def _keep_together(plan: BucketPlan, gradients: Sequence[GradientSpec]) -> bool:
    """Whether the buckets of a plan can stay what they are when gradients are reduced in another way."""
    keys = {gradient.index: gradient.key for gradient in gradients}
    sizes = {gradient.index: gradient.itemsize for gradient in gradients}
    if any(sizes[gradient.index] != gradient.itemsize for gradient in plan.gradients):
        return False
    if any(keys[each.index].reduction.is_scattered != each.key.reduction.is_scattered for each in plan.gradients):
        return False  # members lie in another way
    together = ({keys[member.gradient.index] for member in bucket.members} for bucket in plan.buckets)
    return all(len(found) == 1 for found in together)


def _averaging(config: ReplicateConfig, parameters: Iterable[torch.Tensor]) -> Averaging:
    dtype = config.wire_dtype(parameters)
    wire = None if dtype is None else str(dtype).removeprefix("torch.")
    return Averaging(wire, config.gradient_divide_factor)


def _statement(target: Selection, replica: Replica) -> Statement:
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
        "options": _compared_options(replica.config),
        CHECK_VARIABLE: check_parameters_every(),
        "passes": [repr(graph_pass) for graph_pass in replica.passes],
        "plan": replica.plan.signature(),
        "device_mesh": None if replica.group.levels is None else replica.group.levels.ranks,
    }


def _compared_options(config: ReplicateConfig) -> dict[str, Any]:
    """All options, as plain data."""
    options = dataclasses.asdict(config)
    options["mp_policy"] = repr(config.mp_policy)
    return options


def _broadcast(replica: Replica) -> None:
    buffers = replica.buffers if replica.config.copies_buffers_at_start else ()
    states = [tensor.detach() for tensor in (*replica.parameters, *(p for _, p in replica.frozen), *buffers)]
    if replica.group.world_size > 1:
        distributed.broadcast_state(states, replica.group.process_group, BROADCAST_BYTES)


def _install(module: nn.Module, replica: Replica) -> None:
    owners.add(replica)
    replica.hooks = install_hooks(replica)
    set_state(module, replica)
    # Not module.register_...: a ScriptModule refuses that, for hooks that are not compiled with it. It runs this one.
    nn.Module.register_forward_pre_hook(module, ForwardCheck(replica))
    install_entry()
    MONITOR.watch(replica)
    logger.info("the plan: %s", describe_plan(replica))


def release_abandoned(module: nn.Module) -> None:
    """Undo what wrappers did that are gone since: as in torch, the module may then be wrapped anew."""
    found = {entry[0] for entry in map(owners.find, module.parameters()) if entry is not None}
    for replica in filter(is_of_a_module_that_is_gone, found):
        _release(replica)
    roots = {replica.outline.root() for replica in found}
    for root in roots | ({module} if is_pending(module) else set()):
        if root is not None and has_lost_its_wrapper(root):
            unreplicate(root)


def _release(replica: Replica) -> None:
    if replica.hooks is not None:
        replica.hooks.remove()
    replica.hooks = None
    for each in replica.after.updates:
        each.released()
    if replica.comm_hook is not None and replica.comm_hook.memory is not None:
        replica.comm_hook.memory.unbind()
    root = replica.outline.root()
    if root is not None:
        take_precision_off(root)
    owners.remove(replica)
    MONITOR.unwatch(replica)


def _move_inputs(module: nn.Module, device: torch.device | None) -> None:
    if device is not None and device.type != "cpu":
        module.register_forward_pre_hook(InputMover(device), with_kwargs=True)


def _wait_for_forward(module: nn.Module, order: _Order) -> None:
    """Start with the first forward, when every parameter has a value."""

    def start(root: nn.Module, pending: Pending) -> None:
        _start(root, order, pending)
        for submodule in root.modules():
            remove_forward_hooks(submodule, only=pending)
        compiler.forget_calls_that_broke()

    pending = Pending(module, order.request.config, order.meeting.group, start, needs_grad=order.is_copy)
    casts = order.request.config.casts
    swapped = None if order.keeps_class else replicated_class(module, waiting=True, casts=casts)
    _move_inputs(module, order.device)
    for owner in dict.fromkeys((module, *owning_modules(module, order.ignored))):
        owner.register_forward_pre_hook(pending)
    set_state(module, pending)
    if swapped is not None:
        give_class(module, swapped)
