"""A huge gradient in pieces: planned where it pays, computed in blocks of rows, reduced as on every other rank."""

from __future__ import annotations

import copy
import itertools
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from graphs import Grad, bucket_key, executed, run_passes, trace
from parity import Case, train_both
from test_generated_code import code_of_backward, shape_of
from torch import nn

import dp_compile
from dp_compile.errors import ConfigError, InvalidGraphError
from dp_compile.fx.collectives import is_all_reduce
from dp_compile.fx.edit import PROVENANCE, provenance_of
from dp_compile.fx.printer import short
from dp_compile.insight.report import Report
from dp_compile.modules.replicated_module import replica_of
from dp_compile.passes import BucketReductions, bucket_memory
from dp_compile.passes.analysis import accounted
from dp_compile.plan import strategies
from dp_compile.plan.buckets import (
    PACKED,
    PLAN_VERSION,
    UNUSED_FLAGS,
    BucketPlan,
    GradientSpec,
    Layout,
    row_blocks,
)
from dp_compile.plan.cost import AllReduceCost
from dp_compile.plan.ready_times import Product, ReadyTimes
from dp_compile.plan.strategies import plan_explicit, plan_optimal, plan_to_json
from dp_compile.testing.ranks import Ranks

Listed = list[list[dict[str, Any]]]


def member(name: str, rows: tuple[int, int] | None = None, *, apart: bool = False) -> dict[str, Any]:
    listed: dict[str, Any] = {"gradient": {"name": name}, "offset": None if apart else 0}
    return listed if rows is None else listed | {"rows": list(rows)}


def plan_text(buckets: Listed) -> str:
    return json.dumps({"version": PLAN_VERSION, "buckets": [{"members": members} for members in buckets]})


def plan_in_pieces(*grads: Grad) -> BucketPlan:
    """Each gradient in two pieces of its rows, each piece in a bucket of its own."""
    pieces = [member(f"p{grad.index}", rows) for grad in grads for rows in row_blocks(grad.shape[0], 2)]
    return plan_explicit([grad.spec for grad in grads], plan_text([[piece] for piece in pieces]), PACKED).plan


# --- graphs -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("fake_group")
def test_a_product_is_computed_in_blocks_of_rows() -> None:
    grad = Grad(index=0, shape=(6, 3))
    module = trace(lambda y, x: grad.reduce(y.t() @ x), torch.randn(5, 6), torch.randn(5, 3))
    run_passes(module, plan_in_pieces(grad))
    assert_expected_inline(
        short(module.graph),
        """\
y_1: float32[5, 6]
x_1: float32[5, 3]
select_int = aten.select.int(x_1, 0, 0)
select_int_1 = aten.select.int(x_1, 0, 0)
t = aten.t(y_1)
slice_tensor = aten.slice.Tensor(t, 0, 0, 3)
slice_tensor_1 = aten.slice.Tensor(t, 0, 3, 6)
mm_default = aten.addmm(select_int, slice_tensor, x_1, beta=0, alpha=0.5)
flat_bucket_default = dp_compile.flat_bucket([mm_default], [1.0], [3, 1], [0], 9)
all_reduce_default = _c10d_functional.all_reduce(flat_bucket_default, sum, 0)
mm_default_1 = aten.addmm(select_int_1, slice_tensor_1, x_1, beta=0, alpha=0.5)
flat_bucket_default_1 = dp_compile.flat_bucket([mm_default_1], [1.0], [3, 1], [0], 9)
all_reduce_default_1 = _c10d_functional.all_reduce(flat_bucket_default_1, sum, 0)
wait_tensor_default = _c10d_functional.wait_tensor(all_reduce_default)
wait_tensor_default_1 = _c10d_functional.wait_tensor(all_reduce_default_1)
assemble_default = dp_compile.assemble([wait_tensor_default, wait_tensor_default_1])
as_strided_default = aten.as_strided(assemble_default, [6, 3], [3, 1], 0)
return as_strided_default""",
    )


@pytest.mark.usefixtures("fake_group")
def test_every_bucket_and_whole_has_memory_with_a_number_of_its_own() -> None:
    """Two wholes of one size that are complete in one bucket, too."""
    grads = [Grad(index=index, shape=(6, 3)) for index in (0, 1)]
    first, second = ([member(f"p{grad.index}", rows) for grad in grads] for rows in ((0, 3), (3, 6)))
    plan = plan_explicit([grad.spec for grad in grads], plan_text([first[:1], first[1:], second]), PACKED).plan
    inputs = [torch.randn(5, 6), torch.randn(5, 6), torch.randn(5, 3)]
    module = trace(lambda y, z, x: [grads[0].reduce(y.t() @ x), grads[1].reduce(z.t() @ x)], *inputs)
    run_passes(module, plan)
    places = [place for node in module.graph.nodes if (place := bucket_memory.place_of(node)) is not None]
    assert sorted(places) == [(0, number, None) for number in range(3 + 2)]


