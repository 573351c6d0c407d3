"""The class of a replicated module, its methods, its start at the first forward, and communication hooks."""

from __future__ import annotations

import copy
import gc
import io
import logging
import pickle
import subprocess
import sys
import weakref
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import dp_compile
from dp_compile.modules.forward_hooks import InputMover
from dp_compile.modules.replicated_module import replica_of
from dp_compile.testing.ranks import Ranks

AOT = dp_compile.ReplicateConfig(backend="aot_eager")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
        self.head = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


class LazyNet(nn.Module):
    """Two lazy layers, dropout, and statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d(), nn.Dropout(0.5))
        self.head = nn.LazyLinear(2)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return self.head(self.body(x)) * scale


class Around(nn.Module):
    """Calls a module between two operations."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x * 2) + 1


# --- the class --------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("fake_group")
class TestClass:
    def test_is_a_subclass_of_both(self) -> None:
        model = dp_compile.replicate(Net())
        assert type(model).__name__ == "DDPNet"
        assert isinstance(model, Net)
        assert isinstance(model, dp_compile.ReplicatedModule)
        assert repr(model).startswith("DDPNet(")
        assert type(model) is type(dp_compile.replicate(Net()))

    def test_unreplicate_gives_the_class_back(self) -> None:
        model = dp_compile.replicate(Net())
        assert type(dp_compile.unreplicate(model)) is Net
        assert not model._forward_pre_hooks
        assert type(dp_compile.replicate(model)).__name__ == "DDPNet"

    def test_the_wrapper_leaves_the_class_alone(self) -> None:
        inner = Net()
        dp_compile.DistributedDataParallel(torch.compile(inner, backend="aot_eager"))
        assert type(inner) is Net
        wrapped = dp_compile.DistributedDataParallel(Net())
        assert type(wrapped.module) is Net
        twin = copy.deepcopy(wrapped.module)
        twin(torch.ones(1, 4)).sum().backward()
        with pytest.raises(dp_compile.ModuleError, match="Net is not replicated"):
            dp_compile.report(twin)

    def test_containers_can_be_indexed_and_sliced(self) -> None:
        layers = dp_compile.replicate(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)))
        assert layers[0].out_features == 3
        assert [type(layer) for layer in layers] == [nn.Linear, nn.ReLU, nn.Linear]
        assert type(layers[:2]) is nn.Sequential
        assert layers[:2](torch.ones(1, 2)).shape == (1, 3)
        assert layers[2].weight is layers[-1].weight
        blocks = dp_compile.replicate(nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]))
        assert type(blocks[1:]) is nn.ModuleList
        assert blocks[1:][0] is blocks[1]
        assert type(blocks + nn.ModuleList([nn.ReLU()])) is nn.ModuleList

    def test_copies_are_plain(self) -> None:
        """Also where something inside points back, and with hooks of the user's, but without ours."""
        model = dp_compile.replicate(Net())
        model.register_forward_pre_hook(hook_of_the_user)
        model.head.root = [model]
        for outermost in (model, nn.Sequential(model)):
            twin = copy.deepcopy(outermost)
            twin = twin if outermost is model else twin[0]
            assert type(twin) is Net
            assert twin.head.root == [twin]
            assert list(twin._forward_pre_hooks.values()) == [hook_of_the_user]
            twin(torch.ones(1, 4)).sum().backward()
            with pytest.raises(dp_compile.ModuleError, match="Net is not replicated"):
                dp_compile.report(twin)
        assert type(model).__name__ == "DDPNet"

    @pytest.mark.parametrize("protocol", [2, pickle.HIGHEST_PROTOCOL])
    @pytest.mark.parametrize("inside", [False, True])
    def test_pickles_hold_the_plain_module(self, inside: bool, protocol: int) -> None:
        model = dp_compile.replicate(Net())
        model.register_forward_pre_hook(hook_of_the_user)
        loaded = pickle.loads(pickle.dumps(nn.Sequential(model) if inside else model, protocol))
        loaded = loaded[0] if inside else loaded
        assert type(loaded) is Net
        assert list(loaded._forward_pre_hooks.values()) == [hook_of_the_user]
        loaded(torch.ones(1, 4)).sum().backward()
        torch.testing.assert_close(loaded.head.weight, model.head.weight)
        with pytest.raises(dp_compile.ModuleError, match="Net is not replicated"):
            dp_compile.report(loaded)
        assert type(dp_compile.replicate(loaded)).__name__ == "DDPNet"

    def test_a_file_loads_without_this_package(self, tmp_path: Path) -> None:
        torch.save(dp_compile.replicate(nn.Sequential(nn.Linear(2, 2))), tmp_path / "model.pt")
        code = (
            "import sys, torch; sys.modules['dp_compile'] = None; "
            f"print(type(torch.load({str(tmp_path / 'model.pt')!r}, weights_only=False)).__name__)"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == "Sequential"

    def test_state_dict_is_that_of_the_module(self) -> None:
        plain = Net()
        model = dp_compile.replicate(Net())
        assert list(model.state_dict()) == list(plain.state_dict())
        plain.load_state_dict(model.state_dict())
        model.load_state_dict(plain.state_dict(), strict=True)
        buffer = io.BytesIO()
        torch.save(model.state_dict(), buffer)

    def test_a_class_that_refuses_subclasses(self) -> None:
        class Final(nn.Linear):
            def __init_subclass__(cls) -> None:
                raise TypeError("Final is final")

        model = Final(2, 2)
        with pytest.raises(
            dp_compile.ModuleError,
            match=r"Final cannot be given to replicate.*: Final is final. Use dp_compile.DistributedDataParallel",
        ):
            dp_compile.replicate(model)
        assert type(model) is Final

    def test_a_module_goes_when_nobody_holds_it(self) -> None:
        class Passing(Net):
            pass

        model = dp_compile.replicate(Passing())
        seen = weakref.ref(model)
        del model
        gc.collect()
        assert seen() is None

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


# --- methods ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("fake_group")
class TestMethods:
    def test_requires_gradient_sync(self) -> None:
        model = dp_compile.replicate(Net(), config=AOT)
        compiled = torch.compile(model, backend="aot_eager")
        for on in (False, True, True):
            model.set_requires_gradient_sync(on)
            compiled(torch.ones(1, 4)).sum().backward()
        assert dp_compile.report(model).backwards == {"captured without sync": 1, "captured": 2}

    def test_no_sync_returns_to_what_was_before(self) -> None:
        model = dp_compile.replicate(Net())
        model.set_requires_gradient_sync(False)
        with model.no_sync():
            assert not replica_of(model).sync
        assert not replica_of(model).sync
        model.set_requires_gradient_sync(True)
        with model.no_sync():
            assert not replica_of(model).sync
        assert replica_of(model).sync

    def test_something_else_than_a_switch(self) -> None:
        model = dp_compile.replicate(Net())
        with pytest.raises(dp_compile.ConfigError, match="requires_gradient_sync must be True or False, got 1"):
            model.set_requires_gradient_sync(1)

    def test_methods_of_a_compiled_module(self) -> None:
        compiled = dp_compile.replicate(torch.compile(Net(), backend="aot_eager"))
        compiled.set_requires_gradient_sync(False)
        assert not replica_of(compiled).sync


def test_inputs_are_moved() -> None:
    mover = InputMover(torch.device("meta"))
    (positional, other), named = mover(nn.Identity(), (torch.ones(2), 3), {"mask": [torch.ones(2)], "flag": None})
    assert (positional.device.type, named["mask"][0].device.type) == ("meta", "meta")
    assert (other, named["flag"]) == (3, None)


@pytest.mark.usefixtures("fake_group")
def test_inputs_are_moved_inside_a_compiled_forward() -> None:
    model = dp_compile.replicate(nn.Linear(4, 2), config=AOT)
    model.register_forward_pre_hook(InputMover(torch.device("cpu")), with_kwargs=True)
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
        with pytest.raises(dp_compile.ModuleError, match="Net is not replicated yet"):
            dp_compile.report(model)
        with pytest.raises(dp_compile.ModuleError, match=r"body\.0\.weight is on the meta device.*to_empty"):
            model(torch.ones(1, 4))
        model.to_empty(device="cpu")
        compiled = torch.compile(model, backend="aot_eager")
        for _ in range(2):
            compiled(torch.ones(1, 4)).sum().backward()
        assert dp_compile.report(model).backwards == {"captured": 2}
        assert [len(each._forward_pre_hooks) for each in model.modules()] == [1, 0, 0, 0, 0]

    def test_inside_a_compiled_module(self) -> None:
        """What was compiled up to the start is not used afterwards: one graph, without a break."""
        torch._dynamo.reset()
        graphs = []

        def backend(graph_module: torch.fx.GraphModule, _: Any) -> Any:
            graphs.append(graph_module)
            return graph_module.forward

        with torch.device("meta"):
            model = nn.Linear(4, 2)
        dp_compile.replicate(model, config=AOT).to_empty(device="cpu")
        compiled = torch.compile(Around(model), backend=backend)
        compiled(torch.ones(1, 4))
        assert replica_of(model).names == ("weight", "bias")
        graphs.clear()
        for _ in range(2):
            compiled(torch.ones(1, 4))
        assert len(graphs) == 1

    def test_lazy(self) -> None:
        model = dp_compile.replicate(LazyNet(), config=AOT)
        torch.compile(model, backend="aot_eager")(torch.ones(5, 4), scale=2.0).sum().backward()
        assert dp_compile.report(model).backwards == {"captured": 1}
        assert replica_of(model).names[:2] == ("body.0.weight", "body.0.bias")
        assert model.training
        assert model.body[2].training
        assert model.body[1].num_batches_tracked == 1

    def test_a_lazy_module_itself(self) -> None:
        model = dp_compile.replicate(nn.LazyLinear(2), config=AOT)
        model(torch.ones(1, 3))
        assert replica_of(model).names == ("weight", "bias")
        assert type(model).__name__ == "DDPLinear"
        assert type(dp_compile.unreplicate(model)) is nn.Linear

    def test_a_part_that_runs_first(self) -> None:
        lazy = dp_compile.replicate(LazyNet())
        with pytest.raises(dp_compile.ModuleError, match=r"body\.0\.weight is lazy .* replicated LazyNet"):
            lazy.head(torch.ones(1, 4))
        with torch.device("meta"):
            model = Net()
        dp_compile.replicate(model).to_empty(device="cpu")
        model.body(torch.ones(1, 4))
        assert replica_of(model).names[0] == "body.0.weight"

    def test_what_can_be_checked_is_checked_at_once(self) -> None:
        with pytest.raises(dp_compile.ConfigError, match="ignored_modules must hold modules"):
            dp_compile.replicate(LazyNet(), ignored_modules=[3])  # type: ignore[list-item]
        with pytest.raises(dp_compile.ConfigError, match="bucket_cap_mb must be > 0"):
            dp_compile.replicate(LazyNet(), bucket_cap_mb=0)
        with pytest.raises(dp_compile.ModuleError, match="submodule 1 is managed by torch's DistributedDataParallel"):
            dp_compile.replicate(nn.Sequential(nn.LazyLinear(1), TorchDDP(Net())))

    def test_twice(self) -> None:
        model = dp_compile.replicate(LazyNet())
        with pytest.raises(dp_compile.ModuleError, match="LazyNet is replicated already, it starts with its first"):
            dp_compile.replicate(model)

    def test_unreplicate(self) -> None:
        model = dp_compile.replicate(LazyNet())
        assert type(dp_compile.unreplicate(model)) is LazyNet
        model(torch.ones(3, 4)).sum().backward()
        with pytest.raises(dp_compile.ModuleError, match=r"LazyNet is not replicated\. Call"):
            dp_compile.report(model)

    def test_copies_and_pickles(self) -> None:
        with torch.device("meta"):
            model = Net()
        dp_compile.replicate(model)
        copied = copy.deepcopy(model)
        assert type(copied) is Net
        for twin in (copied.body, copy.deepcopy(model.body), pickle.loads(pickle.dumps(model)).body):
            twin.to_empty(device="cpu")(torch.ones(3, 4)).sum().backward()
        with pytest.raises(dp_compile.ModuleError, match="not replicated yet"):
            dp_compile.report(model)

    def test_switches_set_before_the_start_are_kept(self) -> None:
        model = dp_compile.replicate(LazyNet(), config=AOT)
        model.set_requires_gradient_sync(False)
        model(torch.ones(3, 4)).sum().backward()
        assert not replica_of(model).sync
        other = dp_compile.replicate(LazyNet(), config=AOT)
        with other.no_sync():
            other(torch.ones(3, 4)).sum().backward()
        assert replica_of(other).sync

    def test_the_wrapper_refuses(self) -> None:
        with pytest.raises(dp_compile.ModuleError, match="LazyNet has lazy parameters"):
            dp_compile.DistributedDataParallel(LazyNet())


def train_lazy(compiled: bool) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    """Ranks draw different initial values and see different inputs. Returns the end state."""
    torch._dynamo.reset()
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.LazyLinear(5), nn.Tanh(), nn.LazyLinear(1))
    dp_compile.replicate(model, config=AOT)
    run = torch.compile(model, backend="aot_eager") if compiled else model
    for step in range(3):
        model.zero_grad()
        run(torch.full((2, 3), 1.0 + step + dist.get_rank())).square().mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
    return model.state_dict(), dict(dp_compile.report(model).backwards)


