"""Small graphs for the tests of passes, and the plans that belong to them."""

from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import replace as replaced
from typing import Any, ClassVar
from unittest import mock

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from dp_compile.fx.collectives import ALL_REDUCE
from dp_compile.fx.edit import provenance_of, reorder, stable_order
from dp_compile.fx.text import type_text
from dp_compile.passes import DEFAULT_PASSES, ScheduleCollectives, overlap
from dp_compile.passes.pipeline import Pipeline
from dp_compile.passes.reduction import REDUCE_GRAD, EagerOps, emit, finished, reduce_bucket, view_of
from dp_compile.passes.result import PassResult
from dp_compile.plan.backends import NCCL, Backend
from dp_compile.plan.buckets import PACKED, BucketKey, GradientSpec, bucket_of, plan_buckets
from dp_compile.plan.reduction import Levels, Reduction, Stage
from dp_compile.plan.words import BYTES_PER_MB


def bucket_key(group, reduce_op, dtype, device, scale=0.5, levels=None, backend=NCCL):
    """Of gradients that one all-reduce carries, or the stages of two levels."""
    stages = (Stage("all_reduce", group, reduce_op),) if levels is None else levels.stages(reduce_op, backend)
    return BucketKey(Reduction(stages, scale), dtype, device)


@dataclass(frozen=True, kw_only=True)
class Grad:
    """A gradient that a test graph reduces. `order` are the parameter's dimensions from slow to fast in memory."""

    index: int
    shape: tuple[int, ...] = (4,)
    order: tuple[int, ...] | None = None
    dtype: torch.dtype = torch.float32
    group: str = "0"
    reduce_op: str = "sum"
    scale: float = 0.5
    replica: int = 0
    levels: Levels | None = None
    backend: Backend = NCCL

    @property
    def stride(self):
        stride, step = [0] * len(self.shape), 1
        for dimension in reversed(self.order if self.order is not None else range(len(self.shape))):
            stride[dimension] = step
            step *= max(self.shape[dimension], 1)
        return tuple(stride)

    @property
    def spec(self):
        dtype = str(self.dtype).removeprefix("torch.")
        key = bucket_key(self.group, self.reduce_op, dtype, "cpu", self.scale, self.levels, self.backend)
        name = f"p{self.index}"
        return GradientSpec(self.index, name, self.shape, self.stride, self.dtype.itemsize, key)

    def reduce(self, grad):
        return emit(grad, self.index, self.replica)

    def values(self, seed=0, stride=None):
        """Random numbers for the gradient, in the parameter's layout if no strides are given."""
        generator = torch.Generator().manual_seed(seed)
        made = torch.empty_strided(self.shape, self.stride if stride is None else stride, dtype=self.dtype)
        return made.copy_(torch.randn(self.shape, generator=generator))


def plan_for(grads, cap=float("inf"), first_cap=None, alignment_bytes=PACKED):
    """A plan in the given order; caps in bytes."""
    return plan_buckets(
        [grad.spec for grad in grads],
        bucket_cap_mb=cap / BYTES_PER_MB,
        first_bucket_cap_mb=(cap if first_cap is None else first_cap) / BYTES_PER_MB,
        alignment_bytes=alignment_bytes,
    )


def trace(function, *inputs):
    return make_fx(function, tracing_mode="fake")(*inputs)


class Unreduced(fx.Interpreter):
    """Runs a graph whose reductions no pass has replaced: each is a bucket for itself."""

    def __init__(self, graph, plans):
        super().__init__(fx.GraphModule({}, graph))
        self.gradients = {(number, each.index): each for number, plan in enumerate(plans) for each in plan.gradients}

    def call_function(self, target, args, kwargs):
        if target is not REDUCE_GRAD:
            return super().call_function(target, args, kwargs)
        grad, index, replica = args[:3]
        spec = self.gradients[replica, index]
        rows = torch.empty(spec.shape, device="meta").stride()
        bucket = bucket_of([replaced(spec, stride=rows)], PACKED)
        reduced = finished(reduce_bucket(bucket, EagerOps(bucket, [grad], grad.device)))
        return torch.empty_like(grad).copy_(view_of(bucket.members[0], reduced))


def executed(module, plans, *inputs):
    """What a graph gives whose reductions no pass has replaced."""
    return Unreduced(module.graph, plans).run(*inputs)


def run_passes(module, *plans, passes=DEFAULT_PASSES):
    """Run a pipeline over a traced module, in place."""
    Pipeline(passes, plans, lambda result: None)(module.graph)
    module.recompile()
    return module


def is_all_reduce(node):
    return node.target is ALL_REDUCE


def launches(graph):
    """The buckets in the order in which a graph launches them: `replica.number`."""
    found = [provenance_of(node) for node in graph.nodes if is_all_reduce(node)]
    return ["{}.{}".format(*provenance.unit) for provenance in found if provenance is not None]


@dataclass(frozen=True)
class Changed:
    """A pass that changes a graph and keeps its notes as they are."""

    edit: Callable[[fx.Graph], Any]
    name: ClassVar[str] = "users-pass"

    def __call__(self, graph, plans):
        self.edit(graph)
        return PassResult()


@dataclass(frozen=True)
class Bounded(ScheduleCollectives):
    """Takes `nbytes` for the peak of torch's DDP, which bounds its own."""

    nbytes: int

    def __call__(self, graph, plans):
        with mock.patch.object(overlap, "_peak_of_ddp", return_value=self.nbytes):
            return ScheduleCollectives.__call__(self, graph, plans)


def short(graph):
    """One line a node: `name = op(arguments)`, placeholders with dtype and shape. Metadata is left out."""
    lines = []
    for node in graph.nodes:
        if node.op == "placeholder":
            lines.append(f"{node.name}: {type_text(node.meta.get('val'))}")
        elif node.op == "output":
            lines.append(f"return {_argument(node.args[0])}")
        else:
            arguments = [_argument(argument) for argument in node.args]
            arguments += [f"{name}={_argument(value)}" for name, value in node.kwargs.items()]
            is_op = isinstance(node.target, torch._ops.OpOverload)
            op = str(node.target).removesuffix(".default") if is_op else node.target.__name__
            lines.append(f"{node.name} = {op}({', '.join(arguments)})")
    return "\n".join(lines)


def _argument(value):
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_argument(item) for item in value)}]"
    return str(value)


def replace(old, new):
    """Let every user of `old` use `new`, and erase `old`."""
    old.replace_all_uses_with(new)
    old.graph.erase_node(old)


def sort_stably(graph, *how, **more):
    """Whether that changed anything."""
    before = list(graph.nodes)
    reorder(graph, stable_order(graph, *how, **more))
    return before != list(graph.nodes)
