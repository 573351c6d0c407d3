"""Buckets without copies, read off the generated code, and what must not be shared with a bucket."""

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from generated_code import LAUNCH, Span, copies, read_code
from graphs import Grad, executed, plan_for, trace
from torch import nn
from torch._inductor import config as inductor_config
from torch._inductor.utils import fresh_cache, run_and_get_code
from torch.nn import functional as F

import dp_compile
from dp_compile._torch import inductor
from dp_compile.passes import DEFAULT_PASSES, BucketReductions, ScheduleCollectives
from dp_compile.passes.lowering import observing
from dp_compile.passes.pipeline import Pipeline
from dp_compile.passes.reduction import FLAT_BUCKET
from dp_compile.plan.buckets import ALIGNMENT_BYTES, PACKED


def test_the_op_keeps_its_promise_to_the_tracer():
    members = [torch.randn(4, 3, dtype=torch.bfloat16), torch.randn(2, dtype=torch.bfloat16)]
    torch.library.opcheck(FLAT_BUCKET, (members, [1.0, 0.5], [1, 4, 1], [0, 16], 18))


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Conv2d(16, 16, 2 * pad + 1, padding=pad, bias=False) for pad in (1, 2))
        self.norm, self.head = nn.BatchNorm2d(16), nn.Linear(16, 96)
        self.to(memory_format=torch.channels_last)

    def forward(self, x):
        return self.head((x + self.second(F.relu(self.norm(self.first(x))))).mean((2, 3)))


@pytest.mark.nightly
def test_gradients_of_convolutions_are_copied_and_the_report_names_them(fake_group):
    torch._dynamo.reset()
    model, x = Residual(), torch.randn(2, 16, 8, 8).to(memory_format=torch.channels_last)
    run = torch.compile(dp_compile.replicate(model, bucket_cap_mb=25))
    with inductor_config.patch(fx_graph_cache=False):
        _, codes = run_and_get_code(lambda: run(x).square().mean().backward())
    report, code, members = dp_compile.report(model), read_code(codes[-1]), []
    assert not code.faults
    launches = [call for call in code.calls if call.kind == LAUNCH]
    for bucket, launch in zip(report.plan.buckets, launches, strict=True):
        (flat,) = launch.reads
        for each in bucket.members:
            start = flat.start + each.offset
            members.append((each.gradient.name, Span(flat.storage, start, start + each.gradient.numel)))
    assert set(copies(members, code)) == {"first.weight", "second.weight"}
    assert "copied 2 gradients, 34.0 KiB: second.weight .. first.weight" in str(report)


