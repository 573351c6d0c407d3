"""Train a model with torch's DDP and its twin with `dp_compile` by the same steps, and compare after each."""

import copy
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dp_compile
from dp_compile.optim.deferred import Pending

AOT = dp_compile.ReplicateConfig(backend="aot_eager")


# --- models -------------------------------------------------------------------------------------------------------


def mlp(width=6):
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 6))


class Block(nn.Module):
    """Unlike torch's own containers, a module of the user's file is compiled by `Module.compile()`."""

    def __init__(self):
        super().__init__()
        self.layers = mlp()

    def forward(self, x):
        return self.layers(x)


class Untraceable(torch.autograd.Function):
    """The identity. Its backward cannot be captured as one graph."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        torch._dynamo.graph_break()
        return grad.clone()


def batch(number, rows=3):
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(10 * number + dist.get_rank()))


def compile_whole(module):
    return torch.compile(module, backend="aot_eager")


def compile_blocks(module):
    for each in module.children():
        each.compile(backend="aot_eager")
    return module


def not_compiled(module):
    return module


@contextmanager
def eagerly(on=True):
    """Inside no backward is captured."""
    with warnings.catch_warnings(action="ignore"), torch.autograd.set_detect_anomaly(on, check_nan=False):
        yield


# --- two trainings ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Side:
    """One of the two models."""

    module: nn.Module
    run: Callable[..., Any]
    optimizer: torch.optim.Optimizer
    no_sync: Callable[[], AbstractContextManager[None]]
    ours: bool
    state: dict[str, Any] = field(default_factory=dict)

    def loss(self, number):
        return self.run(batch(number)).square().mean()


Step = Callable[[Side, int], None]
"""Backwards of one side in a step of this number."""


def sides_of(ours, run, theirs, momentum=0.0):
    mine, other = (torch.optim.SGD(each.parameters(), lr=0.1, momentum=momentum) for each in (ours, theirs))
    return (
        Side(ours, run, mine, lambda: dp_compile.no_sync(ours), ours=True),
        Side(theirs.module, theirs, other, theirs.no_sync, ours=False),
    )


def train(sides, steps, step, *, rtol=1e-4, atol=1e-6, set_to_none=lambda number: True):
    """Raises where the two differ."""
    ours, theirs = (side.module for side in sides)
    for number in steps:
        for side in sides:
            torch.manual_seed(100 * number + dist.get_rank())
            side.optimizer.zero_grad(set_to_none=set_to_none(number))
            step(side, number)
        compare(ours, theirs, f"step {number}", rtol=rtol, atol=atol)
        for side in sides:
            side.optimizer.step()
    compare(ours, theirs, "the end", rtol=rtol, atol=atol)


def compare(ours, theirs, when, *, rtol, atol):
    """Gradients with layout, parameters and, on the first rank, buffers: DDP hands them on one forward later."""

    def check(what, mine, other):
        torch.testing.assert_close(mine, other, rtol=rtol, atol=atol, msg=lambda text: f"{when}: {what}: {text}")

    if dist.get_rank() == 0:
        for (name, mine), other in zip(ours.named_buffers(), theirs.buffers(), strict=True):
            check(name, mine, other)
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert (mine.grad is None) == (other.grad is None), f"{when}: gradient of {name}"
        if mine.grad is not None and other.grad is not None:
            assert _layout(mine.grad) == _layout(other.grad), f"{when}: strides of the gradient of {name}"
            check(f"gradient of {name}", mine.grad.to_dense(), other.grad.to_dense())
        check(f"parameter {name}", mine, other)


def _layout(tensor):
    """Strides, but of dimensions of size one, where any stride means the same; the rows of a sparse tensor."""
    if tensor.is_sparse:
        return tensor.indices().flatten().tolist()
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1]


def beside(
    build,
    step,
    *,
    steps=3,
    compile_model=compile_whole,
    find_unused=False,
    set_to_none=lambda number: True,
    rtol=1e-4,
    atol=1e-6,
    **options,
):
    """Train both by backwards that a test writes itself; raises where they differ. `options`: of `replicate`."""
    torch.manual_seed(0)
    ours = build()
    torch.manual_seed(0)
    theirs = DistributedDataParallel(build(), find_unused_parameters=find_unused)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.add_(dist.get_rank())  # replicate() has to undo this
    dp_compile.replicate(ours, **{"config": AOT, "find_unused_parameters": find_unused} | options)
    sides = sides_of(ours, compile_model(ours), theirs, momentum=0.9)
    train(sides, range(steps), step, rtol=rtol, atol=atol, set_to_none=set_to_none)
    return dp_compile.report(ours)


def train_beside(ours, run, theirs, steps, broken, micro=1):
    """Train ours, run by `run`, and its twin in torch's DDP. Where `broken` holds on this rank nothing is captured."""

    def step(side, number):
        for each in range(micro):
            local = side.no_sync() if each + 1 < micro else nullcontext()
            with local, eagerly(side.ours and broken(number)):
                side.run(batch(10 * number + each)).square().mean().backward()

    train(sides_of(ours, run, theirs), steps, step, rtol=1e-5, atol=1e-7)
    same_on_all_ranks(ours)


