"""Where launches, waits and updates stand in a graph, what is left for the next forward, and where that waits."""

import copy
from dataclasses import dataclass, field
from importlib import import_module

import pytest
import torch
from expecttest import assert_expected_inline
from graphs import Bounded, Grad, executed, is_all_reduce, launches, plan_for, run_passes, short, trace
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from dp_compile._torch import inductor
from dp_compile.fx import edit
from dp_compile.fx.collectives import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER, WAIT, is_collective, is_wait
from dp_compile.passes import DEFAULT_PASSES, BucketReductions, ScheduleCollectives
from dp_compile.passes.crossing import LEAVE, WAIT_FOR_PARAMETERS, CompleteBeforeUse, defer_reductions
from dp_compile.passes.memory import Running
from dp_compile.passes.pipeline import Pipeline
from dp_compile.passes.result import PassResult
from dp_compile.passes.updates import UPDATE, UPDATE_LATER, PlaceUpdates, read_update
from dp_compile.plan import backends
from dp_compile.plan.reduction import Levels

pytestmark = pytest.mark.usefixtures("fake_group")

MOVING = (BucketReductions(), ScheduleCollectives())
STAYING = (BucketReductions(), Bounded(nbytes=0))


def layers(number, width=16, *, more=False, **options):
    """The backward of a chain of layers without biases, weight gradients where a compiler's tracing puts them.

    `more`: then something that no reduction needs.
    """
    grads = [Grad(index=index, shape=(width, width), **options) for index in range(number)]

    def backward(grad, *saved):
        weights, inputs, reduced = saved[:number], saved[number:], []
        for index in reversed(range(number)):
            reduced.append(grads[index].reduce(inputs[index].t() @ grad))
            if index or more:
                grad = grad @ weights[index]
        return [*reduced, grad.exp()] if more else reduced

    return grads, trace(backward, *(torch.randn(width, width) for _ in range(2 * number + 1)))


def run(module, plan, *passes):
    results, after = list[PassResult](), copy.deepcopy(module)
    Pipeline(passes, [plan], results.append)(after.graph)
    after.recompile()
    return after.graph, results[0]


def compute_before_launches(graph):
    """How many nodes of the backward itself stand in front of each launch."""
    counts, count = [], 0
    for node in graph.nodes:
        if is_all_reduce(node):
            counts.append(count)
        count += node.op == "call_function" and edit.provenance_of(node) is None
    return counts


def test_compute_stays_if_the_bound_is_too_small_and_collectives_still_move():
    grads, module = layers(3)
    plan = plan_for([grads[1], grads[2], grads[0]], cap=1)
    graph, result = run(module, plan, *STAYING)
    (refusal,) = result.refusals
    assert_expected_inline(
        f"{refusal.node}: {refusal.reason}",
        """all_reduce_default: compute does not move: the simulated peak would be 8.0 KiB, the bound is 0 B""",
    )
    products = [node.name for node in graph.nodes if "mm" in node.name]
    assert products == [node.name for node in module.graph.nodes if "mm" in node.name]
    assert compute_before_launches(graph) == [5, 5, 8]
    assert compute_before_launches(run(module, plan, *MOVING)[0]) == [3, 5, 8]


def with_biases(grad, saved, weight):
    """A layer's backward as compilers trace it, and what it comes to before."""
    weight_grad = Grad(index=0, shape=(16, 16)).reduce(saved.t() @ grad)
    bias_grad = Grad(index=1, shape=(16,)).reduce(grad.sum(0))
    return [weight_grad, bias_grad, Grad(index=2, shape=(16, 16)).reduce((grad @ weight).tanh())]


