"""Every feature of the README's table, trained with this package and with a reference that is not of it, and compared.

`.ci/gpu` runs the table with NCCL on GPUs; `tests/gpu/test_nccl_forms.py` with a stand-in for NCCL on CPUs. Each
feature trains `STEPS` steps in the default process group with other data on each rank. References are torch's own: its
DDP with the same hook, ZeroRedundancyOptimizer, FSDP2, its averagers; for eight bits a formula in NumPy.

With the compiler `aot_eager` both sides compute gradients by the same kernels. So two ranks have to end with the same
bits in float32: a sum of two is the same in any order. Where bits cannot be the same the feature states a tolerance;
`LOOSE` holds for more than two ranks, and for Inductor, whose kernels round otherwise.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import json
import math
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.model_averaging import averagers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import dp_compile
from dp_compile import averaging
from dp_compile.decentralized import decentralize

STEPS: Final = 10
WIDTH: Final = 16
ROWS: Final = 8
SMALL_MB: Final = 1e-3
"""A bucket holds the gradients of one layer, so there are several."""
EXACT: Final = 0.0
LOOSE: Final = 2e-5
"""Largest difference of an element after all steps, where sums may be added up in another order."""
GRACE_S: Final = 5.0
"""How long a rank may go on once another rank has failed, before its collectives are aborted."""
CAPTURED: Final = "captured"
EAGER: Final = "eager"
_WAYS: Final = {CAPTURED: "captured", EAGER: "eager hooks"}
"""What the report calls them."""
BF16, F16 = torch.bfloat16, torch.float16


@dataclass(frozen=True, slots=True)
class Place:
    """Where a feature runs, and how."""

    device: torch.device
    compiler: str
    captured: bool
    exits: contextlib.ExitStack = field(compare=False)
    """What takes the feature's modules apart."""

    @property
    def way(self) -> str:
        return CAPTURED if self.captured else EAGER

    @property
    def tolerance(self) -> float:
        """Of float32, where a feature has none of its own."""
        return EXACT if dist.get_world_size() == 2 and self.compiler == "aot_eager" else LOOSE

    def is_eager(self) -> AbstractContextManager[object]:
        """Backwards inside are not captured, if this is the eager way: torch's compiled autograd is off then."""
        return nullcontext() if self.captured else torch.autograd.detect_anomaly(check_nan=False)

    def config(self, **options: Any) -> dp_compile.ReplicateConfig:
        return dp_compile.ReplicateConfig(**{"backend": self.compiler, "bucket_cap_mb": SMALL_MB} | options)

    def batch(self, number: int, width: int = WIDTH, rows: int = ROWS) -> torch.Tensor:
        """Of this rank in a step."""
        generator = torch.Generator().manual_seed(1000 * number + dist.get_rank())
        return torch.randn(rows, width, generator=generator).to(self.device)


@dataclass(frozen=True, slots=True)
class Difference:
    """Between two trainings: the largest of any element, and the first tensor that differs by more than allowed."""

    largest: float
    tolerance: float
    name: str = ""
    note: str = ""

    def __str__(self) -> str:
        if self.name:
            return f"{self.name} differs, the largest difference is {self.largest:.3g}, allowed is {self.tolerance:g}"
        return "equal bits" if self.largest == 0 else f"within {self.tolerance:g}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a feature, the same on all ranks but for `seconds`."""

    feature: str
    way: str
    passed: bool
    detail: str
    largest_difference: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Feature:
    """A row of the table.

    Args:
        name: in the table.
        run: trains both and compares; raises what goes wrong.
        ranks: with how many it can run.
        needs: a type of device without which torch cannot run it; nothing if it runs anywhere.
        ways: whether the backward is captured or eager, where that can be chosen.
    """

    name: str
    run: Callable[[Place], Difference]
    ranks: tuple[int, ...] = (2, 4)
    needs: str = ""
    ways: tuple[str, ...] = (CAPTURED, EAGER)


_features: list[Feature] = []
Run = Callable[[Place], Difference]


def _feature(name: str, **options: Any) -> Callable[[Run], Run]:
    def add(run: Run) -> Run:
        _features.append(Feature(name, run, **options))
        return run

    return add


# --- models and batches -------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Layers of one shape, a norm and a head: most features train this, so that compiled code is found again."""

    def __init__(self, *, tied: bool = False, spare: bool = False, batch_norm: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm: nn.Module = nn.BatchNorm1d(WIDTH) if batch_norm else nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH)
        if spare:
            self.spare = nn.Linear(WIDTH, WIDTH)
        if tied:
            self.head.weight = self.layers[0].weight  # type: ignore[assignment]

    def forward(self, x: torch.Tensor, use_spare: bool = False) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        if use_spare:
            x = x + self.spare(x)
        result: torch.Tensor = self.head(self.norm(x))
        return result


