"""Averages of parameters: torch's averagers on their schedule, local SGD of a replicated module, outer optimizers."""

import copy
import os
from datetime import timedelta
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from parity import AOT, poisoned
from torch import nn
from torch.distributed.algorithms.model_averaging import averagers as theirs

import dp_compile
from dp_compile import averaging
from dp_compile.averaging import exchange
from dp_compile.config import CHECK_VARIABLE

pytestmark = pytest.mark.usefixtures("fake_group")

TheirOptimizer = torch.distributed.optim.PostLocalSGDOptimizer  # loading it warns, unless ours did that before


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def batch(step):
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))


def go_astray(model, step):
    """What an optimizer does to the parameters of a rank, on its data."""
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
        with torch.no_grad():
            parameter -= 0.1 * parameter.grad


@on_ranks("ranks2")
def test_periodic_as_torchs():
    """Bit for bit after each step, from parameters and from groups."""
    averaged = 0
    for given in ((1, 0), (3, 0), (2, 3)):
        averagers = averaging.PeriodicModelAverager(*given), theirs.PeriodicModelAverager(*given)
        assert isinstance(averagers[0], theirs.PeriodicModelAverager)
        models = net(), net()
        for step in range(7):
            for model, averager in zip(models, averagers, strict=True):
                go_astray(model, step)
                alone = next(model.parameters()).detach().clone()
                averager.average_parameters(model.parameters() if step % 2 else [{"params": list(model.parameters())}])
            averaged += not torch.equal(alone, next(model.parameters()))
            assert all(map(torch.equal, *(model.parameters() for model in models))), (given, step)
            assert averagers[0].step == averagers[1].step == step + 1
    assert averaged == 7 + 3 + 2


@on_ranks("ranks2")
def test_in_place_and_each_in_its_own_dtype():
    """Several dtypes, memory orders, a parameter twice, one without a gradient, frozen ones; views stay views."""
    exchange.BUCKET_MB = 1e-5
    rank, flat = dist.get_rank(), torch.zeros(24)
    dtypes = (torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.complex64)
    tensors = [nn.Parameter(torch.full((2, 3, 2, 2), 1.0 + 2 * rank).to(dtype)) for dtype in dtypes]
    tensors.append(nn.Parameter(torch.full((2, 3, 2, 2), 4.0 * rank).to(memory_format=torch.channels_last)))
    tensors.append(nn.Parameter(flat[:12].view(3, 4)))
    tensors.append(nn.Parameter(torch.arange(12.0).view(3, 4).t() * rank, requires_grad=False))
    tensors.append(nn.Parameter(torch.empty(0)))
    with torch.no_grad():
        tensors[6] += 1 + rank
    before = [(tensor, tensor.data_ptr(), tensor.stride()) for tensor in tensors]
    given = [{"params": tensors[:4]}, {"params": tensors[3:]}]
    averaging.PeriodicModelAverager(2).average_parameters(given)
    assert [(tensor, tensor.data_ptr(), tensor.stride()) for tensor in tensors] == before
    for tensor, value in zip(tensors[:7], [2.0] * 5 + [2.0, 1.5], strict=True):
        assert torch.equal(tensor, torch.full_like(tensor, value))
    assert torch.equal(flat, torch.tensor([1.5, 0.0]).repeat_interleave(12))
    assert torch.equal(tensors[7], torch.arange(12.0).view(3, 4).t() / 2)


@on_ranks("ranks2")
def test_parameters_without_a_gradient_are_averaged_too():
    """A deviation: torch averages what has a gradient, after `zero_grad()` nothing, and does not say so."""
    for kind, second in ((averaging.PeriodicModelAverager, 0.5), (theirs.PeriodicModelAverager, dist.get_rank())):
        parameters = [nn.Parameter(torch.tensor([float(dist.get_rank())])) for _ in range(2)]
        parameters[0].grad = torch.ones(1)
        kind(2).average_parameters(parameters)
        assert [parameter.item() for parameter in parameters] == [0.5, second]


def test_what_is_refused():
    averager = averaging.PeriodicModelAverager(2)
    used_up = net().parameters()
    list(used_up)
    with pytest.raises(dp_compile.ConfigError, match="A generator that was used up"):
        averager.average_parameters(used_up)
    with pytest.raises(dp_compile.ConfigError, match="got str"):
        averager.average_parameters(["weight"])
    for other in (torch.zeros(2, dtype=torch.long), torch.eye(2).to_sparse(), torch.zeros(2, device="meta")):
        with pytest.raises(dp_compile.ConfigError, match=r"parameter 1 of params must be dense.*, got 'a torch"):
            averager.average_parameters([torch.zeros(1), other])
    assert averager.step == 0
    for name in ("every", "outer_lr"):
        with pytest.raises(dp_compile.ConfigError, match=name):
            make(**{"every": 2} | {name: 0})


