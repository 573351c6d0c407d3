"""Every feature, trained with this package and with a reference that is not of it, and compared.

`.ci/gpu` runs the table with NCCL on GPUs; `tests/gpu/test_nccl_forms.py` with a stand-in for NCCL on CPUs. References
are torch's own: its DDP with the same hook, ZeroRedundancyOptimizer, FSDP2, its averagers; for eight bits a formula.

With `aot_eager` both sides compute gradients by the same kernels, and a sum of two is the same in any order: two ranks
have to end with the same bits in float32, unless the feature states a tolerance. `LOOSE` is for more, and for Inductor.
"""

import copy
import functools
import math
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from reference_hooks import Rounded, as_torch_s, in_blocks, reduced_by_formula
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.model_averaging import averagers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import dp_compile
from dp_compile import averaging
from dp_compile.decentralized import decentralize

STEPS = 10
WIDTH = 16
SMALL_MB = 1e-3  # a bucket holds the gradients of one layer, so there are several
EXACT = 0.0
LOOSE = 2e-5
"""Largest difference of an element after all steps, where sums may be added up in another order."""
CAPTURED, EAGER = "captured", "eager"
_WAYS = {CAPTURED: "captured", EAGER: "eager hooks"}  # what the report calls them
BF16, F16 = torch.bfloat16, torch.float16


@dataclass(frozen=True, slots=True)
class Place:
    """Where a feature runs, and how. `replicated`: the feature's modules, for `unreplicate`."""

    device: torch.device
    compiler: str
    way: str
    replicated: list[nn.Module] = field(default_factory=list)

    @property
    def tolerance(self):
        """Of float32, where a feature has no other."""
        return EXACT if dist.get_world_size() == 2 and self.compiler == "aot_eager" else LOOSE

    def is_eager(self):
        """Backwards inside are not captured, if this is the eager way: torch's compiled autograd is off then."""
        return nullcontext() if self.way == CAPTURED else torch.autograd.detect_anomaly(check_nan=False)

    def config(self, **options):
        return dp_compile.ReplicateConfig(**{"backend": self.compiler, "bucket_cap_mb": SMALL_MB} | options)

    def batch(self, number):
        """Of this rank in a step."""
        generator = torch.Generator().manual_seed(1000 * number + dist.get_rank())
        return torch.randn(8, WIDTH, generator=generator).to(self.device)

    def net(self):
        torch.manual_seed(0)
        return Net().to(self.device)


@dataclass(frozen=True, slots=True)
class Difference:
    """Between two trainings: the largest of any element, and the first tensor that differs by more than allowed."""

    largest: float
    tolerance: float
    name: str = ""

    def __str__(self):
        if self.name:
            return f"{self.name} differs, the largest difference is {self.largest:.3g}, allowed is {self.tolerance:g}"
        return "equal bits" if self.largest == 0 else f"within {self.tolerance:g}"


Run = Callable[[Place], Difference]
Tolerance = float | Callable[[Place], float] | None


@dataclass(frozen=True, slots=True)
class Feature:
    """`run` trains both and compares. `needs`: a type of device without which torch cannot run it."""

    run: Run
    ranks: tuple[int, ...] = (2, 4)
    needs: str = ""
    ways: tuple[str, ...] = (CAPTURED, EAGER)


FEATURES = {}


def _feature(name, **options):
    def add(run):
        FEATURES[name] = Feature(run, **options)
        return run

    return add


def run_feature(feature, device, way, compiler="aot_eager"):
    """Run a feature in the default process group; every rank calls it. After an error that group is of no use."""
    torch._dynamo.reset()
    place = Place(device, compiler, way)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = feature.run(place)
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    for each in place.replicated:
        dp_compile.unreplicate(each)
    return result


# --- models -------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Layers of one shape, a norm and a head: most features train this, so that compiled code is found again."""

    def __init__(self, *, tied=False, spare=False, batch_norm=False):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = nn.BatchNorm1d(WIDTH) if batch_norm else nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH)
        if spare:
            self.spare = nn.Linear(WIDTH, WIDTH)
        if tied:
            self.head.weight = self.layers[0].weight

    def forward(self, x, use_spare=False):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        if use_spare:
            x = x + self.spare(x)
        return self.head(self.norm(x))


