"""What the default passes keep, on random graphs: shapes, strides, dtypes, groups, orders, plans, numbers."""

import copy
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist
from graphs import Grad, Unreduced, launches, short
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.node import map_arg

from dp_compile._torch import distributed
from dp_compile.fx.collectives import ALL_REDUCE, WAIT
from dp_compile.passes import DEFAULT_PASSES
from dp_compile.passes.pipeline import Pipeline
from dp_compile.passes.reduction import REDUCE_GRAD
from dp_compile.plan.buckets import BucketPlan, bucket_of, plan_buckets
from dp_compile.plan.words import BYTES_PER_MB

aten = torch.ops.aten

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.float16)
PALETTES = ((torch.float32, torch.bfloat16), (torch.float32,), (torch.float16, torch.float32), DTYPES)
DIMENSIONS = st.sampled_from([0, 1, 2, 2, 2, 2, 3, 4])
SIZES = st.sampled_from([1, 2, 3, 4, 2, 3, 1, 0])
UNARY = (aten.sin.default, aten.neg.default, aten.relu.default, aten.tanh.default)
MOST_ELEMENTS = 2000


@dataclass(frozen=True)
class RandomBackward:
    """A graph whose first outputs are the reduced `grads`; a plan a replica. `exact`: factors are powers of two."""

    graph: fx.Graph
    inputs: tuple[torch.Tensor, ...]
    grads: tuple[Grad, ...]
    plans: tuple[BucketPlan, ...]
    exact: bool

    def __repr__(self):
        return "\n".join([short(self.graph), *map(str, self.plans)])


@dataclass
class Builder:
    """Makes a graph node by node. `pool` holds what may be read, `after_wait` what comes after a reduction."""

    draw: st.DrawFn
    groups: Sequence[str]
    dtypes: Sequence[torch.dtype]
    graph: fx.Graph = field(default_factory=fx.Graph)
    mode: FakeTensorMode = field(default_factory=FakeTensorMode)
    pool: list[fx.Node] = field(default_factory=list)
    inputs: list[torch.Tensor] = field(default_factory=list)
    after_wait: set[fx.Node] = field(default_factory=set)

    def pick(self, *choices):
        return self.draw(st.sampled_from(choices))

    def call(self, target, *args, **kwargs):
        node = self.graph.call_function(target, args, kwargs)
        with self.mode:
            node.meta["val"] = target(*map_arg(args, lambda argument: argument.meta["val"]), **kwargs)
        if self.after_wait.intersection(node.all_input_nodes):
            self.after_wait.add(node)
        return node

    def placeholder(self):
        shape = tuple(self.draw(SIZES) for _ in range(self.draw(DIMENSIONS)))
        dtype = self.pick(*self.dtypes)
        value = Grad(index=0, shape=shape, order=self.permutation(len(shape)), dtype=dtype).values(len(self.inputs))
        node = self.graph.placeholder(f"input_{len(self.inputs)}")
        node.meta["val"] = self.mode.from_tensor(value, static_shapes=True)
        self.inputs.append(value)
        self.pool.append(node)

    def permutation(self, length):
        return tuple(self.draw(st.permutations(range(length))))

    def partner(self, of, fits):
        """Something that `of` can be combined with; `of` itself has to fit."""
        found = [node for node in self.pool if value(node).dtype == value(of).dtype and fits(value(node))]
        return self.pick(*found)

    def compute(self):
        """Add one step of compute to the pool."""
        node = self.pick(*self.pool)
        made = self.pick(*STEPS)(self, node)
        if made is None or value(made).numel() > MOST_ELEMENTS:
            made = self.call(self.pick(*UNARY), node)
        self.pool.append(made)

    def reduce(self, index, replica, averages):
        sources = [node for node in self.pool if node not in self.after_wait]
        computed = [node for node in sources if node.op != "placeholder"]
        source = self.pick(*((computed if self.draw(st.booleans()) else sources) or sources))
        made = _product(self, source) if self.draw(st.integers(0, 2)) == 0 else None
        if made is not None and made not in self.after_wait:
            source = made  # as the weight of a linear layer: a product without another user
        shape, (reduce_op, scale) = tuple(value(source).shape), self.pick(*averages)
        order = self.permutation(len(shape)) if self.draw(st.booleans()) else None
        where = {"group": self.pick(*self.groups), "reduce_op": reduce_op, "scale": scale, "replica": replica}
        grad = Grad(index=index, shape=shape, order=order, dtype=value(source).dtype, **where)
        reduced = self.call(REDUCE_GRAD, source, grad.index, grad.replica)
        self.after_wait.add(reduced)
        self.pool.append(reduced)
        return grad, reduced

    def store(self, reduced):
        """Copy a reduced gradient into an input, as into a `.grad` that exists. At the end of a graph only."""
        like = value(reduced).dtype, value(reduced).shape
        inputs = self.graph.find_nodes(op="placeholder")
        if fitting := [node for node in inputs if (value(node).dtype, value(node).shape) == like]:
            self.call(aten.copy_.default, self.pick(*fitting), reduced)


