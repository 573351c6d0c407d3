"""Do all ranks mean the same? Compared over the key-value store, with a time-out, never inside the compiler.

Two rounds: every rank posts its statement; the first rank of the group reads them all and posts one verdict that
every rank reads. So all ranks go on, or all raise the same error. Traffic on the store is linear in the ranks.
What only one rank has to know the others read from it: `decide`. What all ranks have to know of each other, once and
rarely, as it is quadratic in the ranks: `exchange`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist

from dp_compile._torch import distributed
from dp_compile.errors import CommunicationError, DesyncError, VoidBackwardError

Statement = Mapping[str, Any]
_MISSING: Final = object()


class MissingRankError(DesyncError):
    """A rank did not come in time: where it is can be asked. Other disagreements say all there is to say."""


class LostStoreError(CommunicationError):
    """The key-value store is gone. So is all that ranks could say."""


def is_of_other_ranks(error: BaseException) -> bool:
    """Whether an error says that other ranks did not come, or cannot be reached."""
    if isinstance(error, VoidBackwardError):
        return False
    return isinstance(error, (MissingRankError, CommunicationError)) or distributed.is_communication_error(error)


@dataclass(frozen=True, slots=True)
class Table:
    """Where the ranks of one group meet: a place in the store that no other group uses."""

    store: distributed.Store
    rank: int
    world_size: int
    timeout_s: float

    def post(self, key: str, value: Any) -> None:
        """Let other ranks read plain JSON data."""
        with self._asking(self.timeout_s):
            self.store.set(key, json.dumps(value, sort_keys=True))

    def read(self, key: str, patience_s: float) -> Any:
        """What a rank has posted.

        Raises:
            RuntimeError: it is not there after `patience_s`.
        """
        with self._asking(patience_s):
            self.store.wait([key], timedelta(seconds=patience_s))
            return json.loads(self.store.get(key))

    @contextlib.contextmanager
    def _asking(self, patience_s: float) -> Iterator[None]:
        """A store raises one class for a wait that was in vain and for most other errors; the time tells which."""
        started_s = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            waited_s = time.monotonic() - started_s
            if isinstance(error, dist.DistNetworkError) or waited_s < patience_s / 2:
                raise LostStoreError(
                    f"rank {self.rank} of {self.world_size}: the key-value store does not answer after {waited_s:.1f} "
                    "s. It ended with the process that serves it, which is rank 0 or the launcher: look at its log "
                    f"first. torch says: {error}"
                ) from error
            raise


def agree(table: Table, topic: str, statement: Statement, *, call: str = "", verb: str = "called") -> None:
    """Return when every rank has made an equal statement on `topic`.

    Args:
        table: where to meet.
        topic: unique for this comparison on this table.
        statement: plain JSON data. A key `error` says that this rank cannot go on and why; all ranks then raise.
        call: the user's call that this is a part of, for errors; the topic stands in its place if it is not given.
        verb: what a missing rank has not done with that call.

    Raises:
        DesyncError: on every rank, if statements differ, if a rank reports an error, or if one is missing after
            `table.timeout_s`. The text names the rank and the first difference.
        LostStoreError: the store is gone, here and in all that follows.
    """
    table.post(f"{topic}/{table.rank}", statement)
    if table.rank == 0:
        own = json.loads(json.dumps(statement))
        table.post(f"{topic}/verdict", _judge(table, topic, own, call and f"{verb} {call}"))
    try:
        verdict, is_missing = table.read(f"{topic}/verdict", 2 * table.timeout_s)
    except LostStoreError:
        raise
    except RuntimeError as error:
        raise MissingRankError(
            f"{call or topic}: rank 0 gave no verdict within {2 * table.timeout_s:g} s. Is it alive, and does it call "
            f"{call or 'the same'}, for the same modules in the same order?"
        ) from error
    if verdict:
        raise (MissingRankError if is_missing else DesyncError)(f"{call or topic}: {verdict}")


def decide(table: Table, topic: str, value: Any) -> Any:
    """What rank 0 of the table says on `topic`. It does not wait for the others.

    Args:
        table: where to meet.
        topic: unique for this decision on this table.
        value: plain JSON data; only rank 0's counts.

    Raises:
        DesyncError: rank 0 has not said anything after `table.timeout_s`.
    """
    if table.rank == 0:
        table.post(f"{topic}/decision", value)
    try:
        return table.read(f"{topic}/decision", table.timeout_s)
    except LostStoreError:
        raise
    except RuntimeError as error:
        raise MissingRankError(
            f"rank 0 has not decided within {table.timeout_s:g} s. Is it alive, and does it run the same backwards as "
            f"this rank? ({topic})"
        ) from error


def collect(table: Table, topic: str, value: Any) -> list[Any]:
    """On rank 0 what each rank says on `topic`, by rank; nothing on the others, which do not wait.

    Raises:
        DesyncError: on rank 0, if a rank has not said anything after `table.timeout_s`.
    """
    table.post(f"{topic}/{table.rank}", value)
    if table.rank:
        return []
    return [_word_of(table, topic, rank) for rank in range(table.world_size)]


def exchange(table: Table, topic: str, value: Any) -> list[Any]:
    """What each rank says on `topic`, by rank, on every rank. Also a barrier: nobody returns before all have spoken.

    Args:
        table: where to meet.
        topic: unique for this exchange on this table.
        value: plain JSON data.

    Raises:
        DesyncError: some rank has not said anything after `table.timeout_s`; the text names it.
    """
    table.post(f"{topic}/{table.rank}", value)
    return [_word_of(table, topic, rank) for rank in range(table.world_size)]


def _word_of(table: Table, topic: str, rank: int) -> Any:
    try:
        return table.read(f"{topic}/{rank}", table.timeout_s)
    except LostStoreError:
        raise
    except RuntimeError as error:
        raise MissingRankError(
            f"rank {rank} has not come to the same place of its backward within {table.timeout_s:g} s. Is it alive, "
            f"and does it run the same backwards as this rank? ({topic})"
        ) from error


def _judge(table: Table, topic: str, own: Statement, deed: str) -> tuple[str, bool]:
    """The empty text if all ranks agree with the first, otherwise what is wrong; and whether a rank is missing."""
    missing: list[int] = []
    complaints: list[str] = []
    for rank in range(table.world_size):
        # One rank is waited for in full; once somebody is missing the others get a short look only, so that the
        # verdict comes before the ranks that wait for it give up.
        patience = max(0.01, min(1.0, table.timeout_s / (2 * table.world_size))) if missing else table.timeout_s
        try:
            other = table.read(f"{topic}/{rank}", patience)
        except LostStoreError:
            raise
        except RuntimeError:
            missing.append(rank)
            continue
        if "error" in other:
            complaints.append(f"rank {rank} cannot go on: {other['error']}")
        elif "error" not in own and other != own:
            complaints.append(f"rank {rank} differs from rank 0: {first_difference(own, other)}")
    if missing:
        complaints.append(_absent(missing, deed, table.timeout_s))
    return "; ".join(complaints[:4]), bool(missing)


def _absent(ranks: Sequence[int], deed: str, waited_s: float) -> str:
    named = ", ".join(map(str, ranks))
    subject = f"ranks {named} have" if len(ranks) > 1 else f"rank {named} has"
    return f"{subject} not {deed or 'come to this place'} after {waited_s:g} s"


def first_difference(mine: Any, theirs: Any) -> str:
    """The first place where two JSON values differ: `parameters[3].shape[0] is 8 there, 4 on rank 0`."""
    for path, here, there in _differences(mine, theirs, ""):
        return f"{path.lstrip('.') or 'the value'} is {there} there, {here} on rank 0"
    return "no difference"


def _differences(mine: Any, theirs: Any, path: str) -> Iterator[tuple[str, str, str]]:
    if isinstance(mine, dict) and isinstance(theirs, dict):
        for key in [*mine, *(key for key in theirs if key not in mine)]:
            if key not in mine or key not in theirs:
                yield f"{path}.{key}", _show(mine.get(key, _MISSING)), _show(theirs.get(key, _MISSING))
            else:
                yield from _differences(mine[key], theirs[key], f"{path}.{key}")
    elif isinstance(mine, list) and isinstance(theirs, list):
        for position, (here, there) in enumerate(itertools.zip_longest(mine, theirs, fillvalue=_MISSING)):
            yield from _differences(here, there, f"{path}[{position}]")
    elif mine != theirs:
        yield path, _show(mine), _show(theirs)


def _show(value: Any) -> str:
    return "missing" if value is _MISSING else json.dumps(value)
