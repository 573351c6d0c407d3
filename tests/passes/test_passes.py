"""The passes over a captured backward: golden graphs, what they refuse, and what holds for all graphs.

On the fake group an all-reduce returns its input, so a graph computes `gradient * scale` before and after the passes.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from graphs import Changed, Grad, executed, launches, plan_for, run_passes, trace
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from dp_compile._torch import distributed, inductor
from dp_compile.errors import InvalidGraphError
from dp_compile.fx import edit
from dp_compile.fx.collectives import ALL_REDUCE, GROUPED_ALL_REDUCE, WAIT, is_collective, wait_counts
from dp_compile.fx.printer import short
from dp_compile.fx.verify import facts_of
from dp_compile.passes import DEFAULT_PASSES, BucketReductions, ScheduleCollectives
from dp_compile.passes.analysis import accounted, analyse
from dp_compile.passes.bucket_ops import FLAT_BUCKET
from dp_compile.passes.bucketing import memory_order
from dp_compile.passes.pipeline import Pipeline
from dp_compile.passes.reduction import REDUCE_GRAD
from dp_compile.passes.result import GraphPass, PassRecord, PassResult
from dp_compile.plan.buckets import PACKED, BucketPlan, Layout

pytestmark = pytest.mark.usefixtures("fake_group")

ONLY_BUCKETS = (BucketReductions(),)


@pytest.fixture(scope="module")
def second_group(fake_group: dist.ProcessGroup) -> str:
    """The name of another group of the same ranks."""
    return distributed.group_name(dist.new_group([0, 1]))


def reduce_all(*grads: Grad) -> fx.GraphModule:
    """Each gradient is computed, then reduced, one after the other."""

    def backward(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(grad.reduce(value.sin()) for grad, value in zip(grads, values, strict=True))

    return trace(backward, *(grad.values() for grad in grads))


# --- bucketing --------------------------------------------------------------------------------------------------


def test_two_gradients_become_one_bucket() -> None:
    first, second = Grad(index=0), Grad(index=1, shape=(2, 3))
    module = run_passes(reduce_all(first, second), plan_for([first, second]), passes=ONLY_BUCKETS)
    assert_expected_inline(
        short(module.graph),
        """\
arg0_1: float32[4]
arg1_1: float32[2, 3]
sin = aten.sin(arg0_1)
sin_1 = aten.sin(arg1_1)
flat_bucket_default = dp_compile.flat_bucket([sin, sin_1], [0.5, 0.5], [1, 3, 1], [0, 4], 10)
all_reduce_default = _c10d_functional.all_reduce(flat_bucket_default, sum, 0)
wait_tensor_default = _c10d_functional.wait_tensor(all_reduce_default)
as_strided_default = aten.as_strided(wait_tensor_default, [4], [1], 0)
as_strided_default_1 = aten.as_strided(wait_tensor_default, [2, 3], [3, 1], 4)
return [as_strided_default, as_strided_default_1]""",
    )


def test_a_gradient_alone_has_a_bucket_for_itself() -> None:
    grad = Grad(index=0, scale=1.0, reduce_op="avg")
    assert_expected_inline(
        short(run_passes(reduce_all(grad), plan_for([grad])).graph),
        """\
arg0_1: float32[4]
sin = aten.sin(arg0_1)
flat_bucket_default = dp_compile.flat_bucket([sin], [1.0], [1], [0], 4)
all_reduce_default = _c10d_functional.all_reduce(flat_bucket_default, avg, 0)
wait_tensor_default = _c10d_functional.wait_tensor(all_reduce_default)
as_strided_default = aten.as_strided(wait_tensor_default, [4], [1], 0)
return [as_strided_default]""",
    )


def test_buckets_keep_the_plans_order_and_not_the_graphs() -> None:
    grads = [Grad(index=index) for index in range(3)]
    plan = plan_for([grads[2], grads[0], grads[1]], cap=1)
    module = run_passes(reduce_all(*grads), plan, passes=ONLY_BUCKETS)
    assert_expected_inline(
        short(module.graph),
        """\
arg0_1: float32[4]
arg1_1: float32[4]
arg2_1: float32[4]
sin = aten.sin(arg0_1)
flat_bucket_default_1 = dp_compile.flat_bucket([sin], [0.5], [1], [0], 4)
sin_1 = aten.sin(arg1_1)
flat_bucket_default_2 = dp_compile.flat_bucket([sin_1], [0.5], [1], [0], 4)
sin_2 = aten.sin(arg2_1)
flat_bucket_default = dp_compile.flat_bucket([sin_2], [0.5], [1], [0], 4)
all_reduce_default = _c10d_functional.all_reduce(flat_bucket_default, sum, 0)
all_reduce_default_1 = _c10d_functional.all_reduce(flat_bucket_default_1, sum, 0)
wait_tensor_default_1 = _c10d_functional.wait_tensor(all_reduce_default_1)
as_strided_default_1 = aten.as_strided(wait_tensor_default_1, [4], [1], 0)
all_reduce_default_2 = _c10d_functional.all_reduce(flat_bucket_default_2, sum, 0)
wait_tensor_default_2 = _c10d_functional.wait_tensor(all_reduce_default_2)
as_strided_default_2 = aten.as_strided(wait_tensor_default_2, [4], [1], 0)
wait_tensor_default = _c10d_functional.wait_tensor(all_reduce_default)
as_strided_default = aten.as_strided(wait_tensor_default, [4], [1], 0)
return [as_strided_default_1, as_strided_default_2, as_strided_default]""",
    )


def test_a_bucket_keeps_the_memory_order_of_its_parameter() -> None:
    conv = Grad(index=0, shape=(2, 3, 4, 5), order=(0, 2, 3, 1))
    module = run_passes(reduce_all(conv, Grad(index=1)), plan_for([conv, Grad(index=1)]), passes=ONLY_BUCKETS)
    assert_expected_inline(
        short(module.graph),
        """\
