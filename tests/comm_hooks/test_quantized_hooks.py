"""Gradients in eight bits on the wire: what a NumPy formula says, the same on every rank, and nothing lost for good."""

from __future__ import annotations

import math
import pickle
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from parity import AOT, batch, compile_whole, mlp
from reference_hooks import LARGEST, in_blocks, reduced_by_formula
from torch import nn

import dp_compile
from dp_compile import HookBucket, QuantizedHook
from dp_compile.testing.ranks import Ranks

DTYPES = list(LARGEST)


# --- the formula --------------------------------------------------------------------------------------------------


def played(hook: QuantizedHook, buckets: Sequence[HookBucket]) -> list[Any]:
    """What the hook makes of the buckets of all ranks."""
    runs = [hook.reduce(bucket) for bucket in buckets]
    sent = [next(run) for run in runs]
    parts = [each.flatten().chunk(len(runs)) for each in sent]
    sent = [run.send(torch.cat([part[rank] for part in parts])) for rank, run in enumerate(runs)]
    results = []
    for run in runs:
        with pytest.raises(StopIteration) as end:
            run.send(torch.cat([each.flatten() for each in sent]))
        results.append(end.value.value)
    return results


def buckets_of(hook: QuantizedHook, gradients: Sequence[Sequence[torch.Tensor]]) -> list[HookBucket]:
    states = [[dict(hook.initial_state(each)) for each in one] for one in gradients]
    pairs = enumerate(zip(gradients, states, strict=True))
    return [HookBucket(one, state, len(gradients), rank) for rank, (one, state) in pairs]


# --- alone --------------------------------------------------------------------------------------------------------

SHAPES = st.lists(st.sampled_from([(), (1,), (3,), (7,), (2, 3), (0,), (5, 4)]), min_size=1, max_size=4)


@settings(max_examples=60)
@given(
    shapes=SHAPES,
    ranks=st.integers(1, 4),
    block=st.sampled_from([1, 3, 4, 16]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 999),
    size=st.sampled_from([1.0, 1e-30, 1e-42, 1e30, 0.0]),
)
def test_the_formula(
    shapes: list[tuple[int, ...]], ranks: int, block: int, dtype: torch.dtype, seed: int, size: float
) -> None:
    """Over three steps, with errors that are handed on; all ranks have the same bits."""
    hook, generator = QuantizedHook(dtype, block, min_ndim=0), torch.Generator().manual_seed(seed)
    draw = lambda: [[torch.randn(shape, generator=generator) * size for shape in shapes] for _ in range(ranks)]  # noqa: E731
    buckets = buckets_of(hook, draw())
    errors = [np.zeros_like(in_blocks(buckets[0].gradients, hook))] * ranks
    tolerance = {"rtol": 1e-5, "atol": size * 1e-5}
    for _ in range(3):
        flat = [in_blocks(bucket.gradients, hook) for bucket in buckets]
        expected, errors = reduced_by_formula(flat, errors, hook)
        results = played(hook, buckets)
        for (reduced, states), error in zip(results, errors, strict=True):
            assert [each.shape for each in reduced] == shapes
            assert all(map(torch.equal, reduced, results[0][0]))
            np.testing.assert_allclose(in_blocks(reduced, hook), expected, **tolerance)
            np.testing.assert_allclose(in_blocks([each["error"] for each in states], hook), error, **tolerance)
        states = [[dict(each) for each in result[1]] for result in results]
        buckets = [
            HookBucket(one, state, ranks, rank) for rank, (one, state) in enumerate(zip(draw(), states, strict=True))
        ]


@settings(max_examples=30)
@given(
    shapes=st.lists(st.sampled_from([(), (3,), (7,), (2, 3), (0,), (5, 4)]), min_size=1, max_size=5),
    ranks=st.integers(1, 4),
    dtype=st.sampled_from(DTYPES),
)
def test_parameters_of_one_dimension_travel_in_full_precision(
    shapes: list[tuple[int, ...]], ranks: int, dtype: torch.dtype
) -> None:
    """In float32, with nothing remembered; what is quantised is what it is without them."""
    hook, generator = QuantizedHook(dtype, 4), torch.Generator().manual_seed(0)
    gradients = [[torch.randn(shape, generator=generator) for shape in shapes] for _ in range(ranks)]
    alone = [[each for each in one if each.dim() > 1] for one in gradients]
    expected = played(hook, buckets_of(hook, alone)) if alone[0] else [([], [])] * ranks
    for (reduced, states), (same, same_states) in zip(played(hook, buckets_of(hook, gradients)), expected, strict=True):
        assert all(map(torch.equal, [each for each in reduced if each.dim() > 1], same))
        assert [list(each) for each in states if each] == [list(each) for each in same_states]
        for number, each in enumerate(reduced):
            if each.dim() < 2:
                torch.testing.assert_close(each, torch.stack([one[number] for one in gradients]).mean(0))
                assert states[number] == {}


