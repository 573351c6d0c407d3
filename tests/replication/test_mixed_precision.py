"""A module that computes in another dtype than its parameters have, as FSDP2 with the same policy."""

import copy
import functools
from contextlib import nullcontext

import pytest
import torch
from on_ranks import on_ranks
from parity import AOT, Block, batch, compile_whole, mlp, not_compiled, train_beside_fsdp
from torch import nn
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import dp_compile

pytestmark = pytest.mark.usefixtures("fake_group")
unsupported = functools.partial(pytest.raises, dp_compile.UnsupportedModuleError)
FP16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


# Since torch 2.15 FSDP2 adds up the uses of a tied weight in the dtype of the wire (pytorch#197203): one rounding less.
ADDS_USES_AS_SENT = hasattr(MixedPrecisionPolicy, "param_dtype_override_fn")


class Net(nn.Module):
    """A tied weight that is read past its module, a frozen layer, a norm, a part without gradient."""

    def __init__(self, *, tied=True):
        super().__init__()
        self.layers, self.frozen, self.norm = mlp(), nn.Linear(6, 6), nn.LayerNorm(6)
        self.head, self.last = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        if tied:
            self.head.weight = self.last.weight = self.layers[0].weight
        self.scale = nn.Parameter(torch.ones(6))
        self.register_buffer("steps", torch.zeros(1))
        self.frozen.requires_grad_(False)
        self.seen = []

    def forward(self, x):
        x = self.norm(self.frozen(self.layers(x))) * self.scale
        return F.linear(self.head(x), self.last.weight)


def compile_parts(module):
    module.head.compile(backend="aot_eager")
    module.norm = torch.compile(module.norm, backend="aot_eager")
    return module


@pytest.mark.parametrize(
    ("way", "policy"),
    [
        ("captured", MixedPrecisionPolicy(BF16)),
        ("in parts", MixedPrecisionPolicy(BF16)),
        ("eager hooks", MixedPrecisionPolicy(BF16, F32, F32)),
    ],
)
@on_ranks("ranks")
def test_as_fsdp(way, policy):
    """Three steps with an accumulation each; gradients and parameters are compared after each."""
    torch.manual_seed(0)
    is_exact = way != "in parts"
    model = Net(tied=not (ADDS_USES_AS_SENT and is_exact))
    theirs = copy.deepcopy(model)
    fully_shard(theirs, mp_policy=policy)
    dp_compile.replicate(model, config=AOT, mp_policy=policy)
    ours = (compile_parts if way == "in parts" else compile_whole)(model)
    # FSDP2 adds up in the dtype of the wire: of more than two in bf16 it loses bits, ours does not.
    micros, dtype = 2 if policy.reduce_dtype is None else 4, policy.output_dtype or policy.param_dtype
    # Parts add the uses of a tied weight in another order.
    tolerance = {} if is_exact else {"rtol": 0.02, "atol": 0.004}
    train_beside_fsdp(model, ours, theirs, batch, micros, dtype, eager=lambda _: way == "eager hooks", **tolerance)
    assert all(each.dtype == F32 for each in model.parameters())
    assert dp_compile.report(model).backwards[way if way == "eager hooks" else "captured"] == 3


def reference(model, *inputs, dtype=BF16, **kwargs):
    """What a module computes with cast parameters, by hand."""
    casts = {name: each.to(dtype) if each.is_floating_point() else each for name, each in model.named_parameters()}
    cast = [each.to(dtype) if isinstance(each, torch.Tensor) and each.is_floating_point() else each for each in inputs]
    return torch.func.functional_call(model, casts, tuple(cast), kwargs)


def assert_same_gradients(ours, theirs, **tolerance):
    for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), name
        if one.grad is not None:
            assert one.grad.dtype == one.dtype == other.dtype, name
            torch.testing.assert_close(2 * one.grad, other.grad, **({"rtol": 0, "atol": 0} | tolerance))


def replicated(model, **options):
    torch._dynamo.reset()
    return dp_compile.replicate(model, config=AOT, mp_policy=MixedPrecisionPolicy(**{"param_dtype": BF16} | options))


def backward(result):
    result.float().square().sum().backward()


X = torch.randn(3, 6, generator=torch.Generator().manual_seed(0))


