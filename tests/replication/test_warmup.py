"""Warm-up compiles everything beforehand and leaves no trace; afterwards nothing is compiled in any kind of step."""

import copy
import random
from contextlib import nullcontext
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from parity import AOT, same_on_all_ranks
from torch import nn

import dp_compile
from dp_compile._torch import compiler
from dp_compile.replication.module import replica_of

pytestmark = pytest.mark.usefixtures("fake_group")


class Net(nn.Module):
    """Tokens in, logits out; with running statistics and random numbers. Small: each form of it is compiled often."""

    def __init__(self):
        super().__init__()
        self.token, self.drop, self.mix = nn.Embedding(32, 8), nn.Dropout(0.1), nn.Linear(8, 32)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, tokens):
        self.seen.add_(1.0)
        return self.mix(self.drop(self.token(tokens)))


def tokens(batch, length):
    return torch.randint(0, 32, (batch, length))


def build(group=None):
    torch.manual_seed(0)
    model = dp_compile.replicate(Net(), process_group=group, config=AOT)
    compiled = torch.compile(model, backend="aot_eager")

    def loss(x):
        return nn.functional.cross_entropy(compiled(x).flatten(0, 1), x.flatten())

    return model, loss


def made():
    return compiler.captures(), compiler.compiled_graphs()


def mixed_steps(model, loss, count, sizes):
    """Steps with and without reduction, gradients kept and not, of any length and with a smaller batch at times."""
    kinds, shapes = random.Random(1), random.Random(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(count):
        if kinds.random() < 0.7:
            optimizer.zero_grad(set_to_none=kinds.random() < 0.5)
        synced = kinds.random() < 0.6
        with nullcontext() if synced else dp_compile.no_sync(model):
            loss(tokens(shapes.choice(sizes), shapes.choice(range(5, 12)))).backward()
        if synced:
            optimizer.step()


@pytest.mark.parametrize("sizes", [(4,), pytest.param((4, 3), marks=pytest.mark.nightly)])
def test_nothing_is_compiled_after_the_warm_up(sizes):
    model, loss = build()
    examples = [tokens(*shape) for shape in ((4, 9), (4, 7), (3, 8), (3, 6)) if shape[0] in sizes]
    record = dp_compile.warmup(model, examples, loss)
    assert record.backwards % (len(examples) * 4) == 0
    assert record.settled
    before = made()
    mixed_steps(model, loss, 50, sizes)
    assert made() == before
    assert set(dp_compile.report(model).backwards) == {"captured", "without sync"}
    assert sum(dp_compile.report(model).backwards.values()) == 50


def test_no_trace():
    model, loss = build()
    loss(tokens(4, 9)).backward()
    replica = replica_of(model)
    grads = [parameter.grad for parameter in model.parameters()]
    values, state = [grad.clone() for grad in grads], copy.deepcopy(model.state_dict())
    seen, steps, backwards = model.seen, replica.history.synced_backwards, dp_compile.report(model).backwards
    example, random_numbers = tokens(4, 9), torch.get_rng_state()
    dp_compile.warmup(model, [example], loss)
    torch.testing.assert_close(torch.get_rng_state(), random_numbers)
    assert all(parameter.grad is grad for parameter, grad in zip(model.parameters(), grads, strict=True))
    assert all(torch.equal(value, grad) for value, grad in zip(values, grads, strict=True))
    assert all(torch.equal(one, other) for one, other in zip(state.values(), model.state_dict().values(), strict=True))
    assert model.seen is seen
    assert (replica.history.synced_backwards, dp_compile.report(model).backwards) == (steps, backwards)


def test_refuses():
    model, loss = build()
    with pytest.raises(dp_compile.ConfigError, match="at least one batch"):
        dp_compile.warmup(model, [], loss)

    def step(x):
        with torch.no_grad():
            model.mix.weight.add_(1.0)
        return loss(x)

    with pytest.raises(dp_compile.ConfigError, match=r"changed mix\.weight"):
        dp_compile.warmup(model, [tokens(4, 9)], step)


@on_ranks("ranks")
def test_two_ranks_with_shapes_of_their_own():
    """The same plan, the same collectives, nothing compiled later, equal parameters."""
    model, loss = build()
    torch.manual_seed(dist.get_rank())
    examples = [tokens(4, length) for length in ((9, 7) if dist.get_rank() == 0 else (7, 9))]
    dp_compile.warmup(model, examples, loss, accumulation=False, gradients_kept=False)
    before, optimizer, lengths = made(), torch.optim.SGD(model.parameters(), lr=0.01), random.Random(dist.get_rank())
    for _ in range(20):
        optimizer.zero_grad()
        loss(tokens(4, lengths.choice(range(5, 12)))).backward()
        optimizer.step()
    assert made() == before
    same_on_all_ranks(model)


@on_ranks("ranks2")
def test_ranks_have_to_warm_up_alike():
    """Rank 1 warms up with one batch more, then not at all."""
    model, loss = build(group=dist.new_group(timeout=timedelta(seconds=3)))
    with pytest.raises(dp_compile.DesyncError, match="rank 1 differs from rank 0: batches is 2 there, 1 on rank 0"):
        dp_compile.warmup(model, [tokens(4, 9)] * (1 + dist.get_rank()), loss)
    if dist.get_rank() == 0:
        with pytest.raises(dp_compile.DesyncError, match=r"^warmup\(\): rank 1 has not called warmup\(\) after 3 s$"):
            dp_compile.warmup(model, [tokens(4, 9)], loss)