arg0_1: float32[2, 3, 4, 5]
arg1_1: float32[4]
sin = aten.sin(arg0_1)
sin_1 = aten.sin(arg1_1)
flat_bucket_default = dp_compile.flat_bucket([sin, sin_1], [0.5, 0.5], [60, 1, 15, 3, 1], [0, 120], 124)
all_reduce_default = _c10d_functional.all_reduce(flat_bucket_default, sum, 0)
wait_tensor_default = _c10d_functional.wait_tensor(all_reduce_default)
as_strided_default = aten.as_strided(wait_tensor_default, [2, 3, 4, 5], [60, 1, 15, 3], 0)
as_strided_default_1 = aten.as_strided(wait_tensor_default, [4], [1], 120)
return [as_strided_default, as_strided_default_1]""",
    )
    value = conv.values()
    assert value.is_contiguous(memory_format=torch.channels_last)
    out = module(value, Grad(index=1).values())[0]
    assert out.stride() == value.stride()
    assert torch.equal(out, value.sin() * 0.5)


def test_a_bucket_with_gaps_and_members_apart() -> None:
    grads = [Grad(index=0, shape=(5, 3)), Grad(index=1, shape=(2, 3), order=(1, 0)), Grad(index=2, shape=(9, 2))]
    plan = plan_for(grads, layout=Layout(64, frozenset({"p1"})))
    module = run_passes(reduce_all(*grads), plan)
    assert_expected_inline(
        short(module.graph).replace("_coalesced([", "_coalesced(\n["),
        """\
arg0_1: float32[5, 3]
arg1_1: float32[2, 3]
arg2_1: float32[9, 2]
sin = aten.sin(arg0_1)
sin_1 = aten.sin(arg1_1)
flat_bucket_default_1 = dp_compile.flat_bucket([sin_1], [0.5], [1, 2], [0], 6)
sin_2 = aten.sin(arg2_1)
flat_bucket_default = dp_compile.flat_bucket([sin, sin_2], [0.5, 0.5], [3, 1, 2, 1], [0, 16], 34)
all_reduce_coalesced_default = _c10d_functional.all_reduce_coalesced(
[flat_bucket_default, flat_bucket_default_1], sum, 0)
getitem = getitem(all_reduce_coalesced_default, 0)
getitem_1 = getitem(all_reduce_coalesced_default, 1)
wait_tensor_default = _c10d_functional.wait_tensor(getitem)
wait_tensor_default_1 = _c10d_functional.wait_tensor(getitem_1)
as_strided_default = aten.as_strided(wait_tensor_default, [5, 3], [3, 1], 0)
as_strided_default_1 = aten.as_strided(wait_tensor_default_1, [2, 3], [1, 2], 0)
as_strided_default_2 = aten.as_strided(wait_tensor_default, [9, 2], [2, 1], 16)
return [as_strided_default, as_strided_default_1, as_strided_default_2]""",
    )
    values = [grad.values() for grad in grads]
    for grad, value, out in zip(grads, values, module(*values), strict=True):
        assert torch.equal(out, value.sin() * 0.5)
        assert out.stride() == grad.stride


def test_a_bucket_without_flat_memory() -> None:
    grads = [Grad(index=0, scale=1.0, reduce_op="avg"), Grad(index=1, shape=(2, 3), scale=1.0, reduce_op="avg")]
    plan = plan_for(grads, layout=Layout(64, frozenset({"p0", "p1"})))
    assert_expected_inline(
        short(run_passes(reduce_all(*grads), plan).graph).replace("_coalesced([", "_coalesced(\n["),
        """\
arg0_1: float32[4]
arg1_1: float32[2, 3]
sin = aten.sin(arg0_1)
flat_bucket_default = dp_compile.flat_bucket([sin], [1.0], [1], [0], 4)
sin_1 = aten.sin(arg1_1)
flat_bucket_default_1 = dp_compile.flat_bucket([sin_1], [1.0], [3, 1], [0], 6)
all_reduce_coalesced_default = _c10d_functional.all_reduce_coalesced(
[flat_bucket_default, flat_bucket_default_1], avg, 0)
getitem = getitem(all_reduce_coalesced_default, 0)
getitem_1 = getitem(all_reduce_coalesced_default, 1)
wait_tensor_default = _c10d_functional.wait_tensor(getitem)
wait_tensor_default_1 = _c10d_functional.wait_tensor(getitem_1)
as_strided_default = aten.as_strided(wait_tensor_default, [4], [1], 0)
as_strided_default_1 = aten.as_strided(wait_tensor_default_1, [2, 3], [3, 1], 0)
return [as_strided_default, as_strided_default_1]""",
    )


def test_a_member_apart_that_is_alone_needs_no_group() -> None:
    grad = Grad(index=0)
    apart = run_passes(reduce_all(grad), plan_for([grad], layout=Layout(64, frozenset({"p0"}))))
    assert short(apart.graph) == short(run_passes(reduce_all(grad), plan_for([grad])).graph)


def test_a_gradient_in_another_layout_than_its_parameter_keeps_the_traced_promise() -> None:
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


def test_strides_of_single_rows_do_not_cost_a_copy() -> None:
    """A dimension of size one may have any stride: a 1x1 convolution has often another one in its gradient."""
    parameter = Grad(index=0, shape=(2, 3, 1, 1))
    module = trace(lambda value: (parameter.reduce(value.sin()),), parameter.values(stride=(3, 1, 3, 3)))
    run_passes(module, plan_for([parameter]), passes=ONLY_BUCKETS)
    assert_expected_inline(
        short(module.graph),
        """\
