"""Random graphs that look like captured backwards, with plans for them: a hypothesis strategy."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from graphs import Grad, short
from hypothesis import strategies as st
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.node import map_arg

from dp_compile.fx.collectives import ALL_REDUCE, WAIT
from dp_compile.passes.reduction import REDUCE_GRAD
from dp_compile.plan.buckets import BucketPlan, GradientSpec, Layout, plan_buckets
from dp_compile.plan.cost import AllReduceCost
from dp_compile.plan.planner import ReadyTimes, plan_optimal
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
    """A graph whose first outputs are the reduced `grads`, in graph order; what it takes; a plan for each replica.

    `exact`: every factor is a power of two, so that it does not matter where a pass multiplies by it.
    """

    graph: fx.Graph
    inputs: tuple[torch.Tensor, ...]
    grads: tuple[Grad, ...]
    plans: tuple[BucketPlan, ...]
    exact: bool

    def __repr__(self) -> str:
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

    def pick(self, *choices: Any) -> Any:
        return self.draw(st.sampled_from(choices))

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        with self.mode:
            node.meta["val"] = target(*map_arg(args, lambda argument: argument.meta["val"]), **kwargs)
        if self.after_wait.intersection(node.all_input_nodes):
            self.after_wait.add(node)
        return node

    def placeholder(self) -> None:
        shape = tuple(self.draw(SIZES) for _ in range(self.draw(DIMENSIONS)))
        dtype = self.pick(*self.dtypes)
        value = Grad(index=0, shape=shape, order=self.permutation(len(shape)), dtype=dtype).values(len(self.inputs))
        node = self.graph.placeholder(f"input_{len(self.inputs)}")
        node.meta["val"] = self.mode.from_tensor(value, static_shapes=True)
        self.inputs.append(value)
        self.pool.append(node)

    def permutation(self, length: int) -> tuple[int, ...]:
        return tuple(self.draw(st.permutations(range(length))))

    def partner(self, of: fx.Node, fits: Callable[[torch.Tensor], bool]) -> fx.Node:
        """Something that `of` can be combined with; `of` itself has to fit."""
        found = [node for node in self.pool if value(node).dtype == value(of).dtype and fits(value(node))]
        return self.pick(*found)

    def compute(self) -> None:
        """Add one step of compute to the pool."""
        node = self.pick(*self.pool)
        made = self.pick(*STEPS)(self, node)
        if made is None or value(made).numel() > MOST_ELEMENTS:
            made = self.call(self.pick(*UNARY), node)
        self.pool.append(made)

    def reduce(self, index: int, replica: int, averages: Sequence[tuple[str, float]]) -> tuple[Grad, fx.Node]:
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

    def store(self, reduced: fx.Node) -> None:
        """Copy a reduced gradient into an input, as into a `.grad` that exists. At the end of a graph only."""
        like = value(reduced).dtype, value(reduced).shape
        inputs = self.graph.find_nodes(op="placeholder")
        if fitting := [node for node in inputs if (value(node).dtype, value(node).shape) == like]:
            self.call(aten.copy_.default, self.pick(*fitting), reduced)


def value(node: fx.Node) -> torch.Tensor:
    found = node.meta["val"]
    assert isinstance(found, torch.Tensor)
    return found


# --- steps: a node of the pool to a new one, None where the step does not fit -------------------------------------


def _product(builder: Builder, node: fx.Node) -> fx.Node | None:
    if value(node).dim() == 3:
        return builder.call(aten.bmm.default, builder.call(aten.permute.default, node, [0, 2, 1]), node)
    if value(node).dim() != 2:
        return None
    rows = value(node).shape[0]
    other = builder.partner(node, lambda each: each.dim() == 2 and each.shape[0] == rows)
    return builder.call(aten.mm.default, builder.call(aten.permute.default, node, [1, 0]), other)


def _sum_and_product(builder: Builder, node: fx.Node) -> fx.Node | None:
    if value(node).dim() != 2:
        return None
    turned, total = builder.call(aten.permute.default, node, [1, 0]), builder.call(aten.sum.dim_IntList, node, [0])
    return builder.call(aten.addmm.default, total, turned, node)


def _binary(builder: Builder, node: fx.Node) -> fx.Node | None:
    def broadcasts(other: torch.Tensor) -> bool:
        sizes = zip(reversed(other.shape), reversed(value(node).shape), strict=False)
        return all(a == b or 1 in (a, b) for a, b in sizes)

    other = builder.partner(node, broadcasts)
    return builder.call(builder.pick(aten.add.Tensor, aten.mul.Tensor), node, other)


def _sum(builder: Builder, node: fx.Node) -> fx.Node | None:
    if not value(node).dim():
        return None
    dimensions = builder.draw(st.lists(st.integers(0, value(node).dim() - 1), min_size=1, unique=True))
    return builder.call(aten.sum.dim_IntList, node, dimensions, builder.draw(st.booleans()))


def _slice(builder: Builder, node: fx.Node) -> fx.Node | None:
    if not value(node).dim():
        return None
    dimension = builder.draw(st.integers(0, value(node).dim() - 1))
    return builder.call(aten.slice.Tensor, node, dimension, builder.draw(st.integers(0, 1)), 3)


def _scatter(builder: Builder, node: fx.Node) -> fx.Node | None:
    """Rows of an embedding: some collect several gradients, some none."""
    if not value(node).dim():
        return None
    count, *rest = value(node).shape
    rows = builder.call(aten.remainder.Scalar, builder.call(aten.arange.default, count, device="cpu"), 3)
    zeros = builder.call(aten.zeros.default, [4, *rest], dtype=value(node).dtype, device="cpu")
    return builder.call(aten.index_put.default, zeros, [rows], node, True)


def _reshape(builder: Builder, node: fx.Node) -> fx.Node:
    shape, numel = list(value(node).shape), value(node).numel()
    last = [numel // 2, 2] if numel % 2 == 0 else [numel, 1]
    return builder.call(aten.reshape.default, node, builder.pick([numel], [1, *shape], [*shape, 1], last))


STEPS: tuple[Callable[[Builder, fx.Node], fx.Node | None], ...] = (
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


# --- plans --------------------------------------------------------------------------------------------------------


def _plan(draw: st.DrawFn, grads: Sequence[Grad]) -> BucketPlan:
    specs = [grad.spec for grad in draw(st.permutations(grads))]
    layout = Layout(draw(st.sampled_from([1, 16, 64])))
    strategy = draw(st.sampled_from(["fixed", "optimal", "any", "any"]))
    if strategy == "fixed" or not grads:
        caps_mb = st.sampled_from([1 / BYTES_PER_MB, 16 / BYTES_PER_MB, 64 / BYTES_PER_MB, math.inf])
        return plan_buckets(specs, bucket_cap_mb=draw(caps_mb), first_bucket_cap_mb=draw(caps_mb), layout=layout)
    if strategy == "optimal":
        shares = {spec.index: draw(st.sampled_from([0.0, 0.3, 0.5, 1.0])) for spec in specs}
        cost = AllReduceCost(draw(st.sampled_from([1e-9, 1e-7, 1e-5])), 1e-9)
        return plan_optimal(specs, cost, ReadyTimes(shares, None, "drawn"), layout).plan
    buckets: list[list[GradientSpec]] = []  # of any size in any order, none of which mixes keys
    for spec in specs:
        same = [bucket for bucket in buckets if bucket[0].key == spec.key]
        if same and draw(st.booleans()):
            draw(st.sampled_from(same)).append(spec)
        else:
            buckets.append([spec])
    return BucketPlan(tuple(layout.bucket(bucket) for bucket in buckets))


# --- the strategy -------------------------------------------------------------------------------------------------


@st.composite
def random_backwards(draw: st.DrawFn, groups: Sequence[str]) -> RandomBackward:
    """Inputs, then compute and reductions in any order, then what is stored into inputs."""
    builder = Builder(draw, groups[: draw(st.integers(1, len(groups)))], draw(st.sampled_from(PALETTES)))
    for _ in range(draw(st.integers(1, 4))):
        builder.placeholder()
    exact = draw(st.sampled_from([True, True, True, False]))
    averages = [("sum", 0.5), ("sum", 0.25), ("avg", 1.0)] if exact else [("sum", 1 / 3), ("avg", 1.0)]
    replicas = draw(st.integers(1, 2))
    grads: list[list[Grad]] = [[] for _ in range(replicas)]
    reduced: list[tuple[Grad, fx.Node]] = []
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
