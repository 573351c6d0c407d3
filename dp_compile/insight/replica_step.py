"""A replica's step as data: all that explains it."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from dp_compile.engine.calibration import calibrated
from dp_compile.engine.record import CaptureRecord
from dp_compile.engine.replica import Replica
from dp_compile.insight import first_steps
from dp_compile.insight.step import NOMINAL, MeasuredStep, Step, with_waited_link
from dp_compile.plan.cost import AllReduceCost
from dp_compile.plan.ready_times import MEASURED
from dp_compile.plan.strategies import nominal_cost

_measured: WeakKeyDictionary[Replica, MeasuredStep] = WeakKeyDictionary()


def remember_measured(replica: Replica, step: MeasuredStep) -> None:
    """Keep what a measured backward of this rank was like, in the place of an earlier one."""
    _measured[replica] = step


def measured_of(replica: Replica) -> MeasuredStep | None:
    """What `measure()` or a profiler saw last, else the first steps, which are always timed."""
    return _measured.get(replica) or first_steps.observer.seen(replica)


def step_of_replica(replica: Replica) -> Step:
    """What was planned, from what, what came of it so far, and what was measured."""
    captures = [record for record in replica.history.captures.values() if record.synced]
    latest: CaptureRecord | None = captures[-1] if captures else None
    cost, cost_source = _cost(replica)
    step = Step(
        mode=replica.mode,
        strategy=replica.strategy,
        world_size=replica.group.world_size,
        backend=replica.group.backend,
        device=replica.device.type,
        plan=replica.plan,
        ready=replica.ready,
        cost=cost,
        cost_source=cost_source,
        memory=latest.memory if latest else None,
        placements=latest.placements if latest else (),
        refusals=tuple(refusal for record in latest.passes for refusal in record.result.refusals) if latest else (),
        backwards=tuple(replica.history.backwards.items()),
        measured=measured_of(replica),
        deferred=latest is not None and latest.deferred,
        why_deferred=latest.why_deferred if latest else "",
        optimizers=tuple(
            record for each in replica.after.updates if each.is_alive and (record := each.record()) is not None
        ),
    )
    return with_waited_link(step)


def _cost(replica: Replica) -> tuple[AllReduceCost, str]:
    """What a collective costs, and where that is from."""
    group = replica.group
    nominal = nominal_cost(group.backend, group.world_size, group.ranks_inside)
    cost = replica.config.cost or (nominal if replica.certificate is None else replica.certificate.cost)
    if replica.config.cost is not None:
        return cost, "given in the config"
    if cost != nominal and replica.ready.basis == MEASURED:
        return cost, "measured on this group"
    if (known := calibrated(group.process_group, replica.device, with_levels=group.levels is not None)) is not None:
        return known, "measured by calibrate()"
    return cost, f"{NOMINAL} for {group.backend}, not measured"
