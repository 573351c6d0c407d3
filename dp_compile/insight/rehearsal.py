"""A step of a model that computes nothing and sends nothing: on the meta device, on the fake process group.

    callable -> (model, batch) on meta -> forward and backward once, op by op: times by roofline
                                       -> captured backward with our passes: ready times, plan, simulated peak memory

So a model of any size is planned on a machine without its memory, without a GPU, and without other ranks.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.flop_counter import flop_registry

from dp_compile._torch import autograd, distributed
from dp_compile.config import ReplicateConfig
from dp_compile.errors import ConfigError, DPCompileError, ModuleError
from dp_compile.insight.observe import step_of
from dp_compile.insight.prediction import Scenario, predict
from dp_compile.insight.step import Step
from dp_compile.modules.replicate import replicate_without_values, unreplicate
from dp_compile.plan.backends import FAKE, GLOO, NCCL
from dp_compile.plan.buckets import BucketPlan
from dp_compile.plan.cost import EITHER
from dp_compile.plan.devices import EFFICIENCY, Device, check_efficiency
from dp_compile.plan.links import link as link_of

LossFn = Callable[[nn.Module, Any], torch.Tensor]
META: Final = "meta"
CPU: Final = "cpu"


@dataclass(frozen=True, slots=True)
class Subject:
    """What is rehearsed. `loss_fn(model, batch)` is the scalar whose backward is looked at."""

    model: nn.Module
    batch: Any
    loss_fn: LossFn


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """What came of it. Times are by roofline, sizes of one rank.

    `step` is as on `link`, with buckets planned for it. `parameter_nbytes`, `gradient_nbytes`: all, trainable.
    """

    step: Step
    forward_s: float
    parameter_nbytes: int
    gradient_nbytes: int
    device: Device
    link: str


def rehearse(
    subject: Subject, device: Device, *, ranks: int, link: str, efficiency: float = EFFICIENCY, on: str = META
) -> Rehearsal:
    """Capture one backward of a model and put a length on it.

    The model is moved to the meta device (`on="cpu"`: it really computes there, twice) and its gradients are dropped.
    Kernels are counted one by one, those of attention too, where a GPU has a fused kernel: the times of what is bound
    by memory are too long rather than too short.

    Args:
        subject: model, batch and loss.
        device: what it would run on.
        ranks: of the group, at least 2.
        link: between them: a name of `links.LINKS`.
        efficiency: which share of the device's peak matrix products reach.
        on: `meta` or `cpu`.

    Raises:
        ConfigError: a value is not allowed, or a process group that is not fake is up.
        ModuleError: the model cannot be replicated, the loss is not a scalar, or the backward was not captured.
    """
    check_efficiency(efficiency)
    if on not in (META, CPU):
        raise ConfigError(f"on must be 'meta' or 'cpu', got {on!r}.")
    check_ranks(ranks)
    cost = link_of(link).cost(ranks, formula=EITHER)
    model, batch = subject.model.to(on), _moved(subject.batch, on)
    forward_s, backward_s = _timed(model, batch, subject.loss_fn, device, efficiency)
    config = ReplicateConfig(backend="aot_eager", cost=cost, check_reductions=False, monitor_after_s=None)
    with fake_group(ranks):
        step = _captured(model, batch, subject.loss_fn, config)
    step = replace(
        step,
        world_size=ranks,
        backend=NCCL if device.type == "cuda" else GLOO,
        device=device.type,
        plan=_as_on(step.plan, device.type),
        cost_source=f"{link}, nominal, not measured",
        ready=replace(step.ready, backward_s=backward_s, basis=_basis(device, efficiency)),
        forward_ratio=forward_s / backward_s if backward_s else None,
    )
    parameters = list(model.parameters())
    return Rehearsal(
        replace(step, plan=predict(step, Scenario(strategy="optimal")).plan),
        forward_s,
        sum(each.nbytes for each in parameters),
        sum(each.nbytes for each in parameters if each.requires_grad),
        device,
        link,
    )


def check_ranks(ranks: object) -> None:
    """Raises:
    ConfigError: not an integer, or fewer than 2.
    """
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 2:
        raise ConfigError(f"ranks must be an integer >= 2, got {ranks!r}: one rank reduces nothing.")


def _as_on(plan: BucketPlan, device_type: str) -> BucketPlan:
    """The plan with another device in the keys of its gradients."""
    buckets = []
    for bucket in plan.buckets:
        key = bucket.key._replace(device=device_type)
        members = (replace(each, gradient=replace(each.gradient, key=key)) for each in bucket.members)
        buckets.append(replace(bucket, key=key, members=tuple(members)))
    return replace(plan, buckets=tuple(buckets))


def _basis(device: Device, efficiency: float) -> str:
    return (
        f"estimated: kernels of the captured backward by the roofline of {device.name} at {efficiency:.0%} of its peak "
        "(an assumption), attention not fused"
    )


# --- what is rehearsed ----------------------------------------------------------------------------------------------


def load_subject(path: str, *, on: str = META) -> Subject:
    """Call `package.module:callable`, which returns what to rehearse.

    The callable takes nothing and returns `(model, batch)` or `(model, batch, loss_fn)`. It runs with `on` as torch's
    default device, so that tensors it makes need no memory; others are moved there afterwards. `loss_fn(model, batch)`
    returns the scalar loss. Without it the model is called with the batch (`model(*batch)` for a tuple or list,
    `model(**batch)` for a dict, else `model(batch)`), and the loss is the result's `.loss`, the result itself if it
    is a scalar, or the mean of all floating tensors in it.

    Raises:
        ConfigError: the path does not resolve, is not a callable, raises, or returns something else.
    """
    make = _resolve(path)
    try:
        with torch.device(on):
            made = make()
    except Exception as error:
        hint = " If it needs values, as .item() or numpy do, make real tensors: --on cpu." if on == META else ""
        raise ConfigError(f"{path}() raised {type(error).__name__}: {error}.{hint}") from error
    if not isinstance(made, (tuple, list)) or len(made) not in (2, 3) or not isinstance(made[0], nn.Module):
        kinds = ", ".join(type(each).__name__ for each in made) if isinstance(made, (tuple, list)) else ""
        raise ConfigError(
            f"{path}() must return (model, batch) or (model, batch, loss_fn) with an nn.Module first, got "
            f"{f'({kinds})' if kinds else type(made).__name__}."
        )
    loss_fn = made[2] if len(made) == 3 else default_loss
    if not callable(loss_fn):
        raise ConfigError(f"the loss_fn that {path}() returns must be callable, got {type(loss_fn).__name__}.")
    return Subject(made[0], made[1], loss_fn)


def _resolve(path: str) -> Callable[[], Any]:
    module_name, colon, name = path.partition(":")
    if not colon or not module_name or not name:
        raise ConfigError(f"the import path must be package.module:callable, got {path!r}.")
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:
        raise ConfigError(f"{module_name} cannot be imported: {type(error).__name__}: {error}.") from error
    for part in name.split("."):
        if not hasattr(found, part):
            own = [each for each, value in vars(found).items() if getattr(value, "__module__", "") == module_name]
            raise ConfigError(f"{module_name} has no {name!r}. Defined there: {', '.join(own[:8]) or 'nothing'}.")
        found = getattr(found, part)
    if not callable(found):
        raise ConfigError(f"{path} is not callable, it is of type {type(found).__name__}.")
    make: Callable[[], Any] = found
    return make


def default_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """The loss of a subject without one; see `load_subject`.

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


