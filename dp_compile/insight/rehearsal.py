"""What `dp_compile.testing` needs of a dry run: a loss, a fake process group, the roofline time of an op."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.flop_counter import flop_registry

from dp_compile._torch import autograd, distributed
from dp_compile.errors import ConfigError, DPCompileError, ModuleError
from dp_compile.plan.backends import FAKE
from dp_compile.plan.devices import Device

LossFn = Callable[[nn.Module, Any], torch.Tensor]
META: Final = "meta"
CPU: Final = "cpu"


def check_ranks(ranks: object) -> None:
    """Raises:
    ConfigError: not an integer, or fewer than 2.
    """
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 2:
        raise ConfigError(f"ranks must be an integer >= 2, got {ranks!r}: one rank reduces nothing.")


def default_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """The loss of a model without a `loss_fn`: its result's `.loss`, a scalar result, or the mean of floating tensors.

    Raises:
        ModuleError: the model returns no floating tensor.
    """
    if isinstance(batch, Mapping):
        out = model(**batch)
    else:
        out = model(*batch) if isinstance(batch, (tuple, list)) else model(batch)
    loss = getattr(out, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    found = list(_floating(out))
    if not found:
        raise ModuleError(f"{type(model).__name__} returns no floating tensor to make a loss of. Return a loss_fn too.")
    if len(found) == 1 and found[0].dim() == 0:
        return found[0]
    return torch.stack([each.float().mean() for each in found]).sum()


def _floating(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _floating(each)
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _floating(each)


def scalar_loss(model: Any, batch: Any, loss_fn: LossFn) -> torch.Tensor:
    """The loss of a forward, checked.

    Raises:
        ModuleError: the forward failed, or what came out is not a scalar that a backward can start from.
    """
    try:
        loss = loss_fn(model, batch)
    except DPCompileError:
        raise
    except Exception as error:
        hint = " The meta device has no values: take on='cpu' (--on cpu)." if "meta tensor" in str(error) else ""
        raise ModuleError(f"the forward of the model failed: {type(error).__name__}: {error}.{hint}") from error
    if not isinstance(loss, torch.Tensor) or loss.dim() != 0 or not loss.requires_grad:
        raise ModuleError(f"loss_fn must return a scalar that a backward can start from, got {_what_it_is(loss)}")
    return loss


def _what_it_is(loss: object) -> str:
    """What is wrong with a loss, and what to do."""
    if not isinstance(loss, torch.Tensor):
        return f"{type(loss).__name__}."
    if loss.dim() != 0:
        return f"a tensor of shape {list(loss.shape)}. Take its mean() or sum()."
    return (
        "a scalar that does not require a gradient: nothing that it was computed from does, or the forward ran under "
        "torch.no_grad(), detached it, or made a tensor of a number. Does any parameter take part?"
    )


@contextlib.contextmanager
def fake_group(ranks: int) -> Iterator[None]:
    """A group of which only this rank exists, in which every collective returns at once, unless one is up."""
    if dist.is_initialized():
        backend = distributed.backend_of(dist.group.WORLD, CPU)
        if backend != FAKE:
            raise ConfigError(f"a process group ({backend}) is up. Rehearse in a process without one.")
        yield
        return
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def op_seconds(
    op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any, device: Device, efficiency: float
) -> float:
    """How long one op takes on a device by roofline; what only looks at memory takes no time.

    Of a pointwise op only the result is counted: a compiler fuses it with what made its inputs.
    """
    inputs, outputs = list(_tensors((args, kwargs))), list(_tensors(out))
    if not outputs or _hands_on(op, inputs, outputs):
        return 0.0
    formula: Callable[..., Any] | None = flop_registry.get(getattr(op, "overloadpacket", None))
    flops = 0.0 if formula is None else float(formula(*args, **kwargs, out_val=out))
    moved = outputs if torch.Tag.pointwise in op.tags else (*inputs, *outputs)
    dtype = str(outputs[0].dtype).removeprefix("torch.")
    return device.seconds(flops, sum(each.nbytes for each in moved), dtype, efficiency=efficiency)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    found: list[torch.Tensor] = []
    autograd.tree_map_only(torch.Tensor, found.append, value)
    yield from found


def _hands_on(op: Any, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> bool:
    """Whether an op only looks at memory that was there, and writes nothing."""
    if op._schema.is_mutable:
        return False
    memory = {StorageWeakRef(each.untyped_storage()) for each in inputs}
    return op.is_view or all(StorageWeakRef(each.untyped_storage()) in memory for each in outputs)
