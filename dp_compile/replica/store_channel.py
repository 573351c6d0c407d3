"""Comparison and exchange of plain data between ranks, over the key-value store of the default process group.

Waiting ends after the time-out of the group's collectives. Ranks that compile, as their monitors publish, extend it
(`RankStatus`). `check_consistent` and `all_gather_object` take one round: every rank posts, rank 0 reads all posts,
publishes one result. Therefore all ranks continue or all raise the same error. `check_consistent` has linear traffic.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist

from dp_compile._torch import distributed
from dp_compile.config import monitor_after_s
from dp_compile.errors import CommunicationError, DesyncError, DPCompileError, VoidBackwardError
from dp_compile.plan.words import ranks_in_words
from dp_compile.replica.group import Group
from dp_compile.replica.replica import Replica

LOOK_EVERY_S: Final = 2.0
COMPILATION_S: Final = 1800.0  # how long a wait may exceed its time-out while ranks compile

Statement = Mapping[str, Any]
_meetings: Final[Counter[str]] = Counter()


class MissingRankError(DesyncError):
    """A rank did not reach a synchronisation point in time. In a backward the monitor adds the rank's status."""


class LostStoreError(CommunicationError):
    """The key-value store is gone, so ranks cannot exchange data any more."""


def is_of_other_ranks(error: BaseException) -> bool:
    """Return whether the cause of an error is that other ranks are late or cannot be reached."""
    if isinstance(error, VoidBackwardError):
        return False
    return isinstance(error, (MissingRankError, CommunicationError)) or distributed.is_communication_error(error)


# --- status of each process, published once a second in the store of the default process group ------------------------

COMPILING: Final = "compiling, "
_STATUS_KEY: Final = "dp_compile.monitor/{}"


class Progress(NamedTuple):
    """Progress of one rank with one module."""

    done: int  # complete synchronised backwards
    launched: int = -1  # collectives of the backward in progress; -1: no backward is in progress
    failed: str = ""  # the error that ended backward `done` + 1
    gave_up: bool = False  # whether that error is about other ranks: late or unreachable


class RankStatus(NamedTuple):
    """The published status of a process."""

    beat: int  # increases with each publication
    modules: dict[str, Progress]  # by topic
    place: str = ""  # the user's current line, prefixed by `COMPILING` while torch compiles
    left: bool = False  # whether the process has ended


def write_status(store: distributed.Store, rank: int, status: RankStatus) -> None:
    store.set(_STATUS_KEY.format(rank), json.dumps(status))


def read_statuses(store: distributed.Store, ranks: Iterable[int]) -> dict[int, RankStatus]:
    """Return the latest status of these ranks, by rank in the default group. Omits ranks that have published none."""
    keys = {rank: _STATUS_KEY.format(rank) for rank in ranks}
    if not store.check(list(keys.values())):  # reading a key that was never set would block
        keys = {rank: key for rank, key in keys.items() if store.check([key])}
    texts = store.multi_get(list(keys.values())) if keys else []
    found = {rank: RankStatus(*json.loads(text)) for rank, text in zip(keys, texts, strict=True)}
    return {r: each._replace(modules={t: Progress(*of) for t, of in each.modules.items()}) for r, each in found.items()}