def value(node):
    found = node.meta["val"]
    assert isinstance(found, torch.Tensor)
    return found


def _product(builder, node):
    if value(node).dim() == 3:
        return builder.call(aten.bmm.default, builder.call(aten.permute.default, node, [0, 2, 1]), node)
    if value(node).dim() != 2:
        return None
    rows = value(node).shape[0]
    other = builder.partner(node, lambda each: each.dim() == 2 and each.shape[0] == rows)
    return builder.call(aten.mm.default, builder.call(aten.permute.default, node, [1, 0]), other)


def _sum_and_product(builder, node):
    if value(node).dim() != 2:
        return None
    turned, total = builder.call(aten.permute.default, node, [1, 0]), builder.call(aten.sum.dim_IntList, node, [0])
    return builder.call(aten.addmm.default, total, turned, node)


def _binary(builder, node):
    def broadcasts(other):
        sizes = zip(reversed(other.shape), reversed(value(node).shape), strict=False)
        return all(a == b or 1 in (a, b) for a, b in sizes)

    other = builder.partner(node, broadcasts)
    return builder.call(builder.pick(aten.add.Tensor, aten.mul.Tensor), node, other)


def _sum(builder, node):
    if not value(node).dim():
        return None
    dimensions = builder.draw(st.lists(st.integers(0, value(node).dim() - 1), min_size=1, unique=True))
    return builder.call(aten.sum.dim_IntList, node, dimensions, builder.draw(st.booleans()))


def _slice(builder, node):
    if not value(node).dim():
        return None
    dimension = builder.draw(st.integers(0, value(node).dim() - 1))
    return builder.call(aten.slice.Tensor, node, dimension, builder.draw(st.integers(0, 1)), 3)


def _scatter(builder, node):
    """Rows of an embedding: some collect several gradients, some none."""
    if not value(node).dim():
        return None
    count, *rest = value(node).shape
    rows = builder.call(aten.remainder.Scalar, builder.call(aten.arange.default, count, device="cpu"), 3)
    zeros = builder.call(aten.zeros.default, [4, *rest], dtype=value(node).dtype, device="cpu")
    return builder.call(aten.index_put.default, zeros, [rows], node, True)


