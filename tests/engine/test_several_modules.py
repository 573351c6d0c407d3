"""Several replicated modules: on one group or two, other ones on other ranks, of other kinds, parts of one model."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parity import AOT, batch, compare, compile_whole, mlp
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import dp_compile
from dp_compile._torch import compiler
from dp_compile._torch.compiler import captures
from dp_compile.decentralized import decentralize
from dp_compile.errors import DPCompileError
from dp_compile.insight.report import Report
from dp_compile.testing.ranks import Ranks

# --- other modules on other ranks --------------------------------------------------------------------------------


def run_mix(way: str) -> str:
    """In the fourth step rank 0 needs the first head, rank 1 the second: of the same shapes."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    heads = [dp_compile.replicate(nn.Sequential(nn.Linear(6, 6)), config=AOT) for _ in range(2)]
    runs = [torch.compile(head, backend="aot_eager") if way != "not compiled" else head for head in heads]
    try:
        for number in range(4):
            for run in runs if number < 3 else [runs[dist.get_rank()]]:
                with torch.autograd.set_detect_anomaly(way == "eager hooks", check_nan=False):
                    run(batch(number)).square().mean().backward()
    except DPCompileError as error:
        return str(error)
    finally:
        for head in heads:
            dp_compile.unreplicate(head)
    return "no error"


@pytest.mark.parametrize("way", ["captured", "eager hooks", "not compiled"])
def test_ranks_that_reduce_different_modules_together(ranks2: Ranks, way: str) -> None:
    """Gradients of two modules were averaged with each other, without an error."""
    errors = ranks2.run(run_mix, way)
    for error in errors:
        assert "reduced different modules together" in error
        assert "rank 0 the module of 0.weight" in error
        assert "rank 1 the module of 0.weight" in error


# --- modules of different kinds in one backward --------------------------------------------------------------------

SECOND = {"another backend": dp_compile.ReplicateConfig(), "torch's DDP": None}


def run_kinds(kind: str) -> dict[str, int]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    ours = [mlp(), mlp()]
    theirs = [DistributedDataParallel(copy.deepcopy(each)) for each in ours]
    first, of_torch = dp_compile.replicate(ours[0], config=AOT), kind == "torch's DDP"
    second: nn.Module = (
        DistributedDataParallel(ours[1]) if of_torch else dp_compile.replicate(ours[1], config=SECOND[kind])
    )
    compiled = torch.compile(first, backend="aot_eager")
    for number in range(3):
        for model in (*ours, *theirs):
            model.zero_grad()
        second(compiled(batch(number))).square().mean().backward()
        theirs[1](theirs[0](batch(number))).square().mean().backward()
        for mine, other in zip(ours, theirs, strict=True):
            compare(mine, other.module, f"step {number}", rtol=1e-5, atol=1e-6)
    report = dp_compile.report(first)
    for each in [first] if of_torch else [first, second]:
        dp_compile.unreplicate(each)
    return dict(report.backwards)


@pytest.mark.parametrize("kind", SECOND)
def test_modules_of_different_kinds_in_one_backward(ranks: Ranks, kind: str) -> None:
    for backwards in ranks.run(run_kinds, kind):
        assert backwards == {"eager hooks": 3}


# --- two groups, two dtypes, tied and repeated parameters ------------------------------------------------------------


STEPS = 4
PAIRS = ((0, 1), (2, 3))


class Mixed(nn.Module):
    """Tokens to logits in two dtypes: embedding and head share one float32 weight, a bfloat16 layer is used twice.

    Only products, sums and `relu` are in bfloat16: they round alike when traced and when not.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.token = nn.Embedding(11, 6)
        self.wide = nn.Linear(6, 6)
        self.again = nn.Linear(6, 6).bfloat16()
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 11)
        self.head.weight = self.token.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.wide(self.token(tokens)).tanh()).bfloat16()
        logits: torch.Tensor = self.head(self.again(self.again(x).relu()).float())
        return logits


def group_of(members: Sequence[Sequence[int]]) -> dist.ProcessGroup:
    """This rank's of several disjoint groups; every rank makes them all."""
    groups = {rank: group for ranks in members if (group := dist.new_group(list(ranks))) for rank in ranks}
    return groups[dist.get_rank()]


