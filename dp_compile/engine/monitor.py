"""Who is everybody waiting for? One thread in each process answers that, and asks when a backward does not end.

    a backward lasts too long, or fails            every other rank's thread, once a second
      number = add(asked)            ------->        a new number? say how far this rank is
      read what the others say       <-------        (it runs while the main thread waits, sleeps or compiles)
      log, or raise, who is behind

Ranks meet in the store of the default process group, over a connection of the thread's own. A step costs a few
attribute assignments and one read of a counter. The store gets one request per rank and second, and never more than
`MAX_REQUESTS_PER_S` of them from all ranks together: above that many ranks, threads look less often.
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
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Final

import torch
import torch.distributed as dist

from dp_compile._torch import compiler, distributed, pairs
from dp_compile.config import MONITOR_VARIABLE, monitor_after_s
from dp_compile.engine import agreement
from dp_compile.engine.flags import in_one_line
from dp_compile.engine.progress import AGREEING, COMPILING, Answers, Standing, View, Word, bucket_labels, explain
from dp_compile.engine.replica import Replica
from dp_compile.errors import CommunicationError, DesyncError

logger = logging.getLogger("dp_compile.monitor")
LOOK_EVERY_S: Final = 1.0
MAX_REQUESTS_PER_S: Final = 1000
STORE_TIMEOUT_S: Final = 10.0
READ_S_PER_RANK: Final = 0.01
"""When a rank dies all others ask at once. Each reads a word per rank, twice or so: 4 us a word, measured on a
TCPStore, so this leaves the store time for 1,000 ranks."""
_ASKED: Final = "dp_compile.monitor/asked"
_SAID: Final = "dp_compile.monitor/said"
_NOT_THE_USERS: Final = tuple(
    str(path)
    for path in (
        Path(__file__).parents[1],
        Path(torch.__file__).parent,
        sysconfig.get_path("stdlib"),
        sysconfig.get_path("purelib"),
        "<",
    )
)


class Watched:
    """A synchronised backward of some replicas, from entering to leaving it. An error that ends it is explained.

    Raises:
        CommunicationError: on leaving, in place of torch's error, if other ranks could not be reached.
    """

    __slots__ = ("_bases", "_outer", "_replicas", "_since_s", "_warnings", "thread")

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = tuple(replica for replica in replicas if replica.group.has_others)
        self._warnings = 0
        self.thread = threading.get_ident()

    def __enter__(self) -> Watched:
        self._since_s = time.monotonic()
        self.count_from_here()
        self._outer = _backwards.get(self.thread)
        if self._replicas:
            _backwards[self.thread] = self
        for replica in self._replicas:
            if (record := _records.get(replica.topic)) is not None:
                record.done, record.failed = replica.history.synced_backwards, ""
        return self

    def count_from_here(self) -> None:
        """Collectives launched so far are not those of the plan."""
        self._bases = [_launched(replica) for replica in self._replicas]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._replicas:
            return
        try:
            self._note(error)
            if error is not None and agreement.is_of_other_ranks(error) and not isinstance(error, CommunicationError):
                self._explain(error)
        finally:
            if self._outer is None:
                del _backwards[self.thread]
            else:
                _backwards[self.thread] = self._outer

    def _note(self, error: BaseException | None) -> None:
        for replica in self._replicas:
            record = _records.get(replica.topic)
            if record is None:
                continue
            if error is None:
                record.done = replica.history.synced_backwards
            else:
                record.failed, record.gave_up = in_one_line(error), agreement.is_of_other_ranks(error)
                _monitor.speak()

    def _explain(self, error: BaseException) -> None:
        text = self.describe(_monitor.ask(self.others()))
        if isinstance(error, DesyncError):
            raise DesyncError(f"{error} {text}.") from error
        raise CommunicationError(f"{text.rstrip('.?')}. torch says: {error}") from error

    def others(self) -> tuple[int, ...]:
        """The other ranks that this backward works with, by their global numbers."""
        groups = [dist.get_process_group_ranks(replica.group.process_group) for replica in self._replicas]
        return tuple(sorted({rank for group in groups for rank in group} - {dist.get_rank()}))

    def describe(self, answers: Answers) -> str:
        """Which backward this is, and who is waited for in which bucket."""
        texts = []
        for replica in self._replicas:
            ranks = dist.get_process_group_ranks(replica.group.process_group)
            others = tuple(rank for rank in ranks if rank != dist.get_rank())
            own = _Record(replica.history.backwards, replica.history.synced_backwards).standing(
                self.launched(replica.topic)
            )
            view = View(replica.topic, own, self._labels(replica), others, answers)
            texts.append(f"rank {dist.get_rank()}, module of {replica.names[0]}: {explain(view)}")
        return "\n".join(texts)

    def launched(self, topic: str) -> int | None:
        """Collectives of a replica's group that this backward has launched; `None` if the replica is not in it."""
        for replica, base in zip(self._replicas, self._bases, strict=True):
            if replica.topic == topic:
                return _launched(replica) - base
        return None

    def _labels(self, replica: Replica) -> tuple[str, ...]:
        sharing = [each for each in self._replicas if each.group.name == replica.group.name]
        return bucket_labels(replica.plan) if len(sharing) == 1 else ()

    def warn_if_stuck(self) -> None:
        """Called by the monitor's thread: log who is waited for, again each time the wait has doubled."""
        if _occupation(self.thread)[1] == COMPILING:
            self._since_s = time.monotonic()
        limit_s, waited_s = monitor_after_s(), time.monotonic() - self._since_s
        if limit_s is None or waited_s < limit_s * 2**self._warnings:
            return
        self._warnings += 1
        text = self.describe(_monitor.ask_now(self.others()))
        if _backwards.get(self.thread) is self:
            logger.warning("waiting for %.0f s in a backward. %s", waited_s, text)