FAULTS = {
    "period": (0, "period is 3 there, 2 on rank 0"),
    "step": (2, "step is 4 there, 2 on rank 0"),
    "order": (2, 'parameters[1] is "float32 (2, 2) strides (1, 2)" there, "float32 (2, 2)" on rank 0'),
    "dtype": (2, 'parameters[0] is "float64 (4,)" there'),
}


@pytest.mark.parametrize("fault", FAULTS)
@on_ranks("ranks2")
def test_ranks_that_differ_are_named_at_once(fault):
    """On both ranks; also what rank 1 alone changes after the first call, where only it knows."""
    there, (wrong_call, said) = dist.get_rank() == 1, FAULTS[fault]
    parameters = [nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(2, 2))]
    averager = averaging.PeriodicModelAverager(3 if there and fault == "period" else 2)
    for _ in range(wrong_call):
        averager.average_parameters(parameters)
    if there:
        averager.step = 4 if fault == "step" else averager.step
        parameters = {
            "order": [parameters[0], nn.Parameter(torch.zeros(2, 2).t())],
            "dtype": [nn.Parameter(torch.zeros(4, dtype=torch.float64)), parameters[-1]],
        }.get(fault, parameters)
    with pytest.raises(dp_compile.DesyncError) as error:
        averager.average_parameters(parameters)
    assert "average_parameters(): rank 1 differs from rank 0" in str(error.value)
    assert said in str(error.value)


def missing():
    """Rank 1 is a step late, and ends."""
    exchange.ASK_S = 2.0
    group = dist.new_group(timeout=timedelta(seconds=2))
    averager = averaging.PeriodicModelAverager(1, process_group=group)
    model = net()
    averager.average_parameters(model.parameters())
    if dist.get_rank() == 1:
        return ""
    with pytest.raises(dp_compile.CommunicationError, match="step 1") as raised:
        averager.average_parameters(model.parameters())
    return str(raised.value)


@pytest.mark.nightly
def test_a_rank_that_does_not_come_is_named(own_ranks):
    said, _ = own_ranks.run(missing)
    assert "rank(s) 1 did not reach this step" in said


@on_ranks("ranks2")
def test_post_local_sgd_as_torchs():
    """A checkpoint of one loads in the other."""
    models = net(), net()
    plain = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
    optimizers = (
        averaging.PostLocalSGDOptimizer(plain[0], averaging.PeriodicModelAverager(2, 1)),
        TheirOptimizer(plain[1], theirs.PeriodicModelAverager(2, 1)),
    )
    assert isinstance(optimizers[0], TheirOptimizer)
    for step in range(5):
        if step == 3:
            states = [copy.deepcopy(optimizer.state_dict()) for optimizer in optimizers]
            assert states[0]["step"] == states[1]["step"] == 3
            for optimizer, state in zip(optimizers, reversed(states), strict=True):
                optimizer.averager.step = 0
                optimizer.load_state_dict(state)
                assert optimizer.averager.step == 3
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(batch(step)).square().sum().backward()
            optimizer.step()
        assert all(map(torch.equal, *(model.parameters() for model in models)))


def test_closures_and_schedulers_after_a_load():
    """A deviation: torch's keeps the groups from before a load, and a scheduler changes those."""
    averager = theirs.PeriodicModelAverager(100, 50)
    optimizer = averaging.PostLocalSGDOptimizer(torch.optim.SGD(net().parameters(), lr=0.1), averager)
    optimizer.load_state_dict(optimizer.state_dict())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert optimizer.step(lambda: 2.5) == 2.5
    scheduler.step()
    assert optimizer.optim.param_groups[0]["lr"] == pytest.approx(0.01)


compared = mock.patch.dict(os.environ, {CHECK_VARIABLE: "1"})
"""Parameters, after each synchronised backward."""
LOCAL_FROM, LOCAL_TO, STEPS = 3, 9, 12
PERIOD = 3


