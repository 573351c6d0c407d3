"""Later runs of a compiled backward ask Dynamo nothing: what is looked at in its place, and where that is not enough.

How could it be wrong without a word? By something that Dynamo would have noticed: other inputs, another state of torch,
code of the user's that runs in the backward and does something else now.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from beside import AOT
from torch import nn

import dp_compile
from dp_compile.engine import artifacts

pytestmark = pytest.mark.usefixtures("fake_group")


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many inputs each run without Dynamo had."""
    runs: list[int] = []
    run = artifacts.Ready.run

    def counted(self: artifacts.Ready, inputs: list[Any]) -> Any:
        runs.append(len(inputs))
        return run(self, inputs)

    monkeypatch.setattr(artifacts.Ready, "run", counted)
    return runs


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 6))


X = torch.linspace(-1, 1, 18).view(3, 6)


def backward(model: Any, x: torch.Tensor = X) -> None:
    model(x).square().sum().backward()


@pytest.fixture
def model() -> Iterator[nn.Module]:
    torch._dynamo.reset()
    made = dp_compile.replicate(net(), config=AOT)
    yield made
    dp_compile.unreplicate(made)


def assert_plain_gradients(model: nn.Module, x: torch.Tensor = X) -> None:
    """The played ranks of the group send nothing: the average over two is half of what is computed here."""
    twin = net()
    twin.load_state_dict(model.state_dict())
    backward(twin, x)
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad / 2)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.nightly)])
def test_later_backwards(without: list[int], backend: str) -> None:
    torch._dynamo.reset()
    model = dp_compile.replicate(net(), config=dp_compile.ReplicateConfig(backend=backend))
    run = torch.compile(model, backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(4):
        optimizer.zero_grad()
        backward(run, X + step)
        assert_plain_gradients(model, X + step)
        optimizer.step()
    assert len(without) == 3
    assert dp_compile.report(model).backwards == {"captured": 4}
    dp_compile.unreplicate(model)


def test_parameters_in_other_memory(model: nn.Module, without: list[int]) -> None:
    """What is like the inputs that were seen need not be the same tensors."""
    run = torch.compile(model, backend="aot_eager")
    for step in range(3):
        model.zero_grad()
        for parameter in model.parameters():
            parameter.data = parameter.data.clone() + step
        backward(run)
        assert_plain_gradients(model)
    assert len(without) == 2


STATES: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
    "default dtype": (lambda: torch.set_default_dtype(torch.float64), lambda: torch.set_default_dtype(torch.float32)),
    "threads": (lambda: torch.set_num_threads(torch.get_num_threads() + 1), lambda: None),
}


@pytest.mark.parametrize("state", STATES)
def test_another_state_of_torch(model: nn.Module, without: list[int], state: str) -> None:
    """Dynamo looks at it, and compiles anew; a state that is as it was needs no look again."""
    run = torch.compile(model, backend="aot_eager")
    threads, (change, back) = torch.get_num_threads(), STATES[state]
    for _ in range(2):
        model.zero_grad()
        backward(run)
    outputs = run(X).square().sum()
    model.zero_grad()
    try:
        change()
        outputs.backward()
        assert len(without) == 1
    finally:
        back()
        torch.set_num_threads(threads)
    assert_plain_gradients(model)
    model.zero_grad()
    backward(run)
    assert_plain_gradients(model)
    assert len(without) == 2


def test_dynamo_forgets(model: nn.Module, without: list[int]) -> None:
    run = torch.compile(model, backend="aot_eager")
    backward(run)
    torch._dynamo.reset()
    model.zero_grad()
    backward(run)
    assert not without
    assert_plain_gradients(model)


class Scale(torch.autograd.Function):
    """Its backward multiplies by what a variable of this module says now."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * factor

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * factor


factor = 1.0


def post_hook(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(factor)


@pytest.mark.parametrize("what", ["post-accumulate hook", "hook on a tensor", "autograd function"])
def test_code_of_the_user_s_that_changes(
    model: nn.Sequential, without: list[int], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dynamo sees that a variable which the code reads has another value; nobody else would."""
    # Only what the loss is scaled by is compared: a factor of two, wherever it is applied.
    if what == "post-accumulate hook":
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(post_hook)
    compiled = torch.compile(model, backend="aot_eager")

    def run(x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = compiled(x)
        if what == "hook on a tensor":
            out.register_hook(lambda grad: grad * factor)
        return Scale.apply(out) / factor if what == "autograd function" else out

    found = []
    for value in (1.0, 1.0, 2.0):
        monkeypatch.setitem(globals(), "factor", value)
        model.zero_grad()
        run(X).sum().backward()
        found.append([each.grad.clone() for each in model.parameters() if each.grad is not None])
    assert not without
    scale = 1.0 if what == "autograd function" else 2.0
    for first, second, third in zip(*found, strict=True):
        torch.testing.assert_close(second, first)
        torch.testing.assert_close(third, scale * first)


def test_gradients_that_are_added_to(model: nn.Module, without: list[int]) -> None:
    run = torch.compile(model, backend="aot_eager")
    for _ in range(3):
        backward(run)
    assert not without
    with dp_compile.no_sync(model):
        backward(run)
    assert not without


def test_what_a_forward_saved_is_freed_while_the_backward_runs(
    model: nn.Module, without: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list of inputs is emptied, and nobody else holds what was in it."""
    run, seen, alive = torch.compile(model, backend="aot_eager"), list[Any](), list[bool]()
    counted, put = artifacts.Ready.run, artifacts.Ready._put

    def note(self: artifacts.Ready, inputs: list[Any]) -> Any:
        seen.extend(weakref.ref(each) for each in inputs if not isinstance(each, nn.Parameter) and each.dim() == 2)
        return counted(self, inputs)

    def look(self: artifacts.Ready, *args: Any) -> Any:
        alive.extend(ref() is not None for ref in seen)
        return put(self, *args)

    monkeypatch.setattr(artifacts.Ready, "run", note)
    monkeypatch.setattr(artifacts.Ready, "_put", look)
    for _ in range(2):
        model.zero_grad()
        backward(run)
    assert len(without) == 1
    assert seen
    assert not any(alive)
