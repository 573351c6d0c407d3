"""Ranks that mix parameters: D-PSGD in NumPy, decent-dp itself, the same bits in every way, and where we deviate."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from local_steps import AOT, SMALL_MB, adamw, by_formula, compiled, decentral, mine, mlp, not_compiled, train, values
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils._python_dispatch import TorchDispatchMode

import dp_compile
from dp_compile.decentralized import mixing
from dp_compile.decentralized.module import mixing_of
from dp_compile.decentralized.updates import MixingUpdates
from dp_compile.plan import topologies
from dp_compile.plan.topologies import Edge, Topology, topology
from dp_compile.testing.ranks import Ranks

SGD = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}


def alone_now_and_then(world_size: int) -> Topology:
    """Weighted, of three ranks, and of one."""
    three, last = Edge((0, 1, 2), 0.5), world_size - 1
    others = tuple(Edge((rank,), 1.0) for rank in range(3, world_size))
    ends = (Edge((0, last), 0.7), *(Edge((rank,), 1.0) for rank in range(1, last)))
    return Topology("alone now and then", world_size, ((three, *others), ends))


TOPOLOGIES: dict[str, Callable[[int], Topology]] = {
    "complete": lambda n: topology("complete", n),
    "ring": lambda n: topology("ring", n),
    "one-peer-exp": lambda n: topology("one-peer-exp", n),
    "alternating-exp-ring": lambda n: topology("alternating-exp-ring", n, 2),
    "metropolis": lambda n: topologies.metropolis(n, [(0, 1), (1, 2), *((0, rank) for rank in range(3, n))]),
    "random": lambda n: topologies.random_matchings(n, period=5, seed=3),
    "alone": alone_now_and_then,
}


# --- the truth ----------------------------------------------------------------------------------------------------


def beside_the_formula(steps: int) -> int:
    """For how many topologies; the first one compiles for all."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    torch._dynamo.reset()
    for name in TOPOLOGIES:
        chosen, model = TOPOLOGIES[name](world_size), mlp(torch.float64)
        start = [each.detach().numpy().copy() for each in model.parameters()]
        decentral(model, chosen, torch.optim.SGD(model.parameters(), **SGD))
        run = torch.compile(model, backend="aot_eager")
        for step, expected in enumerate(by_formula(start, chosen.mixed, world_size, steps, **SGD)):
            train(model, run, range(step, step + 1))
            for ours, theirs in zip(values(model), expected, strict=True):
                np.testing.assert_allclose(ours.numpy(), theirs[rank], rtol=0, atol=1e-12, err_msg=f"{name} {step}")
        report = dp_compile.report(model)
        assert dict(report.backwards) == {"captured": steps}
        # One graph, whichever edge a step has.
        assert [(record.graphs, record.updated, record.collectives) for record in report.captures] == [(1, 5, 0)]
        dp_compile.unreplicate(model)
    return len(TOPOLOGIES)


def test_as_d_psgd_in_numpy(ranks4: Ranks) -> None:
    """All topologies for 20 steps, by SGD with momentum and decay of the mixed parameters."""
    assert ranks4.run(beside_the_formula, 20) == [7] * 4


@pytest.mark.nightly
def test_as_d_psgd_in_numpy_on_eight_ranks() -> None:
    ranks = Ranks(8, "forkserver")
    ranks.run(beside_the_formula, 20)
    ranks.stop()


def as_theirs(name: str, world_size: int, steps: int) -> Topology:
    """A deviation: decent-dp starts its first exchange with edge 1 and goes on with edge 3."""
    edges = topology(name, world_size, 2).steps
    return Topology(name, world_size, tuple(edges[(step + (step > 1)) % len(edges)] for step in range(steps)))