class Convolutions(nn.Module):
    """Gradients that the plan leaves out of their bucket's memory, and reduces with it in one launch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(4, 4, 3, padding=1) for _ in range(2))
        self.head = nn.Linear(4, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        images = x.view(len(x), 4, 2, 2)
        result: torch.Tensor = self.head(self.second(torch.tanh(self.first(images))).mean((2, 3)))
        return result


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """A large `eps`: the sign of a gradient near zero does not decide about a whole step."""
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-3)


def loss_of(outputs: torch.Tensor) -> torch.Tensor:
    return (outputs.float() - 1).square().mean()


# --- two trainings ------------------------------------------------------------------------------------------------


@dataclass
class Pair:
    """A model of this package and one of torch's DDP, which are trained by the same steps."""

    place: Place
    ours: Any
    run: Any
    theirs: Any
    mine: torch.optim.Optimizer
    other: torch.optim.Optimizer
    max_norm: float | None = None
    scalers: tuple[torch.amp.GradScaler, torch.amp.GradScaler] | None = None
    set_to_none: bool = True
    backwards: int = 0

    @staticmethod
    def made(
        place: Place,
        build: Callable[[], nn.Module] = Net,
        *,
        make: Callable[[Any], torch.optim.Optimizer] = sgd,
        config: Mapping[str, Any] | None = None,
        ddp: Mapping[str, Any] | None = None,
        hook: tuple[Callable[[], Any], Callable[[], Any]] | None = None,
        in_backward: Mapping[str, Any] | None = None,
        max_norm: float | None = None,
        scaled: bool = False,
        set_to_none: bool = True,
        **options: Any,
    ) -> Pair:
        """`config` goes to `ReplicateConfig`, `options` to `replicate`, `ddp` to torch's DDP, `in_backward` to the
        function of that name. `hook`: what make our comm hook and torch's, each with its state."""
        torch.manual_seed(0)
        ours = build().to(place.device)
        theirs = DistributedDataParallel(copy.deepcopy(ours), **(ddp or {}))
        with torch.no_grad():
            for parameter in ours.parameters():
                parameter.add_(dist.get_rank())  # replicate() has to undo this
        dp_compile.replicate(ours, config=place.config(**(config or {})), **options)
        place.exits.callback(_unreplicated, ours)
        if hook is not None:
            ours.register_comm_hook(*hook[0]())
            # torch's method refuses bfloat16 where it does not know the backend; the hook does not care.
            dist._register_comm_hook(theirs.reducer, *hook[1]())  # type: ignore[attr-defined]
        scalers = None
        if scaled:
            one, two = (torch.amp.GradScaler(place.device.type, init_scale=2.0**8, growth_interval=3) for _ in range(2))
            scalers = one, two
        mine, other = make(ours.parameters()), make(theirs.parameters())
        backend = place.compiler
        if in_backward is not None:
            given = {**in_backward, "max_norm": max_norm, "scaler": scalers and scalers[0]}
            dp_compile.optim.in_backward(ours, mine, **given)
            backend = "dp_compile" if in_backward.get("overlap_forward") else backend
        run = torch.compile(ours, backend=backend)
        return Pair(place, ours, run, theirs, mine, other, max_norm, scalers, set_to_none)

    def backward(self, number: int, *inputs: Any, sync: bool = True, factor: float = 1.0) -> None:
        """Of both. `factor`: of this rank's loss."""
        x = self.place.batch(number)
        with nullcontext() if sync else dp_compile.no_sync(self.ours), self.place.is_eager():
            (self._loss(0, self.run(x, *inputs)) * factor).backward()
        with nullcontext() if sync else self.theirs.no_sync():
            (self._loss(1, self.theirs(x, *inputs)) * factor).backward()
        self.backwards += sync

    def _loss(self, side: int, outputs: torch.Tensor) -> torch.Tensor:
        loss = loss_of(outputs)
        return loss if self.scalers is None else self.scalers[side].scale(loss)

    def step(self, *, before_zero: Callable[[], object] = lambda: None) -> None:
        for side, (module, optimizer) in enumerate(((self.ours, self.mine), (self.theirs, self.other))):
            if self.scalers is not None and side == 1:
                self.scalers[1].unscale_(optimizer)
            if self.max_norm is not None and side == 1:  # ours is clipped in its backward
                nn.utils.clip_grad_norm_(module.parameters(), self.max_norm)
            if self.scalers is None:
                optimizer.step()
            else:
                self.scalers[side].step(optimizer)
                self.scalers[side].update()
        before_zero()
        for optimizer in (self.mine, self.other):
            optimizer.zero_grad(set_to_none=self.set_to_none)

    def train(self, steps: int = STEPS, **options: Any) -> Pair:
        for number in range(steps):
            self.backward(number, **options)
            self.step()
        return self

    def compared(self, tolerance: float | None = None, *, buffers: bool = True) -> Difference:
        """Parameters, what optimizers of elements remember, and on the first rank buffers, which are its own."""
        if self.scalers is not None and self.scalers[0].get_scale() != self.scalers[1].get_scale():
            raise AssertionError(f"scales: {self.scalers[0].get_scale()} and {self.scalers[1].get_scale()}")
        check_way(self.place, self.ours, self.backwards)
        mine, other = named(self.ours.named_parameters()), named(self.theirs.module.named_parameters())
        if buffers and dist.get_rank() == 0:
            mine |= named(self.ours.named_buffers())
            other |= named(self.theirs.module.named_buffers())
        if not getattr(self.mine, "_dp_compile_sharded", False):
            mine |= remembered(self.ours, self.mine)
            other |= remembered(self.theirs.module, self.other)
        return compared(mine, other, self.place.tolerance if tolerance is None else tolerance)


