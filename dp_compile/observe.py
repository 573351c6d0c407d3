"""Read off a replicated module all that explains its step."""

from __future__ import annotations

from torch import nn

from dp_compile.cost_model import AllReduceCost
from dp_compile.errors import ModuleError
from dp_compile.ready_times import MEASURED
from dp_compile.replica import Replica
from dp_compile.replicated_module import replica_of
from dp_compile.report import CaptureRecord, Report
from dp_compile.step import Step
from dp_compile.strategies import nominal_cost


def report(module: nn.Module) -> Report:
    """The plan of a replicated module, what was captured, and which way its backwards went.

    Raises:
        ModuleError: the module is not replicated.
    """
    replica = replica_of(module)
    if replica.hooks is not None:
        mode = "python hooks"
    elif replica.comm_hook is not None:
        mode = f"torch's C++ reducer with comm hook {replica.comm_hook.name}"
    elif replica.reducer is not None:
        mode = "torch's C++ reducer"
    else:
        mode = "not decided, no backward yet"
    promise = ""
    if replica.certificate is not None:
        promise = "\n".join([*str(replica.certificate).splitlines()[:2], replica.ready.basis])
    captures = tuple(replica.captures.values())
    return Report(mode, replica.group.world_size, replica.plan, captures, dict(replica.backwards), promise)


def step_of(module: nn.Module) -> Step:
    """What was planned for a replicated module, from what, what came of it, and what was measured.

    Raises:
        ModuleError: the module is not replicated, or no synchronised backward of it has run yet.
    """
    replica, said = replica_of(module), report(module)
    if not replica.synced_backwards:
        raise ModuleError(
            "nothing to explain yet: no synchronised backward of this module has run. Train a step, or call "
            "dp_compile.warmup(), first."
        )
    captures = [record for record in replica.captures.values() if record.synced]
    latest: CaptureRecord | None = captures[-1] if captures else None
    cost, cost_source = _cost(replica)
    return Step(
        mode=said.mode,
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
        backwards=tuple(said.backwards.items()),
        measured=replica.measured,
        deferred=latest is not None and latest.deferred,
    )


def _cost(replica: Replica) -> tuple[AllReduceCost, str]:
    """What a collective costs, and where that is from."""
    group = replica.group
    nominal = nominal_cost(group.backend, group.world_size)
    cost = replica.config.cost or (nominal if replica.certificate is None else replica.certificate.cost)
    if replica.config.cost is not None:
        return cost, "given in the config"
    if cost != nominal and replica.ready.basis == MEASURED:
        return cost, "measured on this group"
    return cost, f"nominal for {group.backend}, not measured"
