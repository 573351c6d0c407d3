"""Several process groups, dtypes, tied and repeated parameters in one backward, on real ranks."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from beside import AOT
from torch import nn

import dp_compile
from dp_compile._torch import compiler
from dp_compile.insight.report import Report
from dp_compile.testing.ranks import Ranks

STEPS = 4
PAIRS = ((0, 1), (2, 3))


class Mixed(nn.Module):
    """Tokens to logits in two dtypes: embedding and head share one float32 weight, a bfloat16 layer is used twice.

    Only products, sums and `relu` are in bfloat16: they round alike when traced and when not.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.token = nn.Embedding(11, 6)
        self.wide = nn.Linear(6, 6)
        self.again = nn.Linear(6, 6).bfloat16()
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 11)
        self.head.weight = self.token.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.wide(self.token(tokens)).tanh()).bfloat16()
        logits: torch.Tensor = self.head(self.again(self.again(x).relu()).float())
        return logits


def group_of(members: Sequence[Sequence[int]]) -> dist.ProcessGroup:
    """This rank's of several disjoint groups; every rank makes them all."""
    groups = {rank: group for ranks in members if (group := dist.new_group(list(ranks))) for rank in ranks}
    return groups[dist.get_rank()]


def tokens(step: int) -> torch.Tensor:
    return torch.randint(0, 11, (3, 5), generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))


def loss_of(first: Any, second: Any, step: int) -> torch.Tensor:
    first_loss: torch.Tensor = first(tokens(step)).square().mean()
    second_loss: torch.Tensor = second(tokens(step + STEPS)).sin().mean()
    return first_loss + second_loss


def average_gradients(model: nn.Module, group: dist.ProcessGroup) -> None:
    """What data parallelism means, without any of it: add up over the group, divide by its size."""
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.div_(dist.get_world_size(group))
        dist.all_reduce(parameter.grad, group=group)


def compare(ours: nn.Module, theirs: nn.Module, when: str) -> None:
    """In bfloat16 a sum over ranks depends on their order, which depends on the place in a bucket."""
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert mine.grad is not None, name
        assert other.grad is not None, name
        assert (mine.grad.dtype, mine.grad.stride()) == (mine.dtype, mine.stride()), name
        error = (mine.grad - other.grad).abs().max()
        assert error <= 4 * torch.finfo(mine.dtype).eps * other.grad.abs().max(), f"{when}: {name}: {error}"


def train(others: Sequence[Sequence[int]], cap_mb: float) -> tuple[int, list[Report], list[list[torch.Tensor]]]:
    """How many backwards were captured; of both modules the reports, and the parameters in the end."""
    torch._dynamo.reset()
    before = compiler.captures()
    groups = group_of(PAIRS), group_of(others)
    models = Mixed(0), Mixed(1)
    plain = copy.deepcopy(models)
    for model, group in zip(models, groups, strict=True):
        dp_compile.replicate(model, process_group=group, bucket_cap_mb=cap_mb, config=AOT)
    compiled = [torch.compile(model, backend="aot_eager") for model in models]
    optimizer = torch.optim.SGD([parameter for model in models for parameter in model.parameters()], lr=0.05)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(*compiled, step).backward()
        for ours, theirs in zip(models, plain, strict=True):
            theirs.load_state_dict(ours.state_dict())
            theirs.zero_grad()
        loss_of(*plain, step).backward()
        for ours, theirs, group in zip(models, plain, groups, strict=True):
            average_gradients(theirs, group)
            compare(ours, theirs, f"step {step}")
        optimizer.step()
    reports = [dp_compile.report(model) for model in models]
    for model in models:
        dp_compile.unreplicate(model)
    return compiler.captures() - before, reports, [[each.detach() for each in model.parameters()] for model in models]


@pytest.mark.parametrize(
    ("others", "cap_mb", "of_each"),
    [(((0, 1, 2, 3),), 1e-4, 4), pytest.param(((0, 2), (1, 3)), 25, 2, marks=pytest.mark.nightly)],
)
def test_two_groups_two_dtypes_tied_and_repeated_parameters(
    ranks4: Ranks, others: tuple[tuple[int, ...], ...], cap_mb: float, of_each: int
) -> None:
    """The numbers are compared on the ranks. Here: all was one graph, with the collectives of both plans."""
    outcomes = ranks4.run(train, others, cap_mb)
    for number, members in enumerate((PAIRS, others)):
        for ranks in members:
            for first, *rest in zip(*(outcomes[rank][2][number] for rank in ranks), strict=True):
                assert all(torch.equal(first, other) for other in rest)
    for captured, reports, _ in outcomes:
        assert captured == 1
        for report in reports:
            assert report.backwards == {"captured": STEPS}
            assert {bucket.key.dtype for bucket in report.plan.buckets} == {"float32", "bfloat16"}
            assert len(report.plan.buckets) == of_each
        (first,), (second,) = (report.captures for report in reports)
        assert first == second
        assert (first.graphs, first.deferred, first.collectives) == (1, False, 2 * of_each)
        after = first.passes[-1].after
        assert sum(times for name, times in after.items() if name.startswith("all_reduce")) == 2 * of_each
