"""Every reduction stays what it was, read from the graph: passes that change one are refused, whatever they note."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from graphs import Changed, Grad, plan_for, run_passes, trace
from torch import fx

from dp_compile.errors import InvalidGraphError
from dp_compile.fx import edit
from dp_compile.fx.collectives import ALL_REDUCE, WAIT
from dp_compile.passes import DEFAULT_PASSES, BucketReductions
from dp_compile.passes.bucket_ops import FLAT_BUCKET
from dp_compile.passes.reduction import emit
from dp_compile.plan.buckets import Layout, plan_buckets

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


def double_a_factor(arguments: list[Any]) -> None:
    arguments[1][1] *= 2


def turn_a_member(arguments: list[Any]) -> None:
    arguments[2][2:4] = [1, 2]


def read_the_wrong_member(graph: fx.Graph) -> None:
    view = next(node for node in graph.find_nodes(op="call_function", target=aten.as_strided.default) if node.args[3])
    view.args = (*view.args[:3], 0)


def read_one_too_far(graph: fx.Graph) -> None:
    view = next(node for node in graph.find_nodes(op="call_function", target=aten.as_strided.default) if node.args[3])
    view.args = (*view.args[:3], view.args[3] + 1)


def read_turned(graph: fx.Graph) -> None:
    views = graph.find_nodes(op="call_function", target=aten.as_strided.default)
    (view,) = (node for node in views if list(node.args[2]) == [3, 1])
    view.args = (view.args[0], [2, 3], [1, 2], *view.args[3:])


def hand_out_the_local_gradient(graph: fx.Graph) -> None:
    graph.output_node().replace_input_with(graph.output_node().all_input_nodes[0], first(graph, aten.sin.default))


def leave_a_write_out(graph: fx.Graph) -> None:
    edit.replace(first(graph, aten.copy_.default), first(graph, aten.copy_.default).args[0])


def write_another(graph: fx.Graph) -> None:
    copy = first(graph, aten.copy_.default)
    copy.args = (copy.args[0], first(graph, aten.sin.default))


def negate_another(graph: fx.Graph) -> None:
    node = first(graph, aten.neg.default)
    graph.output_node().prepend(node)
    views = graph.find_nodes(op="call_function", target=aten.as_strided.default)
    node.args = (next(view for view in views if view.meta["val"].shape == (2, 3) and view is not node.args[0]),)


def reduce_what_is_computed_otherwise(graph: fx.Graph) -> None:
    after(first(graph, aten.sin.default), aten.cos.default, user=first(graph, FLAT_BUCKET))


def average_again(graph: fx.Graph) -> None:
    after(first(graph, WAIT), aten.mul.Tensor, 0.5)


def reduce_twice(graph: fx.Graph) -> None:
    wait = first(graph, WAIT)
    made = after(wait, ALL_REDUCE, "sum", "0")
    after(made, WAIT)


REFUSED = [
    (send_in_bf16, "the gradient of p[0-3]: sum over group 0 in float32, .* became sum over group 0 in bfloat16"),
    (arguments_of_bucket(swap_two_members), "changed where reduced gradients go: .*p0"),
    (arguments_of_bucket(double_a_factor), "the gradient of p1: .*times 0.5 .* became .*times 1"),
    (arguments_of_bucket(turn_a_member), "changed where reduced gradients go: .*p2"),
    (read_the_wrong_member, "changed where reduced gradients go: "),
    (read_one_too_far, "changed where reduced gradients go: "),
    (read_turned, "changed where reduced gradients go: .*p2"),
    (hand_out_the_local_gradient, "changed where reduced gradients go: .*p1"),
    (leave_a_write_out, "changed where reduced gradients go: "),
    (write_another, "changed where reduced gradients go: "),
    (negate_another, "changed where reduced gradients go: .*p2, p3"),
    (reduce_what_is_computed_otherwise, r"the gradient of p0: .* became not reduced.*Not understood.*aten.cos"),
    (average_again, "changed where reduced gradients go: "),
    (reduce_twice, "the gradient of p0"),
]


@pytest.mark.parametrize(("wrong", "text"), REFUSED, ids=[wrong.__name__ for wrong, _ in REFUSED])
def test_a_pass_that_changes_a_reduction_is_refused(wrong: Callable[[fx.Graph], None], text: str) -> None:
    with pytest.raises(InvalidGraphError, match=f"pass 'users-pass' .*{text}"):
        run(wrong)


def copy_every_gradient(graph: fx.Graph) -> None:
    bucket = first(graph, FLAT_BUCKET)
    for source in bucket.all_input_nodes:
        after(source, aten.clone.default, user=bucket)


def halve_before(arguments: list[Any]) -> None:
    """The factor stands in front of the bucket instead of in it."""
    bucket = arguments[0][0].graph.find_nodes(op="call_function", target=FLAT_BUCKET)[0]
    for number, source in enumerate(arguments[0]):
        provenance = edit.Provenance("users-pass", "0.0")
        arguments[0][number] = edit.insert_call(source.graph, bucket, aten.div.Tensor, (source, 2), provenance)
        arguments[1][number] = 1.0


def concatenate(graph: fx.Graph) -> None:
    """A bucket as others build it: flat gradients one after the other, times the factor."""
    bucket = first(graph, FLAT_BUCKET)
    with_provenance = edit.Provenance("users-pass", "0.0")
    flat = []
    for number, source in enumerate(bucket.all_input_nodes):
        if number == 3:
            source = edit.insert_call(graph, bucket, aten.permute.default, (source, [1, 0]), with_provenance)
        shape = [source.meta["val"].numel()]
        flat.append(edit.insert_call(graph, bucket, aten.reshape.default, (source, shape), with_provenance))
    whole = edit.insert_call(graph, bucket, aten.cat.default, (flat,), with_provenance)
    edit.replace(bucket, edit.insert_call(graph, bucket, aten.mul.Tensor, (whole, 0.5), with_provenance))


@pytest.mark.parametrize("write", ["in place", "functional"])
def test_copies_into_slices_are_followed(write: str) -> None:
    def copied(graph: fx.Graph) -> None:
        bucket = first(graph, FLAT_BUCKET)
        by = edit.Provenance("users-pass", "0.0")
        memory = edit.insert_call(graph, bucket, aten.new_zeros.default, (bucket.all_input_nodes[0], [20]), by)
        at = 0
        for number, source in enumerate(bucket.all_input_nodes):
            if number == 3:
                source = edit.insert_call(graph, bucket, aten.permute.default, (source, [1, 0]), by)
            numel = source.meta["val"].numel()
            flat = edit.insert_call(graph, bucket, aten.reshape.default, (source, [numel]), by)
            flat = edit.insert_call(graph, bucket, aten.mul.Tensor, (flat, 0.5), by)
            if write == "functional":
                arguments = (memory, flat, 0, at, at + numel)
                memory = edit.insert_call(graph, bucket, aten.slice_scatter.default, arguments, by)
            else:
                part = edit.insert_call(graph, bucket, aten.slice.Tensor, (memory, 0, at, at + numel), by)
                edit.insert_call(graph, bucket, aten.copy_.default, (part, flat), by)
            at += numel
        edit.replace(bucket, memory)

    run_passes(traced(), plan_for(GRADS), passes=(BucketReductions(), Changed(copied)))


def test_other_ways_to_the_same_are_let_through() -> None:
    run(copy_every_gradient, arguments_of_bucket(halve_before))
    run_passes(traced(), plan_for(GRADS), passes=(BucketReductions(), Changed(concatenate)))
    run(copy_every_gradient, apart=True)


def test_members_of_two_tensors_that_are_exchanged_are_found() -> None:
    def exchange(graph: fx.Graph) -> None:
        one, other = graph.find_nodes(op="call_function", target=operator.getitem)
        one.args, other.args = (one.args[0], 1), (other.args[0], 0)

    with pytest.raises(InvalidGraphError, match="changed where reduced gradients go"):
        run(exchange, apart=True)


def test_a_write_between_makes_another_value() -> None:
    """The gradient is computed, overwritten, and then put into the bucket."""

    def overwrite(graph: fx.Graph) -> None:
        bucket = first(graph, FLAT_BUCKET)
        edit.insert_call(graph, bucket, aten.zero_.default, (bucket.all_input_nodes[0],), edit.Provenance("u", "0.0"))

    with pytest.raises(InvalidGraphError, match=r"the gradient of p0: .* became not reduced"):
        run(overwrite)


def test_what_is_written_again_has_one_name_in_every_run() -> None:
    """Which of those in one memory is looked at first is a matter of addresses: twenty graphs, each with its own."""
    grads = [Grad(index=index, shape=(4, 4)) for index in range(2)]

    def writing(a: torch.Tensor) -> tuple[torch.Tensor, ...]:
        reduced = grads[0].reduce(a), grads[1].reduce(a.t() @ a)  # a factor in the product makes one more view
        view = a[1:3]
        for each in reduced:
            a.copy_(each)
        return (*reduced, view)

    for _ in range(20):
        run_passes(trace(writing, torch.zeros(4, 4)), plan_for(grads))


def complex_backward(value: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Complex gradients travel as pairs of real numbers."""
    grads = [Grad(index=0, shape=(3, 2)), Grad(index=1, shape=(4,))]
    reduced = grads[0].reduce(torch.view_as_real(value * 2j)), grads[1].reduce(other.sin())
    return torch.view_as_complex(reduced[0]), reduced[1]


