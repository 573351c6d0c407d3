"""Ranks that mix parameters: topologies, D-PSGD in NumPy, decent-dp itself, and where we deviate."""

import copy
import os
from functools import partial
from itertools import pairwise
from operator import attrgetter

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from on_ranks import on_ranks
from parity import AOT, compile_whole, not_compiled
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

import dp_compile
from dp_compile.decentralized import decentralize
from dp_compile.decentralized.topologies import Edge, Topology, topology
from dp_compile.errors import ConfigError

SMALL_MB = 1e-4
"""Buckets of about one layer."""


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)


def mlp(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3, bias=False), nn.Tanh(), nn.Linear(3, 2)).to(dtype)


def batch(step, rank, width=5):
    return np.random.default_rng(1000 * step + rank).standard_normal((4, width))


def mine(step, dtype=torch.float32, width=5):
    return torch.tensor(batch(step, dist.get_rank(), width), dtype=dtype)


def decentral(model, topology="ring", optimizer=adamw, **options):
    return decentralize(
        model, topology=topology, optimizer=optimizer, **{"bucket_size_in_mb": SMALL_MB, "config": AOT} | options
    )


def values(model):
    return [each.detach().clone() for each in model.parameters()]


def train(model, run, steps):
    for step in steps:
        run(mine(step, next(model.parameters()).dtype)).square().mean().backward()
        assert all(each.grad is None for each in model.parameters())


def by_formula(start, matrix, world_size, steps, **sgd):
    """Parameters of all ranks, stacked, after each step of SGD: x(t + 1) = W(t) x(t) - update(gradient at x(t))."""
    x = [np.stack([each] * world_size) for each in start]
    velocity = [np.zeros_like(each) for each in x]
    for step in range(steps):
        found = [gradients([each[rank] for each in x], batch(step, rank)) for rank in range(world_size)]
        for place in range(len(x)):
            gradient = np.stack([found[rank][place] for rank in range(world_size)])
            x[place] = np.tensordot(matrix(step), x[place], 1)
            gradient = gradient + sgd["weight_decay"] * x[place]
            velocity[place] = gradient if step == 0 else sgd["momentum"] * velocity[place] + gradient
            x[place] = x[place] - sgd["lr"] * velocity[place]
        yield x


def gradients(parameters, x):
    """Of the mean of the squares of `mlp`'s outputs."""
    w1, b1, w2, w3, b3 = parameters
    first = np.tanh(x @ w1.T + b1)
    second = np.tanh(first @ w2.T)
    out = second @ w3.T + b3
    d_out = 2 * out / out.size
    d_second = (d_out @ w3) * (1 - second**2)
    d_first = (d_second @ w2) * (1 - first**2)
    return [d_first.T @ x, d_first.sum(0), d_second.T @ first, d_out.T @ second, d_out.sum(0)]


name_of = attrgetter("__name__")
SGD = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}


def alone_now_and_then(world_size):
    """Weighted, of three ranks, and of one."""
    three, last = Edge((0, 1, 2), 0.5), world_size - 1
    others = tuple(Edge((rank,), 1.0) for rank in range(3, world_size))
    ends = (Edge((0, last), 0.7), *(Edge((rank,), 1.0) for rank in range(1, last)))
    return Topology("alone now and then", world_size, ((three, *others), ends))