@pytest.mark.parametrize("buckets", ["one", "two"])
def test_a_sum_between_two_products_is_beside_other_code_unless_a_launch_needs_it(buckets):
    module = trace(with_biases, *(torch.randn(16, 16) for _ in range(3)))
    grads = [Grad(index=0, shape=(16, 16)), Grad(index=1, shape=(16,)), Grad(index=2, shape=(16, 16))]
    graph, _ = run(module, plan_for(grads, cap=float("inf") if buckets == "one" else 16 * 17 * 4), *MOVING)
    ops = [str(node.target).split(".")[1] for node in graph.nodes if "." in str(node.target)]
    order = [op for op in ops if op in ("addmm", "mm", "sum", "tanh", "all_reduce")]
    if buckets == "one":
        assert order == ["addmm", "mm", "sum", "tanh", "all_reduce"]
    else:
        assert order == ["addmm", "sum", "all_reduce", "mm", "tanh", "all_reduce"]


def test_a_sum_of_what_the_product_does_not_read_stays():
    """Behind the product it would hold its input for longer."""

    def backward(grad, weight, other):
        bias_grad = Grad(index=0, shape=(16,)).reduce(other.exp().sum(0))
        return [bias_grad, Grad(index=1, shape=(16, 16)).reduce((grad @ weight).tanh())]

    module = trace(backward, *(torch.randn(16, 16) for _ in range(3)))
    graph, _ = run(module, plan_for([Grad(index=0, shape=(16,)), Grad(index=1, shape=(16, 16))]), *MOVING)
    names = [node.name for node in graph.nodes]
    assert names.index("exp") < names.index("sum_1") < names.index("mm") < names.index("tanh")


def test_compute_stays_where_somebody_elses_collectives_are():
    grad = Grad(index=0)
    module = trace(
        lambda a, b: (WAIT(ALL_REDUCE(b.exp(), "max", "0")), grad.reduce(a.sin())), grad.values(), torch.randn(3)
    )
    graph, result = run(module, plan_for([grad]), *MOVING)
    assert [refusal.node for refusal in result.refusals] == ["all_reduce"]
    names = [node.name for node in graph.nodes]
    assert names.index("exp") < names.index("all_reduce") < names.index("sin")


def test_both_peaks_by_hand():
    """Layers of 1 KiB: three weights, three inputs and the output's gradient go in."""
    grads, module = layers(3)
    _, result = run(module, plan_for(grads[::-1], cap=1), *MOVING)
    memory = result.memory
    # 7 inputs, the first bucket; everything later takes what something else has left.
    assert memory.nbytes == 8 * 1024
    # 3 buckets more, of which none is a gradient's own memory.
    assert memory.ddp_nbytes == (7 + 3 + 1) * 1024


def needed_by(graph, ends):
    found, stack = set[fx.Node](), list(ends)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack.extend(node.all_input_nodes)
    return {node for node in found if node.op == "call_function" and edit.provenance_of(node) is None}


@settings(max_examples=60)
@given(data=st.data(), cap=st.sampled_from([1, 100, 200]), bound=st.none() | st.integers(0, 2000))
def test_what_holds_of_every_order(data, cap, bound):
    grads, module = layers(data.draw(st.integers(1, 6)), width=4)
    plan = plan_for(data.draw(st.permutations(grads)), cap)
    inputs = [torch.randn(4, 4) for _ in range(2 * len(grads) + 1)]
    staying, _ = run(module, plan, *STAYING)
    scheduling = ScheduleCollectives() if bound is None else Bounded(nbytes=bound)
    graph, result = run(module, plan, BucketReductions(), scheduling)
    # The plan's order.
    assert launches(graph) == launches(staying) == [f"0.{number}" for number in range(len(plan.buckets))]
    # Before each launch the least that any order could have there, so never more than if only collectives move.
    counts, least = compute_before_launches(graph), []
    ends = []
    for launch in filter(is_all_reduce, graph.nodes):
        ends.append(launch)
        least.append(len(needed_by(graph, ends)))
    if result.refusals:
        assert short(graph) == short(staying)
    else:
        assert counts == least
    if short(graph) != short(staying):
        assert result.memory.nbytes <= (result.memory.ddp_nbytes if bound is None else bound)
    assert all(now <= was for now, was in zip(counts, compute_before_launches(staying), strict=True))
    # The same numbers.
    torch.testing.assert_close(fx.GraphModule(module, graph)(*inputs), executed(module, [plan], *inputs))