def _unreplicated(module: nn.Module) -> None:
    with contextlib.suppress(Exception):  # it has failed, and its ranks are not at the same place
        dp_compile.unreplicate(module)


def check_way(place: Place, module: nn.Module, backwards: int) -> None:
    """All synchronised backwards of a module went the way that was asked for.

    Raises:
        AssertionError: one did not.
    """
    counts = dp_compile.report(module).backwards
    found = {way: count for way, count in counts.items() if "without sync" not in way}
    if found != {_WAYS[place.way]: backwards}:
        raise AssertionError(f"{backwards} {place.way} backwards were asked for, there were {found}")


def named(pairs: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.detach() for name, tensor in pairs}


def remembered(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The state of an optimizer, by parameter and name."""
    found = {}
    for name, parameter in module.named_parameters():
        for key, value in (optimizer.state[parameter] if parameter in optimizer.state else {}).items():
            if isinstance(value, torch.Tensor) and value.dim():
                found[f"{key} of {name}"] = value
    return found


def compared(mine: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor], tolerance: float) -> Difference:
    """By name, NaN is different from everything.

    Raises:
        AssertionError: names or shapes are not the same.
    """
    if mine.keys() != other.keys():
        raise AssertionError(f"only one of both has {', '.join(sorted(mine.keys() ^ other.keys()))}")
    largest, first = 0.0, ""
    for name, tensor in mine.items():
        one, two = (each.detach().to("cpu", torch.float64) for each in (tensor, other[name]))
        if one.shape != two.shape:
            raise AssertionError(f"{name} has shape {tuple(one.shape)}, the other one {tuple(two.shape)}")
        difference = float((one - two).abs().nan_to_num(nan=math.inf).max()) if one.numel() else 0.0
        largest = max(largest, difference)
        first = first or (name if difference > tolerance else "")
    return Difference(largest, tolerance, first)


# --- buckets and gradients ----------------------------------------------------------------------------------------


@_feature("default")
def default(place: Place) -> Difference:
    return Pair.made(place, config={"bucket_cap_mb": None}).train().compared()


@_feature("bucket_cap_mb")
def capped(place: Place) -> Difference:
    return Pair.made(place).train().compared()


@_feature("buckets by module")
def by_module(place: Place) -> Difference:
    return Pair.made(place, config={"bucket_cap_mb": None}, bucket_policy={nn.Linear}).train().compared()


@_feature("gradients divided by 3")
def divided(place: Place) -> Difference:
    """No average of the backend's: all is divided by hand. torch's DDP divides by the number of ranks."""
    pair = Pair.made(place, config={"gradient_divide_factor": 2.0 * dist.get_world_size()})
    for number in range(STEPS):
        pair.backward(number)
        for parameter in pair.theirs.parameters():
            parameter.grad /= 2
        pair.step()
    return pair.compared()


@_feature("unused parameters are found")
def unused(place: Place) -> Difference:
    """The spare layer is used on the first rank, on all, and on none, in turns."""
    pair = Pair.made(
        place,
        functools.partial(Net, spare=True),
        find_unused_parameters=True,
        ddp={"find_unused_parameters": True},
    )
    for number in range(STEPS):
        pair.backward(number, (dist.get_rank() == 0, True, False)[number % 3])
        pair.step()
    return pair.compared()


@_feature("no_sync, 4 backwards a step")
def accumulated(place: Place) -> Difference:
    pair = Pair.made(place)
    for number in range(STEPS):
        for micro in range(4):
            pair.backward(4 * number + micro, sync=micro == 3)
        pair.step()
    return pair.compared()


@_feature("gradients kept, set_to_none=False")
def kept(place: Place) -> Difference:
    return Pair.made(place, set_to_none=False).train().compared()


@_feature("gradients as views of lasting buckets")
def views(place: Place) -> Difference:
    given = {"gradient_as_bucket_view": True}
    return Pair.made(place, ddp=given, **given).train().compared()


@_feature("convolutions, apart from their bucket")
def convolutions(place: Place) -> Difference:
    return Pair.made(place, Convolutions).train().compared()


@_feature("tied weights")
def tied(place: Place) -> Difference:
    return Pair.made(place, functools.partial(Net, tied=True)).train().compared()


@_feature("frozen parameters")
def frozen(place: Place) -> Difference:
    def build() -> nn.Module:
        model = Net()
        model.layers[1].requires_grad_(False)
        return model

    return Pair.made(place, build).train().compared()


@_feature("static_graph")
def static(place: Place) -> Difference:
    pair = Pair.made(place, functools.partial(Net, spare=True), static_graph=True, ddp={"static_graph": True})
    return pair.train().compared()


@_feature("BatchNorm buffers")
def batch_norm(place: Place) -> Difference:
    return Pair.made(place, functools.partial(Net, batch_norm=True)).train().compared(max(place.tolerance, 1e-6))


@_feature("SyncBatchNorm", needs="cuda")
def synced_batch_norm(place: Place) -> Difference:
    def build() -> nn.Module:
        return nn.SyncBatchNorm.convert_sync_batchnorm(Net(batch_norm=True))

    return Pair.made(place, build).train().compared(LOOSE)


@_feature("two modules in one backward")
def two_modules(place: Place) -> Difference:
    pairs = [Pair.made(place) for _ in range(2)]
    for number in range(STEPS):
        x = place.batch(number)
        with place.is_eager():
            loss_of(pairs[1].run(pairs[0].run(x))).backward()
        loss_of(pairs[1].theirs(pairs[0].theirs(x))).backward()
        for pair in pairs:
            pair.backwards += 1
            pair.step()
    found = [pair.compared() for pair in pairs]
    return max(found, key=lambda each: each.largest)


@_feature("join(), uneven inputs")
def joined(place: Place) -> Difference:
    torch.manual_seed(0)
    module = Net().to(place.device)
    theirs = DistributedDataParallel(copy.deepcopy(module))
    ours = dp_compile.DistributedDataParallel(module, config=place.config())
    place.exits.callback(_unreplicated, module)
    steps = STEPS - 3 * (dist.get_rank() % 2)
    for wrapper, run in ((ours, torch.compile(ours, backend=place.compiler)), (theirs, theirs)):
        optimizer = sgd(wrapper.parameters())
        with wrapper.join():
            for number in range(steps):
                with place.is_eager() if wrapper is ours else nullcontext():
                    loss_of(run(place.batch(number))).backward()
                optimizer.step()
                optimizer.zero_grad()
    return compared(named(module.named_parameters()), named(theirs.module.named_parameters()), place.tolerance)


# --- on the wire --------------------------------------------------------------------------------------------------


def _torchs(hook: Any) -> Callable[[], Any]:
    return lambda: (None, hook)


@_feature("bf16 on the wire")
def wire_bf16(place: Place) -> Difference:
    pair = Pair.made(place, config={"mp_policy": MixedPrecisionPolicy(reduce_dtype=BF16)})
    dist._register_comm_hook(pair.theirs.reducer, None, default_hooks.bf16_compress_hook)  # type: ignore[attr-defined]
    return pair.train().compared(_of_half(place))


@_feature("fp16 on the wire")
def wire_fp16(place: Place) -> Difference:
    """Ours divides behind the sum: small numbers keep bits that torch's hook loses."""
    pair = Pair.made(place, config={"mp_policy": MixedPrecisionPolicy(reduce_dtype=F16)})
    dist._register_comm_hook(pair.theirs.reducer, None, default_hooks.fp16_compress_hook)  # type: ignore[attr-defined]
    return pair.train().compared(max(1e-5, _of_half(place)))


def _of_half(place: Place) -> float:
    """Two ranks add up to the same bits in half precision, too."""
    return EXACT if place.tolerance == EXACT else 2e-2


@_feature("torch's bf16_compress_hook")
def hook_bf16(place: Place) -> Difference:
    hook = _torchs(default_hooks.bf16_compress_hook)
    return Pair.made(place, hook=(hook, hook)).train().compared(_of_half(place))


@_feature("torch's fp16_compress_hook")
def hook_fp16(place: Place) -> Difference:
    hook = _torchs(default_hooks.fp16_compress_hook)
    return Pair.made(place, hook=(hook, hook)).train().compared(max(1e-5, _of_half(place)))


@_feature("torch's powerSGD_hook")
def hook_power_sgd(place: Place) -> Difference:
    options = {"matrix_approximation_rank": 1, "start_powerSGD_iter": 3, "min_compression_rate": 1.5}
    make = lambda: (PowerSGDState(None, **options), powerSGD_hook)  # noqa: E731
    pair = Pair.made(place, config={"bucket_cap_mb": math.inf}, hook=(make, make))
    return pair.train().compared(1e-4)


@_feature("torch's post_localSGD_hook, each rank alone")
def hook_local_sgd(place: Place) -> Difference:
    """After step 3 gradients are averaged over groups of one rank; every fourth step averages parameters."""
    alone, _ = dist.new_subgroups(1)
    make = lambda: (PostLocalSGDState(None, alone, 3), post_localSGD_hook)  # noqa: E731
    pair = Pair.made(place, hook=(make, make))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        two = averaging.PeriodicModelAverager(4, 3), averagers.PeriodicModelAverager(4, 3)

    def average() -> None:
        for averager, module in zip(two, (pair.ours, pair.theirs), strict=True):
            averager.average_parameters(module.parameters())  # torch's averages those that have a gradient

    for number in range(STEPS):
        pair.backward(number)
        pair.step(before_zero=average)
    return pair.compared()


@dataclass(frozen=True)
class Rounded(dp_compile.FunctionalHook):
    """Adds up in bfloat16, and sends in the next step what that has lost."""

    rounds: ClassVar[tuple[str, ...]] = ("all_reduce",)

    def initial_state(self, gradient: torch.Tensor) -> Mapping[str, torch.Tensor]:
        return {"error": torch.zeros_like(gradient)}

    def reduce(self, bucket: dp_compile.HookBucket) -> Generator[torch.Tensor, torch.Tensor, Any]:
        given = zip(bucket.gradients, bucket.state, strict=True)
        whole = torch.cat([(gradient + state["error"]).flatten() for gradient, state in given])
        sent = whole.to(BF16)
        mean = (yield sent).float() / bucket.ranks
        sizes = [each.numel() for each in bucket.gradients]
        reduced, errors = (
            [part.view_as(like) for part, like in zip(each.split(sizes), bucket.gradients, strict=True)]
            for each in (mean, whole - sent.float())
        )
        return reduced, [{"error": error} for error in errors]


def _rounded_by_torch(errors, bucket):  # type: ignore[no-untyped-def]  # torch refuses annotations that are text
    """`Rounded` as a hook of torch's; what it remembers is kept by parameter, as torch makes its buckets anew."""
    given = list(zip(bucket.parameters(), bucket.gradients(), strict=True))
    for parameter, gradient in given:
        gradient += errors.get(id(parameter), torch.zeros_like(gradient))
    sent, offset = bucket.buffer().to(BF16), 0
    for parameter, gradient in given:
        own = sent[offset : offset + gradient.numel()].view_as(gradient).float()
        errors[id(parameter)], offset = gradient - own, offset + gradient.numel()
    work = dist.all_reduce(sent, async_op=True)
    return work.get_future().then(lambda done: done.value()[0].float() / dist.get_world_size())


@_feature("FunctionalHook with state")
def functional_hook(place: Place) -> Difference:
    pair = Pair.made(place, hook=(lambda: (dp_compile.HookState(), Rounded()), lambda: ({}, _rounded_by_torch)))
    return pair.train().compared(_of_half(place))


@_feature("QuantizedHook int8, error feedback")
def quantized(place: Place) -> Difference:
    """Against a formula in NumPy of the gradients of all ranks. A rounding that tips over is sent in the next step."""
    torch.manual_seed(0)
    ours, block = Net().to(place.device), 64
    theirs = copy.deepcopy(ours)
    dp_compile.replicate(ours, config=place.config(bucket_cap_mb=math.inf))
    place.exits.callback(_unreplicated, ours)
    ours.register_comm_hook(dp_compile.HookState(), dp_compile.QuantizedHook(torch.int8, block))  # type: ignore[operator]
    run, mine, other = torch.compile(ours, backend=place.compiler), sgd(ours.parameters()), sgd(theirs.parameters())
    errors: list[np.ndarray] = []
    for number in range(STEPS):
        with place.is_eager():
            loss_of(run(place.batch(number))).backward()
        loss_of(theirs(place.batch(number))).backward()
        (order,) = (
            [member.gradient.name for member in bucket.members]
            for bucket in dp_compile.report(ours).plan.buckets
            if bucket.key.reduction.hook is not None
        )
        gradients = [theirs.get_parameter(name).grad for name in order]
        own = torch.cat([nn.functional.pad(each.flatten(), (0, -each.numel() % block)) for each in gradients])
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, own)
        everyone = [each.cpu().numpy() for each in parts]
        reduced, errors = _in_eight_bits(everyone, errors or [np.zeros_like(each) for each in everyone], block)
        offset = 0
        for gradient in gradients:
            flat = torch.from_numpy(reduced[offset : offset + gradient.numel()]).to(place.device)
            gradient.copy_(flat.view_as(gradient))
            offset += gradient.numel() + -gradient.numel() % block
        for optimizer in (mine, other):
            optimizer.step()
            optimizer.zero_grad()
    check_way(place, ours, STEPS)
    return compared(named(ours.named_parameters()), named(theirs.named_parameters()), 2e-3)


