"""The class of a replicated module, its methods, its start at the first forward, and communication hooks."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from parity import same_on_all_ranks
from torch import nn
from torch.distributed._composable import replicate as torch_replicate
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import dp_compile
from dp_compile.replication.module import InputMover, replica_of
from dp_compile.testing.ranks import Ranks

AOT = dp_compile.ReplicateConfig(backend="aot_eager")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
        self.head = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


class OwnCopy(nn.Linear):
    """Says itself how it is copied, by class and attributes."""

    def __deepcopy__(self, memo: dict[int, Any]) -> OwnCopy:
        twin = type(self)(self.in_features, self.out_features)
        twin.load_state_dict(self.state_dict())
        return twin


# --- the class --------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("fake_group")
class TestClass:
    def test_is_a_subclass_of_both_and_gets_its_class_back(self) -> None:
        model = dp_compile.replicate(Net())
        assert type(model).__name__ == "DDPNet"
        assert isinstance(model, Net)
        assert isinstance(model, dp_compile.ReplicatedModule)
        assert repr(model).startswith("DDPNet(")
        assert type(model) is type(dp_compile.replicate(Net()))
        assert type(dp_compile.unreplicate(model)) is Net
        assert not model._forward_pre_hooks
        assert type(dp_compile.replicate(model)).__name__ == "DDPNet"

    def test_containers_can_be_indexed_and_sliced(self) -> None:
        layers = dp_compile.replicate(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)))
        assert type(layers[:2]) is nn.Sequential
        assert layers[:2](torch.ones(1, 2)).shape == (1, 3)
        assert layers[2].weight is layers[-1].weight
        blocks = dp_compile.replicate(nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]))
        assert type(blocks + nn.ModuleList([nn.ReLU()])) is nn.ModuleList

    def test_copies_and_pickles_are_plain(self, tmp_path: Path) -> None:
        """Also where something inside points back, and with the user's hooks, but without ours."""
        model = dp_compile.replicate(Net())
        model.register_forward_pre_hook(hook_of_the_user)
        model.head.root = [model]
        pickles = [partial(pickle.dumps, protocol=protocol) for protocol in (2, pickle.HIGHEST_PROTOCOL)]
        for copied in (copy.deepcopy, *(lambda module, dumps=dumps: pickle.loads(dumps(module)) for dumps in pickles)):
            for twin in (copied(model), copied(nn.Sequential(model))[0]):
                assert type(twin) is Net
                assert twin.head.root == [twin]
                assert list(twin._forward_pre_hooks.values()) == [hook_of_the_user]
                twin(torch.ones(1, 4)).sum().backward()
                torch.testing.assert_close(twin.head.weight, model.head.weight)
                with pytest.raises(dp_compile.UnsupportedModuleError, match="Net is not replicated"):
                    dp_compile.report(twin)
                assert type(dp_compile.replicate(twin)).__name__ == "DDPNet"
        assert type(model).__name__ == "DDPNet"
        torch.save(dp_compile.replicate(nn.Sequential(nn.Linear(2, 2))), tmp_path / "model.pt")
        code = (
            "import sys, torch; sys.modules['dp_compile'] = None; "
            f"print(type(torch.load({str(tmp_path / 'model.pt')!r}, weights_only=False)).__name__)"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == "Sequential"

    def test_classes_that_say_how_they_are_copied(self) -> None:
        wrapper = dp_compile.DistributedDataParallel(Net(), config=AOT)
        average = AveragedModel(wrapper, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        average.update_parameters(wrapper)
        with torch.no_grad():
            wrapper.module.head.bias += 1
        average.update_parameters(wrapper)
        torch.testing.assert_close(average.module.module.head.bias + 0.5, wrapper.module.head.bias)
        for plain in (OwnCopy(2, 3), torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 3)))):
            kind, model = type(plain), dp_compile.replicate(plain, config=AOT)
            twin = AveragedModel(model).module
            assert isinstance(twin, OwnCopy if kind is OwnCopy else torch.fx.GraphModule)
            assert not isinstance(twin, dp_compile.ReplicatedModule)
            assert not twin._forward_pre_hooks
            for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
                assert torch.equal(mine, other)
                assert mine is not other

    def test_compiled_before_and_after(self) -> None:
        before, after = Net(), Net()
        compiled_before = torch.compile(before, backend="aot_eager", fullgraph=True)
        compiled_before(torch.ones(1, 4))
        dp_compile.replicate(before, config=AOT)
        compiled_after = torch.compile(dp_compile.replicate(after, config=AOT), backend="aot_eager", fullgraph=True)
        for model, compiled in ((before, compiled_before), (after, compiled_after)):
            compiled(torch.ones(1, 4)).sum().backward()
            assert dp_compile.report(model).backwards == {"captured": 1}