@pytest.mark.parametrize(("dtype", "bad"), [*zip(DTYPES, [torch.inf, torch.nan, torch.inf], strict=True)])
def test_what_is_not_finite_on_one_rank_is_not_finite_on_any(dtype: torch.dtype, bad: float) -> None:
    """All of its block, and nothing else: a scaler has to see it."""
    hook = QuantizedHook(dtype, 4, min_ndim=0)
    gradients = [[torch.ones(6), torch.ones(3, 3)] for _ in range(3)]
    gradients[1][1][0, 1] = bad
    for reduced, _ in played(hook, buckets_of(hook, gradients)):
        flat = torch.cat([each.flatten() for each in reduced])
        assert flat.isfinite().tolist() == [True] * 6 + [False] * 4 + [True] * 5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_gradients_of_other_dtypes(dtype: torch.dtype) -> None:
    """They come back as what they are, computed in float32. Without error feedback nothing is remembered."""
    hook, forgets = QuantizedHook(block=8), QuantizedHook(block=8, error_feedback=False)
    gradients = [[torch.linspace(-1, 1, 30).view(6, 5).mul(rank + 1).to(dtype)] for rank in range(2)]
    wide = [[each.float() for each in one] for one in gradients]
    results, expected = (played(hook, buckets_of(hook, each)) for each in (gradients, wide))
    once = played(forgets, buckets_of(forgets, gradients))
    for (reduced, states), (same, same_states), (first, nothing) in zip(results, expected, once, strict=True):
        assert reduced[0].dtype == dtype
        assert torch.equal(reduced[0], same[0].to(dtype))
        assert torch.equal(states[0]["error"], same_states[0]["error"])
        assert torch.equal(first[0], reduced[0])  # no error was there before the first step
        assert nothing == [{}]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": torch.float16}, r"dtype must be one of torch.int8, .*got torch.float16"),
        ({"block": 0}, "block must be an integer >= 1, got 0"),
        ({"min_ndim": -1}, "min_ndim must be an integer >= 0, got -1"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(dp_compile.ConfigError, match=message):
        QuantizedHook(**options)


# --- on ranks -----------------------------------------------------------------------------------------------------


def replicated(state: dp_compile.HookState, bucket_cap_mb: float) -> Any:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(mlp(7), nn.Tanh(), mlp(5))
    dp_compile.replicate(model, config=replace(AOT, bucket_cap_mb=bucket_cap_mb))
    model.register_comm_hook(state, QuantizedHook(block=4, min_ndim=0))  # type: ignore[operator]
    return model


def all_ranks(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def saved_and_loaded() -> None:
    """Many buckets, then one in another process: all that was not sent yet is sent, or remembered."""
    state = dp_compile.HookState()
    model = replicated(state, 1e-4)
    twin = nn.Sequential(mlp(7), nn.Tanh(), mlp(5))
    twin.load_state_dict(model.state_dict())
    total = {name: torch.zeros_like(each) for name, each in model.named_parameters()}
    run = compile_whole(model)
    for step in range(6):
        if step == 3:
            state = pickle.loads(pickle.dumps(state))
            dp_compile.unreplicate(model)
            model = replicated(state, math.inf)
            run = compile_whole(model)
        for module, call in ((model, run), (twin, twin)):
            module.zero_grad()
            call(batch(step)).square().mean().backward()
        gradients = all_ranks({name: each.grad for name, each in twin.named_parameters()})
        errors = all_ranks(state.state_dict()["tensors"])
        for name in total:
            total[name] += sum(each[name] for each in gradients) / len(gradients)
            total[name] -= model.get_parameter(name).grad
            left = sum(each[name]["error"] for each in errors) / len(errors)
            torch.testing.assert_close(total[name], left, rtol=1e-4, atol=1e-6)
    assert state.backwards == 6
    dp_compile.unreplicate(model)


def test_nothing_is_lost_for_good(ranks2: Ranks) -> None:
    ranks2.run(saved_and_loaded)
