"""A module that changed, parameters that differ between ranks or are left out, gradients that are not finite."""

import os
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from parity import AOT, batch, compile_whole, eagerly, mlp, not_compiled, same_on_all_ranks
from torch import nn

import dp_compile
from dp_compile.config import CHECK_VARIABLE
from dp_compile.engine.guards import fingerprints
from dp_compile.errors import ReductionError

CONFIG = dp_compile.ReplicateConfig(backend="aot_eager", find_unused_parameters=True)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.first.bias.requires_grad_(False)
        self.adapter = nn.Identity()

    def forward(self, x):
        result = self.last(self.first(x.to(self.first.weight)).to(self.last.weight))
        return result + self.adapter(x).to(result)


def trained_later(model):
    """What was added frozen is left alone until it is trained."""
    model.adapter = nn.Linear(4, 4, bias=False).requires_grad_(False)
    uncompiled(model)
    model.zero_grad()
    model.adapter.requires_grad_(True)


def loaded(model):
    model.load_state_dict({name: p.detach() + 1 for name, p in model.named_parameters()}, assign=True)


ADDED = r"not reduced: adapter\.weight\. The parameter was added"
CHANGES = {
    "added": (lambda model: model.__setattr__("adapter", nn.Linear(4, 4, bias=False)), ADDED),
    # Past `Module.__setattr__`, as some libraries do.
    "added silently": (lambda model: model._modules.update(adapter=nn.Linear(4, 4, bias=False)), ADDED),
    "trained later": (trained_later, ADDED),
    "unfrozen": (lambda model: model.first.bias.requires_grad_(True), r"not reduced: first\.bias\. It was frozen"),
    "wider": (lambda model: model.first.double(), r"first\.weight is float64, it was float32"),
    "loaded": (loaded, r"reduced: first\.weight, last\.weight, last\.bias\. The parameter was replaced"),
}


GUARDED = pytest.mark.skipif(
    torch.__version__ < (2, 12),
    reason="torch 2.11 does not compile a forward again whose parameter changed in place (pytorch#139476, #177158)",
)


def captured(model):
    compile_whole(model)(torch.ones(2, 4)).sum().backward()


def by_hooks(model):
    with eagerly():
        captured(model)


def uncompiled(model):
    model(torch.ones(2, 4)).sum().backward()


@pytest.mark.parametrize("change", [pytest.param(each, marks=GUARDED if each == "wider" else ()) for each in CHANGES])
@pytest.mark.parametrize("step", [pytest.param(captured, marks=GUARDED), by_hooks, uncompiled])
def test_a_change_between_two_backwards(fake_group, change, step):
    model = dp_compile.replicate(Net(), config=CONFIG)
    for _ in range(2):
        step(model)
    model.zero_grad()  # Dynamo refuses a parameter whose gradient is a view of memory with another dtype
    make, text = CHANGES[change]
    make(model)
    for _ in range(2):  # also after the first error was caught
        with pytest.raises(dp_compile.ReductionError, match=text):
            step(model)


@pytest.mark.parametrize("compile_model", [compile_whole, not_compiled])
def test_another_dtype_for_a_while(fake_group, compile_model):
    """torch's DDP loses all parameters without a word."""
    model, found = dp_compile.replicate(Net(), config=CONFIG), []
    run = compile_model(model)
    for _ in range(2):
        model.zero_grad()
        run(torch.ones(2, 4)).sum().backward()
        found.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
        model.double().float()
    assert found[0]
    assert all(map(torch.equal, *found))
    assert sum(dp_compile.report(model).backwards.values()) == 2


def test_another_memory_format(fake_group):
    """Only the guard on the weight recompiles the backward: no saved tensor of this model changes."""
    model, x = dp_compile.replicate(nn.Conv2d(3, 4, 3), config=CONFIG), torch.ones(2, 3, 4, 4)
    for order in (torch.contiguous_format, torch.channels_last):
        model.to(memory_format=order)
        with dp_compile.compiled_backward():
            model(x).sum().backward()
        assert model.weight.grad.stride() == model.weight.stride()
        model.zero_grad()
    assert dp_compile.report(model).backwards == {"captured": 2}