def hook_of_the_user(module: nn.Module, args: tuple[Any, ...]) -> None:
    """A forward pre-hook that does nothing."""


@pytest.mark.usefixtures("fake_group")
def test_no_sync_returns_to_what_was_before() -> None:
    model = dp_compile.replicate(Net())
    for sync in (False, True):
        model.set_requires_gradient_sync(sync)
        with model.no_sync():
            assert not replica_of(model).state.sync
        assert replica_of(model).state.sync is sync


@pytest.mark.usefixtures("fake_group")
def test_inputs_are_moved_inside_a_compiled_forward() -> None:
    model = dp_compile.replicate(nn.Linear(4, 2), config=AOT)
    model.register_forward_pre_hook(InputMover(torch.device("cpu")), with_kwargs=True)
    mover = InputMover(torch.device("meta"))
    (positional, other), named = mover(nn.Identity(), (torch.ones(2), 3), {"mask": [torch.ones(2)], "flag": None})
    assert (positional.device.type, named["mask"][0].device.type) == ("meta", "meta")
    assert (other, named["flag"]) == (3, None)
    compiled = torch.compile(nn.Sequential(Net().body, nn.Linear(3, 4), model), backend="aot_eager", fullgraph=True)
    compiled(torch.ones(1, 4)).sum().backward()
    assert dp_compile.report(model).backwards == {"captured": 1}


# --- the start at the first forward -----------------------------------------------------------------------------


@pytest.mark.usefixtures("fake_group")
class TestPending:
    def test_meta(self) -> None:
        with torch.device("meta"):
            model = Net()
        dp_compile.replicate(model, config=AOT)
        assert type(model).__name__ == "DDPNet"
        assert isinstance(model, Net)
        with pytest.raises(dp_compile.UnsupportedModuleError, match="Net is not replicated yet"):
            dp_compile.report(model)
        with pytest.raises(dp_compile.UnsupportedModuleError, match=r"body\.0\.weight is on the meta device.*to_empty"):
            model(torch.ones(1, 4))
        model.to_empty(device="cpu")(torch.ones(1, 4))
        torch.compile(nn.Sequential(model), backend="aot_eager", fullgraph=True)(torch.ones(1, 4))  # nothing is left
        assert [len(each._forward_pre_hooks) for each in model.modules()] == [1, 0, 0, 0, 0]

    def test_lazy(self) -> None:
        """Parameters need values by the start; torch has no word on which one has none."""
        x = torch.ones(3, 4)
        with pytest.raises(RuntimeError):
            torch_replicate(nn.Sequential(nn.LazyLinear(2)))(x)
        lazy = dp_compile.replicate(nn.Sequential(nn.LazyLinear(2)), config=AOT)
        with pytest.raises(
            dp_compile.UnsupportedModuleError, match=r"Sequential is replicated already, it starts with its first"
        ):
            dp_compile.replicate(lazy)
        with pytest.raises(
            dp_compile.UnsupportedModuleError, match=r"0\.weight is lazy\. Run one forward .* before replicate"
        ):
            lazy(x)
        assert type(dp_compile.unreplicate(lazy)) is nn.Sequential
        lazy(x).sum().backward()
        itself = dp_compile.replicate(nn.LazyLinear(2), config=AOT)
        itself(x)
        assert replica_of(itself).names == ("weight", "bias")
        assert type(itself).__name__ == "DDPLinear"
        with pytest.raises(dp_compile.UnsupportedModuleError, match="LazyLinear has lazy parameters"):
            dp_compile.DistributedDataParallel(nn.LazyLinear(2))

    def test_before_the_start(self) -> None:
        """Options are checked at once, copies are plain, and a part that runs first starts the whole."""
        with torch.device("meta"):
            model = Net()
        with pytest.raises(dp_compile.ConfigError, match="bucket_cap_mb must be > 0"):
            dp_compile.replicate(model, bucket_cap_mb=0)
        dp_compile.replicate(model)
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert type(twin) is Net
            twin.body.to_empty(device="cpu")(torch.ones(3, 4)).sum().backward()
        with pytest.raises(dp_compile.UnsupportedModuleError, match="not replicated yet"):
            dp_compile.report(model)
        model.to_empty(device="cpu").body(torch.ones(1, 4))
        assert replica_of(model).names[0] == "body.0.weight"


