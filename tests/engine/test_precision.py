"""Gradients that travel in another dtype, and what they are divided by.

Beside torch's DDP with a hook that casts: `tests/harness/parity.py`, in every way and with all other options.
"""

from __future__ import annotations

import math
import re
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parity import AOT, batch, compile_whole, mlp, not_compiled
from torch import nn
from torch._inductor import config as inductor_config
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_collectives import _get_gradient_divide_factors

import dp_compile
from dp_compile.plan.backends import NCCL
from dp_compile.plan.reduction import Averaging, Reduction, before_the_sum
from dp_compile.testing.ranks import Ranks

FP16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


WAYS: dict[str, tuple[Callable[[nn.Module], Any], dict[str, Any]]] = {
    "captured": (compile_whole, {}),
    "inductor": (torch.compile, {"backend": "inductor"}),
    "eager hooks": (compile_whole, {}),
    "not compiled": (not_compiled, {}),
}


def config_of(**options: Any) -> dp_compile.ReplicateConfig:
    """`reduce_dtype` is that of a policy."""
    policy = MixedPrecisionPolicy(reduce_dtype=options.pop("reduce_dtype", None))
    return dp_compile.ReplicateConfig(**{"backend": "aot_eager", "mp_policy": policy} | options)


# --- what is divided ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 6, 8, 12, 64, 1000])
def test_float16_is_divided_as_fsdp_does(world_size: int) -> None:
    class Group:
        def size(self) -> int:
            return world_size

    before, after, *_ = _get_gradient_divide_factors(Group(), None, FP16)  # type: ignore[arg-type]
    assert before_the_sum(world_size) == before
    found = Averaging().reduction("0", NCCL, world_size, "float16")
    assert (found.scale, found.post_scale) == (1 / before, 1 / after)


def run_overflow(way: str, checked: bool) -> tuple[str, float]:
    """A finite gradient on the second rank, which float16 has no room for; its neighbour's is small everywhere."""
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1, bias=False))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    config = config_of(check_nan=checked, reduce_dtype=FP16)
    dp_compile.replicate(model, config=config)
    with warnings.catch_warnings(), torch.autograd.set_detect_anomaly(way == "eager hooks", check_nan=False):
        warnings.simplefilter("ignore")
        loss = WAYS[way][0](model)(torch.full((1, 1), 1e6 if dist.get_rank() == 1 else 1.0)).sum()
        assert loss.isfinite()
        said = ""
        try:
            loss.backward()
        except dp_compile.ReductionError as error:
            said = str(error)
    found = 0.0 if checked else float(model[0].weight.grad)
    dp_compile.unreplicate(model)
    return said, found


@pytest.mark.parametrize("way", ["captured", "eager hooks"])
def test_a_cast_that_overflows_is_found_on_every_rank(ranks2: Ranks, way: str) -> None:
    for said, _ in ranks2.run(run_overflow, way, True):
        # The bias has a gradient of one.
        assert "not finite: 0.weight (inf), 1.weight (inf). The loss was finite on every rank" in said
        assert "a gradient is too large for the dtype in which it travels" in said
    assert ranks2.run(run_overflow, way, False) == 2 * [("", float("inf"))]


DIVIDED: list[tuple[torch.dtype, dict[str, Any]]] = [
    (F32, {}),
    (FP16, {}),
    (F32, {"reduce_dtype": FP16}),
    (F32, {"gradient_divide_factor": 5.0}),
    (BF16, {"gradient_divide_factor": 3.0}),
    (FP16, {"gradient_divide_factor": 12.0}),
    (F32, {"reduce_dtype": FP16, "gradient_divide_factor": 7.0}),
    (FP16, {"reduce_dtype": F32, "gradient_divide_factor": 64.0}),  # what is sent does not vanish before the sum
]


def numbers_of(rank: int, dtype: torch.dtype) -> torch.Tensor:
    """A few smallest units of float16, of which halves are rounded; what fits in it, though not its sum; others."""
    smallest = [number * 2.0**-24 for number in (3, 5, 7 + 2 * rank, 9, 300 + rank)]
    return torch.tensor([*smallest, 30_000.0, 1.5 - rank, 0.1 * (rank + 1)], dtype=dtype)