# --- over the store ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StoreChannel:
    """Exchange of plain JSON data between the ranks of one group, over the store.

    torch's `torch.distributed.elastic.utils.store` is no alternative: `synchronize` does not report the missing rank,
    and after an error `store_timeout` leaves the default store's time-out changed (torch 2.11 to 2.15).

    `watched`: ranks of the default group. No read times out while one of them compiles: with several groups, a missing
    rank may itself wait for a rank of another group.
    """

    store: distributed.Store
    rank: int
    world_size: int
    timeout_s: float
    watched: Sequence[int] = ()

    def post(self, key: str, value: Any) -> None:
        with self._asking(math.inf):
            self.store.set(key, json.dumps(value))  # keys unsorted: errors report the first difference in this order

    def read(self, key: str, patience_s: float, absent: str = "") -> Any:
        """Return the value that a rank has posted.

        Raises:
            MissingRankError: `patience_s` after the call, or after the last sign that a rank compiles. Text: `absent`.
            LostStoreError: the store is gone.
        """
        beats: dict[int, int] = {}
        end_s = time.monotonic() + patience_s
        last_s = end_s + COMPILATION_S
        while True:
            look_s = max(0.01, min(LOOK_EVERY_S + len(self.watched) / 16, end_s - time.monotonic()))
            with contextlib.suppress(MissingRankError), self._asking(look_s):
                self.store.wait([key], timedelta(seconds=look_s))
                return json.loads(self.store.get(key))
            with self._asking(math.inf):
                statuses = read_statuses(self.store, self.watched) if self.watched else {}
            compiling = {rank: each.beat for rank, each in statuses.items() if each.place.startswith(COMPILING)}
            before, beats = beats, compiling
            if any(before.get(rank, beat) != beat for rank, beat in beats.items()):  # a constant beat: maybe killed
                end_s = min(time.monotonic() + patience_s, last_s)
            if time.monotonic() >= end_s:
                raise MissingRankError(absent)

    @contextlib.contextmanager
    def _asking(self, patience_s: float) -> Iterator[None]:
        """Turn an error of the store into `MissingRankError` if it took `patience_s` or so, else `LostStoreError`."""
        started_s = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            waited_s = time.monotonic() - started_s
            if isinstance(error, dist.DistNetworkError) or waited_s < patience_s / 2:
                raise LostStoreError(
                    f"rank {self.rank} of {self.world_size}: the key-value store does not answer after {waited_s:.1f} "
                    "s. The process that serves it has ended: rank 0 or the launcher. Look at its log first. "
                    f"torch says: {error}"
                ) from error
            raise MissingRankError from error


def _round(channel: StoreChannel, topic: str, value: Any, judge: Callable[[dict[int, Any]], Any], call: str) -> Any:
    """Return on every rank the result of `judge`, which rank 0 calls with the values of all ranks."""
    channel.post(f"{topic}/{channel.rank}", value)
    if channel.rank == 0:
        stated: dict[int, Any] = {}
        for rank in range(channel.world_size):
            # Only the first missing rank gets the full time-out, the later ranks a short one: otherwise ranks that
            # wait for the result would time out before rank 0 publishes it.
            is_complete = len(stated) == rank
            patience_s = channel.timeout_s if is_complete else min(1.0, channel.timeout_s / (2 * channel.world_size))
            with contextlib.suppress(MissingRankError):
                stated[rank] = channel.read(f"{topic}/{rank}", max(0.01, patience_s))
        missing = [rank for rank in range(channel.world_size) if rank not in stated]
        named = f"{ranks_in_words(missing)} {'have' if len(missing) > 1 else 'has'}" if missing else ""
        channel.post(f"{topic}/verdict", [judge(stated), named])
    verdict, named = channel.read(
        f"{topic}/verdict",
        2 * channel.timeout_s,
        f"{call or topic}: rank 0 did not publish the result of the comparison within {2 * channel.timeout_s:g} s. Is "
        f"it alive, and does it call {call or 'the same'}, for the same modules in the same order?",
    )
    if named:
        deed = f"called {call}" if call else "reached this synchronisation point"
        raise MissingRankError(f"{call or topic}: {named} not {deed} after {channel.timeout_s:g} s")
    return verdict


def check_consistent(channel: StoreChannel | None, topic: str, statement: Statement, *, call: str = "") -> None:
    """Wait for an equal `statement` (plain JSON data) from every rank. Each `topic` can be used once on a channel.

    A key `error` in `statement` has this rank's reason to stop. `call`: the user's API call, for error texts.

    Raises:
        DesyncError: on every rank, if statements differ, if a rank reports an error, or if one is missing after
            `channel.timeout_s`. The text has the rank and the first difference.
        LostStoreError: the store is gone for good.
    """
    complaints = [] if channel is None else _round(channel, topic, statement, _complaints, call)
    if complaints:
        raise DesyncError(f"{call or topic}: {'; '.join(complaints[:4])}")


