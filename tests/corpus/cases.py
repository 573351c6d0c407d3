"""The cases: a function for each, which trains a module under a subject, and alone for the truth.

One rule for all of what is right: gradients, parameters and buffers as in one process on the joint batch; or what
the function returns is what it returns for the truth; or an error on every rank that names the parameter or the rank.
"""

import ctypes
import gc
import os
import random
import time
import tomllib
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.utils.checkpoint import checkpoint

import dp_compile
from corpus import models
from corpus.sides import RANKS, NotOffered, Side, Wrong, full, seed

Train = Callable[[Side], Any]


@dataclass(frozen=True)
class Case:
    """One way in which a report says that things go wrong.

    `names`: an error whose text one of these patterns finds, or a parameter's name, is a named one. `faulty`: ranks
    with which something is wrong; only what the others report counts. `torch_may_say_so`: it is refused for every user
    of `torch.compile`, by torch. `known`: subjects of ours that are neither right nor refuse, and why.
    """

    name: str
    build: Callable[[], nn.Module]
    train: Train
    options: Mapping[str, Any] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    compares: bool = True
    buffers_everywhere: bool = False
    returns: str = "what came"
    has_to_be_refused: bool = False
    if_not_refused: str = "no error on any rank"
    a_warning_counts: bool = False
    torch_may_say_so: bool = False
    faulty: tuple[int, ...] = ()
    limit_s: float = 90.0
    group_timeout_s: float = 20.0
    rtol: float = 1e-4
    backend: str = "aot_eager"
    truth_dtype: torch.dtype = torch.float32
    known: Mapping[str, str] = field(default_factory=dict)

    @property
    def row(self):
        """The number of its report."""
        return int(self.name.rstrip("abc"))


REPORTS = tomllib.loads(Path(__file__).with_name("reports.toml").read_text())
CASES = {}


def case(name, build, **more):
    """Register a function as the training of a case."""

    def register(train):
        CASES[name] = Case(name, build, train, **more)
        return train

    return register


def plain(side):
    side.train(side.square, 3)


@case(
    "1",
    models.three_layers,
    options={"static_graph": True},
    names=("static_graph",),
    returns="collectives in micro-batches",
)
def static_graph_and_no_sync(side):
    reduced = []
    for step in side.steps(3):
        for micro in range(4):
            before, number = side.collectives(), 10 * step + micro
            with side.no_sync() if micro < 3 else nullcontext():
                side.backward(side.square, number)
            reduced.append(micro == 3 if side.is_truth else side.collectives() > before)
    return reduced


@case("2", models.normed, buffers_everywhere=True)
def siamese(side):
    def loss(rank, step):
        one, other = (side.run(side.batch(rank, number)) for number in (step, step + 50))
        return (one - other).square().mean()

    side.train(loss, 3)
    side.wrapped.eval()
    with torch.no_grad():
        side.wrapped(side.batch(0, 0))  # torch's DDP hands buffers on in the next forward


# Plain torch.compile of 2.11 gives it no gradient either (cured by pytorch#177158).
@case(
    "3a",
    lambda: models.halves(frozen=True),
    known={"ours": "torch 2.11 does not compile a forward again whose parameter was unfrozen"}
    if torch.__version__ < (2, 12)
    else {},
)
@case("3b", models.halves, names=("find_unused_parameters",))
def unfrozen_or_frozen(side):
    trunk = side.model.get_submodule("trunk")
    for step in side.steps(4):
        if step == 2:
            trunk.requires_grad_(not trunk.weight.requires_grad)
        side.backward(side.square, step)


@case("4", models.stochastic_depth, options={"find_unused_parameters": True, "bucket_cap_mb": 1.0}, limit_s=300.0)
def stochastic_depth(side):
    def loss(rank, step):
        random.seed(step)
        result = side.run(side.batch(rank, step, rows=3 + step % 3), 1.0 + 0.1 * step)
        return result.square().mean()

    side.train(loss, 8)


@case("5a", models.with_complex, names=("complex",))
def complex_parameters(side):
    for step in side.steps(3):
        for micro in range(2):
            number = 10 * step + micro
            with side.no_sync() if micro == 0 else nullcontext():
                side.backward(side.square, number)


@case("5b", models.with_complex, names=("complex",), rtol=5e-3)
def complex_compressed(side):
    if not side.is_truth:
        if not hasattr(side.wrapped, "register_comm_hook"):
            raise NotOffered("no comm hooks")
        side.wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    plain(side)


@case("5c", models.with_complex, names=("complex",))
def complex_sharded(side):
    if not side.is_truth:
        if not side.ours:
            raise NotOffered("no sharded optimizer in the backward")
        dp_compile.optim.in_backward(side.wrapped, side.optimizer, shard=True)
    plain(side)
    if side.is_truth:
        side.optimizer.zero_grad()