def words(step: int) -> torch.Tensor:
    return torch.randint(0, 11, (3, 5), generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))


def loss_of(first: Any, second: Any, step: int) -> torch.Tensor:
    first_loss: torch.Tensor = first(words(step)).square().mean()
    second_loss: torch.Tensor = second(words(step + STEPS)).sin().mean()
    return first_loss + second_loss


def average_gradients(model: nn.Module, group: dist.ProcessGroup) -> None:
    """What data parallelism means, without any of it: add up over the group, divide by its size."""
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.div_(dist.get_world_size(group))
        dist.all_reduce(parameter.grad, group=group)


def compare_rounded(ours: nn.Module, theirs: nn.Module, when: str) -> None:
    """In bfloat16 a sum over ranks depends on their order, which depends on the place in a bucket."""
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert mine.grad is not None, name
        assert other.grad is not None, name
        assert (mine.grad.dtype, mine.grad.stride()) == (mine.dtype, mine.stride()), name
        error = (mine.grad - other.grad).abs().max()
        assert error <= 4 * torch.finfo(mine.dtype).eps * other.grad.abs().max(), f"{when}: {name}: {error}"


def train_two(others: Sequence[Sequence[int]], cap_mb: float) -> tuple[int, list[Report], list[list[torch.Tensor]]]:
    """How many backwards were captured; of both modules the reports, and the parameters in the end."""
    torch._dynamo.reset()
    before = compiler.captures()
    groups = group_of(PAIRS), group_of(others)
    models = Mixed(0), Mixed(1)
    plain = copy.deepcopy(models)
    for model, group in zip(models, groups, strict=True):
        dp_compile.replicate(model, process_group=group, bucket_cap_mb=cap_mb, config=AOT)
    compiled = [torch.compile(model, backend="aot_eager") for model in models]
    optimizer = torch.optim.SGD([parameter for model in models for parameter in model.parameters()], lr=0.05)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(*compiled, step).backward()
        for ours, theirs in zip(models, plain, strict=True):
            theirs.load_state_dict(ours.state_dict())
            theirs.zero_grad()
        loss_of(*plain, step).backward()
        for ours, theirs, group in zip(models, plain, groups, strict=True):
            average_gradients(theirs, group)
            compare_rounded(ours, theirs, f"step {step}")
        optimizer.step()
    reports = [dp_compile.report(model) for model in models]
    for model in models:
        dp_compile.unreplicate(model)
    return compiler.captures() - before, reports, [[each.detach() for each in model.parameters()] for model in models]


@pytest.mark.parametrize(
    ("others", "cap_mb", "of_each"),
    [(((0, 1, 2, 3),), 1e-4, 4), pytest.param(((0, 2), (1, 3)), 25, 2, marks=pytest.mark.nightly)],
)
def test_two_groups_two_dtypes_tied_and_repeated_parameters(
    ranks4: Ranks, others: tuple[tuple[int, ...], ...], cap_mb: float, of_each: int
) -> None:
    """The numbers are compared on the ranks. Here: all was one graph, with the collectives of both plans."""
    outcomes = ranks4.run(train_two, others, cap_mb)
    for number, members in enumerate((PAIRS, others)):
        for ranks in members:
            for first, *rest in zip(*(outcomes[rank][2][number] for rank in ranks), strict=True):
                assert all(torch.equal(first, other) for other in rest)
    for captured, reports, _ in outcomes:
        assert captured == 1
        for report in reports:
            assert report.backwards == {"captured": STEPS}
            assert {bucket.key.dtype for bucket in report.plan.buckets} == {"float32", "bfloat16"}
            assert len(report.plan.buckets) == of_each
        (first,), (second,) = (report.captures for report in reports)
        assert first == second
        assert (first.graphs, first.collectives) == (1, 2 * of_each)