@on_ranks("ranks4")
def test_as_d_psgd_in_numpy():
    """All topologies for 12 steps, by SGD with momentum and decay of the mixed parameters."""
    steps, world_size, rank = 12, dist.get_world_size(), dist.get_rank()
    names = ("complete", "ring", "one-peer-exp", "alternating-exp-ring")
    for chosen in (*(topology(name, world_size, 2) for name in names), alone_now_and_then(world_size)):
        model = mlp(torch.float64)
        start = [each.detach().numpy().copy() for each in model.parameters()]
        decentral(model, chosen, torch.optim.SGD(model.parameters(), **SGD))
        run = compile_whole(model) if chosen.name == "ring" else model
        for step, expected in enumerate(by_formula(start, chosen.mixing_matrix, world_size, steps, **SGD)):
            train(model, run, range(step, step + 1))
            for ours, theirs in zip(values(model), expected, strict=True):
                np.testing.assert_allclose(ours.numpy(), theirs[rank], rtol=0, atol=1e-12, err_msg=f"{chosen} {step}")
        report = dp_compile.report(model)
        assert (report.backwards, report.captures) == ({"eager hooks": steps}, ())
        assert f"topology {chosen.name}, period {chosen.period}" in " ".join(str(report).split())
        dp_compile.unreplicate(model)
    one_peer = topology("one-peer-exp", world_size, 2)
    mixed = np.linalg.multi_dot([one_peer.mixing_matrix(step) for step in range(one_peer.period)])
    np.testing.assert_allclose(mixed, 1 / world_size)  # after a period each rank has averaged with all others


def as_theirs(name, world_size, steps):
    """A deviation: decent-dp starts its first exchange with edge 1 and goes on with edge 3."""
    edges = topology(name, world_size, 2).steps
    return Topology(name, world_size, tuple(edges[(step + (step > 1)) % len(edges)] for step in range(steps)))


def beside_decent_dp(option, names):
    from decent_dp.ddp import DecentralizedDataParallel
    from loguru import logger

    logger.disable("decent_dp")
    world_size, steps, worst = dist.get_world_size(), 8, 0.0
    for name in names:
        ours, other = mlp(), mlp()
        given = {"lr_scheduler_fn": halved} | DECENT_OPTIONS[option]
        factor, optimizer = given.pop("factor", 1.0), given.pop("optim_fn", adamw_of_names)
        theirs = DecentralizedDataParallel(other, topology=name, _local_world_size=2, optim_fn=optimizer, **given)
        chosen = as_theirs(name, world_size, steps)
        model = decentralize(ours, topology=chosen, optimizer=optimizer, config=AOT, **given)
        theirs.set_adaptive_factor(factor)
        model.set_adaptive_factor(factor)
        for step in range(steps):
            for each in (theirs, model):
                each(mine(step)).square().mean().backward()
            # Theirs does the first update in its second forward.
            if step:
                differences = [(one - two).abs().max() for one, two in zip(values(ours), values(other), strict=True)]
                worst = max(worst, float(max(differences)))
                assert model.get_lr() == theirs.get_lr()
        one, two = (each.global_avg(will_revert=True, return_d2c=True) for each in (model, theirs))
        assert one == pytest.approx(two, rel=1e-4, abs=1e-6)
        torch.testing.assert_close(values(ours), values(other), rtol=0, atol=1e-6)
        dp_compile.unreplicate(model)
    return worst


class Leaning(torch.optim.AdamW):
    """A deviation: decent-dp calls the hook for each bucket, and before the first step, with no parameters there."""

    @torch.no_grad()
    def pre_average_hook(self, edge, weight):
        for group in self.param_groups:
            for parameter in group["params"]:
                if not torch.equal(parameter.comm_buffer, parameter):
                    parameter.add_(parameter.comm_buffer, alpha=0.1 * weight + 0.01 * len(edge.ranks))


def adamw_of_names(named):
    return adamw([parameter for _, parameter in named])


halved = partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5)
DECENT_OPTIONS = {
    "plain": {},
    "clipped": {"grad_clip_norm": 0.05},
    "factor": {"factor": 0.3, "param_as_bucket_view": False},
    "hook before mixing": {
        "factor": 0.3,
        "optim_fn": lambda named: Leaning([each for _, each in named], lr=0.01),
        "bucket_size_in_mb": SMALL_MB,
    },
}


@pytest.mark.parametrize("option", DECENT_OPTIONS)
def test_as_decent_dp(ranks4, option):
    """Step by step, wherever it is right: learning rates, clipping, the factor and the distance to the average too."""
    pytest.importorskip("decent_dp", reason="decent-dp is not installed: pip install decent-dp==0.2.3")
    names = ["complete", "ring", "one-peer-exp", "alternating-exp-ring"] if option == "plain" else ["one-peer-exp"]
    assert max(ranks4.run(beside_decent_dp, option, names)) < 1e-6


