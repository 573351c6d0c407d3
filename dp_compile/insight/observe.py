"""Read a replicated module: a report for people, and its step as data."""

from __future__ import annotations

from typing import Final
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import nn

from dp_compile._torch import distributed
from dp_compile.engine.calibration import calibrated
from dp_compile.engine.replica import Replica
from dp_compile.errors import UnsupportedModuleError
from dp_compile.insight.explain import Explanation, explanation_of
from dp_compile.insight.report import Report
from dp_compile.insight.step import NOMINAL, MeasuredStep, Step, format_ms
from dp_compile.passes.memory import KEPT_FROM_NBYTES
from dp_compile.plan.buckets import BucketPlan
from dp_compile.plan.cost import AllReduceCost
from dp_compile.plan.planner import ASSUMED, Certificate
from dp_compile.plan.words import count, format_bytes
from dp_compile.replication.module import is_replicated, replica_of, unwrap

measured: Final[WeakKeyDictionary[Replica, MeasuredStep]] = WeakKeyDictionary()
"""What `measure()` saw last of a module on this rank."""


def report(module: nn.Module) -> Report:
    """What was planned for a replicated module, what was captured, and which way its backwards went.

    Of a module whose gradients torch's own DDP reduces (`ddp_python_hook=False`) it says only that.

    Raises:
        UnsupportedModuleError: the module is not replicated.
    """
    if distributed.is_reduced_by_torch(unwrap(module)) and not is_replicated(module):
        return Report("torch's own DDP (ddp_python_hook=False)", dist.get_world_size(), BucketPlan(()), ())
    replica = replica_of(module)
    hook = replica.called_hook
    why = "" if hook is None else f"comm hook {hook.name} is called with each bucket: {hook.why_called}"
    return Report(
        replica.mode,
        replica.group.world_size,
        replica.plan,
        tuple(replica.history.captures.values()),
        dict(replica.history.backwards),
        "" if replica.planning.certificate is None else _promise(replica, replica.planning.certificate),
        measured=_measured(replica),
        divided_by=replica.group.averaging.divide_by,
        why_not_captured=why,
        updates="\n".join(filter(None, (each.describe() for each in replica.after.updates if each.is_alive))),
        memory=_kept_memory(replica),
    )


def step_of(module: nn.Module) -> Step:
    """What was planned for a replicated module, what that was made from, what was captured and measured.

    Raises:
        UnsupportedModuleError: the module is not replicated, or no synchronised backward of it has run yet.
    """
    replica = replica_of(module)
    if not replica.state.reduces_gradients:
        raise UnsupportedModuleError("no gradient of this module is reduced: there is nothing to explain.")
    if not replica.history.synced_backwards:
        raise UnsupportedModuleError(
            "nothing to explain yet: no synchronised backward of this module has run. Train a step, or call "
            "dp_compile.warmup(), first."
        )
    return step_of_replica(replica)


def explain(module: nn.Module) -> Explanation:
    """What bounds the step of a replicated module, what is exposed and why, and what would help. Print it.

    Figures are predictions from the plan; what `measure()` saw is shown with them. If nothing was measured the first
    line says so.

    Raises:
        UnsupportedModuleError: the module is not replicated, or no synchronised backward of it has run yet.
    """
    return explanation_of(step_of(module))


def _kept_memory(replica: Replica) -> str:
    memory = replica.state.bucket_memory
    if not memory.kept:
        return ""
    which = f" above {format_bytes(KEPT_FROM_NBYTES)}, which malloc would allocate again each time"
    return (
        f"memory that backwards use again: {format_bytes(memory.nbytes)} of "
        f"{count(memory.buckets, 'bucket')}{'' if replica.plan.keeps_memory else which}"
    )


def _promise(replica: Replica, certificate: Certificate) -> str:
    """What the plan was made for; no milliseconds where the backward was not timed, for they look measured."""
    is_assumed = replica.planning.ready.basis == ASSUMED
    work = "as the parameters' elements" if is_assumed else "estimated from the captured graph"
    return "\n".join(
        [
            f"{replica.planning.strategy}: {count(len(replica.plan.buckets), 'bucket')}",
            f"  if the backward took as long as the communication: predicted end {certificate.promise}; with the "
            "length that was measured: explain()",
            f"  work of the backward: {work}",
            f"  planned for an all-reduce that takes {certificate.cost}",
        ]
    )


def _measured(replica: Replica) -> str:
    seen = measured.get(replica)
    if seen is None:
        return ""
    waited = f", {format_ms(seen.exposed_s)} of them waiting for buckets" if seen.buckets else ""
    return f"backward: {format_ms(seen.backward_s)}{waited}, {seen.source}, on rank {seen.rank}"


def step_of_replica(replica: Replica) -> Step:
    """The same of a replica, with what is known so far."""
    latest = next(reversed(replica.history.captures.values()), None)
    cost, cost_source = _cost(replica)
    return Step(
        mode=replica.mode,
        strategy=replica.planning.strategy,
        world_size=replica.group.world_size,
        backend=replica.group.backend,
        device=replica.device.type,
        plan=replica.plan,
        ready=replica.planning.ready,
        cost=cost,
        cost_source=cost_source,
        memory=latest.memory if latest else None,
        placements=latest.placements if latest else (),
        refusals=latest.refusals if latest else (),
        backwards=tuple(replica.history.backwards.items()),
        measured=measured.get(replica),
        optimizers=tuple(
            record for each in replica.after.updates if each.is_alive and (record := each.record()) is not None
        ),
    )


def _cost(replica: Replica) -> tuple[AllReduceCost, str]:
    """What a collective costs, and where that is from."""
    group = replica.group
    if replica.config.cost is not None:
        return replica.config.cost, "given in the config"
    if (known := calibrated(group.process_group, replica.device, with_levels=group.levels is not None)) is not None:
        return known, "measured by calibrate()"
    if group.measured is not None:
        return group.measured, "measured on such ranks, in factors of two"
    return group.cost, f"{NOMINAL} for {group.backend}, not measured"
