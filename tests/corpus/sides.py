"""What a case trains: the same module alone, as the truth, and under each subject that makes it data parallel."""

import contextlib
import random
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch._dynamo.compiled_autograd
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dp_compile

RANKS = 2


class Wrong(Exception):
    """What a case found by itself: the text says what is wrong, and by how much."""


class NotOffered(Exception):
    """The subject lacks what the case is about; the text says what."""


@dataclass
class Clock:
    """When the current step began, on this rank. Errors are timed from there."""

    began: float = field(default_factory=time.monotonic)

    def start(self):
        self.began = time.monotonic()


@dataclass
class Side:
    """A module in training: `wrapped` by the subject, called by `run`, on the batches of `ranks` (the truth: all)."""

    model: nn.Module
    wrapped: Any
    run: Callable[..., Any]
    optimizer: torch.optim.Optimizer
    ranks: tuple[int, ...]
    subject: "Subject | None"
    clock: Clock
    backend: str = "aot_eager"
    dtype: torch.dtype = torch.float32

    @property
    def is_truth(self):
        return self.subject is None

    @property
    def ours(self):
        return self.subject is not None and self.subject.ours

    def make(self, model, **options):
        """Another module, under the same subject."""
        return side_of(self.subject, model, self.clock, options, self.backend, self.dtype)

    def compile(self, function):
        """`function`, compiled if the subject is about compiled forwards."""
        if self.subject is None or not self.subject.compiles:
            return function
        return torch.compile(function, backend=self.backend)

    def no_sync(self):
        return nullcontext() if self.subject is None else self.subject.no_sync(self.wrapped)

    def steps(self, number):
        """So many steps of the optimizer; the gradients of the last one stay."""
        for step in range(number):
            self.clock.start()
            self.optimizer.zero_grad()
            yield step
            self.optimizer.step()

    def train(self, loss, steps):
        for step in self.steps(steps):
            self.backward(loss, step)

    def backward(self, loss, number):
        """Run `loss(rank, number)` and its backward for each of `ranks`: gradients add up as of the joint batch."""
        for rank in self.ranks:
            with self._as(rank):
                value = loss(rank, number)
                self.run_backward(value if len(self.ranks) == 1 else value / len(self.ranks))

    def run_backward(self, loss):
        with nullcontext() if self.subject is None else self.subject.backward(self.backend):
            loss.backward()

    def batch(self, rank, number, rows=3, columns=6):
        generator = torch.Generator().manual_seed(10 * number + rank)
        return torch.randn(rows, columns, generator=generator).to(self.dtype)

    def square(self, rank, number):
        """The plainest loss."""
        return self.run(self.batch(rank, number)).square().mean()

    def collectives(self):
        """How many collectives the default group has launched."""
        return int(dist.group.WORLD._get_sequence_number_for_group())

    @contextlib.contextmanager
    def _as(self, rank):
        """Inside, this process trains as `rank`. The first rank's buffers are those that count."""
        kept = [each.clone() for each in self.model.buffers()] if self.is_truth and rank else []
        yield
        for buffer, value in zip(self.model.buffers() if kept else (), kept, strict=True):
            buffer.copy_(value)


def full(tensor):
    """All of a tensor, dense and on this rank."""
    tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return tensor.to_dense() if tensor.layout != torch.strided else tensor


def seed(number):
    torch.manual_seed(number)
    random.seed(number)


@dataclass(frozen=True)
class Subject:
    """Something that makes a module data parallel."""

    name: str
    title: str
    wrap: Callable[[nn.Module, str, dict[str, Any]], Any]
    compiles: bool = False
    ours: bool = False
    python_reducer: bool = False
    broadcasts_buffers: bool = True

    def no_sync(self, wrapped):
        if self.ours:
            return dp_compile.no_sync(wrapped)
        if isinstance(wrapped, DistributedDataParallel):
            return wrapped.no_sync()
        wrapped.set_requires_gradient_sync(False)
        after = contextlib.ExitStack()
        after.callback(wrapped.set_requires_gradient_sync, True)
        return after

    def backward(self, backend):
        """What the backward runs in."""
        if not self.python_reducer:
            return nullcontext()
        return torch._dynamo.compiled_autograd._enable(partial(torch.compile, backend=backend))


def _ddp(module, backend, options):
    mesh = options.pop("mesh", None)
    return DistributedDataParallel(module, device_mesh=mesh, **options)


_NOT_NEEDED = ("find_unused_parameters", "broadcast_buffers", "bucket_cap_mb", "gradient_as_bucket_view")
"""torch's newest `replicate` has no such options. A case that sets one runs without it."""


def _torch_replicate(module, backend, options):
    from torch.distributed._composable.replicate_with_fsdp import replicate
    from torch.distributed.device_mesh import init_device_mesh

    mesh = options.pop("mesh", None) or init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("replicate",))
    left = [name for name in options if name not in _NOT_NEEDED]
    if left:
        raise NotOffered(f"no option {left[0]}")
    return replicate(module, mesh=mesh)


def _ours(module, backend, options):
    config = dp_compile.ReplicateConfig(backend=backend)
    return dp_compile.replicate(module, config=config, device_mesh=options.pop("mesh", None), **options)


SUBJECTS = (
    Subject("ddp", "DDP", _ddp),
    Subject("ddp_compiled", "compiled DDP", _ddp, compiles=True),
    Subject("python_reducer", "`python_reducer`", _ddp, compiles=True, python_reducer=True),
    Subject("replicate", "FSDP2's `replicate`", _torch_replicate, broadcasts_buffers=False),
    Subject("ours", "dp_compile", _ours, compiles=True, ours=True),
    Subject("ours_eager", "dp_compile, not compiled", _ours, ours=True),
)
SUBJECTS = {each.name: each for each in SUBJECTS}


def side_of(subject, model, clock, options, backend="aot_eager", dtype=torch.float32):
    """A module under `subject`, or alone: the truth."""
    options, wrapped, ranks = dict(options), model, tuple(range(RANKS))
    if subject is not None:
        wrapped, ranks = subject.wrap(model, backend, options), (dist.get_rank(),)
    run = torch.compile(wrapped, backend=backend) if subject is not None and subject.compiles else wrapped
    # After the wrapper: torch's `replicate` swaps parameters.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Side(model, wrapped, run, optimizer, ranks, subject, clock, backend, dtype)