@pytest.mark.usefixtures("fake_group")
def test_a_permuted_product_is_computed_in_blocks_of_columns() -> None:
    grad = Grad(index=0, shape=(6, 3))
    module = trace(lambda y, x: grad.reduce((x.t() @ y).permute(1, 0)), torch.randn(5, 6), torch.randn(5, 3))
    y, x = torch.randn(5, 6), torch.randn(5, 3)
    expected = executed(module, [plan_in_pieces(grad)], y, x)
    run_passes(module, plan_in_pieces(grad), passes=(BucketReductions(),))
    assert_expected_inline(
        short(module.graph),
        """\
y_1: float32[5, 6]
x_1: float32[5, 3]
t = aten.t(x_1)
slice_tensor = aten.slice.Tensor(y_1, 1, 0, 3)
select_int = aten.select.int(slice_tensor, 0, 0)
mm_default = aten.addmm(select_int, t, slice_tensor, beta=0, alpha=0.5)
slice_tensor_1 = aten.slice.Tensor(y_1, 1, 3, 6)
select_int_1 = aten.select.int(slice_tensor_1, 0, 0)
mm_default_1 = aten.addmm(select_int_1, t, slice_tensor_1, beta=0, alpha=0.5)
flat_bucket_default = dp_compile.flat_bucket([mm_default], [1.0], [1, 3], [0], 9)
all_reduce_default = _c10d_functional.all_reduce(flat_bucket_default, sum, 0)
wait_tensor_default = _c10d_functional.wait_tensor(all_reduce_default)
flat_bucket_default_1 = dp_compile.flat_bucket([mm_default_1], [1.0], [1, 3], [0], 9)
all_reduce_default_1 = _c10d_functional.all_reduce(flat_bucket_default_1, sum, 0)
wait_tensor_default_1 = _c10d_functional.wait_tensor(all_reduce_default_1)
assemble_default = dp_compile.assemble([wait_tensor_default, wait_tensor_default_1])
as_strided_default = aten.as_strided(assemble_default, [6, 3], [3, 1], 0)
permute_default = aten.permute(as_strided_default, [1, 0])
reshape_default = aten.reshape(permute_default, [18])
as_strided_default_1 = aten.as_strided(reshape_default, [6, 3], [1, 6])
return as_strided_default_1""",
    )
    torch.testing.assert_close(module(y, x), expected)


def used_twice(grad: Grad, y: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    made = y.t() @ x
    return grad.reduce(made), made.sum()


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize(
    "function",
    [
        lambda grad, y, x: grad.reduce(y.t() @ x + 1.0),
        used_twice,
        lambda grad, y, x: grad.reduce((y.t() @ x).reshape(2, 3, 3)),
        lambda grad, y, x: grad.reduce((y[:, :3].t() @ x).expand(6, 3, 3)),
    ],
    ids=["a sum", "used elsewhere", "three dimensions", "expanded"],
)
def test_what_is_no_product_of_its_own_is_sliced(function: Any) -> None:
    """Right, with the same collectives; only that no piece is ready early."""
    y, x = torch.randn(5, 6), torch.randn(5, 3)
    probe = trace(lambda y, x: function(Grad(index=0, shape=(0,)), y, x), y, x)
    shape = tuple(next(n for n in probe.graph.nodes if "reduce_grad" in n.name).meta["val"].shape)
    grad = Grad(index=0, shape=shape)
    module = trace(lambda y, x: function(grad, y, x), y, x)
    expected = executed(module, [plan_in_pieces(grad)], y, x)
    products = len(module.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default))
    run_passes(module, plan_in_pieces(grad))
    assert len(module.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)) == products
    assert sum(map(is_all_reduce, module.graph.nodes)) == 2
    torch.testing.assert_close(module(y, x), expected)


