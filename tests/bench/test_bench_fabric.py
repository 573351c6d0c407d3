"""The played network: values as if all ranks held the same, times as stated, and everything that runs on top of it."""

from __future__ import annotations

import gc
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bench_standins import tiny

from dp_compile._torch import distributed
from dp_compile.bench import beds, fabric, selfcheck
from dp_compile.bench.beds import Link
from dp_compile.bench.catalogue import mode
from dp_compile.bench.fabric import Fabric
from dp_compile.engine.calibration import calibrate
from dp_compile.engine.group import Group
from dp_compile.errors import ConfigError
from dp_compile.fx.collectives import ALL_REDUCE, WAIT
from dp_compile.plan.backends import FABRIC, GLOO, NCCL
from dp_compile.plan.cost import TREE, AllReduceCost
from dp_compile.plan.links import link as preset
from dp_compile.plan.reduction import Averaging
from dp_compile.plan.strategies import nominal_cost
from dp_compile.testing import Ranks

RANKS = 64
FAST = AllReduceCost(1e-4, 1e-12)
NEVER = AllReduceCost(1e6, 0.0)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="this part of the fabric runs on a GPU")


def reduced(group: Fabric, tensor: torch.Tensor, op: Any) -> torch.Tensor:
    options = dist.AllreduceOptions()
    options.reduceOp = op
    group.allreduce([tensor], options).wait()
    return tensor


# --- values and times, without a default group -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "factor"),
    [(dist.ReduceOp.SUM, RANKS), (dist.ReduceOp.AVG, 1), (dist.ReduceOp.MAX, 1), (dist.ReduceOp.MIN, 1)],
)
def test_all_ranks_hold_the_same(op: Any, factor: int) -> None:
    found = reduced(Fabric(0, RANKS, FAST), torch.tensor([1.5, -2.0]), op)
    assert found.tolist() == [1.5 * factor, -2.0 * factor]


def test_an_op_for_which_that_is_no_number_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"reduces by SUM, AVG, MIN, MAX, BAND and BOR, got .*PRODUCT"):
        reduced(Fabric(0, RANKS, FAST), torch.ones(2), dist.ReduceOp.PRODUCT)


def test_what_goes_wrong_in_the_arithmetic_is_raised_by_wait_and_the_next_one_runs() -> None:
    group = Fabric(0, RANKS, FAST)
    with pytest.raises(RuntimeError, match="can't be cast to the desired output type Bool"):
        reduced(group, torch.ones(2, dtype=torch.bool), dist.ReduceOp.SUM)
    assert reduced(group, torch.ones(2), dist.ReduceOp.SUM).tolist() == [RANKS, RANKS]


def test_a_collective_lasts_as_long_as_stated_and_waits_its_turn() -> None:
    """From below only: a machine may be late, never early."""
    group, data = Fabric(0, RANKS, AllReduceCost(0.02, 1e-6)), torch.zeros(2500)
    start = time.monotonic()
    works = [group.allreduce([data]), group.broadcast([data]), group.barrier()]
    works[0].wait()
    assert time.monotonic() - start >= 0.02 + 0.01
    works[2].wait()
    assert time.monotonic() - start >= (0.02 + 0.01) * 1.5 + 0.02
    assert works[1].is_completed()
    assert not Fabric(0, RANKS, NEVER).allreduce([data]).is_completed()


def test_waiting_takes_no_processor_time() -> None:
    work = Fabric(0, RANKS, AllReduceCost(0.5, 0.0)).allreduce([torch.zeros(4)])
    before = time.process_time()
    work.wait()
    assert time.process_time() - before < 0.25


def test_the_thread_ends_with_its_group() -> None:
    before = set(threading.enumerate())
    group = Fabric(0, RANKS, FAST)
    (thread,) = set(threading.enumerate()) - before
    reduced(group, torch.ones(2), dist.ReduceOp.SUM)
    del group
    gc.collect()
    thread.join(timeout=60)
    assert not thread.is_alive()