value_1: float32[2, 3, 1, 1]
sin = aten.sin(value_1)
flat_bucket_default = dp_compile.flat_bucket([sin], [0.5], [3, 1, 1, 1], [0], 6)
all_reduce_default = _c10d_functional.all_reduce(flat_bucket_default, sum, 0)
wait_tensor_default = _c10d_functional.wait_tensor(all_reduce_default)
as_strided_default = aten.as_strided(wait_tensor_default, [2, 3, 1, 1], [3, 1, 3, 3], 0)
return [as_strided_default]""",
    )


def test_what_computes_a_gradient_takes_the_factor_and_the_layout() -> None:
    """A product and its views, a sum and its views, scattered rows."""
    shapes: list[tuple[int, ...]] = [(2, 3), (3, 2), (2,), (5, 3)]
    grads = [Grad(index=index, shape=shape, order=(1, 0) if index == 1 else None) for index, shape in enumerate(shapes)]

    def backward(a: torch.Tensor, b: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scattered = torch.zeros(5, 3).index_put((rows,), b.sin(), accumulate=True)
        total = a.exp().sum(0, keepdim=True).view(2)
        products = a.t() @ b, (a.t() @ b.cos()).permute(1, 0)
        return tuple(grad.reduce(g) for grad, g in zip(grads, (*products, total, scattered), strict=True))

    a, b, rows = torch.randn(4, 2), torch.randn(4, 3), torch.tensor([1, 0, 4, 1])
    module = trace(backward, a, b, rows)
    expected = executed(module, [plan_for(grads)], a, b, rows)
    run_passes(module, plan_for(grads), passes=ONLY_BUCKETS)
    assert_expected_inline(
        short(module.graph).replace("], [", "],\n["),
        """\
a_1: float32[4, 2]
b_1: float32[4, 3]
rows_1: int64[4]
zeros = aten.zeros([5, 3], device=cpu, pin_memory=False)
sin = aten.sin(b_1)
mul_tensor = aten.mul.Tensor(sin, 0.5)
index_put = aten.index_put(zeros, [rows_1], mul_tensor, True)
exp = aten.exp(a_1)
sum_1 = aten.sum.dim_IntList(exp, [0], True)
t = aten.t(a_1)
select_int = aten.select.int(b_1, 0, 0)
mm = aten.addmm(select_int, t, b_1, beta=0, alpha=0.5)
t_1 = aten.t(a_1)
cos = aten.cos(b_1)
select_int_1 = aten.select.int(cos, 0, 0)
mm_1 = aten.addmm(select_int_1, t_1, cos, beta=0, alpha=0.5)
flat_bucket_default = dp_compile.flat_bucket([mm, mm_1, sum_1, index_put],
[1.0, 1.0, 0.5, 1.0],
[3, 1, 3, 1, 2, 1, 3, 1],
[0, 6, 12, 14], 29)
all_reduce_default = _c10d_functional.all_reduce(flat_bucket_default, sum, 0)
wait_tensor_default = _c10d_functional.wait_tensor(all_reduce_default)
as_strided_default = aten.as_strided(wait_tensor_default, [2, 3],
[3, 1], 0)
as_strided_default_1 = aten.as_strided(wait_tensor_default, [3, 2],
[1, 3], 6)
as_strided_default_2 = aten.as_strided(wait_tensor_default, [2],
[1], 12)
as_strided_default_3 = aten.as_strided(wait_tensor_default, [5, 3],
[3, 1], 14)
return [as_strided_default, as_strided_default_1, as_strided_default_2, as_strided_default_3]""",
    )
    for was, now in zip(expected, module(a, b, rows), strict=True):
        assert torch.equal(was, now)


def test_a_product_that_is_used_elsewhere_stays_what_it_is() -> None:
    grad = Grad(index=0, shape=(2, 3))

    def backward(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        product = a.t() @ b
        return grad.reduce(product), product.sum()

    module = trace(backward, torch.randn(4, 2), torch.randn(4, 3))
    run_passes(module, plan_for([grad]), passes=ONLY_BUCKETS)
    assert "flat_bucket([mm], [0.5], [3, 1], [0], 6)" in short(module.graph)


@pytest.mark.parametrize(("rows", "folds"), [(4, True), (0, False)])
def test_a_product_of_nothing_has_no_row_to_borrow(rows: int, folds: bool) -> None:
    grad = Grad(index=0, shape=(2, 3))
    module = trace(lambda a, b: (grad.reduce(a.t() @ b),), torch.randn(rows, 2), torch.randn(rows, 3))
    run_passes(module, plan_for([grad]), passes=ONLY_BUCKETS)
    assert ("addmm" in short(module.graph)) == folds


@pytest.mark.parametrize("rows", [3, 0])
def test_nothing_that_is_scattered_bears_no_factor(rows: int) -> None:
    """The result is zeros, and the check of the passes found another factor."""
    grad = Grad(index=0, shape=(4,))

    def backward(values: torch.Tensor) -> tuple[torch.Tensor]:
        places = torch.arange(rows) % 3
        return (grad.reduce(torch.zeros(4).index_put((places,), values.sin(), accumulate=True)),)

    module = run_passes(trace(backward, torch.randn(rows)), plan_for([grad]))
    assert ("mul" in short(module.graph)) == bool(rows)


def test_products_that_are_added_to_something_and_products_of_a_batch_take_the_factor() -> None:
    shapes: list[tuple[int, ...]] = [(2, 3), (5, 2, 3), (5, 2, 3)]
    grads = [Grad(index=index, shape=shape) for index, shape in enumerate(shapes)]

    def backward(a: torch.Tensor, b: torch.Tensor, old: torch.Tensor) -> tuple[torch.Tensor, ...]:
        added = torch.addmm(old, a[0], b[0], alpha=3)
        products = added, torch.bmm(a, b), torch.baddbmm(old, a, b, beta=2)
        return tuple(grad.reduce(product) for grad, product in zip(grads, products, strict=True))

    values = torch.randn(5, 2, 4), torch.randn(5, 4, 3), torch.randn(2, 3)
    module = trace(backward, *values)
    expected = executed(module, [plan_for(grads)], *values)
    run_passes(module, plan_for(grads), passes=ONLY_BUCKETS)
    text = short(module.graph)
    assert "beta=0.5, alpha=1.5" in text
    assert "beta=1.0, alpha=0.5" in text
    assert "beta=0, alpha=0.5" in text
    for was, now in zip(expected, module(*values), strict=True):
        torch.testing.assert_close(was, now)


def test_a_reduced_gradient_may_be_used_before_its_bucket_is_full() -> None:
    first, second = Grad(index=0), Grad(index=1)

    def backward(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        reduced = first.reduce(a.sin())
        norm = reduced.sum()
        return reduced, norm, second.reduce(b.cos())

    module = trace(backward, first.values(), second.values())
    run_passes(module, plan_for([first, second]), passes=ONLY_BUCKETS)
    assert_expected_inline(
        short(module.graph),
        """\
