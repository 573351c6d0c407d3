"""`torch.optim.swa_utils.AveragedModel` around what is replicated, against one process on the joint batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import fx, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import dp_compile
from dp_compile.testing.ranks import Ranks

CONFIG = dp_compile.ReplicateConfig(backend="aot_eager")


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def make(kind: str) -> nn.Module:
    made: Any = build()
    if kind.startswith("replicated"):
        made = dp_compile.replicate(made, config=CONFIG)
    elif kind.startswith("wrapper"):
        made = dp_compile.DistributedDataParallel(made, config=CONFIG)
    return torch.compile(made, backend="aot_eager") if kind.endswith("compiled") else made


def train(kind: str) -> None:
    torch._dynamo.reset()
    models = make(kind), build()
    averages = [AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8), use_buffers=True) for model in models]
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.05) for model in models]
    world, rank = dist.get_world_size(), dist.get_rank()
    for step in range(4):
        joint = torch.randn(2 * world, 3, generator=torch.Generator().manual_seed(step))
        for model, x in zip(models, (joint[2 * rank : 2 * rank + 2], joint), strict=True):
            model(x).square().mean().backward()
        for model, optimizer, average in zip(models, optimizers, averages, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(model)
        ours, theirs = (list(average.parameters()) for average in averages)
        assert len(ours) == len(theirs) == 4
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, other)
    assert not torch.equal(ours[0], next(models[0].parameters()))
    with torch.no_grad():
        torch.testing.assert_close(averages[0](joint), averages[1](joint))
    if rank == 0 and kind.startswith("replicated"):
        averages[0](joint).sum().backward()  # nobody else takes part
        with pytest.raises(dp_compile.ModuleError, match="Sequential is not replicated"):
            dp_compile.report(averages[0].module)


@pytest.mark.parametrize("kind", ["replicated and compiled", "wrapper"])
def test_an_average_over_steps(ranks2: Ranks, kind: str) -> None:
    ranks2.run(train, kind)


class OwnCopy(nn.Linear):
    """Says itself how it is copied, by class and attributes."""

    def __deepcopy__(self, memo: dict[int, Any]) -> OwnCopy:
        twin = type(self)(self.in_features, self.out_features)
        twin.load_state_dict(self.state_dict())
        return twin


@pytest.mark.usefixtures("fake_group")
def test_classes_that_say_how_they_are_copied() -> None:
    for plain in (OwnCopy(2, 3), fx.symbolic_trace(nn.Sequential(nn.Linear(2, 3)))):
        kind, model = type(plain), dp_compile.replicate(plain, config=CONFIG)
        twin = AveragedModel(model).module
        assert isinstance(twin, OwnCopy if kind is OwnCopy else fx.GraphModule)
        assert not isinstance(twin, dp_compile.ReplicatedModule)
        assert not twin._forward_pre_hooks
        for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(mine, other)
            assert mine is not other
