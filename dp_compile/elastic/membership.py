"""Group membership: ranks agree on the next generation of members at a rendezvous in the launcher's key-value store.

Keys: `members`: the current generation. Ranks replace it by its direct successor only, so a rank that was suspended
while deciding has no effect when it resumes. `G/arrivals/N`: the processes at rendezvous N after generation G. The
first process decides; if it does not, others start another rendezvous. `G/plan`: facts from which a joining process
computes its plan. `joins`: processes that requested to join. `dead/U`: process U has left, was excluded, or the
launcher saw it exit. `ended`: the training has ended, and no process can join.
"""

from __future__ import annotations

import itertools
import json
import time
from dataclasses import dataclass
from typing import Any, Final

from dp_compile._torch.distributed import PrefixStore, Store
from dp_compile.errors import CommunicationError
from dp_compile.replica.store_channel import LostStoreError

POLL_S: Final = 0.02


class LeftOutError(CommunicationError):
    """The other ranks continue without this one: it reached their rendezvous too late, or left with an error."""


class LostStateError(CommunicationError):
    """No remaining rank has parameters and states as they were at the end of a step."""


class TooFewRanksError(CommunicationError):
    """Fewer ranks remain than `min_ranks`."""


@dataclass(frozen=True, slots=True)
class Members:
    """The processes of a generation of the group, by rank: those of the last one, in its order, then those that joined.

    `joins`: the number of join requests handled so far: their processes were admitted or are dead.
    """

    generation: int
    processes: tuple[str, ...]
    joins: int = 0

    @staticmethod
    def initial(world_size: int) -> Members:
        """Return the processes that the launcher starts first, named by rank, before their first rendezvous."""
        return Members(-1, tuple(map(str, range(world_size))))

    def to_json(self) -> str:
        return json.dumps([self.generation, self.processes, self.joins])


class Registry:
    """One process's interface to the launcher's store. Every method raises `LostStoreError` if the store is gone.

    `members`: the generation with this process; until its first rendezvous, the initial one. `is_in_use`: whether a
    `Training` uses this registry. `backend`: the user's, kept for the next groups, because torch reports "undefined"
    for a group that was created without one.
    """

    def __init__(self, store: Store, process: str, members: Members) -> None:
        self.base, self.process, self.members = store, process, members
        self.is_in_use = False
        self.backend: str | None = None
        self._store = PrefixStore("dp_compile.elastic", store)
        if members.generation < 0:
            self._ask("compare_set", "members", "", members.to_json())

    def current(self) -> Members:
        """Return the latest generation, of which this process may not be a member."""
        generation, processes, joins = json.loads(self._ask("get", "members"))
        return Members(generation, tuple(processes), joins)

    def write_plan(self, facts: Any) -> None:
        """Publish facts, as plain data, from which joining processes compute this generation's plan."""
        self._ask("set", f"{self.members.generation}/plan", json.dumps(facts))

    def read_plan(self) -> Any:
        """Wait for the facts of `write_plan` and return them. Raises `CommunicationError` if the training has ended."""
        while not self._has(key := f"{self.current().generation}/plan"):  # the latest generation may change
            self._wait_as_one_that_joins()
        return json.loads(self._ask("get", key))

    def leave(self, process: str = "") -> None:
        """Mark this process, or the given one, as dead, so that the others do not wait for it."""
        self._ask("set", f"dead/{process or self.process}", "left")

    def end(self) -> None:
        self._ask("set", "ended", "")

    def wants_to_join(self) -> bool:
        return len(self._names("joins")) > self.members.joins

    def join(self) -> None:
        """Request to join; wait until members admit this process. Raises `CommunicationError` if training has ended."""
        self._ask("append", "joins", f"{self.process}\n")
        while self.process not in (current := self.current()).processes:
            self._wait_as_one_that_joins()
        self.members = current

    def meet(self, *, grace_s: float, min_ranks: int, wait_s: float) -> None:
        """Agree with the remaining members on the next generation. The first to arrive excludes missing members.

        `grace_s`: how long the first waits for members not known to be dead. `min_ranks`: least size of the new
        generation. `wait_s`: how long to wait for joining processes if fewer than `min_ranks` remain.
        """
        for number in itertools.count(1):
            arrivals = f"{self.members.generation}/arrivals/{number}"
            self._ask("append", arrivals, f"{self.process}\n")
            first = self._names(arrivals)[0]
            if first == self.process:
                self._decide(arrivals, grace_s, min_ranks, wait_s)
            else:  # start another rendezvous if the first one is dead or suspended
                end_s = time.monotonic() + grace_s + wait_s + 2.0
                while not self._is_over() and not self.is_dead(first) and time.monotonic() <= end_s:
                    time.sleep(POLL_S)
            if self._is_over():
                break
        members = self.current()
        if self.process not in members.processes:
            raise LeftOutError(
                f"process {self.process} was excluded: it reached the rendezvous more than {grace_s:g} s after the "
                "other ranks (slow, suspended, or network partition). End the process; a new one may join."
            )
        if len(members.processes) < min_ranks:
            raise TooFewRanksError(
                f"remaining ranks: {len(members.processes)}, min_ranks: {min_ranks}. Restart training from a "
                "checkpoint, or pass a smaller min_ranks."
            )
        self.members = members

    def _decide(self, arrivals: str, grace_s: float, min_ranks: int, wait_s: float) -> None:
        start_s, before = time.monotonic(), self.members
        while not self._is_over():
            waited_s = time.monotonic() - start_s
            arrived, asked = self._names(arrivals), self._names("joins")
            missing = [each for each in before.processes if each not in arrived and not self.is_dead(each)]
            left = [each for each in before.processes if each in arrived and not self.is_dead(each)]
            joined = [each for each in asked[before.joins :] if not self.is_dead(each)]
            is_complete = not missing or waited_s > grace_s
            if is_complete and (len(left) + len(joined) >= min_ranks or waited_s > wait_s):
                after = Members(before.generation + 1, (*left, *joined), len(asked))
                decided = self._ask("compare_set", "members", before.to_json(), after.to_json()).decode()
                for process in missing if decided == after.to_json() else ():
                    self._ask("set", f"dead/{process}", "left out")
            else:
                time.sleep(POLL_S)

    def is_dead(self, process: str) -> bool:
        """Return whether a process has exited, has left, or was excluded."""
        return self._has(f"dead/{process}")

    def _is_over(self) -> bool:
        """Return whether the members of this process's generation have agreed on the next one."""
        return self.current() != self.members

    def _wait_as_one_that_joins(self) -> None:
        if self._has("ended"):
            raise CommunicationError(f"process {self.process} cannot join: the training has ended.")
        time.sleep(POLL_S)

    def _has(self, key: str) -> bool:
        return bool(self._ask("check", [key]))

    def _names(self, key: str) -> list[str]:
        return self._ask("get", key).decode().splitlines() if self._has(key) else []

    def _ask(self, operation: str, *arguments: Any) -> Any:
        try:
            return getattr(self._store, operation)(*arguments)
        except RuntimeError as error:
            raise LostStoreError(
                f"process {self.process}: the launcher's key-value store does not answer, because `python -m "
                f"dp_compile.elastic` has ended. Restart the training from a checkpoint. torch says: {error}"
            ) from error
