"""The passes over a captured backward: golden graphs, what they refuse, and what holds for all graphs."""

import pytest
import torch
from expecttest import assert_expected_inline
from graphs import Grad, executed, launches, plan_for, run_passes, short, trace

from dp_compile.errors import InvalidGraphError
from dp_compile.fx import edit
from dp_compile.fx.collectives import ALL_REDUCE, WAIT, is_collective
from dp_compile.passes import DEFAULT_PASSES, BucketReductions, ScheduleCollectives
from dp_compile.passes.pipeline import Pipeline
from dp_compile.passes.reduction import FLAT_BUCKET, REDUCE_GRAD, emit

pytestmark = pytest.mark.usefixtures("fake_group")

ONLY_BUCKETS = (BucketReductions(),)


def reduce_all(*grads):
    """Each gradient is computed, then reduced, one after the other."""

    def backward(*values):
        return tuple(grad.reduce(value.sin()) for grad, value in zip(grads, values, strict=True))

    return trace(backward, *(grad.values() for grad in grads))


def test_a_bucket_with_gaps():
    grads = [Grad(index=0, shape=(5, 3)), Grad(index=1, shape=(2, 3), order=(1, 0)), Grad(index=2, shape=(9, 2))]
    plan = plan_for(grads, alignment_bytes=64)
    module = run_passes(reduce_all(*grads), plan)
    assert_expected_inline(
        short(module.graph).replace("flat_bucket([", "flat_bucket(\n["),
        """\
arg0_1: float32[5, 3]
arg1_1: float32[2, 3]
arg2_1: float32[9, 2]
sin = aten.sin(arg0_1)
sin_1 = aten.sin(arg1_1)
sin_2 = aten.sin(arg2_1)
flat_bucket_default = dp_compile.flat_bucket(
[sin, sin_1, sin_2], [0.5, 0.5, 0.5], [3, 1, 1, 2, 2, 1], [0, 16, 32], 50)
all_reduce_default = _c10d_functional.all_reduce(flat_bucket_default, sum, 0)
wait_tensor_default = _c10d_functional.wait_tensor(all_reduce_default)
as_strided_default = aten.as_strided(wait_tensor_default, [5, 3], [3, 1], 0)
as_strided_default_1 = aten.as_strided(wait_tensor_default, [2, 3], [1, 2], 16)
as_strided_default_2 = aten.as_strided(wait_tensor_default, [9, 2], [2, 1], 32)
return [as_strided_default, as_strided_default_1, as_strided_default_2]""",
    )
    values = [grad.values() for grad in grads]
    for grad, value, out in zip(grads, values, module(*values), strict=True):
        assert torch.equal(out, value.sin() * 0.5)
        assert out.stride() == grad.stride


def test_a_gradient_in_another_layout_than_its_parameter_keeps_the_traced_promise():
    parameter = Grad(index=0, shape=(2, 3))
    module = trace(lambda value: (parameter.reduce(value.sin()),), parameter.values(stride=(1, 2)))
    run_passes(module, plan_for([parameter]), passes=ONLY_BUCKETS)
    assert_expected_inline(
        short(module.graph),
        """\
value_1: float32[2, 3]
sin = aten.sin(value_1)
flat_bucket_default = dp_compile.flat_bucket([sin], [0.5], [3, 1], [0], 6)
all_reduce_default = _c10d_functional.all_reduce(flat_bucket_default, sum, 0)
wait_tensor_default = _c10d_functional.wait_tensor(all_reduce_default)
as_strided_default = aten.as_strided(wait_tensor_default, [2, 3], [3, 1], 0)
permute_default = aten.permute(as_strided_default, [1, 0])
reshape_default = aten.reshape(permute_default, [6])
as_strided_default_1 = aten.as_strided(reshape_default, [2, 3], [1, 2])
return [as_strided_default_1]""",
    )