def _rounded_to_int8(x: np.ndarray, block: int) -> np.ndarray:
    blocks = x.reshape(-1, block)
    scale = np.maximum(np.abs(blocks).max(1, keepdims=True) / np.float32(127), np.float32(2**-126))
    values: np.ndarray = (np.rint(blocks * (np.float32(1) / scale)) * scale).astype(np.float32).reshape(-1)
    return values


def _in_eight_bits(
    gradients: Sequence[np.ndarray], errors: Sequence[np.ndarray], block: int
) -> tuple[np.ndarray, list[np.ndarray]]:
    """The average of all ranks, sent in eight bits to the rank that adds up and back, and what each has lost."""
    ranks, numel = len(gradients), gradients[0].size
    part = block * max(1, math.ceil(numel / (block * ranks)))
    whole = [np.pad(one + error, (0, ranks * part - numel)) for one, error in zip(gradients, errors, strict=True)]
    sent = [_rounded_to_int8(each, block) for each in whole]
    left = [one - value for one, value in zip(whole, sent, strict=True)]
    mean = np.sum(sent, axis=0, dtype=np.float32) / np.float32(ranks)
    reduced = _rounded_to_int8(mean, block)
    for rank, each in enumerate(left):
        own = slice(rank * part, (rank + 1) * part)
        each[own] += ranks * (mean - reduced)[own]
    return reduced[:numel], [each[:numel] for each in left]


