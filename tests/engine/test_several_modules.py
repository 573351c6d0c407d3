"""Several replicated modules: on one group or two, other ones on other ranks, of other kinds, parts of one model."""

import copy

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from parity import AOT, batch, compare, compile_whole, eagerly, mlp, train_beside_fsdp
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import dp_compile
from dp_compile._torch import compiler
from dp_compile.decentralized import decentralize


@pytest.mark.parametrize("way", ["captured", "eager hooks", "not compiled"])
@on_ranks("ranks2")
def test_ranks_that_reduce_different_modules_together(way):
    """In the fourth step the ranks need different heads of the same shapes, whose gradients were averaged silently."""
    torch.manual_seed(0)
    heads = [dp_compile.replicate(nn.Sequential(nn.Linear(6, 6)), config=AOT) for _ in range(2)]
    runs = [compile_whole(head) if way != "not compiled" else head for head in heads]

    def step(run, number):
        with eagerly(way == "eager hooks"):
            run(batch(number)).square().mean().backward()

    for number in range(3):
        for run in runs:
            step(run, number)
    text = "reduced different modules together.*rank 0 the module of 0.weight.*rank 1 the module of 0.weight"
    with pytest.raises(dp_compile.DPCompileError, match=text):
        step(runs[dist.get_rank()], 3)


@pytest.mark.parametrize("of_torch", [False, True])
@on_ranks("ranks")
def test_modules_of_different_kinds_in_one_backward(of_torch):
    """With a module of another backend, and with one of torch's DDP."""
    torch.manual_seed(0)
    ours = [mlp(), mlp()]
    theirs = [DistributedDataParallel(copy.deepcopy(each)) for each in ours]
    first = dp_compile.replicate(ours[0], config=AOT)
    second = DistributedDataParallel(ours[1]) if of_torch else dp_compile.replicate(ours[1])
    compiled = compile_whole(first)
    for number in range(3):
        for model in (*ours, *theirs):
            model.zero_grad()
        second(compiled(batch(number))).square().mean().backward()
        theirs[1](theirs[0](batch(number))).square().mean().backward()
        for mine, other in zip(ours, theirs, strict=True):
            compare(mine, other.module, f"step {number}", rtol=1e-5, atol=1e-6)
    assert dp_compile.report(first).backwards == {"eager hooks": 3}


class Mixed(nn.Module):
    """Two dtypes: a tied float32 weight, and a bfloat16 layer used twice, whose products round alike when traced."""

    def __init__(self):
        super().__init__()
        self.token, self.head = nn.Embedding(11, 6), nn.Linear(6, 11)
        self.head.weight = self.token.weight
        self.again, self.norm = nn.Linear(6, 6).bfloat16(), nn.LayerNorm(6)

    def forward(self, tokens):
        x = self.norm(self.token(tokens)).bfloat16()
        return self.head(self.again(self.again(x).relu()).float())


@on_ranks("ranks4")
def test_two_groups_two_dtypes_tied_and_repeated_parameters():
    """All is one graph with the collectives of both plans; as gradients that are averaged by hand over each group."""
    torch.manual_seed(0)
    before, models, groups = compiler.captures(), (Mixed(), Mixed()), (dist.new_subgroups(2)[0], dist.group.WORLD)
    plain = copy.deepcopy(models)
    for model, group in zip(models, groups, strict=True):
        dp_compile.replicate(model, process_group=group, bucket_cap_mb=1e-4, config=AOT)
    compiled = [compile_whole(model) for model in models]
    for step in range(3):
        for modules, (first, second) in ((models, compiled), (plain, plain)):
            for each in modules:
                each.zero_grad()
            (first(tokens(step)).square().mean() + second(tokens(step + 9)).sin().mean()).backward()
        for model, alone, group in zip(models, plain, groups, strict=True):
            for (name, mine), other in zip(model.named_parameters(), alone.parameters(), strict=True):
                assert (mine.grad.dtype, mine.grad.stride()) == (mine.dtype, mine.stride()), name
                expected = other.grad / dist.get_world_size(group)
                dist.all_reduce(expected, group=group)
                # In bfloat16 a sum over ranks depends on their order, which depends on the place in a bucket.
                bound = 4 * torch.finfo(mine.dtype).eps * expected.abs().max()
                assert (mine.grad - expected).abs().max() <= bound, f"step {step}: {name}"
    assert compiler.captures() - before == 1
    reports = [dp_compile.report(model) for model in models]
    for report in reports:
        assert report.backwards == {"captured": 3}
        assert {bucket.key.dtype for bucket in report.plan.buckets} == {"float32", "bfloat16"}
    (record,), (other,) = (report.captures for report in reports)
    assert record == other
    assert (record.graphs, record.collectives) == (1, sum(len(report.plan.buckets) for report in reports))


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
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(6, 5)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def parts(model):
    return [model.get_submodule(name) for name in POLICIES]


