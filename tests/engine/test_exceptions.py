"""An exception at each stage of a backward: ranks end as in a run without the failed step, or an error says why."""

import time
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from itertools import product
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from reference_hooks import Rounded
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim import SGD

import dp_compile
from dp_compile._torch import inductor, optim
from dp_compile.engine import compile as compilation
from dp_compile.optim import shard as sharded
from dp_compile.passes.reduction import EagerOps

STEPS, FAILING, WIDTH, BOUND_S = 3, 1, 8, 30.0
LAYER_MB = WIDTH * WIDTH * 4 / 2**20


class Planted(RuntimeError):
    """What is raised in place of out of memory, and other errors."""


armed = list[type[BaseException] | None]()
"""What ticks raise, one after the other; none for one that passes."""


def tick(*_):
    if armed and (error := armed.pop(0)) is not None:
        raise error("planted")


@torch.library.custom_op("exceptions::tick", mutates_args=())
def ticked(x: torch.Tensor) -> torch.Tensor:
    tick()
    return x.clone()


ticked.register_fake(torch.empty_like)


class Ticks(torch.autograd.Function):
    """The identity. Its backward calls an op that no compiler looks into."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return ticked(grad)


class Net(nn.Module):
    """The gradients of all layers but the first are ready before the op is called."""

    def __init__(self, ticks=False, norm=False, sparse=False):
        super().__init__()
        self.rows = nn.Embedding(4, WIDTH, sparse=True) if sparse else None
        self.ticks, self.norm = ticks, nn.BatchNorm1d(WIDTH) if norm else nn.Identity()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        x = x if self.rows is None else x + self.rows(torch.arange(len(x)))
        x = torch.tanh(self.norm(self.layers[0](x)))
        if self.ticks:
            x = Ticks.apply(x)
        return self.layers[2](torch.tanh(self.layers[1](x)))


EXACT = ("plain", "capped", "in_backward", "overlap", "shard", "modules", "two_levels")


def replicated(kind, group, *, ticks):
    torch.manual_seed(0)
    options = {"backend": "aot_eager"}
    if kind != "plain":
        options["bucket_cap_mb"] = LAYER_MB
    if kind == "bf16":
        options["mp_policy"] = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    model = Net(ticks, kind == "buffers", kind == "sparse")
    where = {"device_mesh" if kind == "two_levels" else "process_group": group}
    for each in model.layers if kind == "modules" else [model]:
        dp_compile.replicate(each, config=dp_compile.ReplicateConfig(**options), **where)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    if kind == "int8":
        model.register_comm_hook(dp_compile.HookState(), dp_compile.QuantizedHook())
    if kind == "functional":
        model.register_comm_hook(dp_compile.HookState(), Rounded())
    if kind in ("in_backward", "overlap", "shard"):
        dp_compile.optim.in_backward(model, optimizer, overlap_forward=kind == "overlap", shard=kind == "shard")
    return model, optimizer


def batch(step, rank):
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def patched(owner, name):
    """Ticks before each call of a function."""
    plain = getattr(owner, name)

    def function(*args, **kwargs):
        tick()
        return plain(*args, **kwargs)

    return mock.patch.object(owner, name, function)


@contextmanager
def hooked(register):
    handle = register(tick)
    try:
        yield
    finally:
        handle.remove()


STAGES = {
    "in a hook before any launch": lambda model, output: hooked(output.register_hook),
    "in a hook of a gradient": lambda model, output: hooked(model.layers[0].weight.register_hook),
    "in a post-accumulate hook": lambda model, output: hooked(
        model.layers[0].weight.register_post_accumulate_grad_hook
    ),
    "in an op between launches": lambda model, output: nullcontext(),
    "at a launch": lambda model, output: patched(EagerOps, "launch"),
    "in a wait": lambda model, output: patched(EagerOps, "wait"),
    "after the last wait": lambda model, output: patched(compilation.CompiledBackward, "_hand_out"),
    "in the update": lambda model, output: patched(optim, "step_without_hooks"),
    "in a gather": lambda model, output: patched(sharded, "launch_gather"),
    "in the capture": lambda model, output: patched(compilation, "with_reductions"),
    "in the compiler": lambda model, output: patched(inductor, "compile_with_aot_eager"),
    "in the forward": lambda model, output: nullcontext(),
}
AT_FIRST = ("in the capture", "in the compiler")
"""In the first backward, else nothing is captured."""
LATER = {"at a launch": 1, "in a gather": 1}
"""How often the stage has passed before."""


@dataclass(frozen=True, slots=True)
class Cell:
    stage: str
    kind: str
    way: str
    everywhere: bool
    error: type[BaseException] = Planted

    def __str__(self):
        ranks = "all ranks" if self.everywhere else "rank 1"
        return f"{self.stage}, {self.kind}, {self.way}, {ranks}, {self.error.__name__}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a rank saw: the texts of its errors, how many steps it did, how far it ended from the run without an error,
    and the seconds of its longest attempt after the first error."""

    errors: tuple[str, ...]
    done: int
    distance: float
    seconds: float