@on_ranks("ranks")
def test_starts_as_torchs_replicate() -> None:
    """Ranks draw different initial values and see different inputs; the first forward is one without a reduction."""
    torch._dynamo.reset()
    with torch.device("meta"):
        models = [Net(), Net()]
    dp_compile.replicate(models[0], config=AOT)
    torch_replicate(models[1])
    for model in models:
        model.to_empty(device="cpu")
        torch.manual_seed(dist.get_rank())
        for parameter in model.parameters():
            nn.init.normal_(parameter)
    runs = [torch.compile(models[0], backend="aot_eager"), models[1]]
    for step in range(4):
        for model, run in zip(models, runs, strict=True):
            model.set_requires_gradient_sync(step % 2 == 1)
            run(torch.full((2, 4), 1.0 + step + dist.get_rank())).square().mean().backward()
        for mine, other in zip(*(model.parameters() for model in models), strict=True) if step % 2 else ():
            torch.testing.assert_close((mine, mine.grad), (other, other.grad))
            with torch.no_grad():
                for each in (mine, other):
                    each -= 0.1 * each.grad
                    each.grad = None
    same_on_all_ranks(models[0])
    assert dp_compile.report(models[0]).backwards == {"captured": 2, "without sync": 2}


# --- communication hooks ----------------------------------------------------------------------------------------


def no_hook(state: Any) -> None:
    """Takes too little."""


@pytest.mark.usefixtures("fake_group")
class TestCommHooks:
    def test_bad_hooks(self) -> None:
        bf16 = default_hooks.bf16_compress_wrapper(default_hooks.fp16_compress_hook)
        hooks: list[tuple[Any, str]] = [
            (3, r"must be a function of \(state, bucket\), got int"),
            (no_hook, r"no_hook must take \(state, bucket\), takes \(state: 'Any'\)"),
            (bf16, "bf16_compress_wrapper.* needs NCCL or XCCL, the group's backend is fake"),
        ]
        for hook, message in hooks:
            for model in (dp_compile.replicate(Net()), dp_compile.DistributedDataParallel(Net())):
                with pytest.raises(dp_compile.ConfigError, match=message):
                    model.register_comm_hook(None, hook)
                assert dp_compile.report(model).mode == "python hooks"

    def test_once_and_before_the_first_backward(self) -> None:
        model = dp_compile.replicate(Net(), config=AOT)
        model.register_comm_hook(None, default_hooks.allreduce_hook)
        with pytest.raises(dp_compile.UnsupportedModuleError, match="Net has a comm hook already, allreduce_hook"):
            model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        model = dp_compile.replicate(Net(), config=AOT)
        model(torch.ones(1, 4)).sum().backward()
        with pytest.raises(dp_compile.UnsupportedModuleError, match="a backward of Net has run already"):
            model.register_comm_hook(None, default_hooks.allreduce_hook)

    def test_the_report_says_why_one_is_not_captured(self) -> None:
        hooks: list[tuple[Any, Any, str]] = [
            (local_hook, [], "what it does is not known here"),
            (default_hooks.allreduce_hook, dist.new_group([0]), "it averages over another group than the module's"),
        ]
        for hook, state, why in hooks:
            model = dp_compile.replicate(Net(), config=AOT)
            model.register_comm_hook(state, hook)
            text = f"comm hook {hook.__name__} is called with each bucket: {why}"
            assert dp_compile.report(model).why_not_captured.startswith(text)
            dp_compile.unreplicate(model)

    def test_before_the_start(self) -> None:
        with torch.device("meta"):
            model = Net()
        calls: list[int] = []
        dp_compile.replicate(model, config=AOT).to_empty(device="cpu").register_comm_hook(calls, local_hook)
        model(torch.ones(3, 4)).sum().backward()
        assert len(calls) > 0
        assert dp_compile.report(model).mode == "python hooks, comm hook local_hook"


