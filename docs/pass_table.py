"""What planning, the passes and the buckets cost: `python docs/tables.py docs` measures it on this machine.

The process group is torch's fake one, two ranks of which only this one exists: nothing here is the time of a
collective. Times are wall time, the best of `REPEATS` where something is repeated.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import os
import platform
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.distributed.fake_pg import FakeStore

from dp_compile._torch import inductor
from dp_compile.bench.resnet import RESNET_50, resnet
from dp_compile.config import ReplicateConfig
from dp_compile.engine.record import CaptureRecord
from dp_compile.insight.observe import report
from dp_compile.modules.replicate import replicate, unreplicate
from dp_compile.modules.replicated_module import no_sync
from dp_compile.passes import DEFAULT_PASSES
from dp_compile.passes.pipeline import Pipeline
from dp_compile.passes.reduction import emit
from dp_compile.passes.result import PassRecord
from dp_compile.plan.backends import GLOO
from dp_compile.plan.buckets import BucketKey, BucketPlan, GradientSpec, plan_buckets
from dp_compile.plan.certificate import robust_partition
from dp_compile.plan.cost import AllReduceCost
from dp_compile.plan.network import ReadyGradient
from dp_compile.plan.partition import optimal_partition
from dp_compile.plan.reduction import mean
from dp_compile.plan.words import BYTES_PER_MB, format_bytes
from dp_compile.train.gpt import GPT, Block, GPTConfig

REPEATS: Final = 3
_KERNEL: Final = re.compile(r"^\s*cpp_fused\w*\(", re.MULTILINE)
"""A call of a generated kernel; its definition is an assignment."""
COUNTS = (100, 1_000, 10_000)
WIDTH: Final = 8
BUCKETS_OF: Final = 25
"""Gradients in a bucket of the synthetic graphs: about what a layer of a transformer has."""
SHARE_OF_GPT = GPTConfig(layers=12, width=128, heads=4)


# --- planning -------------------------------------------------------------------------------------------------------


def planning_table() -> Iterator[str]:
    """How long each strategy plans."""
    yield "| gradients | keys | fixed | optimal | robust |"
    yield "|---|---|---|---|---|"
    for keys, count in itertools.product((1, 2), COUNTS):
        times = " | ".join(f"{each:,.1f} ms" for each in planning_ms(count, keys))
        yield f"| {count:,} | {keys} | {times} |"


def planning_ms(count: int, keys: int) -> tuple[float, float, float]:
    """Fixed, optimal and robust."""
    specs = [_spec(place, (1 + place * 7919 % 10**6,), place % keys) for place in range(count)]
    ready = [ReadyGradient(each.nbytes, place * 1e-5, each.key) for place, each in enumerate(specs)]
    given: dict[str, Any] = {"cost": AllReduceCost(3e-5, 1e-11), "backward_s": count * 1e-5}
    return (
        _best_ms(partial(plan_buckets, specs, bucket_cap_mb=25, first_bucket_cap_mb=1)),
        _best_ms(partial(optimal_partition, ready, **given)),
        _best_ms(partial(robust_partition, ready, **given)),
    )


def _spec(index: int, shape: tuple[int, ...], key: int = 0) -> GradientSpec:
    stride = torch.empty(shape, device="meta").stride()
    dtype = ("float32", "int32")[key]
    return GradientSpec(index, f"p{index}", shape, stride, 4, BucketKey(mean("0", GLOO, 2), dtype, "cpu"))


def _best_ms(call: Callable[[], Any]) -> float:
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times) * 1e3


# --- passes ---------------------------------------------------------------------------------------------------------


def captured_mlp(count: int) -> tuple[fx.Graph, BucketPlan]:
    """A captured backward of `count // 2` linear layers with bias, and buckets of `BUCKETS_OF` gradients for it."""
    layers = count // 2
    specs = [_spec(index, (WIDTH,) if index % 2 else (WIDTH, WIDTH)) for index in reversed(range(2 * layers))]

    def reduce(grad: torch.Tensor, index: int) -> torch.Tensor:
        return emit(grad, index, 0)

    def backward(grad: torch.Tensor, activations: torch.Tensor, weights: torch.Tensor) -> list[torch.Tensor]:
        reduced = []
        for layer in reversed(range(layers)):
            grad = grad * activations[layer]
            reduced.append(reduce(grad.sum(0), 2 * layer + 1))
            reduced.append(reduce(grad.t() @ activations[layer], 2 * layer))
            grad = grad @ weights[layer]
        return reduced

    batch = torch.empty(layers, 4, WIDTH), torch.empty(layers, WIDTH, WIDTH)
    graph: fx.Graph = make_fx(backward, tracing_mode="fake")(torch.empty(4, WIDTH), *batch).graph
    cap_mb = sum(spec.nbytes for spec in specs[:BUCKETS_OF]) / BYTES_PER_MB
    return graph, plan_buckets(specs, bucket_cap_mb=cap_mb, first_bucket_cap_mb=cap_mb)


def passes_table() -> Iterator[str]:
    """How long each pass takes, what is checked after it included."""
    names = [graph_pass.name for graph_pass in DEFAULT_PASSES]
    yield f"| gradients | nodes | buckets | {' | '.join(names)} | a gradient |"
    yield "|---|---|---|" + "---|" * (len(names) + 1)
    _passes_over(COUNTS[0])  # The first run in a process also pays for what torch sets up once.
    for count in COUNTS:
        records, plan = _passes_over(count)
        times = [record.duration_ms for record in records]
        columns = " | ".join(f"{each:,.0f} ms" for each in times)
        nodes = records[0].before["nodes"]
        yield f"| {count:,} | {nodes:,} | {len(plan.buckets)} | {columns} | {sum(times) / count:.2f} ms |"


def _passes_over(count: int) -> tuple[list[PassRecord], BucketPlan]:
    graph, plan = captured_mlp(count)
    records: list[PassRecord] = []
    Pipeline(DEFAULT_PASSES, [plan], records.extend)(graph)
    return records, plan


# --- share of a compilation -----------------------------------------------------------------------------------------


def share_table() -> Iterator[str]:
    """The passes beside everything else that the first step compiles."""
    config = SHARE_OF_GPT
    model, tokens = GPT(config), torch.zeros(2, 32, dtype=torch.int64)
    replicate(model)
    loss = _compiled_loss(model)
    with inductor.empty_cache():
        start = time.perf_counter()
        loss(tokens).backward()
        seconds = time.perf_counter() - start
    (record,) = report(model).captures
    passes_s = sum(each.duration_ms for each in record.passes) / 1e3
    unreplicate(model)
    yield "| model | gradients | buckets | first step, compiled from nothing | passes | share |"
    yield "|---|---|---|---|---|---|"
    yield (
        f"| GPT, {config.layers} layers, width {config.width} | {record.hooks} | {record.collectives} "
        f"| {seconds:.1f} s | {passes_s:.2f} s | {passes_s / seconds:.1%} |"
    )


def _compiled_loss(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """Scalars of a loss outside compiled code would let Dynamo start a capture twice."""
    torch.compiler.reset()

    def loss(x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = model(x).square().mean()
        return out

    return cast(Callable[[torch.Tensor], torch.Tensor], torch.compile(loss))


# --- copies ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Copies:
    """Of one model: its buckets, and generated kernels of its backward with and without reductions."""

    record: CaptureRecord
    kernels: int
    kernels_without: int


def copies_of(model: nn.Module, x: torch.Tensor) -> Copies:
    """Compile a model's backward twice, inside `no_sync` and outside."""
    replicate(model, config=ReplicateConfig(bucket_cap_mb=25.0))
    loss = _compiled_loss(model)
    kernels = []
    with inductor.generated_anew():
        for sync in (False, True):
            model.zero_grad()
            with nullcontext() if sync else no_sync(model):
                value = loss(x)
                kernels.append(sum(len(_KERNEL.findall(each)) for each in inductor.code_of(value.backward)))
    record = report(model).captures[-1]
    unreplicate(model)
    return Copies(record, kernels[1], kernels[0])


