"""Random models, spread over random meshes by random plans, beside one process; the order of each group's collectives.

A case is drawn from its number. `DP_COMPILE_MESH_CASES` runs other numbers: "7" one, "200-400" a range.
"""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from meshes import Orders, Reads, dp_of, full, mesh_of, unordered
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import dp_compile
from dp_compile.engine import compile as compilation
from dp_compile.passes import DEFAULT_PASSES
from dp_compile.testing.ranks import Ranks

TOKENS = 8
STYLES = ("plain", "colwise", "rowwise", "sequence")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshCase:
    """A training run. `blocks`: the style and the hidden features of each."""

    shape: tuple[int, ...]
    vocabulary: int
    width: int
    blocks: tuple[tuple[str, int], ...]
    spread_ends: bool
    """Whether embedding and head are parallel."""
    tied: bool
    scale: str
    """`plain`, or a `DTensor`."""
    skipped: tuple[int | None, ...]
    """For each step a block that copy 0 of the model leaves out."""
    accumulates: tuple[bool, ...]
    set_to_none: bool
    bucket_cap_mb: float | None
    captured: bool
    seed: int


def drawn(number: int) -> MeshCase:
    """Every fourth is captured: it takes as long as ten others.

    No dimension is smaller than `tp`: see `test_fewer_rows_than_ranks`. And each rank has a part of the vocabulary:
    torch looks nothing up where there is none.
    """
    pick = random.Random(number)
    steps = pick.randint(2, 3)
    blocks = tuple((pick.choice(STYLES), pick.randint(4, 9)) for _ in range(pick.randint(1, 3)))
    finds_unused, spread_ends = pick.random() < 0.3, pick.random() < 0.6
    nothing_else = not spread_ends and {style for style, _ in blocks} == {"plain"}
    return MeshCase(
        shape=pick.choice(((2, 2), (2, 2), (2, 2), (1, 4), (4, 1), (2, 1, 2), (2, 2, 1))),
        vocabulary=pick.choice((7, 8, 10, 11, 12, 13)),
        width=pick.randint(4, 9),
        blocks=blocks,
        spread_ends=spread_ends,
        tied=pick.random() < 0.5,
        scale="DTensor" if nothing_else else pick.choice(("plain", "DTensor")),
        skipped=tuple(
            pick.randrange(len(blocks)) if finds_unused and pick.random() < 0.6 else None for _ in range(steps)
        ),
        accumulates=tuple(pick.random() < 0.4 for _ in range(steps)),
        set_to_none=pick.random() < 0.5,
        bucket_cap_mb=pick.choice((None, 1e-5, 1e-3)),
        captured=number % 4 == 3,
        seed=number,
    )


class Block(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, case: MeshCase) -> None:
        super().__init__()
        self.embedding = nn.Embedding(case.vocabulary, case.width)
        self.blocks = nn.ModuleList(Block(case.width, hidden) for _, hidden in case.blocks)
        self.scale = nn.Parameter(torch.ones(case.width))
        self.head = nn.Linear(case.width, case.vocabulary, bias=False)
        if case.tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor, skip: int | None = None) -> torch.Tensor:
        x = self.embedding(tokens)
        for number, block in enumerate(self.blocks):
            if number != skip:
                x = x + block(x)
        factor: Any = self.scale.sum()
        if isinstance(factor, DTensor):
            factor = factor.to_local(grad_placements=[Replicate()])
        return self.head(x * factor)


def styles_of(style: str) -> dict[str, ParallelStyle]:
    if style == "colwise":
        return {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}
    if style == "rowwise":
        return {
            "up": RowwiseParallel(input_layouts=Replicate()),
            "down": ColwiseParallel(output_layouts=Replicate()),
        }
    if style == "sequence":
        return {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
            "down": RowwiseParallel(output_layouts=Replicate()),
        }
    return {}


def spread(model: Net, case: MeshCase, mesh: DeviceMesh) -> None:
    for block, (style, _) in zip(model.blocks, case.blocks, strict=True):
        if style == "sequence":
            takes = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=True)
            parallelize_module(block, mesh, takes)
        parallelize_module(block, mesh, styles_of(style))
    if case.spread_ends:
        layers: dict[str, ParallelStyle] = {
            "embedding": RowwiseParallel(input_layouts=Replicate()),
            "head": ColwiseParallel(output_layouts=Replicate()),
        }
        parallelize_module(model, mesh, layers)
        if case.tied:
            model.head.weight = model.embedding.weight
    if case.scale == "DTensor":
        model.scale = nn.Parameter(distribute_tensor(model.scale.detach(), mesh, [Replicate()]))


