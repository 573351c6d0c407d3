"""Compile everything that training will need before it starts, on all ranks, and leave no trace.

    for each batch: { reduced, inside no_sync() } x { gradients None, kept from a reduction, kept from no_sync() }

Shapes are compiled as they come: torch makes a size dynamic when it sees a second value of it. So pass batches of two
different lengths if lengths vary, and the last, smaller batch if the loader keeps it.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from dp_compile._torch import autograd, compiler
from dp_compile.engine.plan_sync import Statement, agree, table_in_backward
from dp_compile.engine.replica import Replica
from dp_compile.errors import ConfigError
from dp_compile.plan.words import count
from dp_compile.replication.module import behind, no_sync, parts_of, replica_of, unwrap

logger = logging.getLogger("dp_compile.warmup")

BatchT = TypeVar("BatchT")
MOST_ROUNDS: Final = 8
"""Each dynamic size that torch finds takes up to two rounds."""

_calls: Counter[str] = Counter()


@dataclass(frozen=True, slots=True)
class WarmupRecord:
    """What a warm-up compiled on this rank.

    `captures` are graphs of compiled autograd, `graphs` what Dynamo handed to a compiler, forward and backward, in
    `backwards` backwards. `settled`: the last round over all batches compiled nothing.
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
    """Compile forward and backward for these batches before training. Every rank has to call it.

    Runs `loss(batch).backward()` for each batch in each variant, collectives included, and all again until nothing is
    compiled on any rank. Parameters, gradients, buffers and torch's random numbers are afterwards what they were, and
    the optimizer is not involved. No backward counts as a step: `replan_after` measures none of them. The plan is
    settled as in a first backward. Returns when all ranks are done. The logger `dp_compile.warmup` has a line at INFO
    for each backward that compiled something.

    Args:
        module: the replicated module, or what `torch.compile` returned for it. Its replicated parts are warmed up, too.
        batches: an example of each shape, the same number on every rank. Two values of a size make it dynamic.
        loss: computes the loss of a batch exactly as the training loop does, autocast included:
            `lambda batch: loss_fn(compiled(batch.x), batch.y)`. Another loss is another backward, compiled anew.
        accumulation: also compile the backwards of micro steps: inside `no_sync()`, and those that add to it.
        gradients_kept: also compile the backwards after `zero_grad(set_to_none=False)`.

    Raises:
        ModuleError: the module is not replicated.
        ConfigError: no batch was given, or `loss` changed a parameter.
        DesyncError: the ranks warm up differently, or one is missing after the time-out; the text names it.
    """
    replica, examples = replica_of(module), list(batches)
    replicas = list(dict.fromkeys([replica, *map(replica_of, parts_of(behind(module)))]))
    for each in replicas:
        each.arrive()  # else what arrives meanwhile would be taken back with the counters, as if of the warm-up
    if not examples:
        raise ConfigError("warmup() needs at least one batch, got none.")
    kinds = _kinds(accumulation=accumulation, gradients_kept=gradients_kept)
    done = _meet(replica, {"batches": len(examples), "backwards": kinds})
    made = [_made()]
    with _without_a_trace(unwrap(module), replicas):
        versions = _versions(module)
        started, of = time.monotonic(), len(examples) * len(kinds)
        while len(made) <= MOST_ROUNDS and not _is_settled(replica, made):
            for number, (batch, (synced, kept)) in enumerate(itertools.product(examples, kinds), start=1):
                _prepare(replicas, kept=kept)
                graphs, place = compiler.compiled_graphs(), f"round {len(made)}: backward {number} of {of}"
                with contextlib.nullcontext() if synced else no_sync(module):
                    value = loss(batch)
                    _check_same(versions, _versions(module))
                    value.backward()
                if new := compiler.compiled_graphs() - graphs:
                    so_far = time.monotonic() - started
                    logger.info("warm-up, %s compiled %s, %.1f s so far", place, count(new, "graph"), so_far)
            made.append(_made())
    done()
    for each in replicas:
        each.is_warmed_up = True
    settled = made[-1] == made[-2]
    captures, graphs = (after - before for before, after in zip(made[0], made[-1], strict=True))
    backwards = (len(made) - 1) * len(examples) * len(kinds)
    return WarmupRecord(backwards, captures, graphs, settled)


