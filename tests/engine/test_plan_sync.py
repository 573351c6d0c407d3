"""The plan of the first backward, the same on every rank; and how ranks compare what they state."""

import contextlib
import dataclasses
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from parity import AOT, eagerly
from torch import nn

import dp_compile
from dp_compile._torch import inductor
from dp_compile.engine import plan_sync
from dp_compile.errors import CommunicationError, DesyncError
from dp_compile.plan.buckets import UNUSED_FLAGS
from dp_compile.replica import store_channel
from dp_compile.replica.store_channel import (
    RankStatus,
    StoreChannel,
    all_gather_object,
    broadcast_object,
    check_consistent,
    write_status,
)
from dp_compile.replication.module import replica_of


class Backwards(nn.Module):
    """Uses its layers in the opposite order of their definition, so the parameters' order is the wrong one."""

    def __init__(self, layers=4, width=24):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x):
        for layer in reversed(self.layers):
            x = torch.tanh(layer(x))
        return x


def names(plan):
    return [gradient.name for gradient in plan.gradients if gradient.name != UNUSED_FLAGS]


def step(model, x):
    model(x).square().mean().backward()


def test_launch_order_is_that_of_the_graph(fake_group):
    model = dp_compile.replicate(Backwards(), config=AOT)
    assert names(dp_compile.report(model).plan)[0] == "layers.3.bias"
    compiled = torch.compile(model, backend="aot_eager")
    step(compiled, torch.randn(8, 24))
    report = dp_compile.report(model)
    order = [name for name in names(report.plan) if name.endswith("weight")]
    assert order == [f"layers.{number}.weight" for number in range(4)]
    assert "by their estimated work" in dp_compile.step_of(model).ready.basis
    captures = torch._dynamo.utils.counters["compiled_autograd"]["captures"]
    model.zero_grad()
    step(compiled, torch.randn(8, 24))
    assert len(dp_compile.report(model).captures) == 1
    step(compiled, torch.randn(8, 24))
    assert dp_compile.report(model).plan == report.plan
    assert len(dp_compile.report(model).captures) == 2  # gradients None, gradients kept
    assert torch._dynamo.utils.counters["compiled_autograd"]["captures"] <= captures + 1


def train(eager_rank):
    """That rank cannot capture the first backward. Returns the plan and a parameter."""
    torch.manual_seed(0)
    ours = dp_compile.replicate(Backwards(), config=AOT)
    compiled = torch.compile(ours, backend="aot_eager")
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    for number in range(3):
        x = torch.randn(8, 24, generator=torch.Generator().manual_seed(2 * number + dist.get_rank()))
        optimizer.zero_grad()
        with eagerly((eager_rank, 0) == (dist.get_rank(), number)):
            step(compiled, x)
        optimizer.step()
    return dp_compile.report(ours).plan, next(ours.parameters()).detach()


@pytest.mark.parametrize("eager_rank", [0, 1])
def test_one_rank_cannot_capture_the_first_backward(ranks, eager_rank):
    one, other, *_ = ranks.run(train, eager_rank)
    assert one[0] == other[0]
    assert torch.equal(one[1], other[1])
    estimated = names(one[0])[0] == "layers.0.bias"
    assert estimated == (eager_rank == 1)  # rank 0 decides; without a graph the plan stays


def compile_longer_than_a_collective_may_take(fails):
    """Rank 1 does, and then fails if `fails`. Returns a parameter and how many graphs of the backward are captured."""
    torch.manual_seed(0)
    group = dist.new_group(timeout=timedelta(seconds=4))
    model = dp_compile.replicate(Backwards(), process_group=group, config=AOT)
    compile_plainly, begun_s = inductor.compile_with_aot_eager, time.monotonic()

    def compile_slowly(*args):
        while dist.get_rank() == 1 and time.monotonic() < begun_s + 8:
            time.sleep(0.1)
        if dist.get_rank() == 1 and fails:
            raise RuntimeError("planted")
        return compile_plainly(*args)

    with (
        mock.patch.object(inductor, "compile_with_aot_eager", compile_slowly),
        mock.patch.object(store_channel, "LOOK_EVERY_S", 1.0),
    ):
        step(torch.compile(model, backend="aot_eager"), torch.full((8, 24), 1.0 + dist.get_rank()))
    grad = next(model.parameters()).grad
    return grad, len(dp_compile.report(model).captures)


@pytest.mark.parametrize("fails", [False, True])
def test_a_backward_is_compiled_for_longer_than_a_collective_may_take(ranks2, fails):
    one, other = ranks2.run(compile_longer_than_a_collective_may_take, fails)
    assert torch.equal(one[0], other[0])
    assert (one[1], other[1]) == (1, 0 if fails else 1)


