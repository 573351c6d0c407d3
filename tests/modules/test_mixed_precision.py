"""A module that computes in another dtype than its parameters have, beside FSDP2 with the same policy."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from beside import AOT, Block, batch, compile_whole, mlp, not_compiled
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper, offload_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import dp_compile
from dp_compile.testing.ranks import Ranks

FP16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


class Net(nn.Module):
    """A tied weight that is read past its module, a frozen layer, a norm, a part without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.frozen, self.norm = mlp(), nn.Linear(6, 6), nn.LayerNorm(6)
        self.head = nn.Linear(6, 6)
        self.head.weight = self.layers[0].weight
        self.scale = nn.Parameter(torch.ones(6))
        self.register_buffer("steps", torch.zeros(1))
        self.frozen.requires_grad_(False)
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.frozen(self.layers(x))) * self.scale
        return F.linear(self.head(x), self.layers[0].weight)


def compile_parts(module: nn.Module) -> Any:
    module.head.compile(backend="aot_eager")
    module.norm = torch.compile(module.norm, backend="aot_eager")
    return module


WAYS: dict[str, Callable[[nn.Module], Any]] = {
    "captured": compile_whole,
    "inductor": torch.compile,
    "in parts": compile_parts,
    "eager hooks": compile_whole,
    "torch's reducer": not_compiled,
}


