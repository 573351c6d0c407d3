"""Plans that are made anew: from the captured graph, as torch's DDP rebuilds its buckets, from measured launches."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dp_compile
from dp_compile.plan import UNUSED_FLAGS, BucketPlan
from dp_compile.replica import Revision
from dp_compile.replicate import replica_of


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


CONFIG = dp_compile.ReplicateConfig(backend="aot_eager")


def test_launch_order_is_that_of_the_graph(fake_group: dist.ProcessGroup) -> None:
    model = dp_compile.replicate(Backwards(), config=CONFIG)
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


def same_bits(world_size: int, backend: str) -> int:
    torch._dynamo.reset()
    torch.manual_seed(0)
    build = Backwards(6, 40)
    build.layers[2].bias = None
    caps = {"bucket_cap_mb": 0.01}
    theirs = DistributedDataParallel(torch.compile(copy.deepcopy(build), backend=backend), **caps)
    ours = dp_compile.replicate(
        build, config=dp_compile.ReplicateConfig(strategy="ddp", bucket_cap_mb=0.01, backend=backend)
    )
    compiled = torch.compile(ours, backend=backend)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in (ours, theirs)]
    for number in range(10):
        x = torch.randn(16, 40, generator=torch.Generator().manual_seed(number * world_size + dist.get_rank()))
        for model, optimizer in zip((compiled, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            step(model, x)
        for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            assert torch.equal(mine.grad, other.grad), f"gradient of {name} in step {number}"
        for optimizer in optimizers:
            optimizer.step()
        for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            assert torch.equal(mine, other), f"{name} after step {number}"
    report = dp_compile.report(ours)
    assert report.backwards == {"eager hooks": 1, "captured": 9}
    return len(report.plan.buckets)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_same_bits_as_ddp_on_2_ranks(ranks2: Ranks, backend: str) -> None:
    assert ranks2.run(same_bits, 2, backend)[0] > 3


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_same_bits_as_ddp_on_4_ranks(ranks4: Ranks, backend: str) -> None:
    assert ranks4.run(same_bits, 4, backend)[0] > 3
