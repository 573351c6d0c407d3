"""What the fuzzer found, each in its smallest form."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import fuzzing
import pytest
import torch
import torch.distributed as dist
from fuzzing import BlockSpec, FuzzCase, Micro, Step
from parity import Case, train_both
from torch import nn

from dp_compile.testing.ranks import Ranks

SAME = Step((Micro((2, 2)),))


def assert_equal(ranks: Ranks, case: FuzzCase) -> None:
    for outcome in ranks.run(fuzzing.run_case, case):
        assert outcome.difference == ""


def test_layout_of_a_gradient_that_only_another_rank_produced(ranks: Ranks) -> None:
    """It was contiguous, whatever the parameter's memory order."""
    case = FuzzCase(
        blocks=(BlockSpec("layouts"),),
        width=2,
        steps=(Step((Micro((2, 2), way=(0, 1)),)), Step((Micro((2, 2), way=(1, 0)),))),
        ways=((), (0,)),
        find_unused=True,
    )
    assert_equal(ranks, case)


def compiled_every_other_time_on_rank_1(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    compiled, calls = torch.compile(model, backend="aot_eager"), itertools.count()
    return lambda x: (model if dist.get_rank() == 1 and next(calls) % 2 else compiled)(x)


def run_accumulation_that_ends_uncompiled() -> None:
    torch._dynamo.reset()
    train_both(
        Case(
            build=lambda: nn.Linear(2, 2),
            batch=lambda rank, step: (torch.full((2, 2), 1.0 + rank + step),),
            compile_model=compiled_every_other_time_on_rank_1,
            micro_steps=2,
        )
    )


def test_accumulation_that_ends_uncompiled_on_one_rank(ranks: Ranks) -> None:
    ranks.run(run_accumulation_that_ends_uncompiled)


def test_a_forward_is_compiled_late_in_an_accumulation(ranks: Ranks) -> None:
    case = FuzzCase(
        blocks=(BlockSpec("linear"), BlockSpec("linear")),
        width=4,
        steps=(
            Step((Micro((1, 1), way=(1, 1)), Micro((1, 1)))),
            Step((Micro((1, 1)), Micro((1, 1), way=(1, 1)))),
        ),
        ways=((), (0,)),
        compiled="late",
        find_unused=True,
    )
    assert_equal(ranks, case)


def test_a_hook_that_remembers_something_of_a_parameter_without_elements(ranks: Ranks) -> None:
    """Nobody uses what an empty state becomes: it was taken out of the graph, and the hook asked for it."""
    steps = (Step((Micro((3, 2)),)),)
    blocks = (BlockSpec("layouts", hidden=2, dtype="float64"),)
    case = FuzzCase(blocks=blocks, width=1, steps=steps, comm_hook="rounded")
    assert_equal(ranks, case)


def test_a_gradient_that_is_kept_and_not_added_to(ranks: Ranks) -> None:
    """Behind a cast the node of a parameter that is not used is in the graph, and gets nothing: the old gradient stood
    twice among the inputs, which Dynamo takes for a bug of its own."""
    kept = Step((Micro((2, 2), way=(1, 1)),), set_to_none=False)
    case = FuzzCase(
        blocks=(BlockSpec("tied"),),
        width=3,
        steps=(Step((Micro((2, 2), way=(0, 0)),)), kept),
        ways=((), (0,)),
        find_unused=True,
        compute="bfloat16",
    )
    assert_equal(ranks, case)


@pytest.mark.parametrize("hook", ["", "squash"])
def test_a_parameter_that_compiled_code_casts_and_does_not_use(ranks: Ranks, hook: str) -> None:
    """Casts of all parameters are in the compiled forward. Hooks heard of those that it does not use, the user's had no
    gradient to work on, and what no rank used counted as used: it became zeros where torch's DDP leaves nothing."""
    other = (1, 1) if not hook else (1, 0)
    case = FuzzCase(
        blocks=(BlockSpec("linear", hidden=2),),
        width=2,
        steps=(Step((Micro((2, 2), way=(1, 1)), Micro((2, 2), way=other, eager=(True, False)))), SAME),
        ways=((), (0,)),
        find_unused=True,
        compute="bfloat16",
        hook=hook,
    )
    assert_equal(ranks, case)
    # The model is compiled late, and nobody asks before a backward without synchronisation whether hooks reduce.
    local = Micro((2, 2), way=(1, 1))
    late = replace(case, steps=(SAME, Step((local, Micro((2, 2), way=(1, 0)))), SAME), compiled="late")
    assert_equal(ranks, late)


@pytest.mark.parametrize("compiled", ["model", "nothing"])
def test_what_is_still_to_be_sent_of_a_parameter_that_nobody_uses_in_a_step(ranks: Ranks, compiled: str) -> None:
    """It was sent with zeros for a gradient, in an average that nobody was given, and forgotten."""
    nobody, all_use_it = Step((Micro((3, 4)),)), Step((Micro((3, 4), way=(1, 1)),))
    case = FuzzCase(
        blocks=(BlockSpec("linear"),),
        width=6,
        steps=(nobody, *[all_use_it, nobody] * 3, all_use_it),
        ways=((), (0,)),
        compiled=compiled,
        find_unused=True,
        comm_hook="int8",
        per_scale=64,
    )
    assert_equal(ranks, case)