@pytest.mark.usefixtures("fake_group")
def test_all_pieces_count_as_one_reduction() -> None:
    grad = Grad(index=0, shape=(6, 3))
    module = trace(lambda y, x: grad.reduce(y.t() @ x), torch.randn(5, 6), torch.randn(5, 3))
    before = accounted(module.graph)
    run_passes(module, plan_in_pieces(grad))
    assert accounted(module.graph) == before
    first, second = (node for node in module.graph.nodes if is_all_reduce(node))
    for lost, kept in ((first, second), (second, first)):
        marks = lost.meta[PROVENANCE]
        lost.meta[PROVENANCE] = None
        with pytest.raises(InvalidGraphError, match="overlap or miss some of its 6 rows"):
            accounted(module.graph)
        lost.meta[PROVENANCE] = provenance_of(kept)
        with pytest.raises(InvalidGraphError, match="overlap or miss"):
            accounted(module.graph)
        lost.meta[PROVENANCE] = marks


# --- generated code -----------------------------------------------------------------------------------------------


class WithHead(nn.Module):
    def __init__(self, vocabulary: int = 64, width: int = 24) -> None:
        super().__init__()
        self.embed, self.inner = nn.Embedding(vocabulary, width), nn.Linear(width, width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.inner(self.embed(tokens))))


HEAD_IN_TWO = [
    [member("head.weight", (0, 20))],
    [member("head.weight", (20, 64))],
    [member("inner.bias"), member("inner.weight"), member("embed.weight"), member(UNUSED_FLAGS)],
]
MIXED = [
    [member("head.weight", (20, 50))],
    [member("head.weight", (0, 20)), member("inner.bias"), member("embed.weight", (0, 1), apart=True)],
    [member("inner.weight", (3, 24), apart=True)],
    [member("inner.weight", (0, 3), apart=True), member("head.weight", (50, 64)), member(UNUSED_FLAGS)],
    [member("embed.weight", (1, 64), apart=True)],
]
"""Pieces out of order, next to others, apart; of a scatter; of something with a single row."""


def plan_file(buckets: Listed) -> Path:
    file = Path(tempfile.mkdtemp(), "plan.json")
    file.write_text(plan_text(buckets))
    return file


@pytest.mark.usefixtures("fake_group")
def test_a_block_is_reduced_while_the_next_is_computed_and_nothing_is_copied() -> None:
    model = dp_compile.replicate(WithHead(), plan=plan_file(HEAD_IN_TWO))
    code = code_of_backward(model, torch.randint(0, 64, (2, 16)))
    before, between, *_ = shape_of(code).split("A")
    assert before.count("m") == 1
    assert between == "m"
    assert model.head.weight.grad is not None
    assert model.head.weight.grad.stride() == (24, 1)
    # Both buckets lie in one memory, which is what comes back: no kernel touches the whole gradient afterwards.
    assert f"empty_strided_cpu(({64 * 24}, ), (1, )" in code
    assert shape_of(code).endswith("AWWW")
    shown = str(dp_compile.report(model).plan)
    assert "head.weight[0:20]" in shown
    assert "4 gradients" in shown


@pytest.mark.usefixtures("fake_group")
def test_pieces_lie_in_memory_that_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_memory, "KEPT_FROM_NBYTES", 64 * 24 * 4 - 1)
    torch._dynamo.reset()
    model = WithHead()
    plain = copy.deepcopy(model)
    dp_compile.replicate(model, plan=plan_file(HEAD_IN_TWO))
    batches = [torch.randint(0, 64, (2, 16)) for _ in range(3)]
    code = code_of_backward(model, batches[0])
    assert code.count("bucket_memory.default(0, ") == 2  # the head's, and that of the last bucket
    assert shape_of(code).endswith("AWWW")  # nothing is copied behind the reductions
    run, seen = torch.compile(model), set[int]()
    for batch in batches:
        for each, forward in ((model, run), (plain, plain)):
            each.zero_grad()
            with torch._inductor.config.patch(fx_graph_cache=False):  # no key of it knows of the limit
                forward(batch).square().mean().backward()
        for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, other.grad / 2)  # type: ignore[operator]
        seen.add(model.head.weight.grad.data_ptr())  # type: ignore[union-attr]
    kept = [each.memory for each in replica_of(model).bucket_memory.kept.values() if each.memory.numel() == 64 * 24]
    assert list(seen) == [each.data_ptr() for each in kept]


# --- real ranks ---------------------------------------------------------------------------------------------------


def tokens(rank: int, step: int) -> tuple[torch.Tensor]:
    return (torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(1000 * rank + step)),)


