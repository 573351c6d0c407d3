"""Finds the rank that a backward waits for. A thread per process publishes progress, which other ranks read on failure.

The thread writes a status to the store of the default process group once a second (less often above 1,000 ranks), over
its own connection. It runs while the main thread waits, sleeps or compiles. A rank whose status does not change while
another rank reads it is not responding. The thread ends with the last replica, or with the process group.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import sysconfig
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Final

import torch
import torch.distributed as dist

from dp_compile._torch import compiler, distributed
from dp_compile.config import MONITOR_VARIABLE, monitor_after_s
from dp_compile.engine.flags import in_one_line
from dp_compile.errors import CommunicationError, DesyncError
from dp_compile.plan.buckets import Bucket
from dp_compile.plan.reduction import ALL_REDUCE, INSIDE, REDUCE_SCATTER
from dp_compile.plan.words import count, ranks_in_words
from dp_compile.replica.replica import Replica, warn
from dp_compile.replica.store_channel import (
    COMPILING,
    Progress,
    RankStatus,
    is_of_other_ranks,
    read_statuses,
    write_status,
)

logger = logging.getLogger("dp_compile.monitor")
STORE_TIMEOUT_S: Final = 10.0
_OURS, _TORCH = str(Path(__file__).parents[1]), str(Path(torch.__file__).parent)
_NOT_THE_USERS: Final = (_OURS, _TORCH, sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), "<")


def explain(topic: str, own: Progress, buckets: Sequence[str], statuses: Mapping[int, RankStatus | None]) -> str:
    """Return a text that names the ranks for which a backward waits, and the bucket. A status of `None`: no response.

    `buckets`: the first gradient of each bucket; empty if collectives cannot be mapped to buckets.
    """
    found: dict[tuple[int, str], list[int]] = {}
    for rank, status in statuses.items():
        found.setdefault(_verdict(topic, own, buckets, status), []).append(rank)
    in_order = sorted(found.items(), key=lambda item: -item[0][0])
    texts = [f"{'each of ' * (len(ranks) > 1)}{ranks_in_words(ranks)} {text}" for (_, text), ranks in in_order]
    if not any(blame for blame, _ in found):
        texts.append("no rank is late: the connection between ranks is cut or slow")
    return "; ".join(texts)


def _verdict(topic: str, own: Progress, buckets: Sequence[str], status: RankStatus | None) -> tuple[int, str]:
    """Return 2 if this rank waits for another, 1 if that rank failed because of third ranks, else 0; and a text."""
    if status is None:
        return 2, "is not responding (killed, suspended, cut off, or blocked in native code). Look at its log first"
    if (other := status.modules.get(topic)) is None:
        return 2, "does not have this module any more (training ended, or raised: look at its log first)"
    backward, after = f"backward {other.done + 1}", f"after {count(other.done, 'synchronised backward')}"
    if other.failed:
        how = f"gave up in {backward}" if other.gave_up else f"left {backward} with an error"
        return 2 - other.gave_up, f"{how}: {other.failed}"
    if status.left:
        return 2, f"exited {after}: did it skip a step, or have less data?"
    if other[:2] == own[:2]:
        return 0, "waits in the same place"
    doing = f"in {backward} with {count(other.launched, 'collective')} launched"
    doing = ", ".join(filter(None, (f"outside any backward {after}" if other.launched < 0 else doing, status.place)))
    if other[:2] > own[:2]:
        return 0, f"is ahead, {doing}"
    number = max(0, other.launched) if other.done == own.done else 0
    is_bucket = number < len(buckets)
    missing = f"bucket {number} of {len(buckets)} ({buckets[number]}, ...)" if is_bucket else f"collective {number}"
    return 2, f"has not launched {missing}: it is {doing}"


class Watched:
    """A context of a backward: adds the late rank to communication errors, raises torch's as `CommunicationError`."""

    __slots__ = ("_bases", "_replicas", "_since_s", "_warnings", "thread")

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = {replica.module.topic: replica for replica in replicas if replica.group.has_others}
        self._warnings, self.thread = 0, threading.get_ident()

    def __enter__(self) -> Watched:
        self._since_s = time.monotonic()
        self.count_from_here()
        if self._replicas:
            _backwards.append(self)
            for topic in self._replicas:
                _failed.pop(topic, None)
        return self

    def count_from_here(self) -> None:
        """Restart the count of collectives: those launched earlier in the backward reduce no bucket of the plan."""
        self._bases = {topic: _launched(replica) for topic, replica in self._replicas.items()}

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if not self._replicas:
            return
        try:
            if error is not None:
                of_others = is_of_other_ranks(error)
                _failed.update(dict.fromkeys(self._replicas, (in_one_line(error), of_others)))
                MONITOR.wake.set()
                if of_others and not isinstance(error, CommunicationError):
                    text = self.describe()
                    if isinstance(error, DesyncError):
                        raise type(error)(f"{error} {text}.") from error
                    text += "" if text.endswith((".", "?")) else "."
                    raise CommunicationError(f"{text} torch says: {error}") from error
        finally:
            _backwards.remove(self)

    def describe(self) -> str:
        """Return which backward this is, and which rank it waits for in which bucket. Takes about 3 s."""
        rank, texts = dist.get_rank(), []
        groups = {t: dist.get_process_group_ranks(each.group.process_group) for t, each in self._replicas.items()}
        statuses = MONITOR.read(sorted({each for group in groups.values() for each in group} - {rank}))
        for topic, replica in self._replicas.items():
            own = Progress(replica.history.synced_backwards, self.launched(topic))
            sharing = [each for each in self._replicas.values() if each.group.name == replica.group.name]
            buckets = [each.members[0].gradient.name for each in replica.plan.buckets]
            if len(sharing) > 1 or replica.called_hook or not all(map(_is_launched_once, replica.plan.buckets)):
                buckets = []
            text = f"rank {rank}, module of {replica.names[0]}: synchronised backward {own.done + 1}, {own.launched}"
            text += f"{f' of {len(buckets)}' if buckets else ''} collectives launched; "
            if statuses is None:
                text += "the late rank is unknown: the key-value store does not answer (rank 0 or the launcher, which "
                text += f"serves it, has exited), or the monitor is off ({MONITOR_VARIABLE})"
            else:
                others = {each: statuses.get(each) for each in groups[topic] if each != rank}
                text += explain(topic, own, buckets, others)
            texts.append(text)
        return "\n".join(texts)

    def launched(self, topic: str) -> int:
        """Return how many collectives this backward launched for a replica, -1 if it does not reduce the replica."""
        replica = self._replicas.get(topic)
        return -1 if replica is None else _launched(replica) - self._bases[topic]

    def warn_if_stuck(self) -> None:
        """Log the late rank if the backward is stuck, again after twice the time, and so on. The monitor calls this."""
        if _place(self.thread).startswith(COMPILING):
            self._since_s = time.monotonic()
        limit_s, waited_s = monitor_after_s(), time.monotonic() - self._since_s
        if limit_s is not None and waited_s >= limit_s * 2**self._warnings:
            self._warnings += 1
            text = self.describe()
            if self in _backwards:
                warn(logger, "waiting for %.0f s in a backward. %s", waited_s, text)


