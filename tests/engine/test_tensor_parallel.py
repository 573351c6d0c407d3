"""Data parallel with tensor parallel: parameters stay DTensors, and all is as in one process on the joint batch."""

import copy
import math
import re
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from docs_scripts import python_of
from meshes import full, mesh_of
from on_ranks import on_ranks
from parity import AOT
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import dp_compile
from dp_compile import averaging
from dp_compile._torch import distributed
from dp_compile.decentralized import decentralize
from dp_compile.engine import compile as compilation
from dp_compile.fx.collectives import is_collective
from dp_compile.passes import DEFAULT_PASSES
from dp_compile.passes.result import PassResult

TOKENS, STEPS, BF16 = 12, 4, torch.bfloat16


class Net(nn.Module):
    """Sizes that two ranks do not share evenly: a vocabulary of eleven, seven features inside."""

    def __init__(self, hidden=7):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, hidden), nn.Linear(hidden, 8)
        self.scale = nn.Parameter(torch.ones(8))
        self.head = nn.Linear(8, 11, bias=False)

    def forward(self, tokens, skip=False):
        x = self.embedding(tokens)
        if not skip:
            x = x + self.down(torch.tanh(self.up(self.norm(x))))
        factor = self.scale.sum()
        if isinstance(factor, DTensor):  # used for a part of the sequence: its gradient is partial over `tp`
            factor = factor.to_local(grad_placements=[Partial()])
        return self.head(x * factor)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x):
        return self.down(torch.relu(self.up(self.norm(x))))


def colwise(model, mesh):
    """Some layers only; the others are plain, and the same on all ranks of `tp`."""
    parallelize_module(model, mesh, {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()})


def everything(model, mesh):
    """Sequence parallel: gradients of the norm are partial over `tp`. Embedding and head share their weight."""
    parallelize_module(
        model,
        mesh,
        {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
            "down": RowwiseParallel(output_layouts=Shard(1)),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        },
    )
    model.head.weight = model.embedding.weight
    model.scale = nn.Parameter(distribute_tensor(model.scale.detach(), mesh, [Replicate()]))


PLANS = {"colwise": colwise, "everything": everything}


def batch(step, rank):
    """Of rank `rank` of `dp`."""
    return torch.randint(11, (3, TOKENS), generator=torch.Generator().manual_seed(10 * step + rank))


def loss_of(model, tokens, skip=False):
    return nn.functional.cross_entropy(model(tokens, skip).flatten(0, 1).float(), tokens.roll(1, 1).flatten())


def models(plan, shape, *, tied, **options):
    """One that is parallel, and what it is when it is not. All ranks but the first of `dp` begin with wrong values."""
    torch._dynamo.reset()
    mesh = mesh_of(shape)
    torch.manual_seed(0)
    alone = Net(**options)
    model = copy.deepcopy(alone)
    if tied:
        alone.head.weight = alone.embedding.weight
    PLANS[plan](model, mesh["tp"])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(dp_of(mesh)[2])  # replicate() has to undo this
    return model, alone, mesh


def facts_of(model):
    """What no step may change."""
    named, state = dict(model.named_parameters()), model.state_dict()
    return {
        "objects": {name: id(each) for name, each in named.items()},
        "layouts": {name: getattr(each, "placements", None) for name, each in named.items()},
        "state": {name: (type(each), getattr(each, "placements", None)) for name, each in state.items()},
    }


def compare(model, alone, when, *, tolerance=1e-5):
    """Parameters and gradients, and how gradients are laid out."""
    reference = dict(alone.named_parameters())
    for name, parameter in model.named_parameters():
        other = reference[name]
        assert (parameter.grad is None) == (other.grad is None), f"{when}: gradient of {name}"
        for what, mine, theirs in (("parameter", parameter, other), ("gradient", parameter.grad, other.grad)):
            if mine is None:
                continue
            assert getattr(mine, "placements", None) == getattr(parameter, "placements", None), f"{when}: {what} {name}"
            torch.testing.assert_close(
                full(mine),
                theirs.detach(),
                rtol=tolerance,
                atol=tolerance,
                msg=lambda text, what=what, name=name: f"{when}: {what} {name}: {text}",
            )