a_1: float32[4]
b_1: float32[4]
sin = aten.sin(a_1)
cos = aten.cos(b_1)
flat_bucket_default = dp_compile.flat_bucket([sin, cos], [0.5, 0.5], [1, 1], [0, 4], 8)
all_reduce_default = _c10d_functional.all_reduce(flat_bucket_default, sum, 0)
wait_tensor_default = _c10d_functional.wait_tensor(all_reduce_default)
as_strided_default = aten.as_strided(wait_tensor_default, [4], [1], 0)
sum_1 = aten.sum(as_strided_default)
as_strided_default_1 = aten.as_strided(wait_tensor_default, [4], [1], 4)
return [as_strided_default, sum_1, as_strided_default_1]""",
    )


def test_groups_and_dtypes_have_buckets_of_their_own(second_group: str) -> None:
    grads = [
        Grad(index=index, dtype=dtype, group=group)
        for index, (dtype, group) in enumerate(
            itertools.product((torch.float32, torch.bfloat16), ("0", second_group, "0", second_group))
        )
    ]
    module = run_passes(reduce_all(*grads), plan_for(grads), passes=ONLY_BUCKETS)
    collectives = module.graph.find_nodes(op="call_function", target=ALL_REDUCE)
    kinds = [(node.meta["val"].dtype, node.args[2], node.meta["val"].numel()) for node in collectives]
    assert kinds == [
        (torch.float32, "0", 8),
        (torch.float32, second_group, 8),
        (torch.bfloat16, "0", 8),
        (torch.bfloat16, second_group, 8),
    ]


def test_two_replicas_run_one_after_the_other() -> None:
    grads = [Grad(index=index, replica=replica) for index in range(2) for replica in (1, 0)]
    plan = plan_for([Grad(index=0), Grad(index=1)], cap=1)
    assert launches(run_passes(reduce_all(*grads), plan, plan).graph) == ["0.0", "0.1", "1.0", "1.1"]


def test_a_replica_without_reductions_is_left_out() -> None:
    grad = Grad(index=0, replica=1)
    plan = plan_for([Grad(index=0)])
    assert launches(run_passes(reduce_all(grad), plan, plan).graph) == ["1.0"]


def test_a_graph_without_reductions_stays_as_it_is() -> None:
    module = trace(lambda a: a.sin() + 1, torch.randn(3))
    before = short(module.graph)
    assert BucketReductions()(module.graph, ()) == PassResult(changed=False)
    assert ScheduleCollectives()(module.graph, ()) == PassResult(changed=False)
    assert short(module.graph) == before


def test_a_reduction_of_a_reduction() -> None:
    first, second = Grad(index=0), Grad(index=1)
    module = trace(lambda a: (second.reduce(first.reduce(a)),), first.values())
    run_passes(module, plan_for([first, second], cap=1))
    assert launches(module.graph) == ["0.0", "0.1"]
    assert torch.equal(module(first.values())[0], first.values() * 0.25)


@pytest.mark.parametrize(
    ("shape", "order"), [((), ()), ((4,), (0,)), ((2, 3), (1, 0)), ((2, 3, 4, 5), (0, 2, 3, 1)), ((2, 1, 3), (0, 1, 2))]
)
def test_memory_order(shape: tuple[int, ...], order: tuple[int, ...]) -> None:
    assert memory_order(Grad(index=0, shape=shape, order=order).stride) == order


# --- what a plan and a graph cannot agree on ------------------------------------------------------------------------


def refuse(text: str, grads: Sequence[Grad], planned: Sequence[Grad]) -> None:
    with pytest.raises(InvalidGraphError, match=text):
        run_passes(reduce_all(*grads), plan_for(planned))


def test_a_member_that_the_graph_does_not_reduce() -> None:
    refuse(
        "the plan reduces the gradient of p1, but the graph does not", [Grad(index=0)], [Grad(index=0), Grad(index=1)]
    )


def test_a_gradient_that_the_plan_does_not_know() -> None:
    refuse("gradient 1 of replica 0 is reduced in the graph", [Grad(index=0), Grad(index=1)], [Grad(index=0)])


def test_a_gradient_that_is_reduced_twice() -> None:
    refuse("the gradient of p0 is reduced more than once", [Grad(index=0), Grad(index=0)], [Grad(index=0)])


def test_an_unknown_replica() -> None:
    refuse(
        "reduce_grad belongs to replica 1, but there are plans for 1 only", [Grad(index=0, replica=1)], [Grad(index=0)]
    )


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"dtype": torch.bfloat16}, "the gradient of p0 is .*'bfloat16'.*the plan says .*'float32'"),
        ({"shape": (2, 2)}, r"the gradient of p0 is .*\(2, 2\).*the plan says .*\(4,\)"),
    ],
)
def test_a_gradient_that_is_not_as_planned(change: dict[str, Any], text: str) -> None:
    grad = Grad(index=0)
    refuse(text, [dataclasses.replace(grad, **change)], [grad])


def test_a_malformed_reduction_is_refused_and_left_alone() -> None:
    good, odd = Grad(index=0), Grad(index=1)
    module = reduce_all(good, odd)
    node = module.graph.find_nodes(op="call_function", target=REDUCE_GRAD)[1]
    node.args = (node.args[0], "one", *node.args[2:])
    records: list[tuple[PassRecord, ...]] = []
    Pipeline(DEFAULT_PASSES, (plan_for([good]),), records.append)(module.graph)
    ((record, _),) = records
    (refusal,) = record.result.refusals
    assert refusal.node == node.name
    assert "index or replica is not a number: 'one', 0" in refusal.reason
    assert module.graph.find_nodes(op="call_function", target=REDUCE_GRAD) == [node]
    assert launches(module.graph) == ["0.0"]


def test_a_gradient_that_depends_on_a_reduced_one_cannot_share_its_bucket() -> None:
    first, second = Grad(index=0), Grad(index=1)
    module = trace(lambda a: (second.reduce(first.reduce(a).sin()),), first.values())
    with pytest.raises(InvalidGraphError, match="depend on each other in a circle"):
        run_passes(module, plan_for([first, second]))


# --- scheduling -------------------------------------------------------------------------------------------------


def test_launches_are_early_and_waits_late() -> None:
    grads = [Grad(index=index) for index in range(2)]

    def backward(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
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


def test_a_launch_comes_when_the_gradient_is_there_although_the_reduction_came_later() -> None:
    grad = Grad(index=0)

    def backward(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gradient, other = a.sin(), b.exp()
        return grad.reduce(gradient), other

    module = run_passes(trace(backward, grad.values(), torch.randn(3)), plan_for([grad]))
    position = {node.name: number for number, node in enumerate(module.graph.nodes)}
    assert position["sin"] < position["all_reduce_default"] < position["exp"] < position["wait_tensor_default"]


def test_a_launch_waits_for_the_one_before_it_in_the_plan() -> None:
    grads = [Grad(index=index) for index in range(3)]
    in_place = (BucketReductions(), ScheduleCollectives(memory_bound_nbytes=0))  # compute stays where it is
    module = run_passes(reduce_all(*grads), plan_for([grads[1], grads[0], grads[2]], cap=1), passes=in_place)
    assert_expected_inline(
        short(module.graph),
        """\
