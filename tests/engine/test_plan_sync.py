"""The plan of the first backward, the same on every rank; and how ranks compare what they state."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from parity import AOT
from torch import nn

import dp_compile
from dp_compile.engine import plan_sync
from dp_compile.engine.plan_sync import Table, agree, decide, exchange, first_difference
from dp_compile.engine.replica import Replica
from dp_compile.errors import CommunicationError, DesyncError
from dp_compile.insight.report import Report
from dp_compile.plan.buckets import UNUSED_FLAGS, BucketPlan
from dp_compile.plan.ready_times import ReadyTimes
from dp_compile.replication.module import replica_of
from dp_compile.testing.ranks import Ranks


class Backwards(nn.Module):
    """Uses its layers in the opposite order of their definition, so the parameters' order is the wrong one."""

    def __init__(self, layers: int = 4, width: int = 24) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in reversed(self.layers):
            x = torch.tanh(layer(x))
        return x


def names(plan: BucketPlan) -> list[str]:
    return [gradient.name for gradient in plan.gradients if gradient.name != UNUSED_FLAGS]


def step(model: Any, x: torch.Tensor) -> None:
    model(x).square().mean().backward()


def test_launch_order_is_that_of_the_graph(fake_group: dist.ProcessGroup) -> None:
    model = dp_compile.replicate(Backwards(), config=AOT)
    assert names(dp_compile.report(model).plan)[0] == "layers.3.bias"
    compiled = torch.compile(model, backend="aot_eager")
    step(compiled, torch.randn(8, 24))
    report = dp_compile.report(model)
    order = [name for name in names(report.plan) if name.endswith("weight")]
    assert order == [f"layers.{number}.weight" for number in range(4)]
    assert "estimated from the captured graph" in str(report)
    captures = torch._dynamo.utils.counters["compiled_autograd"]["captures"]
    step(compiled, torch.randn(8, 24))
    step(compiled, torch.randn(8, 24))
    assert dp_compile.report(model).plan == report.plan
    assert len(dp_compile.report(model).captures) == 2  # gradients None, gradients kept
    assert torch._dynamo.utils.counters["compiled_autograd"]["captures"] <= captures + 1


def train(options: dict[str, Any], steps: int, eager_at: tuple[int, int] = (-1, -1)) -> tuple[Report, torch.Tensor]:
    """Rank `eager_at[0]` cannot capture backward number `eager_at[1]`. Returns the report and a parameter."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    ours = dp_compile.replicate(Backwards(), config=dataclasses.replace(AOT, **options))
    compiled = torch.compile(ours, backend="aot_eager")
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    for number in range(steps):
        x = torch.randn(8, 24, generator=torch.Generator().manual_seed(2 * number + dist.get_rank()))
        optimizer.zero_grad()
        with torch.autograd.set_detect_anomaly(eager_at == (dist.get_rank(), number), check_nan=False):
            step(compiled, x)
        optimizer.step()
    return dp_compile.report(ours), next(ours.parameters()).detach()


@pytest.mark.parametrize("who", [0, 1])
def test_one_rank_cannot_capture_the_first_backward(ranks: Ranks, who: int) -> None:
    one, other, *_ = ranks.run(train, {}, 3, (who, 0))
    assert one[0].plan == other[0].plan
    assert torch.equal(one[1], other[1])
    estimated = names(one[0].plan)[0] == "layers.0.bias"
    assert estimated == (who == 1)  # rank 0 decides; without a graph the plan stays


# --- the same plan on every rank -----------------------------------------------------------------------------------


def plan_otherwise_on_rank_1() -> tuple[str, list[str]]:
    """Rank 1 takes two equal gradients in another order, as another `sum` of floats could: the error, and the plan."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    ours = dp_compile.replicate(Backwards(3), config=AOT)
    replica, make = replica_of(ours), plan_sync.plan_from_times

    def made_otherwise(replica: Replica, times: ReadyTimes) -> Any:
        if dist.get_rank() == 1:
            swapped = {0: times.shares[2], 2: times.shares[0]}
            times = dataclasses.replace(times, shares={**times.shares, **swapped})
        return make(replica, times)

    with mock.patch.object(plan_sync, "plan_from_times", made_otherwise), pytest.raises(DesyncError) as error:
        step(torch.compile(ours, backend="aot_eager"), torch.ones(8, 24) * (1 + dist.get_rank()))
    return str(error.value), names(replica.plan)


def test_a_plan_that_differs_is_found_before_it_is_used(ranks2: Ranks) -> None:
    """Two gradients would be added to each other without a word (D5)."""
    one, other = ranks2.run(plan_otherwise_on_rank_1)
    for error, _ in (one, other):
        assert "rank 1 differs from rank 0: the new plan" in error
    assert one[1] == other[1]  # the plan of before, which all have


# --- statements: threads stand for ranks, a store in this process for the real one -----------------------------------


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
}


@pytest.mark.parametrize(("call", "rank"), [("agree", 0), ("agree", 1), ("decide", 1), ("exchange", 0)])
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


def test_a_difference_is_named_on_every_rank() -> None:
    other = {**SAME, "parameters": [["weight", [4, 2]], ["bias", [8]]]}
    heard = meet({0: SAME, 1: SAME, 2: other}, world_size=3)
    assert set(heard.values()) == {"topic: rank 2 differs from rank 0: parameters[1][1][0] is 8 there, 4 on rank 0"}


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
        ({"a": []}, {"a": [["x"]]}, 'a[0][0] is "x" there, missing on rank 0'),
        ({"a": {"b": [0, {"c": "x"}]}}, {"a": {"b": [0, {"c": "y"}]}}, 'a.b[1].c is "y" there, "x" on rank 0'),
        (1, 2, "the value is 2 there, 1 on rank 0"),
    ],
)
def test_first_difference(mine: Any, theirs: Any, text: str) -> None:
    assert first_difference(mine, theirs) == text


def test_what_all_ranks_learn() -> None:
    store: Any = dist.HashStore()
    tables = [Table(store, rank, 3, 20.0) for rank in range(3)]
    decided = on_threads(range(3), lambda rank: decide(tables[rank], "a", {"shares": [rank, 0.1]}))
    assert decided == {rank: {"shares": [0, 0.1]} for rank in range(3)}
    exchanged = on_threads(range(3), lambda rank: exchange(tables[rank], "b", rank))
    assert exchanged == {rank: [0, 1, 2] for rank in range(3)}


@pytest.mark.parametrize(
    ("call", "rank", "text"),
    [
        ("decide", 1, r"topic: rank 0 has not decided within 0\.05 s"),
        ("exchange", 0, r"topic: rank 1 has not come to this place after 0\.05 s"),
        ("exchange", 1, r"topic: rank 0 gave no verdict within 0\.1 s"),
    ],
)
def test_a_rank_that_is_missing(call: str, rank: int, text: str) -> None:
    with pytest.raises(DesyncError, match=text):
        CALLS[call](Table(dist.HashStore(), rank, 2, 0.05))