def test_a_group_needs_to_know_what_it_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(fabric.VARIABLE, raising=False)
    with pytest.raises(ConfigError, match=r"backend 'fabric' needs the environment variable DP_COMPILE_FABRIC"):
        fabric._create(None, 0, RANKS, None)  # type: ignore[arg-type]


# --- as a default group -----------------------------------------------------------------------------------------


@pytest.fixture
def fresh() -> Iterator[Ranks]:
    """A process of its own: modes set things in the compiler."""
    ranks = Ranks(1, "forkserver")
    yield ranks
    ranks.stop()


def on_fabric(function: Callable[..., Any], *arguments: Any, cost: AllReduceCost = FAST) -> Any:
    """In that process: with the fabric in place of its group."""
    dist.destroy_process_group()
    os.environ.update(fabric.environment(cost))
    dist.init_process_group("fabric", store=dist.HashStore(), rank=0, world_size=RANKS)
    return function(*arguments)


def every_way_to_communicate() -> dict[str, Any]:
    assert dist.group.WORLD is not None
    name = dist.group.WORLD.group_name
    said = [None] * RANKS
    dist.all_gather_object(said, {"of": "me"})
    gathered = [torch.zeros(2) for _ in range(RANKS)]
    dist.all_gather(gathered, torch.ones(2))
    plain, sent = torch.ones(2), torch.ones(2)
    dist.all_reduce(plain)
    dist.broadcast(sent, src=0)
    dist.barrier()
    coalesced = torch.ops._c10d_functional.all_reduce_coalesced([plain, sent], "avg", name)
    return {
        "sizes": (dist.get_world_size(), dist.get_rank(), dist.get_backend()),
        "objects": said == [{"of": "me"}] * RANKS,
        "gathered": all(each.tolist() == [1.0, 1.0] for each in gathered),
        "plain": plain.tolist(),
        "sent": sent.tolist(),
        "functional": WAIT(ALL_REDUCE(torch.ones(2), "sum", name)).tolist(),
        "coalesced": [torch.ops._c10d_functional.wait_tensor(each).tolist() for each in coalesced],
    }


def test_every_way_to_communicate(fresh: Ranks) -> None:
    (found,) = fresh.run(on_fabric, every_way_to_communicate)
    assert found == {
        "sizes": (RANKS, 0, "fabric"),
        "objects": True,
        "gathered": True,
        "plain": [RANKS, RANKS],
        "sent": [1.0, 1.0],
        "functional": [RANKS, RANKS],
        "coalesced": [[RANKS, RANKS], [1.0, 1.0]],
    }


def test_what_it_costs_is_found(fresh: Ranks) -> None:
    """Of a link on which the largest message takes 160 ms: what else a machine does hides the slope of a fast one."""
    (found,) = fresh.run(calibrated_cost)
    assert found.alpha_s >= 0.5 * 1e-4
    assert found.beta_s_per_byte >= 0.5 * 1e-8


def calibrated_cost() -> AllReduceCost:
    cost: AllReduceCost = on_fabric(calibrate, cost=AllReduceCost(1e-4, 1e-8)).cost
    return cost


def gradients_of(name: str) -> dict[str, torch.Tensor]:
    """Of the first batch, by a mode, and after three steps."""
    torch.manual_seed(0)
    chosen = mode(name)
    if hasattr(chosen, "backend"):
        object.__setattr__(chosen, "backend", "aot_eager")
    trainer = chosen.prepare(tiny())
    batch = tiny().batch(torch.Generator().manual_seed(1))
    found = {f"first {key}": value.cpu() for key, value in trainer.gradients(batch).items()}
    for _ in range(3):
        trainer.step(batch)
    return found | {f"later {key}": value.cpu() for key, value in trainer.gradients(batch).items()}