def fingerprint(tensor):
    return int(fingerprints([tensor])[0])


def test_any_layout_has_bits():
    """Channels last, a view at an odd offset, gaps, none at all, a payload of NaN."""
    images = torch.randn(2, 3, 5, 7).to(memory_format=torch.channels_last)
    flat = torch.randn(11)
    gaps = torch.randn(6, 6)[:, :3]
    tensors = [images, flat[1:], flat[2:9], gaps, torch.empty(0, 3), torch.tensor(1.0), torch.full((3,), float("nan"))]
    assert torch.equal(fingerprints(tensors), fingerprints([tensor.clone() for tensor in tensors]))
    assert len(fingerprints([])) == 0
    assert fingerprint(flat) != fingerprint(flat.flip(0))  # places count
    quiet, other = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert fingerprint(quiet) != fingerprint(other)
    for dtype in (torch.float8_e4m3fn, torch.bool, torch.complex128):
        tensor = torch.randn(3000).to(dtype)
        changed = tensor.clone()
        changed.view(torch.uint8)[-1] ^= 1
        assert fingerprint(changed) != fingerprint(tensor)


class Rows(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = nn.Embedding(6, 4, max_norm=0.5)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, indices):
        return self.head(torch.tanh(self.body(self.rows(indices))))


def load_alone(model):
    if dist.get_rank() == 1:
        model.load_state_dict({name: tensor + 1 for name, tensor in model.state_dict().items()})


def set_by_hand(model):
    """Another loss, on this rank's own data, whose gradient is not reduced."""
    loss = model.head(torch.full((1, 4), float(dist.get_rank()))).square().sum()
    (model.head.weight.grad,) = torch.autograd.grad(loss, [model.head.weight])


def train(fault, every, steps, options=None):
    """The error of each step; the fault comes before the first optimizer step."""
    torch.manual_seed(0)
    errors, config = [], dp_compile.ReplicateConfig(backend="aot_eager", **(options or {}))
    with mock.patch.dict(os.environ, {} if every is None else {CHECK_VARIABLE: str(every)}):
        model = dp_compile.replicate(Rows(), config=config)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for number in range(steps):
            optimizer.zero_grad()
            indices = torch.randint(6, (5,), generator=torch.Generator().manual_seed(2 * number + dist.get_rank()))
            try:
                model(indices).square().sum().backward()
                errors.append("")
            except dp_compile.DesyncError as error:
                errors.append(str(error))
            if number == 0 and fault is not None:
                fault(model)
            optimizer.step()
    return errors


@pytest.mark.parametrize(
    ("fault", "every", "at", "name"), [(load_alone, None, 2, "body.weight"), (set_by_hand, 2, 2, "head.weight")]
)
def test_parameters_that_differ_are_named_on_every_rank(ranks2, fault, every, at, name):
    one, other = ranks2.run(train, fault, every, at + 1)
    assert one == other
    assert not any(one[:at])
    assert f"synchronised backwards: {name} on rank 1 has different values than on rank 0" in one[at]
    assert "collectives launched" not in one[at]  # no rank is waited for
    assert ("; more that differ: 3" in one[at]) == (fault is load_alone)


def test_equal_parameters_stay_equal(ranks):
    """Also with an embedding whose rows each rank shortens when it uses them."""
    for errors in ranks.run(train, None, None, 12):
        assert errors == [""] * 12


def test_it_can_be_switched_off(ranks2):
    for every, options in ((0, {}), (None, {"check_reductions": False})):
        assert ranks2.run(train, load_alone, every, 6, options)[0] == [""] * 6


