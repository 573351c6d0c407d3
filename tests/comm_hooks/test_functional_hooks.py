"""Comm hooks as pure functions, with state that lasts: the same as torch's DDP with the same hook, in every way."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from parity import AOT, batch, compile_whole, mlp, not_compiled, train_beside
from reference_hooks import Rounded, as_torch_s
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import dp_compile
from dp_compile.testing.ranks import Ranks


class Net(nn.Module):
    """The second rank does not use all of it."""

    def __init__(self, uneven: bool = False) -> None:
        super().__init__()
        self.first, self.last, self.spare = mlp(7), mlp(5), nn.Linear(6, 6, bias=False)
        self.uneven = uneven

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if not self.uneven or dist.get_rank() == 0:
            x = x + self.spare(x)
        result: torch.Tensor = self.last(x)
        return result


def pair(uneven: bool = False, **options: Any) -> tuple[nn.Module, DistributedDataParallel, dp_compile.HookState]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    ours = Net(uneven)
    theirs = DistributedDataParallel(copy.deepcopy(ours), find_unused_parameters=uneven)
    theirs.register_comm_hook({}, as_torch_s)
    dp_compile.replicate(ours, **{"config": AOT, "find_unused_parameters": uneven} | options)
    state = dp_compile.HookState()
    ours.register_comm_hook(state, Rounded())  # type: ignore[operator]
    return ours, theirs, state


NEVER: Callable[[int], bool] = lambda step: False  # noqa: E731
WAYS: dict[str, tuple[Callable[[nn.Module], Any], Callable[[int], bool], dict[str, Any]]] = {
    "inductor": (compile_whole, NEVER, {"config": dp_compile.ReplicateConfig(bucket_cap_mb=1e-5)}),
    "a new plan": (compile_whole, NEVER, {"config": AOT}),
    "one rank by hooks": (compile_whole, lambda step: step % 2 == 1 and dist.get_rank() == 1, {}),
    "not compiled": (not_compiled, NEVER, {}),
}  # fmt: skip


def run_as_torch_s(way: str, micro: int = 1, uneven: bool = False) -> dict[str, int]:
    compile_model, broken, options = WAYS[way]
    ours, theirs, state = pair(uneven, **options)
    train_beside(ours, compile_model(ours), theirs, range(4), broken, micro)
    assert state.backwards == 4
    assert state.state_dict()["tensors"]["first.0.weight"]["seen"].item() == 4
    report = dp_compile.report(ours)
    (flags,) = (bucket for bucket in report.plan.buckets if any(each.gradient.index == 9 for each in bucket.members))
    assert (len(flags.members), flags.key.reduction.hook) == (1, None)
    dp_compile.unreplicate(ours)
    return dict(report.backwards)


@pytest.mark.parametrize("way", ["a new plan", "not compiled"])
def test_as_torch_s_ddp(ranks2: Ranks, way: str) -> None:
    found = ranks2.run(run_as_torch_s, way)
    assert found == [{"eager hooks" if way == "not compiled" else "captured": 4}] * 2


def test_accumulation_and_what_a_rank_does_not_use(ranks2: Ranks) -> None:
    found = ranks2.run(run_as_torch_s, "one rank by hooks", 2, True)
    counts = [{key: each[key] for key in each if "sync" not in key} for each in found]
    assert counts == [{"captured": 4}, {"captured": 2, "eager hooks": 2}]


@on_ranks("ranks2")
def test_a_state_is_saved_and_goes_on_in_other_buckets() -> None:
    """Half of the steps with many buckets, the rest in another module, with one. Ranks compare what they load."""
    ours, theirs, state = pair(config=replace(AOT, bucket_cap_mb=1e-5))
    train_beside(ours, compile_whole(ours), theirs, range(2), NEVER)
    saved = pickle.loads(pickle.dumps(state.state_dict()))
    weights = copy.deepcopy(ours.state_dict())
    dp_compile.unreplicate(ours)
    again: Any = Net()
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
    dp_compile.unreplicate(again)


@on_ranks("ranks2")
def test_join() -> None:
    ours, theirs, state = pair()
    run = compile_whole(ours)
    with dp_compile.join(ours):
        for number in range(2 + dist.get_rank()):
            ours.zero_grad()
            run(batch(number)).square().mean().backward()
    with theirs.join():
        for number in range(2 + dist.get_rank()):
            theirs.zero_grad()
            theirs(batch(number)).square().mean().backward()
    assert state.backwards == 3
    # What the rank without inputs did not send yet it sends in the steps that follow.
    train_beside(ours, run, theirs, range(3, 5), NEVER)
    dp_compile.unreplicate(ours)


@pytest.mark.usefixtures("fake_group")
class TestAlone:
    def test_a_warm_up_leaves_no_trace(self) -> None:
        torch._dynamo.reset()
        model, state = dp_compile.replicate(mlp(), config=AOT), dp_compile.HookState()
        model.register_comm_hook(state, Rounded())
        run = compile_whole(model)
        dp_compile.warmup(model, [batch(0)], lambda x: run(x).sum())
        assert state.backwards == 0
        assert all(not each["seen"].any() for each in state.state_dict()["tensors"].values())
        run(batch(0)).sum().backward()
        assert all(each["seen"].any() for each in state.state_dict()["tensors"].values())
        dp_compile.unreplicate(model)

    def test_what_is_not_finite_is_not_remembered(self) -> None:
        """A scaler skips such a step; the memory would hand it on to all that follow."""
        torch._dynamo.reset()
        model, state = dp_compile.replicate(mlp(), config=AOT), dp_compile.HookState()
        model.register_comm_hook(state, Rounded())
        run = compile_whole(model)
        run(batch(0)).sum().backward()
        before = state.state_dict()["tensors"]
        (run(batch(1)) * torch.inf).sum().backward()
        assert not all(
            parameter.grad.isfinite().all() for parameter in model.parameters() if parameter.grad is not None
        )
        after = state.state_dict()["tensors"]
        assert all(torch.equal(before[name][key], after[name][key]) for name in before for key in before[name])
        assert state.backwards == 2
        dp_compile.unreplicate(model)

    def test_what_is_refused(self) -> None:
        model, state = dp_compile.replicate(mlp(), config=AOT), dp_compile.HookState()

        def register(to: Any, kept: Any, hook: Any = Rounded()) -> None:  # noqa: B008
            to.register_comm_hook(kept, hook)

        other = dp_compile.HookState()
        other.load_state_dict({"backwards": 1, "tensors": {"0.weight": {"error": torch.zeros(3)}}})
        for text, attempt in (
            ("state_dict is not the state of a comm hook: KeyError", lambda: state.load_state_dict({"tensors": {}})),
            (r"does not match 0.bias: it has nothing, the hook expects {'error'", lambda: register(model, other)),
            ("must be a HookState, got NoneType", lambda: register(model, None)),
            ("contains a memory address", lambda: register(model, state, dp_compile.FunctionalHook())),
        ):
            with pytest.raises(dp_compile.ConfigError, match=text):
                attempt()
        register(model, state)  # nothing has happened yet
        with pytest.raises(dp_compile.UnsupportedModuleError, match="belongs to a replicated module already"):
            register(dp_compile.replicate(mlp(), config=AOT), state)

    @pytest.mark.parametrize(
        ("fault", "message"),
        [
            ("writes, compiled", "wrote to a tensor that it was given"),
            ("writes", "wrote to a tensor that it was given"),
            ("more rounds", "must yield 1 tensors, one per round, but yields once more"),
            ("no round", "has 1 rounds, but yields 0 tensors only"),
            ("no tensor", "must yield 1 tensors, one per round, but yields int"),
            ("odd parts", "yields 3 elements for all_to_all, which are not divisible by 2 ranks"),
            ("nothing", "must return the reduced gradients and the state of each, got None"),
            ("other shapes", r"must return tensors of shapes and dtypes .*\(7, 6\).*, got .*\(42,\)"),
            ("other names", "must return state with the names that it was given"),
        ],
    )
    def test_hooks_that_do_not_keep_to_it(self, fault: str, message: str) -> None:
        torch._dynamo.reset()
        model = dp_compile.replicate(mlp(7), config=AOT)
        model.register_comm_hook(dp_compile.HookState(), Faulty(fault.removesuffix(", compiled")))
        with pytest.raises(dp_compile.ConfigError, match=message):
            (compile_whole(model) if "compiled" in fault else model)(batch(0)).sum().backward()
        dp_compile.unreplicate(model)


@dataclass(frozen=True)
class Exchanging(dp_compile.FunctionalHook):
    """The mean, by a reduce-scatter: each rank adds up a part, in units that differ from rank to rank."""

    rounds: ClassVar[tuple[str, ...]] = ("all_to_all", "all_gather")

    def reduce(self, bucket: dp_compile.HookBucket) -> Generator[torch.Tensor, torch.Tensor, Any]:
        flat = torch.cat([gradient.flatten() for gradient in bucket.gradients])
        parts = F.pad(flat, (0, -flat.numel() % bucket.ranks)).view(bucket.ranks, -1)
        received = yield parts.view(torch.uint8)  # two dimensions, and not the gradients' dtype
        mine = received.view(flat.dtype).view(parts.shape).sum(0) / bucket.ranks
        mean = (yield mine)[: flat.numel()]
        sizes = [each.numel() for each in bucket.gradients]
        pairs = zip(mean.split(sizes), bucket.gradients, strict=True)
        return [part.view_as(like) for part, like in pairs], bucket.state


def exchanged(way: str) -> dict[str, int]:
    compile_model, broken, options = WAYS[way]
    torch._dynamo.reset()
    torch.manual_seed(0)
    ours = nn.Sequential(mlp(7), nn.Tanh(), mlp(5))
    theirs = DistributedDataParallel(copy.deepcopy(ours))
    dp_compile.replicate(ours, **{"config": replace(AOT, bucket_cap_mb=1e-4)} | options)
    ours.register_comm_hook(dp_compile.HookState(), Exchanging())  # type: ignore[operator]
    train_beside(ours, compile_model(ours), theirs, range(3), broken)
    report = dp_compile.report(ours)
    stages = [[stage.op for stage in each.key.reduction.stages] for each in report.plan.buckets]
    assert len(stages) > 3 or options
    assert all(each == ["all_to_all", "all_gather"] for each in stages[:-1])
    dp_compile.unreplicate(ours)
    return dict(report.backwards)


@pytest.mark.parametrize("way", ["one rank by hooks", pytest.param("inductor", marks=pytest.mark.nightly)])
def test_hooks_that_exchange_parts(ranks: Ranks, way: str) -> None:
    found = ranks.run(exchanged, way)
    assert found[0] == {"captured": 3}


def torch_s_own(name: str) -> dict[str, int]:
    """PowerSGD draws numbers in the order of a bucket: of ready gradients in torch, of registration here."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    ours = nn.Sequential(mlp(7), nn.Tanh(), mlp(5))
    theirs = DistributedDataParallel(copy.deepcopy(ours))
    dp_compile.replicate(ours, config=AOT)
    alone, _ = dist.new_subgroups(1)
    for model in (ours, theirs):
        if name == "PowerSGD":
            options = {"matrix_approximation_rank": 1, "start_powerSGD_iter": 2, "min_compression_rate": 1.5}
            model.register_comm_hook(PowerSGDState(None, **options), powerSGD_hook)  # type: ignore[operator]
        else:
            model.register_comm_hook(PostLocalSGDState(None, alone, 2), post_localSGD_hook)  # type: ignore[operator]
    for step in range(5):
        for run, model in ((compile_whole(ours), ours), (theirs, theirs)):
            model.zero_grad()
            run(batch(step)).square().mean().backward()
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-5, atol=1e-7)
    found = dict(dp_compile.report(ours).backwards)
    dp_compile.unreplicate(ours)
    return found