def train_beside_fsdp(ours, run, theirs, inputs, micros, dtype, *, eager=lambda step: False, **tolerance):
    """Three steps of `micros` backwards, the last of them reduced; outputs have this dtype. `run` is that of ours."""
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (ours, theirs)]
    for step in range(3):
        for micro in range(micros):
            for module, forward in ((ours, run), (theirs, theirs)):
                module.set_requires_gradient_sync(micro == micros - 1)
                with eagerly(module is ours and eager(step)):
                    result = forward(inputs(micros * step + micro))
                    assert result.dtype == dtype
                    result.float().square().mean().backward()
        for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            whole = (other, other.grad) if one.requires_grad else (other,)
            torch.testing.assert_close(
                (one, one.grad)[: len(whole)],
                tuple(each.full_tensor() for each in whole),
                **({"rtol": 0, "atol": 0} | tolerance),
                msg=lambda text, where=f"{name} in step {step}": f"{where}: {text}",
            )
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def same_on_all_ranks(module):
    """Raises where a parameter or a buffer is not that of the first rank."""
    for name, tensor in module.state_dict().items():
        first = tensor.detach().clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, tensor), name


def plain(side, number):
    side.loss(number).backward()


def in_cpp(side, number):
    """The operator of `backward()` in TorchScript: the engine is entered without Python."""
    loss = side.loss(number)
    if side.ours and number:  # the first backward of a module is to come through Python
        if number == 1:  # one whose end the engine does not see
            handle = next(side.module.parameters()).register_hook(lambda grad: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                torch.ops.aten._backward(loss, [], None, None, False)
            handle.remove()
            side.module.zero_grad()
            loss = side.loss(number)
        torch.ops.aten._backward(loss, [], None, None, False)
    else:
        loss.backward()


def expect_average(ours, alone, group=None, **tolerance):
    """Gradients are those of `alone`, averaged over a group; the fake one's all-reduce returns its input."""
    for (name, mine), other in zip(ours.named_parameters(), alone.parameters(), strict=True):
        assert mine.grad is not None, name
        expected = other.grad / dist.get_world_size(group)
        dist.all_reduce(expected, group=group)
        torch.testing.assert_close(mine.grad, expected, msg=lambda text, name=name: f"{name}: {text}", **tolerance)


class Twin:
    """A replicated model and its plain twin, stepped together."""

    def __init__(self, model, **options):
        self.plain = copy.deepcopy(model)
        self.model = dp_compile.replicate(model, **{"config": AOT} | options)
        self.run = compile_whole(self.model)

    def step(self, *inputs, loss=lambda out: out.square().sum()):
        self.model.zero_grad()
        self.plain.zero_grad()
        loss(self.plain(*inputs)).backward()
        loss(self.run(*inputs)).backward()
        expect_average(self.model, self.plain)

    @property
    def report(self):
        return dp_compile.report(self.model)


@contextmanager
def poisoned():
    """Inside, parameters are NaN while an update or average of them is in flight: who reads one too early sees it."""
    before = {}
    register = Pending.register

    def registers(pending):
        register(pending)
        before[pending] = [each.detach().clone() for each in pending.parameters]
        with torch.no_grad(), pending.replica.state.step_guard.updating(pending.indices):
            for each in pending.parameters:
                each.fill_(torch.nan)
        pending.versions = pending._versions_now()

    def restoring(finish):
        def finishes(pending):
            for each, value in zip(pending.parameters, before.pop(pending, ()), strict=False):
                each.copy_(value)
            finish(pending)

        return finishes

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(Pending, "register", registers))
        for kind in Pending.__subclasses__():
            stack.enter_context(mock.patch.object(kind, "finish", restoring(kind.finish)))
        yield
