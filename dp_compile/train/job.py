"""The main job, `dp-compile train`: a GPT on the source of Python's standard library, data parallel.

dp-compile train                                                      starts its ranks on this machine
torchrun --nproc-per-node 2 --no-python dp-compile train              runs as one of torchrun's ranks
"""

from __future__ import annotations

import argparse
import copy
import os
import platform
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, TextIO

import torch
import torch.distributed as dist
from torch import nn
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
SHOW_EVERY: Final = 100
COMPILE_STEPS: Final = 2  # excluded from step times: the first compiles, the second may recompile
MEASURED_STEPS: Final = 10
LONGEST_S: Final = 7 * 24 * 3600.0

TOLERANCE: Final = 1e-4
"""Largest parameter difference that passes `--check`. 25 steps on 2 ranks gave 2e-7, because compiled code sums in
another order. One bias whose gradient is not averaged gives 1e-2."""
Batch = tuple[torch.Tensor, torch.Tensor]  # inputs and targets (inputs one token later), both `int64[batch, CONTEXT]`


def launch(options: argparse.Namespace) -> int:
    """Run the job as one rank under torchrun, else start its ranks on this machine. Returns the exit status."""
    require(options.width % HEAD_WIDTH == 0, "--width", f"a multiple of {HEAD_WIDTH}", options.width)
    has_room = options.save_step is None or Path(options.save_step).absolute().parent.is_dir()
    require(has_room, "--save-step", "a file in a directory that exists", options.save_step)
    config = dp_compile.ReplicateConfig(bucket_cap_mb=options.bucket_cap_mb)
    require(config.uses_python_hook(), HOOK_VARIABLE, "unset or 1 for this command", os.environ.get(HOOK_VARIABLE))
    options.steps = options.steps or (25 if options.check else 300)
    if {"RANK", "LOCAL_RANK", "WORLD_SIZE"} <= os.environ.keys():
        rank, local_rank, ranks = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
        require(options.ranks in (None, ranks), "--ranks", f"{ranks}, as torchrun has", options.ranks)
        try:
            _join(local_rank, int(os.environ["LOCAL_WORLD_SIZE"]))
            return 0 if train(options) else 1
        except DPCompileError as error:
            raise type(error)(f"rank {rank}: {error}") from error
    ranks, quiet = options.ranks or max(2, torch.cuda.device_count()), {"KINETO_LOG_LEVEL": "99"}
    with Ranks(ranks, begin=_join, environment=quiet) as pool:
        try:
            return 0 if all(pool.run(train, options, timeout_s=LONGEST_S)) else 1
        except RankError as error:
            raise DPCompileError(f"a rank failed, all were stopped; {error}") from None


def _join(local_rank: int, local_ranks: int, directory: str = "") -> None:
    """Join torchrun's process group, or with a `directory` that of our pool; on a GPU if each local rank has one."""
    shared: dict[str, Any] = {"init_method": f"file://{directory}/store", "rank": local_rank, "world_size": local_ranks}
    device = torch.device("cuda", local_rank) if torch.cuda.device_count() >= local_ranks else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(1)  # ranks share the cores
    dist.init_process_group(
        dist.get_default_backend_for_device(device),
        timeout=timedelta(minutes=10),
        device_id=device if device.type == "cuda" else None,
        **(shared if directory else {}),
    )


def train(options: argparse.Namespace) -> bool:
    """Train on this rank, then destroy the process group; rank 0 prints. Returns `False` if `--check` failed."""
    device = torch.device(distributed.working_device(None))
    torch.manual_seed(0)
    heads = options.width // HEAD_WIDTH
    sizes = GPTConfig(context=CONTEXT, width=options.width, layers=options.layers, heads=heads)
    model: Any = GPT(sizes).to(device)
    twin = copy.deepcopy(model)
    dp_compile.replicate(model, bucket_cap_mb=options.bucket_cap_mb)
    text = load_corpus().to(device)
    say(f"model  GPT, {options.layers} layers, {sum(map(torch.numel, twin.parameters())):,} values")
    say(f"data   standard library of Python {platform.python_version()}, {len(text) / 1e6:.1f} MB")
    say(f"ranks  {dist.get_world_size()} on {device.type} ({distributed.backend_of(None, device.type)})\n")
    _steps(options, model, twin if options.check else None, text)
    say(f"\n{dp_compile.report(model)}")
    if options.save_step is not None and dist.get_rank() == 0:
        Path(options.save_step).write_text(dp_compile.step_of(model).to_json())
        say(f"written to {options.save_step}; next: dp-compile explain {options.save_step}")
    passed = compare(model, twin, options) if options.check else True
    dist.destroy_process_group()
    return passed