def train_in_pieces(buckets: Listed, backend: str, kept: bool, one_rank_eagerly: bool) -> Report:
    torch._dynamo.reset()
    backwards = iter(range(1000))

    def loss(output: torch.Tensor) -> torch.Tensor:
        value = output.square().mean()
        number = next(backwards)  # ours and torch's DDP's in turn
        eager = one_rank_eagerly and dist.get_rank() == 1 and number % 4 == 2
        torch.compiler.set_stance("force_eager" if eager else "default")
        return value

    case = Case(
        build=WithHead,
        batch=tokens,
        loss=loss,
        backend=backend,
        compile_model=lambda model: torch.compile(model, backend=backend),
        set_to_none=lambda step: not kept,
        options={"plan": plan_file(buckets)},
    )
    return train_both(case)


EVERY_DAY = {("two", "aot_eager", True), ("two", "inductor", False), ("mixed", "aot_eager", False)}
"""Every two of the options together, but for the dearest."""


@pytest.mark.parametrize(
    ("buckets", "backend", "kept"),
    [
        pytest.param(
            {"two": HEAD_IN_TWO, "mixed": MIXED}[buckets],
            backend,
            kept,
            id=f"{buckets}-{backend}-gradients {'kept' if kept else 'None'}",
            marks=() if (buckets, backend, kept) in EVERY_DAY else pytest.mark.nightly,
        )
        for buckets, backend, kept in itertools.product(("two", "mixed"), ("aot_eager", "inductor"), (False, True))
    ],
)
def test_parity(ranks: Ranks, buckets: Listed, backend: str, kept: bool) -> None:
    for report in ranks.run(train_in_pieces, buckets, backend, kept, False):
        assert report.backwards == {"captured": 4}
        assert [capture.collectives for capture in report.captures] == [len(buckets)] * len(report.captures)


@pytest.mark.parametrize("buckets", [HEAD_IN_TWO, MIXED], ids=["head in two", "mixed"])
def test_one_rank_captures_and_the_other_does_not(ranks: Ranks, buckets: Listed) -> None:
    first, second, *_ = ranks.run(train_in_pieces, buckets, "aot_eager", False, True)
    assert first.backwards == {"captured": 4}
    assert second.backwards == {"captured": 2, "eager hooks": 2}


# --- plan files ---------------------------------------------------------------------------------------------------

KEY = bucket_key("0", "sum", "bfloat16", "cpu")


def spec(index: int, *shape: int, stride: tuple[int, ...] | None = None) -> GradientSpec:
    contiguous = torch.empty(shape, device="meta").stride()
    return GradientSpec(index, f"p{index}", shape, contiguous if stride is None else stride, 2, KEY)


def test_pieces_come_back_from_their_file() -> None:
    gradients = [spec(0, 6, 4), spec(1, 5), spec(2, 4, 3, 2)]
    listed = [[member("p0", (0, 5)), member("p1")], [member("p2", (2, 4), apart=True)], [member("p0", (5, 6))]]
    plan = plan_explicit(gradients, plan_text([*listed, [member("p2", (0, 2), apart=True)]]), Layout(64)).plan
    again = plan_explicit(gradients, plan_to_json(plan), Layout(64)).plan
    assert again == plan
    assert again.signature() == plan.signature()
    assert [each.index for each in plan.gradients] == [0, 1, 2]
    assert plan.nbytes == sum(each.nbytes for each in gradients)
    other = plan_explicit(gradients, plan_text([[member("p0")], [member("p1")], [member("p2")]]), Layout(64)).plan
    assert other.signature() != plan.signature()


@pytest.mark.parametrize(
    ("listed", "message"),
    [
        (
            [("p0", (0, 4)), ("p0", (3, 6))],
            r"pieces of p0 in the plan file overlap or miss rows: \[\(0, 4\), \(3, 6\)\]",
        ),
        ([("p0", (0, 4))], "each of its 6 rows has to be in exactly one piece"),
        ([("p0", (0, 4)), ("p0", (4, 7))], "overlap or miss rows"),
        ([("p0", (0, 0)), ("p0", (0, 6))], "overlap or miss rows"),
        ([("p0", (0, 6)), ("p0", None)], "names more than once: p0"),
        ([("p0", None), ("p1", (0, 2)), ("p1", (2, 5))], "cuts p1 into pieces, but it has 1 dimension"),
        ([("p0", None), ("p2", (0, 2)), ("p2", (2, 4))], r"cuts p2 into pieces, but it has strides \(1, 4\)"),
        ([("p0", (0, 6, 7))], "not a plan file"),
        ([("p0", (0, 3)), ("p2", None)], "misses: p1"),
    ],
)
def test_pieces_that_do_not_fit(listed: list[tuple[str, Any]], message: str) -> None:
    gradients = [spec(0, 6, 4), spec(1, 5), spec(2, 4, 3, stride=(1, 4))]
    if "misses" not in message:
        listed = [*listed, *((name, None) for name in ("p1", "p2") if name not in dict(listed))]
    with pytest.raises(ConfigError, match=f"(?i){message}"):
        plan_explicit(gradients, plan_text([[member(name, rows)] for name, rows in listed]), PACKED)