def test_what_computes_a_gradient_takes_the_factor_and_the_layout():
    """A product and its views, a sum and its views, scattered rows."""
    shapes = [(2, 3), (3, 2), (2,), (5, 3)]
    grads = [Grad(index=index, shape=shape, order=(1, 0) if index == 1 else None) for index, shape in enumerate(shapes)]

    def backward(a, b, rows):
        scattered = torch.zeros(5, 3).index_put((rows,), b.sin(), accumulate=True)
        total = a.exp().sum(0, keepdim=True).view(2)
        products = a.t() @ b, (a.t() @ b.cos()).permute(1, 0)
        return tuple(grad.reduce(g) for grad, g in zip(grads, (*products, total, scattered), strict=True))

    a, b, rows = torch.randn(4, 2), torch.randn(4, 3), torch.tensor([1, 0, 4, 1])
    module = trace(backward, a, b, rows)
    expected = executed(module, [plan_for(grads)], a, b, rows)
    run_passes(module, plan_for(grads), passes=ONLY_BUCKETS)
    (bucket,) = module.graph.find_nodes(op="call_function", target=FLAT_BUCKET)
    mm, turned, total, scattered = bucket.args[0]
    assert [each.target for each in (mm, turned)] == [torch.ops.aten.addmm.default] * 2
    assert [each.kwargs["alpha"] for each in (mm, turned)] == [0.5, 0.5]
    assert (total.target, scattered.target) == (torch.ops.aten.sum.dim_IntList, torch.ops.aten.index_put.default)
    assert bucket.args[1:] == ([1.0, 1.0, 0.5, 1.0], [3, 1, 3, 1, 2, 1, 3, 1], [0, 6, 12, 14], 29)
    assert all(map(torch.equal, expected, module(a, b, rows)))


@pytest.mark.parametrize("rows", [3, 0])
def test_products_and_scattered_rows_of_nothing_take_no_factor(rows):
    grads = [Grad(index=0, shape=(2, 3)), Grad(index=1)]

    def backward(a, b, values):
        scattered = torch.zeros(4).index_put((torch.arange(rows) % 3,), values.sin(), accumulate=True)
        return grads[0].reduce(a.t() @ b), grads[1].reduce(scattered)

    inputs = torch.randn(rows, 2), torch.randn(rows, 3), torch.randn(rows)
    text = short(run_passes(trace(backward, *inputs), plan_for(grads)).graph)
    assert ("addmm" in text, "mul" in text) == (bool(rows), bool(rows))


def test_two_replicas_run_one_after_the_other():
    grads = [Grad(index=index, replica=replica) for index in range(2) for replica in (1, 0)]
    plan = plan_for([Grad(index=1), Grad(index=0)], cap=1)
    for passes in (ONLY_BUCKETS, DEFAULT_PASSES):  # in the plan's order, not the graph's
        graph = run_passes(reduce_all(*grads), plan, plan, passes=passes).graph
        assert launches(graph) == ["0.0", "0.1", "1.0", "1.1"]


def test_a_reduction_of_a_reduction():
    first, second = Grad(index=0), Grad(index=1)
    module = trace(lambda a: (second.reduce(first.reduce(a)),), first.values())
    run_passes(module, plan_for([first, second], cap=1))
    assert launches(module.graph) == ["0.0", "0.1"]
    assert torch.equal(module(first.values())[0], first.values() * 0.25)


@pytest.mark.parametrize(
    ("text", "grads"),
    [
        ("the plan reduces the gradient of p1, but the graph does not", [Grad(index=0)]),
        ("gradient 2 of replica 0 is reduced in the graph", [Grad(index=0), Grad(index=1), Grad(index=2)]),
        ("the gradient of p0 is reduced more than once", [Grad(index=0), Grad(index=0)]),
        ("reduce_grad belongs to replica 1, but there are plans for 1 only", [Grad(index=0, replica=1)]),
        ("of p0 is .*'bfloat16'.*the plan says .*'float32'", [Grad(index=0, dtype=torch.bfloat16), Grad(index=1)]),
        (r"of p0 is .*\(2, 2\).*the plan says .*\(4,\)", [Grad(index=0, shape=(2, 2)), Grad(index=1)]),
    ],
)
def test_what_a_plan_and_a_graph_cannot_agree_on(text, grads):
    with pytest.raises(InvalidGraphError, match=text):
        run_passes(reduce_all(*grads), plan_for([Grad(index=0), Grad(index=1)]))


def test_a_malformed_reduction_is_refused():
    module = reduce_all(Grad(index=0))
    module.graph.find_nodes(op="call_function", target=REDUCE_GRAD)[0].update_arg(1, "one")
    with pytest.raises(InvalidGraphError, match="reduce_grad reduces no gradient of a module"):
        run_passes(module, plan_for([Grad(index=0)]))