def keep(state, bucket):  # type: ignore[no-untyped-def]  # torch refuses annotations that are text
    """Twice the gradients, in a tensor that the hook keeps from one backward to the next."""
    state.setdefault(bucket.index(), torch.empty_like(bucket.buffer())).copy_(2 * bucket.buffer())
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(state[bucket.index()])
    return future


@pytest.mark.usefixtures("fake_group")
def test_gradients_do_not_lie_in_a_tensor_that_a_hook_keeps() -> None:
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
    dp_compile.unreplicate(model)


@pytest.mark.parametrize("name", ["PowerSGD", "post-local SGD"])
def test_torch_s_hooks_that_remember(ranks2: Ranks, name: str) -> None:
    assert ranks2.run(torch_s_own, name) == [{"eager hooks": 5}] * 2


@dataclass(frozen=True)
class Faulty(dp_compile.FunctionalHook):
    fault: str

    @property
    def rounds(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("all_to_all",) if self.fault == "odd parts" else ("all_reduce",)

    def reduce(self, bucket: dp_compile.HookBucket) -> Generator[torch.Tensor, torch.Tensor, Any]:
        gradients, states = list(bucket.gradients), list(bucket.state)
        if self.fault == "writes":
            gradients[0].mul_(0.5)
        if self.fault != "no round":
            yield 3 if self.fault == "no tensor" else torch.ones(3)  # type: ignore[misc]
        if self.fault == "more rounds":
            yield torch.ones(1)
        if self.fault == "nothing":
            return None
        if self.fault == "other shapes":
            gradients = [each.flatten() for each in gradients]
        return gradients, [{"new": torch.ones(1)}] * len(states) if self.fault == "other names" else states
