"""Parts of one model that are reduced in different ways: dtypes and comm hooks by module."""

from __future__ import annotations

import re
import warnings
from collections.abc import Generator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from beside import AOT, compile_whole, not_compiled
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)

import dp_compile
from dp_compile.testing.ranks import Ranks

FP16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
KINDS = {nn.LayerNorm: F32, "embed": FP16}


class Net(nn.Module):
    """An embedding, norms, and the rest; with accumulation some of it is not used in each micro-step."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(6, 5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        result: torch.Tensor = self.head(x)
        return result


def tokens(number: int) -> torch.Tensor:
    return torch.randint(0, 11, (4,), generator=torch.Generator().manual_seed(10 * number + dist.get_rank()))


@dataclass(frozen=True)
class Halved(dp_compile.FunctionalHook):
    """The average of what is rounded to float16; what that lost is sent in the next step."""

    def initial_state(self, gradient: torch.Tensor) -> Mapping[str, torch.Tensor]:
        return {"error": torch.zeros_like(gradient)}

    def reduce(self, bucket: dp_compile.HookBucket) -> Generator[torch.Tensor, torch.Tensor, Any]:
        whole = [each + state["error"] for each, state in zip(bucket.gradients, bucket.state, strict=True)]
        total = yield torch.cat([each.flatten() for each in whole]).half()
        parts = (total.float() / bucket.ranks).split([each.numel() for each in whole])
        states = [{"error": each - each.half().float()} for each in whole]
        return [part.view_as(each).clone() for part, each in zip(parts, whole, strict=True)], states


def wire_of(name: str) -> torch.dtype:
    if name.startswith("embed"):
        return FP16
    return (
        F32 if name.startswith("blocks") and ".0." in name.removeprefix("blocks.0").removeprefix("blocks.1") else BF16
    )


def by_hand(name: str, grad: torch.Tensor, errors: dict[str, torch.Tensor] | None) -> torch.Tensor:
    """Half of the sum over two ranks, halved before the sum; by the hook behind it."""
    wire, by_hook = wire_of(name), errors is not None and name == "embed.weight"
    if errors is not None and by_hook:
        grad = grad + errors.get(name, torch.zeros_like(grad))
        errors[name] = grad - grad.half().float()
    sent = (grad if by_hook else grad / 2).to(wire)
    dist.all_reduce(sent)
    return sent.float() / 2 if by_hook else sent.float()


WAYS: dict[str, tuple[Any, dict[str, Any]]] = {
    "captured": (compile_whole, {}),
    "many buckets": (compile_whole, {"bucket_cap_mb": 1e-5}),
    "inductor": (torch.compile, {"backend": "inductor"}),
    "one rank by hooks": (compile_whole, {}),
    "not compiled": (not_compiled, {}),
    "policy": (compile_whole, {}),
    "hook": (compile_whole, {}),
    "hook, one rank by hooks": (compile_whole, {}),
}


def replicated(way: str) -> tuple[Any, dp_compile.HookState]:
    model, options, by_hook = Net(), WAYS[way][1], way.startswith("hook")
    options = {"backend": "aot_eager", "reduce_dtype": BF16, "reduce_dtypes": KINDS} | options
    policy = None
    if way == "policy":
        options |= {"reduce_dtype": None, "reduce_dtypes": ()}
        policies = {Net: BF16, nn.LayerNorm: F32, nn.Embedding: FP16}
        policy = CustomPolicy(
            lambda module: (
                type(module) in policies and {"mp_policy": MixedPrecisionPolicy(reduce_dtype=policies[type(module)])}
            )
        )
    if by_hook:
        options["reduce_dtypes"] = {nn.LayerNorm: F32}
    dp_compile.replicate(model, config=dp_compile.ReplicateConfig(**options), mp_policy=policy)
    state = dp_compile.HookState()
    if by_hook:
        model.register_comm_hook(state, Halved(), modules=[nn.Embedding])  # type: ignore[operator]
    return model, state


def run_kinds(way: str) -> tuple[dict[str, int], set[tuple[str, str | None, bool]]]:
    """Three steps, the last with an accumulation, beside a plain copy whose gradients are reduced by hand."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, state = replicated(way)
    plain = Net()
    plain.load_state_dict(model.state_dict())
    run, errors = WAYS[way][0](model), dict[str, torch.Tensor]()
    for step in range(3):
        for module in (model, plain):
            module.zero_grad()
        for micro in range(2 if step == 2 else 1):
            last = step < 2 or micro == 1
            broken = "by hooks" in way and step > 0 and dist.get_rank() == 1
            with warnings.catch_warnings(), nullcontext() if last else dp_compile.no_sync(model):
                warnings.simplefilter("ignore")
                with torch.autograd.detect_anomaly(check_nan=False) if broken else nullcontext():
                    run(tokens(2 * step + micro)).square().mean().backward()
            plain(tokens(2 * step + micro)).square().mean().backward()
        for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            expected = by_hand(name, other.grad, errors if way.startswith("hook") else None)
            if way == "inductor":
                rtol = 2 * torch.finfo(wire_of(name)).eps
                torch.testing.assert_close(one.grad, expected, rtol=rtol, atol=1e-5)
            else:
                assert torch.equal(one.grad, expected), f"{name}, step {step}"
    if way.startswith("hook"):
        assert set(state.state_dict()["tensors"]) == {"embed.weight"}
    report = dp_compile.report(model)
    found = {
        (member.gradient.name, bucket.key.reduction.wire, bucket.key.reduction.hook is not None)
        for bucket in report.plan.buckets
        for member in bucket.members
        if not member.gradient.name.startswith("<")
    }
    dp_compile.unreplicate(model)
    return dict(report.backwards), found


