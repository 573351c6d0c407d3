"""Whether a training with dp_compile is the one with torch's DistributedDataParallel: on real processes, with gloo."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dp_compile._torch import autograd
from dp_compile.config import BACKENDS
from dp_compile.engine.module_names import fully_qualified
from dp_compile.errors import ConfigError
from dp_compile.insight.observe import report
from dp_compile.insight.rehearsal import check_ranks, scalar_loss
from dp_compile.modules.replicate import replicate, unreplicate
from dp_compile.plan.cost import check_number
from dp_compile.plan.words import count
from dp_compile.testing.ranks import Ranks
from dp_compile.testing.recording import fresh_compiler
from dp_compile.testing.training import Training

RTOL: Final[Mapping[torch.dtype, float]] = {
    torch.float64: 1e-10,
    torch.float32: 1e-4,
    torch.bfloat16: 1e-1,
    torch.float16: 2e-2,
}
"""What is allowed over the largest element of torch's tensor: rounding in another order, grown over a few steps. A
missing factor or reduction is wrong by about the tensor itself. Seen with Inductor (2026-11-21, two blocks of width 32,
4 steps): 6e-7 for float32, 0.033 for bfloat16, whose generated code rounds in other places; with `aot_eager` 0."""
ATOL: Final = 1e-7
SHOWN: Final = 8
GRADIENT: Final = "gradient"
PARAMETER: Final = "parameter"


@dataclass(frozen=True, slots=True)
class Difference:
    """How far one tensor is from that of torch's DDP.

    Args:
        parameter: its fully qualified name.
        what: `gradient`, or `parameter` for its value after the last step.
        rank: where.
        step: after which backward; for a parameter the last one.
        max_abs: the largest difference of an element; infinite if the two cannot be compared.
        largest: the largest element of torch's tensor.
        allowed: the largest difference that is allowed.
        problem: what is wrong if it is not a matter of numbers.
    """

    parameter: str
    what: str
    rank: int
    step: int
    max_abs: float
    largest: float
    allowed: float
    problem: str | None = None

    @property
    def is_too_large(self) -> bool:
        return self.problem is not None or not self.max_abs <= self.allowed

    @property
    def relative(self) -> float:
        """The largest difference over the largest element of torch's tensor."""
        return self.max_abs / self.largest if self.largest else (math.inf if self.max_abs else 0.0)

    def __str__(self) -> str:
        where = f"{self.what} of {self.parameter}, rank {self.rank}, step {self.step}"
        if self.problem is not None:
            return f"{where}: {self.problem}"
        return (
            f"{where}: off by {self.max_abs:.3g}, {self.relative:.3g} of the largest element {self.largest:.3g}; "
            f"allowed is {self.allowed:.3g}"
        )


@dataclass(frozen=True, slots=True)
class _Task:
    """What every rank does. `backend`: `None` is not compiled."""

    training: Training
    steps: int
    backend: str | None
    dtype: torch.dtype | None
    rtol: float | None
    atol: float


@dataclass(frozen=True, slots=True)
class _Outcome:
    """Of one rank: its differences, the worst first, those that are too large before all others; and our backwards."""

    differences: tuple[Difference, ...]
    backwards: Mapping[str, int]
    mode: str


