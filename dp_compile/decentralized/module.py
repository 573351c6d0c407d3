"""`decentralize()`: each step mixes parameters with a few other ranks, and reduces no gradient."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
import os
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeVar

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim.lr_scheduler import LRScheduler

from dp_compile.config import ReplicateConfig
from dp_compile.decentralized.mixing import Mixer, MixingUpdates, plan_of
from dp_compile.decentralized.topologies import Topology
from dp_compile.decentralized.topologies import topology as topology_of_name
from dp_compile.errors import ReductionError, UnsupportedModuleError, is_number, require
from dp_compile.optim.setup import check_kind
from dp_compile.plan.planner import PlanResult
from dp_compile.replica.replica import Replica
from dp_compile.replica.store_channel import check_consistent_in_call, propagate_errors
from dp_compile.replication.module import Pending, parts_of, replica_of, state_of, unwrap
from dp_compile.replication.replicate import replicate, unreplicate
from dp_compile.replication.selection import refuse_dtensors

ModuleT = TypeVar("ModuleT", bound=nn.Module)
OptimizerFn = Callable[[Any], torch.optim.Optimizer]  # of a list of (name, parameter), as `torch.optim` takes it
SchedulerFn = Callable[[torch.optim.Optimizer], LRScheduler]

CALL: Final = "decentralize()"
_NOT_REDUCED: Final = (  # options of reductions, and of parameters that are equal on all ranks: not allowed here
    "bucket_cap_mb", "cost", "gradient_divide_factor",
    "find_unused_parameters", "static_graph", "gradient_as_bucket_view", "check_nan",
)  # fmt: skip
_classes: weakref.WeakValueDictionary[type, type] = weakref.WeakValueDictionary()


def decentralize(
    module: ModuleT,
    *,
    topology: str | Topology,
    optimizer: torch.optim.Optimizer | OptimizerFn,
    lr_scheduler_fn: SchedulerFn | None = None,
    scaler: GradScaler | None = None,
    grad_clip_norm: float = 0.0,
    param_as_bucket_view: bool = True,
    bucket_size_in_mb: float = 25,
    local_world_size: int | None = None,
    sync_buffer_in_global_avg: bool = False,
    config: ReplicateConfig | None = None,
) -> ModuleT:
    """In each step, mix parameters with a few ranks of the default group, in place of reducing gradients.

    Returns the same object, with the methods of `DecentralizedModule`. Each synchronised backward is a step. With all
    gradients ready, it waits for the parameters that the neighbours sent in the previous step, mixes, clips, updates
    with this rank's own gradients, and sends for the next step. Ranks start with the parameters and buffers of the
    first rank, and differ afterwards. `optimizer.step()` and `zero_grad()` may stay in the loop and do nothing.

    Args:
        module: not replicated yet, compiled or not.
        topology: a name that `topologies.topology` accepts, or a `Topology` of as many ranks as the group.
        optimizer: one over parameters of `module` only, or a function that makes one from (name, parameter) pairs. Its
            method `pre_average_hook(edge, weight)`, if any, is called before parameters are mixed, when
            `parameter.comm_buffer` holds the received values, as in decent-dp.
        lr_scheduler_fn: makes a scheduler from the optimizer. The scheduler steps once in each training step.
        scaler: the `torch.amp.GradScaler` that scales losses in the loop. The backward unscales, skips steps and
            updates the scale, to the smallest among the ranks that mix.
        grad_clip_norm: clip the gradients of each bucket separately to this norm, as in decent-dp; 0: no clipping.
        param_as_bucket_view: move each bucket's parameters to one buffer, which one kernel mixes; `False`: do not.
        bucket_size_in_mb: MiB of parameters at which a bucket is closed.
        local_world_size: ranks per node, for some topologies; `None`: environment variable `LOCAL_WORLD_SIZE`, else 1.
        sync_buffer_in_global_avg: global averages include floating-point buffers.
        config: for example `backend`, `param_dtype` of `mp_policy`. Options of reductions raise an error.

    Raises:
        ConfigError: an option or the topology's number of ranks is not allowed, or parameters are DTensors or complex.
        UnsupportedModuleError: the module cannot be replicated, or has parameters without values.
        DesyncError: ranks differ in model, topology or options, or a rank has not called.
    """
    options = _options(config)
    refuse_dtensors(unwrap(module), CALL)
    if parts_of(unwrap(module)):
        raise UnsupportedModuleError(
            "a part of the module is replicated already. Call dp_compile.unreplicate(part) first."
        )
    replicate(module, config=options)
    try:
        if isinstance(state_of(module), Pending):
            raise UnsupportedModuleError(
                "the module has lazy or meta parameters. Run a forward, or initialise them, first."
            )
        replica = replica_of(module)
        with propagate_errors(replica, CALL):
            clips = is_number(grad_clip_norm) and grad_clip_norm >= 0
            require(clips, "grad_clip_norm", "a number >= 0", grad_clip_norm)
            has_size = is_number(bucket_size_in_mb) and bucket_size_in_mb > 0
            require(has_size, "bucket_size_in_mb", "a number > 0", bucket_size_in_mb)
            require(isinstance(scaler, GradScaler | None), "scaler", "a torch.amp.GradScaler or None", type(scaler))
            used_scaler = scaler or GradScaler(enabled=False)
            world_size, chosen = replica.group.world_size, topology
            if not isinstance(chosen, Topology):
                local = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if local_world_size is None else local_world_size
                chosen = topology_of_name(chosen, world_size, local)
            found = f"{chosen.name}, {chosen.world_size} ranks"
            require(chosen.world_size == world_size, "topology", f"of {world_size} ranks, the size of the group", found)
            made = _optimizer(optimizer, replica)
            scheduler = None if lr_scheduler_fn is None else lr_scheduler_fn(made)
            replica.adopt(PlanResult(plan_of(replica, bucket_size_in_mb)), replica.planning.ready)
        edges = hashlib.sha256(repr(chosen.steps).encode()).hexdigest()[:8]
        check_consistent_in_call(replica, {
            "topology": f"{chosen.name}, period {chosen.period}, edges {edges}",
            "optimizer": type(made).__qualname__,
            "grad_clip_norm": float(grad_clip_norm),
            "scaler": used_scaler.is_enabled(),
            "buckets": replica.plan.signature(),
        }, CALL)  # fmt: skip
        updates = MixingUpdates(
            made,
            Mixer(replica, chosen, as_views=param_as_bucket_view),
            max_norm=grad_clip_norm,
            scaler=used_scaler,
            scheduler=scheduler,
            averages_buffers=sync_buffer_in_global_avg,
        )
    except BaseException:
        unreplicate(module)
        raise
    replica.planning.awaits_graph, replica.planning.strategy, replica.state.reduces_gradients = False, "fixed", False
    replica.after.updates.append(updates)
    inner = unwrap(module)
    if (kind := type(inner)) not in _classes:  # one subclass per class, so that modules share compiled code
        _classes[kind] = type(kind.__name__, (DecentralizedModule, kind), {"__module__": kind.__module__})
    inner.__class__ = _classes[kind]
    updates.handles = [
        inner.register_state_dict_pre_hook(_warn_of_own_parameters),
        inner.register_load_state_dict_pre_hook(_refuse_to_load),
        inner.register_load_state_dict_post_hook(_forget_what_was_sent),
    ]
    return module


def mixing_of(module: nn.Module) -> MixingUpdates:
    """Return what mixes the parameters of a decentralized module. Raise `UnsupportedModuleError` for other modules."""
    for each in replica_of(module).after.updates:
        if isinstance(each, MixingUpdates):
            return each
    raise UnsupportedModuleError(f"{type(unwrap(module)).__name__} is not decentralized. Call decentralize() first.")


class DecentralizedModule(nn.Module):
    """Methods that `decentralize` adds to a module. Where decent-dp has such a method, name and arguments are equal."""

    def global_avg(self, will_revert: bool = True, return_d2c: bool = False) -> float | None:
        """Replace parameters by their average over all ranks. Every rank calls it, between two steps.

        Args:
            will_revert: keep own parameters for `revert_global_avg`. `False`: training continues from the average.
            return_d2c: return the Euclidean distance of this rank's own parameters to the average.

        Raises:
            ReductionError: parameters already hold a global average.
            CommunicationError, DesyncError: a rank has not called, or is at another step.
        """
        state = mixing_of(self)
        state.mixer.average(keep=will_revert or return_d2c, buffers=state.averages_buffers)
        distance = state.mixer.distance_to_average() if return_d2c else None
        if return_d2c and not will_revert:
            state.mixer.accept()
        return distance

    def revert_global_avg(self) -> None:
        """Restore own parameters, and buffers if `global_avg` averaged them. Without an average: `ReductionError`."""
        mixing_of(self).mixer.revert()

    @contextlib.contextmanager
    def global_average(self) -> Iterator[None]:
        """In the context, set parameters to their average over all ranks, to evaluate or save; restore on exit."""
        self.global_avg()
        try:
            yield
        finally:
            self.revert_global_avg()

    def set_accumulate_grad(self, enable: bool = True) -> None:
        """Set whether backwards only accumulate gradients from now on, as in `no_sync()`."""
        replica_of(self).state.sync = not enable

    def set_adaptive_factor(self, factor: float) -> None:
        """Set how far a step moves towards the average of the ranks that mix: 1 (default): fully, 0: not at all."""
        require(is_number(factor) and math.isfinite(factor), "factor", "a finite number", factor)
        mixing_of(self).mixer.factor = float(factor)

    def get_lr(self) -> float:
        """Return the learning rate of the optimizer's first group for the next step."""
        return float(mixing_of(self).optimizer.param_groups[0]["lr"])