def run_formula(way: str, alone: bool) -> list[dict[str, int]]:
    """A gradient that is the input, beside the formula in float64: rounded on the wire, once before and once behind."""
    found, ranks = [], 1 if alone else dist.get_world_size()
    group = dist.new_subgroups(1)[0] if alone else None
    for dtype, options in DIVIDED:
        torch._dynamo.reset()
        numbers = [numbers_of(rank, dtype) for rank in ([dist.get_rank()] if alone else range(ranks))]
        model = nn.Linear(len(numbers[0]), 1, bias=False).to(dtype)
        dp_compile.replicate(model, process_group=group, config=config_of(**options))
        with warnings.catch_warnings(), torch.autograd.set_detect_anomaly(way == "eager hooks", check_nan=False):
            warnings.simplefilter("ignore")
            WAYS[way][0](model)(numbers_of(dist.get_rank(), dtype)[None]).sum().backward()

        wire, divisor = options.get("reduce_dtype", dtype), options.get("gradient_divide_factor", float(ranks))
        before = before_the_sum(divisor) if wire == FP16 else divisor
        sent = torch.stack([(each.double() / before).to(wire).double() for each in numbers])
        expected = (sent.sum(0).to(wire).double() * before / divisor).to(dtype).double()
        # Whose numbers are added first is the backend's affair, and each sum rounds. Smallest units are exact.
        bound = (ranks + 1) * torch.finfo(wire).eps * sent.abs().sum(0) * before / divisor
        got = model.weight.grad[0].double()
        assert ((got - expected).abs() <= bound).all(), f"{dtype}, {options}: {got.tolist()}, not {expected.tolist()}"
        found.append(dict(dp_compile.report(model).backwards))
        dp_compile.unreplicate(model)
    return found


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("way", ["captured", "eager hooks", "not compiled"])
def test_three_ranks_and_one_divide_as_the_formula_says(ranks3: Ranks, way: str, alone: bool) -> None:
    name = {"not compiled": "eager hooks"}.get(way, way)
    assert ranks3.run(run_formula, way, alone) == 3 * [len(DIVIDED) * [{name: 1}]]


# --- a factor that changes ------------------------------------------------------------------------------------------


def run_factor_of_each_step(
    way: str, dtype: torch.dtype, options: dict[str, Any]
) -> tuple[dict[str, int], int, list[str]]:
    """Another factor in each step, on a rank with captured code beside one whose hooks run eagerly in odd steps."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, alone = Scalars().to(dtype), Scalars().to(dtype)
    alone.load_state_dict(model.state_dict())
    dp_compile.replicate(model, config=config_of(**options))
    signatures, run = [], WAYS[way][0](model)
    for step in range(6):
        factor = (3.0, 7.0, 0.3, 12.0, 1.0, 1e-3)[step]
        model.set_gradient_divide_factor(factor)
        for each in (model, alone):
            each.zero_grad()
        by_hooks = way == "captured" and step == 3 and dist.get_rank() == 1
        with warnings.catch_warnings(), torch.autograd.detect_anomaly(check_nan=False) if by_hooks else nullcontext():
            warnings.simplefilter("ignore")
            run(batch(step).to(dtype)).square().mean().backward()
        alone(batch(step).to(dtype)).square().mean().backward()
        signatures.append(dp_compile.report(model).plan.signature())
        (key,) = {each.key for each in dp_compile.report(model).plan.buckets}
        assert f"divided by {factor:g}" in str(dp_compile.report(model))
        for (name, one), other in zip(model.named_parameters(), alone.parameters(), strict=True):
            expected, what = reduced_by_hand(other.grad, key.reduction), f"{name}, step {step}"
            if way == "inductor":  # products and sums in another order, which may round to another neighbour
                eps = torch.finfo(getattr(torch, key.reduction.wire or "float64")).eps
                torch.testing.assert_close(one.grad, expected, rtol=4 * eps, atol=eps, msg=lambda t, w=what: w + t)
            else:
                assert torch.equal(one.grad, expected), what
    found = dict(dp_compile.report(model).backwards), len(dp_compile.report(model).captures), signatures
    dp_compile.unreplicate(model)
    return found


class Scalars(nn.Module):
    """A parameter without dimensions: beside a number in a tensor it is promoted otherwise than the others."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.scale = mlp(), nn.Parameter(torch.tensor(0.7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layers(x) * self.scale
        return result


def reduced_by_hand(grad: torch.Tensor, reduction: Reduction) -> torch.Tensor:
    """Rounded once before the sum and once behind it, each in the wider dtype."""
    wire = grad.dtype if reduction.wire is None else getattr(torch, reduction.wire)
    wide = torch.promote_types(grad.dtype, wire)
    sent = (grad.to(wide) * reduction.scale).to(wire)
    dist.all_reduce(sent)
    return (sent.to(wide) * reduction.post_scale).to(grad.dtype)


