"""The main job, `dp-compile train`: a GPT on the source of Python's standard library, data parallel.

dp-compile train                                                      starts its ranks on this machine
torchrun --nproc-per-node 2 --no-python dp-compile train              is one of the ranks that torchrun started
"""

from __future__ import annotations

import argparse
import copy
import itertools
import os
import platform
import sysconfig
import textwrap
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import dp_compile
from dp_compile._torch import distributed
from dp_compile.config import HOOK_VARIABLE
from dp_compile.errors import ConfigError, DPCompileError, require
from dp_compile.testing.ranks import RankError, Ranks
from dp_compile.train.gpt import GPT, GPTConfig

HEAD_WIDTH: Final = 32
CONTEXT: Final = 128
BATCH_SIZE: Final = 8  # sequences per rank
EVALUATE_EVERY: Final = 100
HELD_OUT_WINDOWS: Final = 128
COMPILE_STEPS: Final = 2  # left out of step times: the first compiles, the second may recompile
MEASURED_STEPS: Final = 10
LONGEST_S: Final = 7 * 24 * 3600.0

DTYPES: Final = {"bf16": torch.bfloat16, "fp16": torch.float16}
TORCH_HOOKS: Final = {"bf16": default_hooks.bf16_compress_hook, "fp16": default_hooks.fp16_compress_hook}
QUANTIZED: Final = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
TOLERANCE: Final = 1e-4
TOLERANCES: Final = {"bf16": 5e-3, "fp16": 1e-3, "int8": 5e-3, "fp8": 8e-3}
"""Largest difference of a parameter that passes `--check`, by comm hook. Measured over 25 steps on 2 ranks: without one
2e-7, compiled code sums in another order; 9.7e-4 in bf16, 1.1e-4 in fp16, and compared with torch's average in float32
7.1e-4 in int8, 4.0e-3 in fp8. One bias whose gradient is not averaged makes 1e-2."""

Batch = tuple[torch.Tensor, torch.Tensor]
"""Inputs and targets, both `int64[batch, CONTEXT]`; the targets are the inputs one token later."""


def launch(options: argparse.Namespace) -> int:
    """Run the job as one rank under torchrun, else start its ranks on this machine. Returns the exit status."""
    require(options.width % HEAD_WIDTH == 0, "--width", f"a multiple of {HEAD_WIDTH}", options.width)
    for other, given in {"--check": options.check, "--comm-hook": options.comm_hook}.items():
        require(options.mp is None or not given, "--mp", f"without {other}", options.mp)
    has_room = options.save_step is None or Path(options.save_step).absolute().parent.is_dir()
    require(has_room, "--save-step", "a file in a directory that exists", options.save_step)
    ours = replicate_config(options).uses_python_hook()
    require(ours, HOOK_VARIABLE, "unset: torch's DDP has no report", os.environ.get(HOOK_VARIABLE))
    options.steps = options.steps or (25 if options.check else 300)
    if {"RANK", "LOCAL_RANK", "WORLD_SIZE"} <= os.environ.keys():
        rank, local_rank, ranks = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
        require(options.ranks in (None, ranks), "--ranks", f"the {ranks} of torchrun", options.ranks)
        try:
            _join("env://", rank, ranks, local_rank, int(os.environ["LOCAL_WORLD_SIZE"]))
            return 0 if train(options) else 1
        except DPCompileError as error:
            raise type(error)(f"rank {rank}: {error}") from error
    ranks, quiet = options.ranks or max(2, torch.cuda.device_count()), {"KINETO_LOG_LEVEL": "99"}
    with Ranks(ranks, begin=_spawned, environment=quiet) as pool:
        try:
            return 0 if all(pool.run(train, options, timeout_s=LONGEST_S)) else 1
        except RankError as error:
            raise DPCompileError(f"a rank failed, all were stopped; {error}") from None


def _spawned(rank: int, ranks: int, directory: str) -> None:
    _join(f"file://{directory}/store", rank, ranks, rank, ranks)