class TestForward:
    def test_one_graph_with_one_cast_for_each_parameter(self):
        graphs = []

        def keep(graph, _):
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

    def test_nobody_else_sees_the_casts(self):
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
        with torch.inference_mode():
            assert model.eval()(X).dtype == BF16
        for name, value in model.state_dict().items():
            assert torch.equal(value, state[name]), name
        dp_compile.unreplicate(model)
        assert model(X).dtype == F32
        assert not hasattr(model, "_dp_compile_precision")

    def test_parameters_are_back_after_an_error(self):
        class Fails(Net):
            fails = False

            def forward(self, x):
                result = super().forward(x)
                torch._dynamo.graph_break()
                if self.fails:
                    raise KeyboardInterrupt
                return result

        model = replicated(Fails())
        for run in (model, compile_whole(model)):
            for model.fails in (False, True):
                with pytest.raises(KeyboardInterrupt) if model.fails else nullcontext():
                    backward(run(X))
                assert all(isinstance(each, nn.Parameter) for each in model.parameters())
        model.fails = False
        assert run(X).dtype == BF16

    def test_what_is_not_cast(self):
        class Mixed(nn.Module):
            def __init__(self):
                super().__init__()
                self.table, self.layer, self.ignored = nn.Embedding(4, 6), nn.Linear(6, 6), nn.Linear(6, 6)
                self.turn = nn.Parameter(torch.randn(6, dtype=torch.complex64))
                self.low = nn.Parameter(torch.ones(6, dtype=BF16))
                self.register_buffer("shift", torch.ones(6))
                self.register_buffer("order", torch.arange(4))

            def forward(self, tokens, *, turn, kept):
                kinds = [tokens, turn, self.table.weight, self.layer.bias, self.ignored.weight, self.turn]
                kept += [each.dtype for each in (*kinds, self.shift, self.order)]
                x = self.layer(self.table(tokens)) * self.low + (self.turn * turn).real.sum()
                return x + self.ignored(x.float()) + self.shift

        model = Mixed()
        given, half = model.low, []
        policy = MixedPrecisionPolicy(BF16)
        dp_compile.replicate(model, ignored_modules=[model.ignored], config=AOT, mp_policy=policy)
        model.layer.register_forward_hook(lambda *_: half.append(model.low is given))
        kept = []
        backward(model(torch.tensor([0, 3]), turn=torch.tensor(1j), kept=kept))
        complex64, int64 = torch.complex64, torch.int64
        assert kept == [int64, complex64, BF16, BF16, F32, complex64, F32, int64]
        assert half == [True], "it has the dtype already"
        assert {each.grad.dtype for each in model.parameters()} == {F32, BF16, complex64}

    def test_inputs_and_outputs(self):
        class Echo(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(6, 6)

            def forward(self, x, other=None):
                return {"x": x, "other": other, "weight": self.layer(x["a"].to(self.layer.weight.dtype))}

        inputs = {"a": X, "b": torch.ones(2, dtype=torch.int64), "c": "text"}
        for options, seen, weight in [
            ({}, BF16, BF16),
            ({"cast_forward_inputs": False}, F32, BF16),
            ({"output_dtype": torch.float64, "param_dtype": None}, torch.float64, torch.float64),
        ]:
            model = replicated(Echo(), **options)
            for run in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
                found = run(inputs, other=X)
                assert found["x"]["a"].dtype == found["other"].dtype == seen
                assert found["x"]["b"].dtype == torch.int64
                assert found["weight"].dtype == weight
            dp_compile.unreplicate(model)


class Twice(nn.Module):
    """A block that is called in a checkpoint, and once more without."""

    def __init__(self):
        super().__init__()
        self.first, self.block, self.norm = nn.Linear(6, 6), Block(), nn.LayerNorm(6)
        self.how = lambda block, x: block(x)

    def forward(self, x):
        return self.block(self.how(self.block, self.norm(self.first(x))))


checkpointed = functools.partial(checkpoint, use_reentrant=False)
reentrantly = functools.partial(checkpoint, use_reentrant=True)


def with_compiled_block(model):
    model.block.compile(backend="aot_eager")
    return model


class TestModules:
    @pytest.mark.parametrize(
        ("prepare", "how"),
        [
            (not_compiled, reentrantly),
            (with_compiled_block, checkpointed),
            (with_compiled_block, reentrantly),
            (compile_whole, checkpointed),
        ],
    )
    def test_recomputation(self, how, prepare):
        torch.manual_seed(0)
        model = Twice()
        twin = copy.deepcopy(model)
        backward(reference(twin, X))
        replicated(model)
        model.how = how
        run = prepare(model)
        for _ in range(2):
            model.zero_grad()
            if (how, prepare) == (reentrantly, with_compiled_block):
                with pytest.raises(dp_compile.ReductionError, match=r"would be lost. Use .*use_reentrant=False"):
                    backward(run(X))
                continue
            backward(run(X))
            assert_same_gradients(model, twin, rtol=0.01, atol=1e-4)
            assert all(isinstance(each, nn.Parameter) for each in model.parameters())

    @pytest.mark.parametrize(
        "build", [lambda: torch.nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)), lambda: nn.LSTM(6, 6)]
    )
    def test_modules_that_look_at_their_parameters(self, build):
        torch.manual_seed(0)
        twin = build()
        torch.manual_seed(0)
        model = build()
        names = list(model.state_dict())
        x, first = X[None], (lambda out: out[0] if isinstance(out, tuple) else out)
        backward(first(reference(twin, x)))
        replicated(model)
        for _ in range(2):
            model.zero_grad()
            backward(first(model(x)))
            assert_same_gradients(model, twin, rtol=2**-8, atol=1e-6)
        assert list(model.state_dict()) == names
        dp_compile.unreplicate(model)
        copy.deepcopy(model)

    @pytest.mark.parametrize(
        ("dtype", "expected", "run_of"), [(BF16, 1.0, not_compiled), (F32, 1 + 2**-7, compile_whole)]
    )
    def test_micro_steps_are_added_up_in_the_parameters_dtype(self, dtype, expected, run_of):
        """Gradients of one and four times 2**-9, computed in bfloat16, which has no place for them next to a one."""
        model = replicated(nn.Linear(1, 1, bias=False).to(dtype), reduce_dtype=F32)
        run = run_of(model)
        for micro, value in enumerate([1.0] + 4 * [2.0**-9]):
            model.set_requires_gradient_sync(micro == 4)
            run(torch.full((1, 1), value, dtype=dtype)).float().sum().backward()
        assert model.weight.grad.dtype == dtype
        assert 2 * float(model.weight.grad) == expected

    def test_hooks_and_backwards(self):
        """Hooks of the user see gradients in the parameter's dtype, local and without rounding."""
        model = replicated(mlp(), reduce_dtype=F32)
        seen = []
        model[0].weight.register_hook(lambda grad: seen.append(grad.dtype))
        model[0].weight.register_post_accumulate_grad_hook(lambda each: seen.append(each.grad.dtype))
        for run in (model, compile_whole(model)):
            backward(run(X))
        assert seen == 4 * [F32]
        assert not model._dp_compile_precision._kept, "nothing waits for a backward"
        with torch.autocast("cpu", FP16):
            assert model(X).dtype == FP16, "autocast wins inside operators"


