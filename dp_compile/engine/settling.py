"""When a plan is made anew, on all ranks in the same backward, and from what.

| revision        | when                                   | from                                           |
|-----------------|----------------------------------------|------------------------------------------------|
| `FROM_GRAPH`    | in the first synchronised backward,    | the first rank's captured graph, if it has one |
|                 | before anything of it is traced        |                                                |
| `FROM_LAUNCHES` | `replan_after` + 1 after the first     | every rank's measured launches                 |

Synchronised backwards are counted: they are the same ones on every rank. What one rank knows the others read from the
key-value store; then every rank makes the same plan from the same numbers, and they compare it before it is used.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Final

import torch
import torch.distributed as dist

from dp_compile._torch import distributed
from dp_compile.engine.agreement import LostStoreError, Statement, Table, agree, collect, decide
from dp_compile.engine.calibration import calibrate
from dp_compile.engine.group import Group
from dp_compile.engine.replica import Replica, Revision
from dp_compile.errors import ConfigError, DesyncError, DPCompileError
from dp_compile.plan.backends import FAKE
from dp_compile.plan.cost import AllReduceCost
from dp_compile.plan.planner import percent_above
from dp_compile.plan.ready_times import (
    Launches,
    ReadyTimes,
    measured_times,
    slowest,
    typical,
)
from dp_compile.plan.words import count, format_bytes

logger = logging.getLogger("dp_compile.settling")

_meetings: Final[Counter[str]] = Counter()


def table_of(group: Group, device: torch.device | None = None) -> Table | None:
    """Where the ranks of a group meet, with the time-out of its collectives; `None` if there are no others.

    `device`: of the tensors that it reduces, as a group may have a backend for each type of device.
    """
    if not group.has_others:
        return None
    device = device or torch.device(distributed.working_device(group.process_group))
    timeout_s = distributed.timeout_of(group.process_group, device)
    return Table(distributed.default_store(), dist.get_rank(group.process_group), group.world_size, timeout_s)


def table_in_backward(replica: Replica) -> Table | None:
    """Where the ranks of a module meet: they wait for each other as long as for a collective.

    A rank that compiles or writes a checkpoint is late in the one as in the other.
    """
    return table_of(replica.group, replica.device)


def meeting(replica: Replica, about: str) -> str:
    """A topic that no other meeting of these ranks has, past or future.

    Numbers that people see go back: a backward that raised is tried again under the same count, and `warmup` puts
    counts back. A rank would then read what was said the time before.
    """
    topic = f"{replica.topic}/{about}"
    _meetings[topic] += 1
    return f"{topic}/{_meetings[topic]}"


def agree_in_call(replica: Replica, statement: Statement, call: str) -> None:
    """Compare in a call that every rank of a module makes between the same two backwards.

    Raises:
        DesyncError: ranks differ, one reports an error, or one is missing.
    """
    table = table_in_backward(replica)
    if table is not None:
        agree(table, meeting(replica, call), statement, call=call)


@contextlib.contextmanager
def telling_the_others(replica: Replica | None, call: str) -> Iterator[None]:
    """An error inside, of whatever kind, reaches the other ranks too, which wait for this one in `agree_in_call`.

    Without a replica nobody waits.
    """
    try:
        yield
    except (DesyncError, LostStoreError):  # they have met, or cannot
        raise
    except Exception as error:
        if replica is not None:
            text = str(error) if isinstance(error, DPCompileError) else f"{type(error).__name__}: {error}"
            with contextlib.suppress(DesyncError, LostStoreError):
                agree_in_call(replica, {"error": text}, call)
        raise


def settle(replicas: Sequence[Replica], times: Mapping[Replica, ReadyTimes] | None = None) -> None:
    """Settle the plans of replicas that are about to reduce for the first time. Does nothing for the others.

    Args:
        replicas: in any order.
        times: what the captured graph says of a replica's gradients. Without it, and on this group's first rank, the
            plan stays as it is.

    Raises:
        DesyncError: a rank has not come to this point within the group's time-out, or has made another plan.
    """
    said = times or {}
    open_ones = [replica for replica in replicas if replica.awaits(Revision.FROM_GRAPH)]
    tables = list(map(table_in_backward, open_ones))
    topics = [meeting(replica, Revision.FROM_GRAPH.name) for replica in open_ones]
    proposals = [said[each].to_json() if each in said else None for each in open_ones]
    for table, topic, proposal in zip(tables, topics, proposals, strict=True):
        # Who decides for one group may have to wait for who decides for another: first everybody says what he knows.
        if table is not None and table.rank == 0:
            decide(table, topic, proposal)
    for replica, table, topic, proposal in zip(open_ones, tables, topics, proposals, strict=True):
        decided = proposal if table is None or table.rank == 0 else decide(table, topic, None)
        _revise(replica, None if decided is None else ReadyTimes.from_json(decided), None)


def revise_if_due(replica: Replica) -> None:
    """Make another plan if enough has been seen.

    Called before each synchronised backward, on every rank.

    Raises:
        DesyncError: a rank has not come to this point within the group's time-out, or has made another plan.
    """
    if replica.awaits(Revision.FROM_LAUNCHES) and _has_measured_enough(replica):
        times = _measured(replica)
        _revise(replica, times, None if times is None else _measured_cost(replica))


def _has_measured_enough(replica: Replica) -> bool:
    wanted = (replica.config.replan_after or 0) + 1  # the first one is compiled
    return replica.history.synced_backwards >= replica.revisions.settled_after + wanted


def _revise(replica: Replica, times: ReadyTimes | None, cost: AllReduceCost | None) -> None:
    """The revision is over; without times the plan stays.

    Raises:
        DesyncError: on every rank, the plan of some rank is another one. All keep the one they have.
    """
    occasion, replica.revisions.due = replica.revisions.due[0], replica.revisions.due[1:]
    replica.revisions.settled_after = replica.history.synced_backwards
    if times is None:
        return
    assert replica.revisions.revise is not None
    before, planned = len(replica.plan.buckets), replica.revisions.revise(times, cost)
    # What gradients are divided by may have changed since it was said how plans are made.
    planned = replace(planned, plan=planned.plan.with_keys_of(replica.plan.gradients))
    table, topic = table_in_backward(replica), meeting(replica, "new plan")
    if table is not None:
        # Equal numbers make equal plans, unless a rank adds floats up in another order: gradients of equal size would
        # then be added to each other, and nothing else would notice.
        agree(table, topic, {"the new plan": planned.plan.signature()})
    replica.adopt(planned, times)
    logger.info("a new plan, %s: %s; before %s", occasion.value, describe_plan(replica), count(before, "bucket"))


def describe_plan(replica: Replica) -> str:
    """A plan in one line: strategy, buckets, how far the predicted end is from the best, what that rests on."""
    certificate, buckets = replica.certificate, count(len(replica.plan.buckets), "bucket")
    size = f"{buckets}, {format_bytes(replica.plan.nbytes)}"
    if certificate is None:
        return f"{replica.strategy}, {size}"
    end = "" if replica.ready.backward_s is None else f" {certificate.makespan_s * 1e3:.3g} ms"
    above = percent_above(certificate.ratio)
    return f"{replica.strategy}, {size}, predicted end{end} {above} the best any plan could do ({replica.ready.basis})"


def _measured(replica: Replica) -> ReadyTimes | None:
    """What the slowest rank saw; `None` if some rank could not measure."""
    own = asdict(typical(replica.revisions.launches)) if replica.revisions.launches else None
    said, table, topic = [own], table_in_backward(replica), meeting(replica, "launches")
    if table is not None:
        said = collect(table, topic, own)
        complete = said if all(each is not None for each in said) else None
        said = decide(table, topic, complete) or [None]
    seen = [Launches(tuple(each["launch_s"]), each["backward_s"]) for each in said if each is not None]
    if not seen or any(len(each.launch_s) != len(replica.plan.buckets) for each in seen):
        logger.warning("the plan stays: not every rank could measure its backwards, which were not captured")
        return None
    return measured_times(replica.plan, slowest(seen), replica.ready)


def _measured_cost(replica: Replica) -> AllReduceCost | None:
    if replica.config.cost is not None or replica.group.backend == FAKE:
        return None
    try:
        group = replica.group
        return calibrate(group.process_group, device=replica.device, levels=group.levels).cost
    except ConfigError as error:  # The same on every rank: all fit the same numbers.
        logger.warning("the nominal cost of the link stays: %s", error)
        return None
