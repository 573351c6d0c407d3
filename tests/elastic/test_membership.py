"""Ranks that meet in a store, as threads."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from dp_compile.elastic.membership import LeftOutError, Members, Registry, TooFewRanksError
from dp_compile.errors import CommunicationError


@pytest.fixture
def store() -> dist.HashStore:
    return dist.HashStore()


def met(store: dist.HashStore, *processes: str, min_ranks: int = 1, wait_s: float = 0.0) -> list[Members]:
    """What these processes of a first generation agree on, all at once."""

    def meet(process: str) -> Members:
        registry = Registry(store, process)
        return registry.meet(Members.initial(3), grace_s=0.5, min_ranks=min_ranks, wait_s=wait_s)

    with ThreadPoolExecutor(len(processes)) as pool:
        return list(pool.map(meet, processes))


@pytest.mark.parametrize("is_known", [True, False])
def test_who_is_left_keeps_the_order(store: dist.HashStore, is_known: bool) -> None:
    if is_known:
        Registry(store, "1").leave()
    assert set(met(store, "2", "0")) == {Members(1, ("0", "2"))}
    assert Registry(store, "launcher").is_dead("1")


def test_the_first_one_dies_while_it_decides(store: dist.HashStore) -> None:
    dead = Registry(store, "0")
    dead.store.add("1/arrivals", 1)
    dead.store.set("1/arrival/1", "0")
    dead.leave()
    assert set(met(store, "1", "2")) == {Members(2, ("1", "2"))}


def test_the_first_one_dies_before_it_has_a_name(store: dist.HashStore) -> None:
    Registry(store, "0").store.add("1/arrivals", 1)
    assert set(met(store, "1", "2")) == {Members(2, ("1", "2"))}


def test_one_that_has_come_dies(store: dist.HashStore) -> None:
    dead, first = Registry(store, "1"), Registry(store, "2")
    dead.store.set("1/arrival/2", "1")
    dead.store.add("1/arrivals", 2)
    dead.leave()
    first._decide(Members.initial(3), 1, 0.2, 1, 0.0)
    assert json.loads(first.store.get("1/members")) == [1, ["2"], 0]


def test_one_comes_too_late(store: dist.HashStore) -> None:
    met(store, "0", "1")
    with pytest.raises(LeftOutError, match=r"process 2 was excluded: it reached the rendezvous more than 0\.5 s"):
        met(store, "2")


def test_too_few_are_left(store: dist.HashStore) -> None:
    with pytest.raises(TooFewRanksError, match="remaining ranks: 1, min_ranks: 2"):
        met(store, "1", min_ranks=2)


def test_processes_that_join_come_last_and_dead_ones_do_not(store: dist.HashStore) -> None:
    alive, dead = Registry(store, "new"), Registry(store, "old")
    dead.store.set("join/1", "old")
    dead.leave()
    dead.store.add("joins", 2)  # the second one has died before it wrote its name
    assert alive.wants_to_join(Members.initial(3))
    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(alive.join)
        Registry(store, "2").leave()
        expected = Members(1, ("0", "1", "new"), 3)
        assert set(met(store, "1", "0", min_ranks=3, wait_s=5.0)) == {expected}
        assert joined.result() == expected
    assert not alive.wants_to_join(expected)


def test_the_training_has_ended(store: dist.HashStore) -> None:
    registry = Registry(store, "new")
    Registry(store, "launcher").end()
    with pytest.raises(CommunicationError, match="process new cannot join: the training has ended"):
        registry.join()
