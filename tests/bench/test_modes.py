"""Workloads and modes: sizes; on two gloo ranks the gradients of torch's DDP before and after steps; the bounds run.

Every mode has new processes, because Dynamo, Inductor and DDP keep state in one. Where the compiler does not matter, no
code is generated.
"""

from __future__ import annotations

import dataclasses
import os
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dp_compile._torch import inductor
from dp_compile.bench.contract import ADAMW, PROBE_LR, SGD, Rule, Workload
from dp_compile.bench.modes import mode
from dp_compile.bench.modes.loop import Loop
from dp_compile.bench.reference import compare
from dp_compile.bench.workloads import WORKLOADS, workload
from dp_compile.testing.ranks import Ranks

STEPS = 5
nightly = pytest.mark.nightly

# Parameters and tensors: `resnet50` as torchvision's, the others by their definition.
SIZES = {
    "gpt-6l": (8192 * 384 + 128 * 384 + 6 * (12 * 384**2 + 13 * 384) + 2 * 384, 76),
    "gpt-4l": (256 * 128 + 128 * 128 + 4 * (12 * 128**2 + 13 * 128) + 2 * 128, 52),
    "resnet50": (25_557_032, 161),
    "many-small": (500 * (64 * 64 + 64), 1000),
    "many-small-150": (75 * (64 * 64 + 64), 150),
    "huge-embedding": (250_002 * 128 + 128 * 512 + 512 + 512 * 16 + 16, 5),
}


# --- workloads --------------------------------------------------------------------------------------------------


def test_real_models_have_their_known_number_of_parameters() -> None:
    assert set(SIZES) == {name for name in WORKLOADS if not name.startswith("tiny-")}
    for name, size in SIZES.items():
        with torch.device("meta"):
            parameters = list(WORKLOADS[name].build().parameters())
        assert (sum(each.numel() for each in parameters), len(parameters)) == size


@pytest.mark.parametrize("rule", [SGD, ADAMW])
def test_a_plain_step_gives_the_gradient_and_is_taken_back(rule: Rule) -> None:
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


# --- modes ------------------------------------------------------------------------------------------------------


def train(name: str, backend: str) -> dict[str, Any]:
    """On a rank: the gradients of a batch before and after `STEPS` steps."""
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    chosen, trained = mode(name), workload("tiny-gpt")
    if hasattr(chosen, "backend"):
        chosen = dataclasses.replace(chosen, backend=backend)
    trainer = chosen.prepare(trained)
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    batch = trained.batch(generator)
    with inductor.generated_anew():
        before = as_arrays(trainer.gradients(batch))
    again = as_arrays(trainer.gradients(batch))
    for _ in range(STEPS):
        trainer.step(trained.batch(generator))
    trainer.wait()
    return {
        "before": before,
        "again": again,
        "after": as_arrays(trainer.gradients(batch)),
        "counts": trainer.counts(),
    }


def as_arrays(gradients: Any) -> dict[str, Any]:
    return {name: each.numpy() for name, each in gradients.items()}


def run(name: str, backend: str = "aot_eager") -> list[dict[str, Any]]:
    ranks = Ranks(2, "forkserver")
    try:
        return ranks.run(train, name, backend)
    finally:
        ranks.stop()


@cache
def torch_ddp() -> list[dict[str, Any]]:
    one, two = run("ddp")
    # It reduces: otherwise two modes that do nothing would be equal.
    assert all((gradient == two["before"][name]).all() for name, gradient in one["before"].items())
    return [one, two]


def check(found: list[dict[str, Any]], whens: Any = ("before", "again", "after")) -> None:
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
def test_same_gradients_as_torch_ddp(name: str) -> None:
    check(run(name))


def test_decent_dp() -> None:
    """After its first step a decentralised algorithm does not follow DDP."""
    pytest.importorskip("decent_dp")
    pytest.importorskip("loguru")
    check(run("decent_dp"), whens=("before", "again"))