def test_a_gradient_keeps_its_layout_and_is_not_reduced_outside_of_a_backward():
    """What a tracer is told of the op is what the passes keep."""
    for stride in ((6, 1), (1, 4), (12, 2)):
        grad = torch.empty_strided((4, 6), stride).normal_()
        (node,) = trace(lambda g: emit(g, 0, 0), grad).graph.find_nodes(op="call_function", target=REDUCE_GRAD)
        assert node.meta["val"].stride() == torch.empty_like(grad).stride()
    with pytest.raises(InvalidGraphError, match="gradient 0 of module 0 is reduced outside a backward"):
        emit(torch.ones(3), 0, 0)


def test_a_gradient_that_depends_on_a_reduced_one_cannot_share_its_bucket():
    first, second = Grad(index=0), Grad(index=1)
    module = trace(lambda a: (second.reduce(first.reduce(a).sin()),), first.values())
    with pytest.raises(InvalidGraphError, match=r"dependency cycle: sin, .*flat_bucket_default, all_reduce_default"):
        run_passes(module, plan_for([first, second]))


def test_launches_are_early_and_waits_late():
    grads = [Grad(index=index) for index in range(2)]

    def backward(a, b):
        first = grads[0].reduce(a.sin())
        second = grads[1].reduce(b.cos())
        return first.neg(), second, b.exp().log()

    module = run_passes(trace(backward, *(grad.values() for grad in grads)), plan_for(grads, cap=1))
    assert_expected_inline(
        short(module.graph),
        """\
a_1: float32[4]
b_1: float32[4]
sin = aten.sin(a_1)
flat_bucket_default = dp_compile.flat_bucket([sin], [0.5], [1], [0], 4)
all_reduce_default = _c10d_functional.all_reduce(flat_bucket_default, sum, 0)
cos = aten.cos(b_1)
flat_bucket_default_1 = dp_compile.flat_bucket([cos], [0.5], [1], [0], 4)
all_reduce_default_1 = _c10d_functional.all_reduce(flat_bucket_default_1, sum, 0)
wait_tensor_default = _c10d_functional.wait_tensor(all_reduce_default)
as_strided_default = aten.as_strided(wait_tensor_default, [4], [1], 0)
neg = aten.neg(as_strided_default)
exp = aten.exp(b_1)
log = aten.log(exp)
wait_tensor_default_1 = _c10d_functional.wait_tensor(all_reduce_default_1)
as_strided_default_1 = aten.as_strided(wait_tensor_default_1, [4], [1], 0)
return [neg, as_strided_default_1, log]""",
    )


def uuid(passes=DEFAULT_PASSES, *plans):
    return Pipeline(passes, plans, lambda result: None).uuid()


def test_the_cache_key_sees_passes_options_and_plans():
    plan, other = plan_for([Grad(index=0), Grad(index=1)]), plan_for([Grad(index=0), Grad(index=1)], cap=1)
    keys = [
        uuid(),
        uuid(DEFAULT_PASSES, plan),
        uuid(DEFAULT_PASSES, plan, other),
        uuid(DEFAULT_PASSES, other, plan),
        uuid(DEFAULT_PASSES[::-1], plan),
        uuid(DEFAULT_PASSES, plan_for([Grad(index=0, group="1"), Grad(index=1)])),
        uuid((BucketReductions(zero_gaps=True), ScheduleCollectives())),
        Pipeline(DEFAULT_PASSES, (), lambda result: None, (True, False)).uuid(),
        Pipeline(DEFAULT_PASSES, (), lambda result: None, (), [[True]]).uuid(),
    ]
    assert uuid(DEFAULT_PASSES, plan) == keys[1]
    assert len(set(keys)) == len(keys)


def test_collectives_of_somebody_else_stay_in_their_order():
    """The first needs a reduced gradient, which is launched behind another one; ranks without passes have it first."""
    grads = [Grad(index=0), Grad(index=1)]

    def backward(a, b):
        first = grads[1].reduce(a.sin())
        of_first, of_other = WAIT(ALL_REDUCE(first.exp(), "max", "0")), WAIT(ALL_REDUCE(b.cos(), "max", "0"))
        return grads[0].reduce(b.sin()), first, of_first, of_other

    result = run_passes(trace(backward, torch.randn(4), torch.randn(4)), plan_for(grads, cap=1))
    names = [node.name for node in result.graph.nodes if is_collective(node) and edit.provenance_of(node) is None]
    assert names == ["all_reduce", "all_reduce_1"]