@dataclass(slots=True)
class _Record:
    """What is told about one replica. It outlives the replica, so that a rank's last word is complete."""

    backwards: Counter[str]
    done: int = 0
    failed: str = ""
    gave_up: bool = False

    def standing(self, launched: int | None) -> Standing:
        local = self.backwards["without sync"] + self.backwards["captured without sync"]
        return Standing(self.done, local, launched, self.failed, self.gave_up)


_backwards: Final[dict[int, Watched]] = {}
"""The synchronised backward that each thread is in."""
_records: Final[dict[str, _Record]] = {}
"""By topic, which is the same on every rank."""


def _launched(replica: Replica) -> int:
    """Collectives of which each bucket has one: on two levels, those between nodes, or over all ranks at once."""
    group, levels = replica.group.process_group, replica.group.levels
    groups = [group]
    if levels is not None and distributed.is_alive(group):
        groups.append(distributed.group_of_name(levels.between))
    return sum(pairs.collectives_launched(each, replica.device) for each in groups)


# --- what this process is doing ---------------------------------------------------------------------------------


def _own_word(question: int, topics: Sequence[str], *, left: bool) -> Word:
    running = list(_backwards.values())
    standings = {}
    for topic in topics:
        launched = [each for each in (watched.launched(topic) for watched in running) if each is not None]
        standings[topic] = _records[topic].standing(launched[0] if launched else None)
    thread = running[0].thread if running else threading.main_thread().ident
    place, doing = ("", "") if left else _occupation(thread)
    return Word(question, standings, place, doing, left)


def _occupation(thread: int | None) -> tuple[str, str]:
    """The line of the user's code that a thread runs, and what it does if that is known."""
    frame: FrameType | None = sys._current_frames().get(thread or 0)
    place = doing = ""
    while frame is not None:
        file = frame.f_code.co_filename
        if file == agreement.__file__:
            doing = AGREEING
        elif not doing and compiler.is_of_compiler(file):
            doing = COMPILING
        if not place and not file.startswith(_NOT_THE_USERS):
            place = f"{Path(file).name}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return place, doing


# --- the thread -------------------------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class _Question:
    """Asked by a thread that waits until the monitor's thread has the answers."""

    ranks: tuple[int, ...]
    answered: threading.Event = field(default_factory=threading.Event)
    answers: Answers = field(default_factory=Answers)


