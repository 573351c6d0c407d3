"""The training loop of one rank. `train_step` is plain user code; what is around it measures and reports."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from tqdm import tqdm

from dp_compile._torch import distributed
from dp_compile.decentralized import DecentralizedModule, decentralize
from dp_compile.insight.observe import report, step_of
from dp_compile.modules.replicate import replicate
from dp_compile.optim import in_backward
from dp_compile.optim.crossing import BACKEND
from dp_compile.train import tensor_parallel
from dp_compile.train.check import Twin, register_hook
from dp_compile.train.data import VOCABULARY, Batch, Corpus, batches, held_out_batches, load_corpus
from dp_compile.train.gpt import GPT, GPTConfig
from dp_compile.train.options import TrainOptions

COMPILE_STEPS = 2
"""Steps that may compile, and are left out of step times: the first compiles, the second may still recompile."""

SHOW_EVERY = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a rank runs, and whom it is with. `tp` neighbours share one copy of the model, and their batches."""

    rank: int
    world_size: int
    device: torch.device
    tp: int = 1

    @property
    def copy(self) -> int:
        """Which copy of the model it has, or has a part of."""
        return self.rank // self.tp

    @property
    def copies(self) -> int:
        return self.world_size // self.tp


@dataclass(slots=True)
class Timing:
    """Seconds of the steps so far, compilation apart from the rest."""

    compile_s: float = 0.0
    steady_s: float = 0.0
    steady_steps: int = 0
    recent: list[float] = field(default_factory=list)

    def add(self, step: int, seconds: float) -> None:
        if step < COMPILE_STEPS:
            self.compile_s += seconds
            return
        self.steady_s += seconds
        self.steady_steps += 1
        self.recent = [*self.recent[1 - SHOW_EVERY :], seconds]

    def describe(self, tokens_per_step: int, *, recent: bool) -> str:
        """Step time and rate, of the last steps or of all; empty before the first step that counts."""
        if not self.steady_steps:
            return ""
        step_s = sum(self.recent) / len(self.recent) if recent else self.steady_s / self.steady_steps
        return f"{step_s * 1e3:.1f} ms/step, {tokens_per_step / step_s:,.0f} tokens/s"


def train(options: TrainOptions, place: Place) -> bool:
    """Train on this rank, with the process group up. Rank 0 prints.

    Returns:
        Whether the check passed; true without one.

    Raises:
        DPCompileError: see `dp_compile.replicate`.
    """
    # tqdm's own lock is a system-wide semaphore, which a killed rank would leave behind; no two processes print here.
    tqdm.set_lock(threading.RLock())
    corpus = load_corpus(options.context)
    torch.manual_seed(options.seed)
    sizes = GPTConfig(
        vocabulary=VOCABULARY,
        context=options.context,
        width=options.width,
        layers=options.layers,
        heads=options.heads,
    )
    model = GPT(sizes).to(place.device)
    mesh = None if options.tp == 1 else tensor_parallel.mesh_of(place.world_size, place.tp, place.device)
    data = None if mesh is None else mesh["dp"]
    twin = Twin(model, options, None if data is None else data.get_group()) if options.check else None
    if mesh is not None:
        tensor_parallel.parallelize(model, mesh["tp"])
    if options.topology is None:
        replicate(model, device_mesh=data, config=options.replicate_config())
    if options.comm_hook is not None:
        register_hook(model, options.comm_hook)
    run = Run(options, place, corpus, model, twin)
    run.introduce()
    before, after, timing = run.run()
    run.conclude(before, after, timing)
    if options.save_step is not None and place.rank == 0:
        Path(options.save_step).write_text(step_of(model).to_json())
    if twin is None:
        return True
    verdict = twin.compare(model, options.steps)
    run.say(str(verdict))
    return verdict.passed


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> torch.Tensor:
    """One step. Returns the loss of this rank's batch, in nats per token."""
    inputs, targets = batch
    loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def make_optimizer(model: nn.Module, options: TrainOptions) -> torch.optim.Optimizer:
    """AdamW, or SGD if a momentum is given, and under `--check`; `check.py` says why."""
    if options.check or options.momentum is not None:
        momentum = 0.9 if options.momentum is None else options.momentum
        return torch.optim.SGD(model.parameters(), lr=options.lr, momentum=momentum)
    return torch.optim.AdamW(model.parameters(), lr=options.lr)