def _moved(batch: Any, on: str) -> Any:
    return autograd.tree_map_only(torch.Tensor, lambda tensor: tensor.to(on), batch)


# --- its backward ---------------------------------------------------------------------------------------------------


def _captured(model: nn.Module, batch: Any, loss_fn: LossFn, config: ReplicateConfig) -> Step:
    replicate_without_values(model, config)
    try:
        loss = scalar_loss(torch.compile(model, backend="aot_eager"), batch, loss_fn)
        loss.backward()
        step = step_of(model)
    finally:
        unreplicate(model)
        model.zero_grad()
    ways = dict(step.backwards)
    if not ways.get("captured"):
        raise ModuleError(f"the backward was not captured but went another way: {', '.join(ways)}. The log says why.")
    return step


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


# --- how long it computes -------------------------------------------------------------------------------------------


def _timed(model: nn.Module, batch: Any, loss_fn: LossFn, device: Device, efficiency: float) -> tuple[float, float]:
    """Seconds of forward and backward by roofline."""
    with _Roofline(device, efficiency) as forward:
        loss = scalar_loss(model, batch, loss_fn)
    with _Roofline(device, efficiency) as backward:
        loss.backward()
    model.zero_grad()
    return forward.total_s, backward.total_s


class _Roofline(autograd.TorchDispatchMode):
    """Adds up what the ops that run in it would take on a device."""

    def __init__(self, device: Device, efficiency: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device, self.efficiency, self.total_s = device, efficiency, 0.0

    def __torch_dispatch__(
        self, op: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = op(*args, **(kwargs or {}))
        self.total_s += op_seconds(op, args, kwargs or {}, out, self.device, self.efficiency)
        return out


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