def assert_same_training(
    training: Training,
    *,
    ranks: int | Ranks = 2,
    steps: int = 4,
    backend: str | None = "aot_eager",
    dtype: torch.dtype | None = None,
    rtol: float | None = None,
    atol: float = ATOL,
    timeout_s: float = 240.0,
) -> Difference:
    """Train with torch's eager DDP and with dp_compile from the same seed, and compare gradients and parameters.

    Both are trained by themselves, one after the other, on the same batches. Gradients are compared after each
    backward, parameters after the last step, on every rank. torch's seed is set before each step; random numbers of
    `inductor` are others than those of eager code, so use `aot_eager` for models with dropout.

    Args:
        training: what is trained. Pickled: its functions are found by module and name.
        ranks: how many processes to start, at least 2; or a running pool, which stays up.
        steps: backwards, each with a step of the optimizer.
        backend: what compiles the forward and the backward; `None`: nothing is compiled.
        dtype: of the model and of floating tensors in batches; `None`: as they are made.
        rtol: what is allowed over the largest element of torch's tensor; `None`: by its dtype (`RTOL`).
        atol: what is allowed beside that.
        timeout_s: for all of it.

    Returns:
        The largest difference, relative to its tensor, of those allowed.

    Raises:
        AssertionError: something differs, or nothing was captured although it is compiled.
        RankError: a rank raised, hung or died; with its traceback, stack or exit code.
        ConfigError: a value is not allowed, or something cannot be sent to a process.
    """
    task = _Task(training, steps, backend, dtype, rtol, atol)
    _check(task)
    check_ranks(ranks.world_size if isinstance(ranks, Ranks) else ranks)
    pool = ranks if isinstance(ranks, Ranks) else Ranks(ranks)
    try:
        outcomes: list[_Outcome] = pool.run(_train_both, task, timeout_s=timeout_s)
    finally:
        if pool is not ranks:
            pool.stop()
    wrong = [each for outcome in outcomes for each in outcome.differences if each.is_too_large]
    if wrong:
        raise AssertionError(_text(wrong, task))
    if backend is not None and not outcomes[0].backwards.get("captured"):
        raise AssertionError(
            f"the training is the same, but no backward was captured: {', '.join(outcomes[0].backwards)}, reduced by "
            f"{outcomes[0].mode}. backend=None compares a training that is not compiled."
        )
    return max((each for outcome in outcomes for each in outcome.differences), key=lambda each: each.relative)


def _check(task: _Task) -> None:
    if isinstance(task.steps, bool) or not isinstance(task.steps, int) or task.steps < 1:
        raise ConfigError(f"steps must be an integer >= 1, got {task.steps!r}.")
    if task.backend is not None and task.backend not in BACKENDS:
        raise ConfigError(f"backend must be one of {', '.join(BACKENDS)} or None, got {task.backend!r}.")
    if task.training.make_mesh is not None:
        raise ConfigError("torch's DDP knows no model that is spread over ranks: leave Training.make_mesh out.")
    for name in ("rtol", "atol"):
        if getattr(task, name) is not None:
            check_number(name, getattr(task, name), zero_allowed=True)
    for name, value in task.training.fields().items():
        try:
            pickle.dumps(value)
        except Exception as error:
            raise ConfigError(
                f"Training.{name} cannot be sent to another process: {error}. Define it at the top of a module, not "
                "inside a function and not as a lambda."
            ) from error


def _text(wrong: Sequence[Difference], task: _Task) -> str:
    """The first that went wrong tells most: later steps follow from it."""
    ordered = sorted(wrong, key=lambda each: (each.step, each.what != GRADIENT, -each.relative, each.rank))
    where = f"{count(len(wrong), 'tensor')}, the first in step {ordered[0].step}"
    lines = [f"the training differs from that of torch's DDP: {where}:"]
    lines += [f"  {each}" for each in ordered[:SHOWN]]
    lines += [f"  ... and {len(ordered) - SHOWN} more"] if len(ordered) > SHOWN else []
    if {each.what for each in wrong} == {PARAMETER}:
        return "\n".join([*lines, "  every gradient was equal: compare what the optimizer does with both."])
    hint = "" if task.backend is None else " backend=None tells whether it comes from compilation."
    return "\n".join([*lines, f"  If it is rounding, give rtol or atol.{hint}"])


# --- on a rank ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _History:
    """Gradients by parameter after each backward, and parameters at the end; copies."""

    gradients: tuple[Mapping[str, torch.Tensor], ...]
    parameters: Mapping[str, torch.Tensor]