def words(side, used_by):
    def loss(rank, step):
        words = torch.tensor([step, 3 * step + rank, 7]) if rank in used_by else None
        result = side.run(side.batch(rank, step), words)
        return result.square().mean()

    side.train(loss, 3)


case("6a", models.with_words, names=("words",))(partial(words, used_by=(0, 1)))
unused = {"find_unused_parameters": True}
case("6b", models.with_words, options=unused, names=("words",))(partial(words, used_by=(0,)))
case("15a", lambda: models.on_scaled(frozen=True))(plain)
case("15b", lambda: models.on_scaled(frozen=False))(plain)
case("8b", models.tiled)(plain)


@case("7", models.halves)
def past_the_wrapper(side):
    trunk, head = side.model.get_submodule("trunk"), side.model.get_submodule("head")

    def forward(x):
        return head(torch.tanh(checkpoint(trunk, x, use_reentrant=False)))

    run = side.compile(forward)
    side.train(lambda rank, step: run(side.batch(rank, step)).square().mean(), 3)


@case("8a", models.shared_lora)
def lora_in_two_checkpoints(side):
    side.train(lambda rank, step: side.run(side.batch(rank, step).requires_grad_()).square().mean(), 3)


@case("9", models.checkpointed_lora, backend="inductor", compares=False, limit_s=240.0, group_timeout_s=60.0)
def lora_dropout(side):
    """The gradient of `up`, whose output is summed, is the sum of what it was given."""
    if side.is_truth:
        return
    given = []

    def loss(rank, step):
        result, hidden = side.run(side.batch(rank, step, rows=8))
        given[:] = [hidden]
        return result.sum()

    for step in side.steps(2):
        side.backward(loss, step)
        expected = given[0].sum(0) / RANKS
        dist.all_reduce(expected)
        grad = side.model.get_parameter("lora.up.weight").grad
        off = float((full(grad) - expected).abs().max())
        if off > 1e-5:
            raise Wrong(f"lora.up.weight.grad is {off:.2g} off, of {float(expected.abs().max()):.2g}")


