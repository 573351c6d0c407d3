"""Comm hooks with state: as torch's on every rank; in eight bits as a NumPy formula, and nothing is lost."""

import copy
import math
import pickle
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from on_ranks import on_ranks
from parity import AOT, batch, compile_whole, mlp, not_compiled, train_beside
from reference_hooks import LARGEST, Rounded, as_torch_s, in_blocks, reduced_by_formula
from steps import step_of_buckets
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import dp_compile
from dp_compile import HookBucket, QuantizedHook
from dp_compile._torch import distributed
from dp_compile.comm_hooks.functional import HookRun, register
from dp_compile.insight.predict import predict
from dp_compile.insight.step import Step
from dp_compile.plan.backends import GLOO
from dp_compile.plan.buckets import PACKED, BucketPlan, bucket_of
from dp_compile.plan.reduction import Averaging
from dp_compile.replica.gradients import gradient_specs
from dp_compile.replica.group import Group


class Net(nn.Module):
    """The second rank does not use all of it."""

    def __init__(self, uneven=False):
        super().__init__()
        self.first, self.last, self.spare = mlp(7), mlp(5), nn.Linear(6, 6, bias=False)
        self.uneven = uneven

    def forward(self, x):
        x = self.first(x)
        if not self.uneven or dist.get_rank() == 0:
            x = x + self.spare(x)
        return self.last(x)


def pair(uneven=False, **options):
    torch.manual_seed(0)
    ours = Net(uneven)
    theirs = DistributedDataParallel(copy.deepcopy(ours), find_unused_parameters=uneven)
    theirs.register_comm_hook({}, as_torch_s)
    dp_compile.replicate(ours, **{"config": AOT, "find_unused_parameters": uneven} | options)
    state = dp_compile.HookState()
    ours.register_comm_hook(state, Rounded())
    return ours, theirs, state


NEVER = lambda step: False  # noqa: E731
WAYS = {
    "inductor": (compile_whole, NEVER, {"config": dp_compile.ReplicateConfig(bucket_cap_mb=1e-5)}),
    "captured": (compile_whole, NEVER, {}),
    "one rank by hooks": (compile_whole, lambda step: step % 2 == 1 and dist.get_rank() == 1, {}),
    "eager hooks": (not_compiled, NEVER, {}),
}


def run_as_torch_s(way, micro=1, uneven=False):
    compile_model, broken, options = WAYS[way]
    ours, theirs, state = pair(uneven, **options)
    train_beside(ours, compile_model(ours), theirs, range(4), broken, micro)
    assert state.backwards == 4
    assert state.state_dict()["tensors"]["first.0.weight"]["seen"].item() == 4
    report = dp_compile.report(ours)
    (flags,) = (bucket for bucket in report.plan.buckets if any(each.gradient.index == 9 for each in bucket.members))
    assert (len(flags.members), flags.key.reduction.hook) == (1, None)
    return dict(report.backwards)


@pytest.mark.parametrize("way", ["captured", "eager hooks"])
def test_as_torch_s_ddp(ranks2, way):
    assert ranks2.run(run_as_torch_s, way) == [{way: 4}] * 2


def test_accumulation_and_what_a_rank_does_not_use(ranks2):
    found = ranks2.run(run_as_torch_s, "one rank by hooks", 2, True)
    counts = [{key: each[key] for key in each if "sync" not in key} for each in found]
    assert counts == [{"captured": 4}, {"captured": 2, "eager hooks": 2}]


@on_ranks("ranks2")
def test_a_state_is_saved_and_goes_on_in_other_buckets():
    """Half of the steps with many buckets, the rest in another module, with one. Ranks compare what they load."""
    ours, theirs, state = pair(config=replace(AOT, bucket_cap_mb=1e-5))
    train_beside(ours, compile_whole(ours), theirs, range(2), NEVER)
    saved = pickle.loads(pickle.dumps(state.state_dict()))
    weights = copy.deepcopy(ours.state_dict())
    dp_compile.unreplicate(ours)
    again = Net()
    again.load_state_dict(weights)
    dp_compile.replicate(again, config=AOT)
    (state := dp_compile.HookState()).load_state_dict(saved | {"backwards": 2 - dist.get_rank()})
    with pytest.raises(dp_compile.DesyncError, match=r"register_comm_hook\(\): rank 1 differs.*after 1 backwards"):
        again.register_comm_hook(state, Rounded())
    state.load_state_dict(saved)
    copied = pickle.loads(pickle.dumps(copy.deepcopy(state)))
    again.register_comm_hook(copied, Rounded())
    train_beside(again, compile_whole(again), theirs, range(2, 4), NEVER)
    assert len(dp_compile.report(again).plan.buckets) == 2  # one, and the flags
    with pytest.raises(dp_compile.UnsupportedModuleError, match=r"load it before register_comm_hook\(\)"):
        copied.load_state_dict(copied.state_dict())