# --- precision ----------------------------------------------------------------------------------------------------


@_feature("param_dtype bf16, as FSDP2")
def mixed_precision(place: Place) -> Difference:
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
    torch.manual_seed(0)
    ours = Net().to(place.device)
    theirs: Any = copy.deepcopy(ours)
    fully_shard(theirs, mesh=init_device_mesh(place.device.type, (dist.get_world_size(),)), mp_policy=policy)
    dp_compile.replicate(ours, config=place.config(), mp_policy=policy)
    place.exits.callback(_unreplicated, ours)
    run, mine, other = torch.compile(ours, backend=place.compiler), sgd(ours.parameters()), sgd(theirs.parameters())
    for number in range(STEPS):
        with place.is_eager():
            loss_of(run(place.batch(number))).backward()
        loss_of(theirs(place.batch(number))).backward()
        for optimizer in (mine, other):
            optimizer.step()
            optimizer.zero_grad()
    check_way(place, ours, STEPS)
    whole = {name: each.full_tensor() for name, each in theirs.named_parameters()}
    return compared(named(ours.named_parameters()), named(whole.items()), _of_half(place))


@_feature("fp16 autocast, GradScaler, inf on one rank")
def grad_scaler(place: Place) -> Difference:
    """The gradients of the last rank overflow in step 4: no rank steps, and all scales shrink."""
    pair = Pair.made(place, scaled=True)
    for number in range(STEPS):
        overflows = number == 4 and dist.get_rank() == dist.get_world_size() - 1
        with torch.autocast(place.device.type, F16):  # anew in each step: it keeps what it has cast
            pair.backward(number, factor=math.inf if overflows else 1.0)
        pair.step()
    return pair.compared(_of_half(place))