@pytest.mark.parametrize(
    "name",
    [
        *("ours", "ddp", "python_reducer"),
        *(
            pytest.param(name, marks=pytest.mark.nightly)
            for name in ("ours:replan", "ours:coalesced", "ddp_tuned", "ddp_compiled", "replicate")
        ),
    ],
)
def test_modes_train_as_one_process_does(fresh: Ranks, name: str) -> None:
    """Nobody waits for a rank that does not exist, and what is averaged is what this process has."""
    (found,) = fresh.run(on_fabric, gradients_of, name)
    alone = of_one_process()
    assert found.keys() == alone.keys()
    for key, value in alone.items():
        torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-6)


@cache
def of_one_process() -> dict[str, torch.Tensor]:
    ranks = Ranks(1, "forkserver")
    try:
        (found,) = ranks.run(gradients_of, "compute")
    finally:
        ranks.stop()
    return dict(found)


def test_the_bed_proves_itself(fresh: Ranks) -> None:
    """What has to be true of the figures; whether the machine was quiet enough for them is not asked here."""
    (found,) = fresh.run(on_slow_fabric)
    assert (found.stated_alpha_us, found.stated_mb_per_s) == (pytest.approx(2000.0), pytest.approx(100.0))
    assert found.alpha_us >= 0.9 * 2000.0
    assert found.all_reduce_ms >= 2.0 + found.nbytes * 1e-5 - 0.01


def on_slow_fabric() -> selfcheck.SelfCheck:
    found: selfcheck.SelfCheck = on_fabric(selfcheck.measure, cost=AllReduceCost(2e-3, 1e-8))
    return found


@pytest.mark.parametrize(
    ("alpha_us", "mb_per_s", "agrees"),
    [(2000, 100, True), (2390, 96, True), (1610, 104, True), (2410, 100, False), (2000, 94, False), (2000, 106, False)],
)
def test_a_played_bed_has_to_take_the_stated_time(alpha_us: float, mb_per_s: float, agrees: bool) -> None:
    check = selfcheck.SelfCheck(alpha_us, mb_per_s, 0.0, 4, 1.0, 0.0, 1.0, 1.0, 2000.0, 100.0)
    assert (check.agrees, check.passed) == (agrees, agrees)


# --- what a suite says ------------------------------------------------------------------------------------------


def test_a_link_by_name_costs_what_the_cost_model_says() -> None:
    ring = Link("fabric", ranks=64, link="infiniband-ndr")
    tree = Link("fabric", ranks=1024, link="infiniband-ndr", algorithm="tree")
    assert (ring.name, tree.name) == ("fabric 64 x infiniband-ndr", "fabric 1024 x infiniband-ndr tree")
    assert ring.cost(None) == preset("infiniband-ndr").cost(64)
    assert tree.cost(None) == preset("infiniband-ndr").cost(1024, formula=TREE)


def test_a_link_in_figures() -> None:
    link = Link("fabric", ranks=8, latency_us=20.0, rate_mbit=8000.0)
    assert link.name == "fabric 8 x 20 us, 8000 mbit"
    cost = link.cost(8000.0)
    assert math.isclose(cost.alpha_s, 8.4e-6 + 14 * 20e-6)
    assert math.isclose(cost.beta_s_per_byte, 2 * 7 / 8 * 1e-9)


@pytest.mark.parametrize(("algorithm", "factor"), [("ring", 2 * 15 / 16), ("tree", 2.0)])
def test_the_rate_follows_from_compute(algorithm: str, factor: float) -> None:
    link = Link("fabric", ranks=16, latency_us=20.0, comm_over_compute=0.5, algorithm=algorithm)
    assert link.name == f"fabric 16 x 20 us, comm/compute 0.5 {algorithm}"
    rate_mbit = beds.rate_of(link, compute_s=1.0, gradient_nbytes=10**8, ranks=2)
    assert rate_mbit == pytest.approx(factor * 1600.0)
    # Communication takes half a second then, and the latency.
    assert link.cost(rate_mbit).beta_s_per_byte * 10**8 == pytest.approx(0.5)