def dp_of(mesh):
    """What to replicate over, how many ranks that are, and the place of this one among them."""
    if mesh.ndim == 2:
        return mesh["dp"], mesh["dp"].size(), mesh.get_local_rank("dp")
    place = mesh.get_local_rank("between") * mesh["inside"].size() + mesh.get_local_rank("inside")
    return mesh["between", "inside"], mesh["between"].size() * mesh["inside"].size(), place


@dataclass(frozen=True)
class Orders:
    """A pass that changes nothing and reads the order of collectives, by the ranks of their group."""

    last: bool = False
    name: ClassVar[str] = "orders"
    found: ClassVar[list[dict[tuple[int, ...], list[str]]]] = []

    def __call__(self, graph, plans):
        orders = {}
        for node in filter(is_collective, graph.nodes):
            group = tuple(dist.get_process_group_ranks(distributed.group_of_name(str(node.args[-1]))))
            orders.setdefault(group, []).append(f"{node.target} of {list(node.args[0].meta['val'].shape)}")
        if self.last:
            for group, order in self.found.pop().items():  # no bucket is there yet: all of tensor parallel
                assert orders[group] == order
        self.found.append(orders)
        return PassResult()


@mock.patch.object(compilation, "DEFAULT_PASSES", (Orders(), *DEFAULT_PASSES, Orders(last=True)))
def train(plan, way, shape, *, set_to_none=True, accumulate=2, hook=None, tolerance=1e-5, **options):
    """Beside one process: ways of the backwards, orders of collectives. Each `accumulate`th step has a local one."""
    model, alone, mesh = models(plan, shape, tied=plan == "everything")
    dp, ranks, here = dp_of(mesh)
    config = replace(AOT, **options)
    Orders.found.clear()
    dp_compile.replicate(model, device_mesh=dp, config=config)
    if hook is not None:
        model.register_comm_hook(mesh["dp"].get_group(), hook)
    before = facts_of(model)
    run = model if way == "eager" else torch.compile(model, backend=config.backend)
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.01) for each in (model, alone)]

    def backward(number, first_skips=False):
        loss_of(run, batch(number, here), first_skips and here == 0).backward()
        losses = [loss_of(alone, batch(number, rank), first_skips and rank == 0) for rank in range(ranks)]
        (sum(losses) / ranks).backward()

    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)
        if step % accumulate == accumulate - 1:
            # A partial gradient, or what is to become one, stays from a backward without synchronisation.
            with dp_compile.no_sync(model):
                backward(step + STEPS)
        backward(step, config.find_unused_parameters and step == 2)
        compare(model, alone, f"step {step}", tolerance=tolerance)
        for optimizer in optimizers:
            optimizer.step()
    compare(model, alone, "the end", tolerance=tolerance)
    assert facts_of(model) == before
    if plan == "everything":
        assert model.head.weight is model.embedding.weight
    captures = dp_compile.report(model).captures
    assert bool(captures) == (way == "captured")
    assert {each.graphs for each in captures} <= {1}
    return dict(dp_compile.report(model).backwards), list(Orders.found)


@pytest.mark.usefixtures("fake_group")
def test_plans_know_when_parts_are_ready():
    """The same local model, with DTensors and without: in a captured graph all DTensors stand after everything."""
    found = []
    for spread in (True, False):
        torch._dynamo.reset()
        model, mesh = nn.Sequential(*(Block() for _ in range(4))), mesh_of((dist.get_world_size(), 1))
        for block in model if spread else ():
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        dp_compile.replicate(model, device_mesh=mesh["dp"], config=AOT)
        torch.compile(model, backend="aot_eager")(torch.ones(2, 6)).sum().backward()
        step = dp_compile.step_of(model)
        found.append({each.name: step.ready.of(each) for each in step.plan.gradients})
    # Without collectives of the model, compute that only later gradients need is put after a launch: up to a product.
    assert found[0] == pytest.approx(found[1], abs=0.2)
    assert min(found[0].values()) < 0.3


