"""Ranks compare statements: threads stand for ranks, a store in this process for the real one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from dp_compile.engine.agreement import Table, agree, collect, decide, exchange, first_difference
from dp_compile.errors import CommunicationError, DesyncError

SAME = {"options": {"cap": 25.0}, "parameters": [["weight", [4, 2]], ["bias", [4]]]}


def meet(store: Any, statements: dict[int, Any], *, world_size: int, timeout_s: float = 20.0) -> dict[int, str]:
    """Let the given ranks state something; the error text of each rank, empty if it may go on."""
    heard: dict[int, str] = {}

    def arrive(rank: int) -> None:
        try:
            agree(Table(store, rank, world_size, timeout_s), "topic", statements[rank])
            heard[rank] = ""
        except DesyncError as error:
            heard[rank] = str(error)

    threads = [threading.Thread(target=arrive, args=(rank,)) for rank in statements]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return heard


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
    heard = meet(dist.HashStore(), {rank: dict(SAME) for rank in range(4)}, world_size=4)
    assert heard == {0: "", 1: "", 2: "", 3: ""}


def test_one_rank_alone() -> None:
    assert meet(dist.HashStore(), {0: SAME}, world_size=1) == {0: ""}


def test_a_tuple_is_the_same_as_a_list() -> None:
    assert meet(dist.HashStore(), {0: {"shape": (1, 2)}, 1: {"shape": [1, 2]}}, world_size=2) == {0: "", 1: ""}


def test_over_a_file(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 2)
    assert meet(store, {0: SAME, 1: SAME}, world_size=2) == {0: "", 1: ""}


def test_a_difference_is_named_on_every_rank() -> None:
    other = {**SAME, "parameters": [["weight", [4, 2]], ["bias", [8]]]}
    heard = meet(dist.HashStore(), {0: SAME, 1: SAME, 2: other}, world_size=3)
    assert set(heard.values()) == {"topic: rank 2 differs from rank 0: parameters[1][1][0] is 8 there, 4 on rank 0"}


def test_the_first_rank_differs_from_all_others() -> None:
    heard = meet(dist.HashStore(), {0: {"cap": 1}, 1: {"cap": 2}, 2: {"cap": 2}}, world_size=3)
    assert all("rank 1 differs" in text and "rank 2 differs" in text for text in heard.values())
    assert len(heard) == 3


def test_the_text_stays_short_when_many_ranks_differ() -> None:
    heard = meet(dist.HashStore(), {rank: {"cap": rank} for rank in range(9)}, world_size=9)
    assert len(set(heard.values())) == 1
    assert heard[0].count("differs") == 4


def test_a_missing_rank() -> None:
    heard = meet(dist.HashStore(), {0: SAME, 2: SAME}, world_size=3, timeout_s=2.0)
    assert set(heard.values()) == {"topic: rank 1 has not come to this place after 2 s"}
    assert sorted(heard) == [0, 2]


def test_many_missing_ranks_are_all_named_before_anybody_gives_up() -> None:
    """The one verdict comes in time for those who wait for it, however many ranks are missing."""
    heard = meet(dist.HashStore(), {0: SAME, 5: SAME}, world_size=6, timeout_s=2.0)
    assert set(heard.values()) == {"topic: ranks 1, 2, 3, 4 have not come to this place after 2 s"}


def test_the_first_rank_is_missing() -> None:
    heard = meet(dist.HashStore(), {1: SAME, 2: SAME}, world_size=3, timeout_s=0.1)
    assert all("rank 0 gave no verdict within 0.2 s" in text for text in heard.values())
    assert sorted(heard) == [1, 2]


@pytest.mark.parametrize("broken", [0, 1])
def test_an_error_on_one_rank_stops_all(broken: int) -> None:
    statements: dict[int, Any] = {rank: SAME for rank in range(3)}
    statements[broken] = {"error": "bucket_cap_mb must be > 0"}
    heard = meet(dist.HashStore(), statements, world_size=3)
    assert set(heard.values()) == {f"topic: rank {broken} cannot go on: bucket_cap_mb must be > 0"}
    assert len(heard) == 3


def test_topics_do_not_mix() -> None:
    """Rank 1 says one thing under one topic and another under the other, rank 0 too, but the other way round."""
    store = dist.HashStore()
    said = {"first": ({"a": 1}, {"a": 2}), "second": ({"a": 3}, {"a": 3})}
    heard: dict[tuple[str, int], str] = {}

    def meet_at(rank: int) -> None:
        for topic, statements in said.items():
            try:
                agree(Table(store, rank, 2, 20.0), topic, statements[rank])
                heard[topic, rank] = "agreed"
            except DesyncError as error:
                heard[topic, rank] = str(error)

    threads = [threading.Thread(target=meet_at, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {heard["second", rank] for rank in range(2)} == {"agreed"}
    assert all("a is 2 there, 1 on rank 0" in heard["first", rank] for rank in range(2))


@pytest.mark.parametrize(
    ("mine", "theirs", "text"),
    [
        ({"a": 1}, {"a": 1}, "no difference"),
        ({"a": 1}, {"a": 2}, "a is 2 there, 1 on rank 0"),
        ({"a": 1}, {}, "a is missing there, 1 on rank 0"),
        ({}, {"a": 1}, "a is 1 there, missing on rank 0"),
        ({"a": None}, {"a": 1}, "a is 1 there, null on rank 0"),
        ({"a": []}, {"a": None}, "a is null there, [] on rank 0"),
        ({"a": None}, {}, "a is missing there, null on rank 0"),
        ({"a": [1, 2]}, {"a": [1]}, "a[1] is missing there, 2 on rank 0"),
        ({"a": []}, {"a": [["x"]]}, 'a[0] is ["x"] there, missing on rank 0'),
        ({"a": {"b": [0, {"c": "x"}]}}, {"a": {"b": [0, {"c": "y"}]}}, 'a.b[1].c is "y" there, "x" on rank 0'),
        ({"a": [1]}, {"a": {"b": 1}}, 'a is {"b": 1} there, [1] on rank 0'),
        ({"a": 1, "b": 1}, {"a": 2, "b": 2}, "a is 2 there, 1 on rank 0"),
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


def test_the_first_rank_decides() -> None:
    store = dist.HashStore()
    assert decide(Table(store, 0, 3, 1.0), "topic", {"shares": [1, 0.1]}) == {"shares": [1, 0.1]}
    assert decide(Table(store, 2, 3, 1.0), "topic", "not asked") == {"shares": [1, 0.1]}


def test_nobody_decides() -> None:
    with pytest.raises(DesyncError, match=r"rank 0 has not decided within 0\.05 s.* \(topic\)"):
        decide(Table(dist.HashStore(), 1, 2, 0.05), "topic", None)


def test_the_first_rank_hears_all() -> None:
    store = dist.HashStore()
    assert collect(Table(store, 1, 2, 1.0), "topic", [0.5]) == []
    assert collect(Table(store, 0, 2, 1.0), "topic", None) == [None, [0.5]]


def test_a_rank_says_nothing() -> None:
    with pytest.raises(DesyncError, match=r"rank 1 has not come to the same place .* within 0\.05 s.* \(topic\)"):
        collect(Table(dist.HashStore(), 0, 2, 0.05), "topic", None)


def test_exchange_tells_all_to_all() -> None:
    store, heard = dist.HashStore(), {}

    def say(rank: int) -> None:
        heard[rank] = exchange(Table(store, rank, 3, 20.0), "topic", {"rank": rank})

    threads = [threading.Thread(target=say, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert heard == {rank: [{"rank": 0}, {"rank": 1}, {"rank": 2}] for rank in range(3)}


def test_exchange_names_who_is_missing() -> None:
    with pytest.raises(DesyncError, match=r"rank 0 has not come to the same place .* within 0\.05 s.* \(topic\)"):
        exchange(Table(dist.HashStore(), 1, 2, 0.05), "topic", None)
