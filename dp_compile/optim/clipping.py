"""`clip_grad_norm_()`: the gradient norm of plain parameters and DTensors, with each element counted once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import reduce
from types import SimpleNamespace

import torch
import torch.distributed as dist

from dp_compile._torch import dtensors
from dp_compile.errors import require
from dp_compile.optim.update import Update
from dp_compile.replica.gradients import lay_out
from dp_compile.replica.replica import owners


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Clip gradients like `torch.nn.utils.clip_grad_norm_`, for plain parameters and DTensors together.

    torch's function accepts DTensors of one mesh only, without plain tensors. This one all-reduces the norms of sharded
    gradients over their mesh and counts replicated gradients once. Collective: call it on all ranks of the mesh, after
    the backward. Without DTensors it calls torch's function.

    Args:
        parameters: one parameter, or several; their gradients are clipped in place.
        max_norm: upper bound of the total norm after clipping.
        norm_type: order of the p-norm, above zero; may be `math.inf`.
        error_if_nonfinite: raise if the total norm is NaN or infinite.
        foreach: use foreach kernels; `None`: torch chooses.

    Returns:
        The total norm before clipping: a plain tensor, equal on every rank after a synchronised backward.

    Raises:
        ConfigError: `norm_type` is not above zero, and some gradients are DTensors.
        ReductionError: an optimizer with `in_backward()` has already updated with these gradients.
        RuntimeError: `error_if_nonfinite` is set, and the norm is NaN or infinite.
    """
    given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    for found in filter(None, map(owners.find, given)):
        for updates in found[0].after.updates:
            if isinstance(updates, Update):
                updates.check_clipping(found[1])
    if not any(dtensors.is_dtensor(each.grad) for each in given):
        return torch.nn.utils.clip_grad_norm_(given, max_norm, norm_type, error_if_nonfinite, foreach)
    order = float(norm_type)
    require(order > 0, "norm_type", "above zero where gradients are DTensors", norm_type)
    for each in given:
        lay_out(each)
    parts: dict[tuple[dist.ProcessGroup, ...], list[torch.Tensor]] = {}
    for each in given:
        if each.grad is not None:
            parts.setdefault(dtensors.groups_that_shard(each.grad), []).append(dtensors.local_tensor(each.grad))
    everything = [part for some in parts.values() for part in some]
    norms = [_norm(some, order, groups, foreach) for groups, some in parts.items()]
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack([each.to(norms[0].device) for each in norms]), order)
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise RuntimeError(
            f"the total norm of order {order} of the gradients is {float(norm)}, so they cannot be clipped. "
            "To scale by it anyway, pass error_if_nonfinite=False."
        )
    norm = norm.to(reduce(torch.promote_types, (part.dtype for part in everything)))
    holders = [SimpleNamespace(grad=part) for part in everything]
    torch.nn.utils.clip_grads_with_norm_(holders, max_norm, norm, foreach)  # type: ignore[arg-type]
    return norm


def _norm(
    parts: Sequence[torch.Tensor], order: float, groups: Sequence[dist.ProcessGroup], foreach: bool | None
) -> torch.Tensor:
    """Return the joint norm of `parts` on all ranks of `groups`; in float64, because powers are reduced."""
    device = parts[0].device
    own = [part for part in parts if part.numel()]  # a rank's shard of a short dimension may be empty
    norm: torch.Tensor = torch.zeros((), dtype=torch.float64, device=device)
    if own:
        norm = torch.nn.utils.get_total_norm(own, order, foreach=foreach).to(device, torch.float64)
    for group in groups:
        if math.isinf(order):
            # MAX may drop a NaN (gloo), so a flag carries it.
            both = torch.stack([norm.nan_to_num(nan=0.0, posinf=math.inf), norm.isnan().double()])
            dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
            norm = torch.where(both[1] > 0, math.nan, both[0])
        else:
            power = norm.pow(order)
            dist.all_reduce(power, group=group)
            norm = power.pow(1 / order)
    return norm
