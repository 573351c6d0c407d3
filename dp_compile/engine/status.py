"""What each process publishes of itself once a second, in the store of the default process group."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Final, NamedTuple

from dp_compile._torch import distributed

COMPILING: Final = "compiling, "
_KEY: Final = "dp_compile.monitor/{}"


class Progress(NamedTuple):
    """How far one rank is with one module.

    `done`: complete synchronised backwards. `launched`: collectives of the one in progress; -1: there is none.
    `failed`: the error that ended backward `done` + 1. `gave_up`: it only reports that other ranks are not reached.
    """

    done: int
    launched: int = -1
    failed: str = ""
    gave_up: bool = False


class RankStatus(NamedTuple):
    """What a process publishes: a number that grows, progress by topic, what runs, and whether the process has ended.

    `place`: the user's line, after `COMPILING` while torch compiles.
    """

    beat: int
    modules: dict[str, Progress]
    place: str = ""
    left: bool = False


def write_status(store: distributed.Store, rank: int, status: RankStatus) -> None:
    store.set(_KEY.format(rank), json.dumps(status))


def read_statuses(store: distributed.Store, ranks: Iterable[int]) -> dict[int, RankStatus]:
    """The latest status of each of these ranks that has published one, by rank in the default group."""
    keys = {rank: _KEY.format(rank) for rank in ranks}
    if not store.check(list(keys.values())):  # to get a key that was never set would block
        keys = {rank: key for rank, key in keys.items() if store.check([key])}
    texts = store.multi_get(list(keys.values())) if keys else []
    found = {rank: RankStatus(*json.loads(text)) for rank, text in zip(keys, texts, strict=True)}
    return {r: each._replace(modules={t: Progress(*of) for t, of in each.modules.items()}) for r, each in found.items()}