@pytest.mark.parametrize("zero_gaps", [False, True])
@pytest.mark.usefixtures("fake_group")
def test_gaps_hold_zeros_where_somebody_looks_for_nan(monkeypatch, zero_gaps):
    """All memory that generated code allocates holds NaN at first; on the fake group the bucket comes back as sent."""
    allocate = torch._C._dynamo.guards._empty_strided_cpu

    def allocate_nan(*arguments):
        made = allocate(*arguments)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    monkeypatch.setattr(torch._C._dynamo.guards, "_empty_strided_cpu", allocate_nan)
    monkeypatch.setenv("TORCH_NCCL_NAN_CHECK", "1" if zero_gaps else "0")
    grads = [Grad(index=0, shape=(5, 3)), Grad(index=1, shape=(3,)), Grad(index=2, shape=(2, 2))]

    def backward(*values):
        return tuple(grad.reduce(value.sin()) for grad, value in zip(grads, values, strict=True))

    values = [grad.values() for grad in grads]
    module = trace(backward, *values)
    passes = (BucketReductions(), ScheduleCollectives())
    pipeline = Pipeline(passes, (plan_for(grads, alignment_bytes=64),), lambda records: None)
    with fresh_cache():
        reduced = inductor.compile_with_inductor(module, values, pipeline)(*values)
    for value, result in zip(values, reduced, strict=True):
        torch.testing.assert_close(result, value.sin() * 0.5)
    base = reduced[0].as_strided([reduced[0].untyped_storage().nbytes() // 4], [1], 0)
    assert bool(base.isfinite().all()) == zero_gaps
    assert len(base) > sum(value.numel() for value in values)


@dataclass(frozen=True)
class Sources:
    """Gradients from every kind of producer, some of which are looked at again after they were reduced."""

    scale: float
    reduce_op: str = "sum"

    def grads(self):
        kinds = [
            ((6, 5), None),  # 0: a product
            ((5, 6), (1, 0)),  # 1: a product, the parameter lies transposed
            ((6, 5), None),  # 2: the transpose of a product
            ((6, 5), None),  # 3: a product that is used later
            ((6, 5), None),  # 4: a product for two parameters
            ((6, 5), None),  # 5: the same
            ((9, 6), None),  # 6: pointwise, used later
            ((20, 5), None),  # 7: scattered rows
            ((), None),  # 8: a number
            ((0, 6), None),  # 9: nothing
            ((9, 6), None),  # 10: an input
            ((2, 6, 5), None),  # 11: products of a batch
            ((4, 3, 3, 3), (1, 0, 2, 3)),  # 12: a convolution's kernel, in an order that no convolution writes
            ((1, 6), None),  # 13: a sum over rows, with a dimension that is only there in the parameter
            ((6, 5), None),  # 14: rows of something larger
            ((6, 5), None),  # 15: what was there before, and a product
        ]
        return [
            Grad(index=index, shape=shape, order=order, scale=self.scale, reduce_op=self.reduce_op)
            for index, (shape, order) in enumerate(kinds)
        ]

    def __call__(self, x, y, rows, image):
        twice = (x * 2).t() @ y
        shared, seen = (x + 1).t() @ y, x.sin()
        gradients = [
            x.t() @ y,
            y.t() @ x,
            (y.t() @ (x * 3)).t(),
            shared,
            twice,
            twice,
            seen,
            y.new_zeros(20, 5).index_put((rows,), y.cos(), accumulate=True),
            x.sum(),
            x[:0],
            x,
            torch.stack([x, x * 5]).transpose(1, 2) @ torch.stack([y, y]),
            self._kernel(image),
            x.exp().sum(0).unsqueeze(0),
            torch.cat([x, x]).t().contiguous()[:, 3:8],
            torch.addmm(x[:6, :5], x.t(), y),
        ]
        reduced = [grad.reduce(gradient) for grad, gradient in zip(self.grads(), gradients, strict=True)]
        return (*reduced, reduced[3].abs() - shared, reduced[6].abs() - seen)

    @staticmethod
    def _kernel(image):
        weight, options = image.new_ones(4, 3, 3, 3), ([0], [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
        output = image.new_ones(2, 4, 6, 6) * image.sum()
        return torch.ops.aten.convolution_backward.default(output, image, weight, *options, [False, True, False])[1]


def inputs():
    generator = torch.Generator().manual_seed(dist.get_rank())
    x, y = torch.randn(9, 6, generator=generator), torch.randn(9, 5, generator=generator)
    rows = torch.randint(0, 20, (9,), generator=generator)
    return [x, y, rows, torch.randn(2, 3, 6, 6, generator=generator)]


def run_sources(scale, alignment_bytes):
    """Compiled and not: the same numbers on this rank. Returns which gradients were copied."""
    sources, written = Sources(scale), []
    module = trace(sources, *inputs())
    plan = plan_for(sources.grads(), alignment_bytes=alignment_bytes)
    expected = executed(module, [plan], *inputs())
    pipeline = Pipeline(DEFAULT_PASSES, (plan,), lambda records: None)
    with observing(written.append), inductor_config.patch(fx_graph_cache=False), torch.no_grad():
        found = inductor.compile_with_inductor(module, inputs(), pipeline)(*inputs())
    for position, (one, other) in enumerate(zip(found, expected, strict=True)):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6, msg=lambda m, p=position: f"result {p}: {m}")
    return {each.position for each in written if each.is_copied}


@pytest.mark.parametrize(
    ("scale", "alignment_bytes"),
    [
        pytest.param(1.0, PACKED, id="packed", marks=pytest.mark.nightly),
        pytest.param(1 / 3, ALIGNMENT_BYTES, id="gaps"),
    ],
)
def test_a_bucket_is_right_for_each_kind_of_member(ranks, scale, alignment_bytes):
    """Copied are products that are read elsewhere, inputs, a convolution's kernel, and rows of an input."""
    for copied in ranks.run(run_sources, scale, alignment_bytes):
        assert copied == {3, 4, 5, 10, 12, 14}


class Probe(Pipeline):
    """Notes settings while Inductor compiles."""

    def __init__(self):
        super().__init__((), (), lambda records: None)
        self.seen = []

    def __call__(self, graph):
        moves = getattr(inductor_config.aten_distributed_optimizations, "enable_simple_overlap", False)  # torch 2.14
        self.seen += [inductor_config.triton.mix_order_reduction, moves]


def test_settings_that_inductor_has_off_where_buckets_are_made():
    """Sums of mixed order lose a part on GPUs (pytorch#193061); from 2.14 on Inductor moves waits (pytorch#184240)."""
    probe = Probe()
    with inductor_config.patch({"triton.mix_order_reduction": True, "fx_graph_cache": False}):
        inductor.compile_with_inductor(trace(lambda x: (x.sin(),), torch.randn(3)), [torch.randn(3)], probe)
        assert inductor_config.triton.mix_order_reduction
    assert probe.seen == [False, False]