@on_ranks("ranks2")
def test_join():
    ours, theirs, state = pair()
    run = compile_whole(ours)
    for model, call, join in ((ours, run, dp_compile.join(ours)), (theirs, theirs, theirs.join())):
        with join:
            for number in range(2 + dist.get_rank()):
                model.zero_grad()
                call(batch(number)).square().mean().backward()
    assert state.backwards == 3
    # What the rank without inputs did not send yet it sends in the steps that follow.
    train_beside(ours, run, theirs, range(3, 5), NEVER)


@pytest.mark.usefixtures("fake_group")
class TestAlone:
    def test_a_warm_up_leaves_no_trace(self):
        model, state = dp_compile.replicate(mlp(), config=AOT), dp_compile.HookState()
        model.register_comm_hook(state, Rounded())
        run = compile_whole(model)
        dp_compile.warmup(model, [batch(0)], lambda x: run(x).sum())
        assert state.backwards == 0
        assert all(not each["seen"].any() for each in state.state_dict()["tensors"].values())
        run(batch(0)).sum().backward()
        assert all(each["seen"].any() for each in state.state_dict()["tensors"].values())

    def test_what_is_not_finite_is_not_remembered(self):
        """A scaler skips such a step; the memory would hand it on to all that follow."""
        model, state = dp_compile.replicate(mlp(), config=AOT), dp_compile.HookState()
        model.register_comm_hook(state, Rounded())
        run = compile_whole(model)
        run(batch(0)).sum().backward()
        before = state.state_dict()["tensors"]
        (run(batch(1)) * torch.inf).sum().backward()
        assert not all(parameter.grad.isfinite().all() for parameter in model.parameters())
        after = state.state_dict()["tensors"]
        assert all(torch.equal(before[name][key], after[name][key]) for name in before for key in before[name])
        assert state.backwards == 2

    def test_what_is_refused(self):
        model, state = dp_compile.replicate(mlp(), config=AOT), dp_compile.HookState()
        register, other = model.register_comm_hook, dp_compile.HookState()
        other.load_state_dict({"backwards": 1, "tensors": {"0.weight": {"error": torch.zeros(3)}}})
        for text, attempt in (
            ("state_dict is not the state of a comm hook: KeyError", lambda: state.load_state_dict({"tensors": {}})),
            (r"does not match 0.bias: it has nothing, the hook expects {'error'", lambda: register(other, Rounded())),
            ("must be a HookState, got NoneType", lambda: register(None, Rounded())),
            ("contains a memory address", lambda: register(state, dp_compile.FunctionalHook())),
            ("dtype must be one of torch.int8, .*got torch.float16", lambda: QuantizedHook(torch.float16)),
            ("block must be an integer >= 1, got 0", lambda: QuantizedHook(block=0)),
            ("min_ndim must be an integer >= 0, got -1", lambda: QuantizedHook(min_ndim=-1)),
        ):
            with pytest.raises(dp_compile.ConfigError, match=text):
                attempt()
        register(state, Rounded())  # nothing has happened yet
        with pytest.raises(dp_compile.UnsupportedModuleError, match="belongs to a replicated module already"):
            dp_compile.replicate(mlp(), config=AOT).register_comm_hook(state, Rounded())

    @pytest.mark.parametrize(
        ("fault", "message"),
        [
            ("writes, compiled", "wrote to a tensor that it was given"),
            ("writes", "wrote to a tensor that it was given"),
            ("more rounds", r"must yield one tensor per round \(1\), but yields one more"),
            ("no round", r"must yield one tensor per round \(1\), but yields only 0"),
            ("no tensor", r"must yield one tensor per round \(1\), but yields a value of type int"),
            ("odd parts", "yields 3 elements for all_to_all, which are not divisible by 2 ranks"),
            ("nothing", "must return the reduced gradients and the state of each, got None"),
            ("other shapes", r"must return tensors of names, shapes and dtypes .*\(7, 6\).*, got .*\(42,\)"),
            ("other names", "must return tensors of names, shapes and dtypes .*, got .*new"),
        ],
    )
    def test_hooks_that_do_not_keep_to_it(self, fault, message):
        model = dp_compile.replicate(mlp(7), config=AOT)
        model.register_comm_hook(dp_compile.HookState(), Faulty(fault.removesuffix(", compiled")))
        with pytest.raises(dp_compile.ConfigError, match=message):
            (compile_whole(model) if "compiled" in fault else model)(batch(0)).sum().backward()


