"""Several process groups, dtypes, tied and repeated parameters in one backward, on real ranks."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from torch import nn

import dp_compile
from dp_compile.fx.collectives import ALL_REDUCE
from dp_compile.report import Report

STEPS = 4
OTHERS = {"pairs and all": ((0, 1, 2, 3),), "pairs across pairs": ((0, 2), (1, 3))}


class Mixed(nn.Module):
    """Tokens to logits in two dtypes: embedding and head share one float32 weight, a bfloat16 layer is used twice."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.token = nn.Embedding(11, 6)
        self.wide = nn.Linear(6, 6)
        self.again = nn.Linear(6, 6).bfloat16()
        self.norm = nn.LayerNorm(6).bfloat16()
        self.head = nn.Linear(6, 11)
        self.head.weight = self.token.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.wide(self.token(tokens)).tanh().bfloat16()
        x = self.norm(self.again(self.again(x).relu()))
        logits: torch.Tensor = self.head(x.float())
        return logits


@dataclass(frozen=True)
class Outcome:
    """Of one rank: collectives that ran in each compiled backward, and the reports of both modules."""

    collectives: int
    reports: tuple[Report, ...]


def group_of(members: Sequence[Sequence[int]]) -> dist.ProcessGroup:
    """This rank's of several disjoint groups; every rank makes them all."""
    groups = {rank: group for ranks in members if (group := dist.new_group(list(ranks))) for rank in ranks}
    return groups[dist.get_rank()]


def tokens(step: int) -> torch.Tensor:
    return torch.randint(0, 11, (3, 5), generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))


def loss_of(first: Any, second: Any, step: int) -> torch.Tensor:
    first_loss: torch.Tensor = first(tokens(step)).square().mean()
    second_loss: torch.Tensor = second(tokens(step + STEPS)).sin().sum()
    return first_loss + 0.1 * second_loss


def average_gradients(model: nn.Module, group: dist.ProcessGroup) -> None:
    """What data parallelism means, without any of it: add up over the group, divide by its size."""
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.div_(dist.get_world_size(group))
        dist.all_reduce(parameter.grad, group=group)


def compare(ours: nn.Module, theirs: nn.Module, when: str) -> None:
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert mine.grad is not None
        assert mine.grad.dtype == mine.dtype
        for what, one, two in (("gradient", mine.grad, other.grad), ("parameter", mine, other)):
            message = f"{when}: {what} of {name}"
            torch.testing.assert_close(one, two, msg=lambda text, message=message: f"{message}: {text}")


def train(others: Sequence[Sequence[int]], cap_mb: float, backend: str = "aot_eager") -> Outcome:
    torch._dynamo.reset()
    groups = group_of([(0, 1), (2, 3)]), group_of(others)
    models = Mixed(0), Mixed(1)
    plain = copy.deepcopy(models)
    config = dp_compile.ReplicateConfig(backend="aot_eager")
    for model, group in zip(models, groups, strict=True):
        dp_compile.replicate(model, process_group=group, bucket_cap_mb=cap_mb, config=config)
    compiled = [torch.compile(model, backend="aot_eager") for model in models]
    optimizers = [torch.optim.SGD([*one.parameters(), *two.parameters()], lr=0.1) for one, two in (models, plain)]
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(*compiled, step).backward()
        loss_of(*plain, step).backward()
        for ours, theirs, group in zip(models, plain, groups, strict=True):
            average_gradients(theirs, group)
            compare(ours, theirs, f"step {step}")
        for optimizer in optimizers:
            optimizer.step()
    reports = tuple(dp_compile.report(model) for model in models)
    for model in models:
        dp_compile.unreplicate(model)
    return reports


@pytest.mark.parametrize("cap_mb", [1e-4, 25])
@pytest.mark.parametrize("others", OTHERS.values(), ids=OTHERS)
def test_two_groups_two_dtypes_tied_and_repeated_parameters(
    ranks4: Ranks, others: tuple[tuple[int, ...], ...], cap_mb: float
) -> None:
    for first, second in ranks4.run(train, others, cap_mb):
        pass