def test_one_piece_of_all_rows_is_the_whole() -> None:
    (bucket,) = plan_explicit([spec(0, 6, 4)], plan_text([[member("p0", (0, 6))]]), PACKED).plan.buckets
    assert bucket.members[0].rows is None


# --- where pieces pay ---------------------------------------------------------------------------------------------


def language_model(rows: int, *, is_product: bool = True) -> tuple[list[GradientSpec], ReadyTimes]:
    """The gradients of a model with an untied head, 16 layers and an embedding, and when they are ready.

    Work is as the elements of all but the embedding; half of the head's is its gradient. A copy takes 5 % of that,
    as with 8192 tokens and 200 FLOPs for each byte.
    """
    shapes = [(rows, 2048), *[(29696, 2048)] * 16, (rows, 2048)]
    gradients = [spec(index, *shape) for index, shape in enumerate(shapes)]
    total = sum(gradient.numel for gradient in gradients[:-1])
    ends = [sum(gradient.numel for gradient in gradients[: index + 1]) / total for index in range(17)]
    head = Product(ends[0] / 2, ends[0] / 40)
    shares = dict(enumerate([*ends, 1.0]))
    return gradients, ReadyTimes(shares, None, "drawn", {0: head} if is_product else {})


LINK = AllReduceCost(20e-6, 1 / 20e9)


def test_a_huge_head_is_cut_where_communication_is_the_bottleneck() -> None:
    """The backward is measured and takes half as long as the communication: the network waits for the head."""
    gradients, times = language_model(128256)
    backward_s = sum(LINK.seconds(gradient.nbytes) for gradient in gradients) / 2
    measured = ReadyTimes(times.shares, backward_s, "drawn", times.products)
    cut = plan_optimal(gradients, LINK, measured, PACKED)
    whole = plan_optimal(gradients, LINK, ReadyTimes(times.shares, backward_s, "drawn"), PACKED)
    pieces = [each for bucket in cut.plan.buckets for each in bucket.members if each.rows is not None]
    assert (pieces[0].label, pieces[-1].label, len(pieces)) == ("p0[0:16032]", "p0[112224:128256]", 8)
    assert sum(each.nbytes for each in pieces) == gradients[0].nbytes
    assert whole.certificate is not None
    assert cut.certificate is not None
    assert 1 - cut.certificate.makespan_s / whole.certificate.makespan_s == pytest.approx(0.040, abs=0.001)
    assert "one gradient in pieces" in cut.certificate.strategy


@pytest.mark.parametrize(
    ("rows", "backward_s"), [(128256, 10.0), (8000, None)], ids=["compute is the bottleneck", "a small head"]
)
def test_no_pieces_where_they_do_not_pay(rows: int, backward_s: float | None) -> None:
    gradients, times = language_model(rows)
    times = ReadyTimes(times.shares, backward_s, "drawn", times.products)
    plan = plan_optimal(gradients, LINK, times, PACKED).plan
    assert all(each.rows is None for bucket in plan.buckets for each in bucket.members)


@pytest.mark.usefixtures("fake_group")
def test_the_first_backward_finds_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the captured graph to the plan, for a model whose head would otherwise be too small to be cut."""
    monkeypatch.setattr(strategies, "PIECE_NBYTES", 64)
    torch._dynamo.reset()
    config = dp_compile.ReplicateConfig(backend="aot_eager", cost=AllReduceCost(1e-9, 1e-9))
    model = dp_compile.replicate(WithHead(vocabulary=2048), config=config)
    assert "head.weight[" not in str(dp_compile.report(model).plan)
    torch.compile(model, backend="aot_eager")(torch.randint(0, 64, (64, 64))).square().mean().backward()
    assert "head.weight[0:" in str(dp_compile.report(model).plan)
    assert dp_compile.report(model).captures[0].collectives == len(dp_compile.report(model).plan.buckets)
