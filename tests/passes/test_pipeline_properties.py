"""What the default passes keep, on random graphs: shapes, strides, dtypes, groups, orders, plans.

The graphs run in a `World` of this file: not the marks that passes leave on nodes are compared, but numbers.
"""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from backwards import RandomBackward, random_backwards
from graphs import Unreduced, launches, short
from hypothesis import given, settings
from torch import fx

from dp_compile._torch import distributed
from dp_compile.fx.collectives import WAIT
from dp_compile.fx.text import last_name
from dp_compile.passes import DEFAULT_PASSES
from dp_compile.passes.pipeline import Pipeline
from dp_compile.passes.reduction import REDUCE_GRAD
from dp_compile.plan.buckets import BucketPlan

EXAMPLES = 300
PRIMES = (3, 5, 7, 11, 13, 17, 19, 23, 29)
RunPasses = Callable[[fx.Graph, Sequence[BucketPlan]], Any]


class World(Unreduced):
    """Runs a graph where a collective multiplies by a prime of its own for each group and reduce op.

    So a number tells which collectives it went through. A result is NaN until it has been waited for; to wait for
    something twice, or for nothing, is an error. Each value is compared with what the graph promises of it.
    """

    def __init__(self, graph: fx.Graph, groups: Sequence[str], plans: Sequence[BucketPlan]) -> None:
        super().__init__(graph, plans)
        self.primes = dict(zip(itertools.product(groups, ("sum", "avg", "max")), PRIMES, strict=True))
        self.pending: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def run_all(self, inputs: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """What the graph returns, and what it has made of its inputs."""
        own = [copy.deepcopy(tensor) for tensor in inputs]
        outputs = self.run(*own)
        assert not self.pending, "a collective is never waited for"
        return list(outputs), own

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if isinstance(result, torch.Tensor) and n.op == "call_function":
            promised = n.meta["val"]
            assert (result.dtype, layout(result)) == (promised.dtype, layout(promised)), f"{n.name} breaks its promise"
        return result

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is WAIT:
            assert id(args[0]) in self.pending, "a wait for something that is not under way"
            return super().call_function(target, args, kwargs).copy_(self.pending.pop(id(args[0]))[1])
        result = super().call_function(target, args, kwargs)
        if target is REDUCE_GRAD:
            (stage,) = self.gradients[args[2], args[1]].key.reduction.stages
            result.mul_(self.primes[stage.group, stage.reduce_op])
        elif getattr(target, "namespace", "") == "_c10d_functional":
            for each in result if isinstance(result, list) else [result]:
                self.pending[id(each)] = each, each * self.primes[args[2], args[1]]
                each.fill_(float("nan"))
        return result


def layout(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """Sizes and strides; a stride counts only where it means anything."""
    sized = zip(tensor.shape, tensor.stride(), strict=True)
    return [(size, stride if size > 1 and tensor.numel() else 0) for size, stride in sized]


def run_default_passes(graph: fx.Graph, plans: Sequence[BucketPlan]) -> None:
    Pipeline(DEFAULT_PASSES, plans, lambda result: None)(graph)


def check(case: RandomBackward, groups: Sequence[str], run_passes: RunPasses = run_default_passes) -> None:
    """Run passes over a graph and check everything that must hold. Raises where something does not."""
    before, after, again = case.graph, copy.deepcopy(case.graph), copy.deepcopy(case.graph)
    run_passes(after, case.plans)
    after.lint()
    check_launches(after, case.plans)
    outputs = before.output_node().args[0], after.output_node().args[0]
    for was, now in zip(*outputs, strict=True):
        assert was.meta["val"].stride() == now.meta["val"].stride(), "other strides are returned"
    expected, inputs_before = World(before, groups, case.plans).run_all(case.inputs)
    found, inputs_after = World(after, groups, case.plans).run_all(case.inputs)
    for position, (was, now) in enumerate(zip(expected + inputs_before, found + inputs_after, strict=True)):
        assert (was.dtype, layout(was)) == (now.dtype, layout(now)), "another dtype or layout is returned"
        if case.exact or position < len(case.grads):
            check_numbers(was, now, exact=case.exact)
    run_passes(again, case.plans)
    assert short(again) == short(after), "the same graph became another one"
    ops = Counter(map(last_name, after.nodes))
    run_passes(after, case.plans)  # may move compute once more, among orders that are equally good
    assert Counter(map(last_name, after.nodes)) == ops, "a second run changed something"
    check_launches(after, case.plans)
    for was, now in zip(found, World(after, groups, case.plans).run_all(case.inputs)[0], strict=True):
        assert torch.equal(was.nan_to_num(), now.nan_to_num()), "a second run changed a number"


def check_launches(graph: fx.Graph, plans: Sequence[BucketPlan]) -> None:
    """One collective for each bucket, as the plan says, in the order of the plan."""
    assert not graph.find_nodes(op="call_function", target=REDUCE_GRAD), "a reduction is left over"
    found = launches(graph)
    for replica, plan in enumerate(plans):
        planned = [f"{replica}.{number}" for number in range(len(plan.buckets))]
        assert [unit for unit in found if unit.startswith(f"{replica}.")] == planned, "not the plan's launches"
    assert len(found) == sum(len(plan.buckets) for plan in plans), "a launch that is in no plan"


def check_numbers(was: torch.Tensor, now: torch.Tensor, *, exact: bool) -> None:
    if exact:
        assert torch.equal(was.nan_to_num(), now.nan_to_num()), "other numbers"
    elif was.numel():
        error = (was.double() - now.double()).abs().nan_to_num(posinf=0.0).max()
        assert error <= 8 * torch.finfo(was.dtype).eps * was.double().abs().nan_to_num(posinf=0.0).max(), (
            "other numbers"
        )


@pytest.fixture(scope="module")
def groups(fake_group: dist.ProcessGroup) -> tuple[str, ...]:
    return ("0", *(distributed.group_name(dist.new_group([0, 1])) for _ in range(2)))


@pytest.mark.parametrize("examples", [EXAMPLES // 2, pytest.param(EXAMPLES, marks=pytest.mark.nightly)])
def test_everything_holds_on_every_graph(groups: tuple[str, ...], examples: int) -> None:
    @settings(max_examples=examples)
    @given(random_backwards(groups))
    def holds(case: RandomBackward) -> None:
        check(case, groups)

    holds()
