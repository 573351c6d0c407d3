"""Each model and each way to train once, beside torch's DDP; `tests/harness/parity.py` has all options together."""

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from parity import not_compiled, train_both
from torch import nn

import dp_compile
from dp_compile.passes.reduction import EagerOps, Launched
from dp_compile.train.gpt import GPT, GPTConfig


def seeded(rank, step):
    return torch.Generator().manual_seed(1000 * rank + step)


def vectors(rank, step):
    return (torch.randn(4, 8, generator=seeded(rank, step)),)


def tokens(rank, step):
    return (torch.randint(0, 64, (2, 16), generator=seeded(rank, step)),)


def images(rank, step):
    return (torch.randn(2, 3, 8, 8, generator=seeded(rank, step)).to(memory_format=torch.channels_last),)


class MLP(nn.Module):
    def __init__(self, frozen=False):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 8))
        self.layers[0].weight.requires_grad_(not frozen)

    def forward(self, x):
        return self.layers(x)


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second, self.head = nn.Conv2d(8, 4, 3), nn.Linear(4, 5)
        self.to(memory_format=torch.channels_last)

    def forward(self, x):
        return self.head(self.second(self.norm(self.first(x)).relu()).mean((2, 3)))


class UsedTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return self.layer(torch.relu(self.layer(x)))


class Branches(nn.Module):
    """Which parameters take part depends on the rank and the step."""

    def __init__(self):
        super().__init__()
        self.left, self.right, self.never, self.last = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x, way):
        branch = self.left if way % 2 == 0 else self.right
        return self.last(branch(x))


def gpt():
    return GPT(GPTConfig(vocabulary=64, context=16, width=16, layers=1, heads=2))


KINDS = {
    "mlp": (MLP, vectors),
    "gpt with tied weights": (gpt, tokens),
    "convnet in channels_last": (ConvNet, images),
    "parameter used twice": (UsedTwice, vectors),
    "frozen parameter": (lambda: MLP(frozen=True), vectors),
    "branches": (
        Branches,
        lambda rank, step: (*vectors(rank, step), rank * (step % 3) + step // 3),
    ),
}
SMALL = {"options": {"bucket_cap_mb": 0.001}}
KEPT = {"set_to_none": lambda step: False}
UNUSED = {"steps": 6, "options": {"find_unused_parameters": True}}
EAGER = {"compile_model": not_compiled}
# Gradients are kept from the second step on, so that both forms are compiled.
INDUCTOR = {"backend": "inductor", "compile_model": torch.compile, "atol": 1e-5, "rtol": 1e-4}
VARIANTS = {
    "compiled": {},
    "gradients kept": KEPT,
    "accumulation": {"micro_steps": 3},
    "bf16 autocast": {"autocast": True, "rtol": 2e-2, "atol": 2e-3},
    "small buckets": SMALL,
    "inductor": SMALL | INDUCTOR | {"set_to_none": lambda step: step % 2 == 0},
    "eager, accumulation": EAGER | {"micro_steps": 3},
    "eager, small buckets": EAGER | SMALL,
    "unused": UNUSED,
    "unused, kept, accumulation": UNUSED | KEPT | {"micro_steps": 2},
    "unused, eager, kept": UNUSED | KEPT | EAGER,
    "unused, eager, accumulation": UNUSED | EAGER | {"micro_steps": 2},
}


def run_case(kind, variant, **changes):
    build, batch = KINDS[kind]
    return train_both(build, batch, **VARIANTS[variant] | changes)


@pytest.mark.parametrize(
    ("kind", "variant"),
    [
        ("mlp", "accumulation"),
        ("gpt with tied weights", "bf16 autocast"),
        ("gpt with tied weights", "small buckets"),
        ("convnet in channels_last", "gradients kept"),
        ("convnet in channels_last", "inductor"),
        ("parameter used twice", "accumulation"),
        ("frozen parameter", "compiled"),
    ],
)
def test_two_ranks(ranks, kind, variant):
    for report in ranks.run(run_case, kind, variant):
        assert set(report.backwards) <= {"captured", "without sync"}
        assert {record.graphs for record in report.captures} == {1}
        if variant == "inductor":
            assert 1 < report.captures[0].collectives < report.captures[0].hooks


@pytest.mark.parametrize("variant", ["eager, accumulation", "eager, small buckets"])
def test_eager_hooks(ranks, variant):
    for kind in list(KINDS)[:-1]:
        for report in ranks.run(run_case, kind, variant):
            assert set(report.backwards) <= {"eager hooks", "without sync"}


@dataclass(frozen=True)
class LateWork:
    """A collective whose result is there when it is waited for, not before."""

    tensor: torch.Tensor

    def wait(self):
        self.tensor.fill_(3.0)


@pytest.mark.usefixtures("fake_group")
def test_eager_hooks_wait_for_their_buckets(monkeypatch):
    monkeypatch.setattr(EagerOps, "launch", lambda ops, stage, tensor: Launched(tensor, LateWork(tensor)))
    model = dp_compile.replicate(MLP(), bucket_cap_mb=1e-6, check_reductions=False)
    model(*vectors(0, 0)).square().mean().backward()
    for parameter in model.parameters():
        assert bool((parameter.grad == 3.0).all())


@pytest.mark.usefixtures("fake_group")
def test_eager_hooks_launch_one_module_after_the_other(monkeypatch):
    """As captured code does on another rank: the last module first, in whichever order gradients are complete."""
    launched = []

    def launch(ops, stage, tensor):
        launched.append(tensor.numel())
        return Launched(tensor, LateWork(tensor))

    monkeypatch.setattr(EagerOps, "launch", launch)
    first, last = nn.Linear(2, 2), nn.Linear(3, 3)
    for model in (first, last):
        dp_compile.replicate(model, bucket_cap_mb=1e-6, check_reductions=False)
    # The engine begins with what was computed last.
    (last(torch.ones(1, 3)).sum() + first(torch.ones(1, 2)).sum()).backward()
    plans = [dp_compile.report(model).plan for model in (last, first)]
    assert launched == [bucket.numel for plan in plans for bucket in plan.buckets]


def run_one_rank_eagerly():
    """Rank 1 cannot capture each second of its backwards; the collectives still fit together."""
    calls = []

    def loss(output):
        calls.append(dist.get_rank())  # the loss of ours and that of torch's DDP, in turns
        torch.compiler.set_stance("force_eager" if calls[-1] == 1 and len(calls) % 4 == 3 else "default")
        return output.square().mean()

    return dict(run_case("convnet in channels_last", "compiled", loss=loss).backwards)


def test_one_rank_captures_and_the_other_does_not(ranks):
    first, second, *_ = ranks.run(run_one_rank_eagerly)
    assert first == {"captured": 4}
    assert second == {"captured": 2, "eager hooks": 2}


@pytest.mark.parametrize("variant", [each for each in VARIANTS if each.startswith("unused")])
def test_unused_on_one_rank_with_find_unused(ranks, variant):
    for report in ranks.run(run_case, "branches", variant):
        assert any(record.completed for record in report.captures) is ("eager" not in variant)