aten = torch.ops.aten


def told(graph):
    """Compute `c`; launches `R` reduce-scatter, `A` all-reduce, `G` all-gather and the bucket, waits small."""
    letters = {REDUCE_SCATTER: "R", ALL_TO_ALL: "R", ALL_REDUCE: "A", ALL_GATHER: "G"}
    parts = []
    launched = {}
    for node in graph.nodes:
        provenance = edit.provenance_of(node)
        if is_collective(node):
            launched[node] = letters[node.target] + str(provenance.unit[1])
            parts.append(launched[node])
        elif is_wait(node):
            parts.append(launched[node.all_input_nodes[0]].lower())
        elif node.op == "call_function" and node.target in (aten.mm.default, aten.addmm.default, aten.exp.default):
            parts.append("exp" if node.target is aten.exp.default else "c")
    return " ".join(parts)


@pytest.mark.parametrize("backend", [backends.NCCL, backends.GLOO])
def test_compute_waits_for_a_stage_when_the_next_bucket_is_launched(backend):
    """And for the slow link only when nothing is left to compute."""
    levels = Levels("in", "out", ((0, 1), (2, 3)))
    grads, module = layers(3, 4, more=True, levels=levels, backend=backend)
    plan = plan_for(grads[::-1], cap=1)
    assert len(plan.buckets) == 3
    staying, _ = run(module, plan, *STAYING)  # compute that does not move is not held back either
    assert told(staying).replace(" exp", "").replace(" c", "").startswith("c R0 R1 r0 A0 R2 r1 A1 r2 A2 a0 G0")
    graph = run_passes(module, plan).graph
    assert told(graph) == "c R0 c c R1 r0 A0 c c R2 r1 A1 r2 A2 c exp a0 G0 a1 G1 a2 G2 g0 g1 g2"


GRADS = [Grad(index=index, shape=(4, 4)) for index in range(4)]


def left(plan, updates, *, returned=(), crosses=True):
    """The graph of four gradients. `updates`: of which of them each op is; `returned`: which of them somebody reads."""

    def backward(x, *parameters):
        reduced = [grad.reduce(x @ parameter) for grad, parameter in zip(GRADS, parameters, strict=True)]
        for number, indices in enumerate(updates):
            bucket = max(bucket_of[index] for index in indices)
            some = [parameters[index] for index in indices]
            UPDATE_LATER(some, [reduced[index] for index in indices], list(indices), 0, number, bucket)
        return [reduced[index] for index in returned] or x + 1

    bucket_of = {m.gradient.index: number for number, bucket in enumerate(plan.buckets) for m in bucket.members}
    values = [torch.randn(4, 4) for _ in range(5)]
    graph = run_passes(trace(backward, *values), plan, passes=(*DEFAULT_PASSES, PlaceUpdates((-1, 0, 1, 2, 3)))).graph
    defer_reductions(graph, [plan], [[crosses] * len(updates)])
    graph.lint()
    return graph


def counts(graph):
    """Launches, waits, updates, and reductions that are left."""
    calls = [node for node in graph.nodes if node.op == "call_function"]
    return (
        sum(map(is_collective, calls)),
        sum(map(is_wait, calls)),
        *(sum(node.target is target for node in calls) for target in (UPDATE, LEAVE)),
    )


ONE_EACH, PAIRS = plan_for(GRADS, cap=1), plan_for(GRADS, cap=128)
EACH = ((0,), (1,), (2,), (3,))


def test_what_a_backward_leaves():
    """All, but what does not cross, what somebody else reads, and a bucket of two optimizers."""
    assert counts(left(ONE_EACH, EACH)) == (4, 0, 0, 4)
    assert counts(left(PAIRS, ((0, 1), (2, 3)))) == (2, 0, 0, 2)
    assert counts(left(ONE_EACH, EACH, crosses=False)) == (4, 4, 4, 0)
    assert counts(left(ONE_EACH, EACH, returned=[2])) == (4, 1, 1, 3)
    assert counts(left(PAIRS, ((0, 1), (2, 3)), returned=[0])) == (2, 1, 1, 1)
    assert counts(left(PAIRS, ((0,), (1,), (2, 3)))) == (2, 1, 2, 1)
    several = left(ONE_EACH, ((0, 1), (2,), (3,)))  # an update over two buckets
    assert counts(several) == (4, 0, 0, 3)
    assert [node.args[1] for node in several.find_nodes(op="call_function", target=LEAVE)] == [[0, 1], [2], [3]]