def _train_both(task: _Task) -> _Outcome:
    with fresh_compiler():
        theirs = _train_theirs(task)
        ours, backwards, mode = _train_ours(task)
    found = sorted(_differences(ours, theirs, task), key=lambda each: (not each.is_too_large, -each.relative))
    wrong = sum(each.is_too_large for each in found)
    return _Outcome(tuple(found[: max(wrong, 1)]), backwards, mode)


def _train_theirs(task: _Task) -> _History:
    model, config = _model(task), task.training.config
    # torch 2.13 warns whoever gives `broadcast_buffers`, and has no other name for leaving them alone at the start too.
    buffers: dict[str, Any] = {} if config.broadcast_buffers else {"broadcast_buffers": False}
    ddp = DistributedDataParallel(model, find_unused_parameters=config.may_be_unused, **buffers)
    return _train(task, model, ddp)


def _train_ours(task: _Task) -> tuple[_History, Mapping[str, int], str]:
    model, config = _model(task), task.training.config
    if task.backend is not None:
        config = replace(config, backend=task.backend)
    replicate(model, config=config, **task.training.wishes)
    history = _train(task, model, model if task.backend is None else torch.compile(model, backend=task.backend))
    said = report(model)
    unreplicate(model)
    return history, dict(said.backwards), said.mode


def _model(task: _Task) -> nn.Module:
    model = task.training.model()
    return model if task.dtype is None else model.to(task.dtype)


def _train(task: _Task, model: nn.Module, called: Callable[..., Any]) -> _History:
    training, rank = task.training, dist.get_rank()
    optimizer = training.make_optimizer(model.parameters())
    gradients = []
    for step in range(task.steps):
        optimizer.zero_grad()
        torch.manual_seed(training.seed + step)
        batch = _as_dtype(training.make_batch(rank, step), task.dtype)
        scalar_loss(called, batch, training.loss_fn).backward()
        grads = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
        gradients.append(_copies(grads))
        optimizer.step()
    return _History(tuple(gradients), _copies(dict(model.named_parameters())))


def _as_dtype(batch: Any, dtype: torch.dtype | None) -> Any:
    def moved(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor

    return autograd.tree_map_only(torch.Tensor, moved, batch)


def _copies(tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    return {fully_qualified(name): tensor.detach().clone() for name, tensor in tensors.items()}


def _differences(ours: _History, theirs: _History, task: _Task) -> Iterator[Difference]:
    for step, (found, expected) in enumerate(zip(ours.gradients, theirs.gradients, strict=True)):
        yield from _compared(found, expected, GRADIENT, step, task)
    yield from _compared(ours.parameters, theirs.parameters, PARAMETER, task.steps - 1, task)


def _compared(
    found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], what: str, step: int, task: _Task
) -> Iterator[Difference]:
    rank = dist.get_rank()
    for name in dict.fromkeys((*expected, *found)):
        problem = _why_incomparable(found.get(name), expected.get(name))
        if problem is not None:
            yield Difference(name, what, rank, step, math.inf, 0.0, 0.0, problem)
            continue
        mine, other = found[name].double(), expected[name].double()
        largest, off = (float(each.abs().max()) if each.numel() else 0.0 for each in (other, mine - other))
        rtol = RTOL.get(expected[name].dtype, RTOL[torch.float32]) if task.rtol is None else task.rtol
        yield Difference(name, what, rank, step, off, largest, rtol * largest + task.atol)


def _why_incomparable(found: torch.Tensor | None, expected: torch.Tensor | None) -> str | None:
    if found is None or expected is None:
        return "torch's DDP has one, dp_compile has none" if found is None else "dp_compile has one, torch's DDP none"
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return (
            f"{found.dtype} of shape {list(found.shape)}, with torch's DDP {expected.dtype} of {list(expected.shape)}"
        )
    return None if bool(found.isfinite().all()) else "is not finite"