@pytest.mark.parametrize("compiled", [False, True])
def test_lazy_modules_train_in_step(ranks: Ranks, compiled: bool) -> None:
    (first, ways), (second, _), *_ = ranks.run(train_lazy, compiled)
    expected = {"captured": 3} if compiled else {"torch reducer": 3}
    if compiled and torch.__version__ < (2, 12):  # it leaves the rest of a container's frame alone behind a break
        expected = {"captured": 2, "torch reducer": 1}
    assert ways == expected
    for name, tensor in first.items():
        torch.testing.assert_close(second[name], tensor, rtol=0, atol=0)


def meta_on_one_rank() -> dict[str, torch.Tensor]:
    """The first rank has the values, the other one only the shapes until shortly before the forward."""
    torch.manual_seed(3)
    with torch.device("cpu" if dist.get_rank() == 0 else "meta"):
        model = Net()
    dp_compile.replicate(model, config=AOT)
    if dist.get_rank() == 1:
        model.to_empty(device="cpu")
        model(torch.ones(1, 4))
    return model.state_dict()


def test_values_on_one_rank_only(ranks2: Ranks) -> None:
    first, second = ranks2.run(meta_on_one_rank)
    for name, tensor in first.items():
        torch.testing.assert_close(second[name], tensor, rtol=0, atol=0)