def beside_decent_dp(options: dict[str, Any], names: list[str]) -> float:
    from decent_dp.ddp import DecentralizedDataParallel
    from loguru import logger

    logger.disable("decent_dp")
    world_size, steps, worst = dist.get_world_size(), 8, 0.0
    for name in names:
        ours, other = mlp(), mlp()
        given: dict[str, Any] = {"optim_fn": optimizer_of_names, "lr_scheduler_fn": scheduler} | options
        factor = given.pop("factor", 1.0)
        theirs = DecentralizedDataParallel(other, topology=name, _local_world_size=2, **given)
        chosen = as_theirs(name, world_size, steps)
        model = dp_compile.decentralized.DecentralizedDataParallel(ours, topology=chosen, config=AOT, **given)
        theirs.set_adaptive_factor(factor)
        model.set_adaptive_factor(factor)
        run = compiled(model)
        for step in range(steps):
            for each in (theirs, run):
                each(mine(step)).square().mean().backward()
            # Theirs does the first update in its second forward.
            if step:
                differences = [(one - two).abs().max() for one, two in zip(values(ours), values(other), strict=True)]
                worst = max(worst, float(max(differences)))
                assert model.get_lr() == theirs.get_lr()
        one, two = (each.global_avg(will_revert=True, return_d2c=True) for each in (model, theirs))
        assert one == pytest.approx(two, rel=1e-4, abs=1e-6)
        for each, its in zip(values(ours), values(other), strict=True):
            torch.testing.assert_close(each, its, rtol=0, atol=1e-6)
        dp_compile.unreplicate(model)
    return worst


def optimizer_of_names(named: Any) -> torch.optim.Optimizer:
    assert all(isinstance(name, str) for name, _ in named)
    return torch.optim.AdamW([parameter for _, parameter in named], lr=0.01)


class Leaning(torch.optim.AdamW):
    """Moves parameters by what has arrived before they are mixed, as `pre_average_hook` is told.

    A deviation: decent-dp tells before the first step too, when parameters lie where something might have arrived.
    """

    @torch.no_grad()
    def pre_average_hook(self, edge: Any, weight: float) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if not torch.equal(parameter.comm_buffer, parameter):
                    parameter.add_(parameter.comm_buffer, alpha=0.1 * weight + 0.01 * len(edge.ranks))


def leaning(named: Any) -> torch.optim.Optimizer:
    return Leaning([parameter for _, parameter in named], lr=0.01)


def scheduler(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)


DECENT_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"grad_clip_norm": 0.05},
    "factor": {"factor": 0.3, "param_as_bucket_view": False},
    "told before mixing": {"factor": 0.3, "optim_fn": leaning, "bucket_size_in_mb": SMALL_MB},
}


@pytest.mark.parametrize("option", DECENT_OPTIONS)
def test_as_decent_dp(ranks4: Ranks, option: str) -> None:
    """Step by step, wherever it is right: learning rates, clipping, the factor and the distance to the average too."""
    pytest.importorskip("decent_dp", reason="decent-dp is not installed: pip install decent-dp==0.2.3")
    names = ["complete", "ring", "one-peer-exp", "alternating-exp-ring"] if option == "plain" else ["one-peer-exp"]
    assert max(ranks4.run(beside_decent_dp, DECENT_OPTIONS[option], names)) < 1e-6


def test_as_decent_dp_on_two_ranks(ranks2: Ranks) -> None:
    pytest.importorskip("decent_dp", reason="decent-dp is not installed: pip install decent-dp==0.2.3")
    assert max(ranks2.run(beside_decent_dp, {}, ["complete", "ring", "one-peer-exp"])) < 1e-6


