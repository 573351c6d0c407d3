"""What a case trains: the same module alone, as the truth, and under each subject that makes it data parallel."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch
import torch._dynamo.compiled_autograd
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dp_compile

RANKS: Final = 2
Loss = Callable[[int, int], torch.Tensor]
"""Of the batch of a rank, by its number."""


class Wrong(Exception):
    """What a case found by itself: the text says what is wrong, and by how much."""


class NotOffered(Exception):
    """The subject lacks what the case is about; the text says what."""


@dataclass
class Clock:
    """When the current step began, on this rank. Errors are timed from there."""

    began: float = field(default_factory=time.monotonic)

    def start(self) -> None:
        self.began = time.monotonic()


@dataclass
class Side:
    """A module in training.

    `model` is the bare module, `wrapped` what the subject made of it, `run` what is called. `ranks` are those whose
    batches this process trains on: its own, or all for the truth, which has no `subject`.
    """

    model: nn.Module
    wrapped: Any
    run: Callable[..., Any]
    optimizer: torch.optim.Optimizer
    ranks: tuple[int, ...]
    subject: Subject | None
    clock: Clock
    backend: str = "aot_eager"
    dtype: torch.dtype = torch.float32

    @property
    def is_truth(self) -> bool:
        return self.subject is None

    @property
    def ours(self) -> bool:
        return self.subject is not None and self.subject.ours

    def make(self, model: nn.Module, **options: Any) -> Side:
        """Another module, under the same subject."""
        return side_of(self.subject, model, self.clock, options, self.backend, self.dtype)

    def compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, compiled if the subject is about compiled forwards."""
        if self.subject is None or not self.subject.compiles:
            return function
        return torch.compile(function, backend=self.backend)

    def no_sync(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.subject is None else self.subject.no_sync(self.wrapped)

    def steps(self, number: int) -> Iterator[int]:
        """So many steps of the optimizer; the gradients of the last one stay."""
        for step in range(number):
            self.clock.start()
            self.optimizer.zero_grad()
            yield step
            self.optimizer.step()

    def train(self, loss: Loss, steps: int) -> None:
        for step in self.steps(steps):
            self.backward(loss, step)

    def backward(self, loss: Loss, number: int) -> None:
        """Run `loss(rank, number)` and its backward for each of `ranks`: gradients add up as of the joint batch."""
        for rank in self.ranks:
            with self._as(rank):
                value = loss(rank, number)
                self.run_backward(value if len(self.ranks) == 1 else value / len(self.ranks))

    def run_backward(self, loss: torch.Tensor) -> None:
        with nullcontext() if self.subject is None else self.subject.backward(self.backend):
            loss.backward()

    def batch(self, rank: int, number: int, rows: int = 3, columns: int = 6) -> torch.Tensor:
        generator = torch.Generator().manual_seed(10 * number + rank)
        return torch.randn(rows, columns, generator=generator).to(self.dtype)

    def square(self, rank: int, number: int) -> torch.Tensor:
        """The plainest loss."""
        return self.run(self.batch(rank, number)).square().mean()

    def collectives(self) -> int:
        """How many collectives the default group has launched."""
        assert dist.group.WORLD is not None
        return int(dist.group.WORLD._get_sequence_number_for_group())

    @contextlib.contextmanager
    def _as(self, rank: int) -> Iterator[None]:
        """Inside, this process trains as `rank`. The first rank's buffers are those that count."""
        kept = [each.clone() for each in self.model.buffers()] if self.is_truth and rank else []
        yield
        for buffer, value in zip(self.model.buffers() if kept else (), kept, strict=True):
            buffer.copy_(value)


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)


# --- subjects -------------------------------------------------------------------------------------------------------


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

    def no_sync(self, wrapped: Any) -> AbstractContextManager[Any]:
        if self.ours:
            return dp_compile.no_sync(wrapped)
        if isinstance(wrapped, DistributedDataParallel):
            return wrapped.no_sync()
        return _without_sync(wrapped)

    def backward(self, backend: str) -> AbstractContextManager[Any]:
        """What the backward runs in."""
        if not self.python_reducer:
            return nullcontext()
        return torch._dynamo.compiled_autograd._enable(partial(torch.compile, backend=backend))


@contextlib.contextmanager
def _without_sync(module: Any) -> Iterator[None]:
    module.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        module.set_requires_gradient_sync(True)


def _ddp(module: nn.Module, backend: str, options: dict[str, Any]) -> Any:
    mesh = options.pop("mesh", None)
    return DistributedDataParallel(module, device_mesh=mesh, **options)


_NOT_NEEDED: Final = ("find_unused_parameters", "broadcast_buffers", "bucket_cap_mb", "gradient_as_bucket_view")
"""torch's newest `replicate` has no such options. A case that sets one runs without it."""


def _torch_replicate(module: nn.Module, backend: str, options: dict[str, Any]) -> Any:
    from torch.distributed._composable.replicate_with_fsdp import replicate
    from torch.distributed.device_mesh import init_device_mesh

    mesh = options.pop("mesh", None) or init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("replicate",))
    left = [name for name in options if name not in _NOT_NEEDED]
    if left:
        raise NotOffered(f"no option {left[0]}")
    return replicate(module, mesh=mesh)


def _ours(module: nn.Module, backend: str, options: dict[str, Any]) -> Any:
    config = dp_compile.ReplicateConfig(backend=backend)
    return dp_compile.replicate(module, config=config, device_mesh=options.pop("mesh", None), **options)


_ALL: Final = (
    Subject("ddp", "DDP", _ddp),
    Subject("ddp_compiled", "compiled DDP", _ddp, compiles=True),
    Subject("python_reducer", "`python_reducer`", _ddp, compiles=True, python_reducer=True),
    Subject("replicate", "torch's `replicate`", _torch_replicate, broadcasts_buffers=False),
    Subject("ours", "dp_compile", _ours, compiles=True, ours=True),
    Subject("ours_eager", "dp_compile, not compiled", _ours, ours=True),
)
SUBJECTS: Final[Mapping[str, Subject]] = {each.name: each for each in _ALL}


def side_of(
    subject: Subject | None,
    model: nn.Module,
    clock: Clock,
    options: dict[str, Any],
    backend: str = "aot_eager",
    dtype: torch.dtype = torch.float32,
) -> Side:
    """A module under `subject`, or alone: the truth."""
    options, wrapped, ranks = dict(options), model, tuple(range(RANKS))
    if subject is not None:
        wrapped, ranks = subject.wrap(model, backend, options), (dist.get_rank(),)
    run = torch.compile(wrapped, backend=backend) if subject is not None and subject.compiles else wrapped
    # After the wrapper: torch's `replicate` swaps parameters.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Side(model, wrapped, run, optimizer, ranks, subject, clock, backend, dtype)