def test_a_fabric_is_one_process_of_a_large_group(monkeypatch: pytest.MonkeyPatch) -> None:
    link = Link("fabric", ranks=64, latency_us=20.0, comm_over_compute=1.0)
    with beds.open_bed(link, ranks=2, rate_mbit=640.0) as bed:
        assert (bed.processes, bed.group_ranks, bed.backend) == (1, 64, "fabric")
        assert bed.environment == {**fabric.environment(link.cost(640.0)), "TORCH_DIST_INIT_BARRIER": "0"}
        assert bed.asynchronous
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with (
        pytest.raises(beds.NoBedError, match=r"compute is timed on the CPU, .*give rate_mbit or link\."),
        beds.open_bed(link, ranks=2, rate_mbit=640.0),
    ):
        raise AssertionError("there is no bed")


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({}, r"ranks of a fabric must be an integer from 8 to 1024, got None\."),
        ({"ranks": 7, "link": "nvlink4"}, r"from 8 to 1024, got 7\."),
        ({"ranks": 1025, "link": "nvlink4"}, r"from 8 to 1024, got 1025\."),
        ({"ranks": 64.0, "link": "nvlink4"}, r"from 8 to 1024, got 64\.0\."),
        ({"ranks": 64}, r"a fabric needs link, or latency_us and a rate; neither is given\."),
        ({"ranks": 64, "link": "token-ring"}, r"link must be one of nvlink4, .*, got 'token-ring'\."),
        ({"ranks": 64, "link": "nvlink4", "rate_mbit": 5}, r"link 'nvlink4' has a latency and a rate; rate_mbit is "),
        ({"ranks": 64, "latency_us": 5}, r"a fabric with latency_us needs rate_mbit or comm_over_compute, one of them"),
        ({"ranks": 64, "latency_us": 0, "rate_mbit": 5}, r"latency_us must be > 0, got 0\."),
        ({"ranks": 64, "link": "nvlink4", "algorithm": "star"}, r"algorithm must be one of ring, tree, got 'star'\."),
    ],
)
def test_a_fabric_that_cannot_be_is_refused(given: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        Link("fabric", **given)


def test_a_mode_of_neighbours_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda: RANKS)
    monkeypatch.setattr(distributed, "backend_of", lambda *_: FABRIC)
    with pytest.raises(ConfigError, match=r"^mode 'decent_dp' exchanges parameters with neighbours, which a fabric"):
        mode("decent_dp").prepare(tiny())


def test_other_kinds_have_no_ranks() -> None:
    with pytest.raises(ConfigError, match=r"^ranks is for kind = 'fabric', not for 'shaped'\.$"):
        Link("shaped", rate_mbit=5.0, ranks=64)


def test_nccl_without_a_gpu_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with (
        pytest.raises(beds.NoBedError, match=r"^NCCL needs a GPU, and torch sees none here\.$"),
        beds.open_bed(Link("nccl-1"), ranks=2, rate_mbit=None),
    ):
        raise AssertionError("there is no bed")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with beds.open_bed(Link("nccl-1"), ranks=2, rate_mbit=None) as bed:
        assert (bed.backend, bed.processes, bed.group_ranks) == ("nccl", 1, None)


def test_the_planner_takes_it_for_nccl_and_nobody_is_waited_for() -> None:
    assert nominal_cost(FABRIC, RANKS) == nominal_cost(NCCL, RANKS) != nominal_cost(GLOO, RANKS)
    group = Fabric(0, RANKS, FAST)
    played, real = (Group(group, "0", name, RANKS, Averaging()) for name in (FABRIC, NCCL))
    assert real.has_others
    assert not played.has_others


# --- a GPU that only says what is asked of it --------------------------------------------------------------------


