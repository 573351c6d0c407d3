"""Compile all code that training needs before it starts, without side effects on model, optimizer or RNG state.

    variants per batch: reduced; reduced, added to reduced gradients; in no_sync(); reduced, added to local gradients

torch makes a size dynamic when it sees a second value. Therefore pass batches of two different lengths if lengths vary,
and also the last, smaller batch unless the loader drops it.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import torch
from torch import nn

from dp_compile._torch import autograd, compiler, distributed
from dp_compile.errors import ConfigError, require
from dp_compile.plan.words import count
from dp_compile.replica.replica import Replica
from dp_compile.replica.store_channel import all_gather_object, channel_of, check_consistent_in_call, unique_topic
from dp_compile.replication.module import inner_module, is_replicated, no_sync, parts_of, replica_of, unwrap

logger = logging.getLogger("dp_compile.warmup")

BatchT = TypeVar("BatchT")
MOST_ROUNDS: Final = 8  # over all batches; each size that torch makes dynamic needs up to two


@dataclass(frozen=True, slots=True)
class WarmupRecord:
    """Counts of compilations in a warm-up on this rank. `backwards`: the number of backwards that it ran.

    `captures` counts compiled-autograd graphs; `graphs` counts the graphs, forward and backward, that Dynamo passed to
    a compiler. `settled`: the last round over all batches compiled nothing.
    """

    backwards: int
    captures: int
    graphs: int
    settled: bool


def warmup(
    module: nn.Module,
    batches: Iterable[BatchT],
    loss: Callable[[BatchT], torch.Tensor],
    *,
    accumulation: bool = True,
    gradients_kept: bool = True,
) -> WarmupRecord:
    """Compile forward and backward for these batches before training. Every rank must call it.

    Runs `loss(batch).backward()`, collectives included, for each batch in each variant, and repeats that until no rank
    compiles anything, at most 8 times. Parameters do not change; gradients, buffers and torch's RNG state are restored.
    The optimizer is not involved, and no backward counts as a step. The plan is finalized as in a first backward.
    Returns when all ranks are done. The logger `dp_compile.warmup` logs each backward that compiled something, at INFO.

    Args:
        module: the replicated module, or the result of `torch.compile` for it. Its replicated parts are included.
        batches: an example of each shape, the same number on every rank. Two values of a size make it dynamic.
        loss: computes the loss of a batch exactly as the training loop does, autocast included:
            `lambda batch: loss_fn(compiled(batch.x), batch.y)`. A different loss has a different backward, which then
            compiles during training.
        accumulation: also compile backwards inside `no_sync()`, and those that accumulate into their gradients.
        gradients_kept: also compile the backwards after `zero_grad(set_to_none=False)`.

    Does nothing if torch's own DDP reduces the gradients (`ddp_python_hook=False`).

    Raises:
        UnsupportedModuleError: the module is not replicated.
        ConfigError: no batch was given, or `loss` changed a parameter.
        DesyncError: ranks call it with different arguments, or a rank is missing after the time-out; the text names it.
    """
    if distributed.is_reduced_by_torch(unwrap(module)) and not is_replicated(module):
        return WarmupRecord(0, 0, 0, settled=True)
    replica, examples = replica_of(module), list(batches)
    replicas = list(dict.fromkeys([replica, *map(replica_of, parts_of(inner_module(module)))]))
    for each in replicas:
        each.wait_for_updates()  # before the counters are saved, which the warm-up restores
    require(bool(examples), "batches", "at least one batch", examples)
    # (reduces, accumulates into the previous backward's gradients). Accumulation compiles twice: reduced gradients are
    # views of one bucket, local ones have separate storage.
    kinds = [(True, False), (True, True)] if gradients_kept else [(True, False)]
    kinds += [(False, False), (True, True)] if accumulation else []
    check_consistent_in_call(replica, {"batches": len(examples), "backwards": kinds}, "warmup()")
    made, has_compiled = [(compiler.captures(), compiler.compiled_graphs())], True
    with _without_side_effects(unwrap(module), replicas):
        versions = _versions(module)
        started, of = time.monotonic(), len(examples) * len(kinds)
        while has_compiled and len(made) <= MOST_ROUNDS:
            for number, (batch, (synced, kept)) in enumerate(itertools.product(examples, kinds), start=1):
                graphs = compiler.compiled_graphs()
                for each in replicas:
                    for parameter in () if kept else each.parameters:
                        parameter.grad = None
                    # Not counted as steps. At most 1: other code only asks whether there was an earlier backward.
                    each.history.synced_backwards = min(each.history.synced_backwards, 1)
                with contextlib.nullcontext() if synced else no_sync(module):
                    value = loss(batch)
                    # Check before the backward: nothing is reduced yet, and no guard has raised a less specific error.
                    if changed := [name for name, version in _versions(module).items() if versions[name] != version]:
                        raise ConfigError(
                            f"the loss given to warmup() changed {changed[0]}. It may only compute the loss; no "
                            "optimizer step."
                        )
                    value.backward()
                if new := compiler.compiled_graphs() - graphs:
                    place, so_far = f"round {len(made)}: backward {number} of {of}", time.monotonic() - started
                    logger.info("warm-up, %s compiled %s, %.1f s so far", place, count(new, "graph"), so_far)
            made.append((compiler.captures(), compiler.compiled_graphs()))
            topic = unique_topic(replica, "a round of warmup()")
            has_compiled = any(all_gather_object(channel_of(replica), topic, made[-1] != made[-2]))  # on some rank
    check_consistent_in_call(replica, {}, "the end of warmup()")
    for each in replicas:
        each.state.is_warmed_up = True
    captures, graphs = (after - before for before, after in zip(made[0], made[-1], strict=True))
    return WarmupRecord((len(made) - 1) * of, captures, graphs, settled=made[-1] == made[-2])


def _versions(module: nn.Module) -> dict[str, int]:
    return {name: autograd.version_of(parameter) for name, parameter in unwrap(module).named_parameters()}


@contextlib.contextmanager
def _without_side_effects(module: nn.Module, replicas: Sequence[Replica]) -> Iterator[None]:
    """Restore gradients, buffers, RNG state and counters on exit."""
    device = replicas[0].device
    devices = [] if device.type == "cpu" else [device]
    grads = [(parameter, parameter.grad) for parameter in module.parameters()]
    nn.Module.zero_grad(module)
    buffers = [
        (owner, name, buffer, buffer.clone())
        for owner in module.modules()
        for name, buffer in owner.named_buffers(recurse=False)
    ]
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices, device_type="cuda" if not devices else device.type))
        for replica in replicas:
            stack.enter_context(_same_counts(replica))
        try:
            yield
        finally:
            for parameter, grad in grads:
                parameter.grad = grad
            with torch.no_grad():
                for owner, name, buffer, value in buffers:
                    buffer.copy_(value)
                    setattr(owner, name, buffer)  # the forward may have assigned another tensor


@contextlib.contextmanager
def _same_counts(replica: Replica) -> Iterator[None]:
    steps, backwards = replica.history.synced_backwards, replica.history.backwards.copy()
    guard = replica.state.step_guard
    used, versions = set(guard.used), dict(guard.versions)
    memory = replica.hook_memory
    remembered = None if memory is None else memory.state_dict()
    replica.state.is_dry_run = True
    try:
        yield
    finally:
        replica.state.is_dry_run = False
        guard.used, guard.versions = used, versions
        replica.history.synced_backwards = steps
        if memory is not None and remembered is not None:
            memory.restore(remembered)
        replica.history.backwards.clear()  # keep the object: the monitor publishes its content to other ranks
        replica.history.backwards.update(backwards)
