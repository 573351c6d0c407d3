"""Sparse gradients are averaged as torch's DDP averages them over gloo: by eager hooks, each by itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from parity import AOT, Side, Step, batch, beside, compile_blocks, compile_whole, not_compiled, plain
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.fsdp import MixedPrecisionPolicy

import dp_compile
from dp_compile.testing import Ranks


class Words(nn.Module):
    """Two tables and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Embedding(12, 6, sparse=True), nn.EmbeddingBag(9, 6, sparse=True, mode="sum")
        self.head = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = (x.abs() * 4).long().clamp(max=11)
        result: torch.Tensor = self.head(self.first(tokens).sum(1) + self.second(tokens % 9))
        return result


def accumulation(side: Side, number: int) -> None:
    with side.no_sync():
        side.loss(number).backward()
    side.loss(number + 50).backward()


@pytest.mark.parametrize(
    ("compile_model", "step"), [(compile_whole, accumulation), (compile_blocks, plain), (not_compiled, plain)]
)
def test_as_torch_s_ddp(ranks2: Ranks, compile_model: Callable[[nn.Module], Any], step: Step) -> None:
    for found in ranks2.run(partial(beside, Words, step, compile_model=compile_model)):
        assert found.backwards["eager hooks"] == 3
        assert "captured" not in found.backwards


@on_ranks("ranks2")
def test_uneven_inputs() -> None:
    torch.manual_seed(0)
    ours, theirs = Words(), Words()
    theirs.load_state_dict(ours.state_dict())
    dp_compile.replicate(ours, config=AOT)
    with dp_compile.join(ours):
        for number in range((1, 3)[dist.get_rank()]):
            ours.zero_grad()
            ours(batch(number)).square().mean().backward()
    if dist.get_rank() == 1:
        (theirs(batch(2)).square().mean() / 2).backward()
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.to_dense(), other.grad.to_dense())
    dp_compile.unreplicate(ours)


@pytest.mark.usefixtures("fake_group")
def test_what_it_cannot_be_combined_with() -> None:
    def cast() -> None:
        dp_compile.replicate(Words(), mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))

    def hook() -> None:
        dp_compile.replicate(Words()).register_comm_hook(dist.group.WORLD, fp16_compress_hook)

    def shard() -> None:
        model = dp_compile.replicate(Words())
        dp_compile.optim.in_backward(model, torch.optim.SGD(model.parameters(), 0.1), shard=True)

    attempts = {
        cast: "the gradient of first.weight is sparse, and reduce_dtype does not support",
        hook: "the gradient of first.weight is sparse, and a comm hook does not support",
        shard: "first.weight has sparse gradients and cannot be sharded",
    }
    for attempt, text in attempts.items():
        with pytest.raises(dp_compile.ConfigError, match=text):
            attempt()