# --- optimizers ---------------------------------------------------------------------------------------------------


@_feature("in_backward")
def in_backward(place: Place) -> Difference:
    return Pair.made(place, in_backward={}).train().compared()


@_feature("in_backward, clipped")
def in_backward_clipped(place: Place) -> Difference:
    return Pair.made(place, in_backward={}, max_norm=0.1).train().compared(max(place.tolerance, 1e-6))


def _sharded(place: Place, **given: Any) -> Difference:
    """Beside torch's DDP with the optimizer whole, which has the same bits."""
    options = {key: given.pop(key) for key in ("max_norm", "scaled") if key in given}
    pair = Pair.made(place, in_backward={"shard": True, **given}, **options)
    for number in range(STEPS):
        overflows = pair.scalers is not None and number == 4 and dist.get_rank() == dist.get_world_size() - 1
        pair.backward(number, factor=math.inf if overflows else 1.0)
        pair.step()
    if given.get("overlap_forward"):
        dp_compile.optim.synchronize(pair.ours)
    mine = dp_compile.optim.full_state_dict(pair.mine)["state"]
    pair.mine._dp_compile_sharded = True  # type: ignore[attr-defined]  # its state is compared here
    found = pair.compared(max(place.tolerance, 1e-6) if options else None)
    other = pair.other.state_dict()["state"]
    states = [
        {f"{key} of parameter {index}": value for index, each in side.items() for key, value in each.items()}
        for side in (mine, other)
    ]
    of_states = compared(states[0], states[1], found.tolerance)
    return max((found, of_states), key=lambda each: (bool(each.name), each.largest))


@_feature("shard=True")
def sharded(place: Place) -> Difference:
    return _sharded(place)


@_feature("shard=True, as ZeroRedundancyOptimizer")
def sharded_as_zero(place: Place) -> Difference:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # loading it uses what torch itself deprecates
        from torch.distributed.optim import ZeroRedundancyOptimizer
    pair = Pair.made(place, make=adamw, in_backward={"shard": True})
    zero = ZeroRedundancyOptimizer(
        pair.theirs.parameters(), torch.optim.AdamW, lr=0.01, eps=1e-3, parameters_as_bucket_view=False
    )
    pair.other = zero
    pair.mine._dp_compile_sharded = True  # type: ignore[attr-defined]
    pair.train()
    zero.consolidate_state_dict(to=0)
    mine = dp_compile.optim.full_state_dict(pair.mine, to=0)
    found = pair.compared()
    if dist.get_rank() == 0:
        states = [
            {f"{key} of parameter {index}": value for index, each in side.items() for key, value in each.items()}
            for side in (mine["state"], zero.state_dict()["state"])
        ]
        of_states = compared(states[0], states[1], found.tolerance)
        found = max((found, of_states), key=lambda each: (bool(each.name), each.largest))
    return found


@_feature("shard=True, clipped, scaled, inf on one rank")
def sharded_and_scaled(place: Place) -> Difference:
    return _sharded(place, max_norm=0.1, scaled=True)


@_feature("shard=True, bf16 on the wire")
def sharded_bf16(place: Place) -> Difference:
    pair = Pair.made(place, config={"mp_policy": MixedPrecisionPolicy(reduce_dtype=BF16)}, in_backward={"shard": True})
    dist._register_comm_hook(pair.theirs.reducer, None, default_hooks.bf16_compress_hook)  # type: ignore[attr-defined]
    pair.mine._dp_compile_sharded = True  # type: ignore[attr-defined]
    return pair.train().compared(_of_half(place))