def _join(meet_at: str, rank: int, ranks: int, local_rank: int, local_ranks: int) -> None:
    """Join the group at a URL, on a GPU if each rank of this machine has one."""
    device = torch.device("cuda", local_rank) if torch.cuda.device_count() >= local_ranks else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(1)  # ranks share the cores
    dist.init_process_group(
        dist.get_default_backend_for_device(device),
        init_method=meet_at,
        rank=rank,
        world_size=ranks,
        timeout=timedelta(minutes=10),
        device_id=device if device.type == "cuda" else None,
    )


def train(options: argparse.Namespace) -> bool:
    """Train on this rank, with the process group up, which it ends; rank 0 prints. Returns whether the check passed."""
    device = torch.device(distributed.working_device(None))
    torch.manual_seed(0)
    heads = options.width // HEAD_WIDTH
    sizes = GPTConfig(context=CONTEXT, width=options.width, layers=options.layers, heads=heads)
    model: Any = GPT(sizes).to(device)
    twin = copy.deepcopy(model)
    dp_compile.replicate(model, config=replicate_config(options))
    if options.comm_hook in QUANTIZED:
        quantized = dp_compile.QuantizedHook(QUANTIZED[options.comm_hook])
        model.register_comm_hook(dp_compile.HookState(), quantized)
    elif options.comm_hook is not None:
        model.register_comm_hook(None, TORCH_HOOKS[options.comm_hook])
    texts = tuple(each.to(device) for each in load_corpus())
    say(f"model  GPT, {options.layers} layers, {sum(map(torch.numel, twin.parameters())):,} values")
    say(f"data   standard library of Python {platform.python_version()}, {len(texts[0]) / 1e6:.1f} MB to train on")
    say(f"ranks  {dist.get_world_size()} on {device.type} ({distributed.backend_of(None, device.type)})\n")
    _steps(options, model, twin if options.check else None, *texts)
    lines = [textwrap.wrap(line, 80, subsequent_indent="      ") for line in str(dp_compile.report(model)).splitlines()]
    say("\n".join(["", *itertools.chain(*lines)]))
    if options.save_step is not None and dist.get_rank() == 0:
        Path(options.save_step).write_text(dp_compile.step_of(model).to_json())
        say(f"written to {options.save_step}; next: dp-compile explain {options.save_step}")
    passed = compare(model, twin, options) if options.check else True
    dist.destroy_process_group()
    return passed


def _steps(
    options: argparse.Namespace, model: nn.Module, twin: nn.Module | None, text: torch.Tensor, held_out: torch.Tensor
) -> None:
    compiled, optimizer = torch.compile(model), make_optimizer(model, options)
    if twin is not None:
        ddp, their_optimizer = DistributedDataParallel(twin), make_optimizer(twin, options)
        if options.comm_hook in TORCH_HOOKS:
            distributed.register_comm_hook(ddp, TORCH_HOOKS[options.comm_hook])
    say(f"step {0:>5}  held-out loss {evaluate(model, held_out):.3f}\n{'':10}  compiling ...")
    seconds = 0.0
    with ExitStack() as measuring:
        for step, batch in zip(range(1, options.steps + 1), batches(text), strict=False):
            if options.save_step is not None and step == max(COMPILE_STEPS, options.steps - MEASURED_STEPS) + 1:
                measuring.enter_context(dp_compile.measure(model))
            begin = time.perf_counter()
            train_step(compiled, optimizer, batch)
            seconds += time.perf_counter() - begin
            if twin is not None:
                train_step(ddp, their_optimizer, batch)
            if step == COMPILE_STEPS:
                say(f"step {step:>5}  compiled: the first {step} steps took {seconds:.1f} s")
                seconds = 0.0
            if step % EVALUATE_EVERY == 0 or step == options.steps:
                step_s, tokens = seconds / max(1, step - COMPILE_STEPS), BATCH_SIZE * CONTEXT * dist.get_world_size()
                rate = f"  {step_s * 1e3:.1f} ms/step, {tokens / step_s:,.0f} tokens/s" if step > COMPILE_STEPS else ""
                say(f"step {step:>5}  held-out loss {evaluate(model, held_out):.3f}{rate}")