AT_NIGHT = ("many buckets", "inductor", "hook", "policy")


@pytest.mark.parametrize(
    "way",
    [pytest.param(way, marks=[pytest.mark.nightly] if way in AT_NIGHT else []) for way in WAYS],
)
def test_each_part_travels_as_it_was_said(ranks2: Ranks, way: str) -> None:
    for rank, (ways, found) in enumerate(ranks2.run(run_kinds, way)):
        eager = 3 if way == "not compiled" else 2 if "by hooks" in way and rank else 0
        expected = {"captured": 3 - eager, "eager hooks": eager}
        assert {key: count for key, count in ways.items() if "sync" not in key} == {
            k: v for k, v in expected.items() if v
        }
        for name, wire, hooked in found:
            assert hooked is (way.startswith("hook") and name == "embed.weight")
            # Those that have the dtype already travel as they are.
            assert hooked or wire == {FP16: "float16", BF16: "bfloat16", F32: None}[wire_of(name)]


def run_other(what: str) -> str:
    """What ranks say that were given other things."""
    first = dist.get_rank() == 0
    config = replace(AOT, reduce_dtypes={"embed": FP16 if first else BF16} if what == "dtype" else {})
    model = Net()
    try:
        dp_compile.replicate(model, config=config)
        if what == "modules":
            state = dp_compile.HookState()
            model.register_comm_hook(state, Halved(), modules=["embed" if first else "head"])  # type: ignore[operator]
    except dp_compile.DesyncError as error:
        return str(error)
    finally:
        if what == "modules":
            dp_compile.unreplicate(model)
    return ""


@pytest.mark.parametrize(("what", "said"), [("dtype", "options"), ("modules", "comm hook.*for (embed|head)")])
def test_ranks_that_differ(ranks2: Ranks, what: str, said: str) -> None:
    for text in ranks2.run(run_other, what):
        assert re.search(said, text), text


