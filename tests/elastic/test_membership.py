"""Ranks that meet in a store, as threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from unittest import mock

import pytest
import torch.distributed as dist

from dp_compile._torch.distributed import TCPStore
from dp_compile.elastic.membership import LeftOutError, Members, Registry, TooFewRanksError
from dp_compile.errors import CommunicationError


@pytest.fixture
def store() -> dist.HashStore:
    return dist.HashStore()


FIRST = Members(0, ("0", "1", "2"))


def registry_of(store: dist.HashStore, process: str) -> Registry:
    Registry(store, process, Members.initial(3))
    registry = Registry(store, process, FIRST)
    registry._ask("compare_set", "members", Members.initial(3).to_json(), FIRST.to_json())
    return registry


def met(store: dist.HashStore, *processes: str, min_ranks: int = 1, wait_s: float = 0.0) -> list[Members]:
    """What these processes of a first generation agree on, all at once."""

    def meet(process: str) -> Members:
        registry = registry_of(store, process)
        registry.meet(grace_s=0.5, min_ranks=min_ranks, wait_s=wait_s)
        return registry.members

    with ThreadPoolExecutor(len(processes)) as pool:
        return list(pool.map(meet, processes))


@pytest.mark.parametrize("is_known", [True, False])
def test_who_is_left_keeps_the_order(store: dist.HashStore, is_known: bool) -> None:
    if is_known:
        registry_of(store, "1").leave()
    assert set(met(store, "2", "0")) == {Members(1, ("0", "2"))}
    assert registry_of(store, "launcher").is_dead("1")


def test_the_first_one_is_suspended_while_it_decides(store: dist.HashStore) -> None:
    """The others meet again without it; what it decides later counts for nothing, and marks no one as left out."""
    zombie, ask = registry_of(store, "0"), Registry._ask
    once: list[set[Members]] = []

    def suspended(registry: Registry, operation: str, *arguments: object) -> object:
        if registry is zombie and operation == "compare_set" and not once:
            once.append(set())
            once[0] |= set(met(store, "1", "2"))
        return ask(registry, operation, *arguments)

    with mock.patch.object(Registry, "_ask", suspended), pytest.raises(LeftOutError):
        zombie.meet(grace_s=0.0, min_ranks=1, wait_s=0.0)
    assert once == [{Members(1, ("1", "2"))}]
    assert [zombie.is_dead(each) for each in "012"] == [True, False, False]


def test_the_first_one_dies_while_it_decides(store: dist.HashStore) -> None:
    dead = registry_of(store, "0")
    dead._ask("append", "0/arrivals/1", "0\n")
    dead.leave()
    assert set(met(store, "1", "2")) == {Members(1, ("1", "2"))}


def test_one_that_has_come_dies(store: dist.HashStore) -> None:
    dead = registry_of(store, "1")
    dead._ask("append", "0/arrivals/1", "2\n1\n")
    dead.leave()
    registry_of(store, "2")._decide("0/arrivals/1", 0.2, 1, 0.0)
    assert dead.current().processes == ("2",)


def test_one_comes_too_late(store: dist.HashStore) -> None:
    met(store, "0", "1")
    with pytest.raises(LeftOutError, match=r"process 2 was excluded: it reached the rendezvous more than 0\.5 s"):
        met(store, "2")


def test_too_few_are_left(store: dist.HashStore) -> None:
    with pytest.raises(TooFewRanksError, match="remaining ranks: 1, min_ranks: 2"):
        met(store, "1", min_ranks=2)


def test_processes_that_join_come_last_and_dead_ones_do_not(store: dist.HashStore) -> None:
    alive, dead = (Registry(store, each, Members(0, (each,))) for each in ("new", "old"))
    dead._ask("append", "joins", "old\n")
    dead.leave()
    member = registry_of(store, "0")
    assert member.wants_to_join()
    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(alive.join)
        registry_of(store, "2").leave()
        expected = Members(1, ("0", "1", "new"), 2)
        assert set(met(store, "1", "0", min_ranks=3, wait_s=5.0)) == {expected}
        joined.result()
    assert alive.members == expected
    assert not alive.wants_to_join()


def test_the_training_has_ended(store: dist.HashStore) -> None:
    registry = Registry(store, "new", Members(0, ("new",)))
    registry_of(store, "launcher").end()
    with pytest.raises(CommunicationError, match="process new cannot join: the training has ended"):
        registry.join()


def test_the_store_is_gone() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))
    client = TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=5))
    registry = Registry(client, "0", Members.initial(3))
    del server
    with pytest.raises(CommunicationError, match="process 0: the launcher's key-value store does not answer"):
        registry.meet(grace_s=0.5, min_ranks=1, wait_s=0.0)
