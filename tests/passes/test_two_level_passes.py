"""Two levels of network in a graph: three stages for a bucket, in an order in which compute hardly waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphs import Changed, Grad, plan_for, run_passes, trace
from torch import fx

from dp_compile.errors import InvalidGraphError
from dp_compile.fx import edit
from dp_compile.fx.collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    REDUCE_SCATTER,
    is_collective,
    is_wait,
)
from dp_compile.insight.graph_names import node_names
from dp_compile.passes import DEFAULT_PASSES, BucketReductions, ScheduleCollectives
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
    passes = (BucketReductions(), ScheduleCollectives(memory_bound_nbytes=0))
    graph = run_passes(module, plan_for(grads[::-1], cap=1), passes=passes).graph
    assert told(graph).replace(" exp", "").replace(" c", "").startswith("c R0 R1 r0 A0 R2 r1 A1 r2 A2 a0 G0")


# --- the check reads the stages from the graph ----------------------------------------------------------------------


def between_nodes(graph: fx.Graph) -> tuple[fx.Node, fx.Node]:
    launch = first(graph, ALL_REDUCE)
    (wait,) = launch.users
    return launch, wait


def leave_out_what_is_between_nodes(graph: fx.Graph) -> None:
    launch, wait = between_nodes(graph)
    edit.replace(wait, launch.all_input_nodes[0])
    graph.erase_node(launch)


def gather_another(graph: fx.Graph) -> None:
    """The first bucket gets what belongs to the second one, which has the same size."""
    one, other = graph.find_nodes(op="call_function", target=ALL_GATHER)
    one.args, other.args = (other.args[0], *one.args[1:]), (one.args[0], *other.args[1:])
    edit.sort_stably(graph)


def add_up_the_wrong_parts(graph: fx.Graph) -> None:
    """Elements that belong to other ranks: those that lie side by side."""
    node, view = first(graph, aten.sum.dim_IntList), first(graph, aten.view.default)
    view.args, node.args = (view.args[0], [16, 2]), (view, [1])


@pytest.mark.parametrize(
    ("wrong", "backend"),
    [
        (leave_out_what_is_between_nodes, backends.NCCL),
        (gather_another, backends.NCCL),
        (add_up_the_wrong_parts, backends.GLOO),
    ],
)
def test_a_stage_that_is_changed_is_found(wrong: Callable[[fx.Graph], None], backend: Backend) -> None:
    grads = [Grad(index=index, shape=(3,), levels=LEVELS, backend=backend) for index in range(2)]
    module = trace(lambda a, b: (grads[0].reduce(a.sin()), grads[1].reduce(b.cos())), *(torch.randn(3),) * 2)
    with pytest.raises(InvalidGraphError, match=r"pass 'users-pass' changed .*p0"):
        run_passes(module, plan_for(grads, cap=1), passes=(*DEFAULT_PASSES, Changed(wrong)))