class PlayedStream:
    """Writes down who waits for what."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log, self.device = name, log, torch.device("cuda", 0)

    def record_event(self) -> str:
        self.log.append(f"event on {self.name}")
        return f"event on {self.name}"

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name} waits for {event}")

    def wait_stream(self, other: PlayedStream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def synchronize(self) -> None:
        self.log.append(f"process waits for {self.name}")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """In the place of a GPU whose clock runs at 1 GHz."""
    said: list[str] = []
    names, inside = iter(("wire", "arithmetic")), ["current"]

    @contextmanager
    def within(stream: PlayedStream) -> Iterator[None]:
        inside.append(stream.name)
        yield
        inside.pop()

    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority=0: PlayedStream(next(names), said))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: PlayedStream("current", said))
    monkeypatch.setattr(torch.cuda, "stream", within)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: said.append(f"{cycles} cycles on {inside[-1]}"))
    monkeypatch.setattr(fabric, "_cycles_per_s", lambda stream: 1e9)
    return said


def test_streams_wait_for_each_other_and_the_process_for_none(log: list[str]) -> None:
    network = fabric.StreamNetwork(torch.device("cuda", 0))
    tensor = SimpleNamespace(record_stream=lambda stream: log.append(f"memory kept for {stream.name}"))
    work = network.send(0.002, [tensor], lambda: log.append("arithmetic done"))  # type: ignore[list-item]
    assert log == [
        "event on current",
        "wire waits for event on current",
        "2000000 cycles on wire",
        "arithmetic waits for event on current",
        "arithmetic done",
        "memory kept for arithmetic",
        "wire waits for arithmetic",
        "event on wire",
    ]
    log.clear()
    work.wait()
    assert log == ["current waits for event on wire"]
    log.clear()
    network.drain()
    assert log == ["process waits for wire"]


# --- on a GPU ---------------------------------------------------------------------------------------------------


def on_gpu() -> dict[str, Any]:
    device = torch.device("cuda", torch.cuda.current_device())
    data = torch.ones(1000, device=device)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    dist.all_reduce(data)  # calibrates the clock
    dist.barrier()
    begin.record()
    work = dist.all_reduce(data, async_op=True)
    assert work is not None
    returned_first = not work.is_completed()
    work.wait()
    end.record()
    end.synchronize()
    dist.barrier()
    future = dist.all_reduce(torch.ones(3, device=device), op=dist.ReduceOp.AVG, async_op=True).get_future()  # type: ignore[union-attr]
    future.wait()
    return {
        "returned_first": returned_first,
        "value": data[0].item(),
        "took_ms": begin.elapsed_time(end),
        "future": future.value()[0].tolist(),
    }


def on_slow_gpu() -> Any:
    return on_fabric(on_gpu, cost=AllReduceCost(0.05, 0.0))


def self_check_on_gpu() -> Any:
    return on_fabric(selfcheck.measure, cost=preset("infiniband-ndr").cost(RANKS))


@needs_gpu
def test_a_stream_is_busy_and_the_process_is_not(fresh: Ranks) -> None:
    (found,) = fresh.run(on_slow_gpu)
    assert found["returned_first"]
    assert found["value"] == RANKS**2
    assert found["took_ms"] == pytest.approx(50.0, rel=0.1)
    assert found["future"] == [1.0, 1.0, 1.0]


@needs_gpu
def test_the_bed_proves_itself_on_a_gpu(fresh: Ranks) -> None:
    (found,) = fresh.run(self_check_on_gpu)
    assert found.passed, found


@needs_gpu
@pytest.mark.parametrize("name", ["ours", "ddp", "ddp_compiled", "python_reducer"])
def test_modes_train_on_a_gpu(fresh: Ranks, name: str) -> None:
    (found,) = fresh.run(on_fabric, gradients_of, name)
    (alone,) = fresh.run(gradients_of, "compute")
    for key, value in alone.items():
        torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-5)
