"""All-to-all and all-gather over gloo, a message for each pair of ranks: what torch gives, in any order."""

from __future__ import annotations

import gc
import time
import weakref
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dp_compile._torch import distributed, pairs
from dp_compile.fx.collectives import WAIT
from dp_compile.testing.ranks import Ranks

CPU = torch.device("cpu")


def exchanged() -> None:
    evens = dist.new_group([0, 2])
    for group in (dist.group.WORLD, evens):
        if group is evens and dist.get_rank() % 2:
            continue
        name, ranks, rank = distributed.group_name(group), dist.get_world_size(group), dist.get_rank(group)
        assert pairs.take_turns(name, CPU)
        for dtype in (torch.float32, torch.bfloat16, torch.int8, torch.float8_e5m2):
            numbers = torch.arange(3 * ranks).add(20 * rank)
            sent, turned = numbers.to(dtype), numbers.flip(0).to(dtype)
            # Several at once, which end in another order than they begin.
            several = [pairs.all_to_all(sent, name), pairs.all_gather(sent, name), pairs.all_to_all(turned, name)]
            parts, gathered, flipped = [result for result, work in several[::-1] if work.wait()][::-1]
            for given, found in ((sent, parts), (turned, flipped)):
                result = torch.empty_like(given.view(torch.uint8))
                dist.all_to_all_single(result, given.view(torch.uint8), group=group)
                assert torch.equal(found.view(torch.uint8), result)
            whole = torch.empty(ranks * sent.nbytes, dtype=torch.uint8)
            dist.all_gather_into_tensor(whole, sent.view(torch.uint8), group=group)
            assert torch.equal(gathered.view(torch.uint8), whole)
            memory = torch.empty(3 * ranks * ranks, dtype=dtype)
            place = memory.view(ranks, -1)[rank]
            place.copy_(sent)
            in_place, other = pairs.all_gather(place, name, into=memory)
            assert other.wait()
            assert in_place.data_ptr() == memory.data_ptr()
            assert torch.equal(in_place.view(torch.uint8), whole)
            for op, expected in ((pairs.ALL_TO_ALL, parts), (pairs.ALL_GATHER, gathered)):
                made = op(sent, ranks, name)
                kept = weakref.ref(made)
                assert torch.equal(WAIT(made).view(torch.uint8), expected.view(torch.uint8))
                del made
                assert kept() is None


def test_as_torch_s_collectives(ranks4: Ranks) -> None:
    ranks4.run(exchanged)


def dropped() -> None:
    """By an exception, before the other rank has sent anything."""
    group = dist.new_group(timeout=timedelta(seconds=10))
    name, ranks, rank = distributed.group_name(group), dist.get_world_size(), dist.get_rank()
    for number in range(3):
        dist.barrier()
        time.sleep(0.3 * (rank == number % ranks))
        pairs.all_to_all(torch.full((ranks * 50_000,), -1.0), name)
        gc.collect()
    if rank:
        pairs.wait_for_all(name)
    received, work = pairs.all_to_all(torch.full((2 * ranks,), float(rank)), name)
    work.wait()
    work.wait()
    assert received.tolist() == [float(each) for each in range(ranks) for _ in range(2)]


def test_an_exchange_that_is_dropped(own_ranks: Ranks) -> None:
    """Its receives go on: gloo reads nothing behind one whose buffer is gone (torch 2.13)."""
    own_ranks.run(dropped)


def waited_behind_a_profiler() -> None:
    """What has been freed is used again, by what a crash is then seen in."""
    group = dist.group.WORLD
    assert group is not None
    name = distributed.group_name(group)
    for _ in range(20):
        with torch.profiler.profile() as profile:
            works = [pairs.all_gather(torch.ones(1000), name)[1] for _ in range(20)]
            with torch.profiler.record_function("behind a launch"):
                pass
        assert [event.key for event in profile.key_averages() if "recv" in event.key] == []
        assert "behind a launch" in [event.key for event in profile.key_averages()]  # what follows is recorded
        del profile
        gc.collect()
        in_its_place = [bytearray(64) for _ in range(100_000)]
        for work in works:
            work.wait()
        assert not any(map(any, in_its_place))


def test_a_profiler_that_ends_before_an_exchange(own_ranks: Ranks) -> None:
    """gloo's receives wrote into memory that it had freed (torch 2.13)."""
    own_ranks.run(waited_behind_a_profiler)


def counted() -> int:
    group = dist.group.WORLD
    assert group is not None
    name, ranks = distributed.group_name(group), dist.get_world_size()
    before = pairs.collectives_launched(group, CPU)
    for _, work in (pairs.all_to_all(torch.ones(ranks), name), pairs.all_gather(torch.ones(2), name)):
        work.wait()
    return pairs.collectives_launched(group, CPU) - before


def test_an_exchange_counts_as_one_collective(ranks4: Ranks) -> None:
    """By the number of collectives launched it is told who is missing in which bucket."""
    assert ranks4.run(counted) == [2] * 4


@pytest.mark.parametrize("exchange", [pairs.all_to_all, pairs.all_gather])
def test_receives_are_posted_before_sends(exchange: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo says that a rank is ready to receive behind what that rank sends. What is sent stays until then."""
    posted: list[str] = []

    def message(kind: str) -> Any:
        def post(tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
            posted.append(f"{kind} {rank}")
            return SimpleNamespace(wait=lambda: posted.append(f"waited {kind} {rank}"))

        return post

    group = SimpleNamespace(size=lambda: 3, rank=lambda: 1, recv=message("recv"), send=message("send"))
    monkeypatch.setattr(distributed, "group_of_name", lambda _: group)
    sent = torch.ones(6)
    kept = weakref.ref(sent)
    _, work = exchange(sent, "a group")
    del sent
    assert posted == ["recv 0", "recv 2", "send 2", "send 0"]
    assert kept() is not None
    work.wait()
    assert posted[4:] == [f"waited {each}" for each in posted[:4]]
    assert kept() is None
