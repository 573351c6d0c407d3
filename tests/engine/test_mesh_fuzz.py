"""Random models, spread over random meshes by random plans, with one process as reference; the order of collectives.

A case is drawn from its number. `DP_COMPILE_MESH_CASES` runs other numbers: "7" one, "200-400" a range.
"""

import copy
import os
import random
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from meshes import Reads, dp_of, full, mesh_of, unordered
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import dp_compile
from dp_compile.engine import compile as compilation
from dp_compile.passes import DEFAULT_PASSES

TOKENS = 8
WHOLE, ROWS = Replicate(), Shard(1)
STYLES = {
    "plain": {},
    "colwise": {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()},
    "rowwise": {"up": RowwiseParallel(input_layouts=WHOLE), "down": ColwiseParallel(output_layouts=WHOLE)},
    "sequence": {
        "": PrepareModuleInput(input_layouts=WHOLE, desired_input_layouts=ROWS, use_local_output=True),
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=ROWS, use_local_output=False),
        "down": RowwiseParallel(output_layouts=WHOLE),
    },
}
ENDS = {"embedding": RowwiseParallel(input_layouts=WHOLE), "head": ColwiseParallel(output_layouts=WHOLE)}


def drawn(number):
    """A run; every fourth is captured. No dimension is smaller than `tp`; each rank has a part of the vocabulary."""
    pick = random.Random(number)
    steps = pick.randint(2, 3)
    blocks = tuple((pick.choice([*STYLES]), pick.randint(4, 9)) for _ in range(pick.randint(1, 3)))
    finds_unused, spread_ends = pick.random() < 0.3, pick.random() < 0.6
    nothing_else = not spread_ends and {style for style, _ in blocks} == {"plain"}
    return SimpleNamespace(
        shape=pick.choice(((2, 2), (2, 2), (2, 2), (1, 4), (4, 1), (2, 1, 2), (2, 2, 1))),
        vocabulary=pick.choice((7, 8, 10, 11, 12, 13)),
        width=pick.randint(4, 9),
        blocks=blocks,  # style and hidden features of each
        spread_ends=spread_ends,  # whether embedding and head are parallel
        tied=pick.random() < 0.5,
        is_scale_spread="DTensor" if nothing_else else pick.choice(("", "DTensor")),
        # For each step a block that copy 0 of the model leaves out.
        skipped=[pick.randrange(len(blocks)) if finds_unused and pick.random() < 0.6 else None for _ in range(steps)],
        accumulates=[pick.random() < 0.4 for _ in range(steps)],
        set_to_none=pick.random() < 0.5,
        bucket_cap_mb=pick.choice((None, 1e-5, 1e-3)),
        captured=number % 4 == 3,
        seed=number,
    )


class Block(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x):
        return self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, case):
        super().__init__()
        self.embedding = nn.Embedding(case.vocabulary, case.width)
        self.blocks = nn.ModuleList(Block(case.width, hidden) for _, hidden in case.blocks)
        self.scale = nn.Parameter(torch.ones(case.width))
        self.head = nn.Linear(case.width, case.vocabulary, bias=False)
        if case.tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens, skip=None):
        x = self.embedding(tokens)
        for number, block in enumerate(self.blocks):
            if number != skip:
                x = x + block(x)
        factor = self.scale.sum()
        if isinstance(factor, DTensor):
            factor = factor.to_local(grad_placements=[WHOLE])
        return self.head(x * factor)


def spread(model, case, mesh):
    for block, (style, _) in zip(model.blocks, case.blocks, strict=True):
        for name, each in STYLES[style].items():
            parallelize_module(block.get_submodule(name), mesh, each)
    if case.spread_ends:
        parallelize_module(model, mesh, ENDS)
        if case.tied:
            model.head.weight = model.embedding.weight
    if case.is_scale_spread:
        model.scale = nn.Parameter(distribute_tensor(model.scale.detach(), mesh, [WHOLE]))


def run(case):
    """A run, and the same in one process. Returns the orders of the collectives of captured backwards."""
    torch._dynamo.reset()
    Reads.found.clear()
    mesh = mesh_of(case.shape)
    dp, copies, here = dp_of(mesh)
    torch.manual_seed(case.seed)
    alone = Net(case).double()  # some of these make 1e-4 of a rounding in float32 within three steps
    model = copy.deepcopy(alone)
    spread(model, case, mesh["tp"])
    options = {"bucket_cap_mb": case.bucket_cap_mb, "find_unused_parameters": any(s is not None for s in case.skipped)}
    config = dp_compile.ReplicateConfig(backend="aot_eager", **options)
    dp_compile.replicate(model, device_mesh=dp, config=config)
    runs = torch.compile(model, backend="aot_eager") if case.captured else model
    named = dict(model.named_parameters())
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, alone)]

    def loss_of(run, step, place, skip):
        seed = torch.Generator().manual_seed(1000 * case.seed + 10 * step + place)
        tokens = torch.randint(case.vocabulary, (2, TOKENS), generator=seed)
        logits = run(tokens, skip if place == 0 else None)
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.roll(1, 1).flatten())

    def backward(step, skip):
        """`skip`: a block that copy 0 leaves out."""
        loss_of(runs, step, here, skip).backward()
        (sum(loss_of(alone, step, place, skip) for place in range(copies)) / copies).backward()

    for step, (skip, accumulates) in enumerate(zip(case.skipped, case.accumulates, strict=True)):
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=case.set_to_none)
        if accumulates:
            with dp_compile.no_sync(model):
                backward(step + 5, None)
        backward(step, skip)
        for name, theirs in alone.named_parameters():
            mine = named[name].grad
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


def run_all(numbers):
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
def test_meshes_and_plans(meshed, numbers):
    by_rank = meshed.run(run_all, numbers, timeout_s=550.0)
    for place, number in enumerate(numbers):
        # Ranks that leave a block out compile other graphs, and more or fewer of them: all orders of each group.
        orders = []
        for found in by_rank:
            orders.append({group: set() for graph in found[place] for group in graph})
            for group, order in ((group, order) for graph in found[place] for group, order in graph.items()):
                orders[-1][group].add(tuple(order))
        assert not unordered(orders), f"case {number}: {drawn(number)}"
        assert bool(orders[0]) == drawn(number).captured