def _reshape(builder, node):
    shape, numel = list(value(node).shape), value(node).numel()
    last = [numel // 2, 2] if numel % 2 == 0 else [numel, 1]
    return builder.call(aten.reshape.default, node, builder.pick([numel], [1, *shape], [*shape, 1], last))


STEPS = (
    _product,
    _sum_and_product,
    _binary,
    _sum,
    lambda builder, node: builder.call(aten.permute.default, node, list(builder.permutation(value(node).dim()))),
    _reshape,
    lambda builder, node: builder.call(aten.expand.default, node, [2, *value(node).shape]),
    _slice,
    _scatter,
    lambda builder, node: builder.call(aten._to_copy.default, node, dtype=builder.pick(*builder.dtypes)),
    # A collective of another module.
    lambda builder, node: builder.call(WAIT, builder.call(ALL_REDUCE, node, "max", builder.pick(*builder.groups))),
)


def _plan(draw, grads):
    specs = [grad.spec for grad in draw(st.permutations(grads))]
    alignment_bytes = draw(st.sampled_from([1, 16, 64]))
    if draw(st.booleans()) or not grads:
        caps_mb = st.sampled_from([1 / BYTES_PER_MB, 16 / BYTES_PER_MB, 64 / BYTES_PER_MB, math.inf])
        caps = {"bucket_cap_mb": draw(caps_mb), "first_bucket_cap_mb": draw(caps_mb)}
        return plan_buckets(specs, **caps, alignment_bytes=alignment_bytes)
    buckets = []  # of any size in any order, none of which mixes keys
    for spec in specs:
        same = [bucket for bucket in buckets if bucket[0].key == spec.key]
        if same and draw(st.booleans()):
            draw(st.sampled_from(same)).append(spec)
        else:
            buckets.append([spec])
    return BucketPlan(tuple(bucket_of(bucket, alignment_bytes) for bucket in buckets))


@st.composite
def random_backwards(draw, groups):
    """Inputs, then compute and reductions in any order, then what is stored into inputs."""
    builder = Builder(draw, groups[: draw(st.integers(1, len(groups)))], draw(st.sampled_from(PALETTES)))
    for _ in range(draw(st.integers(1, 4))):
        builder.placeholder()
    exact = draw(st.sampled_from([True, True, True, False]))
    averages = [("sum", 0.5), ("sum", 0.25), ("avg", 1.0)] if exact else [("sum", 1 / 3), ("avg", 1.0)]
    replicas = draw(st.integers(1, 2))
    grads = [[] for _ in range(replicas)]
    reduced = []
    for _ in range(draw(st.integers(1, 18))):
        if draw(st.integers(0, 4)) > 1:
            builder.compute()
            continue
        replica = draw(st.integers(0, replicas - 1))
        reduced.append(builder.reduce(len(grads[replica]), replica, averages))
        grads[replica].append(reduced[-1][0])
    others = draw(st.lists(st.sampled_from(builder.pool), max_size=3)) if draw(st.booleans()) else builder.pool[-1:]
    for _, node in reduced:
        if draw(st.integers(0, 4)) == 0:
            builder.store(node)
    builder.graph.output([*(node for _, node in reduced), *others])
    plans = tuple(_plan(draw, each) for each in grads)
    return RandomBackward(builder.graph, tuple(builder.inputs), tuple(grad for grad, _ in reduced), plans, exact)


EXAMPLES = 300
PRIMES = (3, 5, 7, 11, 13, 17, 19, 23, 29)


class World(Unreduced):
    """Runs a graph where each group and op multiplies by a prime, so that a number tells its collectives.

    A result is NaN until its one wait. Each value is compared with what the graph promises of it.
    """

    def __init__(self, graph, groups, plans):
        super().__init__(graph, plans)
        self.primes = dict(zip(itertools.product(groups, ("sum", "avg", "max")), PRIMES, strict=True))
        self.pending = {}

    def run_all(self, inputs):
        """What the graph returns, and what it has made of its inputs."""
        own = [copy.deepcopy(tensor) for tensor in inputs]
        outputs = self.run(*own)
        assert not self.pending, "a collective is never waited for"
        return list(outputs), own

    def run_node(self, n):
        result = super().run_node(n)
        if isinstance(result, torch.Tensor) and n.op == "call_function":
            promised = n.meta["val"]
            assert (result.dtype, layout(result)) == (promised.dtype, layout(promised)), f"{n.name} breaks its promise"
        return result

    def call_function(self, target, args, kwargs):
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


def layout(tensor):
    """Sizes and strides; a stride counts only where it means anything."""
    sized = zip(tensor.shape, tensor.stride(), strict=True)
    return [(size, stride if size > 1 and tensor.numel() else 0) for size, stride in sized]


def check(case, groups):
    """Run the default passes over a graph and check everything that must hold. Raises where something does not."""
    before, after, again = case.graph, copy.deepcopy(case.graph), copy.deepcopy(case.graph)
    for graph in (after, again):
        Pipeline(DEFAULT_PASSES, case.plans, lambda result: None)(graph)
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
    assert short(again) == short(after), "the same graph became another one"


def check_launches(graph, plans):
    """One collective for each bucket, as the plan says, in the order of the plan."""
    assert not graph.find_nodes(op="call_function", target=REDUCE_GRAD), "a reduction is left over"
    for replica, plan in enumerate(plans):
        planned = [f"{replica}.{number}" for number in range(len(plan.buckets))]
        assert [each for each in launches(graph) if each.startswith(f"{replica}.")] == planned, (
            "not the plan's launches"
        )
    assert len(launches(graph)) == sum(len(plan.buckets) for plan in plans), "a launch that is in no plan"


def check_numbers(was, now, *, exact):
    was, now = was.nan_to_num(posinf=0.0), now.nan_to_num(posinf=0.0)
    if exact:
        assert torch.equal(was, now), "other numbers"
    elif was.numel():
        bound = 8 * torch.finfo(was.dtype).eps * was.double().abs().max()
        assert (was.double() - now.double()).abs().max() <= bound, "other numbers"


@pytest.fixture(scope="module")
def groups(fake_group):
    return ("0", *(distributed.group_name(dist.new_group([0, 1])) for _ in range(2)))


@pytest.mark.parametrize("examples", [EXAMPLES // 2, pytest.param(EXAMPLES, marks=pytest.mark.nightly)])
def test_everything_holds_on_every_graph(groups, examples):
    @settings(max_examples=examples)
    @given(random_backwards(groups))
    def holds(case):
        check(case, groups)

    holds()
