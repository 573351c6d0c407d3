"""Real ranks: gradients, parameters and their layout equal torch's DDP after several steps."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parity import Case, train_both
from plans import uncoalesced
from torch import nn

import dp_compile
from dp_compile.insight.report import Report
from dp_compile.passes.reduction import EagerOps, Launched
from dp_compile.plan.reduction import Stage
from dp_compile.testing.ranks import Ranks
from dp_compile.train.gpt import GPT, GPTConfig


def seeded(rank: int, step: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 * rank + step)


def vectors(rank: int, step: int) -> tuple[torch.Tensor]:
    return (torch.randn(4, 8, generator=seeded(rank, step)),)


def tokens(rank: int, step: int) -> tuple[torch.Tensor]:
    return (torch.randint(0, 64, (2, 16), generator=seeded(rank, step)),)


def images(rank: int, step: int) -> tuple[torch.Tensor]:
    return (torch.randn(2, 3, 8, 8, generator=seeded(rank, step)).to(memory_format=torch.channels_last),)


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second, self.head = nn.Conv2d(8, 4, 3), nn.Linear(4, 5)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(self.norm(self.first(x)).relu()).mean((2, 3)))


class UsedTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(torch.relu(self.layer(x)))


class Frozen(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.layers[0].weight.requires_grad_(False)


class Branches(nn.Module):
    """Which parameters take part depends on the rank and the step."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.never, self.last = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor, way: int) -> torch.Tensor:
        branch = self.left if way % 2 == 0 else self.right
        return self.last(branch(x))


def branch_by_rank_and_step(rank: int, step: int) -> tuple[torch.Tensor, int]:
    return (*vectors(rank, step), rank * (step % 3) + step // 3)


def gpt() -> nn.Module:
    return GPT(GPTConfig(vocabulary=64, context=16, width=16, layers=1, heads=2))


KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[int, int], Any]]] = {
    "mlp": (MLP, vectors),
    "gpt with tied weights": (gpt, tokens),
    "convnet in channels_last": (ConvNet, images),
    "parameter used twice": (UsedTwice, vectors),
    "frozen parameter": (Frozen, vectors),
}

VARIANTS: dict[str, dict[str, Any]] = {
    "compiled": {},
    "gradients kept": {"set_to_none": lambda step: False},
    "accumulation": {"micro_steps": 3},
    "bf16 autocast": {"autocast": True, "rtol": 2e-2, "atol": 2e-3},
    "no passes": {"options": {"passes": ()}},
    "small buckets": {"options": {"bucket_cap_mb": 0.001}},
    "not compiled": {"compile_model": lambda model: model, "micro_steps": 3},
}


def run_case(kind: str, variant: str, **changes: Any) -> Report:
    build, batch = KINDS[kind]
    torch._dynamo.reset()
    return train_both(Case(build=build, batch=batch, **VARIANTS[variant] | changes))


PAIRS: dict[str, set[str]] = {
    "mlp": set(VARIANTS),
    "gpt with tied weights": {"bf16 autocast", "small buckets"},
    "convnet in channels_last": {"gradients kept", "no passes", "not compiled"},
    "parameter used twice": {"accumulation"},
    "frozen parameter": {"compiled"},
}
"""Each kind and each variant; `tests/harness/parity.py` has all options together."""


@pytest.mark.parametrize(
    ("kind", "variant"),
    [(kind, variant) for kind in KINDS for variant in VARIANTS if variant in PAIRS[kind]],
)
def test_two_ranks(ranks: Ranks, kind: str, variant: str) -> None:
    for report in ranks.run(run_case, kind, variant):
        if variant == "not compiled":
            assert set(report.backwards) == {"eager hooks", "without sync"}
        else:
            assert set(report.backwards) <= {"captured", "captured without sync"}
            assert report.captures[-1].graphs == 1


def test_inductor(ranks: Ranks) -> None:
    """The same through code generation; gradients kept from the second step on, so both forms are compiled."""
    for report in ranks.run(run_inductor_case):
        assert all(record.graphs == 1 for record in report.captures)
        assert 1 < report.captures[0].collectives < report.captures[0].hooks


def run_inductor_case() -> Report:
    changes = {"backend": "inductor", "compile_model": torch.compile, "atol": 1e-5, "rtol": 1e-4}
    return run_case("convnet in channels_last", "small buckets", set_to_none=lambda step: step % 2 == 0, **changes)


# --- hooks that run eagerly -------------------------------------------------------------------------------------


def run_eager_hooks(kind: str, variant: str) -> Report:
    """Without any compiler: a first compiled forward would decide for hooks, so enter past the decision."""
    build, batch = KINDS[kind]

    def keep_hooks(model: nn.Module) -> nn.Module:
        return model

    return train_both(Case(build=build, batch=batch, compile_model=keep_hooks, **VARIANTS[variant]))


@pytest.mark.parametrize("variant", ["compiled", "accumulation", "no passes", "small buckets"])
def test_eager_hooks(ranks: Ranks, variant: str) -> None:
    for kind in KINDS:
        for report in ranks.run(run_eager_hooks, kind, variant):
            assert report.mode == "python hooks"