def replicate_config(options: argparse.Namespace) -> dp_compile.ReplicateConfig:
    policy = None
    if options.mp is not None:
        from torch.distributed.fsdp import MixedPrecisionPolicy  # it loads all of FSDP

        policy = MixedPrecisionPolicy(DTYPES[options.mp], output_dtype=torch.float32)
    return dp_compile.ReplicateConfig(bucket_cap_mb=options.bucket_cap_mb, mp_policy=policy)


def make_optimizer(model: nn.Module, options: argparse.Namespace) -> torch.optim.Optimizer:
    """AdamW, or under `--check` SGD, whose update is linear in the gradient."""
    if options.check:
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=2e-3)


def train_step(model: Any, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
    """One step, as a user writes it."""
    inputs, targets = batch
    loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    loss.item()  # waits for an accelerator, so that steps can be timed


@torch.no_grad()
def evaluate(model: nn.Module, text: torch.Tensor) -> float:
    """Loss on the same windows of held-out text each time, over all ranks, in nats per byte."""
    rank, ranks, device = dist.get_rank(), dist.get_world_size(), next(model.parameters()).device
    starts = torch.linspace(0, len(text) - CONTEXT - 1, max(HELD_OUT_WINDOWS, ranks), dtype=torch.float64).long()
    total = torch.zeros(2, dtype=torch.float64, device=device)
    for part in starts[rank::ranks].split(BATCH_SIZE):
        inputs, targets = windows(text, part)
        # The module, not its compiled form: no second compilation for a few forwards.
        losses = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="sum")
        total += torch.tensor([losses.item(), targets.numel()], device=device)
    dist.all_reduce(total)
    return float(total[0] / total[1])


def compare(model: nn.Module, twin: nn.Module, options: argparse.Namespace) -> bool:
    """Compare all parameters with those of `twin`, and print the verdict; the same one on every rank."""
    mine, theirs = dict(model.named_parameters()), dict(twin.named_parameters())
    differences = torch.stack([(mine[name].detach() - theirs[name].detach()).abs().max() for name in mine])
    differences.nan_to_num_(nan=torch.inf)  # gloo's maximum drops NaN
    dist.all_reduce(differences, op=dist.ReduceOp.MAX)  # ranks differ only if a reduction was wrong
    largest, tolerance = float(differences.max()), TOLERANCES.get(options.comm_hook, TOLERANCE)
    say(
        f"\ncheck {'passed' if largest <= tolerance else 'FAILED'}: parameters after {options.steps} steps, beside "
        f"those of torch's DDP\n"
        f"  largest difference  {largest:.1e}  in {list(mine)[int(differences.argmax())]}\n"
        f"  tolerance           {tolerance:.1e}"
    )
    return largest <= tolerance


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


_SKIPPED: Final = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "__pycache__"}


def load_corpus() -> tuple[torch.Tensor, ...]:
    """Training and held-out text as `uint8[bytes]`, split by file: the source of Python's standard library."""
    root = Path(sysconfig.get_path("stdlib"))
    found = (each for each in root.rglob("*.py") if not _SKIPPED.intersection(each.relative_to(root).parts))
    texts = [each.read_bytes() for each in sorted(found)]  # in the same order on every rank
    held_out = b"".join(texts[9::10])
    if len(held_out) <= CONTEXT:
        raise ConfigError(f"found {len(texts)} Python files under {root}: too few. Install Python with its source.")
    del texts[9::10]
    return tuple(torch.frombuffer(bytearray(each), dtype=torch.uint8) for each in (b"".join(texts), held_out))


def windows(text: torch.Tensor, starts: torch.Tensor) -> Batch:
    tokens = text[starts[:, None] + torch.arange(CONTEXT + 1)].long()
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def batches(text: torch.Tensor) -> Iterator[Batch]:
    """Endless random batches: this rank's share of a global batch that all ranks draw alike."""
    generator = torch.Generator().manual_seed(0)
    while True:
        starts = torch.randint(len(text) - CONTEXT, (dist.get_world_size(), BATCH_SIZE), generator=generator)
        yield windows(text, starts[dist.get_rank()])