def _kinds(*, accumulation: bool, gradients_kept: bool) -> list[tuple[bool, bool]]:
    """Whether each backward reduces, and whether it adds to the gradients of the one before.

    Gradients from a reduction are parts of one bucket, others have memory of their own: code differs.
    """
    kinds = [(True, False)]
    if gradients_kept:
        kinds += [(True, True), (False, True)] if accumulation else [(True, True)]
    if accumulation:
        kinds += [(False, False), (False, True), (True, True)]
    return kinds


def _is_settled(replica: Replica, made: Sequence[tuple[int, int]]) -> bool:
    """Whether the last round compiled nothing on any rank."""
    is_new = torch.tensor([float(made[-1] != made[-2])] if len(made) > 1 else [1.0], device=replica.device)
    dist.all_reduce(is_new, op=dist.ReduceOp.MAX, group=replica.group.process_group)
    return not bool(is_new.item())


def _meet(replica: Replica, statement: Statement) -> Callable[[], None]:
    """Wait until all ranks say the same; returns what waits until all ranks are through."""
    _calls[replica.topic] += 1
    topic = f"{replica.topic}/warmup/{_calls[replica.topic]}"
    table = table_in_backward(replica)
    if table is None:
        return lambda: None
    agree(table, topic, statement, call="warmup()")
    return lambda: agree(table, f"{topic}/done", {}, call="warmup()", verb="finished")


def _prepare(replicas: Sequence[Replica], *, kept: bool) -> None:
    for replica in replicas:
        for parameter in () if kept else replica.parameters:
            parameter.grad = None
        # A plan that waits for the second backward is made here, one that waits for measurements is not.
        replica.history.synced_backwards = min(replica.history.synced_backwards, 1)


def _versions(module: nn.Module) -> dict[str, int]:
    return {name: autograd.version_of(parameter) for name, parameter in unwrap(module).named_parameters()}


def _check_same(before: dict[str, int], after: dict[str, int]) -> None:
    """Before the backward: nothing is reduced then, and no other guard speaks of another cause."""
    changed = [name for name, version in after.items() if before.get(name) != version]
    if changed:
        raise ConfigError(
            f"the loss given to warmup() changed {changed[0]}. It may only compute the loss; no optimizer step."
        )


def _made() -> tuple[int, int]:
    return compiler.captures(), compiler.compiled_graphs()


@contextlib.contextmanager
def _without_a_trace(module: nn.Module, replicas: Sequence[Replica]) -> Iterator[None]:
    """Put back gradients, buffers, random numbers and counters."""
    device = replicas[0].device
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type="cuda" if device.type == "cpu" else device.type):
        with contextlib.ExitStack() as stack, _same_tensors(module):
            for replica in replicas:
                stack.enter_context(_same_counts(replica))
            yield


@contextlib.contextmanager
def _same_counts(replica: Replica) -> Iterator[None]:
    steps, backwards = replica.history.synced_backwards, replica.history.backwards.copy()
    launches, used = list(replica.revisions.launches), set(replica.local.used)
    versions = dict(replica.local.versions)
    memory = None if replica.comm_hook is None else replica.comm_hook.memory
    remembered = None if memory is None else memory.state_dict()
    replica.rehearses = True
    try:
        yield
    finally:
        replica.rehearses = False
        replica.local.versions = versions
        replica.history.synced_backwards = steps
        if memory is not None and remembered is not None:
            memory.restore(remembered)
        replica.history.backwards.clear()  # the same object: the monitor tells other ranks what stands in it
        replica.history.backwards.update(backwards)
        replica.revisions.launches, replica.local.used = launches, used


@contextlib.contextmanager
def _same_tensors(module: nn.Module) -> Iterator[None]:
    grads = [(parameter, parameter.grad) for parameter in module.parameters()]
    for parameter, _ in grads:
        parameter.grad = None
    owners = [
        (owner, name, buffer) for owner in module.modules() for name, buffer in owner.named_buffers(recurse=False)
    ]
    values = [buffer.clone() for _, _, buffer in owners]
    try:
        yield
    finally:
        for parameter, grad in grads:
            parameter.grad = grad
        with torch.no_grad():
            for (owner, name, buffer), value in zip(owners, values, strict=True):
                buffer.copy_(value)
                setattr(owner, name, buffer)  # the forward may have put another tensor in its place