def run(cell):
    rank, world = dist.get_rank(), dist.get_world_size()
    if cell.kind == "two_levels":
        group = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("between", "inside"))
        for each in (dist.group.WORLD, group.get_group(0), group.get_group(1)):
            each._get_backend(torch.device("cpu"))._set_default_timeout(timedelta(seconds=BOUND_S))
    else:
        group = dist.new_group(timeout=timedelta(seconds=BOUND_S))
    ticks = cell.stage == "in an op between launches"
    model, optimizer = replicated(cell.kind, group, ticks=ticks)
    backend = "dp_compile" if cell.kind == "overlap" else "aot_eager"
    forward = model if cell.way == "hooks" else torch.compile(model, backend=backend)
    errors, seconds, done = list[str](), 0.0, 0
    failing = 0 if cell.stage in AT_FIRST else FAILING
    planted = not (cell.everywhere or rank == 1)
    for _ in range(STEPS + 2):
        if done == STEPS:
            break
        started = time.monotonic()
        arms = not planted and done == failing
        try:
            optimizer.zero_grad()
            step(cell, model, forward, batch(done, rank), arms)
            optimizer.step()
        except BaseException as error:
            errors.append(f"{type(error).__name__}: {error}")
            if len(errors) == 2 or "checkpoint" in errors[-1]:
                break
        else:
            done += 1
        finally:
            planted = planted or arms
            armed.clear()
            if len(errors):
                seconds = max(seconds, time.monotonic() - started)
    distance = distance_of(model, reference(cell, world, group)) if done == STEPS else float("nan")
    return Outcome(tuple(errors), done, distance, seconds)


def step(cell, model, forward, x, arms):
    output = forward(x)
    with STAGES[cell.stage](model, output) if arms or "hook" not in cell.stage else nullcontext():
        if arms:
            armed[:] = [*[None] * (0 if cell.kind == "plain" else LATER.get(cell.stage, 0)), cell.error]
            if cell.stage == "in the forward":
                tick()
        output.square().mean().backward()


def reference(cell, world, group):
    """Parameters after the steps without an error: of one process that sees all batches, or of hooks that do."""
    alone = cell.kind in EXACT or cell.kind == "bf16"
    if alone:
        torch.manual_seed(0)
        model = Net()
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    else:
        model, optimizer = replicated(cell.kind, group, ticks=False)
    for number in range(STEPS):
        optimizer.zero_grad()
        ranks = range(world) if alone else [dist.get_rank()]
        losses = [model(batch(number, rank)).square().mean() for rank in ranks]
        (sum(losses) / len(losses)).backward()
        optimizer.step()
    return [each.detach() for each in model.parameters()]


def distance_of(model, expected):
    return max(
        float((one.detach() - other).abs().max()) for one, other in zip(model.parameters(), expected, strict=True)
    )


