"""Flags that ranks reduce with the gradients of each synchronised backward, and checks of the reduced flags."""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter, deque
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
import torch.distributed as dist

from dp_compile._torch import autograd
from dp_compile.comm_hooks.functional import HookRun
from dp_compile.errors import DesyncError, ReductionError, VoidBackwardError
from dp_compile.plan.buckets import Bucket
from dp_compile.plan.flags import FAILED, NUMBER_BITS, is_failed, more_elements, ranks_disagree
from dp_compile.plan.words import ranks_in_words
from dp_compile.replica.replica import Replica
from dp_compile.replica.store_channel import all_gather_object, channel_of

MAX_UNREAD: Final = 2


@dataclass(eq=False, slots=True)
class _Reduced:
    """Reduced flags and their asynchronous copy to the host: a blocking read would stall a GPU in each step."""

    flags: torch.Tensor
    unused: tuple[int, ...]
    stepped: tuple[int, ...]
    moved: bool
    missed: str
    number: int  # sequence number of these flags in their group
    event: torch.Event | None = None

    def __post_init__(self) -> None:
        self.flags = flags = self.flags.detach()
        if flags.device.type != "cpu":
            self.flags = torch.empty(flags.shape, dtype=flags.dtype, pin_memory=True)
            self.flags.copy_(flags, non_blocking=True)
            self.event = torch.Event(flags.device)
            self.event.record()

    def has_arrived(self) -> bool:
        return self.event is None or bool(self.event.query())


@dataclass(eq=False, slots=True)
class _Flags:
    """Flags of one replica: those sent last, those not read yet, and the last ones without a fault."""

    sent: tuple[tuple[object, ...], torch.Tensor] | None = None  # key and tensor of the flags sent last
    unread: deque[_Reduced] = field(default_factory=deque)
    fine: torch.Tensor | None = None  # the last reduced flags without a fault


_flags: Final[weakref.WeakKeyDictionary[Replica, _Flags]] = weakref.WeakKeyDictionary()
_settled: Final[Counter[str]] = Counter()  # by group name: how often flags were reduced; equal on every rank


def _of(replica: Replica) -> _Flags:
    return _flags.get(replica) or _flags.setdefault(replica, _Flags())


def start_again(replica: Replica) -> None:
    """Forget a replica's flags when its group has new ranks: counts differ, and unread flags concern the old ranks."""
    _flags.pop(replica, None)
    _settled.pop(replica.group.name, None)


# --- before the reduction ---------------------------------------------------------------------------------------------


def flags_to_send(replica: Replica, unused: Sequence[int], used: Sequence[int]) -> torch.Tensor:
    """Return this rank's flags, which the plan reduces as one more gradient.

    If parameters may be unused, 1 means "used on this rank", so a sum of 0 means that no rank used the parameter. If
    unused parameters are errors, 1 means "unused on this rank", so sums of 0 mean no error.
    """
    ones, local = tuple(used if replica.config.may_be_unused else unused), replica.state.step_guard
    stepped, moved = bool(local.stepped), local.moved or bool(local.missed)
    this, key = _of(replica), (ones, stepped, moved)
    if this.sent is None or this.sent[0] != key:
        elements = [0.0] * len(replica.parameters)
        for index in ones:
            elements[index] = 1.0
        # Flags do not cover the plan: a first captured backward finalizes it just before, and `plan_sync` compares it.
        elements += more_elements(replica.module.topic, stepped=stepped, moved=moved)
        this.sent = (key, _made(replica, elements))
    return this.sent[1]


def flags_of_failure(replica: Replica, error: BaseException) -> torch.Tensor:
    """Return the flags of a failed backward, and advance the count of flag reductions. Stores the error for others."""
    _settled[replica.group.name] += 1
    local, channel = replica.state.step_guard, channel_of(replica)
    local.stepped.clear()
    local.moved, local.missed = False, ""
    if channel is not None:
        key = _key_of_failure(replica, _settled[replica.group.name], dist.get_rank())
        with contextlib.suppress(RuntimeError):  # without a store, other ranks do not get the text
            channel.store.set(key, in_one_line(error, 500))
    return _made(replica, [0.0] * len(replica.parameters) + [*FAILED])


def _made(replica: Replica, elements: Sequence[float]) -> torch.Tensor:
    with autograd.made_like(replica.parameters[0]):
        return torch.tensor(elements, dtype=replica.parameters[0].dtype.to_real()).to(replica.device)