@pytest.mark.parametrize(
    ("plan", "way", "shape", "options"),
    [
        ("colwise", "eager", (2, 2), {}),
        ("everything", "eager", (2, 2), {"set_to_none": False}),
        ("everything", "eager", (2, 2), {"hook": default_hooks.fp16_compress_hook, "tolerance": 0.02}),
        ("everything", "eager", (2, 2), {"mp_policy": MixedPrecisionPolicy(reduce_dtype=BF16), "tolerance": 0.05}),
        # In float64, where an option that is dropped shows in dtypes and a wrong number is no matter of rounding.
        ("everything", "eager", (2, 2), {"mp_policy": MixedPrecisionPolicy(torch.float64, torch.float64)}),
        # What is left by the first has no layout of the parameter, what is left by later ones has.
        ("everything", "captured", (2, 2), {"set_to_none": False, "accumulate": 1}),
        pytest.param("colwise", "captured", (2, 2), {"backend": "inductor"}, marks=pytest.mark.nightly),
        pytest.param("everything", "captured", (1, 4), {"backend": "inductor"}, marks=pytest.mark.nightly),
        pytest.param("everything", "captured", (4, 1), {}, marks=pytest.mark.nightly),
        pytest.param("everything", "captured", (2, 1, 2), {"bucket_cap_mb": 1e-5}, marks=pytest.mark.nightly),
        # The ranks of one place of `dp` leave layers out, whose gradients have the layout that others say.
        ("everything", "eager", (2, 1, 2), {"find_unused_parameters": True}),
    ],
)
def test_equals_one_process(meshed, plan, way, shape, options):
    results = meshed.run(partial(train, plan, way, shape, **options))
    for orders in zip(*(found for _, found in results), strict=True):  # of one backward, by rank
        for own in orders:
            assert all(orders[other][group] == order for group, order in own.items() for other in group)
    assert bool(results[0][1]) == (way == "captured")
    synced, local = ("eager hooks", "without sync") if way == "eager" else ("captured", "without sync")
    for backwards, _ in results:
        assert backwards == {synced: STEPS, local: STEPS // options.get("accumulate", 2)}


@on_ranks("meshed")
def test_uneven_inputs():
    """The ranks of one place of `dp` have fewer batches, all of them that hold parts of it."""
    model, alone, mesh = models("everything", (2, 2), tied=True)
    dp_compile.replicate(model, device_mesh=mesh["dp"], config=AOT)
    here = mesh["dp"].get_local_rank()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, alone)]
    with dp_compile.join(model):
        for step in range(2 + here):
            optimizers[0].zero_grad()
            loss_of(model, batch(step, here)).backward()
            optimizers[0].step()
    for step in range(3):
        optimizers[1].zero_grad()
        (sum(loss_of(alone, batch(step, rank)) for rank in range(2) if step < 2 + rank) / 2).backward()
        optimizers[1].step()
    for name, parameter in alone.named_parameters():
        torch.testing.assert_close(full(dict(model.named_parameters())[name]), parameter.detach())


