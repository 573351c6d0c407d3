"""Ranks compare statements: threads stand for ranks, a store in this process for the real one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from dp_compile.engine.agreement import Table, agree, collect, decide, exchange, first_difference
from dp_compile.errors import CommunicationError, DesyncError

SAME = {"options": {"cap": 25.0}, "parameters": [["weight", [4, 2]], ["bias", [4]]]}


def on_threads(ranks: Iterable[int], call: Callable[[int], Any]) -> dict[int, Any]:
    """What `call` returns on each rank, or the text of its error."""
    heard: dict[int, Any] = {}

    def run(rank: int) -> None:
        try:
            heard[rank] = call(rank)
        except DesyncError as error:
            heard[rank] = str(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return heard


def meet(statements: dict[int, Any], *, world_size: int, timeout_s: float = 20.0) -> dict[int, Any]:
    """Let the given ranks state something; the error text of each rank, `None` if it may go on."""
    store: Any = dist.HashStore()
    return on_threads(
        statements, lambda rank: agree(Table(store, rank, world_size, timeout_s), "topic", statements[rank])
    )


CALLS: dict[str, Callable[[Table], Any]] = {
    "agree": lambda table: agree(table, "topic", SAME),
    "decide": lambda table: decide(table, "topic", 1),
    "exchange": lambda table: exchange(table, "topic", 1),
    "collect": lambda table: collect(table, "topic", 1),
}


@pytest.mark.parametrize(("call", "rank"), [("agree", 0), ("agree", 1), ("decide", 1), ("exchange", 0), ("collect", 0)])
@pytest.mark.parametrize("before", [True, False])
def test_the_store_is_lost(call: str, rank: int, before: bool) -> None:
    """Before a rank asks, and while it waits: the error comes at once and is not one of a rank that did not come."""
    server: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client, other = (dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False) for _ in range(2))
    heard: list[BaseException] = []

    def ask() -> None:
        try:
            CALLS[call](Table(client, rank, 2, 60.0))
        except BaseException as error:
            heard.append(error)

    thread = threading.Thread(target=ask)
    if before:
        del server
        thread.start()
    else:
        thread.start()
        while not other.check([f"topic/{rank}"]) and call != "decide":
            time.sleep(0.01)
        time.sleep(0.1)
        del server
    thread.join(30.0)
    (error,) = heard
    assert isinstance(error, CommunicationError)
    assert "the key-value store does not answer after" in str(error)


def test_equal_statements() -> None:
    heard = meet(
        {rank: SAME for rank in range(3)} | {3: {**SAME, "parameters": (("weight", (4, 2)), ("bias", (4,)))}},
        world_size=4,
    )
    assert heard == dict.fromkeys(range(4))


def test_a_difference_is_named_on_every_rank() -> None:
    other = {**SAME, "parameters": [["weight", [4, 2]], ["bias", [8]]]}
    heard = meet({0: SAME, 1: SAME, 2: other}, world_size=3)
    assert set(heard.values()) == {"topic: rank 2 differs from rank 0: parameters[1][1][0] is 8 there, 4 on rank 0"}


def test_the_text_stays_short_when_many_ranks_differ() -> None:
    heard = meet({rank: {"cap": rank} for rank in range(9)}, world_size=9)
    assert len(set(heard.values())) == 1
    assert heard[0].count("differs") == 4


def test_many_missing_ranks_are_all_named_before_anybody_gives_up() -> None:
    """The one verdict comes in time for those who wait for it, however many ranks are missing."""
    heard = meet({0: SAME, 5: SAME}, world_size=6, timeout_s=2.0)
    assert set(heard.values()) == {"topic: ranks 1, 2, 3, 4 have not come to this place after 2 s"}


def test_the_first_rank_is_missing() -> None:
    heard = meet({1: SAME, 2: SAME}, world_size=3, timeout_s=0.1)
    assert all("rank 0 gave no verdict within 0.2 s" in text for text in heard.values())
    assert sorted(heard) == [1, 2]


@pytest.mark.parametrize("broken", [0, 1])
def test_an_error_on_one_rank_stops_all(broken: int) -> None:
    statements: dict[int, Any] = {rank: SAME for rank in range(3)}
    statements[broken] = {"error": "bucket_cap_mb must be > 0"}
    heard = meet(statements, world_size=3)
    assert set(heard.values()) == {f"topic: rank {broken} cannot go on: bucket_cap_mb must be > 0"}
    assert len(heard) == 3


@pytest.mark.parametrize(
    ("mine", "theirs", "text"),
    [
        ({"a": 1}, {"a": 1}, "no difference"),
        ({"a": 1}, {}, "a is missing there, 1 on rank 0"),
        ({}, {"a": 1}, "a is 1 there, missing on rank 0"),
        ({"a": None}, {"a": 1}, "a is 1 there, null on rank 0"),
        ({"a": []}, {"a": [["x"]]}, 'a[0] is ["x"] there, missing on rank 0'),
        ({"a": {"b": [0, {"c": "x"}]}}, {"a": {"b": [0, {"c": "y"}]}}, 'a.b[1].c is "y" there, "x" on rank 0'),
        (1, 2, "the value is 2 there, 1 on rank 0"),
    ],
)
def test_first_difference(mine: Any, theirs: Any, text: str) -> None:
    assert first_difference(mine, theirs) == text


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.text("ab", max_size=2),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", max_size=2), inner, max_size=3),
    max_leaves=8,
)


@given(JSON, JSON)
def test_a_difference_is_found_exactly_if_there_is_one(mine: Any, theirs: Any) -> None:
    assert (first_difference(mine, theirs) == "no difference") == (mine == theirs)


def test_what_all_ranks_learn() -> None:
    store: Any = dist.HashStore()
    tables = [Table(store, rank, 3, 20.0) for rank in range(3)]
    decided = on_threads(range(3), lambda rank: decide(tables[rank], "a", {"shares": [rank, 0.1]}))
    assert decided == {rank: {"shares": [0, 0.1]} for rank in range(3)}
    exchanged = on_threads(range(3), lambda rank: exchange(tables[rank], "b", rank))
    assert exchanged == {rank: [0, 1, 2] for rank in range(3)}
    collected = on_threads(range(3), lambda rank: collect(tables[rank], "c", rank))
    assert collected == {0: [0, 1, 2], 1: [], 2: []}


@pytest.mark.parametrize(
    ("call", "rank", "text"),
    [
        ("decide", 1, r"rank 0 has not decided within 0\.05 s.* \(topic\)"),
        ("collect", 0, r"rank 1 has not come to the same place .* within 0\.05 s.* \(topic\)"),
        ("exchange", 1, r"rank 0 has not come to the same place .* within 0\.05 s.* \(topic\)"),
    ],
)
def test_a_rank_that_is_missing(call: str, rank: int, text: str) -> None:
    with pytest.raises(DesyncError, match=text):
        CALLS[call](Table(dist.HashStore(), rank, 2, 0.05))