@on_ranks("ranks2")
def test_ranks_that_have_run_out_of_inputs_do_not_step():
    """Rank 1 has a fourth of the inputs."""
    torch.manual_seed(0)
    with mock.patch.dict(os.environ, {CHECK_VARIABLE: "1"}):
        model = dp_compile.replicate(nn.Linear(4, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for with_join in (True, False, True, False):
            with dp_compile.join(model) if with_join else nullcontext():
                for number in range(2 if dist.get_rank() == 1 else 8) if with_join else range(3):
                    optimizer.zero_grad()
                    model(torch.full((2, 4), 0.1 * (number + dist.get_rank()))).sum().backward()
                    optimizer.step()
    same_on_all_ranks(model)


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.common, self.left, self.right = mlp(), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x, left_out=""):
        x = self.common(x)
        if left_out != "left":
            x = x + self.left(x)
        return x if left_out == "right" else x + self.right(x)


@pytest.mark.parametrize(
    ("compile_model", "parts", "at"),
    [
        (compile_whole, ("left",), 1),
        (compile_whole, ("left", "right"), 0),
        (compile_whole, ("", "right"), 1),
        (not_compiled, ("left",), 0),
        (not_compiled, ("", "right"), 1),
    ],
)
@on_ranks("ranks")
def test_it_is_named_on_every_rank(compile_model, parts, at):
    """In step `at` each rank leaves one of `parts` out, the last rank the last one."""
    torch.manual_seed(0)
    model = dp_compile.replicate(Branches(), config=AOT)
    run, last = compile_model(model), dist.get_world_size() - 1
    part = parts[-1] if dist.get_rank() == last else parts[0]
    for number in range(at):
        model.zero_grad()
        run(batch(number)).square().mean().backward()
    with pytest.raises(ReductionError, match="find_unused_parameters=True") as error:
        run(batch(at), part).square().mean().backward()
    if part:
        where = "this rank" if len(parts) > 1 else "all ranks"
        assert f"without a gradient on {where}: {part}.weight, {part}.bias" in str(error.value)
    if dist.get_rank() != last and len(parts) > 1:
        assert f"on rank {last}: {parts[-1]}.weight, {parts[-1]}.bias" in str(error.value)


class Root(nn.Module):
    """The gradient of a square root at zero is infinite, though the loss is not."""

    def __init__(self):
        super().__init__()
        self.first, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(4))

    def forward(self, x):
        return self.first(x) + (self.scale * x).abs().sqrt()


def run_nan(value, way, checked, factor=1.0):
    torch.manual_seed(0)
    model = dp_compile.replicate(Root(), config=dp_compile.ReplicateConfig(backend="aot_eager", check_nan=checked))
    call = model if way == "not compiled" else torch.compile(model, backend="aot_eager")
    x = torch.ones(2, 4)
    call(x).sum().backward()
    x[0, 2] = value if dist.get_rank() == 1 else 1.0
    try:
        with eagerly(way == "eager hooks"):
            (factor * call(x).sum()).backward()
    except dp_compile.ReductionError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("way", ["captured", "eager hooks", "not compiled"])
def test_a_loss_that_is_not_finite_on_one_rank(ranks, way):
    messages = ranks.run(run_nan, float("nan"), way, True)
    assert messages[0] == messages[1]
    assert "reduced gradients are not finite: scale (nan), first.weight (nan). The loss" in messages[0]
    assert "loss was not finite on rank 1 of the group" in messages[0]


def test_a_gradient_that_is_infinite(ranks):
    """Not one of them is a NaN; with a loss that is finite."""
    for message in ranks.run(run_nan, 1.0, "captured", True, 3e38):
        assert "not finite: first.weight (inf), first.bias (inf). The loss was not finite on ranks 0, 1" in message
    for message in ranks.run(run_nan, 0.0, "captured", True):
        assert "not finite: scale (nan). The loss was finite on every rank" in message
    assert set(ranks.run(run_nan, float("nan"), "captured", False)) == {"no error"}