def _steps(options: argparse.Namespace, model: nn.Module, twin: nn.Module | None, text: torch.Tensor) -> None:
    compiled, optimizer = torch.compile(model), make_optimizer(model, options)
    if twin is not None:
        ddp, their_optimizer = DistributedDataParallel(twin), make_optimizer(twin, options)
    say("compiling the first step ...", sys.stderr)
    seconds = 0.0
    with ExitStack() as measuring:
        for step, batch in zip(range(1, options.steps + 1), batches(text), strict=False):
            if options.save_step is not None and step == max(COMPILE_STEPS, options.steps - MEASURED_STEPS) + 1:
                measuring.enter_context(dp_compile.measure(model))
            begin = time.perf_counter()
            loss = train_step(compiled, optimizer, batch)
            seconds += time.perf_counter() - begin
            if twin is not None:
                train_step(ddp, their_optimizer, batch)
            if step == COMPILE_STEPS:
                say(f"step {step:>5}  loss {loss:.3f}  compiled: the first {step} steps took {seconds:.1f} s")
                seconds = 0.0
            if step % SHOW_EVERY == 0 or step == options.steps:
                step_s, tokens = seconds / max(1, step - COMPILE_STEPS), BATCH_SIZE * CONTEXT * dist.get_world_size()
                rate = f"  {step_s * 1e3:.1f} ms/step, {tokens / step_s:,.0f} tokens/s" if step > COMPILE_STEPS else ""
                say(f"step {step:>5}  loss {loss:.3f}{rate}")


def make_optimizer(model: nn.Module, options: argparse.Namespace) -> torch.optim.Optimizer:
    """Return AdamW, or under `--check` SGD, whose update is linear in the gradient."""
    if options.check:
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=2e-3)


def train_step(model: Any, optimizer: torch.optim.Optimizer, batch: Batch) -> float:
    """Run one step as a user writes it. Returns the loss of this rank's batch."""
    inputs, targets = batch
    loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()  # waits for the GPU, so that steps can be timed


def compare(model: nn.Module, twin: nn.Module, options: argparse.Namespace) -> bool:
    """Compare all parameters with those of `twin`, and print the verdict, which is equal on every rank."""
    mine, theirs = dict(model.named_parameters()), dict(twin.named_parameters())
    differences = torch.stack([(mine[name].detach() - theirs[name].detach()).abs().max() for name in mine])
    differences.nan_to_num_(nan=torch.inf)  # gloo's maximum drops NaN
    dist.all_reduce(differences, op=dist.ReduceOp.MAX)  # ranks differ only if a reduction was wrong
    largest = float(differences.max())
    verdict = "passed" if largest <= TOLERANCE else "FAILED"
    say(
        f"\ncheck {verdict}: parameters after {options.steps} steps, compared with those of torch's DDP\n"
        f"  largest difference  {largest:.1e}  in {list(mine)[int(differences.argmax())]}\n"
        f"  tolerance           {TOLERANCE:.1e}"
    )
    return largest <= TOLERANCE


def say(text: str, file: TextIO | None = None) -> None:
    if dist.get_rank() == 0:
        print(text, file=file, flush=True)


_SKIPPED: Final = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "__pycache__"}


def load_corpus() -> torch.Tensor:
    """Return the source of Python's standard library as `uint8[bytes]`."""
    root = Path(sysconfig.get_path("stdlib"))
    found = (each for each in root.rglob("*.py") if not _SKIPPED.intersection(each.relative_to(root).parts))
    text = bytearray().join(each.read_bytes() for each in sorted(found))  # in the same order on every rank
    if len(text) <= CONTEXT:
        raise ConfigError(f"found no Python files under {root}. Install Python with its source.")
    return torch.frombuffer(text, dtype=torch.uint8)


def batches(text: torch.Tensor) -> Iterator[Batch]:
    """Yield random batches without end: this rank's share of a global batch, which all ranks draw alike."""
    generator = torch.Generator().manual_seed(0)
    while True:
        starts = torch.randint(len(text) - CONTEXT, (dist.get_world_size(), BATCH_SIZE), generator=generator)
        tokens = text[starts[dist.get_rank(), :, None] + torch.arange(CONTEXT + 1)].long()
        yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