class Convolutions(nn.Module):
    """Gradients that the plan leaves out of their bucket's memory, and reduces with it in one launch."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Conv2d(4, 4, 3, padding=1) for _ in range(2))
        self.head = nn.Linear(4, WIDTH)

    def forward(self, x):
        return self.head(self.second(torch.tanh(self.first(x.view(len(x), 4, 2, 2)))).mean((2, 3)))


sgd = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def loss_of(outputs):
    return (outputs.float() - 1).square().mean()


# --- two trainings ------------------------------------------------------------------------------------------------


class Pair:
    """A model of this package and a reference, which are trained by the same steps.

    `make` makes an optimizer, `reference` another module than torch's DDP, `hook` our comm hook and torch's. `config`,
    `ddp`, `in_backward`, `options` are those of `ReplicateConfig`, DDP, `in_backward`, `replicate`. `inputs`: more of
    the forward, by step. If `scaled`, gradients of the last rank overflow in step 4: no rank steps, scales shrink.
    """

    def __init__(
        self,
        place,
        build=Net,
        *,
        make=sgd,
        config=None,
        ddp=None,
        reference=None,
        hook=(None, None),
        in_backward=None,
        max_norm=None,
        scaled=False,
        set_to_none=True,
        inputs=lambda number: (),
        micro=1,
        autocast=None,
        levels=False,
        **options,
    ):
        self.place, self.max_norm, self.set_to_none, self.backwards = place, max_norm, set_to_none, 0
        self.inputs, self.micro, self.autocast, self.in_backward = inputs, micro, autocast, in_backward or {}
        torch.manual_seed(0)
        self.ours = build().to(place.device)
        self.theirs = (reference or functools.partial(DistributedDataParallel, **(ddp or {})))(copy.deepcopy(self.ours))
        with torch.no_grad():
            for parameter in self.ours.parameters():
                parameter.add_(dist.get_rank())  # replicate() has to undo this
        if levels:
            options["device_mesh"] = init_device_mesh(place.device.type, (2, 2), mesh_dim_names=("between", "inside"))
        dp_compile.replicate(self.ours, config=place.config(**(config or {})), **options)
        place.replicated.append(self.ours)
        if hook[0] is not None:
            self.ours.register_comm_hook(*hook[0]())
        if hook[1] is not None:
            # torch's method refuses bfloat16 where it does not know the backend; the hook does not care.
            dist._register_comm_hook(self.theirs.reducer, *hook[1]())
        device, backend = place.device.type, place.compiler
        self.scalers = [torch.amp.GradScaler(device, 2.0**8, growth_interval=3, enabled=scaled) for _ in range(2)]
        self.mine, self.other = make(self.ours.parameters()), make(self.theirs.parameters())
        if in_backward is not None:
            given = {**in_backward, "max_norm": max_norm, "scaler": self.scalers[0] if scaled else None}
            dp_compile.optim.in_backward(self.ours, self.mine, **given)
            backend = "dp_compile" if in_backward.get("overlap_forward") else backend
        self.run = torch.compile(self.ours, backend=backend)

    def backward(self, number, *inputs, sync=True, factor=1.0):
        """Of both. `factor`: of this rank's loss."""
        x = self.place.batch(number)
        for run, scaler in ((self.run, self.scalers[0]), (self.theirs, self.scalers[1])):
            is_ours, local = run is self.run, nullcontext()
            if not sync:
                local = dp_compile.no_sync(self.ours) if is_ours else self.theirs.no_sync()
            # A new context each time: it keeps what it has cast.
            cast = torch.autocast(self.place.device.type, self.autocast) if self.autocast else nullcontext()
            with cast, local, self.place.is_eager() if is_ours else nullcontext():
                (scaler.scale(loss_of(run(x, *inputs))) * factor).backward()
        self.backwards += sync

    def step(self):
        self.scalers[1].unscale_(self.other)
        if self.max_norm is not None:  # ours is clipped in its backward
            nn.utils.clip_grad_norm_(self.theirs.parameters(), self.max_norm)
        for scaler, optimizer in zip(self.scalers, (self.mine, self.other), strict=True):
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=self.set_to_none)

    def train(self, before_step=lambda _: None):
        is_last = dist.get_rank() == dist.get_world_size() - 1
        for number in range(STEPS):
            factor = math.inf if self.scalers[0].is_enabled() and number == 4 and is_last else 1.0
            for each in range(self.micro):
                sync = each == self.micro - 1
                self.backward(self.micro * number + each, *self.inputs(number), sync=sync, factor=factor)
            before_step(self)
            self.step()
        return self

    def compared(self, tolerance=None, *, states=True):
        """Parameters, what optimizers of elements remember, and on the first rank buffers, which are its own.

        Raises `AssertionError` if scales differ, or if backwards went another way than was asked for.
        """
        tolerance = tolerance(self.place) if callable(tolerance) else tolerance
        scales = [scaler.get_scale() for scaler in self.scalers]
        assert scales[0] == scales[1], f"scales: {scales}"
        if self.in_backward.get("overlap_forward"):
            dp_compile.optim.synchronize(self.ours)
        counts = dp_compile.report(self.ours).backwards
        found = {way: count for way, count in counts.items() if "without sync" not in way}
        asked = {_WAYS[self.place.way]: self.backwards}
        assert found == asked, f"{asked} backwards were asked for, there were {found}"
        theirs = getattr(self.theirs, "module", self.theirs)
        mine, other = named(self.ours.named_parameters()), named(theirs.named_parameters())
        if dist.get_rank() == 0:
            mine |= named(self.ours.named_buffers())
            other |= named(theirs.named_buffers())
        if self.in_backward.get("shard"):
            whole = dp_compile.optim.full_state_dict(self.mine)  # on all ranks
            mine |= by_index(whole) if states else {}
            other |= by_index(self.other.state_dict()) if states else {}
        elif states:
            mine |= remembered(self.ours, self.mine)
            other |= remembered(theirs, self.other)
        return compared(mine, other, self.place.tolerance if tolerance is None else tolerance)