class Kernels(TorchDispatchMode):
    """Names of ops that are run inside and compute, or send."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = [each.alias_info for each in func._schema.returns]
        is_view = any(each is not None and not each.is_write for each in returned)
        if not is_view and "record_function" not in func.__name__:
            self.seen.append(func.__name__)
        return func(*args, **kwargs or {})


def kernels(theirs: bool) -> list[str]:
    """What each step of a bucket with five parameters runs in the third captured backward; or in decent-dp's hook."""
    torch._dynamo.reset()
    sgd = lambda named: torch.optim.SGD([each for _, each in named], lr=0.1, momentum=0.9)  # noqa: E731
    if theirs:
        from decent_dp.ddp import DecentralizedDataParallel as Wrapper
        from loguru import logger

        logger.disable("decent_dp")
        kind, method, model = Wrapper, "_ddp_fn", Wrapper(mlp(), sgd, topology="complete")
        run = model
    else:
        kind, method, model = MixingUpdates, "_step", decentral(mlp(), "complete", sgd, bucket_size_in_mb=25)
        run = compiled(model)
    plain, counted = getattr(kind, method), []

    def counting(*args: Any) -> None:
        with Kernels() as found:
            plain(*args)
        counted.append(found.seen)

    with mock.patch.object(kind, method, counting):
        for step in range(4):
            run(mine(step)).square().mean().backward()
    (*_, last) = counted
    return last


def test_kernels_of_a_bucket(ranks2: Ranks) -> None:
    """Beside the optimizer's own: one takes what arrived, one fills what is sent. decent-dp has two of each."""
    update = ["mul_.Tensor", "add_.Tensor", "add_.Tensor"] * 5
    assert ranks2.run(kernels, False) == [["copy_.default", *update, "mul.out", "allreduce_.default"]] * 2
    pytest.importorskip("decent_dp", reason="decent-dp is not installed: pip install decent-dp==0.2.3")
    theirs = ["mul_.Tensor", "add_.Tensor", *update, "copy_.default", "mul_.Tensor", "allreduce_.default"]
    assert ranks2.run(kernels, True) == [theirs] * 2


def layouts() -> None:
    """A convolution whose parameters lie channels last, and its twin's that lie row by row."""
    found = []
    for order in (torch.channels_last, torch.contiguous_format):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 2), nn.Tanh(), nn.Conv2d(4, 2, 2)).to(memory_format=order)
        decentral(model, "complete", lambda named: torch.optim.SGD(named, lr=0.1, momentum=0.9))
        for step in range(3):
            model(mine(step, width=75).view(4, 3, 5, 5).contiguous(memory_format=order)).square().mean().backward()
        assert all(each.is_contiguous(memory_format=order) for each in model.parameters() if each.dim() == 4)
        found.append(values(model))
        dp_compile.unreplicate(model)
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


def test_channels_last(ranks2: Ranks) -> None:
    ranks2.run(layouts)


# --- the same bits in every way -------------------------------------------------------------------------------------


def ways(options: dict[str, Any]) -> tuple[dict[str, int], bool]:
    """Captured, not captured on rank 0 now and then, and not compiled."""
    found, backwards = [], {}
    torch._dynamo.reset()
    for run_by, broken in ((compiled, ()), (compiled, (1, 3)), (not_compiled, ())):
        model = decentral(mlp(), "ring", **options)
        train(model, run_by(model), range(5), broken=broken)
        found.append(values(model))
        backwards = backwards or dict(dp_compile.report(model).backwards)
        distance = model.consensus_distance()
        dp_compile.unreplicate(model)
    alike = [all(map(torch.equal, found[0], each)) for each in found[1:]]
    assert alike == [True, True], alike
    return backwards, distance > 0


WAYS: dict[str, dict[str, Any]] = {
    "by bucket": {"grad_clip_norm": 0.05},
    "globally": {"grad_clip_norm": 0.05, "clip": "global"},
    "no views": {"param_as_bucket_view": False},
}


@pytest.mark.parametrize("name", WAYS)
def test_the_same_bits_in_every_way(ranks2: Ranks, name: str) -> None:
    assert ranks2.run(ways, WAYS[name]) == [({"captured": 5}, True)] * 2