# Hooks of the module. A copy has them too, but is a plain module.


def _warn_of_own_parameters(module: nn.Module, *_: Any) -> None:
    mixer = mixing_of(module).mixer if isinstance(module, DecentralizedModule) else None
    if mixer is None or mixer.all_equal or mixer.kept or mixer.topology.world_size == 1 or mixer.has_warned:
        return
    mixer.has_warned = True
    warnings.warn(
        f"dp_compile: state_dict() of a decentralized module returns the parameters of rank {mixer.rank}, which differ "
        "from those of other ranks. For the trained model, call it in `with model.global_average():` on every rank.",
        stacklevel=3,
    )


def _refuse_to_load(module: nn.Module, *_: Any) -> None:
    if isinstance(module, DecentralizedModule) and mixing_of(module).mixer.kept:
        raise ReductionError(
            "load_state_dict() was called while parameters hold the global average. Reverting the average would "
            "discard the loaded values. Load outside of global_average(), or call revert_global_avg() first."
        )


def _forget_what_was_sent(module: nn.Module, *_: Any) -> None:
    if isinstance(module, DecentralizedModule):
        mixing_of(module).mixer.forget()  # else the next step mixes the loaded values with older ones


def _options(config: ReplicateConfig | None) -> ReplicateConfig:
    given, default = config or ReplicateConfig(), ReplicateConfig()
    refused = [name for name in _NOT_REDUCED if getattr(given, name) != getattr(default, name)]
    refused += [name for name in ("ddp_python_hook", "init_sync_buffers") if getattr(given, name) is False]
    refused += ["reduce_dtype of mp_policy"] if given.mp_policy is not None and given.mp_policy.reduce_dtype else []
    hint = " Ranks mix parameters here, and keep gradients and buffers local. For buckets, see bucket_size_in_mb."
    require(not refused, "config", "without options of reductions, of buckets or of the initial copy", refused, hint)
    return dataclasses.replace(given, ddp_python_hook=True, broadcast_buffers=False, init_sync_buffers=True)


def _optimizer(asked: torch.optim.Optimizer | OptimizerFn, replica: Replica) -> torch.optim.Optimizer:
    named = list(zip(replica.names, replica.parameters, strict=True))
    optimizer = asked if isinstance(asked, torch.optim.Optimizer) or not callable(asked) else asked(named)
    check_kind(optimizer)
    mine = {id(parameter) for parameter in replica.parameters}
    given = [each for group in optimizer.param_groups for each in group["params"] if each.requires_grad]
    own = sum(id(each) in mine for each in given)
    found = f"{own} of them and {len(given) - own} others"
    require(own == len(given) > 0, "parameters of the optimizer", "only those of this module", found)
    return optimizer
