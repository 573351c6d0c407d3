"""Many steps, then the end: nothing grows, nothing is compiled again, nothing stays behind."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dp_compile
from dp_compile.engine import monitor
from dp_compile.engine.owners import owners
from dp_compile.modules.replicated_module import replica_of
from dp_compile.testing.ranks import Ranks

STEPS = 2000
WARM_STEPS = 500
WIDTH = 64
# The gradients are 65 KiB: keeping one bucket per step would add 95 MiB. What torch and the allocator keep for
# themselves (its flight recorder has room for 2,000 collectives) stays far below a tenth of that.
MOST_BYTES = 9 * 2**20
MOST_OBJECTS = 150  # a tenth of an object per step


@dataclass(frozen=True)
class Footprint:
    """What a process holds."""

    resident_bytes: int
    objects: int
    files: int
    threads: int
    captures: int
    frames_compiled: int

    @classmethod
    def now(cls) -> Footprint:
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        counters = torch._dynamo.utils.counters
        return cls(
            resident_bytes=pages * os.sysconf("SC_PAGE_SIZE"),
            objects=len(gc.get_objects()),
            files=len(os.listdir("/proc/self/fd")),
            threads=len(os.listdir("/proc/self/task")),
            captures=counters["compiled_autograd"]["captures"],
            frames_compiled=counters["frames"]["total"],
        )


def train(model: nn.Module, steps: int, backend: str = "aot_eager") -> None:
    compiled = torch.compile(model, backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        compiled(torch.randn(4, WIDTH)).square().mean().backward()
        optimizer.step()


def monitors() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "dp_compile monitor"]


def long_run(lives_on: bool) -> tuple[Footprint, Footprint, int, bool]:
    """The footprint after `WARM_STEPS` and after `STEPS` steps, the number of monitors then, and whether the memory of
    buckets stayed where it was."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    dp_compile.replicate(model, bucket_cap_mb=0.03, gradient_as_bucket_view=lives_on)
    train(model, WARM_STEPS, backend="inductor")
    memory = replica_of(model).bucket_memory
    before = {key: each.memory.data_ptr() for key, each in memory.kept.items()}
    warm = Footprint.now()
    train(model, STEPS - WARM_STEPS, backend="inductor")
    stayed = before == {key: each.memory.data_ptr() for key, each in memory.kept.items()} and len(before) > 1
    return warm, Footprint.now(), len(monitors()), stayed


@pytest.mark.nightly
@pytest.mark.parametrize("lives_on", [False, True])
def test_nothing_grows(ranks2: Ranks, lives_on: bool) -> None:
    for warm, end, monitoring, stayed in ranks2.run(long_run, lives_on):
        assert end.resident_bytes - warm.resident_bytes < MOST_BYTES
        assert end.objects - warm.objects < MOST_OBJECTS
        assert (end.files, end.threads) == (warm.files, warm.threads)
        assert (end.captures, end.frames_compiled) == (warm.captures, warm.frames_compiled)
        assert monitoring == 1
        assert stayed == lives_on


def drop_model() -> list[str]:
    """Delete a model after a few steps. Returns what is still there afterwards."""
    torch._dynamo.reset()
    gc.collect()
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    dp_compile.replicate(model, config=dp_compile.ReplicateConfig(backend="aot_eager"))
    train(model, 3)
    (replica,) = owners
    things = {"model": model, "replica": replica, **dict(model.named_parameters())}
    alive = {name: weakref.ref(thing) for name, thing in things.items()}
    del model, replica, things
    gc.collect()
    deadline = time.monotonic() + 10.0
    while monitors() and time.monotonic() < deadline:
        time.sleep(0.1)
    torch.ones(1, requires_grad=True).sum().backward()  # the entry goes with the first backward that finds no owner
    left = [name for name, thing in alive.items() if thing() is not None]
    left += ["entry"] * (torch.autograd._engine_run_backward.__module__ != "torch.autograd.graph")
    return left + ["monitor"] * len(monitors()) + [f"owner of {', '.join(each.names)}" for each in owners]


def test_a_deleted_model_leaves_nothing_behind() -> None:
    ranks = Ranks(2, "forkserver")  # of its own: no earlier test has left a model there
    try:
        assert ranks.run(drop_model) == [[], []]
    finally:
        ranks.stop()


def forked() -> tuple[int, bool]:
    """Whether a forked child holds the parent's connection, and whether the parent can train on."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    dp_compile.replicate(model, config=dp_compile.ReplicateConfig(backend="aot_eager"))
    train(model, 2)
    deadline = time.monotonic() + 10.0
    while monitor.MONITOR._store is None and time.monotonic() < deadline:
        time.sleep(0.1)
    assert monitor.MONITOR._store is not None
    child = os.fork()
    if child == 0:
        os._exit(monitor.MONITOR._store is not None)
    _, status = os.waitpid(child, 0)
    train(model, 2)
    dist.barrier()
    return os.waitstatus_to_exitcode(status), len(monitors()) == 1


def test_a_forked_child_has_no_monitor(ranks2: Ranks) -> None:
    assert ranks2.run(forked) == [(0, True), (0, True)]
