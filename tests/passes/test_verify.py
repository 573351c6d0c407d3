"""Every reduction stays what its plan says: a pass that changes one is refused, with the gradient's name."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphs import Changed, Grad, plan_for, run_passes, trace
from torch import fx

from dp_compile.errors import InvalidGraphError
from dp_compile.fx import edit
from dp_compile.fx.collectives import ALL_REDUCE, WAIT
from dp_compile.passes import DEFAULT_PASSES
from dp_compile.passes.bucket_ops import FLAT_BUCKET
from dp_compile.plan.buckets import Layout

pytestmark = pytest.mark.usefixtures("fake_group")
aten, prims = torch.ops.aten, torch.ops.prims

GRADS = [Grad(index=0), Grad(index=1), Grad(index=2, shape=(2, 3)), Grad(index=3, shape=(2, 3), order=(1, 0))]


def backward(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    first, second, third, fourth = (
        grad.reduce(value.sin()) for grad, value in zip(GRADS, values[: len(GRADS)], strict=True)
    )
    values[-1].copy_(first)
    return second, third, fourth.neg()


def traced() -> fx.GraphModule:
    return trace(backward, *(grad.values() for grad in GRADS), torch.zeros(4))


def run(*edits: Callable[[fx.Graph], Any], apart: bool = False) -> fx.GraphModule:
    layout = Layout(64, frozenset({"p1"}) if apart else frozenset())
    passes = (*DEFAULT_PASSES, *map(Changed, edits))
    return run_passes(traced(), plan_for(GRADS, layout=layout), passes=passes)


def first(graph: fx.Graph, target: Any) -> fx.Node:
    return graph.find_nodes(op="call_function", target=target)[0]


def after(node: fx.Node, target: Any, *arguments: Any, user: fx.Node | None = None) -> fx.Node:
    """Put `target(node, ...)` between a node and its users, or one of them."""
    users = [user] if user else list(node.users)
    before = min(users, key=edit.positions(node.graph).__getitem__)
    made = edit.insert_call(node.graph, before, target, (node, *arguments), edit.Provenance("users-pass", "0.0"))
    for each in users:
        each.replace_input_with(node, made)
    return made


def send_in_bf16(graph: fx.Graph) -> None:
    launch = first(graph, ALL_REDUCE)
    after(launch.all_input_nodes[0], prims.convert_element_type.default, torch.bfloat16, user=launch)
    launch.meta["val"] = launch.meta["val"].to(torch.bfloat16)
    wait = first(graph, WAIT)
    wait.meta["val"] = wait.meta["val"].to(torch.bfloat16)
    after(wait, prims.convert_element_type.default, torch.float32)


def arguments_of_bucket(change: Callable[[list[Any]], Any]) -> Callable[[fx.Graph], None]:
    def changed(graph: fx.Graph) -> None:
        bucket = first(graph, FLAT_BUCKET)
        arguments = [list(each) if isinstance(each, (list, tuple)) else each for each in bucket.args]
        change(arguments)
        bucket.args = tuple(arguments)

    changed.__name__ = change.__name__
    return changed


def swap_two_members(arguments: list[Any]) -> None:
    arguments[0][:2] = arguments[0][1::-1]


def read_turned(graph: fx.Graph) -> None:
    views = graph.find_nodes(op="call_function", target=aten.as_strided.default)
    (view,) = (node for node in views if list(node.args[2]) == [3, 1])
    view.args = (view.args[0], [2, 3], [1, 2], *view.args[3:])


def hand_out_the_local_gradient(graph: fx.Graph) -> None:
    graph.output_node().replace_input_with(graph.output_node().all_input_nodes[0], first(graph, aten.sin.default))


def leave_a_write_out(graph: fx.Graph) -> None:
    edit.replace(first(graph, aten.copy_.default), first(graph, aten.copy_.default).args[0])


def negate_another(graph: fx.Graph) -> None:
    node = first(graph, aten.neg.default)
    graph.output_node().prepend(node)
    views = graph.find_nodes(op="call_function", target=aten.as_strided.default)
    node.args = (next(view for view in views if view.meta["val"].shape == (2, 3) and view is not node.args[0]),)


def reduce_what_is_computed_otherwise(graph: fx.Graph) -> None:
    after(first(graph, aten.sin.default), aten.cos.default, user=first(graph, FLAT_BUCKET))


def launch_again(graph: fx.Graph) -> None:
    launch = first(graph, ALL_REDUCE)
    again = edit.insert_call(graph, first(graph, WAIT), ALL_REDUCE, launch.args, edit.Provenance("users-pass", "0.0"))
    again.append(graph.call_function(WAIT, (again,)))


def overwrite_a_gradient(graph: fx.Graph) -> None:
    """It is computed, overwritten, and then put into the bucket."""
    bucket = first(graph, FLAT_BUCKET)
    edit.insert_call(graph, bucket, aten.zero_.default, (bucket.all_input_nodes[0],), edit.Provenance("u", "0.0"))


REFUSED = [
    (send_in_bf16, r"what is reduced: the gradient of p0 \.\. p3: .*once _c10d_functional.all_reduce"),
    (arguments_of_bucket(swap_two_members), r"p0 \.\. p3: .*once dp_compile.flat_bucket"),
    (read_turned, r"p0 \.\. p3: .*once aten.as_strided"),
    (hand_out_the_local_gradient, "where reduced gradients go: output no longer reads that of p1"),
    (leave_a_write_out, "where reduced gradients go: copy_ no longer reads that of p0"),
    (negate_another, "where reduced gradients go: neg no longer reads that of p3"),
    (reduce_what_is_computed_otherwise, "what is reduced: the gradient of p0: became not reduced"),
    (launch_again, r"p0 \.\. p3: .*once _c10d_functional.all_reduce"),
    (overwrite_a_gradient, r"what is reduced: the gradient of p0 \.\. p3: zero_.* writes to memory of its bucket"),
]


@pytest.mark.parametrize(("wrong", "text"), REFUSED, ids=[wrong.__name__ for wrong, _ in REFUSED])
def test_a_pass_that_changes_a_reduction_is_refused(wrong: Callable[[fx.Graph], None], text: str) -> None:
    with pytest.raises(InvalidGraphError, match=f"pass 'users-pass' changed .*{text}"):
        run(wrong)


def test_members_of_two_tensors_that_are_exchanged_are_found() -> None:
    def exchange(graph: fx.Graph) -> None:
        one, other = graph.find_nodes(op="call_function", target=operator.getitem)
        one.args, other.args = (one.args[0], 1), (other.args[0], 0)

    with pytest.raises(InvalidGraphError, match="changed what is reduced: the gradient of p0"):
        run(exchange, apart=True)