# --- parts of one model: each is replicated first, then the whole, as with `fully_shard` -----------------------------


FP16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
NORM = MixedPrecisionPolicy(F32, output_dtype=BF16)
POLICIES = {
    "embed": MixedPrecisionPolicy(BF16, FP16),
    "blocks.0.0": NORM,
    "blocks.1.0": NORM,
    "blocks.1": MixedPrecisionPolicy(BF16, BF16),
}
"""Of the parts, those inside others first."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(6, 5)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def parts(model: nn.Module) -> list[nn.Module]:
    return [model.get_submodule(name) for name in POLICIES]


def tokens(number: int) -> torch.Tensor:
    return torch.randint(0, 11, (4,), generator=torch.Generator().manual_seed(10 * number + dist.get_rank()))


WAYS: dict[str, Any] = {
    "captured": compile_whole,
    "inductor": torch.compile,
    "one rank by hooks": compile_whole,
    "eager hooks": compile_whole,
}


def run_beside_fsdp(way: str) -> list[dict[str, int]]:
    """Three steps with an accumulation each, beside FSDP2 with the same nested policies."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, whole = Net(), MixedPrecisionPolicy(BF16, F32)
    theirs = copy.deepcopy(model)
    config = AOT if way != "inductor" else dp_compile.ReplicateConfig()
    for name, policy in POLICIES.items():
        dp_compile.replicate(model.get_submodule(name), config=config, mp_policy=policy)
        fully_shard(theirs.get_submodule(name), mp_policy=policy)
    dp_compile.replicate(model, config=replace(config, mp_policy=whole))
    fully_shard(theirs, mp_policy=whole)
    ours = WAYS[way](model)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, theirs)]
    for step in range(3):
        eager = way == "one rank by hooks" and step > 0 and dist.get_rank() == 1
        for micro in range(2):
            for module, run in ((model, ours), (theirs, theirs)):
                module.set_requires_gradient_sync(micro == 1)
                with (
                    warnings.catch_warnings(action="ignore"),
                    torch.autograd.set_detect_anomaly(eager and run is ours, check_nan=False),
                ):
                    result = run(tokens(2 * step + micro))
                    assert result.dtype == BF16
                    result.float().square().mean().backward()
        for (name, one), other in zip(model.named_parameters(), theirs.parameters(), strict=True):
            for mine, full in ((one.grad, other.grad.full_tensor()), (one, other.full_tensor())):
                if way == "inductor":  # it rounds less often between operators
                    torch.testing.assert_close(mine, full, rtol=0.02, atol=0.004)
                else:
                    assert torch.equal(mine, full), f"{name} in step {step}"
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    replicas = [*parts(model), model]
    found = [dict(dp_compile.report(each).backwards) for each in replicas]
    for each in replicas:
        dp_compile.unreplicate(each)
    return found


@pytest.mark.parametrize("way", ["captured", "one rank by hooks", pytest.param("inductor", marks=pytest.mark.nightly)])
def test_as_fsdp_with_nested_policies(ranks2: Ranks, way: str) -> None:
    for rank, found in enumerate(ranks2.run(run_beside_fsdp, way)):
        eager = 2 * rank if way == "one rank by hooks" else 0
        expected = {"captured": 3 - eager, "eager hooks": eager}
        expected |= {"without sync": eager, "captured without sync": 3 - eager}
        assert found == [{key: count for key, count in expected.items() if count}] * 5, found