def loss_of(model: Any, case: MeshCase, step: int, copy_number: int, skip: int | None) -> torch.Tensor:
    seed = torch.Generator().manual_seed(1000 * case.seed + 10 * step + copy_number)
    tokens = torch.randint(case.vocabulary, (2, TOKENS), generator=seed)
    return nn.functional.cross_entropy(model(tokens, skip).flatten(0, 1), tokens.roll(1, 1).flatten())


def run(case: MeshCase) -> list[Orders]:
    """A run, and the same in one process. Returns the orders of the collectives of captured backwards."""
    torch._dynamo.reset()
    Reads.found.clear()
    mesh = mesh_of(case.shape)
    dp, copies, here = dp_of(mesh)
    torch.manual_seed(case.seed)
    alone = Net(case).double()  # some of these make 1e-4 of a rounding in float32 within three steps
    model = copy.deepcopy(alone)
    spread(model, case, mesh["tp"])
    finds = any(each is not None for each in case.skipped)
    config = dp_compile.ReplicateConfig(
        backend="aot_eager", bucket_cap_mb=case.bucket_cap_mb, find_unused_parameters=finds
    )
    dp_compile.replicate(model, device_mesh=dp, config=config)
    runs = torch.compile(model, backend="aot_eager") if case.captured else model
    named = dict(model.named_parameters())
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, alone)]

    def backward(step: int, skip: int | None) -> None:
        """`skip`: a block that copy 0 leaves out."""
        loss_of(runs, case, step, here, skip if here == 0 else None).backward()
        losses = [loss_of(alone, case, step, each, skip if each == 0 else None) for each in range(copies)]
        (sum(losses) / copies).backward()

    for step, (skip, accumulates) in enumerate(zip(case.skipped, case.accumulates, strict=True)):
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=case.set_to_none)
        if accumulates:
            with dp_compile.no_sync(model):
                backward(step + 5, None)
        backward(step, skip)
        for name, theirs in alone.named_parameters():
            mine: Any = named[name].grad
            if theirs.grad is None:
                assert mine is None or not full(mine).any(), f"step {step}: gradient of {name}"
                continue
            atol = 1e-9 * theirs.grad.abs().max().item() + 1e-12
            torch.testing.assert_close(full(mine), theirs.grad, rtol=0, atol=atol, msg=f"step {step}: {name}")
        for optimizer in optimizers:
            optimizer.step()
    assert all(value is named[name] for name, value in model.named_parameters())
    ways = dp_compile.report(model).backwards
    assert ("captured" if case.captured else "eager hooks") in ways, ways
    dp_compile.unreplicate(model)
    return list(Reads.found)


def run_all(numbers: Sequence[int]) -> list[list[Orders]]:
    found = []
    for number in numbers:
        try:
            with mock.patch.object(compilation, "DEFAULT_PASSES", (*DEFAULT_PASSES, Reads())):
                found.append(run(drawn(number)))
        except Exception as error:
            raise AssertionError(f"case {number}: {drawn(number)}") from error
    return found


first, _, last = os.environ.get("DP_COMPILE_MESH_CASES", "0-199").partition("-")
BY_NIGHT = range(int(first), int(last or first) + 1)
PARTS = [pytest.param([*BY_NIGHT[at : at + 20]], marks=pytest.mark.nightly) for at in range(0, len(BY_NIGHT), 20)]


@pytest.mark.parametrize("numbers", [[0, 1, 3], *PARTS])
def test_meshes_and_plans(meshed: Ranks, numbers: list[int]) -> None:
    by_rank = meshed.run(run_all, numbers, timeout_s=550.0)
    for place, number in enumerate(numbers):
        # Ranks that leave a block out compile other graphs, and more or fewer of them.
        orders = [all_orders(found[place]) for found in by_rank]
        assert not unordered(orders), f"case {number}: {drawn(number)}"
        assert bool(orders[0]) == drawn(number).captured


def all_orders(found: Sequence[Orders]) -> dict[tuple[int, ...], set[tuple[str, ...]]]:
    """By group, every order in which a graph of a rank has its collectives."""
    orders: dict[tuple[int, ...], set[tuple[str, ...]]] = {}
    for graph in found:
        for group, order in graph.items():
            orders.setdefault(group, set()).add(tuple(order))
    return orders
