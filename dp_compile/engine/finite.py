"""The check that is on with `check_nan`: is every reduced gradient finite, and if not, where did it begin?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from dp_compile._torch.dtensors import groups_that_shard
from dp_compile.engine.agreement import exchange
from dp_compile.engine.replica import Replica
from dp_compile.engine.settling import meeting, table_in_backward
from dp_compile.errors import ReductionError


def check_finite(replica: Replica, reduced: Mapping[str, torch.Tensor], outputs: Sequence[Any]) -> None:
    """Raise on every rank if a reduced gradient holds a NaN or an infinity. Reads one number back from the device.

    The sum of a bucket is not finite on all ranks as soon as one rank's contribution was not, so all ranks decide the
    same without a word. Only then they tell each other through the store what their backwards started from.

    Ranks that hold other parts of DTensors have other sums, and are asked: those that went on would wait for the others
    in the next collective of theirs.

    Raises:
        ReductionError: names the parameters, and the ranks whose loss was not finite.
    """
    if _all_finite(replica, list(reduced.values())):
        return
    names = [f"{name} ({_kind(grad)})" for name, grad in reduced.items() if _kind(grad)]
    names = names or ["parts of DTensors that other ranks hold"]
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    raise ReductionError(f"reduced gradients are not finite: {', '.join(names[:8])}{more}. {_origin(replica, outputs)}")


def _all_finite(replica: Replica, grads: Sequence[torch.Tensor]) -> bool:
    checks = [grad.isfinite().all() for grad in grads]
    finite = torch.stack(checks).all() if checks else torch.ones((), dtype=torch.bool, device=replica.device)
    beside = dict.fromkeys(group for parameter in replica.parameters for group in groups_that_shard(parameter))
    if not beside:
        return bool(finite)
    said = finite.int()
    for group in beside:
        dist.all_reduce(said, op=dist.ReduceOp.MIN, group=group)
    return bool(said)


def _kind(grad: torch.Tensor) -> str:
    """Empty for a finite tensor."""
    return "nan" if bool(grad.isnan().any()) else "inf" if bool(grad.isinf().any()) else ""


def _origin(replica: Replica, outputs: Sequence[Any]) -> str:
    finite = all(bool(each.isfinite().all()) for each in outputs if isinstance(each, torch.Tensor))
    said, table, topic = [finite], table_in_backward(replica), meeting(replica, "finite")
    if table is not None:
        said = exchange(table, topic, finite)
    culprits = [rank for rank, each in enumerate(said) if not each]
    if culprits:
        return f"The loss was not finite on rank(s) {', '.join(map(str, culprits))} of the group."
    wire = replica.config.wire_dtype(replica.parameters)
    sent = f", or a gradient is too large for {str(wire).removeprefix('torch.')}, in which they travel" if wire else ""
    return (
        f"The loss was finite on every rank: a backward made them, or their sum is too large for the dtype{sent}. "
        "torch.autograd.set_detect_anomaly(True) names the operation, if a backward did."
    )