def run_options_of_a_part(way: str) -> None:
    """A part with a hook and the whole with a factor: as gradients that are reduced by hand."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Net()
    plain = copy.deepcopy(model)
    dp_compile.replicate(model.embed, config=AOT)
    dp_compile.replicate(model, config=AOT)
    model.embed.register_comm_hook(None, fp16_compress_hook)
    model.set_gradient_divide_factor(1.0)
    run = WAYS[way](model)
    for step in range(3):
        for module in (model, plain):
            module.zero_grad()
        for micro in range(2):
            with dp_compile.no_sync(model) if micro == 0 else nullcontext():
                with (
                    warnings.catch_warnings(action="ignore"),
                    torch.autograd.set_detect_anomaly(way == "eager hooks", check_nan=False),
                ):
                    run(tokens(2 * step + micro)).square().mean().backward()
            plain(tokens(2 * step + micro)).square().mean().backward()
        for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            expected = (other.grad / 2).half() if name == "embed.weight" else other.grad
            dist.all_reduce(expected)
            assert torch.equal(one.grad, expected.float()), f"{name}, {step}"
    for each in (model.embed, model):
        dp_compile.unreplicate(each)


@pytest.mark.parametrize("way", ["captured", "eager hooks"])
def test_each_keeps_its_options(ranks2: Ranks, way: str) -> None:
    ranks2.run(run_options_of_a_part, way)


@pytest.mark.usefixtures("fake_group")
def test_warmup_reaches_parts() -> None:
    model = Net()
    for each in (model.embed, model):
        dp_compile.replicate(each, config=AOT)
    run = compile_whole(model)
    dp_compile.warmup(model, [tokens(0)], lambda batch: run(batch).square().mean())
    assert dp_compile.report(model.embed).backwards == {}


@pytest.mark.usefixtures("fake_group")
class TestAlone:
    def test_synchronisation_reaches_parts(self) -> None:
        model = Net()
        for each in (*parts(model), model):
            dp_compile.replicate(each, config=AOT)
        run, before = compile_whole(model), captures()
        with model.no_sync():
            run(tokens(0)).square().mean().backward()
        model.set_requires_gradient_sync(False)
        run(tokens(0)).square().mean().backward()
        model.set_requires_gradient_sync(True)
        run(tokens(0)).square().mean().backward()
        assert captures() - before <= 3, "one graph for each backward"
        for each in (*parts(model), model):
            assert dp_compile.report(each).backwards == {"captured without sync": 2, "captured": 1}
            dp_compile.unreplicate(each)

    def test_a_tied_parameter_in_a_part_and_outside(self) -> None:
        model = Net()
        model.head = nn.Linear(6, 11, bias=False)
        model.head.weight = model.embed.weight
        dp_compile.replicate(model.embed, config=AOT)
        with pytest.raises(
            dp_compile.ModuleError, match=r"embed\.weight = head\.weight: a tied parameter lies in a part"
        ):
            dp_compile.replicate(model, config=AOT)
        assert type(model) is Net
        dp_compile.unreplicate(model.embed)

    def test_a_part_after_the_whole_and_nothing_left(self) -> None:
        model = dp_compile.replicate(Net(), config=AOT)
        with pytest.raises(dp_compile.ModuleError, match=r"weight is replicated already.* before the module around it"):
            dp_compile.replicate(model.embed, config=AOT)
        with pytest.raises(dp_compile.ModuleError, match=r"no parameter that requires a gradient .*replicated already"):
            dp_compile.replicate(nn.Sequential(model), config=AOT)
        with pytest.raises(dp_compile.ModuleError, match="a part of the module is replicated already"):
            decentralize(nn.Sequential(model), topology="ring", optimizer=torch.optim.SGD)
        dp_compile.unreplicate(model)

    def test_a_wrapper_around_a_part_and_around_the_whole(self) -> None:
        model = Net()
        model.embed = dp_compile.DistributedDataParallel(model.embed, config=AOT)
        wrapper = dp_compile.DistributedDataParallel(model, config=AOT)
        with wrapper.no_sync():
            wrapper(tokens(0)).square().mean().backward()
        assert dp_compile.report(model.embed).backwards == dp_compile.report(wrapper).backwards == {"without sync": 1}
        for each in (wrapper, model.embed):
            dp_compile.unreplicate(each)
