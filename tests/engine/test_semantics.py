"""Each model, each way to train and each use of autograd next to torch's DDP: lines of docs/semantics.md."""

import copy
import os
import threading
import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fuzzing import HOOKS, RecomputedFunction
from on_ranks import on_ranks
from parity import (
    AOT,
    Block,
    Twin,
    batch,
    beside,
    compile_blocks,
    compile_whole,
    eagerly,
    expect_average,
    in_cpp,
    mlp,
    not_compiled,
    plain,
    same_on_all_ranks,
)
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

import dp_compile
from dp_compile._torch import compiler
from dp_compile.config import CHECK_VARIABLE
from dp_compile.errors import ReductionError
from dp_compile.passes.reduction import EagerOps, Launched
from dp_compile.train.gpt import GPT, GPTConfig

pytestmark = pytest.mark.usefixtures("fake_group")

NO_OTHER_COLLECTIVES = mock.patch.dict(os.environ, {CHECK_VARIABLE: "0"})
"""No collectives but those of a backward."""


def gloo_calls(work):
    """The collectives that gloo runs for `work`, by kind."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        work()
    return {each.key: each.count for each in profile.key_averages() if each.key.startswith("gloo:")}


@on_ranks("ranks")
def test_accumulation_costs_no_collectives_and_no_recompilation():
    """Three rounds of two local steps and one with a sync."""
    with NO_OTHER_COLLECTIVES:
        model = dp_compile.replicate(mlp(), config=AOT, bucket_cap_mb=1e-6)
        compiled, compilations = compile_whole(model), set()

        def local_steps():
            with dp_compile.no_sync(model):
                for number in range(2):
                    compiled(batch(number)).square().mean().backward()

        for _ in range(3):
            model.zero_grad()
            assert gloo_calls(local_steps) == {}
            synced = gloo_calls(lambda: compiled(batch(2)).square().mean().backward())
            assert synced == {"gloo:all_reduce": len(dp_compile.report(model).plan.buckets)}
            compilations.add((compiler.captures(), torch._dynamo.utils.counters["stats"]["unique_graphs"]))
    assert synced["gloo:all_reduce"] > 1
    assert len(compilations) == 1


class Replayed(torch.autograd.Function):
    """Its gradients are in one memory, as those of a CUDA graph."""

    memory = torch.zeros(3)

    @staticmethod
    def forward(ctx, weight, factor):
        ctx.factor = factor
        return weight * factor

    @staticmethod
    def backward(ctx, grad):
        return Replayed.memory.copy_(grad * ctx.factor).detach(), None


def test_accumulation_with_cuda_graphs(monkeypatch):
    """A replay does not write to gradients of before (pytorch#169545)."""
    monkeypatch.setattr(compiler, "replays_cuda_graphs", lambda device: True)
    module = nn.ParameterList([nn.Parameter(torch.ones(3))])
    dp_compile.replicate(module)
    with dp_compile.no_sync(module):
        Replayed.apply(module[0], 1.0).sum().backward()
        gradient = module[0].grad
        Replayed.apply(module[0], 3.0).sum().backward()
    assert module[0].grad is gradient, "what is added to stays where it is"
    assert torch.equal(gradient, torch.full((3,), 4.0))


def two_forwards(side, number):
    """And one without a backward before."""
    with torch.no_grad():
        side.run(batch(number + 70))
    (side.loss(number) + 2 * side.loss(number + 50)).backward()


def accumulation(side, number):
    with side.no_sync():
        side.loss(number).backward()
        side.loss(number + 50).backward()
    side.loss(number + 90).backward()


def twice_through_one_graph(side, number):
    """In odd steps locally first. torch's DDP reduces only the first backward of a forward, so it runs two forwards."""
    with side.no_sync() if number % 2 else nullcontext():
        loss = side.loss(number)
        loss.backward(retain_graph=side.ours)
    if not side.ours:
        loss = side.loss(number)
    loss.backward()


def freeze_later(side, number):
    """Frozen at first, and in a backward that is called without grad mode."""
    side.module.get_parameter("0.bias").requires_grad_(number in (1, 4))
    loss = side.loss(number)
    with torch.no_grad() if number == 0 else nullcontext():
        loss.backward()


def scaled(side, number):
    """Rank 1 overflows in the second step: both ranks see it, skip the step and lower the scale."""
    scaler = side.state.setdefault("scaler", torch.amp.GradScaler("cpu", init_scale=1024.0))
    factor = float("inf") if number == 1 and dist.get_rank() == 1 else 1.0
    scaler.scale(side.loss(number) * factor).backward()
    scaler.unscale_(side.optimizer)
    scaler.step(side.optimizer)
    scaler.update()
    assert scaler.get_scale() == (1024.0 if number == 0 else 512.0)
    if number == 1:
        side.optimizer.zero_grad()


def create_graph(side, number):
    """torch's DDP raises ("a leaf Variable that requires grad is being used in an in-place operation")."""
    loss = side.module(batch(number)).square().mean() if side.ours else side.loss(number)
    with warnings.catch_warnings(), dp_compile.compiled_backward() if side.ours else nullcontext():
        warnings.simplefilter("ignore")
        loss.backward(create_graph=side.ours)
    for parameter in side.module.parameters():
        assert (parameter.grad.grad_fn is not None) == side.ours
        parameter.grad = parameter.grad.detach()


def penalty(side, number):
    """A loss that holds a gradient, as in WGAN-GP: the backward goes through a backward."""
    x = batch(number).requires_grad_()
    (grad,) = torch.autograd.grad(side.run(x).square().sum(), x, create_graph=True)
    with dp_compile.compiled_backward() if side.ours and number > 0 else nullcontext():
        (grad.square().sum() / 100).backward()


def replace(parameter):
    """Another tensor in the gradient's place, and not a number on one rank."""
    parameter.grad = torch.nan_to_num(parameter.grad / (parameter.grad.abs() > 0.02), nan=0.0, posinf=0.5, neginf=-0.5)


class WithHooks(nn.Module):
    """Hooks on tensors, after accumulation, and around a module's backward; each changes gradients."""

    def __init__(self):
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(6, 6), Block(), nn.Linear(6, 6)
        self.first.weight.register_hook(lambda grad: grad * 3)
        self.last.weight.register_post_accumulate_grad_hook(HOOKS["clip"])
        self.last.bias.register_post_accumulate_grad_hook(HOOKS["drop"])
        self.inner.register_full_backward_hook(lambda module, grads, _: (grads[0] * 0.5,))
        self.last.register_full_backward_pre_hook(lambda module, grads: (grads[0] + 1,))

    def forward(self, x):
        return self.last(self.inner(torch.tanh(self.first(x))))


def with_late_hooks(side, number):
    """More hooks, after `replicate` put its own on the parameters. Rank 0 cannot capture the second backward."""
    for name, hook in (("first.bias", replace), ("inner.layers.0.bias", HOOKS["clip"])) if number == 0 else ():
        side.module.get_parameter(name).register_post_accumulate_grad_hook(hook)
    with eagerly(number == 1 and dist.get_rank() == 0):
        plain(side, number)


def backward_in_autocast(side, number):
    """What Inductor makes of a backward computes without autocast, so a captured one does too."""
    with side.no_sync():
        side.loss(number + 50).backward()
    loss = side.loss(number)
    with torch.autocast("cpu", torch.bfloat16, enabled=side.ours):
        loss.backward()
        assert torch.is_autocast_enabled("cpu") is side.ours


def sharpness_aware(side, number):
    """As its README says for DDP: the first backward is local, the step back comes after the second."""
    with side.no_sync():
        side.loss(number).backward()
    moved = {}
    with torch.no_grad():
        for parameter in side.module.parameters():
            moved[parameter] = 0.05 * parameter.grad
            parameter.add_(moved[parameter])
    side.optimizer.zero_grad(set_to_none=number % 2 == 0)
    side.loss(number).backward()
    with torch.no_grad():
        for parameter, change in moved.items():
            parameter.sub_(change)


def input_gradients(side, number):
    """An adversarial example first: a backward that accumulates into the input only."""
    x = batch(number).requires_grad_()
    if side.ours:
        side.run(x).square().mean().backward(inputs=[x])
    else:
        side.module(x).square().mean().backward(inputs=[x])
    assert all(parameter.grad is None for parameter in side.module.parameters())
    side.run(x.detach() + x.grad.sign() / 10).square().mean().backward()


class Recomputed(nn.Module):
    """Blocks whose backward runs a backward, and a part that is not recomputed, unless `everything` is."""

    def __init__(self, everything=False, reentrant=False):
        super().__init__()
        self.first, self.middle, self.last = Block(), Block(), Block()
        self.everything, self.reentrant = everything, reentrant

    def forward(self, x):
        x = x.clone().requires_grad_()
        for block in (self.first, self.middle):
            x = checkpoint(block, x, use_reentrant=True) if self.reentrant else RecomputedFunction.apply(block, x)
        return RecomputedFunction.apply(self.last, x) if self.everything else self.last(x)


def past_torch(side, number):
    """As Megatron's schedules do."""
    loss = side.loss(number)
    if not side.ours or not number:
        loss.backward()
        return
    run_backward = torch.autograd.Variable._execution_engine.run_backward
    run_backward((loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True)


class GivesNone(torch.autograd.Function):
    """A missing gradient counts as zeros."""

    @staticmethod
    def forward(ctx, x, weight):
        return x * 2 + weight.detach()

    @staticmethod
    def backward(ctx, grad):
        return grad * 2, None


class WithNone(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.weight = Block(), nn.Parameter(torch.ones(6))

    def forward(self, x):
        return GivesNone.apply(self.layers(x), self.weight)


class ConvNet(nn.Module):
    """In channels_last."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second, self.head = nn.Conv2d(8, 4, 2), nn.Linear(4, 5)
        self.to(memory_format=torch.channels_last)

    def forward(self, x):
        x = x.view(-1, 1, 2, 3).to(memory_format=torch.channels_last)
        return self.head(self.second(self.norm(self.first(x)).relu()).mean((2, 3)))


class Language(nn.Module):
    """With tied weights."""

    def __init__(self):
        super().__init__()
        self.gpt = GPT(GPTConfig(vocabulary=64, context=16, width=16, layers=1, heads=2))

    def forward(self, x):
        return self.gpt((20 * x.abs()).long().clamp(max=63))


def used_twice():
    layer = nn.Linear(6, 6)
    return nn.Sequential(layer, nn.ReLU(), layer)


def in_bfloat16(side, number):
    with torch.autocast("cpu", torch.bfloat16):
        loss = side.loss(number)
    loss.backward()


def rank_1_eagerly(side, number):
    """It cannot capture each second of its backwards; the collectives still fit together."""
    with eagerly(side.ours and number % 2 == 1 and dist.get_rank() == 1):
        plain(side, number)


class Branches(nn.Module):
    """Which parameters take part depends on the rank and the step."""

    def __init__(self):
        super().__init__()
        self.left, self.right, self.never, self.last = (nn.Linear(6, 6) for _ in range(4))

    def forward(self, x, way):
        branch = self.left if way % 2 == 0 else self.right
        return self.last(branch(x))


def unused(side, number):
    side.run(batch(number), dist.get_rank() * (number % 3) + number // 3).square().mean().backward()


def unused_locally(side, number):
    with side.no_sync():
        unused(side, 2 * number)
    unused(side, 2 * number + 1)


class Words(nn.Module):
    """Two tables and a dense layer."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Embedding(12, 6, sparse=True), nn.EmbeddingBag(9, 6, sparse=True, mode="sum")
        self.head = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))

    def forward(self, x):
        tokens = (x.abs() * 4).long().clamp(max=11)
        return self.head(self.first(tokens).sum(1) + self.second(tokens % 9))


WAYS = {
    "compiled": (compile_whole, nullcontext),
    "blocks": (compile_blocks, nullcontext),
    "eager hooks": (compile_blocks, eagerly),
    "not compiled": (not_compiled, nullcontext),
    "inductor": (torch.compile, nullcontext),
}
BOTH = ("compiled", "not compiled")
KEPT = {"set_to_none": lambda number: False}
UNUSED = {"steps": 6, "find_unused": True}
# Gradients are kept from the second step on, so that both forms are compiled.
INDUCTOR = {
    "bucket_cap_mb": 3e-4,
    "config": dp_compile.ReplicateConfig(),
    "set_to_none": lambda number: number % 2 == 0,
    "atol": 1e-5,
}
CASES = {
    "language model": (Language, plain, BOTH, {"bucket_cap_mb": 0.001}),
    "autocast": (Language, in_bfloat16, ("compiled",), {"rtol": 2e-2, "atol": 2e-3}),
    "gradients kept": (ConvNet, plain, BOTH, KEPT),
    "as it is used": (ConvNet, plain, ("inductor",), INDUCTOR),
    "used twice": (used_twice, accumulation, BOTH, {}),
    "captured on one rank": (ConvNet, rank_1_eagerly, ("compiled",), {"steps": 4}),
    "unused": (Branches, unused, ("compiled",), UNUSED),
    "unused, gradients kept": (Branches, unused, ("not compiled",), UNUSED | KEPT),
    "unused in one of two": (Branches, unused_locally, ("not compiled",), UNUSED),
    "unused in one of two, gradients kept": (Branches, unused_locally, ("compiled",), UNUSED | KEPT),
    "two forwards, one backward": (mlp, two_forwards, BOTH, {}),
    "accumulation": (mlp, accumulation, (*BOTH, "eager hooks"), {}),
    "twice through one graph": (mlp, twice_through_one_graph, BOTH, {}),
    "GradScaler": (mlp, scaled, BOTH, {}),
    "create_graph": (mlp, create_graph, BOTH, {}),
    "gradient of a gradient": (
        lambda: nn.Sequential(nn.Linear(6, 6, bias=False), nn.Tanh(), nn.Linear(6, 6, bias=False)),
        penalty,
        ("not compiled",),
        {},
    ),
    "frozen, then trained": (mlp, freeze_later, BOTH, {"steps": 5, "find_unused": True}),
    "hooks that change gradients": (WithHooks, with_late_hooks, (*BOTH, "eager hooks"), {"bucket_cap_mb": 1e-6}),
    "inner backwards": (Recomputed, plain, ("blocks", "not compiled"), {}),
    "inner backwards only": (lambda: Recomputed(everything=True), plain, ("eager hooks", "not compiled"), {}),
    "reentrant checkpoints": (lambda: Recomputed(reentrant=True), plain, ("blocks", "not compiled"), {}),
    "past torch.autograd": (mlp, past_torch, BOTH, {}),
    "started in C++": (mlp, in_cpp, BOTH, {}),
    "no gradient for a parameter": (WithNone, plain, ("blocks", "eager hooks", "not compiled"), {}),
    "sharpness-aware": (mlp, sharpness_aware, BOTH, {}),
    "gradients of inputs": (mlp, input_gradients, BOTH, {}),
    "sparse gradients": (Words, accumulation, ("compiled", "blocks", "not compiled"), {}),
    # The generator has the same state before each forward; every rank has its own.
    "dropout": (lambda: nn.Sequential(mlp(), nn.Dropout(0.5), mlp()), plain, ("compiled",), {}),
    "a backward in autocast": (
        lambda: nn.Sequential(Block(), nn.Linear(6, 6), Block()),
        backward_in_autocast,
        ("compiled", "blocks"),
        {"bucket_cap_mb": 1e-4},
    ),
}


NOT_CAPTURED = ("create_graph", "hooks that change gradients", "past torch.autograd", "started in C++")
NOT_CAPTURED += ("captured on one rank", "sparse gradients")


def run_case(case, way):
    build, step, _, options = CASES[case]
    compile_model, context = WAYS[way]

    def in_context(side, number):
        with warnings.catch_warnings(), context():
            warnings.simplefilter("ignore")
            step(side, number)

    return beside(build, in_context, compile_model=compile_model, **options)


@pytest.mark.parametrize(
    ("case", "way"),
    [
        pytest.param(case, way, marks=[pytest.mark.nightly] * (way == "inductor"))
        for case in CASES
        for way in CASES[case][2]
    ],
)
def test_step_beside_torch_ddp(ranks, case, way):
    for report in ranks.run(run_case, case, way):
        if way in ("compiled", "inductor") and case not in NOT_CAPTURED:
            assert set(report.backwards) <= {"captured", "without sync"}
            assert {record.graphs for record in report.captures} == {1}
            assert any(record.completed for record in report.captures) or not case.startswith("unused")
        assert case != "sparse gradients" or report.backwards["eager hooks"] == 3
        if way == "inductor":
            assert 1 < report.captures[0].collectives < report.captures[0].hooks


@dataclass(frozen=True)
class LateWork:
    """A collective whose result is there when it is waited for, not before."""

    tensor: torch.Tensor

    def wait(self):
        self.tensor.fill_(3.0)


def test_eager_hooks_launch_one_module_after_the_other_and_wait(monkeypatch):
    """As captured code does on another rank: the last module first, in whichever order gradients are complete."""
    launched = []

    def launch(ops, stage, tensor):
        launched.append(tensor.numel())
        return Launched(tensor, LateWork(tensor))

    monkeypatch.setattr(EagerOps, "launch", launch)
    first, last = nn.Linear(2, 2), nn.Linear(3, 3)
    for model in (first, last):
        dp_compile.replicate(model, bucket_cap_mb=1e-6, check_reductions=False)
    # The engine begins with what was computed last.
    (last(torch.ones(1, 3)).sum() + first(torch.ones(1, 2)).sum()).backward()
    plans = [dp_compile.report(model).plan for model in (last, first)]
    assert launched == [bucket.numel for plan in plans for bucket in plan.buckets]
    assert all(bool((each.grad == 3.0).all()) for model in (first, last) for each in model.parameters())


@on_ranks("ranks")
def test_what_inner_backwards_use_is_not_taken_for_unused():
    """torch's DDP takes it for that."""
    torch.manual_seed(0)
    model = Recomputed()
    alone = copy.deepcopy(model)
    dp_compile.replicate(model, config=AOT, find_unused_parameters=True)
    for number in range(2):
        for each in (model, alone):
            each.zero_grad()
            each(batch(number)).square().mean().backward()
        expect_average(model, alone)


class WithBuffers(nn.Module):
    """Statistics of two dtypes, some of them replaced and some changed in place."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6)
        self.register_buffer("scale", torch.ones(1))
        self.register_buffer("steps", torch.zeros(1, dtype=torch.int64))

    def forward(self, x):
        self.steps.add_(1 + dist.get_rank())
        self.scale = 0.5 * self.scale + x.detach().abs().mean()
        return self.last(self.norm(self.first(x))) * self.scale


@on_ranks("ranks")
def test_buffers_are_copied_coalesced_and_outside_the_captured_graph():
    """One broadcast for each dtype; the captured graphs hold none."""
    calls = []

    def step(side, number):
        counted = gloo_calls(lambda: plain(side, number))
        if side.ours:
            calls.append(counted)
            assert side.module.get_buffer("steps").item() == number + 1
            same_on_all_ranks(side.module)

    with NO_OTHER_COLLECTIVES:
        report = beside(WithBuffers, step, config=AOT)
    assert calls == [{"gloo:all_reduce": 1, "gloo:broadcast": 2}] * 3
    assert {record.collectives for record in report.captures} == {1}


class SparseByFunction(nn.Module):
    """No module says that these gradients are sparse."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(5, 6))
        self.block = Block()

    def forward(self, tokens):
        return self.block(nn.functional.embedding(tokens, self.table, sparse=True))


@pytest.mark.parametrize("way", ["compiled", "blocks", "eager hooks"])
def test_a_sparse_gradient_that_no_module_announces(way):
    model = dp_compile.replicate(SparseByFunction(), config=AOT)
    compile_model, context = WAYS[way]
    with context(), pytest.raises(dp_compile.ReductionError, match=r"table.*sparse"):
        compile_model(model)(torch.tensor([1, 2])).sum().backward()


def test_some_parameters_as_inputs():
    model = dp_compile.replicate(mlp(), config=AOT)
    with pytest.raises(dp_compile.ReductionError, match=r"inputs=\.\.\.\) names some parameters .* not 0\.bias, 2\."):
        model(torch.ones(2, 6)).sum().backward(inputs=[model[0].weight])


@on_ranks("ranks")
def test_an_optimizer_in_a_hook():
    """It would step on local gradients. Rank 0 reduces by eager hooks."""
    model = dp_compile.replicate(mlp(), config=AOT)
    run = not_compiled(model) if dist.get_rank() == 0 else compile_whole(model)
    optimizer = torch.optim.SGD([model[0].weight], lr=0.1)
    model[0].weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    with pytest.raises(dp_compile.ReductionError, match=r"0\.weight.* inside a hook"):
        run(batch(0)).square().mean().backward()


def test_torchs_own_capture_of_a_forward_that_was_not_compiled():
    """torch's DDP raises, and advises python_reducer."""
    both = Twin(mlp())
    both.run = both.model
    for _ in range(2):
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
            both.step(torch.ones(2, 6))
    assert both.report.backwards == {"eager hooks": 2}


class Shares(nn.Module):
    """What it computes from its parameter is used inside of a reentrant checkpoint, and outside."""

    def __init__(self, function, outside):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.function, self.outside = function, outside

    def forward(self, x):
        weight = self.function(self.weight)
        product = torch.compile(lambda x, weight: torch.tanh(x @ weight.float()), backend="aot_eager")
        y = checkpoint(lambda x: product(x, weight), self.first(x), use_reentrant=True)
        return self.last(product(y, weight) if self.outside else y)


@pytest.mark.parametrize("outside", [True, False])
@pytest.mark.parametrize("function", [torch.Tensor.double, lambda weight: weight])
def test_a_node_that_a_checkpoint_and_the_captured_backward_share(function, outside):
    """torch 2.13 loses gradients after it, without this package too."""
    torch.manual_seed(0)
    model = Shares(function, outside)
    twin, x = copy.deepcopy(model), torch.randn(3, 4)
    twin(x).square().sum().backward()
    dp_compile.replicate(model, config=AOT)
    loss = model(x).square().sum()
    with dp_compile.compiled_backward():
        if outside and function(x) is not x:
            with pytest.raises(ReductionError, match=r"reaches the parameter weight through ToCopyBackward0\. "):
                loss.backward()
        else:
            loss.backward()
            assert dp_compile.report(model).backwards["eager hooks"] == 1
            expect_average(model, twin)


class Waits(torch.autograd.Function):
    started, may_end = threading.Event(), threading.Event()

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        Waits.started.set()
        assert Waits.may_end.wait(60)
        return grad


def test_two_backwards_of_one_module_at_a_time_are_refused():
    model = dp_compile.replicate(mlp(), config=AOT)
    compiled = torch.compile(model, backend="aot_eager")
    with eagerly():  # a thread cannot be held up in a capture
        compiled(torch.ones(2, 6)).sum().backward()
        loss = Waits.apply(compiled(torch.ones(2, 6))).sum()
        slow = threading.Thread(target=loss.backward)
        slow.start()
        assert Waits.started.wait(60)
        try:
            with pytest.raises(ReductionError, match=r"two backwards of the module of 0\.weight run at the same time"):
                compiled(torch.ones(2, 6)).sum().backward()
        finally:
            Waits.may_end.set()
            slow.join()
        compiled(torch.ones(2, 6)).sum().backward()
    assert dp_compile.report(model).backwards["eager hooks"] == 3


@on_ranks("ranks2")
def test_uneven_inputs():
    torch.manual_seed(0)
    ours, theirs = Words(), Words()
    theirs.load_state_dict(ours.state_dict())
    dp_compile.replicate(ours, config=AOT)
    with dp_compile.join(ours):
        for number in range((1, 3)[dist.get_rank()]):
            ours.zero_grad()
            ours(batch(number)).square().mean().backward()
    if dist.get_rank() == 1:
        (theirs(batch(2)).square().mean() / 2).backward()
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.to_dense(), other.grad.to_dense())


def test_what_it_cannot_be_combined_with():
    model = dp_compile.replicate(Words())
    with pytest.raises(dp_compile.ConfigError, match=r"first\.weight is sparse, and reduce_dtype does not support"):
        dp_compile.replicate(Words(), mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))
    with pytest.raises(dp_compile.ConfigError, match=r"first\.weight is sparse, and a comm hook does not support"):
        model.register_comm_hook(dist.group.WORLD, fp16_compress_hook)
    with pytest.raises(dp_compile.ConfigError, match=r"first\.weight has sparse gradients and cannot be sharded"):
        dp_compile.optim.in_backward(model, torch.optim.SGD(model.parameters(), 0.1), shard=True)