def _key_of_failure(replica: Replica, number: int, rank: int) -> str:
    return f"dp_compile.failed/{replica.group.name}/{number}/{rank}"


def in_one_line(error: BaseException, most: int = 200) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no text'}"[:most]


# --- after the reduction ----------------------------------------------------------------------------------------------


def refuse_failed(replica: Replica, flags: torch.Tensor) -> None:
    """Raise `VoidBackwardError` if flags report a failed rank, on CPUs only. Call it before gradients are used."""
    if not (replica.group.has_others and flags.is_cpu) or _are_fine(replica, flags):
        return
    if is_failed(flags[len(replica.parameters) :].tolist()):
        replica.state.step_guard.reduced = False
        _settled[replica.group.name] += 1
        raise VoidBackwardError(_who_failed(replica, _settled[replica.group.name]))


def remember(replica: Replica, bucket: Bucket, run: HookRun, flags: torch.Tensor, left_alone: Container[int]) -> None:
    """Store the new state that a functional comm hook returned for a bucket.

    A gradient's old state is kept if no rank gets the average: the backward of a rank failed, or no rank used the
    parameter (`left_alone`). What it has held back is then still to be sent.
    """
    more = flags[len(replica.parameters) :]
    holds = more[0] * more[NUMBER_BITS] == 0  # a failed rank sets bit 0 and its complement; no device sync
    with torch.no_grad():
        for member, old, new in zip(bucket.members, run.bucket.state, run.new_state, strict=True):
            for name, tensor in old.items() if member.gradient.index not in left_alone else ():
                tensor.copy_(torch.where(holds, new[name], tensor))


def read_flags(replica: Replica, flags: torch.Tensor, unused: Sequence[int]) -> None:
    """Check the reduced flags of a backward. `unused`: parameters without a gradient on this rank.

    Raises `VoidBackwardError`, `DesyncError` or `ReductionError`. If only other ranks report an error, it is raised
    immediately on a CPU, and up to `MAX_UNREAD` backwards later on a GPU.
    """
    _settled[replica.group.name] += 1
    local, checks = replica.state.step_guard, replica.config.check_reductions
    stepped, moved, missed = tuple(sorted(local.stepped)) if checks else (), local.moved, local.missed
    local.stepped.clear()
    local.moved, local.was_moved, local.missed, local.reduced = False, moved, "", False
    reported = tuple(unused) if checks and not replica.config.may_be_unused else ()
    is_read = (checks or replica.group.has_others) and not (flags.is_cpu and _are_fine(replica, flags))
    if reported or stepped or is_read:
        unread, number = _of(replica).unread, _settled[replica.group.name]
        unread.append(_Reduced(flags, reported, stepped, moved, missed, number))
        while unread and (reported or stepped or unread[0].has_arrived() or len(unread) > MAX_UNREAD):
            try:
                _judge(replica, unread.popleft())
            except (VoidBackwardError, DesyncError, ReductionError):
                unread.clear()
                raise
    local.reduced = True


def _are_fine(replica: Replica, flags: torch.Tensor) -> bool:
    """Return whether flags in host memory equal the latest flags without a fault: a fast path, one comparison."""
    fine = _of(replica).fine
    return fine is not None and torch.equal(flags, fine)


def _judge(replica: Replica, reduced: _Reduced) -> None:
    if reduced.event is not None:
        reduced.event.synchronize()
    flags, n_parameters = reduced.flags, len(replica.parameters)
    if not (reduced.stepped or reduced.unused) and _are_fine(replica, flags):
        return
    more = flags[n_parameters:].tolist()
    if replica.group.has_others and is_failed(more):
        raise VoidBackwardError(_who_failed(replica, reduced.number))
    if not replica.config.check_reductions:
        return
    if ranks_disagree(more):
        raise DesyncError(_who_reduced_what(replica, reduced.number))
    stepped, moved, not_moved = more[2 * NUMBER_BITS :]
    if reduced.stepped or stepped:
        raise ReductionError(stepped_message(replica, reduced.stepped))
    if moved and not_moved:
        raise ReductionError(_who_moved(replica, reduced))
    if not replica.config.may_be_unused and (reduced.unused or bool(flags[:n_parameters].any())):
        raise ReductionError(_unused_message(replica, reduced))
    _of(replica).fine = flags.clone()  # a copy: flags are a view that keeps their bucket alive


