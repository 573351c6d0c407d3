"""Sparse gradients are averaged as torch's DDP averages them over gloo: by eager hooks, each by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parity import AOT, compile_blocks, compile_whole, not_compiled
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel

import dp_compile
from dp_compile.testing import Ranks


class Words(nn.Module):
    """Two tables and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Embedding(12, 6, sparse=True), nn.EmbeddingBag(9, 6, sparse=True, mode="sum")
        self.head = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.first(tokens).sum(1) + self.second(tokens % 9))
        return result


def tokens(number: int, rank: int) -> torch.Tensor:
    return torch.randint(0, 12, (4, 3), generator=torch.Generator().manual_seed(10 * number + rank))


def dense(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad.to_dense()


def compare(ours: nn.Module, theirs: nn.Module, layouts: bool = True) -> None:
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(dense(mine), dense(other), msg=lambda text, name=name: f"{name}: {text}")
        torch.testing.assert_close(mine, other)
        if layouts:
            assert mine.grad is not None
            assert other.grad is not None
            assert mine.grad.layout == other.grad.layout, name
            if mine.grad.is_sparse:
                assert torch.equal(mine.grad.indices(), other.grad.indices())


@contextmanager
def both_sides(build: Callable[[], nn.Module], **options: Any) -> Iterator[tuple[Any, Any]]:
    torch._dynamo.reset()
    ours, theirs = build(), build()
    dp_compile.replicate(ours, **{"config": AOT} | options)
    try:
        yield ours, DistributedDataParallel(theirs)
    finally:
        dp_compile.unreplicate(ours)


def optimizers(module: nn.Module) -> list[torch.optim.Optimizer]:
    tables = [each for name, each in module.named_parameters() if name.startswith(("first", "second"))]
    others = [each for name, each in module.named_parameters() if name.startswith("head")]
    return [torch.optim.SparseAdam(tables, lr=0.1), torch.optim.Adam(others, lr=0.1)]


def run_as_ddp(compile_model: Callable[[nn.Module], Any], micro: int) -> dict[str, int]:
    with both_sides(Words) as (ours, theirs):
        sides = [(ours, compile_model(ours), lambda: dp_compile.no_sync(ours)), (theirs, theirs, theirs.no_sync)]
        steppers = [optimizers(ours), optimizers(theirs.module)]
        for number in range(3):
            for (_, run, no_sync), stepper in zip(sides, steppers, strict=True):
                for each in stepper:
                    each.zero_grad()
                for each in range(micro):
                    with no_sync() if each + 1 < micro else nullcontext():
                        run(tokens(10 * number + each, dist.get_rank())).square().mean().backward()
            compare(ours, theirs.module)
            for each in (*steppers[0], *steppers[1]):
                each.step()
        compare(ours, theirs.module)
        return dict(dp_compile.report(ours).backwards)


@pytest.mark.parametrize(("compile_model", "micro"), [(compile_whole, 2), (compile_blocks, 1), (not_compiled, 1)])
def test_as_torch_s_ddp(ranks2: Ranks, compile_model: Callable[[nn.Module], Any], micro: int) -> None:
    for found in ranks2.run(run_as_ddp, compile_model, micro):
        assert found["eager hooks"] == 3
        assert "captured" not in found


def run_join() -> None:
    ours, theirs = dp_compile.replicate(Words(), config=AOT), Words()
    counts = (1, 3)
    with dp_compile.join(ours):
        for number in range(counts[dist.get_rank()]):
            ours.zero_grad()
            ours(tokens(number, dist.get_rank())).square().mean().backward()
    if dist.get_rank() == 1:
        (theirs(tokens(2, 1)).square().mean() / 2).backward()
        compare(ours, theirs, layouts=False)
    dp_compile.unreplicate(ours)


def test_uneven_inputs(ranks2: Ranks) -> None:
    ranks2.run(run_join)


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize(
    ("what", "make"),
    [
        (
            "reduce_dtype",
            lambda: dp_compile.replicate(Words(), mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)),
        ),
        (
            "a comm hook",
            lambda: dp_compile.replicate(Words()).register_comm_hook(dist.group.WORLD, fp16_compress_hook),
        ),
    ],
)
def test_what_it_cannot_be_combined_with(what: str, make: Callable[[], Any]) -> None:
    with pytest.raises(
        dp_compile.ConfigError, match=rf"the gradient of first\.weight is sparse, which {what}.*combined"
    ):
        make()


@pytest.mark.usefixtures("fake_group")
def test_it_is_not_cut() -> None:
    model = dp_compile.replicate(Words())
    with pytest.raises(dp_compile.ConfigError, match=r"first\.weight has sparse gradients: it is not cut"):
        dp_compile.optim.in_backward(model, torch.optim.SGD(model.parameters(), 0.1), shard=True)
    dp_compile.unreplicate(model)