class LateReader(nn.Module):
    """The gradient of the last layer is ready first, when `late`, of the same bucket, has still to be read."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.late, self.last = nn.Linear(5, 5, bias=False), nn.Linear(5, 5, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(torch.tanh(torch.tanh(self.first(x)) @ self.late.weight.detach()))
        return result


def late_reader(as_views: bool) -> None:
    found = []
    torch._dynamo.reset()
    for run_by in (compiled, not_compiled):
        torch.manual_seed(0)
        model = decentral(LateReader(), "complete", param_as_bucket_view=as_views, bucket_size_in_mb=200 / 2**20)
        with torch.no_grad():
            model.late.weight += dist.get_rank()  # what arrives is something else
        train(model, run_by(model), range(3))
        found.append(values(model))
        dp_compile.unreplicate(model)
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("as_views", [False, True])
def test_all_that_a_bucket_mixes_is_read_before(ranks2: Ranks, as_views: bool) -> None:
    """Also a parameter that got no gradient in this backward, which nevertheless reads it."""
    ranks2.run(late_reader, as_views)


# --- where decent-dp is wrong or silent -----------------------------------------------------------------------------


def two_forwards() -> None:
    """Both losses in one backward, a forward without one, and an evaluation: a step is a backward."""
    twins = [decentral(mlp(), "one-peer-exp") for _ in range(2)]
    for step in range(4):
        both = [twins[0](mine(10 * step + each)).square().mean() for each in range(2)]
        (both[0] + both[1]).backward()
        twins[0](mine(77))
        with torch.no_grad():
            twins[0](mine(78))
        inputs = torch.cat([mine(10 * step), mine(10 * step + 1)])
        (2 * twins[1](inputs).square().mean()).backward()
        for one, other in zip(values(twins[0]), values(twins[1]), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


def test_two_forwards_of_a_backward_are_one_step(ranks4: Ranks) -> None:
    """A deviation: decent-dp counts forwards, and mixes with the wrong edge."""
    ranks4.run(two_forwards)


class Tied(nn.Module):
    """Its weight is used twice, and one parameter never."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.unused = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(torch.tanh(self.first(x)))
        return result


