"""Workloads, modes and the simulated group: gradients are those of torch's DDP, before and after steps."""

import os
import time
from functools import cache, partial

import pytest
import torch
import torch.distributed as dist
from bench_standins import tiny
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


def train(name, backend):
    """On a rank: the gradients of a batch before and after `STEPS` steps."""
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    chosen, trained = mode(name), workload("tiny-gpt")
    if chosen.takes("backend"):
        chosen = chosen._replace(prepare=partial(chosen.prepare, backend=backend))
    trainer = chosen.prepare(trained)
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    batch = trained.batch(generator)
    with inductor.generated_anew():
        before = as_arrays(trainer.gradients(batch))
    again = as_arrays(trainer.gradients(batch))
    for _ in range(STEPS):
        trainer.step(trained.batch(generator))
    trainer.wait()
    return {"before": before, "again": again, "after": as_arrays(trainer.gradients(batch)), "counts": trainer.counts()}


def as_arrays(gradients):
    return {name: each.numpy() for name, each in gradients.items()}


def run(name, backend="aot_eager"):
    """In new processes: Dynamo, Inductor and DDP keep state in one. Without code where the compiler does not matter."""
    with Ranks(2, "forkserver") as ranks:
        return ranks.run(train, name, backend)


@cache
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


def gradients_of(name, is_simulated=False):
    """Of the first batch, by a mode, and after three steps; perhaps with the simulated group."""
    if is_simulated:
        dist.destroy_process_group()
        os.environ.update(simulated_group.environment(FAST))
        dist.init_process_group("fabric", store=dist.HashStore(), rank=0, world_size=RANKS)
    torch.manual_seed(0)
    chosen = mode(name)
    trainer = chosen.prepare(tiny(), **{"backend": "aot_eager"} if chosen.takes("backend") else {})
    batch = tiny().batch(torch.Generator().manual_seed(1))
    found = {f"first {key}": value.cpu() for key, value in trainer.gradients(batch).items()}
    for _ in range(3):
        trainer.step(batch)
    return found | {f"later {key}": value.cpu() for key, value in trainer.gradients(batch).items()}


@pytest.mark.parametrize(
    "name",
    ["ours", "python_reducer", *(pytest.param(each, marks=pytest.mark.nightly) for each in ("ddp", "ddp_compiled"))],
)
def test_modes_train_as_one_process_does(name):
    """No mode waits for a rank that does not exist, and averages are the gradients of this process."""
    torch.testing.assert_close(in_a_new_process(name, True), in_a_new_process("compute"), rtol=1e-4, atol=1e-6)


@cache
def in_a_new_process(*arguments):
    """Modes change settings of the compiler."""
    with Ranks(1, "forkserver") as ranks:
        (found,) = ranks.run(gradients_of, *arguments)
    return found
