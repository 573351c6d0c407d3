"""Functional comm hooks in a graph: what a bucket becomes, and that a pass which changes any of it is refused."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from graphs import Changed, Grad, plan_for, run_passes, trace
from torch import fx

from dp_compile.comm_hooks.functional import FunctionalHook, HookBucket, register
from dp_compile.errors import InvalidGraphError, ReductionError
from dp_compile.fx.collectives import ALL_REDUCE
from dp_compile.passes import DEFAULT_PASSES
from dp_compile.passes.memory import Running
from dp_compile.passes.reduction import HOOK_STEP
from dp_compile.plan.backends import GLOO
from dp_compile.plan.buckets import BucketPlan
from dp_compile.plan.reduction import Averaging

pytestmark = pytest.mark.usefixtures("fake_group")
GRADS = [Grad(index=0), Grad(index=1, shape=(2, 3))]


@dataclass(frozen=True)
class Twice(FunctionalHook):
    """Has two rounds, and an error for each gradient."""

    rounds: ClassVar[tuple[str, ...]] = ("all_reduce", "all_reduce")

    def initial_state(self, gradient: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"error": gradient.new_zeros(())}

    def reduce(self, bucket: HookBucket) -> Generator[torch.Tensor, torch.Tensor, Any]:
        sums = []
        for part in (0, 1):
            total = yield torch.cat([gradient.flatten()[part::2] for gradient in bucket.gradients])
            sums.append(total.sum())
        reduced = [gradient + sums[0] - sums[1] for gradient in bucket.gradients]
        return reduced, [{"error": state["error"] + sums[0]} for state in bucket.state]


KEY, HOOK = register(Twice())


def plan(key: str = KEY, hook: FunctionalHook = HOOK) -> BucketPlan:
    reduction = Averaging(hook=key, rounds=hook.rounds).reduction("0", GLOO, 2, "float32")
    specs = [replace(grad.spec, key=grad.spec.key._replace(reduction=reduction)) for grad in GRADS]
    return plan_for(GRADS).with_keys_of(specs)


def backward(*values: torch.Tensor) -> list[torch.Tensor]:
    return [grad.reduce(value.sin()) for grad, value in zip(GRADS, values, strict=True)]


def local_sums(graph: fx.Graph) -> None:
    """A round is left out: ranks go on with what is their own."""
    launch = graph.find_nodes(op="call_function", target=ALL_REDUCE)[0]
    (wait,) = launch.users
    for user in list(wait.users):
        user.replace_input_with(wait, launch.args[0])
    graph.erase_node(wait)
    graph.erase_node(launch)


def test_what_is_changed_is_found() -> None:
    traced = trace(backward, *(grad.values() for grad in GRADS))
    with pytest.raises(InvalidGraphError, match="pass 'users-pass'"):
        run_passes(traced, plan(), passes=(*DEFAULT_PASSES, Changed(local_sums)))


def test_gradients_that_a_compiler_moves_between_steps() -> None:
    """The hook has them from its first step, and their memory may be another tensor's by the second."""
    gradients, state = [torch.ones(4), torch.ones(2, 3)], {"error": torch.zeros(())}
    rest, running = (KEY, "0", 0, 0), Running([plan()], states=[lambda index: state])
    with running:
        (first,) = HOOK_STEP(gradients, [], *rest)
        (second,) = HOOK_STEP(gradients, [first], *rest)
        HOOK_STEP(gradients, [first, second], *rest)
        assert [float(each["error"]) for each in running.hook_runs[0, 0].new_state] == [float(first.sum())] * 2
        (first,) = HOOK_STEP(gradients, [], *rest)
        with pytest.raises(ReductionError, match=r"at other addresses than in its previous step.*aot_eager"):
            HOOK_STEP([gradients[0], gradients[1].clone()], [first], *rest)