def tied(run_by: Callable[[nn.Module], Any]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = decentral(Tied(), "complete", lambda p: torch.optim.SGD(p, lr=0.1))
    with torch.no_grad():
        model.unused.weight += dist.get_rank()
    reference = [each.clone() for each in values(model)]
    run = run_by(model)
    for step in range(3):
        sums = [each.clone() for each in reference]
        for each in sums:
            dist.all_reduce(each)
        inputs = mine(step)
        first, bias, second, *_ = (each.requires_grad_() for each in reference)
        out = torch.nn.functional.linear(torch.tanh(torch.nn.functional.linear(inputs, first, bias)), first, second)
        found = torch.autograd.grad(out.square().mean(), (first, bias, second))
        run(inputs).square().mean().backward()
        # Nothing was sent before the first step, which all ranks start equal.
        mixed = reference if step == 0 else [each / dist.get_world_size() for each in sums]
        steps = [0.1 * each for each in found] + [0.0, 0.0]
        reference = [(each - by).detach() for each, by in zip(mixed, steps, strict=True)]
        for one, other in zip(values(model), reference, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
    return values(model)


def tied_in_both_ways() -> None:
    torch._dynamo.reset()
    assert all(map(torch.equal, tied(compiled), tied(not_compiled)))


def test_a_parameter_used_twice_and_one_never(ranks2: Ranks) -> None:
    """A deviation: decent-dp refuses the first, and never sends the bucket that ends with the second."""
    ranks2.run(tied_in_both_ways)


def in_bfloat16() -> None:
    torch._dynamo.reset()
    both = [decentral(mlp(dtype), "one-peer-exp") for dtype in (torch.bfloat16, torch.float32)]
    runs = [compiled(each) for each in both]
    for model, run in zip(both, runs, strict=True):
        train(model, run, range(4))
    for one, other in zip(values(both[0]), values(both[1]), strict=True):
        assert one.dtype == torch.bfloat16
        torch.testing.assert_close(one.float(), other, rtol=0, atol=0.02)


def test_bfloat16(ranks4: Ranks) -> None:
    """A deviation: decent-dp averages no buffers of that dtype, and has no word on parameters of it."""
    ranks4.run(in_bfloat16)


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_one_rank() -> None:
    """A deviation: decent-dp divides by zero."""
    torch._dynamo.reset()
    ours, theirs = decentral(mlp(), "one-peer-exp"), mlp()
    optimizer, run = adamw(theirs.parameters()), compiled(ours)
    train(ours, run, range(3))
    for step in range(3):
        theirs(mine(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for one, other in zip(values(ours), values(theirs), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours.state_dict()  # everybody's
    assert ours.consensus_distance() == 0
    dp_compile.unreplicate(ours)


def first_exchange() -> None:
    """SGD of a constant gradient, by hand: no rank is mixed before it was updated, and then with edge 1."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    decentral(model, "one-peer-exp", torch.optim.SGD(model.parameters(), lr=1.0))
    rank = dist.get_rank()
    for expected in (-rank, -(rank + (rank ^ 2)) / 2 - rank, None):
        (model.weight.sum() * rank).backward()
        if expected is not None:
            assert model.weight.item() == expected
    ours, theirs = (-(each + (each ^ 2)) / 2 - each for each in (rank, rank ^ 1))
    assert model.weight.item() == (ours + theirs) / 2 - rank


def test_the_first_exchange(ranks4: Ranks) -> None:
    """A deviation: decent-dp leaves edge 2 out."""
    ranks4.run(first_exchange)


def scaled(clip: str) -> list[float]:
    """Rank 1's gradient is not finite in step 2."""
    torch._dynamo.reset()
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=100)
    model = mlp()
    plain = decentral(mlp(), "complete", grad_clip_norm=0.05, clip=clip)
    decentral(model, "complete", scaler=scaler, grad_clip_norm=0.05, clip=clip)
    run, scales = compiled(model), []
    for step in range(5):
        before = values(model)
        loss = run(mine(step)).square().mean()
        spoilt = step == 2 and dist.get_rank() == 1
        scaler.scale(loss * float("inf") if spoilt else loss).backward()
        plain(mine(step)).square().mean().backward()
        scales.append(scaler.get_scale())
        if step < 2:
            for one, other in zip(values(model), values(plain), strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
        assert all(each.isfinite().all() for each in values(model))
        assert not all(map(torch.equal, before, values(model)))  # mixed, if not updated
    return scales


@pytest.mark.parametrize("clip", ["bucket", "global"])
def test_ranks_agree_on_the_scale(ranks2: Ranks, clip: str) -> None:
    """A deviation: with decent-dp each rank has a scale of its own, and each bucket is left out by itself."""
    # Steps that have the infinity: rank 1 halves the scale in step 2, and rank 0 hears of it with the parameters.
    assert ranks2.run(scaled, clip) == [[64.0, 64.0, 64.0, 32.0, 32.0], [64.0, 64.0, 32.0, 32.0, 32.0]]


def clipped_globally() -> None:
    model: Any = decentral(mlp(), "complete", lambda p: torch.optim.SGD(p, lr=1.0), grad_clip_norm=0.05, clip="global")
    before = values(model)
    train(model, model, range(1))
    moved = torch.stack([(one - other).norm() for one, other in zip(values(model), before, strict=True)]).norm()
    torch.testing.assert_close(moved, torch.tensor(0.05), rtol=1e-3, atol=0)


def test_clipped_over_all_buckets(ranks2: Ranks) -> None:
    """A deviation: decent-dp clips each bucket by itself, which ours does by default."""
    ranks2.run(clipped_globally)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layers(x)
        return result


def buffers(averaged: bool) -> None:
    model: Any = decentral(Normed(), "complete", sync_buffer_in_global_avg=averaged)
    train(model, model, range(3))
    own = [each.clone() for each in model.buffers()]
    mean = model.layers[1].running_mean.clone()
    dist.all_reduce(mean)
    mean /= dist.get_world_size()
    assert not torch.allclose(mean, own[0])
    with model.global_average():
        torch.testing.assert_close(model.layers[1].running_mean, mean if averaged else own[0])
        assert torch.equal(model.layers[1].num_batches_tracked, own[2])
    assert all(map(torch.equal, model.buffers(), own))


@pytest.mark.parametrize("averaged", [True, False])
def test_buffers_are_of_each_rank(ranks2: Ranks, averaged: bool) -> None:
    """A deviation: decent-dp averages them for good."""
    ranks2.run(buffers, averaged)


# --- averages, checkpoints ------------------------------------------------------------------------------------------


def averages() -> None:
    model: Any = decentral(mlp(), "ring")
    model.state_dict()  # all ranks are equal: nothing to warn of
    train(model, model, range(3))
    own, flat = values(model), torch.cat([each.flatten() for each in values(model)])
    everyone = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, flat)
    mean = torch.stack(everyone).mean(0)
    distances = (torch.stack(everyone) - mean).norm(dim=1)
    assert model.consensus_distance() == pytest.approx(float(distances.square().mean().sqrt()), rel=1e-5)
    with pytest.warns(UserWarning, match="parameters of this rank"):
        model.state_dict()
    with model.global_average():
        averaged = model.state_dict()
        torch.testing.assert_close(torch.cat([each.flatten() for each in averaged.values()]), mean)
        with pytest.raises(dp_compile.ReductionError, match="while parameters are the average"):
            model(mine(0)).sum().backward()
        averaged = copy.deepcopy(averaged)
    model.zero_grad()
    assert all(map(torch.equal, values(model), own))
    with pytest.raises(RuntimeError, match="not an average"):
        model.revert_global_avg()
    assert model.global_avg(will_revert=False, return_d2c=True) == pytest.approx(float(distances[dist.get_rank()]))
    model.state_dict()
    torch.testing.assert_close(torch.cat([each.flatten() for each in values(model)]), mean)
    # What was on its way is not mixed with the average, nor with what is loaded.
    plain = mlp()
    plain.load_state_dict(averaged)
    optimizer = torch.optim.SGD(plain.parameters(), lr=1.0)
    again = decentral(mlp(), "ring", lambda p: torch.optim.SGD(p, lr=1.0))
    train(again, again, range(1, 3))
    again.load_state_dict(averaged)
    for _ in range(2):
        optimizer.zero_grad()
        for each in (again, plain):
            each(mine(0)).square().mean().backward()
        optimizer.step()
        assert all(map(torch.equal, values(again), values(plain)))
        train(again, again, range(3, 5))
        again.global_avg(will_revert=False)
        plain.load_state_dict(again.state_dict())


def test_averages_and_checkpoints(ranks2: Ranks) -> None:
    ranks2.run(averages)


def goes_on_from_an_average() -> None:
    plain, again = mlp(), decentral(mlp(), "ring", lambda p: torch.optim.SGD(p, lr=1.0))
    train(again, again, range(3))
    again.global_avg(will_revert=False)
    plain.load_state_dict(again.state_dict())
    optimizer = torch.optim.SGD(plain.parameters(), lr=1.0)
    for each in (again, plain):
        each(mine(0)).square().mean().backward()
    optimizer.step()
    assert all(map(torch.equal, values(again), values(plain)))


def test_an_average_that_stays_is_not_mixed_with_what_was_sent_before(ranks4: Ranks) -> None:
    """Of two ranks what was sent before is that average."""
    ranks4.run(goes_on_from_an_average)


def changed_outside() -> list[str]:
    """Parameters that are changed between two steps, read in a graph of before, loaded over an average."""
    said: list[str] = []
    for as_views in (True, False):
        model: Any = decentral(mlp(), "ring", param_as_bucket_view=as_views)
        train(model, model, range(2))
        with model.global_average():
            loss = model(mine(0)).sum()
            with pytest.raises(dp_compile.ReductionError, match="what is loaded would be lost"):
                model.load_state_dict(mlp().state_dict())
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        model.zero_grad()
        said.clear()
        with mock.patch.object(mixing.logger, "warning", lambda text, *args: said.append(text % args)):
            train(model, model, range(2, 4))
            model.load_state_dict(mlp().state_dict())
            train(model, model, range(4, 6))
            assert not said
            for _ in range(2):
                with torch.no_grad():
                    model[2].weight.clamp_(-0.1, 0.1)
                train(model, model, range(6, 7))
        dp_compile.unreplicate(model)
    return said


def test_changes_between_steps_are_told(ranks2: Ranks) -> None:
    for said in ranks2.run(changed_outside):
        (only,) = said
        assert only.startswith("2.weight changed between two steps, after being sent to be mixed: 0 % of the change")


class Counts(torch.optim.Optimizer):
    """Counts its steps in its groups, and takes a shorter one each time."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "steps": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["steps"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=group["lr"] / group["steps"])


@pytest.mark.usefixtures("one_rank")
def test_what_an_optimizer_keeps_in_its_groups() -> None:
    """Is kept where it has all parameters of a group in a step, else refused: it would count buckets, or nothing."""
    model: Any = decentral(mlp(), optimizer=Counts, bucket_size_in_mb=25)
    optimizer = mixing_of(model).optimizer
    plain = mlp()
    other = Counts(plain.parameters())
    for step in range(3):
        train(model, model, range(step, step + 1))
        plain(mine(step)).square().mean().backward()
        other.step()
        other.zero_grad()
    assert optimizer.param_groups[0]["steps"] == 3
    assert all(map(torch.equal, values(model), values(plain)))
    model = decentral(mlp(), optimizer=Counts)
    with pytest.raises(dp_compile.ReductionError, match="changed 'steps' of a parameter group"):
        train(model, model, range(1))


def accumulated() -> None:
    """The average of two backwards, captured and not; a pickle and a copy are plain modules."""
    torch._dynamo.reset()
    found = []
    for run_by in (compiled, not_compiled):
        model: Any = dp_compile.decentralized.DecentralizedDataParallel(
            mlp(), adamw_of_names, topology="ring", config=AOT
        )
        run = run_by(model)
        for step in range(3):
            with model.no_sync():
                (run(mine(step)).square().mean() / 2).backward()
            (run(mine(step + 7)).square().mean() / 2).backward()
            assert all(each.grad is None for each in model.parameters())
        found.append(values(model))
        assert model.get_lr() == 0.01
        assert type(copy.deepcopy(model.module)) is nn.Sequential
    assert all(map(torch.equal, *found))
    twice = decentral(mlp(), "ring")
    for step in range(3):
        twice(torch.cat([mine(step), mine(step + 7)])).square().mean().backward()
    for one, other in zip(values(twice), found[0], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


def adamw_of_names(named: Any) -> torch.optim.Optimizer:
    return adamw([parameter for _, parameter in named])


def test_accumulation(ranks2: Ranks) -> None:
    ranks2.run(accumulated)


@pytest.mark.usefixtures("one_rank")
def test_reductions_that_do_not_run_are_not_measured() -> None:
    with pytest.raises(dp_compile.ModuleError, match="decentralized module has none"):
        with dp_compile.measure(decentral(mlp(), "ring")):
            pass


# --- refused, and lost ----------------------------------------------------------------------------------------------


def said_by(error: type[Exception], model: nn.Module, **options: Any) -> str:
    with pytest.raises(error) as raised:
        decentral(model, **options)
    assert type(model) is nn.Sequential  # as it was
    return str(raised.value)


def different() -> list[str]:
    """Another topology; an edge with another weight; a mistake on one rank; an option."""
    rank, edges = dist.get_rank(), lambda weight: Topology("own", 2, ((Edge((0, 1), weight),),))
    found = [said_by(dp_compile.DesyncError, mlp(), topology=("ring", "complete")[rank])]
    found += [said_by(dp_compile.DesyncError, mlp(), topology=edges(0.5 + rank / 10))]
    kind = dp_compile.ConfigError if rank else dp_compile.DesyncError
    found += [said_by(kind, mlp(), topology=("ring", "rinf")[rank])]
    found += [said_by(dp_compile.DesyncError, mlp(), grad_clip_norm=float(rank))]
    return found


def test_ranks_that_differ_refuse_at_the_start(ranks2: Ranks) -> None:
    for rank, (named, weighted, mistaken, clipped) in enumerate(ranks2.run(different)):
        assert "rank 1 differs from rank 0: topology is " in named
        assert '"complete' in named
        assert "rank 1 differs from rank 0: topology is " in weighted
        assert "one of complete, ring" in mistaken
        assert rank or "rank 1 cannot go on" in mistaken
        assert "grad_clip_norm is 1.0 there, 0.0 on rank 0" in clipped


@pytest.mark.usefixtures("one_rank")
def test_refused() -> None:
    def refused(text: str, **options: Any) -> None:
        assert text in said_by(dp_compile.ConfigError, mlp(), **options)

    other = nn.Parameter(torch.zeros(1))
    refused("1 parameters that are not of this module", optimizer=torch.optim.SGD([other]))
    refused("LBFGS cannot update", optimizer=lambda named: torch.optim.LBFGS([each for _, each in named]))
    refused("must be a torch.optim.Optimizer, got int", optimizer=3)
    refused("clip must be one of bucket, global", clip="all")
    refused("grad_clip_norm must be a number, 0 or more, got -1", grad_clip_norm=-1)
    refused("bucket_size_in_mb must be a number, above 0", bucket_size_in_mb=0)
    refused("of 4 ranks, the group has 1", topology=topology("ring", 4))
    policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    config = dp_compile.ReplicateConfig(mp_policy=policy, static_graph=True, gradient_as_bucket_view=True)
    refused("static_graph, gradient_as_bucket_view, reduce_dtype of mp_policy of config", config=config)
    model: Any = decentral(mlp())
    with pytest.raises(dp_compile.ReductionError, match="retain_graph=True"):
        model(mine(0)).sum().backward(retain_graph=True)
    with pytest.raises(dp_compile.ConfigError, match="decentralized module already"):
        dp_compile.optim.in_backward(model, adamw(model.parameters()))
    with pytest.raises(dp_compile.ConfigError, match="finite number, got nan"):
        model.set_adaptive_factor(float("nan"))
    with pytest.raises(dp_compile.ModuleError, match="is decentralized: no gradient of it is"):
        model.register_comm_hook(None, lambda state, bucket: None)
    with pytest.raises(dp_compile.ModuleError, match="replicated"):
        decentral(model)
    train(model, model, range(2))
    model[0].weight.data = model[0].weight.data.clone()
    with pytest.raises(dp_compile.ReductionError, match=r"0\.weight lies in other memory"):
        train(model, model, range(1))
    dp_compile.unreplicate(model)
    assert type(model) is nn.Sequential


def killed() -> str:
    model = decentral(mlp(), "ring")
    train(model, model, range(3))
    if dist.get_rank() == 1:
        os._exit(0)
    with pytest.raises(dp_compile.CommunicationError) as raised:
        train(model, model, range(3))
    return str(raised.value)


def test_a_killed_neighbour_is_named(own_ranks: Ranks) -> None:
    ok, said = own_ranks.outcomes(killed)[0]
    assert ok, said
    assert "the parameters of rank(s) 1, of edge (0, 1) of topology 'ring', did not arrive in step" in said
    assert "rank(s) 1 did not come" in said