_backwards: Final[list[Watched]] = []
"""Synchronised backwards in progress in any thread; a nested one follows the outer one."""
_failed: Final[dict[str, tuple[str, bool]]] = {}
"""The error of the latest backward by topic, and whether other ranks caused it."""


def _launched(replica: Replica) -> int:
    """Return how many collectives were launched, without those inside nodes: see `_is_launched_once`."""
    groups, levels = [replica.group.process_group], replica.group.levels
    if levels is not None and distributed.is_alive(groups[0]):
        groups.append(distributed.group_of_name(levels.between))
    return sum(distributed.collectives_launched(each, replica.device) for each in groups)


def _is_launched_once(bucket: Bucket) -> bool:
    """Return whether `_launched` counts one collective for a bucket. Paired sends are not counted as collectives."""
    ops = [stage.op for stage in bucket.key.reduction.stages if stage.link != INSIDE]
    return ops in ([ALL_REDUCE], [REDUCE_SCATTER])


def _place(thread: int | None) -> str:
    """Return the line of user code that a thread runs, after `COMPILING` if the thread compiles."""
    frame: FrameType | None = sys._current_frames().get(thread or 0)
    place = compiling = ""
    while frame is not None:
        code = frame.f_code
        compiling = COMPILING if compiler.is_of_compiler(code.co_filename) else compiling
        if not place and not code.co_filename.startswith(_NOT_THE_USERS):
            place = f"at {Path(code.co_filename).name}:{frame.f_lineno} in {code.co_name}"
        frame = frame.f_back
    return compiling + place