@_feature("overlap_forward=True")
def overlapped(place: Place) -> Difference:
    pair = Pair.made(place, in_backward={"overlap_forward": True}).train()
    dp_compile.optim.synchronize(pair.ours)
    return pair.compared()


@_feature("shard=True, overlap_forward=True")
def sharded_and_overlapped(place: Place) -> Difference:
    return _sharded(place, overlap_forward=True)


# --- parameters in the place of gradients -------------------------------------------------------------------------


@_feature("averages of parameters, as torch's averager", ways=(EAGER,))
def averaged(place: Place) -> Difference:
    """No gradient is reduced: nothing to capture."""
    torch.manual_seed(0)
    models = [Net().to(place.device)]
    models.append(copy.deepcopy(models[0]))
    two = averaging.PeriodicModelAverager(2, 1), averagers.PeriodicModelAverager(2, 1)
    for model, averager in zip(models, two, strict=True):
        optimizer = sgd(model.parameters())
        for number in range(STEPS):
            loss_of(model(place.batch(number))).backward()
            optimizer.step()
            averager.average_parameters(model.parameters())  # torch's averages those that have a gradient
            optimizer.zero_grad()
    mine, other = (named(each.named_parameters()) for each in models)
    return compared(mine, other, place.tolerance)


@_feature("decentralize, all ranks mix")
def decentralized(place: Place) -> Difference:
    """x(t + 1) = mean of x(t) - lr * gradient at this rank's own x(t)."""
    torch.manual_seed(0)
    ours = Net().to(place.device)
    theirs = copy.deepcopy(ours)
    plain = functools.partial(torch.optim.SGD, lr=0.1)
    config = dp_compile.ReplicateConfig(backend=place.compiler)
    decentralize(
        ours, topology="complete", optimizer=plain(ours.parameters()), bucket_size_in_mb=SMALL_MB, config=config
    )
    place.exits.callback(_unreplicated, ours)
    run = torch.compile(ours, backend=place.compiler)
    for number in range(STEPS):
        with place.is_eager():
            loss_of(run(place.batch(number))).backward()
        loss_of(theirs(place.batch(number))).backward()
        with torch.no_grad():
            for parameter in theirs.parameters():
                gradient, parameter.grad = parameter.grad, None
                parameter /= dist.get_world_size()
                dist.all_reduce(parameter)
                parameter.add_(gradient, alpha=-0.1)
    check_way(place, ours, STEPS)
    return compared(named(ours.named_parameters()), named(theirs.named_parameters()), place.tolerance)


# --- four ranks ---------------------------------------------------------------------------------------------------


@_feature("two levels of network, 2 x 2", ranks=(4,))
def two_levels(place: Place) -> Difference:
    mesh = init_device_mesh(place.device.type, (2, 2), mesh_dim_names=("between", "inside"))
    return Pair.made(place, device_mesh=mesh).train().compared(LOOSE)


@_feature("two levels of network, bf16 on the wire", ranks=(4,))
def two_levels_bf16(place: Place) -> Difference:
    mesh = init_device_mesh(place.device.type, (2, 2), mesh_dim_names=("between", "inside"))
    pair = Pair.made(place, device_mesh=mesh, config={"mp_policy": MixedPrecisionPolicy(reduce_dtype=BF16)})
    return pair.train().compared(2e-2)


@_feature("tensor parallel, 2 x 2", ranks=(4,))
def tensor_parallel(place: Place) -> Difference:
    """Beside the same model whole on each rank, in torch's DDP over the ranks that have other data."""
    mesh = init_device_mesh(place.device.type, (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).to(place.device)
    theirs = DistributedDataParallel(copy.deepcopy(ours), process_group=mesh["dp"].get_group())
    parallelize_module(ours, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    dp_compile.replicate(ours, device_mesh=mesh["dp"], config=place.config())
    place.exits.callback(_unreplicated, ours)
    run, mine, other = torch.compile(ours, backend=place.compiler), sgd(ours.parameters()), sgd(theirs.parameters())
    dp_rank = mesh.get_local_rank("dp")
    for number in range(STEPS):
        x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1000 * number + dp_rank)).to(place.device)
        with place.is_eager():
            loss_of(run(x)).backward()
        loss_of(theirs(x)).backward()
        for optimizer in (mine, other):
            optimizer.step()
            optimizer.zero_grad()
    check_way(place, ours, STEPS)
    whole = {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in ours.named_parameters()}
    return compared(named(whole.items()), named(theirs.module.named_parameters()), LOOSE)


FEATURES: Final = tuple(_features)


# --- one after the other ------------------------------------------------------------------------------------------

_runs: Final = itertools.count()
_first_store: list[Any] = []
"""The store of the first default group: it outlives groups that are made again."""


