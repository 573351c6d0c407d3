"""Comparison of a training with dp_compile and with torch's DistributedDataParallel, on gloo processes."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import fields, replace
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dp_compile.config import BACKENDS
from dp_compile.errors import ConfigError, require, require_integer
from dp_compile.insight.observe import report
from dp_compile.plan.words import count
from dp_compile.replica.module_names import fully_qualified
from dp_compile.replication.replicate import replicate, unreplicate
from dp_compile.testing.backward import SHOWN, Training
from dp_compile.testing.ranks import Ranks

RTOL: Final[Mapping[torch.dtype, float]] = {torch.float64: 1e-10, torch.bfloat16: 1e-1, torch.float16: 2e-2}
RTOL_FLOAT32: Final = 1e-4
"""Rounding allowed over a few steps, relative to the largest element; a missing reduction is off by 1. Measured with
Inductor (two blocks of width 32, 4 steps): 6e-7 for float32, 0.033 for bfloat16; with `aot_eager` 0."""


class _Difference(NamedTuple):
    """Difference of one tensor from that of torch's DDP, relative to the latter's largest element. Sorts by step."""

    step: int
    what: str
    relative: float
    is_too_large: bool
    text: str


def assert_same_training(
    training: Training,
    *,
    ranks: int | Ranks = 2,
    steps: int = 4,
    backend: str | None = "aot_eager",
    rtol: float | None = None,
    atol: float = 1e-7,
    timeout_s: float = 240.0,
) -> float:
    """Train with torch's eager DDP and with dp_compile from the same seed on the same batches, and compare.

    Gradients are compared after each backward, parameters after the last step, on every rank. torch's seed is set
    before each step; `inductor` draws other random numbers than eager code: use `aot_eager` for models with dropout.

    Args:
        training: the training to run. It is pickled: its functions are found by module and name.
        ranks: number of processes to start, at least 2; or a running pool, which keeps running.
        steps: number of backwards, each with a step of the optimizer.
        backend: compiler of the forward and the backward; `None`: nothing is compiled.
        rtol: allowed share of the largest element; `None`: float64 1e-10, float32 1e-4, float16 0.02, bfloat16 0.1.
        atol: absolute difference allowed in addition to that of `rtol`.
        timeout_s: seconds for the whole comparison.

    Returns:
        The largest difference of an element, divided by the largest element of its tensor.

    Raises:
        AssertionError: a tensor differs, or no compiled backward was captured; `RankError`: a rank failed or hung.
        ConfigError: a value is not allowed, or a field of `training` cannot be pickled.
    """
    require_integer("ranks", ranks.world_size if isinstance(ranks, Ranks) else ranks, 2)
    require_integer("steps", steps, 1)
    require(backend is None or backend in BACKENDS, "backend", f"one of {', '.join(BACKENDS)} or None", backend)
    for each in fields(training):
        try:
            pickle.dumps(getattr(training, each.name))
        except Exception as error:
            raise ConfigError(
                f"Training.{each.name} cannot be sent to another process: {error}. Define it at the top of a module, "
                "not inside a function and not as a lambda."
            ) from error
    with nullcontext(ranks) if isinstance(ranks, Ranks) else Ranks(ranks) as pool:
        outcomes = pool.run(_train_both, training, steps, backend, rtol, atol, timeout_s=timeout_s)
    found: list[_Difference] = [each for differences, _ in outcomes for each in differences]
    if wrong := sorted(each for each in found if each.is_too_large):
        lines = ["the training differs from that of torch's DDP:", *(each.text for each in wrong[:SHOWN])]
        lines[0] += f" {count(len(wrong), 'tensor')}, the first in step {wrong[0].step}:"
        lines += [f"... and {len(wrong) - SHOWN} more"] if len(wrong) > SHOWN else []
        hint = "If it is rounding, give rtol or atol. backend=None shows whether compilation causes it."
        if all(each.what == "parameter" for each in wrong):
            hint = "all gradients agree: compare the optimizer's updates with and without dp_compile."
        raise AssertionError("\n  ".join([*lines, hint]))
    if backend is not None and "captured" not in (how := outcomes[0][1]):
        raise AssertionError(
            f"the training equals DDP's, but no backward was captured: {how}. If that is intended, pass backend=None."
        )
    return max(each.relative for each in found)


def _train_both(
    training: Training, steps: int, backend: str | None, rtol: float | None, atol: float
) -> tuple[list[_Difference], str]:
    """Return this rank's differences that are too large (if none, the largest), and how dp_compile's backwards ran."""
    torch.compiler.reset()
    model, config = training.model(), training.config
    # torch 2.13 warns if `broadcast_buffers` is given, but has no other option to skip the broadcast at the start.
    buffers: dict[str, Any] = {} if config.broadcast_buffers else {"broadcast_buffers": False}
    ddp = DistributedDataParallel(model, find_unused_parameters=config.may_be_unused, **buffers)
    theirs = _train(training, steps, model, ddp)
    model = training.model()
    config = config if backend is None else replace(config, backend=backend)
    replicate(model, config=config, bucket_policy=training.bucket_policy)
    ours = _train(training, steps, model, model if backend is None else torch.compile(model, backend=backend))
    seen = report(model)
    unreplicate(model)
    torch.compiler.reset()  # in no `finally`: after an error the process ends
    found = list(_differences(ours, theirs, rtol, atol))
    wrong = [each for each in found if each.is_too_large] or [max(found, key=lambda each: each.relative)]
    return wrong, f"{', '.join(seen.backwards)}, reduced by {seen.mode}"


_History = list[tuple[str, int, dict[str, torch.Tensor]]]


def _train(training: Training, steps: int, model: nn.Module, called: Callable[..., Any]) -> _History:
    """Train, and return copies, by parameter, of the gradients of each step and of the parameters after the last."""

    def copies(tensors: Iterable[tuple[str, torch.Tensor | None]]) -> dict[str, torch.Tensor]:
        return {fully_qualified(name): each.detach().clone() for name, each in tensors if each is not None}

    optimizer, history = training.make_optimizer(model.parameters()), []
    for step in range(steps):
        optimizer.zero_grad()
        torch.manual_seed(training.seed + step)
        training.loss(called, training.make_batch(dist.get_rank(), step)).backward()
        history.append(("gradient", step, copies((name, each.grad) for name, each in model.named_parameters())))
        optimizer.step()
    return [*history, ("parameter", steps - 1, copies(model.named_parameters()))]


def _differences(ours: _History, theirs: _History, rtol: float | None, atol: float) -> Iterator[_Difference]:
    rank = dist.get_rank()
    for (what, step, found), (_, _, expected) in zip(ours, theirs, strict=True):
        for name in dict.fromkeys((*expected, *found)):
            where, mine, other = f"{what} of {name}, rank {rank}, step {step}", found.get(name), expected.get(name)
            if mine is None or other is None or (mine.shape, mine.dtype) != (other.shape, other.dtype):
                kinds = ["none" if t is None else f"{t.dtype} of shape {list(t.shape)}" for t in (mine, other)]
                yield _Difference(step, what, math.inf, True, f"{where}: {kinds[0]}, with torch's DDP {kinds[1]}")
                continue
            largest, off = (float(t.abs().max()) if t.numel() else 0.0 for t in (other, mine.double() - other))
            relative = off / largest if largest else (math.inf if off > atol else 0.0)
            share = RTOL.get(other.dtype, RTOL_FLOAT32) if rtol is None else rtol
            allowed = share + (atol / largest if largest else 0.0)
            text = f"{relative:.3g} of the largest element {largest:.3g}, allowed is {allowed:.3g}"
            is_too_large = not relative <= allowed  # true for NaN
            yield _Difference(step, what, relative, is_too_large, f"{where}: off by {off:.3g}, {text}")