@case("19a", models.critic, names=("double backward",), torch_may_say_so=True)
def gradient_penalty(side):
    def loss(rank, step):
        x = side.batch(rank, step).requires_grad_()
        score = side.run(x)
        (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        return score.mean() + (slope.norm(dim=1) - 1).square().mean()

    side.train(loss, 3)


@case("19b", models.three_layers, a_warning_counts=True)
def autograd_grad(side):
    if hasattr(side.wrapped, "reshard"):
        raise NotOffered("parameters are other ones in the forward")
    for step in side.steps(6):
        parameters = list(side.model.parameters())
        sums = [torch.zeros_like(each) for each in parameters]
        for rank in side.ranks:
            for total, grad in zip(sums, torch.autograd.grad(side.square(rank, step), parameters), strict=True):
                total += grad / len(side.ranks)
        for parameter, total in zip(parameters, sums, strict=True):
            parameter.grad = total


@case("10a", models.towers, options={"find_unused_parameters": True})
@case("10b", models.towers, names=("vision",))
def towers(side):
    def loss(rank, step):
        has_image = step == 0 or (rank == 0 and step < 3)
        result = side.run(side.batch(rank, step), side.batch(rank, step + 50) if has_image else None)
        return result.square().mean()

    side.train(loss, 5)


@case(
    "11",
    models.three_layers,
    names=("rank 1",),
    has_to_be_refused=True,
    if_not_refused="trains on, a step of one rank added to another step of the other",
    faulty=(1,),
    group_timeout_s=5.0,
)
def skipped_backward(side):
    if side.is_truth:
        return
    rank = side.ranks[0]
    for step in range(5):
        side.clock.start()
        side.optimizer.zero_grad()
        loss = side.square(rank, step)
        if step == 3 and rank == 1:
            continue  # a NaN, say
        side.run_backward(loss)
        side.optimizer.step()


@case(
    "13",
    models.three_layers,
    names=(r"rank(\(s\))? [01]",),
    compares=False,
    returns="parameters after averaging",
    group_timeout_s=5.0,
)
def averaging_after_inf(side):
    """Parameters are averaged after each second step. The second overflows on rank 1."""
    if hasattr(side.wrapped, "reshard"):
        raise NotOffered("gradients that are not reduced are not in `.grad`")
    twins = [side.make(models.three_layers()) for _ in side.ranks] if side.is_truth else [side]
    for twin in twins:
        twin.model.load_state_dict(side.model.state_dict())
    scalers = [torch.amp.GradScaler("cpu", init_scale=4.0) for _ in twins]
    optimizers = [_averaging(twin) for twin in twins]
    for step in range(4):
        side.clock.start()
        for rank, twin, scaler, optimizer in zip(side.ranks, twins, scalers, optimizers, strict=True):
            twin.optimizer.zero_grad()
            with twin.no_sync():
                loss = twin.square(rank, step) * (float("inf") if (rank, step) == (1, 1) else 1.0)
                twin.run_backward(scaler.scale(loss))
            scaler.step(optimizer)
            scaler.update()
        groups = list(zip(*([each.detach() for each in twin.model.parameters()] for twin in twins), strict=True))
        means = [sum(full(each) for each in group) / len(group) for group in groups]
        for group, mean in zip(groups, means, strict=True) if side.is_truth and step % 2 == 1 else ():
            for each in group:
                each.copy_(mean)
    return means


def _averaging(side):
    from torch.distributed.algorithms.model_averaging import averagers
    from torch.distributed.optim import PostLocalSGDOptimizer

    if side.is_truth:
        return side.optimizer
    if side.ours:
        from dp_compile import averaging

        return averaging.PostLocalSGDOptimizer(side.optimizer, averaging.PeriodicModelAverager(2, warmup_steps=1))
    return PostLocalSGDOptimizer(side.optimizer, averagers.PeriodicModelAverager(2, warmup_steps=1))


def _sleep_in_compile(graph, inputs):
    from torch._dynamo.backends.debugging import aot_eager

    if dist.get_rank() == 1:
        time.sleep(8)
    return aot_eager(graph, inputs)


@case("21a", models.three_layers, group_timeout_s=4.0)
def slow_compile(side):
    """Rank 1 compiles for 8 s longer, where a collective may take 4 s."""
    if side.subject is not None and not side.subject.compiles:
        raise NotOffered("compiles nothing")
    if side.subject is not None:
        side.run = torch.compile(side.wrapped, backend=_sleep_in_compile)
    plain(side)


@case("21b", models.three_layers, names=("rank 1",), has_to_be_refused=True, faulty=(1,), group_timeout_s=5.0)
def out_of_memory(side):
    if side.is_truth:
        return
    models.Fault.armed = False
    try:
        for step in side.steps(4):
            models.Fault.armed = step == 2 and side.ranks == (1,)
            side.backward(lambda rank, step: models.Fault.apply(side.run(side.batch(rank, step))).sum(), step)
    finally:
        models.Fault.armed = False


@case("32", models.three_layers, names=("rank 1",), has_to_be_refused=True, faulty=(1,), group_timeout_s=3.0)
def a_rank_dies(side):
    if side.is_truth:
        return
    for step in side.steps(4):
        if step == 2 and side.ranks == (1,):
            os._exit(1)
        side.backward(side.square, step)


@case(
    "16",
    models.resnet,
    options={"bucket_cap_mb": 1.0, "gradient_as_bucket_view": True},
    truth_dtype=torch.float64,
    rtol=2e-5,
)
def resnet(side):
    def loss(rank, number):
        images = side.batch(rank, number, rows=4, columns=3 * 6 * 6).reshape(4, 3, 6, 6)
        return nn.functional.cross_entropy(side.run(images), torch.tensor([0, 1, 2, rank])) / 2

    for step in side.steps(3):
        for micro in range(2):
            with side.no_sync() if micro == 0 else nullcontext():
                side.backward(loss, 10 * step + micro)
        torch.nn.utils.clip_grad_norm_(side.model.parameters(), 0.5)


@case("17", models.three_layers, compares=False, returns="keys of the state dict")
def keys(side):
    """Wrapped first or compiled first, in place or not; `torch.compile` itself adds `_orig_mod.` without a wrapper."""
    if side.subject is None:
        return

    def in_place(module):
        module.compile(backend=side.backend)
        return module

    def compiled(module):
        return torch.compile(module, backend=side.backend)

    def wrap(module):
        return side.subject.wrap(module, side.backend, {})

    def checkpointed():
        module = models.three_layers()
        module.middle = checkpoint_wrapper(module.middle)
        return module

    made = models.three_layers
    ways = {"wrap(m)": lambda around: around(made()), "wrap(checkpoint_wrapper)": lambda around: around(checkpointed())}
    if side.subject.compiles:
        ways |= {
            "wrap(compile(m))": lambda around: around(compiled(made())),
            "wrap(m.compile())": lambda around: around(in_place(made())),
            "wrap(m).compile()": lambda around: in_place(around(made())),
            "compile(wrap(m))": lambda around: compiled(around(made())),
        }
    other = {}
    for name, way in ways.items():
        found, expected = (list(way(around).state_dict()) for around in (wrap, lambda module: module))
        if found != expected:
            other[name] = f"{name} has {found[0]} where {expected[0]} is right"
    if other:
        raise Wrong(f"{len(other)} of {len(ways)} ways have other keys: {next(iter(other.values()))}")


@case("24", models.three_layers, compares=False)
def memory_between_steps(side):
    if side.is_truth:
        return

    def held(width):
        """Bytes of the gradients, and bytes that a training holds between two steps, its parameters not counted."""
        gc.collect()
        before = allocated()
        module = models.wide(width)
        inner = side.make(module)
        for _ in inner.steps(4):
            inner.run_backward(inner.run(torch.ones(2, width)).sum())
        inner.optimizer.zero_grad()
        gc.collect()
        size = sum(each.nbytes for each in map(full, module.parameters()))
        return size, allocated() - before - size

    (small, of_small), (large, of_large) = held(64), held(1024)  # the difference: what grows with the gradients
    times = (of_large - of_small) / (large - small)
    if times > 0.3:
        raise Wrong(f"{times:.1f} times the gradients' bytes stay allocated between steps")


def allocated():
    """Bytes that `malloc` has handed out, on glibc."""

    class Info(ctypes.Structure):
        _fields_ = tuple((name, ctypes.c_size_t) for name in ("a", "b", "c", "d", "mapped", "e", "f", "used", "g", "h"))

    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = Info
    found = mallinfo()
    return int(found.mapped + found.used)


@case("25", lambda: models.normed(nn.LayerNorm, 64), compares=False, returns="gradient of a norm")
def eight_bits(side):
    if side.subject is not None:
        if not side.ours:
            raise NotOffered("no comm hook in eight bits on CPUs, and no exemption")
        hook = dp_compile.QuantizedHook(dtype=torch.float8_e4m3fn)
        dp_compile.unreplicate(side.model)
        for part in (side.model.norm, side.model):
            dp_compile.replicate(part, config=dp_compile.ReplicateConfig(backend=side.backend))
        side.wrapped.register_comm_hook(dp_compile.HookState(), hook)
    norms, losses = [], []
    for step in side.steps(6):
        side.backward(lambda rank, _: side.square(rank, 0), step)
        if step == 0:
            norms = [side.model.get_parameter(f"norm.{name}").grad for name in ("weight", "bias")]
            norms = [each.clone() for each in norms if each is not None]
        with torch.no_grad():
            losses.append(sum(float(side.model(side.batch(rank, 0)).square().mean()) for rank in range(RANKS)))
    if side.is_truth:
        _expected_loss[:] = losses[-1:]
    elif abs(losses[-1] / _expected_loss[0] - 1) > 0.005:
        raise Wrong(f"the loss is {losses[-1]:.4f} where {_expected_loss[0]:.4f} is right")
    return norms


_expected_loss = []


@case("28", models.halves_and_norm, compares=False, returns="norm")
def clipped_dtensors(side):
    """A mesh of 1 x 2: tensor parallel over both ranks, all of which see the same batch."""
    if side.is_truth:
        side.run(side.batch(0, 0)).square().mean().backward()
        return torch.nn.utils.clip_grad_norm_(side.model.parameters(), 0.1)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (1, RANKS), mesh_dim_names=("dp", "tp"))
    seed(0)
    model = models.halves_and_norm()
    parallelize_module(model, mesh["tp"], {"trunk": ColwiseParallel(), "head": RowwiseParallel()})
    inner = side.make(model, mesh=mesh["dp"])
    inner.run_backward(inner.run(inner.batch(0, 0)).square().mean())
    clip = dp_compile.optim.clip_grad_norm_ if side.ours else torch.nn.utils.clip_grad_norm_
    return full(clip(model.parameters(), 0.1))


@case("30", models.three_layers, compares=False)
def backend_names(side):
    """Without a GPU: what is read from a class that has the backend's name."""
    if side.is_truth:
        return
    if not side.ours:
        raise NotOffered("plans do not depend on the backend")
    from dp_compile._torch import distributed

    def of_class(name):
        return type(name, (), {"name": lambda self: "as it calls itself"})()

    kinds = ("ProcessGroupNCCL", "ProcessGroupNCCL2", "ProcessGroupNCCLLazy")
    found = {kind: distributed.backend_of(of_class(kind), "cuda") for kind in kinds}
    for kind, backend in found.items():
        if not backend.name.startswith("nccl"):
            raise Wrong(f"a group of class {kind} is taken for '{backend.name}'")
    plain(side)