arg0_1: float32[4]
arg1_1: float32[4]
arg2_1: float32[4]
sin = aten.sin(arg0_1)
flat_bucket_default_1 = dp_compile.flat_bucket([sin], [0.5], [1], [0], 4)
sin_1 = aten.sin(arg1_1)
flat_bucket_default = dp_compile.flat_bucket([sin_1], [0.5], [1], [0], 4)
all_reduce_default = _c10d_functional.all_reduce(flat_bucket_default, sum, 0)
all_reduce_default_1 = _c10d_functional.all_reduce(flat_bucket_default_1, sum, 0)
sin_2 = aten.sin(arg2_1)
flat_bucket_default_2 = dp_compile.flat_bucket([sin_2], [0.5], [1], [0], 4)
all_reduce_default_2 = _c10d_functional.all_reduce(flat_bucket_default_2, sum, 0)
wait_tensor_default_1 = _c10d_functional.wait_tensor(all_reduce_default_1)
wait_tensor_default = _c10d_functional.wait_tensor(all_reduce_default)
wait_tensor_default_2 = _c10d_functional.wait_tensor(all_reduce_default_2)
as_strided_default_1 = aten.as_strided(wait_tensor_default_1, [4], [1], 0)
as_strided_default = aten.as_strided(wait_tensor_default, [4], [1], 0)
as_strided_default_2 = aten.as_strided(wait_tensor_default_2, [4], [1], 0)
return [as_strided_default_1, as_strided_default, as_strided_default_2]""",
    )


def test_what_a_graph_takes_stays_in_front() -> None:
    grads = [Grad(index=index, scale=1.0, reduce_op="avg") for index in range(2)]

    def backward(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return grads[0].reduce(a), grads[1].reduce(b)

    module = run_passes(trace(backward, *(grad.values() for grad in grads)), plan_for(grads, cap=1))
    kinds = [node.op for node in module.graph.nodes]
    assert kinds == sorted(kinds, key=["placeholder", "call_function", "output"].index)


def test_collectives_of_others_do_not_move() -> None:
    grad = Grad(index=0)

    def backward(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        theirs = WAIT(ALL_REDUCE(b, "max", "0"))
        return grad.reduce(a.sin()), b.cos(), theirs

    before = trace(backward, grad.values(), torch.randn(3))
    after = run_passes(copy.deepcopy(before), plan_for([grad]))
    names = {"all_reduce", "wait_tensor", "cos", "sin"}
    assert [n.name for n in after.graph.nodes if n.name in names] == ["all_reduce", "wait_tensor", "sin", "cos"]


def test_scheduling_twice_changes_nothing() -> None:
    grads = [Grad(index=index) for index in range(3)]
    module = run_passes(reduce_all(*grads), plan_for(grads, cap=1))
    before = short(module.graph)
    assert not ScheduleCollectives()(module.graph, ()).changed
    assert short(module.graph) == before


# --- every graph ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Backward:
    """A random backward: which gradients it reduces, in which order, and which it uses before the others are there."""

    grads: tuple[Grad, ...]
    layouts: tuple[tuple[int, ...], ...]
    used_early: tuple[bool, ...]
    plans: tuple[BucketPlan, ...]

    def __call__(self, *values: torch.Tensor) -> list[torch.Tensor]:
        results, uses = [], []
        for grad, value, early in zip(self.grads, values, self.used_early, strict=True):
            results.append(grad.reduce(value.sin() if grad.index % 2 else value))
            if early:
                uses.append(results[-1].sum())
                uses.append(uses[-1] + uses[0])
        return results + uses

    def inputs(self) -> list[torch.Tensor]:
        return [
            grad.values(seed, layout) for seed, (grad, layout) in enumerate(zip(self.grads, self.layouts, strict=True))
        ]


def layout_of(tensor: torch.Tensor) -> list[int]:
    """Strides, of the dimensions where they mean anything."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1 and tensor.numel()]