def models() -> dict[str, tuple[nn.Module, torch.Tensor]]:
    """Whose copies are counted, each with an input."""
    images = torch.randn(2, 3, 32, 32).to(memory_format=torch.channels_last)
    return {
        "block of a GPT, width 256": (Block(GPTConfig(width=256, heads=4)), torch.randn(2, 32, 256)),
        "ResNet-50, images 32x32": (resnet(RESNET_50), images),
    }


def copies_table() -> Iterator[str]:
    """Bytes copied into buckets and out of them, and what the reductions cost in kernels."""
    yield "| model | gradients | buckets | bytes | copied in | stores to copy out | kernels | without reductions |"
    yield "|---|---|---|---|---|---|---|---|"
    for name, (model, x) in models().items():
        found = copies_of(model, x)
        total = sum(each.nbytes for each in found.record.placements)
        copied = sum(each.nbytes for each in found.record.placements if each.copied)
        yield (
            f"| {name} | {found.record.hooks} | {found.record.collectives} | {format_bytes(total)} "
            f"| {format_bytes(copied)}, {copied / total:.1%} | {found.record.passes[-1].after.get('copy_', 0)} "
            f"| {found.kernels} | {found.kernels_without} |"
        )


# --- the document ---------------------------------------------------------------------------------------------------


def document() -> str:
    """The whole file. Takes some minutes, most of them compilation."""
    with _two_ranks():
        parts = [
            "# What planning, passes and buckets cost",
            f"Measured by `python docs/tables.py docs` on {datetime.date.today()}: {_machine()}.",
            (__doc__ or "").partition("\n\n")[2].strip(),
            "## Planning",
            "Gradients of random sizes, ready one after the other; a key is what a bucket may not mix.",
            "\n".join(planning_table()),
            "## Passes",
            f"A backward of linear layers with bias, {BUCKETS_OF} gradients a bucket. The checks after each pass are "
            "part of its time. What tracing and compiling take is not.",
            "\n".join(passes_table()),
            "## Share of a compilation",
            "Inductor with an empty cache, forward and backward and their first run. The passes run in each of them.",
            "\n".join(share_table()),
            "## Copies and kernels",
            "Inductor's code for CPU, gradients `None` before, buckets of 25 MiB. `copied in`: gradients that are "
            "not computed in their bucket, by the report. `stores to copy out`: stores of results elsewhere than "
            "in their bucket. Kernels are calls of generated ones, among them those that copy flags and gradients in.",
            "\n".join(copies_table()),
        ]
    return "\n\n".join(parts) + "\n"


@contextlib.contextmanager
def _two_ranks() -> Iterator[None]:
    """A group in which every collective returns at once, unless the caller has a group."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _machine() -> str:
    """Processor, cores, load, versions, commit: what a number depends on."""
    described = Path("/proc/cpuinfo")
    lines = described.read_text().splitlines() if described.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    processor = models[0] if models else platform.processor() or platform.machine()
    load = f"load {os.getloadavg()[0]:.1f} at the start, " if hasattr(os, "getloadavg") else ""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
    return (
        f"{processor}, {os.cpu_count()} cores, {load}Python {platform.python_version()}, torch {torch.__version__}, "
        f"commit {commit}"
    )
