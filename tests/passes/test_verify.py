"""A pass that breaks a graph, or changes a reduction or a comm hook, is refused, with its name and that of the node."""

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from graphs import Changed, Grad, plan_for, run_passes, trace
from graphs import replace as replace_node

from dp_compile.comm_hooks.functional import FunctionalHook, register
from dp_compile.errors import InvalidGraphError, ReductionError
from dp_compile.fx import edit
from dp_compile.fx.collectives import ALL_REDUCE, WAIT, is_collective
from dp_compile.passes import DEFAULT_PASSES
from dp_compile.passes.memory import Running
from dp_compile.passes.reduction import FLAT_BUCKET, HOOK_STEP, REDUCE_GRAD
from dp_compile.passes.updates import UPDATE, UPDATE_LATER, PlaceUpdates, read_update
from dp_compile.passes.verify import Checks
from dp_compile.plan.backends import GLOO, NCCL
from dp_compile.plan.buckets import plan_buckets
from dp_compile.plan.reduction import Averaging, Levels

pytestmark = pytest.mark.usefixtures("fake_group")
aten = torch.ops.aten

GRADS = [Grad(index=0), Grad(index=1), Grad(index=2, shape=(2, 3)), Grad(index=3, shape=(2, 3), order=(1, 0))]
MADE_HERE = edit.Provenance((0, 0))


def traced():
    def backward(*values):
        sources = zip(GRADS, values[: len(GRADS)], strict=True)
        first, second, third, fourth = (grad.reduce(value.sin()) for grad, value in sources)
        values[-1].copy_(first)
        return second, third, fourth.neg()

    return trace(backward, *(grad.values() for grad in GRADS), torch.zeros(4))


def first(graph, target):
    return graph.find_nodes(op="call_function", target=target)[0]


def after(node, target, *arguments, user=None):
    """Put `target(node, ...)` between a node and its users, or one of them."""
    users = [user] if user else list(node.users)
    before = min(users, key=edit.positions(node.graph).__getitem__)
    made = edit.insert_call(node.graph, before, target, (node, *arguments), MADE_HERE)
    for each in users:
        each.replace_input_with(node, made)
    return made


def change_output(graph):
    after(graph.output_node().all_input_nodes[0], aten.unsqueeze.default, 0, user=graph.output_node())


def drop_output(graph):
    graph.output_node().args = (list(graph.output_node().all_input_nodes[:-1]),)


def hand_out_the_local_gradient(graph):
    graph.output_node().replace_input_with(graph.output_node().all_input_nodes[0], first(graph, aten.sin.default))


def leave_a_write_out(graph):
    replace_node(first(graph, aten.copy_.default), first(graph, aten.copy_.default).args[0])


def launch_again(graph):
    again = edit.insert_call(graph, first(graph, WAIT), ALL_REDUCE, first(graph, ALL_REDUCE).args, MADE_HERE)
    again.append(graph.call_function(WAIT, (again,)))


def move_a_member(graph):
    bucket = first(graph, FLAT_BUCKET)
    bucket.update_arg(3, [4, 0, *bucket.args[3][2:]])


def read_another_member(graph):
    views = graph.find_nodes(op="call_function", target=aten.as_strided.default)
    graph.output_node().replace_input_with(graph.output_node().all_input_nodes[0], views[0])


def drop_reduction(graph):
    replace_node(first(graph, REDUCE_GRAD), first(graph, REDUCE_GRAD).all_input_nodes[0])


def reduce_again(graph):
    after(first(graph, REDUCE_GRAD), REDUCE_GRAD, 0, 0)


REFUSED = [
    (
        lambda graph: replace_node(first(graph, WAIT), first(graph, ALL_REDUCE)),
        "all_reduce_default has 0 waits, expected 1",
    ),
    (lambda graph: first(graph, FLAT_BUCKET).prepend(first(graph, ALL_REDUCE)), "used before it has been defined"),
    (change_output, r"output 0: float32\[4\] .* became float32\[1, 4\]"),
    (drop_output, "3 outputs became 2"),
    (hand_out_the_local_gradient, "where reduced gradients go: output no longer reads that of p1"),
    (leave_a_write_out, "where reduced gradients go: copy_ no longer reads that of p0"),
    (launch_again, r"the reduction of the gradient of p0 \.\. p3: its bucket is launched on \['0', '0'\]"),
    (move_a_member, r"the reduction of the gradient of p0 \.\. p3: its bucket is filled at"),
    (read_another_member, "where reduced gradients go: output no longer reads that of p1"),
]


@pytest.mark.parametrize(("wrong", "text"), REFUSED, ids=[wrong.__name__ for wrong, _ in REFUSED])
def test_a_pass_that_changes_a_reduction_is_refused(wrong, text):
    with pytest.raises(InvalidGraphError, match=f"pass 'users-pass'.*{text}"):
        run_passes(traced(), plan_for(GRADS), passes=(*DEFAULT_PASSES, Changed(wrong)))


@pytest.mark.parametrize("wrong", [drop_reduction, reduce_again])
def test_what_is_changed_before_there_are_buckets(wrong):
    with pytest.raises(InvalidGraphError, match="pass 'users-pass' changed the reduction of"):
        run_passes(traced(), plan_for(GRADS), passes=(Changed(wrong), *DEFAULT_PASSES))


def leave_out_what_is_between_nodes(graph):
    launch = first(graph, ALL_REDUCE)
    (wait,) = launch.users
    replace_node(wait, launch.all_input_nodes[0])
    graph.erase_node(launch)