@dataclass(frozen=True)
class Exchanging(dp_compile.FunctionalHook):
    """The mean, by a reduce-scatter: each rank adds up a part, in units that differ from rank to rank."""

    rounds: ClassVar[tuple[str, ...]] = ("all_to_all", "all_gather")

    def reduce(self, bucket):
        flat = torch.cat([gradient.flatten() for gradient in bucket.gradients])
        parts = F.pad(flat, (0, -flat.numel() % bucket.ranks)).view(bucket.ranks, -1)
        received = yield parts.view(torch.uint8)  # two dimensions, and not the gradients' dtype
        mine = received.view(flat.dtype).view(parts.shape).sum(0) / bucket.ranks
        mean = (yield mine)[: flat.numel()]
        sizes = [each.numel() for each in bucket.gradients]
        pairs = zip(mean.split(sizes), bucket.gradients, strict=True)
        return [part.view_as(like) for part, like in pairs], bucket.state


def exchanged(way):
    compile_model, broken, options = WAYS[way]
    torch.manual_seed(0)
    ours = nn.Sequential(mlp(7), nn.Tanh(), mlp(5))
    theirs = DistributedDataParallel(copy.deepcopy(ours))
    dp_compile.replicate(ours, **{"config": replace(AOT, bucket_cap_mb=1e-4)} | options)
    ours.register_comm_hook(dp_compile.HookState(), Exchanging())
    train_beside(ours, compile_model(ours), theirs, range(3), broken)
    report = dp_compile.report(ours)
    stages = [[stage.op for stage in each.key.reduction.stages] for each in report.plan.buckets]
    assert len(stages) > 3 or options
    assert all(each == ["all_to_all", "all_gather"] for each in stages[:-1])
    return dict(report.backwards)


@pytest.mark.parametrize("way", ["one rank by hooks", pytest.param("inductor", marks=pytest.mark.nightly)])
def test_hooks_that_exchange_parts(ranks, way):
    found = ranks.run(exchanged, way)
    assert found[0] == {"captured": 3}


def keep(state, bucket):  # torch refuses annotations that are text
    """Twice the gradients, in a tensor that the hook keeps from one backward to the next."""
    state.setdefault(bucket.index(), torch.empty_like(bucket.buffer())).copy_(2 * bucket.buffer())
    future = torch.futures.Future()
    future.set_result(state[bucket.index()])
    return future


@pytest.mark.usefixtures("fake_group")
def test_gradients_do_not_lie_in_a_tensor_that_a_hook_keeps():
    model, state, alone = mlp(7), dict[int, torch.Tensor](), mlp(7)
    alone.load_state_dict(model.state_dict())
    dp_compile.replicate(model, config=replace(AOT, check_reductions=False)).register_comm_hook(state, keep)
    for each in (model, alone):
        each(batch(0)).square().mean().backward()
    for kept in state.values():
        kept.fill_(7.0)
    assert len(state) > 0
    for mine, other in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, 2 * other.grad)


@dataclass(frozen=True)
class Faulty(dp_compile.FunctionalHook):
    fault: str

    @property
    def rounds(self):
        return ("all_to_all",) if self.fault == "odd parts" else ("all_reduce",)

    def reduce(self, bucket):
        gradients, states = list(bucket.gradients), list(bucket.state)
        if self.fault == "writes":
            gradients[0].mul_(0.5)
        if self.fault != "no round":
            yield 3 if self.fault == "no tensor" else torch.ones(3)
        if self.fault == "more rounds":
            yield torch.ones(1)
        if self.fault == "nothing":
            return None
        if self.fault == "other shapes":
            gradients = [each.flatten() for each in gradients]
        return gradients, [{"new": torch.ones(1)}] * len(states) if self.fault == "other names" else states


