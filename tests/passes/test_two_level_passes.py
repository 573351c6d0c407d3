"""Two levels of network in a graph: three stages for a bucket, in an order in which compute hardly waits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from graphs import Bounded, Grad, plan_for, run_passes, trace
from torch import fx

from dp_compile.fx import edit
from dp_compile.fx.collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    REDUCE_SCATTER,
    is_collective,
    is_wait,
)
from dp_compile.passes import BucketReductions
from dp_compile.passes.graph_names import node_names
from dp_compile.plan import backends
from dp_compile.plan.backends import Backend
from dp_compile.plan.reduction import Levels

pytestmark = pytest.mark.usefixtures("fake_group")
aten = torch.ops.aten

LEVELS = Levels("in", "out", ((0, 1), (2, 3)))


def first(graph: fx.Graph, target: Any) -> fx.Node:
    return graph.find_nodes(op="call_function", target=target)[0]


def layers(number: int, backend: Backend) -> tuple[list[Grad], fx.GraphModule]:
    """A backward through matrices, last layer first; then something that no reduction needs."""
    grads = [Grad(index=index, shape=(4, 4), levels=LEVELS, backend=backend) for index in range(number)]

    def backward(grad: torch.Tensor, *saved: torch.Tensor) -> list[torch.Tensor]:
        weights, inputs, reduced = saved[:number], saved[number:], []
        for index in reversed(range(number)):
            reduced.append(grads[index].reduce(inputs[index].t() @ grad))
            grad = grad @ weights[index]
        return [*reduced, grad.exp()]

    return grads, trace(backward, *(torch.randn(4, 4) for _ in range(2 * number + 1)))


def test_the_stages_of_a_bucket() -> None:
    grad = Grad(index=0, shape=(3,), levels=LEVELS)
    module = run_passes(trace(lambda a: grad.reduce(a.sin()), torch.randn(3)), plan_for([grad]))
    names = node_names(module.graph, [plan_for([grad])], ["a"])
    assert [names[node] for node in module.graph.nodes if is_collective(node) or is_wait(node)] == [
        "launch 0", "wait 0", "launch 0 between", "wait 0 between", "launch 0 gather", "wait 0 gather"
    ]  # fmt: skip


def told(graph: fx.Graph) -> str:
    """Compute `c`; launches `R` reduce-scatter, `A` all-reduce, `G` all-gather and the bucket, waits small."""
    letters = {REDUCE_SCATTER: "R", ALL_TO_ALL: "R", ALL_REDUCE: "A", ALL_GATHER: "G"}
    parts: list[str] = []
    launched: dict[fx.Node, str] = {}
    for node in graph.nodes:
        provenance = edit.provenance_of(node)
        if is_collective(node):
            assert provenance is not None
            launched[node] = letters[node.target] + provenance.unit.partition(".")[2]
            parts.append(launched[node])
        elif is_wait(node):
            parts.append(launched[node.all_input_nodes[0]].lower())
        elif node.op == "call_function" and node.target in (aten.mm.default, aten.addmm.default, aten.exp.default):
            parts.append("exp" if node.target is aten.exp.default else "c")
    return " ".join(parts)


@pytest.mark.parametrize("backend", [backends.NCCL, backends.GLOO])
def test_compute_waits_for_a_stage_when_the_next_bucket_is_launched(backend: Backend) -> None:
    """And for the slow link only when nothing is left to compute."""
    grads, module = layers(3, backend)
    plan = plan_for(grads[::-1], cap=1)
    assert len(plan.buckets) == 3
    graph = run_passes(module, plan).graph
    assert told(graph) == "c R0 c c R1 r0 A0 c c R2 r1 A1 r2 A2 c exp a0 G0 a1 G1 a2 G2 g0 g1 g2"


def test_compute_that_does_not_move_is_not_held_back_either() -> None:
    grads, module = layers(3, backends.GLOO)
    passes = (BucketReductions(), Bounded(nbytes=0))
    graph = run_passes(module, plan_for(grads[::-1], cap=1), passes=passes).graph
    assert told(graph).replace(" exp", "").replace(" c", "").startswith("c R0 R1 r0 A0 R2 r1 A1 r2 A2 a0 G0")
