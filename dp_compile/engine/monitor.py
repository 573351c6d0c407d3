"""Which rank does a backward wait for? A thread in each process publishes how far it is; the others read on failure.

The status goes to the store of the default process group once a second, over a connection of the thread, which runs
while the main thread waits, sleeps or compiles. A rank whose status stays the same while another one reads it is not
responding. A step costs a few attribute assignments and one read of a counter. The store gets at most
`MAX_REQUESTS_PER_S` statuses from all ranks: with more ranks, each publishes less often.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import sys
import sysconfig
import threading
import time
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Final, NamedTuple

import torch
import torch.distributed as dist

from dp_compile._torch import compiler, distributed
from dp_compile.config import MONITOR_VARIABLE, monitor_after_s
from dp_compile.engine.flags import in_one_line
from dp_compile.engine.plan_sync import is_of_other_ranks
from dp_compile.engine.replica import Replica
from dp_compile.errors import CommunicationError, DesyncError
from dp_compile.plan.buckets import UNUSED_FLAGS, BucketPlan
from dp_compile.plan.words import count

logger = logging.getLogger("dp_compile.monitor")
PUBLISH_EVERY_S: Final = 1.0
MAX_REQUESTS_PER_S: Final = 1000
STORE_TIMEOUT_S: Final = 10.0
READ_S_PER_RANK: Final = 0.01
"""When a rank dies all others read at once, a status per rank, twice or so: 4 us a status, measured on a TCPStore, so
this leaves the store time for 1,000 ranks."""
COMPILING: Final = "compiling"
_KEY: Final = "dp_compile.monitor/{}"
MOST_RANKS_NAMED: Final = 8
_OURS, _TORCH = str(Path(__file__).parents[1]), str(Path(torch.__file__).parent)
_NOT_THE_USERS: Final = (_OURS, _TORCH, sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), "<")


# --- how far ranks are: data and text -------------------------------------------------------------------------------


class Progress(NamedTuple):
    """How far one rank is with one module.

    `done`, `local`: complete backwards with and without synchronisation. `launched`: collectives of the synchronised
    backward in progress; `None`: there is none. `failed`: the error that ended backward `done` + 1. `gave_up`: it only
    reports that other ranks are not reached.
    """

    done: int
    local: int
    launched: int | None
    failed: str = ""
    gave_up: bool = False

    @property
    def position(self) -> tuple[int, int]:
        return self.done, -1 if self.launched is None else self.launched


class RankStatus(NamedTuple):
    """What a process publishes: a number that grows, progress by topic, the user's line that runs, and whether it has
    ended, or has dropped its replicated modules."""

    beat: int
    modules: dict[str, Progress]
    place: str = ""
    doing: str = ""
    left: bool = False

    @classmethod
    def from_json(cls, text: str | bytes) -> RankStatus:
        beat, modules, *rest = json.loads(text)
        return cls(beat, {topic: Progress(*each) for topic, each in modules.items()}, *rest)


def bucket_labels(plan: BucketPlan) -> tuple[str, ...]:
    """The first and the last gradient of each bucket of a plan, in launch order."""
    buckets = ([each.gradient.name for each in bucket.members] for bucket in plan.buckets)
    named = [[name for name in names if name != UNUSED_FLAGS] for names in buckets]
    return tuple(" .. ".join(dict.fromkeys((names[0], names[-1]))) if names else "flags only" for names in named)


def explain(topic: str, own: Progress, labels: Sequence[str], statuses: Mapping[int, RankStatus | None]) -> str:
    """Which of the other ranks a backward waits for (`None`: no response), and in which bucket, by its label.

    Without labels the number of a collective does not tell the bucket.
    """
    verdicts: dict[tuple[int, str], list[int]] = {}
    for rank, status in statuses.items():
        verdicts.setdefault(_verdict(topic, own, labels, status), []).append(rank)
    texts = [f"{_named(verdicts[each])} {each[1]}" for each in sorted(verdicts, key=lambda each: -each[0])]
    if not any(blame for blame, _ in verdicts):
        slow = "all are slow before the first collective"
        texts.append(f"no rank is late: {'the connection between ranks is cut or slow' if own.launched else slow}")
    return "; ".join(texts)


def _verdict(topic: str, own: Progress, labels: Sequence[str], status: RankStatus | None) -> tuple[int, str]:
    """2 if this rank waits for that one, 1 if that one failed because of others, 0 if it waits too; and the text."""
    if status is None:
        return 2, "is not responding (killed, suspended, cut off, or blocked in native code). Look at its log first"
    if (other := status.modules.get(topic)) is None:
        left = "has left: its program ended, or it dropped the module"
        return 2, left if status.left else "does not have this module any more"
    backward, after = f"backward {other.done + 1}", f"after {count(other.done, 'synchronised backward')}"
    if other.failed and status.left:
        return 2, f"has left in {backward} {'after giving up' if other.gave_up else 'with an error'}: {other.failed}"
    if other.failed:
        how = f"gave up in {backward}" if other.gave_up else f"left {backward} with an error"
        return 1 if other.gave_up else 2, f"{how}: {other.failed}"
    hint = f". It ran {count(other.local, 'backward')} without synchronisation, this rank {own.local}: "
    hint = "" if other.local == own.local else f"{hint}is no_sync used on some ranks only?"
    if status.left:
        hint = hint or ": did it skip a step, or have less data?"
        return 2, f"has left {after}{hint if other.done <= own.done else ''}"
    if other.position == own.position:
        return 0, "waits in the same place"
    activity = f"in {backward} with {count(other.launched or 0, 'collective')} launched"
    activity = f"in no backward {after}" if other.launched is None else activity
    activity = ", ".join(filter(None, (activity, status.doing, status.place and f"at {status.place}")))
    if other.position > own.position:
        return 0, f"is ahead, {activity}"
    number = other.launched or 0 if other.done == own.done else 0
    missing = f"bucket {number} of {len(labels)} ({labels[number]})" if number < len(labels) else f"collective {number}"
    if labels and number >= len(labels):
        missing = "what follows the last bucket, a copy of buffers or a comparison of parameters"
    return 2, f"is waited for in {missing}: it is {activity}{hint}"


def _named(ranks: Sequence[int]) -> str:
    rest = f" and {len(ranks) - MOST_RANKS_NAMED} more" if len(ranks) > MOST_RANKS_NAMED else ""
    named = ", ".join(map(str, ranks[:MOST_RANKS_NAMED]))
    return f"{'rank' if len(ranks) == 1 else 'each of ranks'} {named}{rest}"


# --- a backward that is watched -------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Record:
    """What is published of one replica. It outlives the replica, so that the last status of a rank is complete."""

    backwards: Counter[str]
    done: int = 0
    failed: str = ""
    gave_up: bool = False

    def progress(self, launched: int | None) -> Progress:
        local = self.backwards["without sync"] + self.backwards["captured without sync"]
        return Progress(self.done, local, launched, self.failed, self.gave_up)


class Watched:
    """A synchronised backward of some replicas, from entering to leaving it. An error that ends it is explained.

    Raises:
        CommunicationError: on leaving, in place of torch's error, if other ranks could not be reached.
    """

    __slots__ = ("_bases", "_replicas", "_since_s", "_warnings", "thread")

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = {replica.module.topic: replica for replica in replicas if replica.group.has_others}
        self._warnings = 0
        self.thread = threading.get_ident()

    def __enter__(self) -> Watched:
        self._since_s = time.monotonic()
        self.count_from_here()
        if self._replicas:
            _backwards.append(self)
        self._record()
        return self

    def count_from_here(self) -> None:
        """Collectives launched so far are not those of the plan."""
        self._bases = {topic: _launched(replica) for topic, replica in self._replicas.items()}

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            of_others = bool(self._replicas) and error is not None and is_of_other_ranks(error)
            self._record(in_one_line(error) if error is not None else "", of_others)
            if of_others and not isinstance(error, CommunicationError):
                text = self.describe()
                if isinstance(error, DesyncError):
                    raise DesyncError(f"{error} {text}.") from error
                raise CommunicationError(f"{text.rstrip('.?')}. torch says: {error}") from error
        finally:
            if self._replicas:
                _backwards.remove(self)

    def _record(self, failed: str = "", gave_up: bool = False) -> None:
        for topic, replica in self._replicas.items():
            if (record := _records.get(topic)) is not None:
                record.failed, record.gave_up = failed, gave_up
                if not failed:
                    record.done = replica.history.synced_backwards
        if failed:
            MONITOR.wake.set()

    def describe(self) -> str:
        """Which backward this is, and which rank it waits for in which bucket. Takes some 3 s."""
        rank, texts = dist.get_rank(), []
        groups = {t: dist.get_process_group_ranks(each.group.process_group) for t, each in self._replicas.items()}
        found = MONITOR.read(sorted({each for group in groups.values() for each in group} - {rank}))
        for topic, replica in self._replicas.items():
            own = _Record(replica.history.backwards, replica.history.synced_backwards).progress(self.launched(topic))
            sharing = [each for each in self._replicas.values() if each.group.name == replica.group.name]
            labels = bucket_labels(replica.plan) if len(sharing) == 1 else ()
            if isinstance(found, str):
                text = f"who is missing is not known: {found}"
            else:
                text = explain(topic, own, labels, {each: found.get(each) for each in groups[topic] if each != rank})
            where = f"rank {rank}, module of {replica.names[0]}: synchronised backward {own.done + 1}, {own.launched}"
            texts.append(f"{where}{f' of {len(labels)}' if labels else ''} collectives launched; {text}")
        return "\n".join(texts)

    def launched(self, topic: str) -> int | None:
        """Collectives of a replica's group that this backward has launched; `None` if the replica is not in it."""
        replica = self._replicas.get(topic)
        return None if replica is None else _launched(replica) - self._bases[topic]

    def warn_if_stuck(self) -> None:
        """Called by the monitor's thread: log which rank is waited for, again each time the wait has doubled."""
        if _occupation(self.thread)[1] == COMPILING:
            self._since_s = time.monotonic()
        limit_s, waited_s = monitor_after_s(), time.monotonic() - self._since_s
        if limit_s is None or waited_s < limit_s * 2**self._warnings:
            return
        self._warnings += 1
        text = self.describe()
        if self in _backwards:
            logger.warning("waiting for %.0f s in a backward. %s", waited_s, text)