class Run:
    """One training on one rank: steps, evaluations, and what a person sees of them."""

    def __init__(self, options: TrainOptions, place: Place, corpus: Corpus, model: GPT, twin: Twin | None) -> None:
        self.options, self.place, self.corpus, self.model, self.twin = options, place, corpus, model, twin
        self.tokens_per_step = options.batch_size * options.context * place.copies
        self._bar: tqdm[Any] | None = None
        self._held_out = held_out_batches(
            corpus.held_out,
            context=options.context,
            batch_size=options.batch_size,
            rank=place.copy,
            world_size=place.copies,
        )

    def run(self) -> tuple[float, float, Timing]:
        """All steps. Returns the held-out loss before and after in nats per byte, and the times."""
        timing = Timing()
        before = loss = self.evaluate()
        self.say(f"step {0:>5}  held-out loss {before:.3f}\n{'':10}  compiling ...")
        for step, train_loss in enumerate(self._steps(timing)):
            done = step + 1
            self._show(done, train_loss, timing)
            if done % self.options.evaluate_every == 0 or done == self.options.steps:
                loss = self.evaluate()
                self.say(f"step {done:>5}  held-out loss {loss:.3f}  {self._rate(timing)}".rstrip())
        if self._bar is not None:
            self._bar.close()
        return before, loss, timing

    def evaluate(self) -> float:
        """Held-out loss over all ranks, in nats per byte. Of a decentralized model: of its average."""
        total = torch.zeros(2, dtype=torch.float64, device=self.place.device)
        model: nn.Module = self.model
        averaged = model.global_average() if isinstance(model, DecentralizedModule) else nullcontext()
        with torch.no_grad(), averaged:
            for batch in self._held_out:
                inputs, targets = (each.to(self.place.device) for each in batch)
                # The module itself, not its compiled form: no second compilation for a few forward passes.
                losses = F.cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten(), reduction="sum")
                total += torch.tensor([losses.item(), targets.numel()], device=self.place.device)
        dist.all_reduce(total)
        return float(total[0] / total[1])

    def introduce(self) -> None:
        """Print what is going to be trained on what, and by whom."""
        options, place = self.options, self.place
        backend = distributed.backend_of(None, place.device.type)
        count = sum(parameter.numel() for parameter in self.model.parameters())
        each = "each" if place.tp == 1 else f"for each {place.tp}, which share a copy of the model"
        self.say(
            f"model  GPT, layers {options.layers}, width {options.width}, heads {options.heads}, "
            f"context {options.context}: {count:,} parameters\n"
            f"data   {self.corpus}\n"
            f"ranks  {place.world_size} on {place.device.type} ({backend}), {options.batch_size} sequences "
            f"{each}: {self.tokens_per_step:,} tokens per step\n"
        )

    def conclude(self, before: float, after: float, timing: Timing) -> None:
        """Print what came out, then the plan and what was captured."""
        rate = timing.describe(self.tokens_per_step, recent=False)
        self.say(
            f"\nIn {self.options.steps} steps ({self.options.steps * self.tokens_per_step:,} tokens) the held-out loss "
            f"went from {before:.3f} to {after:.3f} nats per byte.\n"
            f"The first {min(COMPILE_STEPS, self.options.steps)} steps took {timing.compile_s:.1f} s with compilation"
            + (f"; after them {rate}." if rate else ".")
            + f"\n\n{report(self.model)}"
        )

    def say(self, text: str) -> None:
        """Print on rank 0, above the progress bar."""
        if self.place.rank == 0:
            tqdm.write(text)
            sys.stdout.flush()

    def _steps(self, timing: Timing) -> Iterator[torch.Tensor]:
        crosses = self.options.optimizer in ("crossing", "sharded-crossing")
        compiled: Any = torch.compile(self.model, backend=BACKEND if crosses else "inductor")
        optimizer = make_optimizer(self.model, self.options)
        if self.options.topology is not None:
            options = self.options.replicate_config()
            decentralize(self.model, topology=self.options.topology, optimizer=optimizer, config=options)
        if self.options.optimizer != "plain":
            shard = self.options.optimizer in ("sharded", "sharded-crossing")
            in_backward(self.model, optimizer, shard=shard, overlap_forward=crosses)
        their_optimizer = make_optimizer(self.twin.ddp, self.options) if self.twin else None
        if self.twin is not None and self.options.topology is not None and their_optimizer is not None:
            their_optimizer.register_step_pre_hook(self.twin.mix)
        for step, batch in zip(range(self.options.steps), self._batches(), strict=False):
            # An accelerator works in the background; waiting for it each step would slow it down, never waiting
            # would time nothing.
            shown = (step + 1) % SHOW_EVERY == 0 or step + 1 == self.options.steps
            waits = shown or step <= COMPILE_STEPS or self.twin is not None
            loss, seconds = _timed(lambda: train_step(compiled, optimizer, batch), waits)  # noqa: B023
            timing.add(step, seconds)
            if self.twin is not None and their_optimizer is not None:
                train_step(self.twin.ddp, their_optimizer, batch)
            yield loss

    def _batches(self) -> Iterator[Batch]:
        options, place = self.options, self.place
        for inputs, targets in batches(
            self.corpus.train,
            context=options.context,
            batch_size=options.batch_size,
            rank=place.copy,
            world_size=place.copies,
            seed=options.seed,
        ):
            yield inputs.to(place.device), targets.to(place.device)

    def _rate(self, timing: Timing) -> str:
        return timing.describe(self.tokens_per_step, recent=True)

    def _show(self, done: int, train_loss: torch.Tensor, timing: Timing) -> None:
        if self.place.rank != 0:
            return
        if done == min(COMPILE_STEPS, self.options.steps):
            self.say(f"step {done:>5}  compiled: the first {done} steps took {timing.compile_s:.1f} s")
            # Only now, so that the time that is left is not guessed from steps that compiled.
            self._bar = _bar(self.options.steps, done)
        elif self._bar is not None:
            self._bar.update()
            if done % SHOW_EVERY == 0:
                self._bar.set_postfix_str(f"batch loss {train_loss.item():.3f}, {self._rate(timing)}")


def _timed(work: Callable[[], torch.Tensor], waits: bool) -> tuple[torch.Tensor, float]:
    start = time.perf_counter()
    result = work()
    if waits:
        result.item()
    return result, time.perf_counter() - start


def _bar(total: int, initial: int) -> tqdm[Any]:
    return tqdm(
        total=total,
        initial=initial,
        # `None`: no bar where the output is not a terminal.
        disable=None,
        bar_format="{n_fmt}/{total_fmt} {bar:24} {elapsed}<{remaining}{postfix}",
        leave=False,
    )
