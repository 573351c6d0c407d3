"""Gradients that travel in another dtype, and what they are divided by. Beside DDP: `tests/harness/parity.py`."""

import math
import re
import time
from contextlib import nullcontext
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from parity import AOT, batch, compile_whole, eagerly, mlp
from torch import nn
from torch._inductor import config as inductor_config
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_collectives import _get_gradient_divide_factors

import dp_compile
from dp_compile.plan.backends import NCCL
from dp_compile.plan.reduction import Averaging, before_the_sum

pytestmark = pytest.mark.usefixtures("fake_group")

FP16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


def config_of(**options):
    """`reduce_dtype` is that of a policy."""
    policy = MixedPrecisionPolicy(reduce_dtype=options.pop("reduce_dtype", None))
    return dp_compile.ReplicateConfig(**{"backend": "aot_eager", "mp_policy": policy} | options)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 6, 8, 12, 64, 1000])
def test_float16_is_divided_as_fsdp_does(world_size):
    group = mock.Mock(size=lambda: world_size)
    before, after, *_ = _get_gradient_divide_factors(group, None, FP16)
    assert before_the_sum(world_size) == before
    found = Averaging().reduction("0", NCCL, world_size, "float16")
    assert (found.scale, found.post_scale) == (1 / before, 1 / after)


def test_an_exchange_adds_up_and_does_not_average():
    found = Averaging(scattered=True).reduction("0", replace(NCCL, scatters=False), 4, "float32")
    assert (found.reduce_op, found.scale) == ("sum", 0.25)


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("way", ["captured", "eager hooks"])
@on_ranks("ranks2")
def test_a_cast_that_overflows_is_found_on_every_rank(way, checked):
    """A finite gradient on the second rank, which float16 has no room for; that of the first is small everywhere."""
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1, bias=False))
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    dp_compile.replicate(model, config=config_of(check_nan=checked, reduce_dtype=FP16))
    loss = compile_whole(model)(torch.full((1, 1), 1e6 if dist.get_rank() == 1 else 1.0)).sum()
    # The bias has a gradient of one.
    text = (
        r"not finite: 0\.weight \(inf\), 1\.weight \(inf\)\. The loss was finite on every rank"
        ".*a gradient or a sum overflowed its wire dtype"
    )
    named = pytest.raises(dp_compile.ReductionError, match=text) if checked else nullcontext()
    with named, eagerly(way == "eager hooks"):
        loss.backward()
    assert checked or model[0].weight.grad.isinf()


DIVIDED = [
    (F32, {}),
    (FP16, {}),
    (F32, {"reduce_dtype": FP16}),
    (F32, {"gradient_divide_factor": 5.0}),
    (BF16, {"gradient_divide_factor": 3.0}),
    (FP16, {"gradient_divide_factor": 12.0}),
    (F32, {"reduce_dtype": FP16, "gradient_divide_factor": 7.0}),
    (FP16, {"reduce_dtype": F32, "gradient_divide_factor": 64.0}),  # what is sent does not vanish before the sum
]


def numbers_of(rank, dtype):
    """A few smallest units of float16, of which halves are rounded; what fits in it, though not its sum; others."""
    smallest = [number * 2.0**-24 for number in (3, 5, 7 + 2 * rank, 9, 300 + rank)]
    return torch.tensor([*smallest, 30_000.0, 1.5 - rank, 0.1 * (rank + 1)], dtype=dtype)