def layouts():
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
    torch.testing.assert_close(*found, rtol=0, atol=1e-6)


class Tied(nn.Module):
    """Its weight is used twice, and one parameter never."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.unused = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def tied():
    """A deviation: decent-dp refuses the first, and never sends the bucket that ends with the second."""
    torch.manual_seed(0)
    model, plain = decentral(Tied(), "complete", lambda p: torch.optim.SGD(p, lr=0.1)), Tied()
    with torch.no_grad():
        model.unused.weight += dist.get_rank()
    for step in range(3):
        mixed = values(model)
        plain.zero_grad()
        for parameter, value in zip(plain.parameters(), values(model), strict=True):
            parameter.data.copy_(value)
        for each in mixed if step else ():  # nothing was sent before the first step
            dist.all_reduce(each)
            each /= dist.get_world_size()
        for each in (plain, model):
            each(mine(step)).square().mean().backward()
        for one, other, parameter in zip(values(model), mixed, plain.parameters(), strict=True):
            expected = other if parameter.grad is None else other - 0.1 * parameter.grad
            torch.testing.assert_close(one, expected, rtol=0, atol=1e-6)


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.filterwarnings("error:state_dict\\(\\) of a decentralized")
def test_one_rank():
    """A deviation: decent-dp divides by zero."""
    ours, theirs = decentral(mlp(), "one-peer-exp"), mlp()
    optimizer = adamw(theirs.parameters())
    train(ours, ours, range(3))
    for step in range(3):
        theirs(mine(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(values(ours), values(theirs), rtol=0, atol=1e-6)
    ours.state_dict()  # that of all ranks


def first_exchange():
    """SGD of a constant gradient: ranks are mixed after the first update, with edge 1. decent-dp leaves edge 2 out."""
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


def scaled():
    """Rank 1's gradient is not finite in step 2."""
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=100)
    plain = decentral(mlp(), "complete", grad_clip_norm=0.05)
    model, scales = decentral(mlp(), "complete", scaler=scaler, grad_clip_norm=0.05), []
    for step in range(5):
        before = values(model)
        spoilt = step == 2 and dist.get_rank() == 1
        scaler.scale(model(mine(step)).square().mean() * (float("inf") if spoilt else 1.0)).backward()
        plain(mine(step)).square().mean().backward()
        scales.append(scaler.get_scale())
        if step < 2:
            torch.testing.assert_close(values(model), values(plain), rtol=0, atol=1e-6)
        assert all(each.isfinite().all() for each in values(model))
        assert not all(map(torch.equal, before, values(model)))  # mixed, if not updated
    return scales


def test_ranks_agree_on_the_scale(ranks2):
    """A deviation: with decent-dp each rank has another scale, and each bucket is left out by itself."""
    # Steps that have the infinity: rank 1 halves the scale in step 2, and rank 0 hears of it with the parameters.
    assert ranks2.run(scaled) == [[64.0, 64.0, 64.0, 32.0, 32.0], [64.0, 64.0, 32.0, 32.0, 32.0]]


def buffers():
    """A deviation: decent-dp averages them for good."""
    normed = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model = decentral(normed, "complete", sync_buffer_in_global_avg=True)
    train(model, model, range(3))
    own = [each.clone() for each in model.buffers()]
    mean = model[1].running_mean.clone()
    dist.all_reduce(mean)
    mean /= dist.get_world_size()
    assert not torch.allclose(mean, own[0])
    with model.global_average():
        torch.testing.assert_close(model[1].running_mean, mean)
        assert torch.equal(model[1].num_batches_tracked, own[2])
    assert all(map(torch.equal, model.buffers(), own))