SHAPES = st.sampled_from([(), (5,), (1,), (0,), (2, 3), (3, 1), (2, 3, 2, 2), (2, 4, 1, 1)])


@st.composite
def backwards(draw: st.DrawFn, groups: tuple[str, str]) -> Backward:
    def grad(index: int, replica: int) -> Grad:
        shape = draw(SHAPES)
        reduce_op, scale = draw(st.sampled_from([("sum", 0.5), ("sum", 1 / 3), ("avg", 1.0)]))
        return Grad(
            index=index,
            replica=replica,
            shape=shape,
            order=tuple(draw(st.permutations(range(len(shape))))),
            dtype=draw(st.sampled_from([torch.float32, torch.bfloat16])),
            group=draw(st.sampled_from(groups)),
            reduce_op=reduce_op,
            scale=scale,
        )

    replicas = [
        [grad(index, replica) for index in range(draw(st.integers(0, 5)))] for replica in range(draw(st.integers(1, 2)))
    ]
    caps = st.sampled_from([1, 16, 64, math.inf])
    layouts_of_buckets = st.builds(
        Layout,
        st.sampled_from([1, 4, 16, 64]),
        st.frozensets(st.sampled_from([f"p{index}" for index in range(5)])),
    )
    plans = tuple(
        plan_for(draw(st.permutations(grads)), draw(caps), draw(caps), draw(layouts_of_buckets)) for grads in replicas
    )
    grads = draw(st.permutations([grad for grads in replicas for grad in grads]))
    layouts = tuple(
        dataclasses.replace(grad, order=tuple(draw(st.permutations(range(len(grad.shape)))))).stride for grad in grads
    )
    used_early = tuple(draw(st.booleans()) for _ in grads)
    return Backward(tuple(grads), layouts, used_early, plans)