def forward(first, x, second, unread):
    return (x @ first).tanh() @ second.t() + first


def waits(parameters, inputs=4, is_backward=False, **options):
    graph = trace(forward, *(torch.randn(4, 4) for _ in range(4))).graph
    if is_backward:
        next(iter(graph.nodes)).name = "tangents_1"
    CompleteBeforeUse(parameters, inputs, **options)(graph)
    graph.lint()
    return graph.find_nodes(op="call_function", target=WAIT_FOR_PARAMETERS)


def test_where_a_forward_waits():
    """In front of the first reader of each parameter, and behind the last product; all at once if inputs are others."""
    names = [(*(each.name for each in wait.args[0]), wait.next.name) for wait in waits((0, 2, 3))]
    assert names == [("first_1", "mm"), ("second_1", "t")]
    assert [wait.args[1] and wait.args[1].name for wait in waits((0, 2))] == [None, "mm"]
    (wait,) = waits((0, 2), inputs=5, most=1)
    assert [*(each.name for each in wait.args[0]), wait.next.name] == ["first_1", "x_1", "second_1", "mm"]
    assert not waits((0, 2), is_backward=True)


SIDE = 8
SQUARES = [Grad(index=index, shape=(SIDE, SIDE)) for index in range(4)]
PLAN = plan_for(SQUARES, cap=1)
"""A bucket for each."""


def backward(x, alias, *parameters):
    gradient, reduced = x, []
    for grad, parameter in zip(SQUARES, parameters, strict=True):
        gradient = gradient @ parameter
        reduced.append(grad.reduce(gradient))
    result = gradient @ alias.t()
    for index, parameter in enumerate(parameters):
        UPDATE_LATER([parameter], [reduced[index]], [index], 0, 0, index)
    return result


def test_what_lies_in_the_memory_of_a_parameter_is_written_too():
    graph = trace(backward, *(torch.randn(SIDE, SIDE) for _ in range(6))).graph
    PlaceUpdates((-1, 0, 0, 1, 2, 3))(graph, [PLAN])
    _, alias, *parameters = graph.find_nodes(op="placeholder")
    updates = graph.find_nodes(op="call_function", target=UPDATE)
    written = {read_update(each).indices[0]: each.args[0] for each in updates}
    assert written == {0: [parameters[0], alias]} | {index: [parameters[index]] for index in (1, 2, 3)}


@dataclass
class Keeping:
    """Keeps what it is given."""

    kept: list[torch.Tensor] = field(default_factory=list)

    def apply(self, bucket, indices, parameters, gradients):
        self.kept.extend(gradients)


def test_generated_code_leaves_to_an_optimizer_what_it_keeps():
    def backward(x, y, parameter):
        UPDATE_LATER([parameter], [x * 2], [0], 0, 0, 0)
        return (y.sin(),)  # fits into the memory of the product

    x, y, parameter = (torch.randn(SIDE, SIDE) for _ in range(3))
    target = Keeping()

    import_module("dp_compile.passes.lowering")  # loaded only by what compiles

    class Place(inductor.CustomGraphPass):
        def __call__(self, graph):
            PlaceUpdates((-1, -1, 0))(graph, [PLAN])

        def uuid(self):
            return None

    compiled = inductor.compile_with_inductor(trace(backward, x, y, parameter), [x, y, parameter], Place())
    with Running([PLAN], optimizers=[[target]]):
        (result,) = compiled(x, y, parameter)
    torch.testing.assert_close(result, y.sin())
    torch.testing.assert_close(target.kept, [x * 2])