class Monitor:
    """The monitor thread and the state that it shares with other threads. The sleeping thread holds no replica."""

    def __init__(self) -> None:
        self._lock, self.wake = threading.RLock(), threading.Event()
        self._watched: weakref.WeakSet[Replica] = weakref.WeakSet()
        self._thread: threading.Thread | None = None
        self._store: distributed.Store | None = None  # set while the thread runs
        self._rank, self._beat, self._leaving = -1, 0, False

    def watch(self, replica: Replica) -> None:
        """Publish a replica's progress until the replica or the process group is gone, and warn of stuck backwards."""
        if not replica.group.has_others or monitor_after_s() is None:
            return
        with self._lock, contextlib.suppress(RuntimeError):  # without a store, errors have local information only
            self._watched.add(replica)
            self._rank = dist.get_rank()
            is_running = self._store is not None
            self._store = distributed.connect_again(distributed.default_store(), STORE_TIMEOUT_S)
            if not is_running:
                self._thread = threading.Thread(target=self._run, name="dp_compile monitor", daemon=True)
                self._thread.start()

    def leave(self) -> None:
        """Publish that this process exits, and join the thread, for at most 1 s more than the store's time-out.

        A thread that returns from native code after Python has finalized aborts the process (CPython 3.11: its
        `pthread_exit` unwinds pybind11's `noexcept` destructors).
        """
        self._leaving = True
        self.wake.set()
        if self._thread is not None:
            self._thread.join(timeout=STORE_TIMEOUT_S + 1.0)

    def read(self, ranks: Sequence[int]) -> Mapping[int, RankStatus] | None:
        """Return the status of each rank that publishes during this call or has exited; `None` if none is readable."""
        if (store := self._store) is None:
            return None
        found: dict[int, RankStatus] = {}
        with contextlib.suppress(RuntimeError, ValueError):
            found = before = read_statuses(store, ranks)
            # Rank 0 often serves the store and exits with its error, so it lets other ranks read first. When one rank
            # dies, all read at once: measured as 4 us per status on a TCPStore.
            for _ in range(6 + (self._rank == 0)):
                if self._leaving:
                    return found
                self._publish()  # other ranks may read too, and this may be the publishing thread
                time.sleep(_interval_s() / 2 + dist.get_world_size() / 600)
            after = read_statuses(store, ranks).items()
            found = {r: each for r, each in after if each.left or r not in before or each.beat != before[r].beat}
            return found
        return found or None

    def _run(self) -> None:
        while self._look():
            self.wake.wait(_interval_s())
            self.wake.clear()

    def _look(self) -> bool:
        """Publish the status and warn of stuck backwards. Return whether anything is left to watch."""
        with self._lock:
            ends = self._leaving or not self._watched or not dist.is_initialized()
            try:
                self._publish(left=ends)
            except RuntimeError:  # the store is gone
                ends = True
            if ends:
                self._store = None
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
            for topic, replica in [(each.module.topic, each) for each in self._watched]:
                launched = max((each.launched(topic) for each in running), default=-1)
                modules[topic] = Progress(replica.history.synced_backwards, launched, *_failed.get(topic, ()))
            thread = running[0].thread if running else threading.main_thread().ident
            status = RankStatus(self._beat, modules, "" if left else _place(thread), left)
            write_status(self._store, self._rank, status)


def _interval_s() -> float:
    """Return the publish interval in seconds: all ranks together write at most 1,000 statuses a second."""
    return max(1.0, dist.get_world_size() / 1000 if dist.is_initialized() else 0.0)


MONITOR: Final = Monitor()
_inherited: list[distributed.Store | None] = []


def _start_after_fork() -> None:
    """Reset the monitor in a forked child, which has no monitor thread and must not close the parent's connection."""
    _inherited.append(MONITOR._store)
    MONITOR.__init__()  # type: ignore[misc]
    _backwards.clear()


os.register_at_fork(after_in_child=_start_after_fork)
atexit.register(MONITOR.leave)
