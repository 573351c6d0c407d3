"""A pass that breaks a graph, or changes a reduction, is refused: with its name, and that of the node or gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from graphs import Changed, Grad, plan_for, run_passes, trace
from graphs import replace as replace_node
from torch import fx

from dp_compile.errors import InvalidGraphError
from dp_compile.fx import edit
from dp_compile.fx.collectives import ALL_REDUCE, WAIT, is_collective
from dp_compile.passes import DEFAULT_PASSES
from dp_compile.passes.reduction import FLAT_BUCKET, REDUCE_GRAD
from dp_compile.passes.updates import UPDATE, UPDATE_LATER, PlaceUpdates, read_update
from dp_compile.passes.verify import Checks
from dp_compile.plan.backends import GLOO, NCCL, Backend
from dp_compile.plan.buckets import BucketPlan, Layout, plan_buckets
from dp_compile.plan.reduction import Averaging, Levels

pytestmark = pytest.mark.usefixtures("fake_group")
aten = torch.ops.aten
Edit = Callable[[fx.Graph], Any]

GRADS = [Grad(index=0), Grad(index=1), Grad(index=2, shape=(2, 3)), Grad(index=3, shape=(2, 3), order=(1, 0))]
MADE_HERE = edit.Provenance("0.0")


def traced() -> fx.GraphModule:
    def backward(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        sources = zip(GRADS, values[: len(GRADS)], strict=True)
        first, second, third, fourth = (grad.reduce(value.sin()) for grad, value in sources)
        values[-1].copy_(first)
        return second, third, fourth.neg()

    return trace(backward, *(grad.values() for grad in GRADS), torch.zeros(4))


def first(graph: fx.Graph, target: Any) -> fx.Node:
    return graph.find_nodes(op="call_function", target=target)[0]


def after(node: fx.Node, target: Any, *arguments: Any, user: fx.Node | None = None) -> fx.Node:
    """Put `target(node, ...)` between a node and its users, or one of them."""
    users = [user] if user else list(node.users)
    before = min(users, key=edit.positions(node.graph).__getitem__)
    made = edit.insert_call(node.graph, before, target, (node, *arguments), MADE_HERE)
    for each in users:
        each.replace_input_with(node, made)
    return made


# --- of a bucket with an all-reduce ---------------------------------------------------------------------------------


def drop_wait(graph: fx.Graph) -> None:
    replace_node(first(graph, WAIT), first(graph, ALL_REDUCE))


def launch_before_concatenation(graph: fx.Graph) -> None:
    first(graph, FLAT_BUCKET).prepend(first(graph, ALL_REDUCE))


def change_output(graph: fx.Graph) -> None:
    after(graph.output_node().all_input_nodes[0], aten.unsqueeze.default, 0, user=graph.output_node())


def drop_output(graph: fx.Graph) -> None:
    graph.output_node().args = (list(graph.output_node().all_input_nodes[:-1]),)


def hand_out_the_local_gradient(graph: fx.Graph) -> None:
    graph.output_node().replace_input_with(graph.output_node().all_input_nodes[0], first(graph, aten.sin.default))


def leave_a_write_out(graph: fx.Graph) -> None:
    replace_node(first(graph, aten.copy_.default), first(graph, aten.copy_.default).args[0])


def launch_again(graph: fx.Graph) -> None:
    again = edit.insert_call(graph, first(graph, WAIT), ALL_REDUCE, first(graph, ALL_REDUCE).args, MADE_HERE)
    again.append(graph.call_function(WAIT, (again,)))


def move_a_member(graph: fx.Graph) -> None:
    bucket = first(graph, FLAT_BUCKET)
    bucket.update_arg(3, [4, 0, *bucket.args[3][2:]])


def read_another_member(graph: fx.Graph) -> None:
    views = graph.find_nodes(op="call_function", target=aten.as_strided.default)
    graph.output_node().replace_input_with(graph.output_node().all_input_nodes[0], views[0])


def drop_reduction(graph: fx.Graph) -> None:
    replace_node(first(graph, REDUCE_GRAD), first(graph, REDUCE_GRAD).all_input_nodes[0])


def reduce_again(graph: fx.Graph) -> None:
    after(first(graph, REDUCE_GRAD), REDUCE_GRAD, 0, 0)


REFUSED = [
    (drop_wait, "all_reduce_default has 0 waits, expected 1"),
    (launch_before_concatenation, "used before it has been defined"),
    (change_output, r"output 0: float32\[4\] .* became float32\[1, 4\]"),
    (drop_output, "3 outputs became 2"),
    (hand_out_the_local_gradient, "where reduced gradients go: output no longer reads that of p1"),
    (leave_a_write_out, "where reduced gradients go: copy_ no longer reads that of p0"),
    (launch_again, r"the reduction of the gradient of p0 \.\. p3: its bucket is launched on \['0', '0'\]"),
    (move_a_member, r"the reduction of the gradient of p0 \.\. p3: its bucket is filled at"),
    (read_another_member, "where reduced gradients go: output no longer reads that of p1"),
]


@pytest.mark.parametrize(("wrong", "text"), REFUSED, ids=[wrong.__name__ for wrong, _ in REFUSED])
def test_a_pass_that_changes_a_reduction_is_refused(wrong: Edit, text: str) -> None:
    with pytest.raises(InvalidGraphError, match=f"pass 'users-pass'.*{text}"):
        run_passes(traced(), plan_for(GRADS), passes=(*DEFAULT_PASSES, Changed(wrong)))


@pytest.mark.parametrize("wrong", [drop_reduction, reduce_again])
def test_what_is_changed_before_there_are_buckets(wrong: Edit) -> None:
    with pytest.raises(InvalidGraphError, match="pass 'users-pass' changed the reduction of"):
        run_passes(traced(), plan_for(GRADS), passes=(Changed(wrong), *DEFAULT_PASSES))


# --- of stages, and of parts ------------------------------------------------------------------------------------------


def leave_out_what_is_between_nodes(graph: fx.Graph) -> None:
    launch = first(graph, ALL_REDUCE)
    (wait,) = launch.users
    replace_node(wait, launch.all_input_nodes[0])
    graph.erase_node(launch)


def test_a_stage_that_is_left_out_is_found() -> None:
    levels = Levels("in", "out", ((0, 1), (2, 3)))
    grads = [Grad(index=index, shape=(3,), levels=levels) for index in range(2)]
    module = trace(lambda a, b: (grads[0].reduce(a.sin()), grads[1].reduce(b.cos())), *(torch.randn(3),) * 2)
    passes = (*DEFAULT_PASSES, Changed(leave_out_what_is_between_nodes))
    with pytest.raises(InvalidGraphError, match=r"pass 'users-pass' changed .*p0"):
        run_passes(module, plan_for(grads, cap=1), passes=passes)


def scattered_plan(backend: Backend, wire: str | None = None, divide_by: float | None = None) -> BucketPlan:
    """Two buckets of which each rank keeps a part."""
    reduction = Averaging(scattered=True, wire=wire, divide_by=divide_by).reduction("0", backend, 2, "float32")
    specs = [replace(grad.spec, key=grad.spec.key._replace(reduction=reduction)) for grad in GRADS]
    return plan_buckets(specs, bucket_cap_mb=4e-5, first_bucket_cap_mb=3e-5, layout=Layout(16))


def updating(*edits: Edit, plan: BucketPlan) -> fx.Graph:
    def backward(*values: torch.Tensor) -> torch.Tensor:
        parameters, sources = values[: len(GRADS)], values[len(GRADS) :]
        reduced = [grad.reduce(source.sin()) for grad, source in zip(GRADS, sources, strict=True)]
        for number, bucket in enumerate(plan.buckets):
            indices = [member.gradient.index for member in bucket.members]
            given = [parameters[each] for each in indices], [reduced[each] for each in indices]
            UPDATE_LATER(*given, indices, 0, 0, number)
        return sources[0].cos()

    module = trace(backward, *(grad.values() for grad in GRADS * 2))
    place = PlaceUpdates((0, 1, 2, 3, -1, -1, -1, -1))
    return run_passes(module, plan, passes=(*DEFAULT_PASSES, *map(Changed, edits), place)).graph


@pytest.mark.parametrize(("backend", "wire", "divide_by"), [(GLOO, None, None), (NCCL, "float16", 3.0)])
def test_an_update_gets_the_part_of_its_bucket(backend: Backend, wire: str | None, divide_by: float | None) -> None:
    plan = scattered_plan(backend, wire, divide_by)
    graph = updating(plan=plan)
    assert [node.args[0].target for node in graph.nodes if is_collective(node)] == [FLAT_BUCKET] * 2
    for update in map(read_update, graph.find_nodes(op="call_function", target=UPDATE)):
        (part,) = set(update.gradients)
        assert part.meta["val"].numel() == plan.buckets[update.bucket].numel // 2
        assert part.meta["val"].dtype == torch.float32


def another_bucket_s_part(graph: fx.Graph) -> None:
    one, other = graph.find_nodes(op="call_function", target=UPDATE_LATER)
    one.args = (one.args[0], other.args[1], *one.args[2:])


def test_what_changes_a_part_is_refused() -> None:
    with pytest.raises(InvalidGraphError, match="pass 'users-pass'"):
        updating(another_bucket_s_part, plan=scattered_plan(NCCL))


# --- of collectives that the model has --------------------------------------------------------------------------------


def checked(graph: fx.Graph, change: Edit) -> None:
    checks = Checks(graph, ())
    change(graph)
    checks.run(graph, after="users-pass")


def test_collectives_of_the_model_keep_the_order_of_their_group() -> None:
    """A rank whose graph is unchanged launches in the old order. A collective without a wait is left alone."""

    def function(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
        launched = [ALL_REDUCE(a, "sum", "0"), ALL_REDUCE(b, "sum", "1"), ALL_REDUCE(b, "sum", "0")]
        return [WAIT(launched[0]), WAIT(launched[1]), launched[2]]

    def swap(one: int, other: int) -> Edit:
        def change(graph: fx.Graph) -> None:
            launches = list(filter(is_collective, graph.nodes))
            launches[one].prepend(launches[other])

        return change

    inputs = torch.randn(2), torch.randn(2)
    checked(trace(function, *inputs).graph, swap(0, 1))
    text = "collectives of group 0 stand in the order all_reduce_2, all_reduce, before all_reduce, all_reduce_2"
    with pytest.raises(InvalidGraphError, match=f"after pass 'users-pass': the {text}"):
        checked(trace(function, *inputs).graph, swap(0, 2))