@settings(max_examples=40)
@given(data=st.data())
def test_what_holds_of_every_graph(second_group: str, data: st.DataObject) -> None:
    backward = data.draw(backwards(("0", second_group)))
    inputs = backward.inputs()
    before = trace(backward, *inputs)
    after = copy.deepcopy(before)
    run_passes(after, *backward.plans)

    # Each reduction once, as it was: group, reduce op and factor are read from what runs now.
    assert accounted(after.graph) == accounted(before.graph)
    assert accounted(after.graph).total() == len(backward.grads)
    assert not analyse(after.graph).reductions
    # The plan's collectives, in the plan's order.
    numbers = [(replica, number) for replica, plan in enumerate(backward.plans) for number in range(len(plan.buckets))]
    assert launches(after.graph) == [f"{replica}.{number}" for replica, number in numbers]
    assert all(set(wait_counts(node)) == {1} for node in after.graph.nodes if is_collective(node))
    # What comes out, in kind and in number, bit by bit.
    assert facts_of(after.graph).outputs == facts_of(before.graph).outputs
    for was, now in zip(executed(before, backward.plans, *inputs), after(*inputs), strict=True):
        assert torch.equal(was, now)
        assert layout_of(was) == layout_of(now)
    # The same again is the same.
    again = copy.deepcopy(before)
    run_passes(again, *backward.plans)
    assert short(again.graph) == short(after.graph)


# --- the pipeline ---------------------------------------------------------------------------------------------------


def first(graph: fx.Graph, target: Any) -> fx.Node:
    return graph.find_nodes(op="call_function", target=target)[0]


def drop_wait(graph: fx.Graph) -> None:
    edit.replace(first(graph, WAIT), first(graph, ALL_REDUCE))


def change_group(graph: fx.Graph) -> None:
    node = first(graph, ALL_REDUCE)
    node.args = (*node.args[:2], "another")


def change_reduce_op(graph: fx.Graph) -> None:
    node = first(graph, ALL_REDUCE)
    node.args = (node.args[0], "max", node.args[2])


def change_op_of_group(graph: fx.Graph) -> None:
    node = first(graph, GROUPED_ALL_REDUCE)
    node.args = (node.args[0], "max", node.args[2])


def wait_for_one_of_a_group(graph: fx.Graph) -> None:
    kept, lost = graph.find_nodes(op="call_function", target=WAIT)[:2]
    edit.replace(lost, kept)


def launch_before_concatenation(graph: fx.Graph) -> None:
    first(graph, FLAT_BUCKET).prepend(first(graph, ALL_REDUCE))


def drop_collective(graph: fx.Graph) -> None:
    edit.replace(first(graph, WAIT), first(graph, FLAT_BUCKET))
    graph.erase_node(first(graph, ALL_REDUCE))


def change_output(graph: fx.Graph) -> None:
    output = graph.output_node()
    view = output.all_input_nodes[0]
    made = edit.insert_call(graph, output, torch.ops.aten.unsqueeze.default, (view, 0), edit.Provenance("broken", "0"))
    output.replace_input_with(view, made)


def drop_reduction(graph: fx.Graph) -> None:
    node = first(graph, REDUCE_GRAD)
    edit.replace(node, node.all_input_nodes[0])


def reduce_again(graph: fx.Graph) -> None:
    node = first(graph, REDUCE_GRAD)
    made = edit.insert_call(graph, graph.output_node(), REDUCE_GRAD, (node, *node.args[1:]), edit.Provenance("b", "0"))
    graph.output_node().replace_input_with(node, made)


@pytest.mark.parametrize(
    ("broken", "buckets", "text"),
    [
        (drop_wait, "flat", "after pass 'users-pass': all_reduce_default has 0 waits, expected 1"),
        (change_group, "flat", "pass 'users-pass' changed what is reduced: .* became sum over group another"),
        (change_reduce_op, "flat", "pass 'users-pass' changed what is reduced: .* became max over group 0"),
        (change_op_of_group, "apart", "pass 'users-pass' changed what is reduced: .* became max over group 0"),
        (wait_for_one_of_a_group, "apart", "after pass 'users-pass': all_reduce_coalesced_default has 1, 0 waits"),
        (launch_before_concatenation, "flat", "after pass 'users-pass': .*used before it has been defined"),
        (drop_collective, "flat", "pass 'users-pass' changed what is reduced: the gradient of p0"),
        (change_output, "flat", r"after pass 'users-pass': output 0: float32\[4\] .* became float32\[1, 4\]"),
        (drop_reduction, "", "pass 'users-pass' changed what is reduced: the gradient of p0"),
        (reduce_again, "", "pass 'users-pass' changed what is reduced: the gradient of p0"),
    ],
)
def test_a_broken_pass_is_named(broken: Callable[[fx.Graph], None], buckets: str, text: str) -> None:
    grads = [Grad(index=0), Grad(index=1)]
    passes: tuple[GraphPass, ...] = (*(ONLY_BUCKETS if buckets else ()), Changed(broken))
    layout = Layout(64, frozenset({"p0", "p1"})) if buckets == "apart" else PACKED
    with pytest.raises(InvalidGraphError, match=text):
        run_passes(reduce_all(*grads), plan_for(grads, layout=layout), passes=passes)


def test_the_record_of_a_run() -> None:
    grads = [Grad(index=0), Grad(index=1)]
    records: list[tuple[PassRecord, ...]] = []
    Pipeline(DEFAULT_PASSES, (plan_for(grads),), records.append)(reduce_all(*grads).graph)
    ((bucketing, scheduling),) = records
    assert (bucketing.name, scheduling.name) == ("bucket-reductions", "schedule-collectives")
    assert (bucketing.before["reduce_grad"], bucketing.after["all_reduce"]) == (2, 1)
    assert "reduce_grad" not in bucketing.after
    assert scheduling.before == scheduling.after == bucketing.after


