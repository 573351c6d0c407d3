"""In a module's first synchronised backward, finalizes its plan, the same one on every rank.

Before tracing that backward, every rank computes the plan from the ready times in the captured graph of the group's
first rank. The ranks compare the plan before use. If the first rank has no graph, the plan of `replicate` changes only
if a collective's cost was measured. The ranks synchronise again before the first collective: one may compile for
minutes what another finds in a cache, and the time-out of collectives is too short for that.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence

from dp_compile.plan.crossing import plan_crossing
from dp_compile.plan.planner import PlanResult, ReadyTimes, plan_optimal
from dp_compile.plan.words import count, format_bytes
from dp_compile.replica.gradients import gradient_specs
from dp_compile.replica.replica import Replica
from dp_compile.replica.store_channel import broadcast_object, channel_of, check_consistent, unique_topic

logger = logging.getLogger("dp_compile.plan_sync")


def finalize_plans(replicas: Sequence[Replica], times: Mapping[Replica, ReadyTimes] | None = None) -> None:
    """Finalize the plans of replicas that are about to reduce for the first time. Does nothing for the others.

    `times`: ready times of a replica's gradients in the captured graph. If the group's first rank has none, the plan
    changes only if a collective's cost was measured. After an error, all ranks keep the plan they have.
    """
    times, asked = times or {}, []
    for replica in replicas:
        if replica.planning.awaits_graph:
            channel, topic = channel_of(replica), unique_topic(replica, "ready times")
            proposal = times[replica].to_json() if replica in times else None
            # The first rank of a group may wait for another group's, so every first rank broadcasts before it reads.
            if channel is not None and channel.rank == 0:
                broadcast_object(channel, topic, proposal)
            asked.append((replica, channel, topic, proposal))
    for replica, channel, topic, decided in asked:
        if channel is not None and channel.rank > 0:
            decided = broadcast_object(channel, topic, None)
        replica.planning.awaits_graph = False
        if decided is not None or replica.group.measured is not None:
            ready = replica.planning.ready if decided is None else ReadyTimes.from_json(decided)
            before = count(len(replica.plan.buckets), "bucket")
            planned = plan_from_times(replica, ready)
            # Equal times give equal plans, unless a rank sums floats in another order. Ranks with other plans could
            # add up different gradients of equal size, and no other check would notice.
            signature = {"the new plan": planned.plan.signature()}
            check_consistent(channel_of(replica), unique_topic(replica, "new plan"), signature)
            replica.adopt(planned, ready)
            logger.info("the plan of the first synchronised backward: %s; before: %s", describe_plan(replica), before)


def meet_before_launch(replicas: Iterable[Replica]) -> None:
    """Wait until every rank has compiled and is about to launch the first collective of these replicas.

    Does nothing for replicas that have launched before. After an interrupt, the ranks meet again at the same store key.
    """
    for replica in replicas:
        if replica.planning.awaits_code:
            check_consistent(channel_of(replica), f"{replica.module.topic}/first launch", {})
            replica.planning.awaits_code = False


def plan_from_times(replica: Replica, times: ReadyTimes) -> PlanResult:
    """Compute the plan from ready times. Ranks with equal times get equal plans."""
    group, planning = replica.group, replica.planning
    gradients = gradient_specs(replica.parameters, replica.names, group, replica.module.sparse)
    cost = replica.config.cost or group.cost
    planned = plan_optimal(gradients, cost, times)
    if planning.for_next_forward:
        return plan_crossing(planned, times, cost, cuts=True, lanes=group.backend.lanes)
    return planned


def describe_plan(replica: Replica) -> str:
    """Describe a plan in one line: strategy, buckets, predicted end / best possible end, basis of the ready times."""
    planning, buckets = replica.planning, count(len(replica.plan.buckets), "bucket")
    certificate, size = planning.certificate, f"{buckets}, {format_bytes(replica.plan.nbytes)}"
    if certificate is None:
        return f"{planning.strategy}, {size}"
    ratio = f"end / best possible end {certificate.ratio:.3f}"
    return f"{planning.strategy}, {size}, predicted {ratio}, backward {planning.ready.basis}"