def judged(cell, outcomes):
    """`trains`, or `named` if every rank raised an error of ours; what is wrong raises."""
    for rank, each in enumerate(outcomes):
        planted = cell.everywhere or rank == 1
        first = each.errors[0] if each.errors else ""
        assert each.seconds < BOUND_S, (rank, each)
        if planted and not (cell.stage in AT_FIRST and not first):
            assert f"{cell.error.__name__}: planted" in first, (rank, each)
        assert planted or not first or "planted" in first or "checkpoint" in first, (rank, outcomes)
    if all(each.done == STEPS for each in outcomes):
        near = {"bf16": 3e-3}.get(cell.kind, 2e-6)
        assert all(each.distance <= near for each in outcomes), outcomes
        return "trains"
    for rank, each in enumerate(outcomes):
        last = each.errors[-1] if each.errors else ""
        assert last.split(":")[0] in ("ReductionError", "VoidBackwardError"), (rank, outcomes)
        assert "checkpoint" in last or "planted" in last, (rank, outcomes)
    return "named"


SPANNING = [
    Cell("in a hook before any launch", "plain", "hooks", False, KeyboardInterrupt),
    Cell("in a hook of a gradient", "shard", "hooks", True),
    Cell("in a hook of a gradient", "int8", "hooks", False, KeyboardInterrupt),
    Cell("in a hook of a gradient", "int8", "captured", False),
    Cell("in a post-accumulate hook", "capped", "hooks", False),
    Cell("in an op between launches", "functional", "hooks", True, KeyboardInterrupt),
    Cell("in an op between launches", "capped", "captured", False),
    Cell("in an op between launches", "overlap", "captured", False),
    Cell("in an op between launches", "shard", "captured", True, KeyboardInterrupt),
    Cell("at a launch", "bf16", "hooks", False),
    Cell("in a wait", "shard", "hooks", False),
    Cell("after the last wait", "capped", "captured", False),
    Cell("in the update", "in_backward", "captured", False),
    Cell("in the update", "shard", "hooks", False),
    Cell("in a gather", "shard", "hooks", False, KeyboardInterrupt),
    Cell("in the capture", "plain", "captured", False, KeyboardInterrupt),
    Cell("in the compiler", "functional", "captured", False, KeyboardInterrupt),
    Cell("in the forward", "plain", "hooks", False),
    Cell("in a hook of a gradient", "modules", "hooks", False),
    Cell("in a hook of a gradient", "sparse", "hooks", False),
    Cell("in an op between launches", "modules", "captured", False),
    Cell("in a wait", "buffers", "hooks", False),
]
"""Each stage, each kind, both ways, all ranks and one, both errors."""


@pytest.mark.parametrize("cell", SPANNING, ids=str)
def test_a_spanning_set(ranks2, cell):
    judged(cell, ranks2.run(run, cell, timeout_s=6 * BOUND_S))


KINDS = ("plain", "capped", "bf16", "int8", "functional", "in_backward", "overlap", "shard", "two_levels")
KINDS_OF = {"in the update": ("in_backward", "overlap", "shard"), "in a gather": ("shard",)}
NOT_IN = {
    "captured": ("at a launch", "in a wait"),
    "hooks": ("after the last wait", "in the capture", "in the compiler"),
}
ALL = [
    Cell(stage, kind, way, everywhere, error)
    for stage, kind, way in product(STAGES, KINDS, NOT_IN)
    for everywhere, error in product((True, False), (Planted, KeyboardInterrupt))
    if kind in KINDS_OF.get(stage, KINDS) and stage not in NOT_IN[way]
]


@pytest.mark.nightly
@pytest.mark.parametrize("cell", ALL, ids=str)
def test_every_cell(request, cell):
    ranks = request.getfixturevalue("ranks4" if cell.kind == "two_levels" else "ranks2")
    judged(cell, ranks.run(run, cell, timeout_s=6 * BOUND_S))