def run_beside_fsdp(way: str, policy: MixedPrecisionPolicy) -> dict[str, int]:
    """Three steps with an accumulation each; gradients and parameters are compared after each."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Net()
    theirs = copy.deepcopy(model)
    fully_shard(theirs, mp_policy=policy)
    dp_compile.replicate(model, config=AOT if way != "inductor" else None, mp_policy=policy)
    ours = WAYS[way](model)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, theirs)]
    for step in range(3):
        for micro in range(2 if policy.reduce_dtype is None else 1):
            for module, run in ((model, ours), (theirs, theirs)):
                module.set_requires_gradient_sync(micro == 1 or policy.reduce_dtype is not None)
                with torch.autograd.detect_anomaly(check_nan=False) if way == "eager hooks" else nullcontext():
                    result = run(batch(2 * step + micro))
                    assert result.dtype == (policy.output_dtype or policy.param_dtype)
                    result.float().square().mean().backward()
        for (name, one), other in zip(model.named_parameters(), theirs.parameters(), strict=True):
            assert one.dtype == F32, name
            if not one.requires_grad:
                continue
            assert one.grad is not None
            assert one.grad.dtype == F32, name
            for mine, whole in ((one.grad, other.grad.full_tensor()), (one, other.full_tensor())):
                # Inductor rounds less often between operators; parts add the uses of a tied weight in another order.
                if way in ("inductor", "in parts"):
                    torch.testing.assert_close(mine, whole, rtol=0.02, atol=0.004)
                else:
                    assert torch.equal(mine, whole), f"{name} in step {step}"
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    found = dict(dp_compile.report(model).backwards)
    dp_compile.unreplicate(model)
    return found


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize(
    ("way", "policy"),
    [
        ("captured", MixedPrecisionPolicy(BF16)),
        ("captured", MixedPrecisionPolicy(BF16, F32, F32)),
        ("inductor", MixedPrecisionPolicy(BF16)),
        ("in parts", MixedPrecisionPolicy(BF16)),
        ("eager hooks", MixedPrecisionPolicy(BF16)),
        ("torch's reducer", MixedPrecisionPolicy(BF16)),
        ("torch's reducer", MixedPrecisionPolicy(BF16, F32)),
    ],
)
def test_as_fsdp(ranks: Ranks, way: str, policy: MixedPrecisionPolicy) -> None:
    for backwards in ranks.run(run_beside_fsdp, way, policy):
        expected = {"eager hooks": "eager hooks", "torch's reducer": "torch reducer"}.get(way, "captured")
        assert backwards[expected] == 3


# --- one module in this process: a fake group of two ranks, in which the sum is this rank's half


def reference(model: nn.Module, *inputs: Any, dtype: torch.dtype = BF16, **kwargs: Any) -> Any:
    """What a module computes with cast parameters, by hand."""
    casts = {name: each.to(dtype) if each.is_floating_point() else each for name, each in model.named_parameters()}
    cast = [each.to(dtype) if isinstance(each, torch.Tensor) and each.is_floating_point() else each for each in inputs]
    return torch.func.functional_call(model, casts, tuple(cast), kwargs)


def assert_same_gradients(ours: nn.Module, theirs: nn.Module, **tolerance: float) -> None:
    for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        if other.grad is None:
            assert one.grad is None, name
            continue
        assert one.grad is not None, name
        assert one.grad.dtype == one.dtype == other.dtype, name
        torch.testing.assert_close(2 * one.grad, other.grad, **({"rtol": 0, "atol": 0} | tolerance))


def replicated(model: nn.Module, **options: Any) -> nn.Module:
    torch._dynamo.reset()
    options = {"param_dtype": BF16, "backend": "aot_eager"} | options
    return dp_compile.replicate(model, config=dp_compile.ReplicateConfig(**options))


def backward(result: torch.Tensor) -> None:
    result.float().square().sum().backward()


X = torch.randn(3, 6, generator=torch.Generator().manual_seed(0))


@pytest.mark.usefixtures("fake_group")
class TestForward:
    def test_one_graph_with_one_cast_for_each_parameter(self) -> None:
        graphs: list[torch.fx.GraphModule] = []

        def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
            graphs.append(graph)
            return graph

        model = replicated(Net())
        compiled = torch.compile(model, backend=keep, fullgraph=True)
        for _ in range(3):
            backward(compiled(X))
            torch.optim.SGD(model.parameters(), lr=0.1).step()
        (graph,) = graphs
        casts = [node for node in graph.graph.nodes if node.target == "to"]
        assert len(casts) == len(list(model.parameters())) + 1  # and the input
        names = {node.name for node in graph.graph.nodes if node.op == "placeholder"}
        assert "l_self_modules_norm_parameters_weight_" in names
        dp_compile.unreplicate(model)

    def test_nobody_else_sees_the_casts(self) -> None:
        model = Net()
        before = {name: id(each) for name, each in model.named_parameters()}
        state = copy.deepcopy(model.state_dict())
        replicated(model)
        seen = []
        model.norm.register_forward_hook(lambda module, *_: seen.append(module.weight.dtype))
        model.register_forward_hook(lambda module, *_: seen.append(module.scale.dtype))
        model.layers[0].weight.register_hook(lambda grad: seen.append(grad.dtype))
        backward(model(X))
        assert seen == [BF16, F32, F32]
        assert {name: id(each) for name, each in model.named_parameters()} == before
        assert model.norm(X).dtype == F32, "a part that is called itself computes as it is"
        assert model.forward(X).dtype == BF16
        for name, value in model.state_dict().items():
            assert torch.equal(value, state[name]), name
        dp_compile.unreplicate(model)
        assert model(X).dtype == F32
        assert not hasattr(model, "_dp_compile_precision")

    @pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
    @pytest.mark.parametrize("compiled", [False, True])
    def test_parameters_are_back_after_an_error(self, error: type[BaseException], compiled: bool) -> None:
        class Fails(Net):
            fails = False

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                result = super().forward(x)
                torch._dynamo.graph_break()
                if self.fails:
                    raise error
                return result

        model = replicated(Fails())
        run = compile_whole(model) if compiled else model
        for fails in (False, True):
            model.fails = fails
            with pytest.raises(error) if fails else nullcontext():
                backward(run(X))
            assert all(isinstance(each, nn.Parameter) for each in model.parameters())
        model.fails = False
        twin = copy.deepcopy(model.state_dict())
        assert run(X).dtype == BF16
        assert all(torch.equal(twin[name], value) for name, value in model.state_dict().items())
        dp_compile.unreplicate(model)

    def test_what_is_not_cast(self) -> None:
        class Mixed(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.table, self.layer, self.ignored = nn.Embedding(4, 6), nn.Linear(6, 6), nn.Linear(6, 6)
                self.turn = nn.Parameter(torch.randn(6, dtype=torch.complex64))
                self.low = nn.Parameter(torch.ones(6, dtype=BF16))
                self.register_buffer("shift", torch.ones(6))
                self.register_buffer("order", torch.arange(4))

            def forward(self, tokens: torch.Tensor, *, turn: torch.Tensor, kept: list[Any]) -> torch.Tensor:
                kinds = [tokens, turn, self.table.weight, self.layer.bias, self.ignored.weight, self.turn]
                kept += [each.dtype for each in (*kinds, self.shift, self.order)]
                x = self.layer(self.table(tokens)) * self.low + (self.turn * turn).real.sum()
                return x + self.ignored(x.float()) + self.shift

        model = Mixed()
        given, half = model.low, []
        dp_compile.replicate(
            model,
            ignored_modules=[model.ignored],
            config=dp_compile.ReplicateConfig(param_dtype=BF16, backend="aot_eager"),
        )
        model.layer.register_forward_hook(lambda *_: half.append(model.low is given))
        kept: list[Any] = []
        backward(model(torch.tensor([0, 3]), turn=torch.tensor(1j), kept=kept))
        complex64, int64 = torch.complex64, torch.int64
        assert kept == [int64, complex64, BF16, BF16, F32, complex64, F32, int64]
        assert half == [True], "it has the dtype already"
        assert {each.grad.dtype for each in model.parameters()} == {F32, BF16, complex64}
        dp_compile.unreplicate(model)

    def test_inputs_and_outputs(self) -> None:
        class Echo(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(6, 6)

            def forward(self, x: Any, other: Any = None) -> Any:
                return {"x": x, "other": other, "weight": self.layer(x["a"].to(self.layer.weight.dtype))}

        inputs = {"a": X, "b": torch.ones(2, dtype=torch.int64), "c": "text"}
        for options, seen, weight in [
            ({}, BF16, BF16),
            ({"cast_forward_inputs": False}, F32, BF16),
            ({"output_dtype": F32}, F32, F32),
            ({"output_dtype": torch.float64, "param_dtype": None}, torch.float64, torch.float64),
            ({"param_dtype": F32}, F32, F32),
        ]:
            model = replicated(Echo(), **options)
            for run in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
                found = run(inputs, other=X)
                assert found["x"]["a"].dtype == found["other"].dtype == seen
                assert found["x"]["b"].dtype == torch.int64
                assert found["weight"].dtype == weight
            dp_compile.unreplicate(model)

    def test_evaluation(self) -> None:
        for option, expected in [({}, BF16), ({"full_precision_in_eval": True}, F32)]:
            model = replicated(Net(), **option)
            run = compile_whole(model)
            for training, dtype in ((True, BF16), (False, expected), (True, BF16)):
                model.train(training)
                with torch.no_grad():
                    assert model(X).dtype == run(X).dtype == dtype
            model.eval()
            with torch.inference_mode():
                assert model(X).dtype == expected
            dp_compile.unreplicate(model)

    @pytest.mark.parametrize("given", [(nn.LayerNorm,), ("norm",), ["norm", nn.BatchNorm1d]])
    @pytest.mark.parametrize("compiled", [False, True])
    def test_exceptions(self, given: Any, compiled: bool) -> None:
        torch.manual_seed(0)
        model = Net()
        twin = copy.deepcopy(model)
        casts = {name: p if "norm" in name else p.to(BF16) for name, p in twin.named_parameters()}
        twin.norm.register_forward_pre_hook(lambda _, args: args[0].float())
        twin.norm.register_forward_hook(lambda *args: args[2].to(BF16))
        backward(torch.func.functional_call(twin, casts, (X.to(BF16),)))
        replicated(model, full_precision_modules=given)
        seen: list[torch.dtype] = []
        model.norm.register_forward_hook(lambda module, args, out: seen.extend((args[0].dtype, module.weight.dtype)))
        backward(torch.compile(model, backend="aot_eager", fullgraph=True)(X) if compiled else model(X))
        assert seen == [F32, F32]
        # what travels is bfloat16: halves are exact, the norm's gradient is rounded
        assert_same_gradients(model, twin, rtol=2**-8, atol=1e-6)
        assert model.norm(X).dtype == F32
        dp_compile.unreplicate(model)
        assert not model.norm._forward_pre_hooks

    @pytest.mark.parametrize("compiled", [False, True])
    def test_buffers(self, compiled: bool) -> None:
        class Counts(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)
                self.register_buffer("constant", torch.full((6,), 1.001))
                self.register_buffer("steps", torch.zeros(()))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                assert self.constant.dtype == self.norm.running_mean.dtype == BF16
                assert self.norm.num_batches_tracked.dtype == torch.int64
                self.steps = self.steps + 1
                return self.norm(self.layer(x)) * self.constant

        model = replicated(Counts(), buffer_dtype=BF16)
        run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        for step in range(1, 4):
            backward(run(X))
            assert float(model.steps) == step
            assert int(model.norm.num_batches_tracked) == step
        assert {each.dtype for each in model.buffers()} == {F32, torch.int64}
        assert torch.equal(model.constant, torch.full((6,), 1.001)), "it lost no bits"
        assert bool(model.norm.running_mean.any())
        dp_compile.unreplicate(model)


class Twice(nn.Module):
    """A block that is called behind a checkpoint, and perhaps once more without."""

    def __init__(self, twice: bool) -> None:
        super().__init__()
        self.first, self.block, self.norm = nn.Linear(6, 6), Block(), nn.LayerNorm(6)
        self.how: Callable[..., Any] = plainly
        self.twice = twice

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.how(self.block, self.norm(self.first(x)))
        result: torch.Tensor = self.block(x) if self.twice else x
        return result


def plainly(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = block(x)
    return result


def checkpointed(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = checkpoint(block, x, use_reentrant=False)
    return result


def reentrantly(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = checkpoint(block, x, use_reentrant=True)
    return result


def wrapped(model: nn.Module) -> nn.Module:
    model.block = checkpoint_wrapper(model.block)
    return model


def offloaded(model: nn.Module) -> nn.Module:
    model.block = offload_wrapper(checkpoint_wrapper(model.block))
    return model


def with_compiled_block(model: nn.Module) -> nn.Module:
    model.block.compile(backend="aot_eager")
    return model


@pytest.mark.usefixtures("fake_group")
class TestModules:
    @pytest.mark.parametrize("how", [plainly, checkpointed, reentrantly])
    @pytest.mark.parametrize(
        "prepare",
        [not_compiled, wrapped, offloaded, with_compiled_block, compile_whole],
        ids=lambda each: each.__name__,
    )
    def test_recomputation(self, how: Callable[..., Any], prepare: Callable[[nn.Module], Any]) -> None:
        torch.manual_seed(0)
        # torch's reducer cannot reduce what an inner and the outer backward use
        model = Twice(how is not reentrantly or prepare in (with_compiled_block, compile_whole))
        twin = copy.deepcopy(model)
        backward(reference(twin, X))
        replicated(model)
        model.how = how
        run = prepare(model)
        for _ in range(2):
            model.zero_grad()
            if (how, prepare) == (reentrantly, with_compiled_block):
                with pytest.raises(
                    dp_compile.ReductionError, match=r"gradients would be lost. Use .*use_reentrant=Fal"
                ):
                    backward(run(X))
                continue
            backward(run(X))
            assert_same_gradients(model, twin, rtol=0.01, atol=1e-4)
            assert all(isinstance(each, nn.Parameter) for each in model.parameters())
        dp_compile.unreplicate(model)