@pytest.mark.parametrize(
    ("way", "dtype", "options"),
    [
        ("captured", BF16, {}),
        pytest.param("captured", F32, {"reduce_dtype": FP16}, marks=pytest.mark.nightly),
        pytest.param("inductor", torch.float64, {}, marks=pytest.mark.nightly),
    ],
)
def test_a_factor_that_changes_in_each_step_compiles_nothing_anew(
    ranks2: Ranks, way: str, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    for rank, (ways, captures, signatures) in enumerate(
        ranks2.run(run_factor_of_each_step, way, dtype, options | WAYS[way][1])
    ):
        assert ways == ({"captured": 5, "eager hooks": 1} if way == "captured" and rank == 1 else {"captured": 6})
        # The first factor is a constant, which products take in; from the second on it is an input.
        assert captures == 2
        assert len(set(signatures)) == 6


# --- torch's own hooks ----------------------------------------------------------------------------------------------


def run_hook_over_a_group(everybody: bool, with_state: bool) -> tuple[float, dict[str, int]]:
    """What comes out of 2**rank, averaged by a module over its group and by a hook over that of its state."""
    torch._dynamo.reset()
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    model = nn.Linear(1, 1, bias=False)
    dp_compile.replicate(model, process_group=dist.group.WORLD if everybody else alone, config=AOT)
    model.register_comm_hook(dist.group.WORLD if with_state else None, default_hooks.fp16_compress_hook)
    compile_whole(model)(torch.full((1, 1), 2.0 ** dist.get_rank())).sum().backward()
    found = float(model.weight.grad), dict(dp_compile.report(model).backwards)
    dp_compile.unreplicate(model)
    return found


@pytest.mark.parametrize("everybody", [True, False])
def test_a_hook_of_torchs_averages_over_its_state(ranks2: Ranks, everybody: bool) -> None:
    """`None` is the default group, whatever the module's is. Known is what averages over the module's."""
    for with_state in (True, False):
        for found, ways in ranks2.run(run_hook_over_a_group, everybody, with_state):
            assert found == 1.5
            assert ways == {"captured" if everybody else "eager hooks": 1}


# --- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("fake_group")
def test_options_that_are_not_allowed() -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
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
    with pytest.raises(dp_compile.ConfigError, match="Sequential has gradient_divide_factor: a comm hook would say"):
        other.register_comm_hook(None, default_hooks.allreduce_hook)
    for factor in (0, -1.0, math.nan, math.inf, True, "2"):
        with pytest.raises(dp_compile.ConfigError, match=f"must be a finite number > 0, got {factor!r}"):
            model.set_gradient_divide_factor(factor)
    dp_compile.unreplicate(model)


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize("factor", [1e-39, 1e46])
def test_factors_that_float32_has_no_room_for(factor: float) -> None:
    """Ranks tell each other beside the gradients what they did, divided as those: it became NaN, or nothing."""
    torch._dynamo.reset()
    said = re.escape(f"divided by 1e-30 to 1e+30, got {factor:g} as gradient_divide_factor")
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
    dp_compile.unreplicate(model)


def run_different() -> None:
    model = dp_compile.replicate(mlp(), config=AOT)
    model.set_gradient_divide_factor(2.0)
    if dist.get_rank() == 0:  # what it said in the earlier call is there already, and is no answer now
        time.sleep(0.5)
    with pytest.raises(dp_compile.DesyncError, match="divide factor"):
        model.set_gradient_divide_factor(3.0 + dist.get_rank())


def test_ranks_that_differ(ranks: Ranks) -> None:
    ranks.run(run_different)


# --- in the graph ---------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("fake_group")
def test_what_was_computed_in_the_wires_dtype_is_written_into_its_bucket() -> None:
    """Under autocast a product is bfloat16 and was cast for the parameter."""
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 32))
    dp_compile.replicate(model, mp_policy=MixedPrecisionPolicy(reduce_dtype=BF16))
    with torch.autocast("cpu", BF16):
        loss = torch.compile(model)(torch.randn(16, 64)).square().mean()
    with inductor_config.patch(fx_graph_cache=False):  # the record is made with the code
        loss.backward()
    text = str(dp_compile.report(model))
    assert "computed in their buckets: 100.0%" in text
    assert "  copied " not in text
    dp_compile.unreplicate(model)
