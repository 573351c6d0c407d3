"""What the default passes keep, on random graphs: shapes, strides, dtypes, groups, orders, plans, numbers."""

import copy
import itertools
import math
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from graphs import Grad, Unreduced, launches, short, trace
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

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
UNARY = (torch.sin, torch.neg, torch.relu, torch.tanh)
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


class Program:
    """Computes and reduces what is drawn while it is traced. `late`: what may depend on a reduced gradient."""

    def __init__(self, draw, groups):
        self.draw = draw
        self.groups, self.dtypes = groups[: draw(st.integers(1, len(groups)))], self.pick(*PALETTES)
        self.exact, self.replicas = self.pick(True, True, True, False), draw(st.integers(1, 2))
        self.early, self.late, self.grads = list[torch.Tensor](), list[torch.Tensor](), list[Grad]()

    def pick(self, *choices):
        return self.draw(st.sampled_from(choices))

    def permutation(self, length):
        return tuple(self.draw(st.permutations(range(length))))

    def input(self, number):
        shape = tuple(self.draw(SIZES) for _ in range(self.draw(DIMENSIONS)))
        dtype = self.pick(*self.dtypes)
        return Grad(index=0, shape=shape, order=self.permutation(len(shape)), dtype=dtype).values(number)

    def __call__(self, *inputs):
        """Compute and reductions in any order, then what is stored into inputs, as into a `.grad` that exists."""
        self.early, reduced = list(inputs), list[torch.Tensor]()
        for _ in range(self.draw(st.integers(1, 18))):
            if self.draw(st.integers(0, 4)) > 1:
                self.compute()
            else:
                reduced.append(self.reduce())
        every = [*self.early, *self.late]
        others = self.draw(st.lists(st.sampled_from(every), max_size=3)) if self.draw(st.booleans()) else every[-1:]
        for gradient in reduced if self.draw(st.booleans()) else ():
            fitting = [each for each in inputs if (each.dtype, each.shape) == (gradient.dtype, gradient.shape)]
            if fitting and self.draw(st.booleans()):
                self.pick(*fitting).copy_(gradient)
        return [*reduced, *others]

    def compute(self):
        is_late = bool(self.late) and self.draw(st.booleans())
        readable = [*self.early, *self.late] if is_late else self.early
        x = self.pick(*readable)
        made = self.pick(*STEPS)(self, x, [each for each in readable if each.dtype == x.dtype])
        if made is None or made.numel() > MOST_ELEMENTS:
            made = self.pick(*UNARY)(x)
        (self.late if is_late else self.early).append(made)

    def reduce(self):
        source = self.pick(*self.early)
        if self.draw(st.integers(0, 2)) == 0:  # as the weight of a linear layer: a product without another user
            product = _product(self, source, [each for each in self.early if each.dtype == source.dtype])
            source = source if product is None else product
        shape, averages = tuple(source.shape), [("sum", 0.5), ("sum", 0.25), ("avg", 1.0)]
        reduce_op, scale = self.pick(*(averages if self.exact else [("sum", 1 / 3), ("avg", 1.0)]))
        order, replica = self.pick(None, self.permutation(len(shape))), self.draw(st.integers(0, self.replicas - 1))
        where = {"group": self.pick(*self.groups), "reduce_op": reduce_op, "scale": scale, "replica": replica}
        index = sum(each.replica == replica for each in self.grads)
        self.grads.append(Grad(index=index, shape=shape, order=order, dtype=source.dtype, **where))
        self.late.append(self.grads[-1].reduce(source))
        return self.late[-1]


def _product(program, x, others):
    if x.dim() == 3:
        return torch.bmm(x.permute(0, 2, 1), x)
    if x.dim() != 2:
        return None
    fitting = [each for each in others if each.dim() == 2 and each.shape[0] == x.shape[0]]
    return torch.mm(x.permute(1, 0), program.pick(*fitting))


def _sum_and_product(program, x, others):
    return torch.addmm(x.sum([0]), x.permute(1, 0), x) if x.dim() == 2 else None


def _binary(program, x, others):
    def broadcasts(other):
        sizes = zip(reversed(other.shape), reversed(x.shape), strict=False)
        return all(a == b or 1 in (a, b) for a, b in sizes)

    return program.pick(torch.add, torch.mul)(x, program.pick(*filter(broadcasts, others)))


def _sum(program, x, others):
    dimensions = st.lists(st.integers(0, x.dim() - 1), min_size=1, unique=True)
    return x.sum(program.draw(dimensions), keepdim=program.draw(st.booleans())) if x.dim() else None


def _slice(program, x, others):
    start = program.draw(st.integers(0, 1))
    return aten.slice.Tensor(x, program.draw(st.integers(0, x.dim() - 1)), start, 3) if x.dim() else None


def _scatter(program, x, others):
    """Rows of an embedding: some collect several gradients, some none."""
    if not x.dim():
        return None
    return x.new_zeros(4, *x.shape[1:]).index_put((torch.arange(x.shape[0]) % 3,), x, accumulate=True)


def _reshape(program, x, others):
    last = [x.numel() // 2, 2] if x.numel() % 2 == 0 else [x.numel(), 1]
    return x.reshape(program.pick([x.numel()], [1, *x.shape], [*x.shape, 1], last))


STEPS = (
    _product,
    _sum_and_product,
    _binary,
    _sum,
    _reshape,
    _slice,
    _scatter,
    lambda program, x, others: x.permute(program.permutation(x.dim())),
    lambda program, x, others: x.expand(2, *x.shape),
    lambda program, x, others: aten._to_copy.default(x, dtype=program.pick(*program.dtypes)),
    # A collective of another module.
    lambda program, x, others: WAIT(ALL_REDUCE(x, "max", program.pick(*program.groups))),
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
    program = Program(draw, groups)
    inputs = [program.input(number) for number in range(draw(st.integers(1, 4)))]
    graph, grads = trace(program, *inputs).graph, program.grads
    plans = [_plan(draw, [each for each in grads if each.replica == replica]) for replica in range(program.replicas)]
    return RandomBackward(graph, tuple(inputs), tuple(grads), tuple(plans), program.exact)


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


def keeps_layout(was, now):
    """What is expanded has a contiguous copy, if it is returned with what it is a view of."""
    return layout(now) in (layout(was), layout(was.clone()))


def check(case, groups):
    """Run the default passes over a graph and check everything that must hold. Raises where something does not."""
    before, after, again = case.graph, copy.deepcopy(case.graph), copy.deepcopy(case.graph)
    for graph in (after, again):
        Pipeline(DEFAULT_PASSES, case.plans, lambda result: None)(graph)
    after.lint()
    check_launches(after, case.plans)
    outputs = before.output_node().args[0], after.output_node().args[0]
    for was, now in zip(*outputs, strict=True):
        assert keeps_layout(was.meta["val"], now.meta["val"]), "other strides are returned"
    expected, inputs_before = World(before, groups, case.plans).run_all(case.inputs)
    found, inputs_after = World(after, groups, case.plans).run_all(case.inputs)
    for position, (was, now) in enumerate(zip(expected + inputs_before, found + inputs_after, strict=True)):
        assert was.dtype == now.dtype, "another dtype is returned"
        assert keeps_layout(was, now), "another layout is returned"
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


@pytest.mark.parametrize("examples", [EXAMPLES // 4, pytest.param(EXAMPLES, marks=pytest.mark.nightly)])
def test_everything_holds_on_every_graph(groups, examples):
    @settings(max_examples=examples)
    @given(random_backwards(groups))
    def holds(case):
        check(case, groups)

    holds()
