"""The plan of a module: final in the first synchronised backward, and the same on every rank.

Before anything of that backward is traced every rank makes it from the ready times in the captured graph of the
group's first rank, and all compare it before it is used. Where that rank has no graph, the plan of `replicate` stays.
Before its first collective ranks meet once more: one may compile for minutes what another one found in a cache, and a
collective that waits gets no more time.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence

from dp_compile.plan.crossing import plan_crossing
from dp_compile.plan.planner import PlanResult, ReadyTimes, percent_above, plan_optimal
from dp_compile.plan.words import count, format_bytes
from dp_compile.replica.gradients import gradient_specs
from dp_compile.replica.replica import Replica
from dp_compile.replica.store_channel import broadcast_object, channel_of, check_consistent, unique_topic

logger = logging.getLogger("dp_compile.plan_sync")


def finalize_plans(replicas: Sequence[Replica], times: Mapping[Replica, ReadyTimes] | None = None) -> None:
    """Settle the plans of replicas that are about to reduce for the first time. Does nothing for the others.

    `times`: what the captured graph says of a replica's gradients. Without it on the group's first rank, the plan stays
    as it is. After an error all keep the one they have.
    """
    times, asked = times or {}, []
    for replica in replicas:
        if replica.planning.awaits_graph:
            channel, topic = channel_of(replica), unique_topic(replica, "ready times")
            proposal = times[replica].to_json() if replica in times else None
            # Who decides for one group may have to wait for who decides for another: each decides first, then reads.
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
            # Equal numbers make equal plans, unless a rank adds floats up in another order: gradients of equal size
            # would then be added to each other, and nothing else would notice.
            signature = {"the new plan": planned.plan.signature()}
            check_consistent(channel_of(replica), unique_topic(replica, "new plan"), signature)
            replica.adopt(planned, ready)
            logger.info("the plan of the first synchronised backward: %s; before %s", describe_plan(replica), before)


def meet_before_launch(replicas: Iterable[Replica]) -> None:
    """Return when every rank is about to launch the first collective of these replicas: its code is made.

    Does nothing for those that have launched before. After an interrupt the same topic is entered again.
    """
    for replica in replicas:
        if replica.planning.awaits_code:
            check_consistent(channel_of(replica), f"{replica.module.topic}/first launch", {})
            replica.planning.awaits_code = False


def plan_from_times(replica: Replica, times: ReadyTimes) -> PlanResult:
    """The plan from ready times: equal on ranks where these are equal."""
    group, planning = replica.group, replica.planning
    gradients = gradient_specs(replica.parameters, replica.names, group, replica.module.sparse)
    cost = replica.config.cost or group.cost
    planned = plan_optimal(gradients, cost, times)
    if planning.for_next_forward:
        return plan_crossing(planned, times, cost, cuts=True, lanes=group.backend.lanes)
    return planned


def describe_plan(replica: Replica) -> str:
    """A plan in one line: strategy, buckets, how far the predicted end is from the best, what that rests on."""
    planning, buckets = replica.planning, count(len(replica.plan.buckets), "bucket")
    certificate, size = planning.certificate, f"{buckets}, {format_bytes(replica.plan.nbytes)}"
    if certificate is None:
        return f"{planning.strategy}, {size}"
    above = percent_above(certificate.ratio)
    return f"{planning.strategy}, {size}, predicted end {above} the best any plan could do ({planning.ready.basis})"