def _complaints(stated: Mapping[int, Statement]) -> list[str]:
    own, complaints = stated[0], []
    for rank, other in stated.items():
        if "error" in other:
            complaints.append(f"rank {rank} failed: {other['error']}")
        elif "error" not in own and other != own:
            complaints.append(f"rank {rank} differs from rank 0: {first_difference(own, other)}")
    return complaints


def all_gather_object(channel: StoreChannel | None, topic: str, value: Any) -> list[Any]:
    """Return the values of all ranks, by rank. Traffic is quadratic in ranks. Errors as in `check_consistent`."""
    if channel is None:
        return [value]
    return list(_round(channel, topic, value, lambda stated: list(stated.values()), ""))


def broadcast_object(channel: StoreChannel | None, topic: str, value: Any) -> Any:
    """Return the value of rank 0 on every rank. Rank 0 does not wait. Raises `DesyncError` if rank 0 is late."""
    if channel is None:
        return value
    if channel.rank == 0:
        channel.post(topic, value)
    absent = f"rank 0 has published no value within {channel.timeout_s:g} s. Is it alive, and does it run the same code"
    return channel.read(topic, channel.timeout_s, f"{topic}: {absent} as this rank?")


def first_difference(mine: Any, theirs: Any, rank: int = 0) -> str:
    """Return the first difference of two JSON values as text: `parameters[3].shape[0] is 8 there, 4 on rank 0`."""
    here, there = dict(_leaves(mine, "")), dict(_leaves(theirs, ""))
    for path in here | there:
        shown = [json.dumps(each[path]) if path in each else "missing" for each in (there, here)]
        if shown[0] != shown[1]:
            return f"{path.lstrip('.') or 'the value'} is {shown[0]} there, {shown[1]} on rank {rank}"
    return "no difference"


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _leaves(each, f"{path}.{key}")
    elif isinstance(value, list):
        for position, each in enumerate(value):
            yield from _leaves(each, f"{path}[{position}]")
    else:
        yield path, value


# --- the ranks of a module --------------------------------------------------------------------------------------------


def channel_of(who: Replica | Group) -> StoreChannel | None:
    """Return a module's or group's channel, with the time-out of its collectives; `None` without other ranks."""
    group = who if isinstance(who, Group) else who.group
    if not group.has_others:
        return None
    working = distributed.working_device(group.process_group)
    device = torch.device(working) if isinstance(who, Group) else who.device
    timeout_s = distributed.timeout_of(group.process_group, device)
    watched = range(dist.get_world_size()) if monitor_after_s() is not None else ()
    return StoreChannel(
        distributed.default_store(), dist.get_rank(group.process_group), group.world_size, timeout_s, watched
    )


def unique_topic(who: Replica | Group, about: str) -> str:
    """Return a topic that is unique among all `unique_topic` calls of these ranks.

    Counts of backwards are not unique: a failed backward is repeated under the old count, and `warmup` restores counts.
    A rank would then read an old value.
    """
    topic = f"dp_compile.{about}/{who.name}" if isinstance(who, Group) else f"{who.module.topic}/{about}"
    _meetings[topic] += 1
    return f"{topic}/{_meetings[topic]}"


def check_consistent_in_call(who: Replica | Group, statement: Statement, call: str) -> str:
    """Run `check_consistent` in an API call that every rank makes in the same order. Return the topic."""
    topic = unique_topic(who, call)
    check_consistent(channel_of(who), topic, statement, call=call)
    return topic


@contextlib.contextmanager
def propagate_errors(who: Replica | Group, call: str) -> Iterator[None]:
    """Report an error of this block to the ranks that wait in `check_consistent_in_call`, and raise it again."""
    try:
        yield
    except (DesyncError, LostStoreError):  # all ranks have it already, or cannot be reached
        raise
    except Exception as error:
        text = str(error) if isinstance(error, DPCompileError) else f"{type(error).__name__}: {error}"
        with contextlib.suppress(DesyncError, LostStoreError):
            check_consistent_in_call(who, {"error": text}, call)
        raise