@pytest.mark.usefixtures("fake_group")
class TestAlone:
    def test_powersgd_of_some_modules(self) -> None:
        torch._dynamo.reset()
        model = dp_compile.replicate(Net(), config=replace(AOT, reduce_dtype=BF16))
        state = PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0.5)
        model.register_comm_hook(state, powerSGD_hook, modules=ModuleWrapPolicy({nn.Embedding}))
        run, hooks = compile_whole(model), []
        for step in range(4):
            run(tokens(step)).square().mean().backward()
            plan = dp_compile.report(model).plan
            hooks.append([each.name for each in plan.gradients if each.key.reduction.hook])
            assert {each.key.reduction.wire for each in plan.gradients if each.name.startswith("head")} == {"bfloat16"}
        assert hooks == [[], [], ["embed.weight"], ["embed.weight"]]
        assert set(state.error_dict) == {"embed.weight"}
        assert dp_compile.report(model).backwards == {"captured": 4}
        dp_compile.unreplicate(model)

    def test_a_policy_of_parts_that_compute_in_full_precision(self) -> None:
        whole, norms = MixedPrecisionPolicy(BF16, reduce_dtype=BF16), MixedPrecisionPolicy(reduce_dtype=F32)
        policies = {Net: whole, nn.LayerNorm: norms}
        policy = CustomPolicy(lambda module: type(module) in policies and {"mp_policy": policies[type(module)]})
        model = dp_compile.replicate(Net(), config=AOT, mp_policy=policy)
        assert model(tokens(0)).dtype == BF16
        seen: list[torch.dtype] = []
        model.blocks[0][0].register_forward_pre_hook(lambda module, args: seen.append(module.weight.dtype))
        model(tokens(0))
        assert seen == [F32]
        wires = {each.name: each.key.reduction.wire for each in dp_compile.report(model).plan.gradients}
        assert (wires["blocks.1.0.weight"], wires["head.weight"]) == (None, "bfloat16")
        dp_compile.unreplicate(model)

    @pytest.mark.parametrize(
        ("policy", "named"),
        [
            (ModuleWrapPolicy({nn.LayerNorm}), "blocks.0.0 blocks.1.0"),
            (partial(transformer_auto_wrap_policy, transformer_layer_cls={nn.LayerNorm}), "blocks.0.0 blocks.1.0"),
            # The embedding has 66 elements, a block 54. What is left over, the module itself, would be named too.
            (
                partial(size_based_auto_wrap_policy, min_num_params=60, exclude_wrap_modules={Net, nn.ModuleList}),
                "embed",
            ),
            (CustomPolicy(lambda module: isinstance(module, nn.Embedding)), "embed"),
            (lambda name, module: name == "head", "head"),
        ],
        ids=["classes", "transformer", "size", "custom", "function"],
    )
    def test_policies_of_torch_say_which_parts(self, policy: Any, named: str) -> None:
        """As if the modules that they name had been given by name."""
        found = []
        for given in ({policy: F32}, dict.fromkeys(named.split(), F32)):
            torch.manual_seed(0)
            config = replace(AOT, reduce_dtype=BF16, reduce_dtypes=given)
            model = dp_compile.replicate(Net(), config=config)
            found.append(dp_compile.report(model).plan)
            dp_compile.unreplicate(model)
        assert found[0] == found[1]
        assert {each.name.rpartition(".")[0] for each in found[0].gradients if not each.key.reduction.wire} >= {
            *named.split()
        }
        seen: list[torch.dtype] = []
        config = replace(AOT, param_dtype=BF16, full_precision_modules=(policy,))
        model = dp_compile.replicate(Net(), config=config)
        for name in named.split():
            model.get_submodule(name).register_forward_pre_hook(lambda module, args: seen.append(module.weight.dtype))
        model(tokens(0))
        assert seen == [F32] * len(named.split())
        dp_compile.unreplicate(model)

    def test_policies_that_name_nothing_or_all(self) -> None:
        nothing, everything = ModuleWrapPolicy({nn.Conv2d}), ModuleWrapPolicy({Net})
        for options, message in (
            ({"reduce_dtypes": {nothing: F32}}, "reduce_dtypes has a policy that names no module of Net"),
            ({"param_dtype": BF16, "full_precision_modules": (nothing,)}, "full_precision_modules has a policy"),
            ({"param_dtype": BF16, "full_precision_modules": (everything,)}, "names the module itself: that leaves no"),
            (
                {"reduce_dtype": BF16, "reduce_dtypes": {everything: FP16}},
                "names the module itself, with torch.float16",
            ),
            (
                {"reduce_dtypes": {CustomPolicy(lambda module: {"mp_policy": 1}): F32}},
                r"reduce_dtypes gives arguments of its own to .*mp_policy\. It can say True or False",
            ),
        ):
            with pytest.raises(dp_compile.ConfigError, match=message):
                dp_compile.replicate(Net(), config=replace(AOT, **options))
        model = dp_compile.replicate(Net(), config=replace(AOT, reduce_dtypes={everything: FP16, nn.LayerNorm: F32}))
        wires = {each.name: each.key.reduction.wire for each in dp_compile.report(model).plan.gradients}
        assert (wires["head.weight"], wires["blocks.0.0.weight"]) == ("float16", None)
        dp_compile.unreplicate(model)

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ({"nowhere": F32, "no.way": F32}, "reduce_dtypes names 'no.way', 'nowhere', which Net does not have"),
            (
                {"blocks": FP16, nn.LayerNorm: F32},
                "two things.*'blocks.0.0' is torch.float32, 'blocks' around it is torch.float16; 'blocks.1.0' is",
            ),
            ({"embed": FP16, nn.Embedding: BF16}, "'embed' is torch.float16 and torch.bfloat16"),
        ],
    )
    def test_units_that_are_not_there_or_overlap(self, given: dict[Any, Any], message: str) -> None:
        with pytest.raises(dp_compile.ConfigError, match=message):
            dp_compile.replicate(Net(), config=replace(AOT, reduce_dtypes=given))

    def test_a_parameter_that_two_units_share(self) -> None:
        model = Net()
        model.head = nn.Linear(6, 11, bias=False)
        model.head.weight = model.embed.weight
        with pytest.raises(dp_compile.ModuleError, match=r"embed\.weight = head\.weight"):
            dp_compile.replicate(model, config=replace(AOT, reduce_dtypes={"embed": FP16}))
        dp_compile.replicate(model, config=replace(AOT, reduce_dtypes={"embed": FP16, "head": FP16}))
        with pytest.raises(dp_compile.ModuleError, match=r"modules means .*embed\.weight = head\.weight"):
            model.register_comm_hook(dp_compile.HookState(), Halved(), modules=["head"])
        dp_compile.unreplicate(model)

    def test_what_cannot_be_had_of_parts(self) -> None:
        with pytest.raises(dp_compile.ConfigError, match="reduce_dtypes needs dp_compile's hooks"):
            dp_compile.replicate(Net(), config=replace(AOT, reduce_dtypes=KINDS, ddp_python_hook=False))
        for given in ({nn.Linear: torch.int8}, {7: F32}, [nn.Linear]):
            with pytest.raises(dp_compile.ConfigError, match="reduce_dtypes must"):
                dp_compile.ReplicateConfig(reduce_dtypes=given)  # type: ignore[arg-type]
        odd = CustomPolicy(lambda module: type(module) is nn.Linear and {"mp_policy": MixedPrecisionPolicy(FP16)})
        with pytest.raises(dp_compile.ConfigError, match=r"compute in its param_dtype, None.*'head'"):
            dp_compile.replicate(Net(), mp_policy=odd)
        whole = MixedPrecisionPolicy(BF16)
        inner = {Net: whole, nn.Sequential: MixedPrecisionPolicy(), nn.Linear: whole}
        overridden = CustomPolicy(lambda module: type(module) in inner and {"mp_policy": inner[type(module)]})
        with pytest.raises(
            dp_compile.ConfigError, match=r"'blocks\.0\.1' in 'blocks\.0', 'blocks\.1\.1' in 'blocks\.1'"
        ):
            dp_compile.replicate(Net(), mp_policy=overridden)
        inner = {Net: whole, nn.LayerNorm: MixedPrecisionPolicy(cast_forward_inputs=False)}
        with pytest.raises(
            dp_compile.ConfigError, match=r"inputs that are cast as those of the whole; got 'blocks\.0\.0'"
        ):
            dp_compile.replicate(Net(), mp_policy=overridden)
        inner = {Net: whole}
        with pytest.raises(dp_compile.ConfigError, match="what config says in reduce_dtypes"):
            dp_compile.replicate(Net(), mp_policy=overridden, config=replace(AOT, reduce_dtypes=KINDS))
        with pytest.raises(
            dp_compile.ConfigError, match=r"got ModuleWrapPolicy\. One .*reduce_dtypes=\{policy: dtype\}"
        ):
            dp_compile.replicate(Net(), mp_policy=ModuleWrapPolicy({nn.Linear}))  # type: ignore[arg-type]
        other = CustomPolicy(lambda module: {"cap": 3})
        with pytest.raises(dp_compile.ConfigError, match=r"must give .*'mp_policy'.*for ''"):
            dp_compile.replicate(Net(), mp_policy=other)
        model = dp_compile.replicate(Net(), config=AOT)
        with pytest.raises(dp_compile.ConfigError, match="fp16_compress_hook cannot reduce some modules only"):
            model.register_comm_hook(None, default_hooks.fp16_compress_hook, modules=["embed"])
        for modules, message in ((["elsewhere"], "modules names 'elsewhere'"), ({nn.Conv2d}, "names no module of Net")):
            with pytest.raises(dp_compile.ConfigError, match=message):
                model.register_comm_hook(dp_compile.HookState(), Halved(), modules=modules)
        dp_compile.unreplicate(model)
        model = dp_compile.replicate(Net(), config=replace(AOT, reduce_dtypes=KINDS))
        with pytest.raises(dp_compile.ConfigError, match=r"reduce_dtypes gives a dtype to travel in: embed\.weight\. "):
            model.register_comm_hook(dp_compile.HookState(), Halved(), modules=["embed", "head"])
        model.register_comm_hook(dp_compile.HookState(), Halved(), modules=["head"])  # nothing stayed of the other
        dp_compile.unreplicate(model)