# --- communication hooks ----------------------------------------------------------------------------------------


def no_hook(state: Any) -> None:
    """Takes too little."""


def annotated_hook(state: Any, bucket: Any) -> Any:
    """Gets its annotations in the test."""


@pytest.mark.usefixtures("fake_group")
class TestCommHooks:
    @pytest.mark.parametrize(
        ("hook", "message"),
        [
            (3, r"must be a function of \(state, bucket\), got int"),
            (no_hook, r"no_hook must take \(state, bucket\), takes \(state: 'Any'\)"),
            (
                default_hooks.bf16_compress_wrapper(default_hooks.fp16_compress_hook),
                "bf16_compress_wrapper.* needs NCCL or XCCL, the group's backend is fake",
            ),
        ],
    )
    def test_bad_hooks(self, hook: Any, message: str) -> None:
        for model in (dp_compile.replicate(Net()), dp_compile.DistributedDataParallel(Net())):
            with pytest.raises(dp_compile.ConfigError, match=message):
                model.register_comm_hook(None, hook)
            assert dp_compile.report(model).mode == "python hooks"

    @pytest.mark.parametrize(("where", "message"), [("bucket", "bucket is a dist.GradBucket"), ("return", "Future")])
    def test_annotations_that_say_something_else(
        self, monkeypatch: pytest.MonkeyPatch, where: str, message: str
    ) -> None:
        monkeypatch.setitem(annotated_hook.__annotations__, where, int)
        with pytest.raises(dp_compile.ConfigError, match=message):
            dp_compile.replicate(Net()).register_comm_hook(None, annotated_hook)

    def test_once(self) -> None:
        model = dp_compile.replicate(Net())
        model.register_comm_hook(None, default_hooks.allreduce_hook)
        with pytest.raises(dp_compile.ModuleError, match="Net has a comm hook already, allreduce_hook"):
            model.register_comm_hook(None, default_hooks.fp16_compress_hook)

    def test_before_the_first_backward(self) -> None:
        model = dp_compile.replicate(Net(), config=AOT)
        torch.compile(model, backend="aot_eager")(torch.ones(1, 4)).sum().backward()
        with pytest.raises(dp_compile.ModuleError, match="a backward of Net has run already"):
            model.register_comm_hook(None, default_hooks.allreduce_hook)

    def test_said_once(self, caplog: pytest.LogCaptureFixture) -> None:
        model = dp_compile.replicate(Net(), config=AOT)
        with caplog.at_level(logging.INFO, "dp_compile"):
            model.register_comm_hook([], local_hook)
            for _ in range(2):
                model(torch.ones(1, 4)).sum().backward()
        assert [record.message for record in caplog.records] == [
            "Net has comm hook local_hook: torch's C++ reducer calls it and reduces the gradients, backwards are "
            "not captured: what it does is not known here, so it cannot be captured. Write a FunctionalHook that does "
            "the same."
        ]

    @pytest.mark.parametrize(
        ("hook", "why"),
        [
            ("local", "what it does is not known here"),
            ("another group", "it averages over another group than the module's"),
        ],
    )
    def test_the_report_says_why_one_is_not_captured(self, hook: str, why: str) -> None:
        group = dist.new_group([0])
        given: dict[str, tuple[Any, Any]] = {
            "local": ([], local_hook),
            "another group": (group, default_hooks.allreduce_hook),
        }
        model = dp_compile.replicate(Net(), config=AOT)
        model.register_comm_hook(*given[hook])
        assert dp_compile.report(model).why_not_captured.startswith(
            f"comm hook {given[hook][1].__name__} is called by torch's C++ reducer: {why}"
        )
        assert f"reducer: {why}" in str(dp_compile.report(model)).split("\n")[1]
        dp_compile.unreplicate(model)

    def test_before_the_start(self) -> None:
        model = dp_compile.replicate(LazyNet(), config=AOT)
        calls: list[int] = []
        model.register_comm_hook(calls, local_hook)
        model(torch.ones(3, 4)).sum().backward()
        assert len(calls) > 0
        assert dp_compile.report(model).mode == "torch's C++ reducer with comm hook local_hook"


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


