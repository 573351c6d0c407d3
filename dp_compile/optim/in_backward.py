"""`in_backward()`: a stock optimizer updates parameters in the backward, each bucket after its reduction."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler

from dp_compile.errors import ConfigError, is_number, require
from dp_compile.optim.deferred import Deferred
from dp_compile.optim.readers import let_readers_wait
from dp_compile.optim.setup import Setup, check_kind
from dp_compile.optim.shard import Shard
from dp_compile.optim.update import Update
from dp_compile.plan.crossing import plan_crossing
from dp_compile.plan.planner import PlanResult
from dp_compile.replica.replica import Replica
from dp_compile.replica.store_channel import check_consistent_in_call
from dp_compile.replica.supported import OPTIMIZER, check_supported
from dp_compile.replication.module import replica_of
from dp_compile.replication.selection import refuse_dtensors

_known: weakref.WeakKeyDictionary[torch.optim.Optimizer, Update] = weakref.WeakKeyDictionary()


def in_backward(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    max_norm: float | None = None,
    scaler: GradScaler | None = None,
    *,
    overlap_forward: bool = False,
    shard: bool = False,
) -> torch.optim.Optimizer:
    """Update the parameters of a replicated module in its backward. Returns the same optimizer.

    The training loop stays: backward, `optimizer.step()`, `optimizer.zero_grad()`. A captured backward updates each
    bucket after its reduction; any other backward updates at its end, with the same kernels. Both leave `.grad` as
    `None`, with `shard` as a tensor without values. `step()` ends the step, and updates parameters that are not in the
    module. Call it once after each synchronised backward.

    Args:
        model: a module that was given to `replicate`, or a `DistributedDataParallel`.
        optimizer: one of `torch.optim` over all or some parameters of `model`, without `shard` also over others.
        max_norm: with `shard`: clip the total gradient norm, as `torch.nn.utils.clip_grad_norm_` does; do not call
            that function too. `optimizer.total_norm` is then the norm before clipping.
        scaler: with `shard`: the `torch.amp.GradScaler` of the loop, if there is one.
        overlap_forward: defer updates to the next forward if their gradients are in flight at the end of a backward.
            The forward runs each update, or with `shard` waits for the all-gather, right before it first reads the
            parameter, if the forward is one graph of `torch.compile(model, backend="dp_compile")`. After an uncompiled
            forward or graph breaks, `step()` or the next forward's start waits for all; other backends raise. Dynamo
            recompiles all code in this process. Call `optim.synchronize(model)` before a read other than by a method
            of the module. Must be equal on all ranks.
        shard: each rank reduces and updates a part of each bucket's elements, and holds only their state. The
            optimizer must update each element independently. Every rank calls this. Save with
            `full_state_dict(optimizer)`, not `optimizer.state_dict()`; load with `load_state_dict()`.

    Raises:
        ConfigError: the optimizer is not of `torch.optim`, cannot update in a backward, or does already; it has no
            parameter of `model`, or another optimizer updates one already; an option is not allowed; parameters are
            DTensors or share memory; or, with `shard`, the optimizer or a parameter cannot be sharded.
        DesyncError: ranks shard different optimizers, or some do not shard; or `overlap_forward` differs.
        UnsupportedModuleError: `model` is not replicated, or waits for its first forward.
    """
    replica = replica_of(model)
    check_supported(replica, (OPTIMIZER,))
    refuse_dtensors(model, "in_backward()")
    _check(optimizer, max_norm, scaler, overlap_forward, shard)
    if (before := _known.get(optimizer)) is not None:
        if _is_installed(before):
            raise ConfigError("this optimizer updates in the backward already. Call in_backward() once for it.")
        before.remove()
    setup = Setup(replica, optimizer, max_norm, scaler)
    if not (mine := setup.indices()):
        raise ConfigError(f"{type(optimizer).__name__} has no trainable parameter of this module.")
    _check_parameters(replica, mine)
    deferred = Deferred(setup) if overlap_forward else None
    update = (Shard if shard else Update)(setup, deferred)
    update.install()
    replica.after.updates.append(update)
    if deferred is not None:
        if not shard:  # with shard, reductions end in the backward
            _plan_for(replica)
        let_readers_wait(model, deferred.complete)
    _known[optimizer] = update
    return optimizer


def remove_in_backward(optimizer: torch.optim.Optimizer) -> None:
    """Undo `in_backward`: `step()` updates again, from reduced gradients. Every rank calls it, between two steps.

    After `shard=True`, every rank then has the whole optimizer state, and buckets are all-reduced again.

    Raises:
        ConfigError: the optimizer was not given to `in_backward`, was removed, or its module is no longer replicated.
    """
    update = _known.get(optimizer)
    if update is None or not _is_installed(update):
        raise ConfigError("this optimizer does not update in the backward. Leave out remove_in_backward().")
    update.remove()
    del _known[optimizer]
    replica = update.setup.replica
    replica.after.updates.remove(update)
    replica.planning.for_next_forward &= any(each.deferred for each in replica.after.updates)


def full_state_dict(optimizer: torch.optim.Optimizer, to: int | None = None) -> dict[str, Any]:
    """Return the `state_dict()` that the optimizer would have without sharding, with its state on the CPU.

    `load_state_dict()` loads it into an optimizer of the same class over these parameters, sharded or not, on any
    number of ranks. Every rank calls this.

    Args:
        optimizer: one that was given to `in_backward(..., shard=True)`; for any other, its `state_dict()` is returned.
        to: the only rank of the module's group that gets the result; the others get `{}`. `None`: all ranks.

    Raises:
        ConfigError: `to` is not a rank of the group.
    """
    update = _known.get(optimizer)
    if not isinstance(update, Shard):
        return optimizer.state_dict()
    ranks = update.ranks
    is_rank = to is None or (type(to) is int and 0 <= to < ranks)
    require(is_rank, "'to'", f"a rank of the module's group, 0 to {ranks - 1}, or None", to)
    return update.full_state_dict(to)


def _is_installed(update: Update) -> bool:
    replica = update.setup.find_replica()
    return replica is not None and update in replica.after.updates


def _check_parameters(replica: Replica, mine: Sequence[int]) -> None:
    """Raise if another optimizer updates one of these parameters, or if two of them share memory: the order of their
    updates would matter, and two ranks may each update one of the two."""
    others = [each for each in replica.after.updates if isinstance(each, Update)]
    if any(other.is_alive for other in others):
        gc.collect()  # a reference cycle, as of an LR scheduler, may keep it alive on this rank only
    for other in others:
        if other.is_alive and (both := sorted({*mine} & {*other.setup.indices()})):
            raise ConfigError(
                f"another optimizer updates {replica.name_list(both)} in the backward already. Call "
                "dp_compile.optim.remove_in_backward(other_optimizer) first."
            )
    at = dict[int, str]()
    for index in mine:
        parameter, name = replica.parameters[index], replica.names[index]
        first = at.setdefault(parameter.data_ptr(), name) if parameter.numel() else name
        if first != name:
            raise ConfigError(
                f"{name} shares its memory with {first}, so the backward cannot update them separately. Make them one "
                "nn.Parameter before replicate(), or use the optimizer without in_backward()."
            )


def _check(optimizer: Any, max_norm: Any, scaler: Any, overlap_forward: object, shard: object) -> None:
    kind = type(optimizer)
    check_kind(optimizer)
    if not f"{kind.__module__}.".startswith("torch.optim."):
        raise ConfigError(
            f"{kind.__name__} is not of torch.optim: it might not update each parameter independently. "
            "Use it without in_backward(), or an optimizer of torch.optim."
        )
    is_norm = max_norm is None or (is_number(max_norm) and max_norm > 0)
    require(is_norm, "max_norm", "a number > 0 or None", max_norm)
    require(isinstance(scaler, GradScaler | None), "scaler", "a torch.amp.GradScaler or None", type(scaler))
    if scaler is not None and any(group.get("fused") for group in optimizer.param_groups):
        raise ConfigError(f"{kind.__name__}(fused=True) unscales by itself. With scaler= pass fused=False.")
    for name, value in (("shard", shard), ("overlap_forward", overlap_forward)):
        require(isinstance(value, bool), name, "True or False", value)
    if not shard and (max_norm is not None or scaler is not None):
        looks_at_all = "max_norm" if max_norm is not None else "scaler"
        raise ConfigError(
            f"in_backward({looks_at_all}=...) needs shard=True: {looks_at_all} looks at all gradients before the first "
            "update, so unsharded updates in the backward gain nothing. Use the optimizer without in_backward(), with "
            "dp_compile.optim.clip_grad_norm_() and scaler.step(optimizer) in the loop."
        )


def _plan_for(replica: Replica) -> None:
    """Replan buckets in the order in which the next forward needs them. Every rank calls it."""
    group, planning = replica.group, replica.planning
    planning.for_next_forward = True
    now, cost = PlanResult(replica.plan, planning.certificate), replica.config.cost or group.cost
    planned = plan_crossing(now, planning.ready, cost, cuts=planning.strategy == "optimal", lanes=group.backend.lanes)
    statement = {"the plan with overlap_forward": planned.plan.signature()}
    check_consistent_in_call(replica, statement, "in_backward(overlap_forward=True)")
    replica.adopt(planned, planning.ready)
