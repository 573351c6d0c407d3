"""A module that changes after `replicate` is an error that names the parameter; the check is spared where it can be."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parity import compile_whole, not_compiled
from torch import nn

import dp_compile
from dp_compile.engine import guards
from dp_compile.testing.ranks import Ranks


@pytest.fixture(autouse=True)
def no_replicas_of_other_tests() -> None:
    """They look at each backward of the process until they are collected."""
    torch._dynamo.reset()
    gc.collect()
    guards._intact.clear()
    guards._others.clear()


AOT = dp_compile.ReplicateConfig(backend="aot_eager", find_unused_parameters=True)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.first.bias.requires_grad_(False)
        self.adapter: nn.Module = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(self.first(x.to(self.first.weight)).to(self.last.weight))
        return result + self.adapter(x).to(result)


def replaced(model: Net) -> None:
    model.last.weight = nn.Parameter(torch.ones(4, 4))


def adapted(model: Net) -> None:
    model.adapter = nn.Linear(4, 4, bias=False)


def silently_adapted(model: Net) -> None:
    """Past `Module.__setattr__`, as some libraries do."""
    model._modules["adapter"] = nn.Linear(4, 4, bias=False)


def unfrozen(model: Net) -> None:
    model.first.bias.requires_grad_(True)


def wider(model: Net) -> None:
    model.first.double()


def loaded(model: Net) -> None:
    model.load_state_dict({name: p.detach() + 1 for name, p in model.named_parameters()}, assign=True)


CHANGES: dict[Callable[[Net], None], str] = {
    replaced: r"not reduced: last\.weight\. The parameter was replaced",
    adapted: r"not reduced: adapter\.weight\. The parameter was added",
    silently_adapted: r"not reduced: adapter\.weight\. The parameter was added",
    unfrozen: r"not reduced: first\.bias\. It was frozen",
    wider: r"first\.weight is float64, it was float32",
    loaded: r"not reduced: first\.weight, last\.weight, last\.bias\. The parameter was replaced",
}


def anomalies() -> AbstractContextManager[Any]:
    return torch.autograd.set_detect_anomaly(True, check_nan=False)


@pytest.fixture
def walks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows with each walk through a module."""
    seen: list[str] = []
    walk = guards._added

    def counted(replica: Any) -> Any:
        seen.append(replica.names[0])
        return walk(replica)

    monkeypatch.setattr(guards, "_added", counted)
    return seen


GUARDED = pytest.mark.skipif(
    torch.__version__ < (2, 12),
    reason="torch 2.11 does not compile a forward again whose parameter changed in place (pytorch#139476, #177158)",
)


@pytest.mark.parametrize("change", [pytest.param(each, marks=GUARDED if each is wider else ()) for each in CHANGES])
@pytest.mark.parametrize("way", [pytest.param(nullcontext, marks=GUARDED), anomalies])
def test_a_change_between_two_backwards(
    fake_group: dist.ProcessGroup, walks: list[str], change: Callable[[Net], None], way: Callable[[], Any]
) -> None:
    torch._dynamo.reset()
    model = dp_compile.replicate(Net(), config=AOT)
    for _ in range(4):
        with way():
            compile_whole(model)(torch.ones(2, 4)).sum().backward()
    assert len(walks) == 1 or way is nullcontext
    model.zero_grad()  # Dynamo refuses a parameter whose gradient is a view of memory with another dtype
    change(model)
    for _ in range(2):  # also after the first error was caught
        with pytest.raises(dp_compile.ReductionError, match=CHANGES[change]), way():
            compile_whole(model)(torch.ones(2, 4)).sum().backward()


def run_change(change: Callable[[Net], None]) -> str:
    """Two steps without compilation, a change, and the error of the third."""
    model = dp_compile.replicate(Net(), config=AOT)
    for number in range(3):
        model.zero_grad()
        if number == 2:
            change(model)
        try:
            model(torch.ones(2, 4)).sum().backward()
        except dp_compile.ReductionError as error:
            return str(error)
    return "no error"


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_after_replicate_is_named(ranks: Ranks, change: Callable[[Net], None]) -> None:
    for text in ranks.run(run_change, change):
        assert re.search(CHANGES[change], text)


def run_there_and_back(compile_model: Callable[[nn.Module], Any]) -> str:
    """Two steps, the second after another dtype; whether gradients are the same."""
    torch._dynamo.reset()
    model, found = dp_compile.replicate(Net(), config=AOT), []
    run = compile_model(model)
    for _ in range(2):
        model.zero_grad()
        run(torch.full((2, 4), 1.0 + dist.get_rank())).sum().backward()
        found.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
        model.double().float()
    return "the same" if all(map(torch.equal, *found)) else "other gradients"


@pytest.mark.parametrize("compile_model", [compile_whole, not_compiled])
def test_another_dtype_for_a_while(ranks: Ranks, compile_model: Callable[[nn.Module], Any]) -> None:
    """torch's DDP loses all parameters without a word."""
    assert set(ranks.run(run_there_and_back, compile_model)) == {"the same"}


@pytest.mark.parametrize("way", [pytest.param(nullcontext, marks=GUARDED), anomalies])
def test_frozen_and_then_trained(fake_group: dist.ProcessGroup, way: Callable[[], Any]) -> None:
    """What was added frozen is nobody's business until it is trained."""
    torch._dynamo.reset()
    model = dp_compile.replicate(Net(), config=AOT)
    model.adapter = nn.Linear(4, 4).requires_grad_(False)
    for _ in range(2):
        with way():
            compile_whole(model)(torch.ones(2, 4)).sum().backward()
    model.adapter.requires_grad_(True)
    with pytest.raises(dp_compile.ReductionError, match=r"adapter\.weight, adapter\.bias\. .* added"), way():
        compile_whole(model)(torch.ones(2, 4)).sum().backward()
