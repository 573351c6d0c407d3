"""Who is in the group: ranks that are left meet in the launcher's key-value store and agree on the next generation.

Keys: `G/arrivals` counts the members that came to generation G, `G/arrival/N` says which; `G/members` is the verdict of
the first of them, for all. `joins` counts processes that want to join, `join/N` says which; `joined/U` is the first
generation of such a one. `dead/U`: process U has left, was left out, or the launcher saw it end. `ended`: the training
has, and no process can join.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass
from typing import Any, Final

from dp_compile._torch.distributed import PrefixStore, Store
from dp_compile.errors import CommunicationError

POLL_S: Final = 0.02
ENDED: Final = "ended"


class LeftOutError(CommunicationError):
    """The other ranks went on without this one: it came too late to their meeting."""


class LostStateError(CommunicationError):
    """No rank that is left has the parameters and states of the end of a step."""


class TooFewRanksError(CommunicationError):
    """Fewer ranks are left than training may go on with."""


@dataclass(frozen=True, slots=True)
class Members:
    """The processes of a generation, by rank: those of the one before keep their order, those that join follow.

    `joins`: how many processes have asked to join so far, and were taken in or are dead.
    """

    generation: int
    processes: tuple[str, ...]
    joins: int = 0

    @staticmethod
    def initial(world_size: int) -> Members:
        """Those that the launcher started first, named by their ranks."""
        return Members(0, tuple(map(str, range(world_size))))

    def to_json(self) -> str:
        return json.dumps([self.generation, self.processes, self.joins])

    @staticmethod
    def of(data: Any) -> Members:
        """What `to_json` wrote, once it is read."""
        generation, processes, joins = data
        return Members(generation, tuple(processes), joins)


class Registry:
    """The store, as one process uses it."""

    def __init__(self, store: Store, process: str) -> None:
        self.base, self.store, self.process = store, PrefixStore("dp_compile.elastic", store), process
        self.is_in_use = False

    def write(self, key: str, value: Any) -> None:
        self.store.set(key, json.dumps(value))

    def read(self, key: str) -> Any:
        """What a member has written under a key, or will have.

        Raises:
            CommunicationError: the training has ended.
        """
        if not self._wait(key, math.inf, unless=ENDED):
            raise CommunicationError(f"process {self.process} cannot join: the training has ended.")
        return json.loads(self.store.get(key))

    def leave(self, process: str = "") -> None:
        """The others need not wait for this process, or for the given one."""
        self.store.set(f"dead/{process or self.process}", "left")

    def end(self) -> None:
        """No process can join any more."""
        self.store.set(ENDED, "")

    def is_member(self, process: str) -> bool:
        """Whether a process was among the first ones, or was taken in."""
        return process.isdecimal() or bool(self.store.check([f"joined/{process}"]))

    def wants_to_join(self, members: Members) -> bool:
        """Whether a process waits to join."""
        return self.store.add("joins", 0) > members.joins

    def join(self) -> Members:
        """Ask to join, and wait until the members have taken this process in.

        Raises:
            CommunicationError: the training has ended.
        """
        number = self.store.add("joins", 1)
        self.store.set(f"join/{number}", self.process)
        return Members.of(self.read(f"joined/{self.process}"))

    def meet(self, before: Members, *, grace_s: float, min_ranks: int, wait_s: float) -> Members:
        """Agree with the members that are left on the next generation. Who is missed by the first is left out.

        Args:
            before: the generation that ended, or whose group could not be made.
            grace_s: how long the first one to come waits for members that are not known to be dead.
            min_ranks: of the new generation; `wait_s`: how long to wait for processes that join if there are fewer.

        Raises:
            LeftOutError: this process is not in the new generation.
            TooFewRanksError: there are fewer than `min_ranks`.
        """
        generation = before.generation + 1
        while True:
            number = self.store.add(f"{generation}/arrivals", 1)
            self.store.set(f"{generation}/arrival/{number}", self.process)
            first, verdict = f"{generation}/arrival/1", f"{generation}/members"
            if number == 1:
                self._decide(before, generation, grace_s, min_ranks, wait_s)
            elif not self._wait(first, 1.0) or not self._wait(
                verdict, grace_s + wait_s + 2.0, unless=f"dead/{self.store.get(first).decode()}"
            ):
                generation += 1  # the first one died: the others meet again
                continue
            members = Members.of(json.loads(self.store.get(verdict)))
            if len(members.processes) < min_ranks:
                raise TooFewRanksError(
                    f"remaining ranks: {len(members.processes)}, min_ranks: {min_ranks}. Restart training from a "
                    "checkpoint, or pass a smaller min_ranks."
                )
            if self.process not in members.processes:
                raise LeftOutError(
                    f"process {self.process} was excluded: it reached the rendezvous more than {grace_s:g} s after "
                    "the other ranks (slow, suspended, or network partition). End the process; a new one may join."
                )
            return members

    def _decide(self, before: Members, generation: int, grace_s: float, min_ranks: int, wait_s: float) -> None:
        start_s, arrived, joined, joins = time.monotonic(), {self.process}, list[str](), before.joins
        while True:
            waited_s = time.monotonic() - start_s
            for number in range(len(arrived) + 1, self.store.add(f"{generation}/arrivals", 0) + 1):
                if self._wait(f"{generation}/arrival/{number}", 1.0):
                    arrived.add(self.store.get(f"{generation}/arrival/{number}").decode())
            missing = [each for each in before.processes if each not in arrived and not self.is_dead(each)]
            while joins < self.store.add("joins", 0):
                joins += 1  # also without a name: the process died before it wrote that
                if self._wait(f"join/{joins}", 1.0):
                    joined.append(self.store.get(f"join/{joins}").decode())
            joined = [each for each in joined if not self.is_dead(each)]
            left = [each for each in before.processes if each in arrived and not self.is_dead(each)]
            is_complete = not missing or waited_s > grace_s
            if is_complete and (len(left) + len(joined) >= min_ranks or waited_s > wait_s):
                break
            time.sleep(POLL_S)
        members = Members(generation, (*left, *joined), joins)
        self.store.set(f"{generation}/members", members.to_json())
        for process in missing:
            self.store.set(f"dead/{process}", "left out")
        for process in joined:
            self.store.set(f"joined/{process}", members.to_json())

    def is_dead(self, process: str) -> bool:
        """Whether a process has ended, has left, or was left out."""
        return bool(self.store.check([f"dead/{process}"]))

    def _wait(self, key: str, timeout_s: float, unless: str = "") -> bool:
        """Whether a key is there within a time-out; `unless`: and before another one is."""
        end_s = time.monotonic() + timeout_s
        while not self.store.check([key]):
            if time.monotonic() > end_s or (unless and self.store.check([unless])):
                return bool(self.store.check([key]))
            time.sleep(POLL_S)
        return True