def tokens(number):
    return torch.randint(0, 11, (4,), generator=torch.Generator().manual_seed(10 * number + dist.get_rank()))


@pytest.mark.parametrize("eager_rank", [-1, 1])
@on_ranks("ranks2")
def test_as_fsdp_with_nested_policies(eager_rank):
    """Three steps with an accumulation each, and the same by FSDP2 with the same nested policies."""
    torch.manual_seed(0)
    model, whole = Net(), MixedPrecisionPolicy(BF16, F32)
    theirs = copy.deepcopy(model)
    for name, policy in POLICIES.items():
        dp_compile.replicate(model.get_submodule(name), config=AOT, mp_policy=policy)
        fully_shard(theirs.get_submodule(name), mp_policy=policy)
    dp_compile.replicate(model, config=AOT, mp_policy=whole)
    fully_shard(theirs, mp_policy=whole)
    ours = compile_whole(model)
    is_eager = dist.get_rank() == eager_rank
    train_beside_fsdp(model, ours, theirs, tokens, 2, BF16, eager=lambda step: is_eager and step > 0)
    expected = {"captured": 3, "without sync": 3}
    if is_eager:
        expected = {"captured": 1, "eager hooks": 2, "without sync": 3}
    for each in (*parts(model), model):
        assert dp_compile.report(each).backwards == expected


@pytest.mark.usefixtures("fake_group")
def test_warmup_reaches_parts():
    model = Net()
    for each in (model.embed, model):
        dp_compile.replicate(each, config=AOT)
    run = compile_whole(model)
    dp_compile.warmup(model, [tokens(0)], lambda batch: run(batch).square().mean())
    assert dp_compile.report(model.embed).backwards == {}


@pytest.mark.usefixtures("fake_group")
class TestAlone:
    def test_synchronisation_reaches_parts(self):
        model = Net()
        for each in (*parts(model), model):
            dp_compile.replicate(each, config=AOT)
        run, before = compile_whole(model), compiler.captures()
        with model.no_sync():
            run(tokens(0)).square().mean().backward()
        model.set_requires_gradient_sync(False)
        run(tokens(0)).square().mean().backward()
        model.set_requires_gradient_sync(True)
        run(tokens(0)).square().mean().backward()
        assert compiler.captures() - before <= 3, "one graph for each backward"
        for each in (*parts(model), model):
            assert dp_compile.report(each).backwards == {"without sync": 2, "captured": 1}
            dp_compile.unreplicate(each)

    def test_a_tied_parameter_in_a_part_and_outside(self):
        model = Net()
        model.head = nn.Linear(6, 11, bias=False)
        model.head.weight = model.embed.weight
        dp_compile.replicate(model.embed, config=AOT)
        with pytest.raises(
            dp_compile.UnsupportedModuleError,
            match=r"embed\.weight = head\.weight: a tied parameter is used inside and",
        ):
            dp_compile.replicate(model, config=AOT)
        assert type(model) is Net

    def test_a_part_after_the_whole_and_nothing_left(self):
        model = dp_compile.replicate(Net(), config=AOT)
        with pytest.raises(
            dp_compile.UnsupportedModuleError, match=r"weight is replicated already.* before the module around it"
        ):
            dp_compile.replicate(model.embed, config=AOT)
        with pytest.raises(
            dp_compile.UnsupportedModuleError, match=r"no parameter that requires a gradient .*replicated parts"
        ):
            dp_compile.replicate(nn.Sequential(model), config=AOT)
        with pytest.raises(dp_compile.UnsupportedModuleError, match="a part of the module is replicated already"):
            decentralize(nn.Sequential(model), topology="ring", optimizer=torch.optim.SGD)