def alone(steps):
    """No module of this package: gradients averaged by hand outside of the local phase, torch's averager inside."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    averager = theirs.PeriodicModelAverager(PERIOD, LOCAL_FROM + PERIOD - 1)
    for step in steps:
        optimizer.zero_grad()
        model(batch(step)).square().sum().backward()
        if not LOCAL_FROM <= step < LOCAL_TO:
            for parameter in model.parameters():
                parameter.grad /= dist.get_world_size()
                dist.all_reduce(parameter.grad)
        optimizer.step()
        if step < LOCAL_TO:
            averager.average_parameters(model.parameters())
        for momentum in momenta(optimizer) if step == LOCAL_TO - 1 else ():
            momentum /= dist.get_world_size()
            dist.all_reduce(momentum)
    return model


def momenta(optimizer):
    return [state["momentum_buffer"] for state in optimizer.state.values()]


@compared
def train(how):
    """Reduced, then local with averages, then reduced again. The drift check looks at every reduced backward."""
    model = (dp_compile.DistributedDataParallel if how == "wrapper" else dp_compile.replicate)(net(), config=AOT)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if how == "crossing":  # averages wait for updates that were left for the next forward
        dp_compile.optim.in_backward(model, optimizer, overlap_forward=True)
    backend = {"crossing": "dp_compile", "compiled": "aot_eager"}.get(how)
    run = torch.compile(model, backend=backend) if backend else model
    averager = averaging.PeriodicModelAverager(PERIOD, LOCAL_FROM + PERIOD - 1)
    apart = 0
    with poisoned():
        for step in range(STEPS):
            is_local = LOCAL_FROM <= step < LOCAL_TO
            if how == "wrapper":
                model.require_backward_grad_sync = not is_local
            else:
                model.set_requires_gradient_sync(not is_local)
            optimizer.zero_grad()
            run(batch(step)).square().sum().backward()
            optimizer.step()
            if step < LOCAL_TO:
                averager.average_parameters(model.parameters())
            if step == LOCAL_TO - 1:
                averaging.PeriodicModelAverager(2).average_parameters(momenta(optimizer))
            own = next(model.parameters()).detach().clone()
            others = [torch.empty_like(own) for _ in range(dist.get_world_size())]
            dist.all_gather(others, own)
            apart += not torch.equal(*others)
    # Of the six local steps the third and the last end with an average.
    assert apart == LOCAL_TO - LOCAL_FROM - 2
    torch.testing.assert_close(list(model.parameters()), list(alone(range(STEPS)).parameters()))
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("how", ["compiled", "eager", "wrapper", "crossing"])
def test_reduced_then_local_then_reduced(ranks2, how):
    """As without this package; no alarm of the checks against steps on gradients that are not reduced, and drift."""
    one, other = ranks2.run(train, how)
    torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("averaged", ["some", "alone", "by torch", "all", "by an outer optimizer"])
@on_ranks("ranks2")
@compared
def test_no_average_before_reductions_is_an_error(averaged):
    """Local steps, then reductions; `averaged`: which parameters, over this rank alone, or by torch's averager."""
    model = dp_compile.replicate(net(), config=AOT)
    group = {True: None, False: [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]}[averaged != "alone"]
    averager = (theirs if averaged == "by torch" else averaging).PeriodicModelAverager(2, 0, group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if averaged == "by an outer optimizer":
        optimizer = averaging.OuterOptimizer(optimizer, 2, outer_lr=1.0, momentum=0.0)
    errors = []
    for step in range(4):
        optimizer.zero_grad()
        model.set_requires_gradient_sync(step >= 2)
        try:
            model(batch(step)).square().sum().backward()
        except (dp_compile.ReductionError, dp_compile.DesyncError) as error:
            errors.append(str(error))
        optimizer.step()
        if step == 1 and averaged != "by an outer optimizer":
            averager.average_parameters([next(model.parameters())] if averaged == "some" else model.parameters())
    assert bool(errors) == (averaged not in ("all", "by an outer optimizer"))
    assert not errors or "changed before the gradient was reduced" in errors[0]


SHAPES = ((3, 2), (4,))
LR = 0.1


def gradients(step, rank):
    random = np.random.default_rng(100 * step + rank)
    return [random.standard_normal(shape) for shape in SHAPES]


def start():
    return gradients(999, 999)


def by_formula(world, steps, every, outer_lr, momentum, nesterov):
    """arXiv 2311.08105, algorithm 1, with SGD inside. The parameters of rank 0 after all steps."""
    outer, velocity = start(), [np.zeros(shape) for shape in SHAPES]
    local = [list(outer) for _ in range(world)]
    for step in range(steps):
        for rank in range(world):
            local[rank] = [x - LR * g for x, g in zip(local[rank], gradients(step, rank), strict=True)]
        if step % every == every - 1:
            for place in range(len(SHAPES)):
                delta = np.mean([outer[place] - local[rank][place] for rank in range(world)], axis=0)
                velocity[place] = momentum * velocity[place] + delta
                ahead = delta + momentum * velocity[place] if nesterov else velocity[place]
                outer[place] = outer[place] - outer_lr * ahead
            local = [list(outer) for _ in range(world)]
    return local[0]


def make(every, **options):
    parameters = [nn.Parameter(torch.tensor(each)) for each in start()]
    return parameters, averaging.OuterOptimizer(torch.optim.SGD(parameters, lr=LR), every, **options)


def steps(parameters, optimizer, first, last):
    for step in range(first, last):
        for parameter, gradient in zip(parameters, gradients(step, dist.get_rank()), strict=True):
            parameter.grad = torch.tensor(gradient)
        optimizer.step()


def with_a_reload(options, n_steps, reload_at):
    parameters, optimizer = make(3, **options)
    addresses = [parameter.data_ptr() for parameter in parameters]
    steps(parameters, optimizer, 0, reload_at)
    state = copy.deepcopy(optimizer.state_dict())
    kept = [parameter.detach().clone() for parameter in parameters]
    steps(parameters, optimizer, reload_at, n_steps)
    assert [parameter.data_ptr() for parameter in parameters] == addresses
    again, other = make(3, **options)
    with torch.no_grad():
        for parameter, value in zip(again, kept, strict=True):
            parameter.copy_(value)
    other.load_state_dict(state)
    steps(again, other, reload_at, n_steps)
    assert all(map(torch.equal, again, parameters))
    return [parameter.detach().numpy() for parameter in parameters]


CASES = ({}, {"outer_lr": 0.3, "momentum": 0.5, "nesterov": False}, {"outer_lr": 1.0, "momentum": 0.0})


@pytest.mark.parametrize("options", CASES, ids=str)
def test_as_the_formula_and_from_a_checkpoint(ranks2, options):
    """Also saved between two averagings, when parameters differ between ranks."""
    expected = by_formula(2, 9, 3, **{"outer_lr": 0.7, "momentum": 0.9, "nesterov": True} | options)
    for found in ranks2.run(with_a_reload, options, 9, 5):
        for mine, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(mine, other, rtol=1e-12)


def grow():
    """Parameters that come later start where they are then."""
    parameters, optimizer = make(2)
    steps(parameters, optimizer, 0, 2)
    added = nn.Parameter(torch.zeros(3))
    optimizer.add_param_group({"params": [added]})
    added.grad = torch.full((3,), 1.0 + dist.get_rank())
    steps(parameters, optimizer, 2, 4)
    expected = torch.full((3,), -0.7 * 1.9 * 2 * LR * 1.5)  # two local steps, from rest
    torch.testing.assert_close(added.detach(), expected)


def astray():
    """Rank 1 starts elsewhere."""
    parameters, optimizer = make(2)
    if dist.get_rank() == 1:
        with torch.no_grad():
            parameters[1][2] += 1
        optimizer = averaging.OuterOptimizer(optimizer.optim, 2)
    with pytest.raises(dp_compile.DesyncError, match=r"rank 1 differs from rank 0: outer_parameters\[1\] is"):
        steps(parameters, optimizer, 0, 1)


def of_another_shape():
    parameters, optimizer = make(2)
    steps(parameters, optimizer, 0, 2)
    good = copy.deepcopy(optimizer.state_dict())
    for where in ("parameters", "velocities"):
        bad = copy.deepcopy(good)
        bad["outer"][where][1] = bad["outer"][where][1][:1]  # of a model with one output: would fit by broadcasting
        bad["step"] = 100
        text = rf"outer {where} of state_dict must be .*tensor 1: \[1\], here \[4\]"
        with pytest.raises(dp_compile.ConfigError, match=text):
            optimizer.load_state_dict(bad)
        torch.testing.assert_close(optimizer.state_dict(), good)
    bad["outer"]["parameters"] = bad["outer"]["parameters"][:1]
    with pytest.raises(dp_compile.ConfigError, match=r"outer parameters .*tensor 1: None, here \[4\]"):
        optimizer.load_state_dict(bad)
    optimizer.load_state_dict(good)
    with pytest.warns(UserWarning, match="step counter"):
        optimizer.load_state_dict(optimizer.optim.state_dict())
    assert torch.equal(optimizer.state_dict()["outer"]["parameters"][0], parameters[0])


@pytest.mark.parametrize("scenario", [grow, astray, of_another_shape])
def test_growth_ranks_astray_and_other_states(ranks2, scenario):
    ranks2.run(scenario)