_backwards: Final[list[Watched]] = []
"""Synchronised backwards in progress, of any thread, an inner one after the outer one."""
_records: Final[dict[str, _Record]] = {}
"""By topic, which is the same on every rank."""


def _launched(replica: Replica) -> int:
    """Collectives of which each bucket has one: on two levels, those between nodes, or over all ranks at once."""
    groups, levels = [replica.group.process_group], replica.group.levels
    if levels is not None and distributed.is_alive(groups[0]):
        groups.append(distributed.group_of_name(levels.between))
    return sum(distributed.collectives_launched(each, replica.device) for each in groups)


def _occupation(thread: int | None) -> tuple[str, str]:
    """The line of the user's code that a thread runs, and whether it compiles."""
    frame: FrameType | None = sys._current_frames().get(thread or 0)
    place = doing = ""
    while frame is not None:
        file = frame.f_code.co_filename
        doing = COMPILING if compiler.is_of_compiler(file) else doing
        if not place and not file.startswith(_NOT_THE_USERS):
            place = f"{Path(file).name}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return place, doing


# --- the thread -----------------------------------------------------------------------------------------------------


class Monitor:
    """The thread, and what it shares with the others. Holds no replica while it sleeps."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.wake = threading.Event()
        self._watched: weakref.WeakSet[Replica] = weakref.WeakSet()
        self._thread: threading.Thread | None = None
        self._store: distributed.Store | None = None
        self._leaving = self._reconnect = False
        self._rank, self._beat, self._trouble = -1, 0, ""

    def watch(self, replica: Replica) -> None:
        """Publish the progress of a replica until it is gone, and warn when it is stuck."""
        if not replica.group.has_others or monitor_after_s() is None:
            return
        with self._lock:
            self._watched.add(replica)
            _records[replica.module.topic] = _Record(replica.history.backwards, replica.history.synced_backwards)
            self._reconnect = True
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="dp_compile monitor", daemon=True)
                self._thread.start()

    def unwatch(self, replica: Replica) -> None:
        """The replica is not one any more."""
        with self._lock:
            self._watched.discard(replica)
        self.wake.set()

    def leave(self) -> None:
        """Publish that this program ends. Waits a moment for the thread, never long."""
        self._leaving = True
        self.wake.set()
        if (thread := self._thread) is not None:
            thread.join(timeout=PUBLISH_EVERY_S)

    def read(self, ranks: Sequence[int]) -> Mapping[int, RankStatus] | str:
        """What each rank has published while this waits, without those that do not; or why nothing can be read."""
        if self._thread is None or not self._thread.is_alive():
            return f"no rank could be asked, the monitor is off ({MONITOR_VARIABLE})"
        if (store := self._store) is None:
            return self._trouble or "the monitor has not reached the key-value store yet"
        found: dict[int, RankStatus] = {}
        try:
            found = before = _read(store, ranks)
            # Rank 0 often serves the store and ends with its error: the others read first.
            for _ in range(6 + (self._rank == 0)):
                self._publish()  # others may read too, and this thread may be the one that publishes
                time.sleep((3 * _interval_s() + dist.get_world_size() * READ_S_PER_RANK) / 6)
            after = _read(store, ranks).items()
            found = {r: each for r, each in after if each.left or r not in before or each.beat != before[r].beat}
        except (RuntimeError, ValueError) as error:
            self._lose_store(error)
        return found or self._trouble or {}

    def _run(self) -> None:
        while self._look():
            self.wake.wait(_interval_s())
            self.wake.clear()

    def _look(self) -> bool:
        """Publish, and warn of backwards that do not end. Returns whether there is a replica left to watch."""
        with self._lock:
            ends = self._leaving or not self._watched
            try:
                if self._reconnect and not ends:
                    self._reconnect, self._trouble = False, ""
                    self._rank = dist.get_rank()  # still known when the default group is destroyed
                    self._store = distributed.connect_again(distributed.default_store(), STORE_TIMEOUT_S)
                self._publish(left=ends)
            except (RuntimeError, ValueError) as error:  # The store is gone, or the default group.
                self._lose_store(error)
            if ends:
                self._thread = self._store = None
                _records.clear()
                return False
        for watched in {each.thread: each for each in _backwards}.values():
            with contextlib.suppress(RuntimeError, ValueError):
                watched.warn_if_stuck()
        return True

    def _publish(self, *, left: bool = False) -> None:
        with self._lock:
            if self._store is None:
                return
            self._beat += 1
            running, modules = list(_backwards), {}
            for topic in list(_records) if left else [each.module.topic for each in self._watched]:
                launched = next((n for n in (each.launched(topic) for each in running) if n is not None), None)
                modules[topic] = _records[topic].progress(launched)
            thread = running[0].thread if running else threading.main_thread().ident
            status = RankStatus(self._beat, modules, *(("", "") if left else _occupation(thread)), left)
            self._store.set(_KEY.format(self._rank), json.dumps(status))

    def _lose_store(self, error: Exception) -> None:
        self._store, text = None, str(error).strip().splitlines()[0]
        self._trouble = f"the key-value store does not answer, it ended with rank 0 or with the launcher ({text})"


def _read(store: distributed.Store, ranks: Sequence[int]) -> dict[int, RankStatus]:
    keys = {rank: _KEY.format(rank) for rank in ranks}
    if not store.check(list(keys.values())):  # to get a key that was never set would block
        keys = {rank: key for rank, key in keys.items() if store.check([key])}
    texts = store.multi_get(list(keys.values())) if keys else []
    return {rank: RankStatus.from_json(text) for rank, text in zip(keys, texts, strict=True)}


def _interval_s() -> float:
    return max(PUBLISH_EVERY_S, dist.get_world_size() / MAX_REQUESTS_PER_S if dist.is_initialized() else 0.0)


MONITOR: Final = Monitor()
_inherited: list[distributed.Store | None] = []


def _start_after_fork() -> None:
    """In a forked child there is no thread, and the connection belongs to the parent: it must not even be closed."""
    _inherited.append(MONITOR._store)
    MONITOR.__init__()  # type: ignore[misc]
    _backwards.clear()


os.register_at_fork(after_in_child=_start_after_fork)
atexit.register(MONITOR.leave)