def train_with_comm_hook(how: str, name: str) -> dict[str, int]:
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
    run = ours if how == "eager" else torch.compile(ours, backend="aot_eager")
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
    return dict(dp_compile.report(ours).backwards)


@pytest.mark.parametrize(
    ("how", "name"), [("eager", "ours"), ("compiled", "ours"), ("compiled", "fp16"), ("wrapper", "ours")]
)
def test_comm_hook_as_torch_ddp(ranks: Ranks, how: str, name: str) -> None:
    for ways in ranks.run(train_with_comm_hook, how, name):
        if name == "fp16":  # what it does is known
            assert ways == {"captured without sync": 3, "captured": 3}
        else:
            assert ways == {"without sync": 3, "torch reducer": 3}


def another_hook_on_the_second_rank() -> str:
    model = dp_compile.replicate(Net(), config=AOT)
    try:
        model.register_comm_hook([], default_hooks.allreduce_hook if dist.get_rank() == 0 else counting_hook)
    except dp_compile.DesyncError as error:
        return str(error)
    return "no error"


def refused_on_the_second_rank() -> list[tuple[str, str]]:
    """What each rank is told, and what kind of error that is."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    told, second = [], dist.get_rank() == 1
    for attempt in (
        lambda module: module.register_comm_hook(None, 3 if second else default_hooks.allreduce_hook),
        lambda module: module.set_gradient_divide_factor(0.0 if second else 2.0),
    ):
        module = dp_compile.replicate(nn.Linear(2, 2))
        try:
            attempt(module)
        except dp_compile.DPCompileError as error:
            told.append((type(error).__name__, str(error)))
        dp_compile.unreplicate(module)
    return told


def test_what_one_rank_is_refused_the_others_hear_at_once(ranks2: Ranks) -> None:
    """They waited for it, as long as their group waits."""
    first, second = ranks2.run(refused_on_the_second_rank, timeout_s=60.0)
    assert [kind for kind, _ in first] == ["DesyncError"] * 2
    assert [kind for kind, _ in second] == ["ConfigError"] * 2
    for (_, told), (_, own), call in zip(first, second, ("register_comm_hook()", "set_gradient_divide_f"), strict=True):
        assert told.startswith(call)
        assert own in told


def test_ranks_with_other_comm_hooks(ranks: Ranks) -> None:
    for text in ranks.run(another_hook_on_the_second_rank):
        assert text.startswith("register_comm_hook(): rank 1 differs from rank 0")
        assert 'comm hook is "counting_hook" there, "allreduce_hook" on rank 0' in text