class Roots(nn.Module):
    """The gradient of a square root at zero is not finite, and the loss is."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 4, bias=False), nn.Linear(4, 4)
        nn.init.ones_(self.up.weight)

    def forward(self, x):
        return self.down(self.up(x).sqrt())


@on_ranks("meshed")
def test_what_is_not_finite_in_one_part_is_an_error_on_every_rank():
    """Those that hold other parts would wait for the ranks that raise, in the next collective of tensor parallel."""
    mesh = mesh_of((2, 2))
    torch.manual_seed(0)
    model = parallelize_module(Roots(), mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    config = replace(AOT, check_nan=True)
    dp_compile.replicate(model, device_mesh=mesh["dp"], config=config)
    run = torch.compile(model, backend="aot_eager")
    x = torch.ones(2, 4)
    run(x).sum().backward()
    with torch.no_grad():
        model.up.weight.to_local()[0] *= tuple(mesh.get_coordinate() or ()) != (1, 0)
    here, elsewhere = r"up\.weight \(inf\)", "not finite: parts of DTensors that other ranks hold. The loss was finite"
    with pytest.raises(dp_compile.ReductionError, match=elsewhere if mesh.get_local_rank("tp") else here):
        run(x).sum().backward()


@on_ranks("meshed")
def test_clipping():
    """Plain gradients with DTensors, and parts of a dimension that some rank holds nothing of."""
    for plan, order, shape in (("colwise", 2.0, (2, 2)), ("everything", math.inf, (2, 2)), ("everything", 3.0, (1, 4))):
        model, alone, mesh = models(plan, shape, tied=plan == "everything", hidden=3)
        dp_compile.replicate(model, device_mesh=mesh["dp"], config=AOT)
        ranks = mesh["dp"].size()
        loss_of(model, batch(0, mesh["dp"].get_local_rank())).backward()
        (sum(loss_of(alone, batch(0, rank)) for rank in range(ranks)) / ranks).backward()
        norm = dp_compile.optim.clip_grad_norm_(model.parameters(), 0.1, order)
        expected = torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.1, order)
        assert type(norm) is torch.Tensor
        torch.testing.assert_close(norm, expected)
        compare(model, alone, "clipped")
        for odd, is_odd in ((math.inf, math.isinf), (math.nan, math.isnan)):  # in a part that one rank holds
            if mesh["tp"].get_local_rank() == 0:
                model.up.weight.grad.to_local()[0, 0] = odd
            assert is_odd(dp_compile.optim.clip_grad_norm_(model.parameters(), 0.1, order))


def run_the_page(path):
    """Not compiled, which would take a while."""
    torch.manual_seed(dist.get_rank() // 2)
    loader = [(torch.randn(2, 6), torch.randn(2, 6)) for _ in range(3)]
    names = {"Model": Block, "loss_fn": nn.functional.mse_loss, "loader": loader}
    code = python_of("algorithms.md", "Tensor parallel") + python_of("algorithms.md", "Tensor parallel", 1)
    code = code.replace("torch.compile(model)", "model").replace('checkpoint_id="', f'checkpoint_id="{path}/')
    exec(code, names)
    assert torch.equal(full(names["model"].up.weight), full(names["average"]["up.weight"]))
    return torch.cat([full(each).flatten() for each in names["model"].parameters()]).tolist()


@pytest.mark.filterwarnings("ignore")
def test_the_page(meshed, tmp_path):
    """One process loads the checkpoint of four."""
    results, alone = meshed.run(run_the_page, str(tmp_path)), Block()
    checkpoint.load(alone.state_dict(), checkpoint_id=str(tmp_path / "checkpoint"), no_dist=True)
    assert results == [torch.cat([each.detach().flatten() for each in alone.parameters()]).tolist()] * 4


@on_ranks("meshed")
def test_refusals():
    mesh = mesh_of((2, 2))

    def parallel(odd=None):
        torch.manual_seed(0)
        model = Net()
        colwise(model, mesh["tp"])
        if odd is not None:
            model.odd = nn.Parameter(odd)
        return model

    def updated(**options):
        dp_compile.optim.in_backward(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)

    model = dp_compile.replicate(parallel(), device_mesh=mesh["dp"], config=AOT)
    averager = averaging.PeriodicModelAverager(1, process_group=mesh["dp"].get_group())
    crossed = [dist.new_group(each) for each in ([0, 3], [1, 2])][dist.get_rank() in (1, 2)]
    is_partial = DTensor.from_local(torch.ones(8), mesh["tp"], [Partial()])
    is_complex = distribute_tensor(torch.ones(8, dtype=torch.complex64), mesh["tp"], [Replicate()])
    replicate, unknown = dp_compile.replicate, "does not support DTensor parameters"
    attempts = [
        (lambda: replicate(parallel()), "device_mesh=mesh['dp']"),
        (lambda: replicate(parallel(), device_mesh=mesh["tp"]), "device_mesh=mesh['dp']"),
        (lambda: replicate(parallel(), process_group=crossed), "part [1] of [2]"),
        (lambda: replicate(parallel(is_partial), device_mesh=mesh["dp"]), "odd is a DTensor with a Partial placement"),
        (lambda: replicate(parallel(is_complex), device_mesh=mesh["dp"]), "odd is a complex DTensor"),
        (lambda: averager.average_parameters(parallel().parameters()), "of params must be dense"),
        (lambda: model.register_comm_hook(None, lambda state, bucket: None), "would receive local shards"),
        (lambda: updated(), unknown),
        (lambda: updated(overlap_forward=True), unknown),
        (lambda: decentralize(parallel(), topology="complete", optimizer=torch.optim.SGD), unknown),
    ]
    for attempt, text in attempts:
        with pytest.raises(dp_compile.DPCompileError, match=re.escape(text)):
            attempt()