def plan_otherwise_on_rank_1():
    """Rank 1 takes two equal gradients in another order, as another `sum` of floats could: the error, and the plan."""
    torch.manual_seed(0)
    ours = dp_compile.replicate(Backwards(3), config=AOT)
    replica, make = replica_of(ours), plan_sync.plan_from_times

    def made_otherwise(replica, times):
        if dist.get_rank() == 1:
            swapped = {0: times.shares[2], 2: times.shares[0]}
            times = dataclasses.replace(times, shares={**times.shares, **swapped})
        return make(replica, times)

    with mock.patch.object(plan_sync, "plan_from_times", made_otherwise), pytest.raises(DesyncError) as error:
        step(torch.compile(ours, backend="aot_eager"), torch.ones(8, 24) * (1 + dist.get_rank()))
    return str(error.value), names(replica.plan)


def test_a_plan_that_differs_is_found_before_it_is_used(ranks2):
    """Two gradients would be added to each other without a word (D5)."""
    one, other = ranks2.run(plan_otherwise_on_rank_1)
    for error, _ in (one, other):
        assert "rank 1 differs from rank 0: the new plan" in error
    assert one[1] == other[1]  # the plan of before, which all have


CALLS = {
    "check_consistent": lambda channel: check_consistent(channel, "topic", {"options": {"cap": 25.0}}),
    "broadcast_object": lambda channel: broadcast_object(channel, "topic", 1),
    "all_gather_object": lambda channel: all_gather_object(channel, "topic", 1),
}


@pytest.mark.parametrize(
    ("call", "rank"),
    [("check_consistent", 0), ("check_consistent", 1), ("broadcast_object", 1), ("all_gather_object", 0)],
)
@pytest.mark.parametrize("before", [True, False])
def test_the_store_is_lost(call, rank, before):
    """Before a rank asks, and while it waits: the error comes at once and is not one of a rank that did not come."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client, other = (dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False) for _ in range(2))
    with ThreadPoolExecutor(1) as pool:
        if before:
            del server
        asked = pool.submit(CALLS[call], StoreChannel(client, rank, 2, 60.0))
        if not before:
            while not other.check([f"topic/{rank}"]) and call != "broadcast_object":
                time.sleep(0.01)
            time.sleep(0.1)
            del server
        with pytest.raises(CommunicationError, match="the key-value store does not answer after"):
            asked.result(30.0)


def test_many_missing_ranks_are_all_named_before_any_rank_gives_up():
    """The one verdict comes in time for those who wait for it, however many ranks are missing."""
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        for asked in [pool.submit(CALLS["check_consistent"], StoreChannel(store, rank, 6, 2.0)) for rank in (0, 5)]:
            with pytest.raises(DesyncError, match=r"^topic: ranks 1, 2, 3, 4 have not reached .* point after 2 s$"):
                asked.result()


@pytest.mark.parametrize(
    ("call", "rank", "text"),
    [
        ("broadcast_object", 1, r"topic: rank 0 has published no value within 0\.05 s"),
        ("all_gather_object", 0, r"topic: rank 1 has not reached this synchronisation point after 0\.05 s"),
        ("all_gather_object", 1, r"topic: rank 0 did not publish the result of the comparison within 0\.1 s"),
        ("check_consistent", 1, r"topic: rank 0 did not publish the result of the comparison within 0\.1 s"),
    ],
)
def test_a_rank_that_is_missing(call, rank, text):
    with pytest.raises(DesyncError, match=text):
        CALLS[call](StoreChannel(dist.HashStore(), rank, 2, 0.05))


@pytest.mark.parametrize(
    ("place", "beats", "bound_s", "comes"),
    [
        ("compiling, at train.py:1 in step", True, 60.0, True),
        ("compiling, at train.py:1 in step", True, 0.2, False),
        ("compiling, at train.py:1 in step", False, 60.0, False),  # it was killed
        ("at train.py:1 in step", True, 60.0, False),
    ],
)
def test_a_rank_that_compiles(monkeypatch, place, beats, bound_s, comes):
    """Rank 0 comes after three times as long as rank 1 waits for a rank that does not compile."""
    monkeypatch.setattr(store_channel, "LOOK_EVERY_S", 0.1)
    monkeypatch.setattr(store_channel, "COMPILATION_S", bound_s)
    store, over = dist.HashStore(), threading.Event()

    def compile_and_come():
        begun_s, beat = time.monotonic(), 0
        while time.monotonic() < begun_s + 1.5 and not over.wait(0.01):
            beat += beats
            write_status(store, 0, RankStatus(beat, {}, place))
        write_status(store, 0, RankStatus(beat + 1, {}))
        broadcast_object(StoreChannel(store, 0, 2, 0.5), "topic", 1)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(compile_and_come)
        with contextlib.nullcontext() if comes else pytest.raises(DesyncError, match="has published no value within"):
            assert broadcast_object(StoreChannel(store, 1, 2, 0.5, (0, 1)), "topic", None) == 1
        over.set()