def run_feature(
    feature: Feature, device: torch.device | str, *, captured: bool, compiler: str = "aot_eager", within_s: float = 60.0
) -> Verdict:
    """Run a feature in the default process group; every rank calls it. Raises nothing that the feature raises.

    What a rank has found the others learn through the store. If one fails, collectives in which others wait for it are
    aborted after `GRACE_S`; so are those of all ranks after `within_s`. The default group is then made again, so the
    next feature can run.

    Args:
        feature: of `FEATURES`.
        device: of this rank's model; its type has to be one that the group works on.
        captured: whether backwards are captured, or eager.
        compiler: of forward and backward: `aot_eager` or `inductor`.
        within_s: how long it may take, seconds.

    Raises:
        RuntimeError: a rank has not ended though its collectives were aborted: no other feature can run.
    """
    place_device, started, topic = torch.device(device), time.monotonic(), f"dp_compile.features/{next(_runs)}"
    way = CAPTURED if captured else EAGER
    store = _store()
    own: dict[str, Any] = {"passed": False, "broken": True, "detail": "", "largest": math.inf}
    torch._dynamo.reset()
    with _watched(store, topic, within_s) as watch:
        try:
            with contextlib.ExitStack() as exits, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                result = feature.run(Place(place_device, compiler, captured, exits))
                if place_device.type != "cpu":
                    torch.accelerator.synchronize(place_device)
            own |= {
                "passed": not result.name,
                "broken": False,
                "detail": str(result),
                "largest": result.largest,
            }
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            text = (str(error).strip() or "no text").splitlines()
            own["detail"] = f"{type(error).__name__}: {' '.join(text[:3])} ({last.filename}:{last.lineno})"
            if watch.aborted:
                own["detail"] = f"{watch.aborted}; {own['detail']}"
        watch.publish(own)
    everyone = _collected(store, topic, max(started + within_s, time.monotonic()) + 2 * GRACE_S)
    if missing := [rank for rank, each in enumerate(everyone) if each is None]:
        raise RuntimeError(
            f"ranks {missing} have not ended {feature.name!r}, {way}, so no other feature can run. "
            f"This rank: {own['detail']}"
        )
    if any(each["broken"] for each in everyone if each):
        _start_again(store, topic)
    found = [each for each in everyone if each]
    failed = [f"rank {rank}: {each['detail']}" for rank, each in enumerate(found) if not each["passed"]]
    largest = max(each["largest"] for each in found)
    detail = " | ".join(failed) or max((each["detail"] for each in found), key=len)
    return Verdict(feature.name, way, not failed, detail, largest, time.monotonic() - started)


def _store() -> Any:
    """A connection of its own to the store of the default group, which no other thread holds while it waits."""
    if not _first_store:
        _first_store.append(dist.distributed_c10d._get_default_store())
    return _first_store[0].clone()


@dataclass
class _Watch:
    publish: Callable[[Mapping[str, Any]], None]
    aborted: str = ""
    """Why collectives were aborted, if they were."""


@contextlib.contextmanager
def _watched(store: Any, topic: str, within_s: float) -> Iterator[_Watch]:
    """Abort the collectives of this rank where it waits for ranks that have failed, or for too long."""
    rank, ranks, ended = dist.get_rank(), dist.get_world_size(), threading.Event()
    others = [f"{topic}/broken/{other}" for other in range(ranks) if other != rank]
    own_store = _first_store[0].clone()

    def publish(own: Mapping[str, Any]) -> None:
        ended.set()
        if own["broken"]:
            store.set(f"{topic}/broken/{rank}", "1")
        store.set(f"{topic}/{rank}", json.dumps(dict(own)))

    watch = _Watch(publish)

    def look() -> None:
        until, reason = time.monotonic() + within_s, f"has not ended within {within_s:g} s"
        while not ended.wait(0.2):
            if not watch.aborted and (failed := [key for key in others if own_store.check([key])]):
                watch.aborted = reason = f"waited for rank {failed[0].rpartition('/')[2]}, which has failed"
                until = min(until, time.monotonic() + GRACE_S)
            if time.monotonic() > until:
                watch.aborted = reason
                _abort()
                return

    thread = threading.Thread(target=look, name="features: watch", daemon=True)
    thread.start()
    try:
        yield watch
    finally:
        ended.set()
        thread.join(5.0)


def _abort() -> None:
    """End all collectives that this rank waits for, of all groups. Those waits raise."""
    for group in tuple(dist.distributed_c10d._world.pg_map):
        with contextlib.suppress(Exception):
            group.abort()


def _collected(store: Any, topic: str, until: float) -> list[dict[str, Any] | None]:
    """What each rank has published, `None` where it has not until then."""
    found: list[dict[str, Any] | None] = []
    for rank in range(dist.get_world_size()):
        key = f"{topic}/{rank}"
        while not store.check([key]) and time.monotonic() < until:
            time.sleep(0.01)
        found.append(json.loads(store.get(key)) if store.check([key]) else None)
    return found


def _start_again(store: Any, topic: str) -> None:
    """Make the default process group once more: what a failed collective has left behind is gone."""
    world = dist.group.WORLD
    assert world is not None
    rank, ranks, bound = dist.get_rank(), dist.get_world_size(), world.bound_device_id
    backend = dist.get_backend_config()
    timeout = getattr(getattr(world, "options", None), "_timeout", None)
    with contextlib.suppress(Exception):
        dist.destroy_process_group()
    more: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    dist.init_process_group(
        backend, store=dist.PrefixStore(topic, store), rank=rank, world_size=ranks, device_id=bound, **more
    )
