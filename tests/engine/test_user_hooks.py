"""Post-accumulate hooks of the user's: they see the rank's own gradient, as with torch's DDP, in every way.

The hooks are not linear: of a linear one nobody can tell whether it ran before the reduction or behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parity import (
    AOT,
    Block,
    Side,
    Untraceable,
    anomaly,
    beside,
    compile_whole,
    mlp,
    not_compiled,
    plain,
)
from torch import nn

import dp_compile
from dp_compile.errors import ReductionError
from dp_compile.testing.ranks import Ranks

Hook = Callable[[torch.Tensor], None]


def clip(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.clamp_(-0.01, 0.01)


def replace(parameter: torch.Tensor) -> None:
    """Another tensor in the gradient's place, and not a number on one rank."""
    assert parameter.grad is not None
    parameter.grad = torch.nan_to_num(parameter.grad / (parameter.grad.abs() > 0.02), nan=0.0, posinf=0.5, neginf=-0.5)


def drop(parameter: torch.Tensor) -> None:
    parameter.grad = None


HOOKS: dict[str, Hook] = {"clip": clip, "replace": replace, "drop": drop}


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Block(), Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(Untraceable.apply(self.first(x)))
        return result


def fallback_of_rank_0(side: Side, number: int) -> None:
    (anomaly if number == 1 and dist.get_rank() == 0 else plain)(side, number)


WAYS: dict[str, tuple[Any, Any, Any]] = {
    "captured": (mlp, compile_whole, plain),
    "graph break": (Broken, compile_whole, plain),
    "eager hooks": (mlp, compile_whole, anomaly),
    "not compiled": (mlp, not_compiled, plain),
    "one rank falls back once": (mlp, compile_whole, fallback_of_rank_0),
}


def run_hooks(way: str, hook: str, early: bool, buckets: dict[str, Any]) -> dict[str, int]:
    """`early`: the hook is set before `replicate`, otherwise behind it."""
    build, compile_model, step = WAYS[way]

    def with_hooks() -> nn.Module:
        module: nn.Module = build()
        for parameter in list(module.parameters())[:-1] if early else ():
            parameter.register_post_accumulate_grad_hook(HOOKS[hook])
        return module

    def hooked(side: Side, number: int) -> None:
        for parameter in list(side.module.parameters())[:-1] if number == 0 and not early else ():
            parameter.register_post_accumulate_grad_hook(HOOKS[hook])
        step(side, number)

    return dict(beside(with_hooks, hooked, compile_model=compile_model, **buckets).backwards)


SET = (("clip", False), ("clip", True), ("replace", False), ("drop", True))


@pytest.mark.parametrize(
    ("way", "hook", "early"),
    [
        *((way, *each) for way in ("captured", "eager hooks", "not compiled") for each in SET),
        ("graph break", "clip", False),
        ("one rank falls back once", "replace", False),
    ],
)
def test_hooks_see_local_gradients(ranks: Ranks, way: str, hook: str, early: bool) -> None:
    counts = ranks.run(run_hooks, way, hook, early, {"bucket_cap_mb": 1e-4} if hook == "clip" else {})
    expected = {"captured": "captured", "graph break": "eager hooks", "eager hooks": "eager hooks"}
    assert counts[1].get(expected.get(way, "eager hooks" if way == "not compiled" else "captured"))


# --- an optimizer in a hook steps on local gradients ------------------------------------------------------------------


def run_optimizer_in_hook(way: str) -> str:
    build, compile_model, step = WAYS[way]
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = dp_compile.replicate(build(), config=AOT)
    steps = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in list(model.parameters())[:2]}

    def step_now(parameter: nn.Parameter) -> None:
        steps[parameter].step()

    for parameter in steps:
        parameter.register_post_accumulate_grad_hook(step_now)
    side = Side(model, compile_model(model), next(iter(steps.values())), nullcontext, ours=True)
    try:
        step(side, 0)
    except ReductionError as error:
        return str(error)
    finally:
        dp_compile.unreplicate(model)
    return "no error"


@pytest.mark.parametrize("way", WAYS)
def test_an_optimizer_in_a_hook_is_an_error_that_names_the_parameter(ranks: Ranks, way: str) -> None:
    first = "first.layers.0.weight" if way == "graph break" else "0.weight"
    for error in ranks.run(run_optimizer_in_hook, way):
        assert first in error
        assert "inside a hook" in error
