"""An optimizer that updates in the backward, in all its ways: the same parameters as without; errors with a remedy."""

import copy
import os
import pickle
import random
from contextlib import nullcontext
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from parity import Block, Untraceable, batch, compile_blocks, compile_whole, not_compiled, poisoned
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint
from twins import ADAMW, GIVEN, SGD, SMALL, Last, Net, id_of, made, two_groups, waiting

import dp_compile
from dp_compile.config import CHECK_VARIABLE
from dp_compile.optim import full_state_dict

OPTIMIZERS = {
    "sgd": SGD,
    "adamw": ADAMW,
    "adamw_fused": two_groups(torch.optim.AdamW, lr=torch.tensor(0.01), fused=True),
    "adafactor": two_groups(torch.optim.Adafactor, lr=0.01),
}


def train(way, name, max_norm, compile_model):
    both = made(way, make=OPTIMIZERS[name], beside_ddp=True, compile_model=compile_model, max_norm=max_norm)
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 2, gamma=0.5) for each in (both.mine, both.other)]
    for number in range(5):
        both.backward(number)
        if way == "whole":
            assert all(each.grad is None for each in both.ours.parameters())
        both.step()
        for scheduler in schedulers:
            scheduler.step()
        both.compare()
    if way == "sharded":
        mine, whole = (
            sum(each.numel() for state in optimizer.state.values() for each in state.values() if each.dim())
            for optimizer in (both.mine, both.other)
        )
        dist.all_reduce(total := torch.tensor(mine))
        assert int(total) == whole
        assert mine <= 1.2 * whole / dist.get_world_size() + 64
        assert f"sharded over {dist.get_world_size()} ranks" in dp_compile.report(both.ours).updates
    return both.updated, len(dp_compile.report(both.ours).captures)


@pytest.mark.parametrize(
    ("way", "name", "max_norm", "compile_model"),
    [
        ("whole", "adamw", None, not_compiled),
        ("whole", "adamw_fused", None, compile_whole),
        ("whole", "adafactor", None, compile_whole),
        ("sharded", "sgd", None, compile_whole),
        ("sharded", "adamw", 0.05, compile_whole),
        ("sharded", "adamw", 1e3, not_compiled),
    ],
    ids=id_of,
)
def test_the_same_parameters_as_ddp(ranks, way, name, max_norm, compile_model):
    """Two parameter groups and a scheduler; another learning rate compiles nothing."""
    expected = (10, 1) if compile_model is compile_whole else (0, 0)
    assert set(ranks.run(train, way, name, max_norm, compile_model)) == {expected}


class Broken(Net):
    """Its backward has a graph break, so hooks reduce eagerly."""

    def forward(self, x):
        return super().forward(Untraceable.apply(super().forward(x)))


class Reentrant(Net):
    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True) + x
        return self.norm(x)