DTYPES = list(LARGEST)


def played(hook, buckets):
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


def buckets_of(hook, gradients):
    states = [[dict(hook.initial_state(each)) for each in one] for one in gradients]
    pairs = enumerate(zip(gradients, states, strict=True))
    return [HookBucket(one, state, len(gradients), rank) for rank, (one, state) in pairs]


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
def test_the_formula(shapes, ranks, block, dtype, seed, size):
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
def test_parameters_of_one_dimension_travel_in_full_precision(shapes, ranks, dtype):
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


@pytest.mark.parametrize(("dtype", "bad"), list(zip(DTYPES, [torch.inf, torch.nan, torch.inf], strict=True)))
def test_what_is_not_finite_on_one_rank_is_not_finite_on_any(dtype, bad):
    """All of its block, and nothing else: a scaler has to see it."""
    hook = QuantizedHook(dtype, 4, min_ndim=0)
    gradients = [[torch.ones(6), torch.ones(3, 3)] for _ in range(3)]
    gradients[1][1][0, 1] = bad
    for reduced, _ in played(hook, buckets_of(hook, gradients)):
        flat = torch.cat([each.flatten() for each in reduced])
        assert flat.isfinite().tolist() == [True] * 6 + [False] * 4 + [True] * 5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_gradients_of_other_dtypes(dtype):
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


def replicated(state, bucket_cap_mb):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(mlp(7), nn.Tanh(), mlp(5))
    dp_compile.replicate(model, config=replace(AOT, bucket_cap_mb=bucket_cap_mb))
    model.register_comm_hook(state, QuantizedHook(block=4, min_ndim=0))
    return model


def all_ranks(value):
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


@on_ranks("ranks2")
def test_nothing_is_lost_for_good():
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


THREE_SHAPES = [(64, 32), (7,), (16, 4, 3, 3)]


@dataclass(frozen=True)
class Twice(dp_compile.FunctionalHook):
    """The average in bfloat16, then what that lost of each first row."""

    rounds: ClassVar[tuple[str, ...]] = ("all_reduce", "all_reduce")

    def reduce(self, bucket):
        yield torch.cat([each.flatten() for each in bucket.gradients]).bfloat16()
        yield torch.cat([each[0].flatten() for each in bucket.gradients])
        return bucket.gradients, bucket.state


KEY, _HOOK = register(Twice())


@pytest.mark.usefixtures("fake_group")
def test_a_bucket_sends_what_its_hook_hands_out():
    """As where it reduces real tensors; predictions count that, and step files keep it."""
    world = dist.group.WORLD
    group = Group(world, distributed.group_name(world), GLOO, 2, Averaging(hook=KEY, rounds=Twice.rounds))
    parameters = [torch.nn.Parameter(torch.randn(shape)) for shape in THREE_SHAPES]
    *gradients, flags = gradient_specs(parameters, [f"p{number}" for number in range(len(THREE_SHAPES))], group)
    assert [each.sent for each in gradients] == [(16 * 36 * 2, 36 * 4), (7 * 2, 4), (64 * 32 * 2, 32 * 4)]
    sent = [sum(each) for each in zip(*(each.sent for each in gradients), strict=True)]
    run = HookRun(KEY, HookBucket([torch.randn(shape) for shape in THREE_SHAPES], [{}] * len(THREE_SHAPES), 2, 0))
    (first,) = run.step([])
    (second,) = run.step([first])
    assert [first.nbytes, second.nbytes] == sent

    buckets = bucket_of(gradients, PACKED), bucket_of([flags], PACKED)
    base = step_of_buckets(1)
    step = Step("dp_compile", "fixed", 4, GLOO, "cpu", BucketPlan(buckets), base.ready, base.cost, "stated")
    expected = sum(step.cost.seconds(nbytes) for nbytes in (*sent, flags.nbytes))
    assert step.communication_s == pytest.approx(expected, rel=1e-9)
    assert Step.from_json(step.to_json()).communication_s == predict(step).communication_s == step.communication_s
    # In the place of the hook: all bytes, in one round.
    plain = predict(step, dtype="float32")
    assert plain.plan.gradients[0].key.reduction.hook is None
    assert plain.communication_s == pytest.approx(sum(step.cost.seconds(each.nbytes) for each in buckets), rel=1e-9)