@dataclass(frozen=True)
class LateWork:
    """A collective whose result is there when somebody waits for it, not before."""

    tensors: list[torch.Tensor]

    def wait(self) -> None:
        for tensor in self.tensors:
            tensor.fill_(3.0)


@pytest.mark.usefixtures("fake_group")
def test_eager_hooks_wait_for_their_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EagerOps, "launch", lambda ops, stage, tensors: Launched(tensors, LateWork(tensors)))
    model = dp_compile.replicate(MLP(), bucket_cap_mb=1e-6, check_reductions=False)
    model(*vectors(0, 0)).square().mean().backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert bool((parameter.grad == 3.0).all())


@pytest.mark.usefixtures("fake_group")
def test_eager_hooks_launch_one_module_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """As captured code does on another rank: the last module first, whatever gradients arrive first."""
    launched: list[int] = []

    def launch(ops: EagerOps, stage: Stage, tensors: list[torch.Tensor]) -> Launched:
        launched.append(tensors[0].numel())
        return Launched(tensors, LateWork(tensors))

    monkeypatch.setattr(EagerOps, "launch", launch)
    first, last = nn.Linear(2, 2), nn.Linear(3, 3)
    for model in (first, last):
        dp_compile.replicate(model, bucket_cap_mb=1e-6, check_reductions=False)
    # The engine begins with what was computed last.
    (last(torch.ones(1, 3)).sum() + first(torch.ones(1, 2)).sum()).backward()
    plans = [dp_compile.report(model).plan for model in (last, first)]
    assert launched == [bucket.tensor_numels[0] for plan in plans for bucket in plan.buckets]


LAYOUTS: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    "flat": contextlib.nullcontext,
    "grouped": uncoalesced,
    "half apart": lambda: uncoalesced(2),
}


def run_one_rank_eagerly(kind: str, layout: str) -> dict[str, int]:
    """Rank 1 cannot capture some of its backwards; the collectives still fit together."""
    build, batch = KINDS[kind]
    torch._dynamo.reset()
    _calls[0] = 0
    with LAYOUTS[layout]():
        return dict(train_both(Case(build=build, batch=batch, loss=lambda out: _maybe_uncaptured(out))).backwards)


def _maybe_uncaptured(output: torch.Tensor) -> torch.Tensor:
    loss = output.square().mean()
    _calls[0] += 1
    torch.compiler.set_stance("force_eager" if dist.get_rank() == 1 and _calls[0] % 4 == 3 else "default")
    return loss


_calls = [0]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["convnet in channels_last"])
def test_one_rank_captures_and_the_other_does_not(ranks: Ranks, kind: str, layout: str) -> None:
    first, second, *_ = ranks.run(run_one_rank_eagerly, kind, layout)
    assert first == {"captured": 4}
    assert second == {"captured": 2, "eager hooks": 2}


# --- unused parameters ------------------------------------------------------------------------------------------


def run_unused(compiled: str, micro_steps: int, kept: bool) -> Report:
    torch._dynamo.reset()
    case = Case(
        build=Branches,
        batch=branch_by_rank_and_step,
        steps=6,
        micro_steps=micro_steps,
        options={"find_unused_parameters": True},
        set_to_none=lambda step: not kept,
    )
    if compiled == "eager":
        case = dataclasses.replace(case, compile_model=lambda model: model)
    return train_both(case)


@pytest.mark.parametrize(
    ("kept", "micro_steps", "compiled"),
    [(False, 1, "compiled"), (True, 2, "compiled"), (True, 1, "eager"), (False, 2, "eager")],
)
def test_unused_on_one_rank_with_find_unused(ranks: Ranks, compiled: str, micro_steps: int, kept: bool) -> None:
    for report in ranks.run(run_unused, compiled, micro_steps, kept):
        if compiled == "compiled":
            assert any(record.completed for record in report.captures)


def run_unused_error(only_rank: int | None) -> str:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Branches()
    model.never.requires_grad_(False)
    dp_compile.replicate(model, config=dp_compile.ReplicateConfig(backend="aot_eager"))
    compiled = torch.compile(Both(model), backend="aot_eager")
    skip = dist.get_rank() == only_rank or only_rank is None
    try:
        compiled(*vectors(dist.get_rank(), 0), skip).sum().backward()
    except dp_compile.ReductionError as error:
        return str(error)
    return "no error"


class Both(nn.Module):
    """Runs both branches unless told to skip one: the left one on rank 0, the right one elsewhere."""

    def __init__(self, model: Branches) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor, skip: bool) -> torch.Tensor:
        if skip:
            return self.model(x, 1 - min(dist.get_rank(), 1))
        return self.model(x, 0) + self.model(x, 1)


def test_unused_is_an_error_on_every_rank(ranks: Ranks) -> None:
    first, second, *_ = ranks.run(run_unused_error, None)
    assert "on this rank: left.weight, left.bias" in first
    assert re.search(r"on ranks? 1[\d, ]*: right.weight, right.bias", first)
    assert "on this rank: right.weight, right.bias" in second
    assert "find_unused_parameters=True" in second


def test_unused_on_one_rank_is_an_error_on_every_rank(ranks: Ranks) -> None:
    first, second, *_ = ranks.run(run_unused_error, 1)
    assert "on rank 1: right.weight, right.bias" in first
    assert "on this rank: right.weight, right.bias" in second