def test_what_somebody_else_holds_is_not_freed_in_the_simulation() -> None:
    """Two inputs of 16 bytes, of which the first is read before the bucket of 32 is made; and a sum."""
    grads = [Grad(index=index) for index in range(2)]

    def backward(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return grads[0].reduce(a.sin().sum() * b), grads[1].reduce(b.exp())

    peaks = []
    for held in ((), (True, True)):
        records: list[tuple[PassRecord, ...]] = []
        module = trace(backward, *map(Grad.values, grads))
        Pipeline(DEFAULT_PASSES, (plan_for(grads),), records.append, held)(module.graph)
        memory = records[0][-1].result.memory
        assert memory is not None
        peaks.append(memory.nbytes)
    assert peaks == [16 + 4 + 32, 16 + 16 + 4 + 32]


def test_dead_code_is_not_a_use_of_a_gradient() -> None:
    grad = Grad(index=0)

    def backward(a: torch.Tensor) -> torch.Tensor:
        reduced = grad.reduce(a.sin())
        torch.empty_like(reduced)
        return reduced

    module = run_passes(trace(backward, grad.values()), plan_for([grad]))
    assert "empty" not in short(module.graph)


# --- the cache key ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WithOption:
    """Somebody's own pass."""

    level: int = 1
    name: ClassVar[str] = "with-option"
    realises_plan: ClassVar[bool] = False

    def __call__(self, graph: fx.Graph, plans: Sequence[BucketPlan]) -> PassResult:
        return PassResult(changed=False)


def uuid(passes: Sequence[GraphPass] = DEFAULT_PASSES, *plans: BucketPlan) -> Any:
    return Pipeline(passes, plans, lambda records: None).uuid()


def test_the_cache_key_is_the_same_for_the_same() -> None:
    grads = [Grad(index=0), Grad(index=1)]
    same = {uuid((BucketReductions(), WithOption(level)), plan_for(list(grads))) for level in (2, 2)}
    assert len(same) == 1


def test_the_cache_key_sees_passes_options_and_plans() -> None:
    plan, other = plan_for([Grad(index=0), Grad(index=1)]), plan_for([Grad(index=0), Grad(index=1)], cap=1)
    keys = [
        uuid(),
        uuid(DEFAULT_PASSES, plan),
        uuid(DEFAULT_PASSES, other),
        uuid(DEFAULT_PASSES, plan, other),
        uuid(DEFAULT_PASSES, other, plan),
        uuid(ONLY_BUCKETS, plan),
        uuid(DEFAULT_PASSES[::-1], plan),
        uuid((*DEFAULT_PASSES, WithOption(1)), plan),
        uuid((*DEFAULT_PASSES, WithOption(2)), plan),
        uuid(DEFAULT_PASSES, plan_for([Grad(index=0, group="1"), Grad(index=1)])),
        uuid((BucketReductions(), ScheduleCollectives(memory_bound_nbytes=1))),
        Pipeline(DEFAULT_PASSES, (), lambda records: None, (True, False)).uuid(),
        Pipeline(DEFAULT_PASSES, (), lambda records: None, (False, True)).uuid(),
    ]
    assert len(set(keys)) == len(keys)


def test_the_cache_key_sees_the_source_of_a_users_own_pass(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The options of a pass say nothing about its code; a cache that only knows them would serve old code."""
    source = (
        "class Mine:\n    name, realises_plan = 'mine', False\n"
        "    def __call__(self, graph, plans): return {result}\n    def __repr__(self): return 'Mine()'\n"
    )
    keys = []
    for result in ("1", "2", "2"):
        directory = tmp_path_factory.mktemp("user")
        (directory / "users_own_pass.py").write_text(source.format(result=result))
        with monkeypatch.context() as patch:
            patch.syspath_prepend(directory)
            patch.delitem(__import__("sys").modules, "users_own_pass", raising=False)
            import users_own_pass

            keys.append(uuid((users_own_pass.Mine(),)))
    assert keys[0] != keys[1]
    assert keys[1] == keys[2]


def test_the_pipeline_is_inductors_kind_of_pass() -> None:
    assert isinstance(Pipeline((), (), lambda records: None), inductor.CustomGraphPass)
    assert all(isinstance(graph_pass, GraphPass) for graph_pass in DEFAULT_PASSES)


def test_collectives_of_somebody_else_stay_in_their_order() -> None:
    """The first needs a reduced gradient, which is launched behind another one; ranks without passes have it first."""
    grads = [Grad(index=0), Grad(index=1)]

    def backward(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first = grads[1].reduce(a.sin())
        of_first, of_other = WAIT(ALL_REDUCE(first.exp(), "max", "0")), WAIT(ALL_REDUCE(b.cos(), "max", "0"))
        return grads[0].reduce(b.sin()), first, of_first, of_other

    result = run_passes(trace(backward, torch.randn(4), torch.randn(4)), plan_for(grads, cap=1))
    names = [node.name for node in result.graph.nodes if is_collective(node) and edit.provenance_of(node) is None]
    assert names == ["all_reduce", "all_reduce_1"]