def _pair(name, build=Net, *, tolerance=None, ranks=(2, 4), needs="", **options):
    """A feature that a `Pair` made with these options trains."""
    FEATURES[name] = Feature(lambda place: Pair(place, build, **options).train().compared(tolerance), ranks, needs)


def of_half(place):
    """Two ranks add up to the same bits in half precision, too."""
    return EXACT if place.tolerance == EXACT else 2e-2


def of_float16(place):
    """Ours divides after the sum: small numbers keep bits that torch's hook loses."""
    return max(1e-5, of_half(place))


def rounding(place):
    return max(1e-6, place.tolerance)


def named(tensors):
    return {name: each.full_tensor() if isinstance(each, DTensor) else each.detach() for name, each in tensors}


def remembered(module, optimizer):
    """The state of an optimizer, by parameter and name."""
    return named(
        (f"{key} of {name}", value)
        for name, parameter in module.named_parameters()
        for key, value in (optimizer.state[parameter] if parameter in optimizer.state else {}).items()
        if isinstance(value, torch.Tensor) and value.dim()
    )


def by_index(state_dict):
    """The state of an optimizer, by the index of its parameter and name."""
    states = state_dict["state"].items()
    return {f"{key} of parameter {index}": value for index, each in states for key, value in each.items()}


def compared(mine, other, tolerance):
    """By name, NaN is different from everything. Raises if names or shapes are not the same."""
    assert mine.keys() == other.keys(), f"only one of both has {', '.join(sorted(mine.keys() ^ other.keys()))}"
    largest, first = 0.0, ""
    for name, tensor in mine.items():
        one, two = (each.detach().to("cpu", torch.float64) for each in (tensor, other[name]))
        assert one.shape == two.shape, f"{name} has shape {tuple(one.shape)}, the other one {tuple(two.shape)}"
        difference = float((one - two).abs().nan_to_num(nan=math.inf).max()) if one.numel() else 0.0
        largest = max(largest, difference)
        first = first or (name if difference > tolerance else "")
    return Difference(largest, tolerance, first)


# --- buckets and gradients ----------------------------------------------------------------------------------------

_SPARE = functools.partial(Net, spare=True)
_BATCH_NORM = functools.partial(Net, batch_norm=True)


def _frozen():
    model = Net()
    model.layers[1].requires_grad_(False)
    return model


def _spare_is_used(number):
    """On the first rank, on all, and on none, in turns."""
    return ((dist.get_rank() == 0, True, False)[number % 3],)


_pair("default", config={"bucket_cap_mb": None})
_pair("bucket_cap_mb")
_pair("buckets by module", config={"bucket_cap_mb": None}, bucket_policy={nn.Linear})


@_feature("gradients divided by 3")
def divided(place):
    """No average of the backend's: all is divided by hand. torch's DDP divides by the number of ranks."""

    def halve(pair):
        for parameter in pair.theirs.parameters():
            parameter.grad /= 2

    return Pair(place, config={"gradient_divide_factor": 2.0 * dist.get_world_size()}).train(halve).compared()