class Monitor:
    """The thread, and what it shares with the others. Holds no replica while it sleeps."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watched: tuple[weakref.ref[Replica], ...] = ()
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._questions: deque[_Question] = deque()
        self._leaving = self._has_news = False
        self._reconnect = False
        self._store: distributed.Store | None = None
        self._rank = self._seen = -1
        self._trouble = ""

    def watch(self, replica: Replica) -> None:
        """Answer for a replica until it is gone, and warn when it is stuck."""
        if not replica.group.has_others or monitor_after_s() is None:
            return
        with self._lock:
            self._watched = (*(ref for ref in self._watched if ref() is not None), weakref.ref(replica))
            _records[replica.topic] = _Record(replica.history.backwards, replica.history.synced_backwards)
            self._reconnect = True
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="dp_compile monitor", daemon=True)
                self._thread.start()

    def unwatch(self, replica: Replica) -> None:
        """The replica is not one any more."""
        with self._lock:
            self._watched = tuple(ref for ref in self._watched if ref() not in (None, replica))
        self._wake.set()

    def speak(self) -> None:
        """Tell the others at once how far this rank is, without being asked."""
        self._has_news = True
        self._wake.set()

    def leave(self) -> None:
        """Tell the others that this program ends. Waits a moment for the thread, never long."""
        self._leaving = True
        self._wake.set()
        thread = self._thread
        if thread is not None:
            thread.join(timeout=LOOK_EVERY_S)

    def ask(self, ranks: Sequence[int]) -> Answers:
        """How far those ranks are. Called by any thread; takes some 4 s if one does not answer, or longer."""
        if self._thread is None or not self._thread.is_alive():
            return Answers(trouble=f"no rank could be asked, the monitor is off ({MONITOR_VARIABLE})")
        question = _Question(tuple(ranks))
        self._questions.append(question)
        self._wake.set()
        if not question.answered.wait(self._patience_s() + 2 * LOOK_EVERY_S):
            return Answers(trouble=_unanswered("no answer in time"))
        return question.answers

    def _run(self) -> None:
        while self._goes_on():
            self._look()
            self._wake.wait(self._interval_s())
            self._wake.clear()

    def _goes_on(self) -> bool:
        with self._lock:
            if not self._leaving and any(ref() is not None for ref in self._watched):
                return True
            self._thread = None
            with contextlib.suppress(RuntimeError, ValueError):
                self._say(left=True)
            self._store = None
            _records.clear()
        return False

    def _look(self) -> None:
        try:
            if self._reconnect:
                self._connect()
            self._answer()
            if self._has_news:
                self._say()
            for watched in list(_backwards.values()):
                watched.warn_if_stuck()
        except (RuntimeError, ValueError) as error:  # The store is gone, or the default group.
            self._store, self._trouble = None, _unanswered(str(error).strip().splitlines()[0])
        while self._questions:
            question = self._questions.popleft()
            question.answers = self.ask_now(question.ranks)
            question.answered.set()

    def _connect(self) -> None:
        self._reconnect, self._trouble = False, ""
        self._rank = dist.get_rank()  # still known when the default group is destroyed
        self._store = distributed.connect_again(distributed.default_store(), STORE_TIMEOUT_S)
        self._seen = int(self._store.add(_ASKED, 0))
        self._say()

    def _answer(self) -> None:
        if self._store is None or not self._store.check([f"{_ASKED}/{self._seen + 1}"]):
            return
        self._seen = int(self._store.add(_ASKED, 0))
        self._say()

    def _say(self, *, left: bool = False) -> None:
        self._has_news = False
        if self._store is not None:
            word = _own_word(self._seen, list(_records) if left else self._topics(), left=left)
            self._store.set(f"{_SAID}/{self._rank}", word.to_json())

    def _topics(self) -> list[str]:
        return [replica.topic for ref in self._watched if (replica := ref()) is not None]

    def ask_now(self, ranks: Sequence[int]) -> Answers:
        """As `ask`, in the monitor's thread. It says how far this rank is first: others may ask at the same time."""
        if self._store is None:
            return Answers(trouble=self._trouble)
        words: dict[int, Word] = {}
        try:
            self._seen = question = int(self._store.add(_ASKED, 1))
            self._store.set(f"{_ASKED}/{question}", "")
            self._say()
            # Rank 0 often serves the store and ends with its error: the others read first.
            deadline = time.monotonic() + self._patience_s() + 0.5 * (self._rank == 0)
            pause_s = max(0.1, len(ranks) * READ_S_PER_RANK / 2)
            while time.monotonic() < deadline and any(not _is_final(words.get(rank), question) for rank in ranks):
                time.sleep(pause_s)
                pause_s *= 1.5
                self._answer()
                self._read([rank for rank in ranks if not _is_final(words.get(rank), question)], words)
        except (RuntimeError, ValueError) as error:
            self._store, self._trouble = None, _unanswered(str(error).strip().splitlines()[0])
            if not words:
                return Answers(trouble=self._trouble)
        return Answers(question, words)

    def _read(self, ranks: Sequence[int], words: dict[int, Word]) -> None:
        assert self._store is not None
        keys = {rank: f"{_SAID}/{rank}" for rank in ranks}
        if not self._store.check(list(keys.values())):  # Some have never said anything: getting their word would block.
            keys = {rank: key for rank, key in keys.items() if self._store.check([key])}
        if keys:
            said = self._store.multi_get(list(keys.values()))
            words.update((rank, Word.from_json(text)) for rank, text in zip(keys, said, strict=True))

    def _interval_s(self) -> float:
        return max(LOOK_EVERY_S, _world_size() / MAX_REQUESTS_PER_S)

    def _patience_s(self) -> float:
        return 3 * self._interval_s() + 1.0 + _world_size() * READ_S_PER_RANK


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _is_final(word: Word | None, question: int) -> bool:
    return word is not None and (word.left or word.question >= question)


def _unanswered(error: str) -> str:
    return f"the key-value store does not answer, it ended with rank 0 or with the launcher ({error})"


_monitor = Monitor()
_inherited: list[Monitor] = []


def watch(replica: Replica) -> None:
    """Answer other ranks' questions on a replica from now on."""
    _monitor.watch(replica)


def unwatch(replica: Replica) -> None:
    """Stop to answer for a replica."""
    _monitor.unwatch(replica)


def _start_anew() -> None:
    """In a forked child there is no thread, and the connection belongs to the parent: it must not even be closed."""
    global _monitor
    _inherited.append(_monitor)
    _monitor = Monitor()
    _backwards.clear()


def _leave() -> None:
    _monitor.leave()


os.register_at_fork(after_in_child=_start_anew)
atexit.register(_leave)