def local_hook(state: list[int], bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Leaves the bucket as it is; the fake group's futures hold nothing."""
    state.append(bucket.buffer().numel())
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def counting_hook(state, bucket):  # type: ignore[no-untyped-def]  # torch's DDP refuses annotations that are text
    """Doubles the average, and writes down the size of the bucket."""
    state.append(bucket.buffer().numel())
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda done: done.value()[0] * 2 / dist.get_world_size())


HOOKS = {"ours": counting_hook, "fp16": default_hooks.fp16_compress_hook}


@pytest.mark.parametrize(("how", "name"), [("compiled", "fp16"), ("wrapper", "ours")])
@on_ranks("ranks")
def test_comm_hook_as_torch_ddp(how: str, name: str) -> None:
    """Compare with torch's DDP with the same hook; with accumulation, compiled, over a few steps."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain = Net()
    theirs = TorchDDP(copy.deepcopy(plain))
    ours: Any = dp_compile.DistributedDataParallel(plain, config=AOT) if how == "wrapper" else plain
    if how != "wrapper":
        dp_compile.replicate(plain, config=AOT)
    states: list[list[int]] = [[], []]
    for model, state in ((ours, states[0]), (theirs, states[1])):
        model.register_comm_hook(state if name == "ours" else None, HOOKS[name])
    run = torch.compile(ours, backend="aot_eager")
    for step in range(3):
        for micro_step in range(2):
            x = torch.randn(2, 4, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
            for model, forward in ((ours, run), (theirs, theirs)):
                with model.no_sync() if micro_step == 0 else nullcontext():
                    forward(x).square().mean().backward()
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            # Of more than two ranks another one adds first, and rounds, where a gradient lies elsewhere in its bucket.
            rounded = {"rtol": 0.01, "atol": 1e-3} if name == "fp16" and dist.get_world_size() > 2 else {}
            torch.testing.assert_close(mine.grad, other.grad, **rounded)
            mine.grad = other.grad = None
    assert states[0] == states[1]
    assert (len(states[0]) > 0) is (name == "ours")
    known = {"without sync": 3, "captured": 3}  # what it does
    assert dp_compile.report(ours).backwards == (known if name == "fp16" else {"without sync": 3, "eager hooks": 3})


def other_calls() -> list[str]:
    """What each rank raises of hooks that differ, and of what is refused on rank 1 alone."""
    raised, second = [], dist.get_rank() == 1
    for attempt in (
        lambda module: module.register_comm_hook([], counting_hook if second else default_hooks.allreduce_hook),
        lambda module: module.register_comm_hook(None, 3 if second else default_hooks.allreduce_hook),
        lambda module: module.set_gradient_divide_factor(0.0 if second else 2.0),
    ):
        module = dp_compile.replicate(nn.Linear(2, 2))
        with pytest.raises(dp_compile.DPCompileError) as error:
            attempt(module)
        raised.append(f"{type(error.value).__name__}: {error.value}")
        dp_compile.unreplicate(module)
    return raised


def test_ranks_with_other_comm_hooks(ranks2: Ranks) -> None:
    """All ranks hear at once; they waited for it, as long as their group waits."""
    first, second = ranks2.run(other_calls, timeout_s=60.0)
    for text in (first[0], second[0]):
        assert text.startswith("DesyncError: register_comm_hook(): rank 1 differs from rank 0")
        assert 'comm hook is "counting_hook" there, "allreduce_hook" on rank 0' in text
    for raised, own, call in zip(first[1:], second[1:], ("register_comm_hook()", "set_gradient_divide_f"), strict=True):
        assert raised.startswith(f"DesyncError: {call}")
        assert own.startswith("ConfigError: ")
        assert own.removeprefix("ConfigError: ") in raised