# --- error texts ------------------------------------------------------------------------------------------------------


def _who_failed(replica: Replica, number: int) -> str:
    channel, own, texts = channel_of(replica), dist.get_rank(), list[str]()
    backward = replica.history.synced_backwards + 1
    for rank in () if channel is None else dist.get_process_group_ranks(replica.group.process_group):
        key = _key_of_failure(replica, number, rank)
        with contextlib.suppress(RuntimeError):
            if channel is not None and rank != own and channel.store.check([key]):
                texts.append(f"; rank {rank} left backward {backward} with an error: {channel.store.get(key).decode()}")
    text = f"rank {own}, module of {replica.names[0]}: synchronised backward {backward} is void{''.join(texts[:4])}. "
    if replica.device.type == "cpu" and not replica.after.updates:
        return text + "No rank has averaged gradients. Call zero_grad() on every rank and continue, or stop."
    return text + "Parameters may have been updated with it. Restore a checkpoint on every rank, or stop."


def _who_reduced_what(replica: Replica, number: int) -> str:
    own = f"the module of {replica.names[0]}, number {replica.module.number}"
    stated = all_gather_object(channel_of(replica), f"dp_compile.mixed/{replica.group.name}/{number}", own)
    return (
        "the ranks reduced different modules together, so the reduced gradients are invalid: "
        f"{'; '.join(f'rank {rank} {each}' for rank, each in enumerate(stated))}. "
        "On every rank the backwards have to reach the same replicated modules in the same order."
    )


def stepped_message(replica: Replica, stepped: Sequence[int]) -> str:
    whose = replica.name_list(stepped) if stepped else "parameters of another rank"
    return (
        f"{whose} changed before the gradient was reduced, so the ranks differ now: did optimizer.step() run after a "
        "backward under no_sync, or inside a hook, where gradients are still this rank's own? Call it after a backward "
        "outside of no_sync; end local steps with an average over all ranks (dp_compile.averaging); or pass "
        "check_reductions=False if it changes parameters in the same way on every rank."
    )


def _who_moved(replica: Replica, reduced: _Reduced) -> str:
    """Return the messages of ranks that missed a step, else a text that suspects `no_sync` on some ranks only."""
    channel = channel_of(replica) if reduced.event is None else None
    missed = all_gather_object(channel, f"dp_compile.missed/{replica.module.topic}/{reduced.number}", reduced.missed)
    return "; ".join(filter(None, missed)) or (
        f"parameters of the module of {replica.names[0]} were changed on {'this' if reduced.moved else 'another'} rank "
        "after a backward under no_sync, and not on every rank, so the ranks differ now: is no_sync used on some ranks "
        "only? Use it on all of them, or pass check_reductions=False."
    )


def _unused_message(replica: Replica, reduced: _Reduced) -> str:
    """Return which ranks left out which parameters. Asks no rank on GPUs: ranks read flags in different backwards."""
    here, channel = reduced.unused, channel_of(replica) if reduced.event is None else None
    where: dict[str, list[int]] = {"this rank": list(here)}
    if channel is None:
        somewhere = reduced.flags[: len(replica.parameters)].nonzero().flatten().tolist()
        where["another rank"] = [index for index in somewhere if index not in here]
    else:
        topic, ranks = f"dp_compile.left_out/{replica.module.topic}/{reduced.number}", dict[str, list[int]]()
        for rank, left_out in enumerate(stated := all_gather_object(channel, topic, list(here))):
            if rank != channel.rank:
                ranks.setdefault(str(left_out), []).append(rank)
        where |= {ranks_in_words(each): stated[each[0]] for each in ranks.values()}
        where = {"all ranks": list(here)} if all(each == list(here) for each in stated) else where
    parts = "; ".join(
        f"without a gradient on {place}: {replica.name_list(indices)}" for place, indices in where.items() if indices
    )
    gone = [index for index in here if replica.is_gone(index)]
    if gone:
        return (
            f"parameters {parts}. No longer in the module, because they were tied or replaced after replicate(): "
            f"{replica.name_list(gone)}. Tie or replace parameters before replicate(), or call unreplicate() and "
            "replicate() again."
        )
    return (
        f"parameters {parts}. Every parameter has to take part in the loss on every rank. "
        "If some may be left out, pass find_unused_parameters=True; if they never train, call requires_grad_(False) on "
        "them before replicate(); if they were frozen since, call unreplicate() and replicate() again."
    )
