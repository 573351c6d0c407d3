"""The wrapper class against torch's, on two ranks; and what it refuses."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import dp_compile
from dp_compile import DistributedDataParallel
from dp_compile.testing.ranks import Ranks


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


def train_side_by_side() -> tuple[list[str], list[str]]:
    torch._dynamo.reset()
    ours = DistributedDataParallel(
        build(), gradient_as_bucket_view=True, config=dp_compile.ReplicateConfig(backend="aot_eager")
    )
    theirs = TorchDDP(build(), gradient_as_bucket_view=True)
    compiled = torch.compile(ours, backend="aot_eager")
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in (ours, theirs)]
    for step in range(5):
        for micro_step in range(2):
            x = torch.randn(6, 4, generator=torch.Generator().manual_seed(10 * dist.get_rank() + step))
            for model, run in ((ours, compiled), (theirs, theirs)):
                with model.no_sync() if micro_step == 0 else nullcontext():
                    run(x).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(mine, other, msg=lambda text, n=name: f"{n}: {text}")
    assert set(dp_compile.report(ours).backwards) == {"captured", "captured without sync"}
    return list(ours.state_dict()), list(theirs.state_dict())


def test_trains_as_torch_ddp(ranks2: Ranks) -> None:
    for ours, theirs in ranks2.run(train_side_by_side):
        assert ours == theirs


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dim": 1}, "dim must be 0, got 1"),
        ({"init_sync": False}, "init_sync=False is not supported"),
        ({"mixed_precision": object()}, "mixed_precision is not supported; use torch.autocast"),
        ({"device_ids": [0, 1]}, "device_ids must hold one device"),
        ({"device_ids": [0]}, "0.weight is on cpu, device_ids says cuda:0"),
        ({"output_device": 0}, "device_ids must hold one device"),
        ({"bucket_cap_mb": -3}, "bucket_cap_mb must be > 0, got -3"),
    ],
)
def test_refuses(options: dict[str, Any], message: str) -> None:
    with pytest.raises(dp_compile.ConfigError, match=message):
        DistributedDataParallel(build(), **options)


@pytest.mark.usefixtures("fake_group")
def test_unknown_keyword_is_named() -> None:
    with pytest.raises(TypeError, match="'bucket_cap'"):
        DistributedDataParallel(build(), bucket_cap=1)


@pytest.mark.usefixtures("fake_group")
def test_device_of_inputs() -> None:
    wrapped = DistributedDataParallel(build(), device_ids=[torch.device("cpu")])
    assert wrapped(torch.ones(2, 4)).shape == (2, 2)
