"""Read off a replicated module what is known of it: a report for people, its step as data."""

from __future__ import annotations

from torch import nn

from dp_compile.engine.replica import Replica
from dp_compile.errors import ModuleError
from dp_compile.insight.explanation.text import format_ms
from dp_compile.insight.replica_step import measured_of, step_of_replica
from dp_compile.insight.report import Report
from dp_compile.insight.step import Step
from dp_compile.modules.replicated_module import replica_of
from dp_compile.passes.bucket_memory import KEPT_FROM_NBYTES
from dp_compile.plan.certificate import Certificate
from dp_compile.plan.ready_times import ASSUMED
from dp_compile.plan.words import count, format_bytes


def report(module: nn.Module) -> Report:
    """The plan of a replicated module, what was captured, and which way its backwards went.

    Raises:
        ModuleError: the module is not replicated.
    """
    replica = replica_of(module)
    promise = "" if replica.certificate is None else _promise(replica, replica.certificate)
    captures = tuple(replica.history.captures.values())
    hook = replica.called_hook
    why = "" if hook is None else f"comm hook {hook.name} is called by torch's C++ reducer: {hook.why_called}"
    return Report(
        replica.mode,
        replica.group.world_size,
        replica.plan,
        captures,
        dict(replica.history.backwards),
        promise,
        measured=_measured(replica),
        divided_by=replica.group.averaging.divide_by,
        why_not_captured=why,
        mixing="\n".join(filter(None, (each.describe() for each in replica.after.updates if each.is_alive))),
        memory=_kept_memory(replica),
    )


def _kept_memory(replica: Replica) -> str:
    memory = replica.bucket_memory
    if not memory.kept:
        return ""
    which = f" above {format_bytes(KEPT_FROM_NBYTES)}, which malloc would take anew"
    return (
        f"memory that backwards use again: {format_bytes(memory.nbytes)} of "
        f"{count(memory.buckets, 'bucket')}{'' if replica.plan.keeps_memory else which}"
    )


def _promise(replica: Replica, certificate: Certificate) -> str:
    """What the plan was made for; no milliseconds where the backward was not timed, for they look measured."""
    believed_s = replica.ready.backward_s
    made_for = "the backward was taken to last as long as the communication, work is " + (
        "as the parameters' elements" if replica.ready.basis == ASSUMED else "estimated from the captured graph"
    )
    if believed_s is not None:
        made_for = f"for a backward of {format_ms(believed_s)}, {replica.ready.basis}"
    return "\n".join(
        [
            f"{replica.strategy}: {count(len(certificate.reasons), 'bucket')}, {certificate.chosen}",
            f"  predicted end {certificate.promise}",
            f"  planned before anything was timed: {made_for}" if believed_s is None else f"  planned {made_for}",
            f"  planned for an all-reduce that takes {certificate.cost}",
        ]
    )


def _measured(replica: Replica) -> str:
    seen = measured_of(replica)
    if seen is None:
        return ""
    waited = f", {format_ms(seen.exposed_s)} of them waiting for buckets" if seen.buckets else ""
    return f"backward: {format_ms(seen.backward_s)}{waited}, {seen.source}, on rank {seen.rank}"


def step_of(module: nn.Module) -> Step:
    """What was planned for a replicated module, from what, what came of it, and what was measured.

    Raises:
        ModuleError: the module is not replicated, or no synchronised backward of it has run yet.
    """
    replica = replica_of(module)
    if not (replica.history.backwards if replica.is_mixed else replica.history.synced_backwards):
        raise ModuleError(
            "nothing to explain yet: no synchronised backward of this module has run. Train a step, or call "
            "dp_compile.warmup(), first."
        )
    return step_of_replica(replica)