_UNUSED = {"find_unused_parameters": True}
_pair("unused parameters are found", _SPARE, ddp=_UNUSED, inputs=_spare_is_used, **_UNUSED)
_pair("no_sync, 4 backwards a step", micro=4)
_pair("gradients kept, set_to_none=False", set_to_none=False)
_pair("gradients as views of lasting buckets", ddp={"gradient_as_bucket_view": True}, gradient_as_bucket_view=True)
_pair("convolutions", Convolutions)
_pair("channels_last", lambda: Convolutions().to(memory_format=torch.channels_last))
_pair("tied weights", functools.partial(Net, tied=True))
_pair("frozen parameters", _frozen)
_pair("static_graph", _SPARE, static_graph=True, ddp={"static_graph": True})
_pair("BatchNorm buffers", _BATCH_NORM, tolerance=rounding)
_pair("SyncBatchNorm", lambda: nn.SyncBatchNorm.convert_sync_batchnorm(_BATCH_NORM()), tolerance=LOOSE, needs="cuda")


@_feature("two modules in one backward")
def two_modules(place):
    pairs = [Pair(place) for _ in range(2)]
    for number in range(STEPS):
        x = place.batch(number)
        with place.is_eager():
            loss_of(pairs[1].run(pairs[0].run(x))).backward()
        loss_of(pairs[1].theirs(pairs[0].theirs(x))).backward()
        for pair in pairs:
            pair.backwards += 1
            pair.step()
    return max((pair.compared() for pair in pairs), key=lambda each: each.largest)


@_feature("join(), uneven inputs")
def joined(place):
    module = place.net()
    theirs = DistributedDataParallel(copy.deepcopy(module))
    ours = dp_compile.DistributedDataParallel(module, config=place.config())
    place.replicated.append(module)
    for wrapper, run in ((ours, torch.compile(ours, backend=place.compiler)), (theirs, theirs)):
        optimizer = sgd(wrapper.parameters())
        with wrapper.join():
            for number in range(STEPS - 3 * (dist.get_rank() % 2)):
                with place.is_eager() if wrapper is ours else nullcontext():
                    loss_of(run(place.batch(number))).backward()
                optimizer.step()
                optimizer.zero_grad()
    return compared(named(module.named_parameters()), named(theirs.module.named_parameters()), place.tolerance)


# --- on the wire --------------------------------------------------------------------------------------------------

_BF16_HOOK = lambda: (None, default_hooks.bf16_compress_hook)  # noqa: E731
_F16_HOOK = lambda: (None, default_hooks.fp16_compress_hook)  # noqa: E731
_BF16_WIRE = {"mp_policy": MixedPrecisionPolicy(reduce_dtype=BF16)}
_F16_WIRE = {"mp_policy": MixedPrecisionPolicy(reduce_dtype=F16)}
_ROUNDED = (lambda: (dp_compile.HookState(), Rounded())), (lambda: ({}, as_torch_s))

_pair("bf16 on the wire", config=_BF16_WIRE, hook=(None, _BF16_HOOK), tolerance=of_half)
_pair("fp16 on the wire", config=_F16_WIRE, hook=(None, _F16_HOOK), tolerance=of_float16)
_pair("torch's bf16_compress_hook", hook=(_BF16_HOOK, _BF16_HOOK), tolerance=of_half)
_pair("torch's fp16_compress_hook", hook=(_F16_HOOK, _F16_HOOK), tolerance=of_float16)
_pair("FunctionalHook with state", hook=_ROUNDED, tolerance=of_half)


def _remembers(name, make):
    """Not compiled, as the reference: PowerSGD draws numbers by bucket, in the order of the first backward."""

    def run(place):
        pair = Pair(place, config={"bucket_cap_mb": None}, hook=(make, make))
        pair.run = pair.ours
        return pair.train().compared(rounding, states=False)

    FEATURES[name] = Feature(run, ways=(EAGER,))


_POWER_SGD = {"matrix_approximation_rank": 1, "start_powerSGD_iter": 3, "min_compression_rate": 1.5}
_remembers("torch's powerSGD_hook", lambda: (PowerSGDState(None, **_POWER_SGD), powerSGD_hook))
_remembers(
    "torch's post_localSGD_hook", lambda: (PostLocalSGDState(None, dist.new_subgroups(1)[0], 3), post_localSGD_hook)
)