def test_complex_gradients_are_followed() -> None:
    grads = [Grad(index=0, shape=(3, 2)), Grad(index=1, shape=(4,))]
    inputs = torch.randn(3, dtype=torch.complex64), torch.randn(4)
    run_passes(trace(complex_backward, *inputs), plan_for(grads))

    def real_part_twice(graph: fx.Graph) -> None:
        node = first(graph, aten.view_as_complex.default)
        view = node.all_input_nodes[0]
        view.args = (view.args[0], [3, 2], [2, 0], 0)

    with pytest.raises(InvalidGraphError, match=r"changed where reduced gradients go: .*p0"):
        run_passes(
            trace(complex_backward, *inputs), plan_for(grads), passes=(*DEFAULT_PASSES, Changed(real_part_twice))
        )


# --- factors that are given when the code runs ----------------------------------------------------------------------


def given_factors(*values: torch.Tensor) -> torch.Tensor:
    gradient, *factors = values
    return emit(gradient.sin(), 0, 0, None, *factors[:2])


def run_given(change: Callable[[list[Any], list[fx.Node]], None]) -> None:
    spec = GRADS[0].spec
    reduction = replace(spec.key.reduction, scale=1.0, wire="bfloat16", given=2)
    plan = plan_buckets(
        [replace(spec, key=spec.key._replace(reduction=reduction))], bucket_cap_mb=1.0, first_bucket_cap_mb=1.0
    )
    numbers = [torch.tensor(number, dtype=torch.float64) for number in (0.5, 0.25, 3.0)]

    def edited(graph: fx.Graph) -> None:
        bucket, product = first(graph, FLAT_BUCKET), first(graph, aten.mul.Tensor)
        inputs = graph.find_nodes(op="placeholder")[1:]
        for node in (bucket, product):
            arguments = list(node.args)
            change(arguments, inputs)
            node.args = tuple(arguments)

    run_passes(trace(given_factors, GRADS[0].values(), *numbers), plan, passes=(*DEFAULT_PASSES, Changed(edited)))


def another_factor(arguments: list[Any], inputs: list[fx.Node]) -> None:
    arguments[-1] = inputs[2]


def factors_swapped(arguments: list[Any], inputs: list[fx.Node]) -> None:
    arguments[-1] = inputs[1 if arguments[-1] is inputs[0] else 0]


def no_factor_before(arguments: list[Any], inputs: list[fx.Node]) -> None:
    if arguments[-1] is inputs[0]:
        arguments.pop()


@pytest.mark.parametrize("change", [another_factor, factors_swapped, no_factor_before])
def test_a_factor_that_is_given_is_followed(change: Callable[[list[Any], list[fx.Node]], None]) -> None:
    run_given(lambda arguments, inputs: None)
    with pytest.raises(InvalidGraphError, match=r"changed what is reduced: the gradient of p0: .*times 1 times number"):
        run_given(change)