class TestRefused:
    def test_policies_and_modules(self):
        turn = nn.ParameterList([nn.Parameter(torch.ones(2, dtype=torch.complex64))])
        patched, tied = mlp(), nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
        patched.forward = patched.forward
        tied[1].weight = tied[0].weight
        cast = MixedPrecisionPolicy(BF16)
        refused = [
            (mlp(), MixedPrecisionPolicy(torch.int32), "param_dtype of mp_policy must be one of .* torch.int32"),
            (mlp(), MixedPrecision(BF16), "must be a torch.distributed.fsdp.MixedPrecisionPolicy.* got MixedPrecision"),
            (mlp(), CustomPolicy(lambda module: False), "MixedPrecisionPolicy.* got .*CustomPolicy"),
            (turn, cast, "ParameterList has no floating parameter that param_dtype=torch.bfloat16 could cast"),
            (nn.Embedding(4, 6, max_norm=1.0), cast, r"^weight is changed in place by its module's forward"),
            (patched, cast, "Sequential has a forward.. set on the instance"),
            (tied, cast, r"1\.weight is shared with an ignored module: .*bfloat16"),
        ]
        if ADDS_USES_AS_SENT:  # before torch 2.15 a policy has no dtypes by parameter
            by_parameter = MixedPrecisionPolicy(BF16, param_dtype_override_fn=lambda parameter: F32)
            refused.append((mlp(), by_parameter, "mp_policy has a param_dtype_override_fn, by which"))
        for model, policy, message in refused:
            ignored = [tied[0]] if model is tied else None
            with pytest.raises((dp_compile.ConfigError, dp_compile.UnsupportedModuleError), match=message):
                dp_compile.replicate(model, ignored_modules=ignored, config=AOT, mp_policy=policy)

    def test_a_forward_that_changes_its_parameters(self):
        class Moving(nn.Linear):
            def forward(self, x):
                with torch.no_grad():
                    self.bias.add_(1)
                return super().forward(x)

        model = replicated(nn.Sequential(Moving(6, 6)))
        with unsupported(match=r"changed its parameter bias in place\. .*replicate\(\) first"):
            model(X)