@_feature("QuantizedHook int8, error feedback")
def quantized(place):
    """Against a formula in NumPy of the gradients of all ranks. A rounding that tips over is sent in the next step."""
    hook, errors = dp_compile.QuantizedHook(torch.int8, 64, min_ndim=0), list[np.ndarray]()

    def reduce(pair):
        nonlocal errors
        buckets = dp_compile.report(pair.ours).plan.buckets
        (bucket,) = (each for each in buckets if each.key.reduction.hook is not None)
        gradients = [pair.theirs.get_parameter(member.gradient.name).grad for member in bucket.members]
        own = torch.from_numpy(in_blocks([each.cpu() for each in gradients], hook)).to(place.device)
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, own)
        everyone = [each.cpu().numpy() for each in parts]
        reduced, errors = reduced_by_formula(everyone, errors or [np.zeros_like(each) for each in everyone], hook)
        sizes = [each.numel() + -each.numel() % hook.block for each in gradients]
        for gradient, flat in zip(gradients, torch.from_numpy(reduced).split(sizes), strict=True):
            gradient.copy_(flat[: gradient.numel()].view_as(gradient))

    hooks = (lambda: (dp_compile.HookState(), hook)), None
    pair = Pair(place, config={"bucket_cap_mb": math.inf}, reference=lambda module: module, hook=hooks)
    return pair.train(reduce).compared(2e-3, states=False)


# --- precision ----------------------------------------------------------------------------------------------------


@_feature("param_dtype bf16, as FSDP2")
def mixed_precision(place):
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
    mesh = init_device_mesh(place.device.type, (dist.get_world_size(),))
    reference = functools.partial(fully_shard, mesh=mesh, mp_policy=policy)
    return Pair(place, reference=reference, mp_policy=policy).train().compared(of_half, states=False)


_pair("bf16 autocast", autocast=BF16, tolerance=of_half)
_pair("fp16 autocast, GradScaler, inf on one rank", scaled=True, autocast=F16, tolerance=of_half)


# --- optimizers: the reference has its optimizer whole, which has the same bits as in parts -----------------------

_SHARD = {"shard": True}
_CLIPPED = {"max_norm": 0.1, "tolerance": rounding}
_pair("in_backward", in_backward={})
_pair("shard=True", in_backward=_SHARD)


@_feature("shard=True, as ZeroRedundancyOptimizer")
def sharded_as_zero(place):
    from torch.distributed.optim import ZeroRedundancyOptimizer  # loading it uses what torch itself deprecates

    # A large `eps`: the sign of a gradient near zero does not decide about a whole step.
    options = {"lr": 0.01, "eps": 1e-3}
    pair = Pair(place, make=functools.partial(torch.optim.AdamW, **options), in_backward=_SHARD)
    pair.other = ZeroRedundancyOptimizer(
        pair.theirs.parameters(), torch.optim.AdamW, parameters_as_bucket_view=False, **options
    )
    pair.train()
    pair.other.consolidate_state_dict(to=0)
    return pair.compared(states=dist.get_rank() == 0)


_pair("shard=True, clipped, scaled, inf on one rank", in_backward=_SHARD, scaled=True, **_CLIPPED)
_pair("shard=True, bf16 on the wire", config=_BF16_WIRE, hook=(None, _BF16_HOOK), in_backward=_SHARD, tolerance=of_half)
_pair("overlap_forward=True", in_backward={"overlap_forward": True})
_pair("shard=True, overlap_forward=True", in_backward=_SHARD | {"overlap_forward": True})


# --- parameters in the place of gradients -------------------------------------------------------------------------


@_feature("averages of parameters, as torch's averager", ways=(EAGER,))
def averaged(place):
    """No gradient is reduced: nothing to capture."""
    models = [place.net() for _ in range(2)]
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
def decentralized(place):
    """x(t + 1) = mean of x(t) - lr * gradient at this rank's own x(t)."""
    ours, theirs = place.net(), place.net()
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    config = dp_compile.ReplicateConfig(backend=place.compiler)
    decentralize(ours, topology="complete", optimizer=optimizer, bucket_size_in_mb=SMALL_MB, config=config)
    place.replicated.append(ours)
    run = torch.compile(ours, backend=place.compiler)
    for number in range(STEPS):
        loss_of(run(place.batch(number))).backward()
        loss_of(theirs(place.batch(number))).backward()
        with torch.no_grad():
            for parameter in theirs.parameters():
                gradient, parameter.grad = parameter.grad, None
                parameter /= dist.get_world_size()
                dist.all_reduce(parameter)
                parameter.add_(gradient, alpha=-0.1)
    return compared(named(ours.named_parameters()), named(theirs.named_parameters()), place.tolerance)


# --- four ranks ---------------------------------------------------------------------------------------------------

_pair("two levels of network, 2 x 2", levels=True, ranks=(4,), tolerance=LOOSE)
_pair("two levels of network, bf16 on the wire", levels=True, config=_BF16_WIRE, ranks=(4,), tolerance=2e-2)