def averages():
    model = decentral(mlp(), "ring")
    model.state_dict()  # all ranks are equal: nothing to warn of
    train(model, model, range(3))
    own, flat = values(model), torch.cat([each.flatten() for each in values(model)])
    everyone = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, flat)
    mean = torch.stack(everyone).mean(0)
    distances = (torch.stack(everyone) - mean).norm(dim=1)
    with pytest.warns(UserWarning, match="parameters of rank"):
        model.state_dict()
    with model.global_average():
        averaged = model.state_dict()
        torch.testing.assert_close(torch.cat([each.flatten() for each in averaged.values()]), mean)
        with pytest.raises(dp_compile.ReductionError, match="while parameters hold the global average"):
            model(mine(0)).sum().backward()
        averaged = copy.deepcopy(averaged)
    model.zero_grad()
    assert all(map(torch.equal, values(model), own))
    with pytest.raises(RuntimeError, match="no global average to revert"):
        model.revert_global_avg()
    assert model.global_avg(will_revert=False, return_d2c=True) == pytest.approx(float(distances[dist.get_rank()]))
    model.state_dict()
    torch.testing.assert_close(torch.cat([each.flatten() for each in values(model)]), mean)
    # What was on its way is not mixed with what is loaded.
    again = decentral(mlp(), "ring", lambda p: torch.optim.SGD(p, lr=1.0))
    train(again, again, range(1, 3))
    again.load_state_dict(averaged)
    steps_as_alone(again)


def steps_as_alone(model):
    """The next step of a module is that of this rank alone."""
    plain = mlp()
    plain.load_state_dict(dict(zip(plain.state_dict(), values(model), strict=True)))
    optimizer = torch.optim.SGD(plain.parameters(), lr=1.0)
    for each in (model, plain):
        each(mine(0)).square().mean().backward()
    optimizer.step()
    assert all(map(torch.equal, values(model), values(plain)))


def goes_on_from_an_average():
    """Of four ranks: of two, what was sent before is that average."""
    model = decentral(mlp(), "ring", lambda p: torch.optim.SGD(p, lr=1.0))
    train(model, model, range(3))
    model.global_avg(will_revert=False)
    steps_as_alone(model)


def changed_outside():
    """Parameters that are changed between two steps, read in a graph of before, loaded over an average."""
    for as_views in (True, False):
        model = decentral(mlp(), "ring", param_as_bucket_view=as_views)
        train(model, model, range(2))
        before = model(mine(0)).sum()
        model.global_avg(will_revert=False)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            before.backward()
        model.zero_grad()
        with model.global_average():
            loss = model(mine(0)).sum()
            with pytest.raises(dp_compile.ReductionError, match="would discard the loaded values"):
                model.load_state_dict(mlp().state_dict())
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        model.zero_grad()
        train(model, model, range(2, 4))
        model.load_state_dict(mlp().state_dict())
        train(model, model, range(4, 6))
        with torch.no_grad():
            model[2].weight.clamp_(-0.1, 0.1)
        with pytest.raises(dp_compile.ReductionError, match=r"2\.weight changed between two steps"):
            train(model, model, range(6, 7))
        dp_compile.unreplicate(model)


