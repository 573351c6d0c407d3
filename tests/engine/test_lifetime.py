"""How long a replication lives: nothing grows, what goes with the modules, what outlives them is an error."""

import gc
import os
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from parity import AOT, Block, batch, compile_blocks, compile_whole, not_compiled, same_on_all_ranks
from torch import nn
from torch.distributed.fsdp.wrap import CustomPolicy

import dp_compile
from dp_compile.engine import monitor
from dp_compile.errors import ReductionError
from dp_compile.replica.replica import owners
from dp_compile.replication.module import replica_of


@pytest.mark.parametrize(
    ("compile_model", "cleared"), [(compile_blocks, False), (compile_blocks, True), (not_compiled, False)]
)
@on_ranks("ranks")
def test_parts_train_on_in_step(compile_model, cleared):
    """The whole is gone, or its forward hooks are."""
    torch.manual_seed(0)
    backbone, head = Block(), Block()
    whole = dp_compile.replicate(nn.Sequential(backbone, head), config=AOT)
    compile_model(whole)
    if cleared:
        whole._forward_pre_hooks.clear()
    del whole
    gc.collect()
    optimizer = torch.optim.SGD([*backbone.parameters(), *head.parameters()], lr=0.1)
    for number in range(3):
        optimizer.zero_grad()
        head(backbone(batch(number))).square().mean().backward()
        optimizer.step()
    same_on_all_ranks(backbone)


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize("compile_model", [not_compiled, compile_whole])
def test_parameters_that_outlive_every_module(compile_model):
    model = dp_compile.replicate(nn.Sequential(nn.Linear(6, 6)), config=AOT)
    weight, bias = model[0].weight, model[0].bias
    replica = weakref.ref(next(iter(owners)))
    del model
    gc.collect()
    assert replica() is None

    def forward(x):
        return nn.functional.linear(x, weight, bias)

    with pytest.raises(ReductionError, match=r"the gradient of 0\.(weight|bias) is not reduced"):
        compile_model(forward)(torch.ones(2, 6)).sum().backward()


STEPS = 2000
WARM_STEPS = 500
WIDTH = 64
# The gradients are 65 KiB: keeping one bucket per step would add 95 MiB. What torch and the allocator keep for
# themselves (its flight recorder has room for 2,000 collectives) stays far below a tenth of that.
MOST_BYTES = 9 * 2**20
MOST_OBJECTS = 150  # a tenth of an object per step


def footprint():
    """What this process holds."""
    gc.collect()
    counters = torch._dynamo.utils.counters
    return {
        "bytes": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
        "objects": len(gc.get_objects()),
        "files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "captures": counters["compiled_autograd"]["captures"],
        "frames": counters["frames"]["total"],
    }


def train(model, steps, backend="aot_eager"):
    compiled = torch.compile(model, backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        compiled(torch.randn(4, WIDTH)).square().mean().backward()
        optimizer.step()


def monitors():
    return [thread for thread in threading.enumerate() if thread.name == "dp_compile monitor"]


def wait_until(holds):
    deadline = time.monotonic() + 10.0
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.1)


def long_run(lives_on):
    """The footprint after `WARM_STEPS` and after `STEPS`, the monitors then, and whether bucket memory stayed."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    dp_compile.replicate(model, bucket_cap_mb=0.03, gradient_as_bucket_view=lives_on)
    train(model, WARM_STEPS, backend="inductor")
    memory = replica_of(model).state.bucket_memory
    before = {key: each.memory.data_ptr() for key, each in memory.kept.items()}
    warm = footprint()
    train(model, STEPS - WARM_STEPS, backend="inductor")
    stayed = before == {key: each.memory.data_ptr() for key, each in memory.kept.items()} and len(before) > 1
    return warm, footprint(), len(monitors()), stayed


@pytest.mark.nightly
@pytest.mark.parametrize("lives_on", [False, True])
def test_nothing_grows(ranks2, lives_on):
    for warm, end, monitoring, stayed in ranks2.run(long_run, lives_on):
        grown = {name: end[name] - warm[name] for name in end}
        assert grown.pop("bytes") < MOST_BYTES
        assert grown.pop("objects") < MOST_OBJECTS
        assert set(grown.values()) == {0}
        assert monitoring == 1
        assert stayed == lives_on


def drop_model():
    """Delete a model after a few steps, though what the user gave holds it. Returns what is still there afterwards."""
    gc.collect()
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    dp_compile.replicate(model, config=AOT, bucket_policy=CustomPolicy([model].__contains__))
    train(model, 3)
    (replica,) = owners
    things = {"model": model, "replica": replica, **dict(model.named_parameters())}
    alive = {name: weakref.ref(thing) for name, thing in things.items()}
    del model, replica, things
    gc.collect()
    wait_until(lambda: not monitors())
    torch.ones(1, requires_grad=True).sum().backward()  # the entry goes with the first backward that finds no owner
    left = [name for name, thing in alive.items() if thing() is not None]
    left += ["entry"] * (torch.autograd._engine_run_backward.__module__ != "torch.autograd.graph")
    return left + ["monitor"] * len(monitors()) + [f"owner of {', '.join(each.names)}" for each in owners]


def test_a_deleted_model_leaves_nothing_behind(own_ranks):
    """In new processes: no earlier test has left a model there."""
    assert own_ranks.run(drop_model) == [[]] * own_ranks.world_size


@on_ranks("ranks2")
def test_a_forked_child_has_no_monitor():
    """It does not hold the parent's connection, and the parent trains on."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    dp_compile.replicate(model, config=AOT)
    train(model, 2)
    wait_until(lambda: monitor.MONITOR._store is not None)
    assert monitor.MONITOR._store is not None
    child = os.fork()
    if child == 0:
        os._exit(monitor.MONITOR._store is not None)
    _, status = os.waitpid(child, 0)
    train(model, 2)
    dist.barrier()
    assert os.waitstatus_to_exitcode(status) == 0
    assert len(monitors()) == 1
