"""Workloads, modes and the simulated group: gradients are those of torch's DDP, before and after steps."""

import os
import time
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dp_compile._torch import inductor
from dp_compile.bench import simulated_group
from dp_compile.bench.contract import ADAMW, PROBE_LR, SGD, Workload
from dp_compile.bench.modes import Loop, mode
from dp_compile.bench.simulated_group import SimulatedGroup
from dp_compile.bench.workers import compare
from dp_compile.bench.workloads import workload
from dp_compile.errors import ConfigError
from dp_compile.plan.cost import AllReduceCost
from dp_compile.testing.ranks import Ranks

STEPS = 5
nightly = pytest.mark.nightly


@pytest.mark.parametrize("rule", [SGD, ADAMW])
def test_a_plain_step_gives_the_gradient_and_is_taken_back(rule):
    model, x = nn.Linear(64, 1, bias=False), torch.randn(64, generator=torch.Generator().manual_seed(0))
    chosen = Workload("x", lambda: model, lambda _: (x,), lambda call, batch: call(batch[0]).sum(), rule=rule)
    loop = Loop(chosen, lambda model: model)
    loop.step((x,))
    before, options = model.weight.detach().clone(), dict(loop.optimizer.param_groups[0])
    found = loop.gradients((x,))["weight"]
    torch.testing.assert_close(found, x[None], rtol=5e-4, atol=1e-6)
    assert torch.equal(model.weight, before)
    assert loop.optimizer.param_groups[0] == options
    assert PROBE_LR == 64.0
    assert workload("gpt-4l:adamw").rule is ADAMW


def train(name, job="tiny-gpt", is_simulated=False):
    """On a rank: the gradients of a batch before and after `STEPS` steps; perhaps with the simulated group."""
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    if is_simulated:
        dist.destroy_process_group()
        os.environ.update(simulated_group.environment(FAST))
        dist.init_process_group("fabric", store=dist.HashStore(), rank=0, world_size=RANKS)
    chosen, trained = mode(name), workload(job)
    # Without code where the compiler does not matter.
    trainer = chosen.prepare(trained, **{"backend": "aot_eager"} if chosen.takes("backend") else {})
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    batch = trained.batch(generator)
    with inductor.generated_anew():
        before = as_arrays(trainer.gradients(batch))
    again = as_arrays(trainer.gradients(batch))
    for _ in range(STEPS):
        trainer.step(trained.batch(generator))
    trainer.wait()
    return {"before": before, "again": again, "after": as_arrays(trainer.gradients(batch))}


def as_arrays(gradients):
    return {name: each.numpy() for name, each in gradients.items()}


@cache
def run(name, *given, ranks=2):
    """In new processes: Dynamo, Inductor and DDP keep state in one."""
    with Ranks(ranks, "forkserver") as pool:
        return pool.run(train, name, *given)


def torch_ddp():
    one, two = run("ddp")
    # It reduces: otherwise two modes that do nothing would be equal.
    assert all((gradient == two["before"][name]).all() for name, gradient in one["before"].items())
    return [one, two]


def check(found, whens=("before", "again", "after")):
    for rank, expected in enumerate(torch_ddp()):
        for when in whens:
            mine, theirs = (
                {name: torch.from_numpy(each) for name, each in side[when].items()} for side in (found[rank], expected)
            )
            name, error = compare(mine, theirs)
            assert error < 1e-3, f"rank {rank}, {when} training: {name} is off by {error:.2g} of its norm"


@pytest.mark.parametrize(
    "name",
    [
        "ours:0.01",
        "ours:sharded_crossing",
        *(pytest.param(each, marks=nightly) for each in ("ddp_compiled", "functional", "ours:crossing")),
    ],
)
def test_same_gradients_as_torch_ddp(name):
    check(run(name))


def test_decent_dp():
    """After its first step a decentralised algorithm does not follow DDP."""
    pytest.importorskip("decent_dp")
    pytest.importorskip("loguru")
    check(run("decent_dp"), whens=("before", "again"))


RANKS = 64
FAST = AllReduceCost(1e-4, 1e-12)
NEVER = AllReduceCost(1e6, 0.0)


def reduced(group, tensor, op):
    options = dist.AllreduceOptions()
    options.reduceOp = op
    group.allreduce([tensor], options).wait()
    return tensor


def test_all_ranks_hold_the_same():
    group, ops = SimulatedGroup(0, RANKS, FAST), dist.ReduceOp
    for op, factor in ((ops.SUM, RANKS), (ops.AVG, 1), (ops.MAX, 1), (ops.MIN, 1)):
        assert reduced(group, torch.tensor([1.5, -2.0]), op).tolist() == [1.5 * factor, -2.0 * factor]
    with pytest.raises(ConfigError, match=r"must be SUM, AVG, MIN, MAX, BAND or BOR, got .*PRODUCT"):
        reduced(group, torch.ones(2), ops.PRODUCT)


def test_a_collective_lasts_as_long_as_stated_and_waits_its_turn():
    """From below only: a machine may be late, never early."""
    group, data = SimulatedGroup(0, RANKS, AllReduceCost(0.02, 1e-6)), torch.zeros(2500)
    start = time.monotonic()
    works = [group.allreduce([data]), group.broadcast([data]), group.barrier()]
    works[0].wait()
    assert time.monotonic() - start >= 0.02 + 0.01
    works[2].wait()
    assert time.monotonic() - start >= (0.02 + 0.01) * 1.5 + 0.02
    assert works[1].is_completed()
    assert not SimulatedGroup(0, RANKS, NEVER).allreduce([data]).is_completed()


@pytest.mark.parametrize(
    "name",
    ["ours", "python_reducer", *(pytest.param(each, marks=pytest.mark.nightly) for each in ("ddp", "ddp_compiled"))],
)
def test_modes_train_as_one_process_does(name):
    """No mode waits for a rank that does not exist, and averages are the gradients of this process."""
    tiny = "bench_standins:tiny"
    (found,), (expected,) = run(name, tiny, True, ranks=1), run("compute", tiny, ranks=1)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