def accumulated():
    """The average of two backwards, compiled and not; a copy is a plain module."""
    found = []
    for compile_model in (compile_whole, not_compiled):
        model = decentral(mlp())
        run = compile_model(model)
        for step in range(3):
            with dp_compile.no_sync(model):
                (run(mine(step)).square().mean() / 2).backward()
            (run(mine(step + 7)).square().mean() / 2).backward()
        found.append(values(model))
        copied = copy.deepcopy(model)
        assert type(copied) is nn.Sequential
        copied.load_state_dict(copied.state_dict())  # its hooks know that it is another module
    assert all(map(torch.equal, *found))
    twice = decentral(mlp(), "ring")
    for step in range(3):
        twice(torch.cat([mine(step), mine(step + 7)])).square().mean().backward()
    torch.testing.assert_close(values(twice), found[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("scenario", [layouts, tied, buffers, averages, changed_outside, accumulated], ids=name_of)
def test_on_two_ranks(ranks2, scenario):
    ranks2.run(scenario)


@pytest.mark.parametrize("scenario", [first_exchange, goes_on_from_an_average], ids=name_of)
def test_on_four_ranks(ranks4, scenario):
    ranks4.run(scenario)


def said_by(error, **options):
    model = mlp()
    with pytest.raises(error) as raised:
        decentral(model, **options)
    assert type(model) is nn.Sequential  # as it was
    return str(raised.value)


@on_ranks("ranks2")
def test_ranks_that_differ_refuse_at_the_start():
    rank, edges = dist.get_rank(), lambda weight: Topology("own", 2, ((Edge((0, 1), weight),),))
    differs = "rank 1 differs from rank 0: topology is "
    assert differs in said_by(dp_compile.DesyncError, topology=edges(0.5 + rank / 10))
    mistaken = said_by((dp_compile.DesyncError, ConfigError)[rank], topology=("ring", "rinf")[rank])
    assert "one of complete, ring" in mistaken
    assert rank or "rank 1 failed" in mistaken
    clipped = said_by(dp_compile.DesyncError, grad_clip_norm=float(rank))
    assert "grad_clip_norm is 1.0 there, 0.0 on rank 0" in clipped


@pytest.mark.usefixtures("one_rank")
def test_refused():
    policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    config = dp_compile.ReplicateConfig(
        mp_policy=policy, static_graph=True, gradient_as_bucket_view=True, init_sync_buffers=False
    )
    own = type("Own", (torch.optim.LBFGS,), {})
    for text, name, value in (
        ("0 of them and 1 others", "optimizer", torch.optim.SGD([nn.Parameter(torch.zeros(1))])),
        ("Own cannot update", "optimizer", lambda named: own([each for _, each in named])),
        ("must be a torch.optim.Optimizer, got int", "optimizer", 3),
        ("grad_clip_norm must be a number >= 0, got -1", "grad_clip_norm", -1),
        ("bucket_size_in_mb must be a number > 0", "bucket_size_in_mb", 0),
        ("local_world_size, both >= 1, got (1, 0)", "local_world_size", 0),
        ("topology must be of 1 ranks, the size of the group, got 'ring, 4 ranks'", "topology", topology("ring", 4)),
        (
            "got ['static_graph', 'gradient_as_bucket_view', 'init_sync_buffers', 'reduce_dtype of mp_policy']",
            "config",
            config,
        ),
    ):
        assert text in said_by(ConfigError, **{name: value})
    model = decentral(mlp())
    train(model, model, range(2))
    x = torch.ones(2, 5, requires_grad=True)
    for text, call in (
        ("no gradient of this module is reduced", lambda: dp_compile.measure(model).__enter__()),
        ("no gradient of this module is reduced", lambda: dp_compile.explain(model)),
        (
            "an optimizer steps in its backward already",
            lambda: dp_compile.optim.in_backward(model, adamw(model.parameters())),
        ),
        ("finite number, got nan", lambda: model.set_adaptive_factor(float("nan"))),
        ("no gradient of Sequential is reduced", lambda: model.register_comm_hook(None, print)),
        ("replicated", lambda: decentral(model)),
        (
            "step at the end of each backward.*use_reentrant=False",
            lambda: checkpoint(model, x, use_reentrant=True).sum().backward(),
        ),
    ):
        with pytest.raises(dp_compile.DPCompileError, match=text):
            call()
    dp_compile.unreplicate(model)
    assert type(model) is nn.Sequential


@on_ranks("ranks2")
def test_memory_that_moved_and_a_step_that_failed():
    """Memory that is not mixed is an error before anything is; a step that fails half way is one in the next."""
    model = decentral(mlp(), "ring", Failing)
    train(model, model, range(2))
    weight = model[0].weight.data
    model[0].weight.data = weight.clone()
    before = values(model)
    with pytest.raises(dp_compile.ReductionError, match=r"the storage of parameter 0\.weight was replaced"):
        train(model, model, range(1))
    assert all(map(torch.equal, values(model), before))
    model[0].weight.data = weight
    model.zero_grad()
    Failing.fails = True
    with pytest.raises(ZeroDivisionError):
        train(model, model, range(1))
    Failing.fails = False
    with pytest.raises(dp_compile.ReductionError, match=r"step 2 .*\(ZeroDivisionError\).*Restore a checkpoint"):
        train(model, model, range(1))


class Failing(torch.optim.SGD):
    fails = False

    def step(self, closure=None):
        return 1 / 0 if self.fails else super().step(closure)


def killed():
    model = decentral(mlp(), "ring")
    train(model, model, range(3))
    if dist.get_rank() == 1:
        os._exit(0)
    text = r"the parameters of rank\(s\) 1, of edge \(0, 1\) of topology 'ring', did not arrive in step"
    with pytest.raises(dp_compile.CommunicationError, match=rf"{text}(.|\n)*rank\(s\) 1 did not reach this step"):
        train(model, model, range(3))


def test_a_killed_neighbour_is_named(own_ranks):
    assert own_ranks.outcomes(killed)[0] == (True, None)


NAMED = ("complete", "ring", "one-peer-exp", "alternating-exp-ring")


@st.composite
def weighted_topologies(draw):
    """Any edges of any size, and any weight."""
    world_size = draw(st.integers(1, 9))
    steps = []
    for _ in range(draw(st.integers(1, 3))):
        order = draw(st.permutations(range(world_size)))
        cuts = sorted(draw(st.sets(st.integers(1, max(1, world_size - 1)), max_size=3)) | {0, world_size})
        groups = [order[a:b] for a, b in pairwise(cuts) if order[a:b]]
        steps.append([Edge(tuple(g), draw(st.floats(0, 1)) if len(g) > 1 else 1.0) for g in groups])
    return Topology("drawn", world_size, tuple(map(tuple, steps)))


BUILT_IN = st.builds(
    lambda name, bits, local: topology(name, local << bits, local),
    st.sampled_from(NAMED),
    st.integers(1, 4),
    st.sampled_from([1, 2, 4]),
)


@given(st.one_of(weighted_topologies(), BUILT_IN), st.integers(0, 99))
def test_what_every_topology_has(chosen, step):
    n = chosen.world_size
    for edges in chosen.steps:
        assert sorted(rank for edge in edges for rank in edge.ranks) == list(range(n))
    matrix = chosen.mixing_matrix(step)
    assert np.all(matrix >= -1e-15)
    np.testing.assert_allclose(matrix.sum(0), 1)
    np.testing.assert_allclose(matrix, matrix.T)
    edges = chosen.steps[step % chosen.period]
    for rank, edge in enumerate(each[step % chosen.period] for each in map(chosen.edges_of, range(n))):
        assert edge in edges
        assert matrix[rank, rank] == pytest.approx(edge.weight)
        for other in set(edge.ranks) - {rank}:
            assert matrix[rank, other] == pytest.approx((1 - edge.weight) / (len(edge.ranks) - 1))
    used = {edge.ranks for edges in chosen.steps for edge in edges if len(edge.ranks) > 1}
    assert set(chosen.groups()) == used
    assert len(chosen.groups()) == len(used)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: topology("ring", 5), "must be even, got 5"),
        (lambda: topology("one-peer-exp", 6), "world_size .* must be a power of two, 2 or more, got 6"),
        (lambda: topology("alternating-exp-ring", 12, 4), "number of nodes .* must be a power of two, .*, got 3"),
        (lambda: topology("complete", 6, 4), "a multiple of local_world_size"),
        (lambda: topology("torus", 4), r"one of complete, ring, one-peer-exp, alternating-exp-ring.*got 'torus'"),
        (lambda: Edge((1, 1), 0.5), r"distinct numbers >= 0.*\(1, 1\)"),
        (lambda: Edge((0, 1), 1.5), "between 0 and 1"),
        (lambda: Topology("own", 2, ()), "steps of topology 'own' must be one or more"),
        (lambda: Topology("own", 3, ((Edge((0, 1), 0.5),),)), "step 0 of topology .*, got 'rank 2 in 0 edges'"),
        (
            lambda: Topology("own", 2, ((Edge((0, 1), 0.5),), (Edge((0, 1), 0.5), Edge((1,), 1.0)))),
            "step 1 of topology .*, got 'rank 1 in 2 edges'",
        ),
    ],
)
def test_what_is_refused(make, said):
    with pytest.raises(ConfigError, match=said):
        make()
