"""Parts of one model with other options: `replicate` on each part first, then on the whole, as with `fully_shard`."""

from __future__ import annotations

import copy
import warnings
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from beside import AOT, compile_whole
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import dp_compile
from dp_compile._torch.compiler import captures
from dp_compile.decentralized import decentralize
from dp_compile.testing.ranks import Ranks

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


def run_join() -> int:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Net()
    plain = copy.deepcopy(model)
    for each in (model.embed, model):
        dp_compile.replicate(each, config=AOT)
    run = compile_whole(model)
    dp_compile.warmup(model, [tokens(0)], lambda batch: run(batch).square().mean())
    assert dp_compile.report(model.embed).backwards == {}
    with dp_compile.join(model):
        for step in range(2 + dist.get_rank()):
            model.zero_grad()
            run(tokens(step)).square().mean().backward()
    if dist.get_rank() == 1:  # in its last step the other rank has zeros
        plain(tokens(2)).square().mean().backward()
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(2 * one.grad, other.grad)
    steps = sum(dp_compile.report(model.embed).backwards.values())
    for each in (model.embed, model):
        dp_compile.unreplicate(each)
    return steps


def test_warmup_and_join_reach_parts(ranks2: Ranks) -> None:
    assert ranks2.run(run_join) == [2, 3]


def run_other() -> str:
    config = replace(AOT, mp_policy=MixedPrecisionPolicy(reduce_dtype=(FP16, BF16)[dist.get_rank()]))
    with pytest.raises(dp_compile.DesyncError) as error:
        dp_compile.replicate(Net().embed, config=config)
    return str(error.value)


def test_ranks_that_differ(ranks2: Ranks) -> None:
    for text in ranks2.run(run_other):
        assert "mp_policy" in text
        assert "address" not in text


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
        with pytest.raises(dp_compile.ConfigError, match="around parts that were replicated by themselves"):
            copy.deepcopy(wrapper)
        for each in (wrapper, model.embed):
            dp_compile.unreplicate(each)
