"""Reduce over another process group than before: one of other ranks, under the same name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import torch.distributed as dist

from dp_compile.engine import flags, guards
from dp_compile.engine.gradients import gradient_specs
from dp_compile.engine.monitor import MONITOR
from dp_compile.engine.plan_sync import plan_from_times
from dp_compile.engine.replica import Replica
from dp_compile.plan.cost import AllReduceCost
from dp_compile.plan.planner import PlanResult, ReadyTimes


def regroup(replica: Replica, group: dist.ProcessGroup, generation: int) -> None:
    """Average over the ranks of `group` from now on; between backwards, and on every rank of it.

    The number of ranks is an argument of compiled code from then on, and no code is compiled for another number. What
    ranks count together starts again.

    Args:
        group: has the name of the one before, by which compiled code finds it.
        generation: the same on all of its ranks, and another one for each group.
    """
    ranks, averaging = dist.get_world_size(group), replica.group.averaging
    divide_by = averaging.divide_by if replica.config.gradient_divide_factor is not None else float(ranks)
    averaging = replace(averaging, divide_by=divide_by, given=True)
    measured = replica.group.cost  # of another number of ranks the plan would be another one
    replica.group = replace(
        replica.group, process_group=group, world_size=ranks, averaging=averaging, measured=measured
    )
    gradients = gradient_specs(replica.parameters, replica.names, replica.group, replica.module.sparse)
    plan = PlanResult(replica.plan.with_keys_of(gradients), replica.planning.certificate)
    replica.adopt(plan, replica.planning.ready)
    if generation:  # a process that joins has compiled; a store does not notice at once that a rank is lost
        replica.planning.awaits_code = False
    replica.module.topic = f"{replica.module.topic.partition('@')[0]}@{generation}"
    flags.start_again(replica)
    guards.start_again(replica)
    replica.state.step_guard.start_again()
    MONITOR.watch(replica)


def plan_facts(replica: Replica) -> dict[str, Any]:
    """What another rank makes the same plan from, as plain data."""
    return {
        "cost": asdict(replica.group.cost),
        "ready": replica.planning.ready.to_json(),
        "is final": not replica.planning.awaits_graph,
    }


def take_plan(replica: Replica, facts: Mapping[str, Any]) -> None:
    """Make the plan that another rank has."""
    replica.group = replace(replica.group, measured=AllReduceCost.from_dict(facts["cost"]))
    if facts["is final"] and replica.planning.layout is not None:
        replica.planning.awaits_graph, ready = False, ReadyTimes.from_json(facts["ready"])
        planned = plan_from_times(replica, ready)
        if planned.plan.signature() != replica.plan.signature():
            replica.adopt(planned, ready)