FEATURES = {
    ("whole", "mixed precision"): ({"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}, 10),
    ("whole", "compiled in parts"): (
        {"build": lambda: nn.Sequential(Block(), Block()), "compile_model": compile_blocks},
        8,
    ),
    ("whole", "reentrant checkpoint"): ({"build": Reentrant, "compile_theirs": True}, 10),
    ("sharded", "optimal buckets"): ({"config": dp_compile.ReplicateConfig(backend="aot_eager")}, 10),
    ("sharded", "not one graph"): ({"build": Broken}, 0),
    ("sharded", "tied weights"): ({"build": lambda: Net(tied=True)}, 9),
    ("sharded", "channels last"): ({"build": Last, "make": partial(torch.optim.AdamW, lr=0.01)}, 5),
}
"""With how many parameters compiled backwards update."""


@pytest.mark.parametrize(("way", "name"), FEATURES)
@on_ranks("ranks")
def test_features(way, name):
    options, updated = FEATURES[way, name]
    both = made(way, **options)
    both.train(*range(4))
    assert both.updated == updated


class Spare(Net):
    """In some steps no rank uses `spare`, in some the first rank only."""

    def __init__(self):
        super().__init__()
        self.spare = nn.Linear(6, 6)
        self.users = 2

    def forward(self, x):
        return super().forward(self.spare(x) if dist.get_rank() < self.users else x)


def accumulated(both):
    """Then two forwards before their backwards."""
    both.backward(20, sync=False)
    both.train(21)
    outputs = [[run(batch(each)) for each in (22, 23)] for run in (both.run, both.run_theirs)]
    for whose, ((first, second), model) in enumerate(zip(outputs, (both.ours, both.theirs), strict=True)):
        with dp_compile.no_sync(model):
            both.scaled(whose, first).backward()
        both.scaled(whose, second).backward()
    both.step()
    both.compare()


def falls_back(both):
    """Not captured on one rank; gradients of before are not cleared."""
    for number in (30, 31):
        both.backward(number, broken=number == 30 and dist.get_rank() == 0)
        both.step(zero=False)
        both.compare()


def unused(both):
    """What no rank uses is not updated: no weight decay, no moments."""
    ours = both.ours
    for number, users in enumerate((0, 1, 2, 0, 2), 40):
        ours.users = both.theirs.users = users
        before = ours.spare.weight.clone()
        both.backward(number)
        both.step()
        both.compare()
        assert torch.equal(before, ours.spare.weight) is (users == 0)


def frozen(both):
    for number, requires in ((50, False), (51, True)):
        for model in (both.ours, both.theirs):
            model.layers[1].weight.requires_grad_(requires)
        both.train(number)


def overflows(both):
    """On one rank, in that rank's part; captured on it or not: no rank steps."""
    for broken in (False, True):
        before = [each.clone() for each in both.ours.parameters()]
        spoiled = []
        if dist.get_rank() == 0:
            for model in (both.ours, both.theirs):
                spoiled.append([*model.parameters()][-1].register_hook(lambda grad: grad * torch.inf))
        both.backward(60, broken=broken and dist.get_rank() == 0)
        for each in spoiled:
            each.remove()
        both.step()
        assert all(map(torch.equal, before, both.ours.parameters()))
        both.train(61)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ZeroDivisionError


def fails(both):
    """On every rank, as its backward starts."""
    for run, optimizer in ((both.run, both.mine), (both.run_theirs, both.other)):
        with pytest.raises(ZeroDivisionError):
            Fails.apply(run(batch(80))).square().mean().backward()
        optimizer.zero_grad()
    both.train(81)


def reloads(both):
    for model, optimizer in ((both.ours, both.mine), (both.theirs, both.other)):
        model.load_state_dict(copy.deepcopy(model.state_dict()))
        optimizer.load_state_dict(copy.deepcopy(full_state_dict(optimizer)))
    both.train(82)


def reads(both):
    """Forwards without a backward, compiled and not, evaluation; another rate, a step without gradients."""
    for model, run, optimizer in ((both.ours, both.run, both.mine), (both.theirs, both.run_theirs, both.other)):
        for call in (run, model):
            call(batch(83))
        model.eval()
        with torch.no_grad():
            run(batch(83))
        model.train()
        assert all(each.isfinite().all() for each in model.state_dict().values())
        for group in optimizer.param_groups:
            group["lr"] *= 0.5
        optimizer.step()
        optimizer.zero_grad()
    both.train(84)


KINDS = (accumulated, falls_back, unused, frozen, fails, reloads, reads)


def every_kind_of_step(way, max_norm, has_scaler, kinds=KINDS):
    both = made(way, Spare, ADAMW, max_norm=max_norm, scaled=has_scaler, find_unused_parameters=True)
    both.train(0)
    for kind in (*kinds, *([overflows] if has_scaler else [])):
        kind(both)
    both.train(70)


@pytest.mark.parametrize(
    ("way", "max_norm", "has_scaler"),
    [
        ("whole", None, False),
        ("sharded", None, False),
        ("sharded", 0.05, True),
        pytest.param("overlapping", None, False, marks=pytest.mark.nightly),
        pytest.param("next forward", 0.05, True, marks=pytest.mark.nightly),
    ],
)
def test_every_kind_of_step(ranks2, way, max_norm, has_scaler):
    """With parameters that are NaN as long as they are in flight, and compared between ranks after each step."""
    ranks2.run(in_way, every_kind_of_step, way, max_norm, has_scaler)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_many_orders(ranks2):
    draw = random.Random(0)
    for _ in range(60):
        way, kinds = draw.choice([*GIVEN]), draw.choices(KINDS, k=draw.randint(2, 6))
        max_norm = draw.choice([None, 0.05]) if "shard" in GIVEN[way] else None
        ranks2.run(in_way, every_kind_of_step, way, max_norm, "shard" in GIVEN[way] and draw.random() < 0.5, kinds)


@mock.patch.dict(os.environ, {CHECK_VARIABLE: "1"})
def in_way(scenario, way, *args):
    with poisoned() if "overlap_forward" in GIVEN[way] else nullcontext():
        scenario(way, *args)


def of_several(way):
    """Two modules in one backward, and two optimizers of one module, one of which gets a group later."""
    torch.manual_seed(0)

    def half(number, model):
        return [each for place, each in enumerate(model.parameters()) if place % 2 == number]

    def make(parameters):
        return torch.optim.AdamW([*parameters][:8:2], lr=0.01)

    pairs = [made(way, make=make), made(way, make=SGD)]
    first = pairs[0]
    more = [torch.optim.SGD(half(1, model), lr=0.1, momentum=0.9) for model in (first.ours, first.theirs)]
    dp_compile.optim.in_backward(first.ours, more[0])
    for number in range(4):
        if number == 2:
            for model, optimizer in ((first.ours, first.mine), (first.theirs, first.other)):
                optimizer.add_param_group({"params": half(0, model)[4:], "lr": 0.5})
        for ours in (True, False):
            inner, outer = (each.run if ours else each.run_theirs for each in pairs)
            outer(inner(batch(number))).square().mean().backward()
        for each in pairs:
            each.step()
        for optimizer in more:
            optimizer.step()
            optimizer.zero_grad()
        for each in pairs:
            each.compare()
    assert len(full_state_dict(first.mine)["state"]) == 5


def life(way):
    """Warmed up; fails half way and goes on from a checkpoint; is taken out, and its module; and is there once more."""
    both = made(way, make=ADAMW)
    both.nearly = True
    before = [each.clone() for each in both.ours.parameters()]
    dp_compile.warmup(both.ours, [batch(0)], lambda x: both.run(x).square().mean())
    assert all(map(torch.equal, before, both.ours.parameters()))
    assert not both.mine.state
    captures = len(dp_compile.report(both.ours).captures)
    both.train(0, 1)
    assert captures == len(dp_compile.report(both.ours).captures)
    assert both.updated == 10

    state = copy.deepcopy((full_state_dict(both.mine), both.ours.state_dict()))
    assert state[0].keys() == both.other.state_dict().keys()
    for group in both.mine.param_groups:
        group["betas"] = (0.9, None)
    with pytest.raises(TypeError):
        both.backward(2)
    for act in (both.mine.step, lambda: both.run(batch(2)).sum().backward()):
        with pytest.raises(dp_compile.ReductionError, match=r"after the optimizer had updated.*load_state_dict"):
            act()
    both.mine.load_state_dict(state[0])
    both.ours.load_state_dict(state[1])
    both.other.zero_grad()
    both.train(2)

    second = ADAMW(both.ours.parameters())
    with pytest.raises(dp_compile.ConfigError, match=r"remove_in_backward\(other_optimizer\)"):
        dp_compile.optim.in_backward(both.ours, second)
    dp_compile.optim.remove_in_backward(both.mine)
    both.train(3)  # it steps as any optimizer does
    with pytest.raises(dp_compile.ConfigError, match="does not update in the backward"):
        dp_compile.optim.remove_in_backward(both.mine)
    whole = copy.deepcopy(both.mine.state_dict())
    torch.testing.assert_close(whole, both.other.state_dict())
    dp_compile.optim.in_backward(both.ours, second, **GIVEN[way])
    second.load_state_dict(whole)
    both.mine = second
    both.train(4, 5)
    assert both.updated == 10

    for model in (both.ours, both.theirs):
        dp_compile.unreplicate(model)
        model(torch.ones(3, 6)).square().mean().backward()
    if "shard" in GIVEN[way]:  # it has a part of the state
        with pytest.raises(dp_compile.ReductionError, match="no longer replicated"):
            both.mine.step()
        both.mine.zero_grad()
        both.other.zero_grad()
    else:
        both.step()
        both.compare()
    for number, given in enumerate((GIVEN[way], {}), 6):
        for model in (both.ours, both.theirs):
            dp_compile.replicate(model, config=dp_compile.ReplicateConfig(backend="aot_eager", bucket_cap_mb=1e-4))
        dp_compile.optim.in_backward(both.ours, both.mine, **given)
        both.train(number)
        for model in (both.ours, both.theirs):
            dp_compile.unreplicate(model)
    assert len(full_state_dict(both.mine)["state"]) == 10


@pytest.mark.parametrize(
    ("scenario", "way"),
    [
        (of_several, "sharded"),
        (life, "whole"),
        (life, "next forward"),
        *(pytest.param(*each, marks=pytest.mark.nightly) for each in ((of_several, "whole"), (life, "sharded"))),
    ],
    ids=id_of,
)
def test_optimizers_and_modules(ranks2, scenario, way):
    ranks2.run(in_way, scenario, way)


def refused(match):
    return pytest.raises(dp_compile.ReductionError, match=match)


def guarded(way, compile_model):
    """The same errors in every way, captured on this rank or not: no rank goes on alone."""
    make = two_groups(torch.optim.AdamW, lr=torch.tensor(0.01), fused="shard" not in GIVEN[way])
    both = made(way, make=make, compile_model=compile_model)
    both.mine.step()  # before any backward, as state is initialised for a checkpoint
    both.train(0)
    with refused("retain_graph=True"):
        both.run(batch(1)).square().mean().backward(retain_graph=True)
    both.backward(1, broken=dist.get_rank() == 0)
    parameters = [*both.ours.parameters()]
    before = [each.clone() for each in parameters]
    weight = both.ours.layers[1].weight
    assert weight.grad is None or "shard" in GIVEN[way]
    with refused(r"before optimizer.step\(\).*no_sync\(\)"):
        both.run(batch(2)).square().mean().backward()
    with refused("closure"):
        both.mine.step(lambda: 0.0)
    with refused("max_norm="):
        dp_compile.optim.clip_grad_norm_(parameters, 0.1)
    weight.grad = torch.ones_like(weight)
    with refused(r"layers.1.weight .*not set .grad"):
        both.mine.step()
    group = both.mine.param_groups[1]
    for changed in ({"lr": 0.02}, {"betas": (0.8, 0.9)}):
        options = dict(group)
        group.update(changed)
        with refused(rf"{next(iter(changed))} of parameter group 1 .*between the backward and optimizer.step\(\)"):
            both.mine.step()
        group.update(options)
    assert all(map(torch.equal, before, parameters))
    both.ours.zero_grad()
    both.step()
    both.compare()
    group.update(lr=0.02)  # after it they may change
    both.other.param_groups[1].update(lr=0.02)
    both.train(2)
    assert not dp_compile.optim.clip_grad_norm_(parameters, 0.1)
    both.backward(3)
    both.mine.param_groups[0]["lr"].mul_(0.5)
    with refused("lr of parameter group 0"):
        both.mine.step()


def unknown_scaler(way, compile_model):
    both = made(way, compile_model=compile_model)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(both.run(batch(0)).square().mean()).backward()
    with refused("scaler=scaler"):
        scaler.step(both.mine)


def scaled_step_is_dropped(way, compile_model):
    both = made(way, scaled=True, compile_model=compile_model)
    both.backward(0)
    with refused(r"before optimizer.step\(\).*scaler.update\(\)"):
        both.backward(1)
    both.step()
    both.backward(2)


class Inside(Net):
    """Only a backward inside the backward reaches any parameter."""

    def forward(self, x):
        return checkpoint(super().forward, x.requires_grad_(), use_reentrant=True)


def only_inside(way, compile_model):
    both = made(way, Inside, compile_model=compile_model)
    both.backward(0)
    with refused("before optimizer.step"):
        both.backward(1)


def hooks_copies_and_other_parameters(way, compile_model):
    both = made(way, compile_model=compile_model)
    calls = []
    both.mine.register_step_pre_hook(lambda *_: calls.append("before"))
    both.mine.register_step_post_hook(lambda *_: calls.append("after"))
    both.train(0)
    assert calls == ["before", "after"]
    for copied in (copy.deepcopy(both.mine), pickle.loads(pickle.dumps(both.mine))):
        # A plain one, over other parameters.
        parameter = copied.param_groups[0]["params"][0]
        parameter.grad = torch.ones_like(parameter)
        copied.step()
        assert parameter.grad is not None
    extra = [nn.Parameter(torch.ones(6)) for _ in range(2)]
    for optimizer, parameter in zip((both.mine, both.other), extra, strict=True):
        optimizer.add_param_group({"params": [parameter], "lr": 0.5})
    for number in range(2):
        both.backward(number)
        for parameter in extra:
            parameter.grad = torch.full((6,), 1.0 + number)
        both.step()
        both.compare()
        assert torch.equal(*extra)
        assert not torch.equal(extra[0], torch.ones(6))


class Given(nn.Module):
    """A matrix that is given may lie in the memory of a parameter, whose gradient is ready before it is read."""

    def __init__(self):
        super().__init__()
        self.first, self.middle = nn.Linear(6, 6), nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.last = nn.Linear(6, 6, bias=False)

    def forward(self, x, given):
        x = torch.tanh(self.first(x)) @ given
        for layer in self.middle:
            x = torch.tanh(layer(x))
        return self.last(x)


def other_memory(way, compile_model):
    """Code that was compiled for tensors in memory of their own is not run for ones that share it."""
    both = made(way, Given, compile_model=compile_model)
    captures = []
    for number, shares in enumerate((False, False, True, True, False)):
        for model, run in ((both.ours, both.run), (both.theirs, both.run_theirs)):
            weight = model.last.weight.detach()
            run(batch(number), weight if shares else weight.clone()).square().mean().backward()
        both.step()
        both.compare()
        captures.append(both.updated and len(dp_compile.report(both.ours).captures))
    assert captures[0] == 1
    assert captures[-1] > 1


@pytest.mark.parametrize(
    ("scenario", "way", "compile_model"),
    [
        (guarded, "whole", compile_whole),
        (guarded, "whole", not_compiled),
        (guarded, "sharded", not_compiled),
        (guarded, "overlapping", waiting),
        (unknown_scaler, "whole", compile_whole),
        (scaled_step_is_dropped, "sharded", not_compiled),
        (only_inside, "whole", not_compiled),
        (hooks_copies_and_other_parameters, "whole", compile_whole),
        (other_memory, "whole", compile_whole),
    ],
    ids=id_of,
)
def test_around_the_step(ranks2, scenario, way, compile_model):
    ranks2.run(scenario, way, compile_model)


class Own(torch.optim.SGD):
    pass


def attempt(model, kind=torch.optim.SGD, *, of=None, **options):
    return dp_compile.optim.in_backward(model, kind((of or model).parameters()), **options)


def in_one_memory():
    model = Net()
    model.layers[3].weight.data = model.layers[0].weight.data
    return dp_compile.replicate(model, config=SMALL)


optim = torch.optim
REFUSED = {
    "is not replicated": lambda model, _: attempt(Net()),
    "has no trainable parameter of this module": lambda model, _: attempt(model, of=Net()),
    "LBFGS cannot update in the backward: it evaluates the model again": lambda model, _: attempt(model, optim.LBFGS),
    "SparseAdam cannot update in the backward: it needs": lambda model, _: attempt(model, optim.SparseAdam),
    "Own is not of torch.optim": lambda model, _: attempt(model, Own),
    r"SGD\(differentiable=True\)": lambda model, _: attempt(model, partial(optim.SGD, differentiable=True)),
    "Adafactor cannot be sharded: its update needs whole parameters.*Use shard=False, or one of SGD, Adam": (
        lambda model, _: attempt(model, optim.Adafactor, of=model.layers[0], shard=True)
    ),
    "another optimizer updates norm.weight in the backward already": lambda model, _: attempt(model),
    "updates in the backward already": lambda model, kept: dp_compile.optim.in_backward(model, kept),
    "max_norm must be a number > 0": lambda model, _: attempt(model, max_norm=0.0),
    "max_norm must be a number > 0 or None, got nan": lambda model, _: attempt(model, max_norm=float("nan")),
    "scaler must be a torch.amp.GradScaler": lambda model, _: attempt(model, scaler=1),
    "shard must be True or False, got 1": lambda model, _: attempt(model, shard=1),
    "overlap_forward must be True or False, got 1": lambda model, _: attempt(model, overlap_forward=1),
    r"in_backward\(max_norm=...\) needs shard=True.*clip_grad_norm_": lambda model, _: attempt(model, max_norm=1.0),
    r"in_backward\(scaler=...\) needs shard=True": lambda model, _: attempt(model, scaler=torch.amp.GradScaler("cpu")),
    "optimizer must be a torch.optim.Optimizer": lambda model, _: dp_compile.optim.in_backward(model, model),
    r"join\(\) may rescale gradients after it": lambda model, _: dp_compile.join(model).__enter__(),
    "check_nan looks at gradients": lambda *_: attempt(
        dp_compile.replicate(Net(), config=dp_compile.ReplicateConfig(backend="aot_eager", check_nan=True))
    ),
    "layers.3.weight shares its memory with layers.0.weight": lambda *_: attempt(in_one_memory()),
}


@pytest.mark.usefixtures("fake_group")
def test_what_is_refused():
    model = dp_compile.replicate(Net(), config=SMALL)
    kept = dp_compile.optim.in_backward(model, torch.optim.SGD([model.norm.weight], lr=0.1))
    for text, wrong in REFUSED.items():
        with pytest.raises(dp_compile.DPCompileError, match=text):
            wrong(model, kept)


@pytest.mark.usefixtures("fake_group")
@pytest.mark.filterwarnings("ignore")  # loading it uses what torch itself deprecates
def test_torch_s_own_optimizers_in_the_backward_are_refused():
    from torch.distributed.optim import _apply_optimizer_in_backward

    model = Net()
    _apply_optimizer_in_backward(torch.optim.SGD, [model.norm.weight], {"lr": 0.1})
    with pytest.raises(
        dp_compile.UnsupportedModuleError,
        match=r"norm.weight is updated in the backward by torch.*dp_compile.optim.in_backward",
    ):
        dp_compile.replicate(model, config=SMALL)