@pytest.mark.parametrize("alone", [False, pytest.param(True, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("way", ["captured", "not compiled"])
@on_ranks("ranks3")
def test_three_ranks_and_one_divide_as_the_formula_says(way, alone):
    """A gradient that is the input, and the formula in float64: rounded on the wire, once before and once after it."""
    ranks, group = (1, dist.new_subgroups(1)[0]) if alone else (dist.get_world_size(), None)
    for dtype, options in DIVIDED:
        torch._dynamo.reset()
        numbers = [numbers_of(rank, dtype) for rank in ([dist.get_rank()] if alone else range(ranks))]
        model = nn.Linear(len(numbers[0]), 1, bias=False).to(dtype)
        dp_compile.replicate(model, process_group=group, config=config_of(**options))
        run = compile_whole(model) if way == "captured" else model
        run(numbers_of(dist.get_rank(), dtype)[None]).sum().backward()

        wire, divisor = options.get("reduce_dtype", dtype), options.get("gradient_divide_factor", float(ranks))
        before = before_the_sum(divisor) if wire == FP16 else divisor
        sent = torch.stack([(each.double() / before).to(wire).double() for each in numbers])
        expected = (sent.sum(0).to(wire).double() * before / divisor).to(dtype).double()
        # Which numbers are added first depends on the backend, and each sum rounds. Smallest units are exact.
        bound = (ranks + 1) * torch.finfo(wire).eps * sent.abs().sum(0) * before / divisor
        got = model.weight.grad[0].double()
        assert ((got - expected).abs() <= bound).all(), f"{dtype}, {options}: {got.tolist()}, not {expected.tolist()}"
        assert dp_compile.report(model).backwards == {"captured" if way == "captured" else "eager hooks": 1}
        dp_compile.unreplicate(model)


class Scalars(nn.Module):
    """A parameter without dimensions: with a number in a tensor it is promoted otherwise than the others."""

    def __init__(self):
        super().__init__()
        self.layers, self.scale = mlp(), nn.Parameter(torch.tensor(0.7))

    def forward(self, x):
        return self.layers(x) * self.scale


def reduced_by_hand(grad, reduction):
    """Rounded once before the sum and once after it, each in the wider dtype."""
    wire = grad.dtype if reduction.wire is None else getattr(torch, reduction.wire)
    wide = torch.promote_types(grad.dtype, wire)
    sent = (grad.to(wide) * reduction.scale).to(wire)
    dist.all_reduce(sent)
    return (sent.to(wide) * reduction.post_scale).to(grad.dtype)


@pytest.mark.parametrize(
    ("dtype", "options"), [(BF16, {}), pytest.param(F32, {"reduce_dtype": FP16}, marks=pytest.mark.nightly)]
)
@on_ranks("ranks2")
def test_a_factor_that_changes_in_each_step_compiles_nothing_anew(dtype, options):
    """Another factor in each step. Rank 1 reduces one of them by eager hooks."""
    torch.manual_seed(0)
    model, alone = Scalars().to(dtype), Scalars().to(dtype)
    alone.load_state_dict(model.state_dict())
    dp_compile.replicate(model, config=config_of(**options))
    signatures, run = set(), compile_whole(model)
    for step, factor in enumerate((3.0, 7.0, 0.3, 12.0, 1.0, 1e-3)):
        model.set_gradient_divide_factor(factor)
        for each in (model, alone):
            each.zero_grad()
        with eagerly(step == 3 and dist.get_rank() == 1):
            run(batch(step).to(dtype)).square().mean().backward()
        alone(batch(step).to(dtype)).square().mean().backward()
        report = dp_compile.report(model)
        signatures.add(report.plan.signature())
        (key,) = {each.key for each in report.plan.buckets}
        assert f"divided by {factor:g}" in str(report)
        for (name, one), other in zip(model.named_parameters(), alone.parameters(), strict=True):
            assert torch.equal(one.grad, reduced_by_hand(other.grad, key.reduction)), f"{name}, step {step}"
    assert report.backwards == ({"captured": 5, "eager hooks": 1} if dist.get_rank() == 1 else {"captured": 6})
    # The first factor is a constant, which products take in; from the second on code asks for it.
    assert len(report.captures) == 2
    assert len(signatures) == 6


@pytest.mark.parametrize("everybody", [True, False])
@on_ranks("ranks2")
def test_a_hook_of_torchs_averages_over_its_state(everybody):
    """`None` is the default group, not the module's. Known is what averages over the module's."""
    for state in (dist.group.WORLD, None):
        torch._dynamo.reset()
        model = nn.Linear(1, 1, bias=False)
        alone = dist.new_subgroups(1)[0]
        dp_compile.replicate(model, process_group=dist.group.WORLD if everybody else alone, config=AOT)
        model.register_comm_hook(state, default_hooks.fp16_compress_hook)
        compile_whole(model)(torch.full((1, 1), 2.0 ** dist.get_rank())).sum().backward()
        assert float(model.weight.grad) == 1.5
        assert dp_compile.report(model).backwards == {"captured" if everybody else "eager hooks": 1}
        dp_compile.unreplicate(model)


def test_options_that_are_not_allowed():
    wrong = [
        ({"reduce_dtype": "bf16"}, "reduce_dtype of mp_policy must be one of torch.float16, .*, got 'bf16'"),
        ({"gradient_divide_factor": 0}, "gradient_divide_factor must be finite and > 0 .*, got 0"),
        ({"gradient_divide_factor": math.inf}, "gradient_divide_factor must be finite .*, got inf"),
        ({"gradient_divide_factor": math.nan}, "gradient_divide_factor must be finite .*, got nan"),
    ]
    for options, message in wrong:
        with pytest.raises(dp_compile.ConfigError, match=message):
            config_of(**options)
    with pytest.raises(dp_compile.ConfigError, match=r"in float16 can be divided by 1e\+06 at most, got 1e\+07"):
        dp_compile.replicate(mlp(), config=config_of(reduce_dtype=FP16, gradient_divide_factor=1e7))
    model = dp_compile.replicate(mlp(), config=AOT, mp_policy=MixedPrecisionPolicy(reduce_dtype=BF16))
    with pytest.raises(dp_compile.ConfigError, match="has a reduce_dtype in its mp_policy: a comm hook would"):
        model.register_comm_hook(None, default_hooks.bf16_compress_hook)
    other = dp_compile.replicate(mlp(), config=AOT)
    other.set_gradient_divide_factor(1.0)
    with pytest.raises(dp_compile.ConfigError, match="Sequential has gradient_divide_factor: a comm hook would"):
        other.register_comm_hook(None, default_hooks.allreduce_hook)
    for factor in (0, -1.0, math.nan, math.inf, True, "2"):
        with pytest.raises(dp_compile.ConfigError, match=f"must be a finite number > 0, got {factor!r}"):
            model.set_gradient_divide_factor(factor)


@pytest.mark.parametrize("factor", [1e-39, 1e46])
def test_factors_that_float32_has_no_room_for(factor):
    """Flags travel with the gradients and are divided as those: they became NaN, or nothing."""
    said = re.escape(f"gradient_divide_factor must be 1e-30 to 1e+30, got {factor:g}")
    with pytest.raises(dp_compile.ConfigError, match=said):
        dp_compile.replicate(mlp(), config=replace(AOT, gradient_divide_factor=factor))
    model = dp_compile.replicate(mlp(), config=AOT)
    with pytest.raises(dp_compile.ConfigError, match=said):
        model.set_gradient_divide_factor(factor)
    plain = mlp()
    plain.load_state_dict(model.state_dict())
    for run in (compile_whole(model), plain):
        run(torch.ones(2, 6)).sum().backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad / 2)  # as before the call


@on_ranks("ranks")
def test_ranks_that_differ():
    model = dp_compile.replicate(mlp(), config=AOT)
    model.set_gradient_divide_factor(2.0)
    if dist.get_rank() == 0:  # what the others posted in the earlier call is there already, and is no answer now
        time.sleep(0.5)
    with pytest.raises(dp_compile.DesyncError, match="divide factor"):
        model.set_gradient_divide_factor(3.0 + dist.get_rank())


@pytest.mark.nightly
def test_what_was_computed_in_the_wires_dtype_is_written_into_its_bucket():
    """Under autocast a product is bfloat16 and was cast for the parameter."""
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 32))
    dp_compile.replicate(model, mp_policy=MixedPrecisionPolicy(reduce_dtype=BF16))
    with torch.autocast("cpu", BF16):
        loss = torch.compile(model)(torch.randn(16, 64)).square().mean()
    with inductor_config.patch(fx_graph_cache=False):  # the record is made with the code
        loss.backward()
    text = str(dp_compile.report(model))
    assert "computed in their buckets: 100.0%" in text
    assert "  copied " not in text