def test_a_stage_that_is_left_out_is_found():
    levels = Levels("in", "out", ((0, 1), (2, 3)))
    grads = [Grad(index=index, shape=(3,), levels=levels) for index in range(2)]
    module = trace(lambda a, b: (grads[0].reduce(a.sin()), grads[1].reduce(b.cos())), *(torch.randn(3),) * 2)
    passes = (*DEFAULT_PASSES, Changed(leave_out_what_is_between_nodes))
    with pytest.raises(InvalidGraphError, match=r"pass 'users-pass' changed .*p0"):
        run_passes(module, plan_for(grads, cap=1), passes=passes)


def scattered_plan(backend, wire=None, divide_by=None):
    """Two buckets of which each rank keeps a part."""
    reduction = Averaging(scattered=True, wire=wire, divide_by=divide_by).reduction("0", backend, 2, "float32")
    specs = [replace(grad.spec, key=grad.spec.key._replace(reduction=reduction)) for grad in GRADS]
    return plan_buckets(specs, bucket_cap_mb=4e-5, first_bucket_cap_mb=3e-5, alignment_bytes=16)


def updating(*edits, plan):
    def backward(*values):
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
def test_an_update_gets_the_part_of_its_bucket(backend, wire, divide_by):
    plan = scattered_plan(backend, wire, divide_by)
    graph = updating(plan=plan)
    assert [node.args[0].target for node in graph.nodes if is_collective(node)] == [FLAT_BUCKET] * 2
    for update in map(read_update, graph.find_nodes(op="call_function", target=UPDATE)):
        (part,) = set(update.gradients)
        assert part.meta["val"].numel() == plan.buckets[update.bucket].numel // 2
        assert part.meta["val"].dtype == torch.float32


def another_bucket_s_part(graph):
    one, other = graph.find_nodes(op="call_function", target=UPDATE_LATER)
    one.args = (one.args[0], other.args[1], *one.args[2:])


def test_what_changes_a_part_is_refused():
    with pytest.raises(InvalidGraphError, match="pass 'users-pass'"):
        updating(another_bucket_s_part, plan=scattered_plan(NCCL))


def checked(graph, change):
    checks = Checks(graph, ())
    change(graph)
    checks.run(graph, after="users-pass")


def test_collectives_of_the_model_keep_the_order_of_their_group():
    """A rank whose graph is unchanged launches in the old order. A collective without a wait is left alone."""

    def function(a, b):
        launched = [ALL_REDUCE(a, "sum", "0"), ALL_REDUCE(b, "sum", "1"), ALL_REDUCE(b, "sum", "0")]
        return [WAIT(launched[0]), WAIT(launched[1]), launched[2]]

    def swap(one, other):
        def change(graph):
            launches = list(filter(is_collective, graph.nodes))
            launches[one].prepend(launches[other])

        return change

    inputs = torch.randn(2), torch.randn(2)
    checked(trace(function, *inputs).graph, swap(0, 1))
    text = "order of collectives of group 0 changed from all_reduce, all_reduce_2 to all_reduce_2, all_reduce"
    with pytest.raises(InvalidGraphError, match=f"after pass 'users-pass': the {text}"):
        checked(trace(function, *inputs).graph, swap(0, 2))


TWO = [Grad(index=0), Grad(index=1, shape=(2, 3))]


@dataclass(frozen=True)
class Twice(FunctionalHook):
    """Has two rounds, and an error for each gradient."""

    rounds: ClassVar[tuple[str, ...]] = ("all_reduce", "all_reduce")

    def initial_state(self, gradient):
        return {"error": gradient.new_zeros(())}

    def reduce(self, bucket):
        sums = []
        for part in (0, 1):
            total = yield torch.cat([gradient.flatten()[part::2] for gradient in bucket.gradients])
            sums.append(total.sum())
        reduced = [gradient + sums[0] - sums[1] for gradient in bucket.gradients]
        return reduced, [{"error": state["error"] + sums[0]} for state in bucket.state]


KEY, HOOK = register(Twice())


def plan():
    reduction = Averaging(hook=KEY, rounds=HOOK.rounds).reduction("0", GLOO, 2, "float32")
    specs = [replace(grad.spec, key=grad.spec.key._replace(reduction=reduction)) for grad in TWO]
    return plan_for(TWO).with_keys_of(specs)


def backward(*values):
    return [grad.reduce(value.sin()) for grad, value in zip(TWO, values, strict=True)]


def local_sums(graph):
    """A round is left out: ranks go on with what is their own."""
    launch = graph.find_nodes(op="call_function", target=ALL_REDUCE)[0]
    (wait,) = launch.users
    for user in list(wait.users):
        user.replace_input_with(wait, launch.args[0])
    graph.erase_node(wait)
    graph.erase_node(launch)


def test_what_is_changed_is_found():
    module = trace(backward, *(grad.values() for grad in TWO))
    with pytest.raises(InvalidGraphError, match="pass 'users-pass'"):
        run_passes(module, plan(), passes=(*DEFAULT_PASSES, Changed(local_sums)))


def test_gradients_that_a_compiler_moves_between_steps():
    """The hook has them from its first step, and their memory may be another tensor's by the second."""
    gradients, state = [torch.ones(4), torch.ones(2, 3)], {"error": torch.zeros(())}
    rest, running = (KEY, "0", 0, 0), Running([plan()], states=[lambda index: state])
    with running:
        (first,) = HOOK_STEP(gradients, [], *rest)
        (second,) = HOOK_STEP(gradients, [first], *rest)
        HOOK_STEP(gradients, [first, second], *rest)
        assert [float(each["error"]) for each in running.hook_runs[0, 0].new_state] == [float(first.sum())] * 2
        (first,) = HOOK_STEP(gradients, [], *rest)
        with pytest.raises(ReductionError, match=r"at other addresses than in its last round.*aot_eager"):
            HOOK_STEP([gradients[0], gradients[1].clone()], [first], *rest)
