"""Read off a replicated module what is known of it: a report for people, its step as data."""

from __future__ import annotations

from torch import nn

from dp_compile.errors import ModuleError
from dp_compile.insight.replica_step import step_of_replica
from dp_compile.insight.report import Report
from dp_compile.insight.step import Step
from dp_compile.modules.replicated_module import replica_of


def report(module: nn.Module) -> Report:
    """The plan of a replicated module, what was captured, and which way its backwards went.

    Raises:
        ModuleError: the module is not replicated.
    """
    replica = replica_of(module)
    promise = ""
    if replica.certificate is not None:
        promise = "\n".join([*str(replica.certificate).splitlines()[:2], replica.ready.basis])
    captures = tuple(replica.captures.values())
    hook = replica.called_hook
    why = "" if hook is None else f"comm hook {hook.name} is called by torch's C++ reducer: {hook.why_called}"
    return Report(
        replica.mode,
        replica.group.world_size,
        replica.plan,
        captures,
        dict(replica.backwards),
        promise,
        divided_by=replica.group.averaging.divide_by,
        why_not_captured=why,
        mixing="\n".join(filter(None, (each.describe() for each in replica.updates))),
    )


def step_of(module: nn.Module) -> Step:
    """What was planned for a replicated module, from what, what came of it, and what was measured.

    Raises:
        ModuleError: the module is not replicated, or no synchronised backward of it has run yet.
    """
    replica = replica_of(module)
    if not (replica.backwards if replica.is_mixed else replica.synced_backwards):
        raise ModuleError(
            "nothing to explain yet: no synchronised backward of this module has run. Train a step, or call "
            "dp_compile.warmup(), first."
        )
    return step_of_replica(replica)
