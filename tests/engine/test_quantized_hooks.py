"""Gradients in eight bits on the wire: what a NumPy formula says, the same on every rank, and nothing lost for good."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from beside import AOT, batch, compile_blocks, compile_whole, mlp, not_compiled
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import dp_compile
from dp_compile import HookBucket, QuantizedHook
from dp_compile.testing.ranks import Ranks

Array = np.ndarray[Any, np.dtype[np.float32]]
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
DTYPES = list(LARGEST)


# --- the formula --------------------------------------------------------------------------------------------------


def values_of(x: Array, hook: QuantizedHook) -> Array:
    """What comes back of blocks that were quantised. NumPy has no float8."""
    blocks = x.reshape(-1, hook.block)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        scale = np.maximum(np.abs(blocks).max(1, keepdims=True) / np.float32(LARGEST[hook.dtype]), np.float32(2**-126))
        whole = blocks * (np.float32(1) / scale)
        q = np.rint(whole) if hook.dtype == torch.int8 else torch.from_numpy(whole).to(hook.dtype).float().numpy()
        return np.asarray(q * scale, np.float32).reshape(-1)


def in_blocks(tensors: Sequence[torch.Tensor], hook: QuantizedHook) -> Array:
    """One behind the other, each filled up with zeros to whole blocks."""
    return np.concatenate([np.pad(each.flatten(), (0, -each.numel() % hook.block)) for each in tensors])


def reduced_by_formula(gradients: Sequence[Array], errors: Sequence[Array], hook: QuantizedHook) -> tuple[Array, Any]:
    """Of gradients and errors of all ranks, `in_blocks`, the reduced gradients, and the errors that remain."""
    ranks, numel = len(gradients), gradients[0].size
    part = hook.block * max(1, math.ceil(numel / (hook.block * ranks)))
    padded = [np.pad(one + error, (0, ranks * part - numel)) for one, error in zip(gradients, errors, strict=True)]
    values = [values_of(each, hook) for each in padded]
    left = [one - value for one, value in zip(padded, values, strict=True)]
    mean = np.sum(values, axis=0, dtype=np.float32) / np.float32(ranks)
    reduced = values_of(mean, hook)
    for rank, each in enumerate(left):
        own = slice(rank * part, (rank + 1) * part)
        each[own] += ranks * (mean - reduced)[own]
    return reduced[:numel], [each[:numel] for each in left]


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
    hook, generator = QuantizedHook(dtype, block), torch.Generator().manual_seed(seed)
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


@pytest.mark.parametrize("dtype", DTYPES)
def test_how_near_one_step_is(dtype: torch.dtype) -> None:
    """Of int8 half a step, of float8 half a unit in the last place: of each rank's part, and of the mean."""
    hook, generator = QuantizedHook(dtype, 64), torch.Generator().manual_seed(0)
    gradients = [[torch.randn(1000, generator=generator)] for _ in range(3)]
    mean = torch.stack([each for (each,) in gradients]).mean(0)
    ((reduced,), _) = played(hook, buckets_of(hook, gradients))[0]
    peak = torch.stack([each for (each,) in gradients]).abs().max()
    half = {torch.int8: 0.5 / 127, torch.float8_e4m3fn: 2**-4, torch.float8_e5m2: 2**-3}[dtype]
    assert (reduced - mean).abs().max() <= 2.01 * half * peak
    assert (reduced - mean).norm() / mean.norm() < {torch.int8: 0.02, torch.float8_e4m3fn: 0.05}.get(dtype, 0.1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_on_one_rank_is_not_finite_on_any(dtype: torch.dtype, bad: float) -> None:
    """All of its block, and nothing else: whoever scales a loss has to see it."""
    hook = QuantizedHook(dtype, 4)
    gradients = [[torch.ones(6), torch.ones(3, 3)] for _ in range(3)]
    gradients[1][1][0, 1] = bad
    for reduced, _ in played(hook, buckets_of(hook, gradients)):
        flat = torch.cat([each.flatten() for each in reduced])
        assert flat.isfinite().tolist() == [True] * 6 + [False] * 4 + [True] * 5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_gradients_of_other_dtypes(dtype: torch.dtype) -> None:
    """They come back as what they are; computed is in float32."""
    hook = QuantizedHook(block=8)
    gradients = [[torch.linspace(-1, 1, 30).mul(rank + 1).to(dtype)] for rank in range(2)]
    wide = [[each.float() for each in one] for one in gradients]
    results, expected = (played(hook, buckets_of(hook, each)) for each in (gradients, wide))
    for (reduced, states), (same, same_states) in zip(results, expected, strict=True):
        assert reduced[0].dtype == dtype
        assert torch.equal(reduced[0], same[0].to(dtype))
        assert torch.equal(states[0]["error"], same_states[0]["error"])


def test_without_error_feedback_nothing_is_remembered() -> None:
    hook = QuantizedHook(block=8, error_feedback=False)
    gradients = [[torch.linspace(-1, 1, 30)], [torch.linspace(0, 1, 30)]]
    results = played(hook, buckets_of(hook, gradients))
    assert [states for _, states in results] == [[{}], [{}]]
    expected, _ = reduced_by_formula(
        [in_blocks(each, hook) for each in gradients], [np.zeros(32, np.float32)] * 2, hook
    )
    np.testing.assert_allclose(results[0][0][0], expected[:30], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": torch.float16}, r"dtype must be one of torch.int8, .*got torch.float16"),
        ({"block": 0}, "block must be a number of elements >= 1, got 0"),
        ({"block": True}, "block must be a number of elements >= 1, got True"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(dp_compile.ConfigError, match=message):
        QuantizedHook(**options)


# --- on ranks -----------------------------------------------------------------------------------------------------

HOOK = QuantizedHook(block=4)


def build(hook: QuantizedHook = HOOK, **options: Any) -> tuple[Any, dp_compile.HookState]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(mlp(7), nn.Tanh(), mlp(5))
    model = dp_compile.replicate(model, **{"config": replace(AOT, bucket_cap_mb=math.inf)} | options)
    state = dp_compile.HookState()
    model.register_comm_hook(state, hook)  # type: ignore[operator]
    return model, state


def errors_in(state: dp_compile.HookState) -> dict[str, torch.Tensor]:
    return {name: each["error"] for name, each in state.state_dict()["tensors"].items()}


def all_ranks(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def one_step(model: Any, run: Any, step: int, broken: bool, micro: int) -> list[dict[str, torch.Tensor]]:
    """Run a backward. Returns the gradients of all ranks, as one process has them."""
    twin = nn.Sequential(mlp(7), nn.Tanh(), mlp(5))
    twin.load_state_dict(model.state_dict())
    model.zero_grad()
    for each in range(micro):
        x = batch(10 * step + each)
        twin(x).square().mean().backward()
        with (
            dp_compile.no_sync(model) if each + 1 < micro else torch.enable_grad(),
            torch.autograd.detect_anomaly(check_nan=False) if broken else torch.enable_grad(),
        ):
            run(x).square().mean().backward()
    return all_ranks({name: each.grad for name, each in twin.named_parameters()})


def as_the_formula(
    model: Any, gradients: Sequence[Mapping[str, torch.Tensor]], before: Sequence[Mapping[str, torch.Tensor]]
) -> list[dict[str, torch.Tensor]]:
    """Compare each bucket of the plan. Returns the errors of all ranks."""
    left: list[dict[str, torch.Tensor]] = [{} for _ in gradients]
    reduced = {name: each.grad for name, each in model.named_parameters()}
    for bucket in dp_compile.report(model).plan.buckets[:-1]:
        names = [member.gradient.name for member in bucket.members]
        flat = [[in_blocks([one[name] for name in names], HOOK) for one in each] for each in (gradients, before)]
        expected, errors = reduced_by_formula(*flat, HOOK)
        found = in_blocks([reduced[name] for name in names], HOOK)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
        for one, error in zip(left, errors, strict=True):
            parts = torch.from_numpy(error).split([in_blocks([reduced[name]], HOOK).size for name in names])
            for name, part in zip(names, parts, strict=True):
                one[name] = part[: reduced[name].numel()].view_as(reduced[name])
    return left


WAYS: dict[str, tuple[Any, tuple[int, ...], int, dict[str, Any]]] = {
    "captured": (compile_whole, (), 1, {}),
    "one rank by hooks": (compile_whole, (1, 3), 1, {}),
    "many buckets, accumulated": (compile_whole, (2,), 2, {"config": replace(AOT, bucket_cap_mb=1e-4)}),
    "not compiled": (not_compiled, (), 1, {}),
    "blocks": (compile_blocks, (), 1, {}),
    "inductor": (compile_whole, (), 1, {"config": dp_compile.ReplicateConfig(bucket_cap_mb=1e-4)}),
}


def run_as_the_formula(way: str) -> dict[str, int]:
    compile_model, broken, micro, options = WAYS[way]
    model, state = build(**options)
    run, errors = compile_model(model), all_ranks(errors_in(state))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(5):
        by_hooks = step in broken and dist.get_rank() == 1
        gradients = one_step(model, run, step, by_hooks, micro)
        errors = as_the_formula(model, gradients, errors)
        for name, error in errors_in(state).items():
            torch.testing.assert_close(error, errors[dist.get_rank()][name], rtol=1e-3, atol=1e-6)
        optimizer.step()
        weights = all_ranks([each.detach() for each in model.parameters()])
        assert all(torch.equal(*pair) for other in weights for pair in zip(weights[0], other, strict=True))
        errors = all_ranks(errors_in(state))  # what rounds to the other neighbour is not carried on
    report = dp_compile.report(model)
    assert len(report.plan.buckets) > 4 if "config" in options else len(report.plan.buckets) == 2
    dp_compile.unreplicate(model)
    return dict(report.backwards)


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=pytest.mark.nightly if way == "inductor" else ()) for way in WAYS]
)
def test_every_way_is_as_the_formula(ranks2: Ranks, way: str) -> None:
    found = ranks2.run(run_as_the_formula, way)
    if way in ("captured", "inductor"):
        assert found == [{"captured": 5}] * 2
    if way == "one rank by hooks":
        assert found == [{"captured": 5}, {"captured": 3, "eager hooks": 2}]


@pytest.mark.nightly
def test_three_ranks() -> None:
    ranks = Ranks(3, "forkserver")
    try:
        ranks.run(run_as_the_formula, "one rank by hooks")
    finally:
        ranks.stop()


def test_a_rank_alone() -> None:
    ranks = Ranks(1, "forkserver")
    try:
        ranks.run(run_as_the_formula, "captured")
    finally:
        ranks.stop()


def saved_and_loaded() -> None:
    """Many buckets, then another life with one: all that was not sent yet is sent, or remembered."""
    model, state = build(config=replace(AOT, bucket_cap_mb=1e-4))
    names = [name for name, _ in model.named_parameters()]
    total = {name: torch.zeros_like(each) for name, each in model.named_parameters()}
    run = compile_whole(model)
    for step in range(6):
        if step == 3:
            saved = pickle.loads(pickle.dumps((copy.deepcopy(model.state_dict()), state)))
            dp_compile.unreplicate(model)
            model, _ = build()
            dp_compile.unreplicate(model)
            model.load_state_dict(saved[0])
            state = saved[1]
            dp_compile.replicate(model, config=replace(AOT, bucket_cap_mb=math.inf))
            model.register_comm_hook(state, HOOK)
            run = compile_whole(model)
        gradients = one_step(model, run, step, False, 1)
        errors = all_ranks(errors_in(state))
        for name in names:
            total[name] += sum(each[name] for each in gradients) / len(gradients)
            total[name] -= model.get_parameter(name).grad
            left = sum(each[name] for each in errors) / len(errors)
            torch.testing.assert_close(total[name], left, rtol=1e-4, atol=1e-6)
    assert state.backwards == 6
    dp_compile.unreplicate(model)


def test_nothing_is_lost_for_good(ranks2: Ranks) -> None:
    ranks2.run(saved_and_loaded)


def scaled() -> None:
    """A loss scaler skips the step in which one rank's gradients overflow, and the errors stay what they were."""
    model, state = build()
    run, optimizer = compile_whole(model), torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(3):
        optimizer.zero_grad()
        loss = run(batch(step)).square().mean()
        before, weights = errors_in(state), copy.deepcopy(model.state_dict())
        scaler.scale(loss * (torch.inf if step == 1 and dist.get_rank() == 1 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        skipped = all(torch.equal(weights[name], each) for name, each in model.state_dict().items())
        same = all(torch.equal(before[name], each) for name, each in errors_in(state).items())
        assert (skipped, same) == ((True, True) if step == 1 else (False, False))
    assert scaler.get_scale() == 4.0
    dp_compile.unreplicate(model)


def test_a_scaler_sees_what_overflows(ranks2: Ranks) -> None:
    ranks2.run(scaled)
