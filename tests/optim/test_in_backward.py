"""Updates in the backward: the same parameters as without, in every way, on every rank; and what is refused."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from beside import Block, batch, compile_blocks, compile_whole, not_compiled
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint
from twins import ADAMW, SGD, SMALL, LateReader, Make, Net, twins, two_groups

import dp_compile
from dp_compile.testing.ranks import Ranks

OPTIMIZERS: dict[str, Make] = {
    "sgd": SGD,
    "adamw": ADAMW,
    "adamw_foreach": two_groups(torch.optim.AdamW, lr=0.01, foreach=True),
    "adamw_fused": two_groups(torch.optim.AdamW, lr=torch.tensor(0.01), fused=True),
    "adafactor": two_groups(torch.optim.Adafactor, lr=0.01),
    "rmsprop": two_groups(torch.optim.RMSprop, lr=0.01, momentum=0.5),
}


# --- the same numbers -------------------------------------------------------------------------------------------------


def train(name: str, max_norm: float | None, compile_model: Callable[[nn.Module], Any]) -> tuple[int, int]:
    both = twins(make=OPTIMIZERS[name], beside_ddp=True, compile_model=compile_model, max_norm=max_norm)
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 2, gamma=0.5) for each in (both.mine, both.other)]
    for number in range(5):
        both.backward(number)
        if compile_model is compile_whole:
            assert all(each.grad is None for each in both.ours.parameters())
        both.step()
        for scheduler in schedulers:
            scheduler.step()
        both.compare()
    return both.updated, len(dp_compile.report(both.ours).captures)


@pytest.mark.parametrize(
    ("name", "max_norm"),
    [
        # Gradients are clipped in the same way for all of them: the other pairs can wait.
        pytest.param(
            name, max_norm, marks=() if name == "adamw" or bool(max_norm) == number % 2 else [pytest.mark.nightly]
        )
        for number, name in enumerate(OPTIMIZERS)
        for max_norm in (None, 0.05)
    ],
)
def test_the_same_parameters_as_ddp(ranks: Ranks, name: str, max_norm: float | None) -> None:
    """Two parameter groups and a scheduler; a changed learning rate compiles nothing anew."""
    assert set(ranks.run(train, name, max_norm, compile_whole)) == {(10, 1)}


@pytest.mark.parametrize("max_norm", [None, 0.05])
def test_the_same_parameters_if_nothing_is_compiled(ranks: Ranks, max_norm: float | None) -> None:
    assert set(ranks.run(train, "adamw", max_norm, not_compiled)) == {(0, 0)}


def bit_for_bit() -> None:
    """One layer, so that torch's gradients are computed as ours are."""
    both = twins(lambda: nn.Linear(6, 6), two_groups(torch.optim.SGD, lr=0.1, momentum=0.9), beside_ddp=True)
    for number in range(4):
        both.backward(number)
        both.step()
        for mine, other in zip(both.ours.parameters(), both.theirs.parameters(), strict=True):
            assert torch.equal(mine, other)
    assert both.updated == 2


def test_sgd_is_ddp_s_bit_for_bit(ranks2: Ranks) -> None:
    ranks2.run(bit_for_bit)


def generated(build: Callable[[], nn.Module], in_flight: int | None, max_norm: float | None) -> int:
    config = dp_compile.ReplicateConfig(bucket_cap_mb=1e-4)
    both = twins(build, ADAMW, config=config, given={"buckets_in_flight": in_flight}, max_norm=max_norm)
    both.train(0, 1, 2)
    return both.updated


@pytest.mark.parametrize(
    ("build", "in_flight", "max_norm", "updated"),
    [
        pytest.param(LateReader, 1, None, 9, marks=pytest.mark.nightly),
        (Net, None, 0.05, 10),
        pytest.param(LateReader, None, None, 9, marks=pytest.mark.nightly),
        pytest.param(Net, 1, None, 10, marks=pytest.mark.nightly),
    ],
)
def test_generated_code(
    ranks: Ranks, build: Callable[[], nn.Module], in_flight: int | None, max_norm: float | None, updated: int
) -> None:
    assert set(ranks.run(generated, build, in_flight, max_norm)) == {updated}


def late_reader(in_flight: int | None) -> str:
    both = twins(LateReader, given={"buckets_in_flight": in_flight})
    both.train(0, 1, 2)
    assert both.updated == 9
    return str(dp_compile.report(both.ours))


@pytest.mark.parametrize("in_flight", [1, 2, None])
def test_a_parameter_that_is_read_late_is_updated_later(ranks: Ranks, in_flight: int | None) -> None:
    for text in ranks.run(late_reader, in_flight):
        assert ("which reads what it updates" in text) is (in_flight is not None)
        assert "9 parameters updated in it" in text


def one_rank_falls_back(max_norm: float | None, in_flight: int | None) -> int:
    both = twins(make=ADAMW, max_norm=max_norm, given={"buckets_in_flight": in_flight})
    for number in range(5):
        both.backward(number, broken=number in (1, 3) and dist.get_rank() == 0)
        both.step()
        both.compare()
    return both.updated


@pytest.mark.parametrize(("max_norm", "in_flight"), [(None, None), (None, 1), (0.05, None)])
def test_one_rank_is_not_captured_now_and_then(ranks: Ranks, max_norm: float | None, in_flight: int | None) -> None:
    assert set(ranks.run(one_rank_falls_back, max_norm, in_flight)) == {10}


class Reentrant(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True) + x
        result: torch.Tensor = self.norm(x)
        return result


def bf16_hook(model: Any) -> None:
    model.register_comm_hook(None, torch.distributed.algorithms.ddp_comm_hooks.default_hooks.bf16_compress_hook)


FEATURES: dict[str, tuple[dict[str, Any], int]] = {
    "tied weights": ({"build": lambda: Net(tied=True), "given": {"buckets_in_flight": 1}}, 9),
    "no passes": ({"passes": ()}, 10),
    "a casting hook": ({"prepare": bf16_hook}, 10),
    "mixed precision": ({"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}, 10),
    "static graph": ({"static_graph": True}, 10),
    "unused are found": ({"find_unused_parameters": True}, 10),
    "check_nan": ({"config": dp_compile.ReplicateConfig(backend="aot_eager", check_nan=True)}, 0),
    "compiled in parts": ({"build": lambda: nn.Sequential(Block(), Block()), "compile_model": compile_blocks}, 8),
    "not compiled hooks": ({"compile_model": not_compiled, "config": SMALL}, 0),
    "reentrant checkpoint": ({"build": Reentrant, "compile_theirs": True}, 10),
}


def feature(name: str) -> int:
    options, _ = FEATURES[name]
    both = twins(**options)
    both.train(*range(4))
    return both.updated


AT_NIGHT = ("static graph", "no passes", "check_nan", "a casting hook")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.nightly] if name in AT_NIGHT else []) for name in FEATURES]
)
def test_beside_what_else_there_is(ranks: Ranks, name: str) -> None:
    assert set(ranks.run(feature, name)) == {FEATURES[name][1]}


def on_two_levels() -> int:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("nodes", "inside"))
    both = twins(device_mesh=mesh, given={"buckets_in_flight": 1})
    both.train(0, 1)
    return both.updated


def test_two_levels_of_network(ranks4: Ranks) -> None:
    assert set(ranks4.run(on_two_levels)) == {10}


# --- the step ---------------------------------------------------------------------------------------------------------


def accumulate(max_norm: float | None) -> None:
    both = twins(max_norm=max_norm)
    for number in range(3):
        both.backward(10 * number, sync=False)
        assert all(each.grad is not None for each in both.ours.parameters())
        both.backward(10 * number + 1)
        assert all(each.grad is None for each in both.ours.parameters())
        both.step()
        both.compare()
    outputs = [[run(batch(each)) for each in (50, 51)] for run in (both.run, both.run_theirs)]
    for (first, second), model in zip(outputs, (both.ours, both.theirs), strict=True):
        with dp_compile.no_sync(model):
            first.square().mean().backward()
        second.square().mean().backward()
    both.step()
    both.compare()


@pytest.mark.parametrize("max_norm", [None, 0.05])
def test_accumulation_and_two_forwards(ranks: Ranks, max_norm: float | None) -> None:
    ranks.run(accumulate, max_norm)


def second_backward(compile_model: Callable[[nn.Module], Any]) -> str:
    both = twins(compile_model=compile_model)
    both.backward(0)
    with pytest.raises(dp_compile.ReductionError) as error:
        both.backward(1)
    both.mine.step()
    both.other.step()
    both.other.zero_grad()
    both.backward(2)
    both.step()
    both.compare()
    return str(error.value)


@pytest.mark.parametrize("compile_model", [compile_whole, not_compiled])
def test_a_second_backward_before_the_step(ranks: Ranks, compile_model: Callable[[nn.Module], Any]) -> None:
    """The same in every way, so that no rank goes on alone."""
    for text in ranks.run(second_backward, compile_model):
        assert "before optimizer.step()" in text
        assert "no_sync()" in text


def kept_graph() -> None:
    both = twins()
    both.train(0)
    for run in (both.run, both.run_theirs):
        loss = run(batch(1)).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
    # Twice the gradient: the first one was kept in `.grad`, and reduced again.
    assert all(each.grad is None for each in both.ours.parameters())
    both.step()
    both.compare()


def test_a_graph_that_is_kept_is_not_updated_in(ranks: Ranks) -> None:
    ranks.run(kept_graph)


def no_zero_grad() -> None:
    both = twins()
    for number in range(4):
        both.backward(number, broken=number == 1 and dist.get_rank() == 0)
        both.step(zero=False)
        both.compare()


def test_zero_grad_is_not_needed(ranks: Ranks) -> None:
    """Nor may it matter which way a rank went."""
    ranks.run(no_zero_grad)


class Spare(Net):
    """In some steps no rank uses `spare`, in some the first rank only."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(6, 6)
        self.users = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.spare(x) if dist.get_rank() < self.users else x)


def unused(max_norm: float | None) -> None:
    both = twins(Spare, ADAMW, max_norm=max_norm, find_unused_parameters=True)
    for number, users in enumerate((2, 0, 1, 2, 0)):
        both.ours.users = both.theirs.users = users  # type: ignore[assignment]
        before = both.ours.spare.weight.clone()  # type: ignore[union-attr,operator]
        both.backward(number)
        both.step()
        both.compare()
        assert torch.equal(before, both.ours.spare.weight) is (users == 0)  # type: ignore[union-attr,arg-type]


@pytest.mark.parametrize("max_norm", [pytest.param(None, marks=pytest.mark.nightly), 0.05])
def test_unused_parameters(ranks2: Ranks, max_norm: float | None) -> None:
    ranks2.run(unused, max_norm)


def frozen(max_norm: float | None) -> None:
    both = twins(find_unused_parameters=True, max_norm=max_norm)
    both.train(0)
    for requires in (False, True):
        for model in (both.ours, both.theirs):
            model.layers[1].weight.requires_grad_(requires)  # type: ignore[index,union-attr]
        both.train(1, 2)


@pytest.mark.parametrize("max_norm", [None, pytest.param(0.05, marks=pytest.mark.nightly)])
def test_parameters_that_are_frozen_in_between(ranks: Ranks, max_norm: float | None) -> None:
    ranks.run(frozen, max_norm)


def checkpoints() -> None:
    both = twins(make=ADAMW)
    both.train(0, 1)
    both.backward(2)
    state = copy.deepcopy((both.ours.state_dict(), both.mine.state_dict()))
    assert state[1].keys() == both.other.state_dict().keys()
    both.step()
    both.train(3)
    again = twins(make=ADAMW)
    for model, optimizer in ((again.ours, again.mine), (again.theirs, again.other)):
        model.load_state_dict(state[0])
        optimizer.load_state_dict(copy.deepcopy(state[1]))  # it keeps the tensors that it is given
    again.train(3)
    for one, other in zip(both.ours.parameters(), again.ours.parameters(), strict=True):
        assert torch.equal(one, other)
    both.mine.load_state_dict(copy.deepcopy(state[1]))  # in the middle of a run: its groups are new
    both.ours.load_state_dict(state[0])
    both.backward(3)
    both.mine.step()
    for one, other in zip(both.ours.parameters(), again.ours.parameters(), strict=True):
        assert torch.equal(one, other)


def test_checkpoints(ranks: Ranks) -> None:
    ranks.run(checkpoints)


def the_optimizer_itself() -> None:
    both = twins(max_norm=0.05)
    calls: list[str] = []
    both.mine.register_step_pre_hook(lambda *_: calls.append("before"))
    both.mine.register_step_post_hook(lambda *_: calls.append("after"))
    both.train(0)
    assert calls == ["before", "after"]
    for copied in (copy.deepcopy(both.mine), pickle.loads(pickle.dumps(both.mine))):
        # A plain one, over parameters of its own.
        parameter = copied.param_groups[0]["params"][0]
        parameter.grad = torch.ones_like(parameter)
        copied.step()
        assert parameter.grad is not None
    extra = [nn.Parameter(torch.ones(6)) for _ in range(2)]
    for optimizer, parameter in zip((both.mine, both.other), extra, strict=True):
        optimizer.add_param_group({"params": [parameter], "lr": 0.5})
    for number in range(2):
        both.backward(number)
        for parameter in extra:
            parameter.grad = torch.full((6,), 1.0 + number)
        both.step()
        both.compare()
        assert torch.equal(*extra)
        assert not torch.equal(extra[0], torch.ones(6))
    text = str(dp_compile.report(both.ours))
    assert "left to step(): all parameters: the norm or the check is over 1 more parameters" in text


def test_hooks_copies_and_parameters_of_its_own(ranks: Ranks) -> None:
    ranks.run(the_optimizer_itself)


def two_optimizers() -> tuple[int, ...]:
    def half(number: int, model: Any) -> Iterator[nn.Parameter]:
        return (each for place, each in enumerate(model.parameters()) if place % 2 == number)

    both = twins(make=lambda parameters: torch.optim.AdamW([*parameters][::2], lr=0.01))
    more = [torch.optim.SGD(half(1, model), lr=0.1) for model in (both.ours, both.theirs)]
    dp_compile.optim.in_backward(both.ours, more[0], max_norm=0.01)
    for number in range(3):
        both.backward(number)
        torch.nn.utils.clip_grad_norm_(half(1, both.theirs), 0.01)
        for optimizer in more:
            optimizer.step()
        both.step()
        more[1].zero_grad()
        both.compare()
    return (both.updated,)


def test_two_optimizers_for_one_model(ranks: Ranks) -> None:
    assert set(ranks.run(two_optimizers)) == {(10,)}


def several_modules() -> None:
    pairs = [twins(), twins(make=ADAMW, max_norm=0.05)]
    for number in range(3):
        for ours in (True, False):
            first, second = (each.run if ours else each.run_theirs for each in pairs)
            second(first(batch(number))).square().mean().backward()
        for each in pairs:
            each.step()
            each.compare()
    assert all(each.updated == 20 for each in pairs)


def test_several_modules_in_one_backward(ranks: Ranks) -> None:
    ranks.run(several_modules)


def taken_off() -> None:
    both = twins(max_norm=0.05)
    both.train(0)
    for model in (both.ours, both.theirs):
        dp_compile.unreplicate(model)
    for run in (both.run, both.run_theirs):
        run(torch.ones(3, 6)).square().mean().backward()
    both.step()
    both.compare()
    for model in (both.ours, both.theirs):
        dp_compile.replicate(model, config=SMALL)
    dp_compile.optim.in_backward(both.ours, both.mine, max_norm=0.05)
    both.train(1, 2)


def test_a_module_that_is_not_replicated_any_more(ranks: Ranks) -> None:
    ranks.run(taken_off)


def in_join() -> None:
    both = twins(make=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    both.train(0)
    for model, run, optimizer in ((both.ours, both.run, both.mine), (both.theirs, both.run_theirs, both.other)):
        with dp_compile.join(model, divide_by_initial_world_size=False):
            for number in range(1 + dist.get_rank()):
                run(batch(number)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    both.train(1)


def test_uneven_inputs(ranks: Ranks) -> None:
    """There gradients are divided after the backward, so `step()` updates."""
    ranks.run(in_join)


def warmed_up() -> int:
    both = twins(make=ADAMW, max_norm=0.05)
    before = [each.clone() for each in both.ours.parameters()]
    dp_compile.warmup(both.ours, [batch(0)], lambda x: both.run(x).square().mean())
    assert all(map(torch.equal, before, both.ours.parameters()))
    assert not both.mine.state
    captures = len(dp_compile.report(both.ours).captures)
    both.train(0, 1)
    assert captures == len(dp_compile.report(both.ours).captures)
    return both.updated


def test_a_warm_up_updates_nothing(ranks: Ranks) -> None:
    assert set(ranks.run(warmed_up)) == {10}


# --- loss scaling -----------------------------------------------------------------------------------------------------


def scaled(max_norm: float | None, broken: bool) -> int:
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2) for _ in range(2)]
    both = twins(make=ADAMW, max_norm=max_norm, given={"scaler": scalers[0]})
    for number in range(6):
        # The first rank alone has numbers that are too large.
        factor = torch.inf if number == 2 and dist.get_rank() == 0 else 1.0
        before = [each.clone() for each in both.ours.parameters()]
        falls_back = broken and number in (2, 4) and dist.get_rank() == 0
        with warnings.catch_warnings(), torch.autograd.detect_anomaly(check_nan=False) if falls_back else nullcontext():
            warnings.simplefilter("ignore")
            scalers[0].scale(both.run(batch(number)).square().mean() * factor).backward()
        scalers[1].scale(both.run_theirs(batch(number)).square().mean() * factor).backward()
        if max_norm is not None:
            scalers[1].unscale_(both.other)
            torch.nn.utils.clip_grad_norm_(both.theirs.parameters(), max_norm)
        for scaler, optimizer in zip(scalers, (both.mine, both.other), strict=True):
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        both.compare()
        assert scalers[0].get_scale() == scalers[1].get_scale()
        same = all(map(torch.equal, before, both.ours.parameters()))
        assert same is (number == 2)
    return both.updated


@pytest.mark.parametrize(("max_norm", "broken"), [(None, False), (0.05, True)])
def test_a_grad_scaler(ranks: Ranks, max_norm: float | None, broken: bool) -> None:
    assert set(ranks.run(scaled, max_norm, broken)) == {10}


def unknown_scaler(compile_model: Callable[[nn.Module], Any]) -> str:
    both = twins(compile_model=compile_model)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(both.run(batch(0)).square().mean()).backward()
    with pytest.raises(dp_compile.ReductionError) as error:
        scaler.step(both.mine)
    return str(error.value)


def test_a_grad_scaler_that_was_not_given(ranks: Ranks) -> None:
    for text in ranks.run(unknown_scaler, compile_whole):
        assert "scaler=scaler" in text


def changed_between(compile_model: Callable[[nn.Module], Any]) -> list[str]:
    both, said = twins(make=OPTIMIZERS["adamw_fused"], compile_model=compile_model), []
    group = both.mine.param_groups[1]

    def halve_tensor() -> None:
        both.mine.param_groups[0]["lr"].mul_(0.5)

    for number, change in enumerate(
        (lambda: group.update(lr=0.02), lambda: group.update(betas=(0.8, 0.9)), halve_tensor)
    ):
        both.backward(number)
        before = dict(group)
        change()
        with pytest.raises(dp_compile.ReductionError) as error:
            both.mine.step()
        said.append(str(error.value))
        group.update(before)
        if change is not halve_tensor:
            both.step()  # and behind it they may change
            both.compare()
    return said


@pytest.mark.parametrize("compile_model", [compile_whole, not_compiled])
def test_options_that_change_before_the_step(ranks: Ranks, compile_model: Callable[[nn.Module], Any]) -> None:
    """The update was done with those of before; a rank that falls back would do it with those of now."""
    for said in ranks.run(changed_between, compile_model):
        for text, part in zip(said, ("lr of parameter group 1", "betas of parameter group 1", "lr of"), strict=True):
            assert f"{part}" in text
            assert "between the backward and optimizer.step()" in text


def loaded_between() -> str:
    """The first rank falls back: what the other has updated waits for `step()` there."""
    both = twins(make=ADAMW)
    both.train(0)
    state = copy.deepcopy(both.mine.state_dict())
    both.train(1)
    both.backward(2, broken=dist.get_rank() == 0)
    both.mine.load_state_dict(state)
    with pytest.raises(dp_compile.ReductionError) as error:
        both.mine.step()
    both.mine.zero_grad()
    both.ours.load_state_dict(both.theirs.state_dict())
    both.mine.load_state_dict(copy.deepcopy(both.other.state_dict()))  # and goes on, as one that left a step out
    both.theirs.zero_grad()
    both.train(3, 4)
    both.backward(5)
    both.mine.load_state_dict(copy.deepcopy(both.mine.state_dict()))
    dp_compile.unreplicate(both.ours)
    both.ours(batch(6)).square().mean().backward()
    both.mine.step()  # of an optimizer as any other
    return str(error.value)


def test_a_state_that_is_loaded_before_the_step(ranks: Ranks) -> None:
    for text in ranks.run(loaded_between):
        assert "a state was loaded into the optimizer between the backward and optimizer.step()" in text


def compiled_step() -> str:
    both = twins(make=ADAMW)
    both.backward(0)
    with pytest.raises(Exception, match="there is nothing left to compile") as error:
        torch.compile(both.mine.step, backend="eager")()
    both.step()
    both.compare()
    return str(error.value)


def test_a_step_that_is_compiled(ranks: Ranks) -> None:
    """It rounds otherwise, and so ranks drifted apart where one of them fell back."""
    for text in ranks.run(compiled_step):
        assert "Call step() as it is" in text


def scaler_behind_none() -> None:
    """In a module that was given its optimizer without a scaler before."""
    both = twins(compile_model=not_compiled)
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**8) for _ in range(2)]
    dp_compile.unreplicate(both.ours)
    for again in (False, True):
        if again:
            dp_compile.replicate(both.ours, config=SMALL)
            dp_compile.optim.in_backward(both.ours, both.mine, scaler=scalers[0])
        for run, scaler, optimizer in zip((both.run, both.run_theirs), scalers, (both.mine, both.other), strict=True):
            x = batch(int(again)) if again else torch.ones(3, 6)
            scaler.scale(run(x).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        both.compare()


def test_a_grad_scaler_later(ranks: Ranks) -> None:
    """What told scalers not to unscale for this optimizer stayed: with the second module it stepped unscaled."""
    ranks.run(scaler_behind_none)


# --- what goes wrong --------------------------------------------------------------------------------------------------


def fails_between(in_flight: int | None) -> str:
    both = twins(given={"buckets_in_flight": in_flight})
    both.train(0)
    broken = both.ours.layers[0].weight  # type: ignore[index,union-attr]
    state = copy.deepcopy((both.ours.state_dict(), both.mine.state_dict()))
    both.mine.state[broken]["momentum_buffer"] = torch.zeros(5)
    with pytest.raises(RuntimeError):
        both.backward(1)
    said = []
    for act in (both.mine.step, lambda: both.backward(2)):
        with pytest.raises(dp_compile.ReductionError) as error:
            act()
        said.append(str(error.value))
    assert said[0] == said[1]
    assert [len(group["params"]) for group in both.mine.param_groups] == [4, 6]
    both.ours.load_state_dict(state[0])
    both.mine.load_state_dict(state[1])
    both.other.zero_grad()
    both.backward(1)
    both.step()
    both.compare()
    return said[0]


@pytest.mark.parametrize("in_flight", [None, 1])
def test_a_backward_that_fails_between_two_updates(ranks: Ranks, in_flight: int | None) -> None:
    for text in ranks.run(fails_between, in_flight):
        assert "after the optimizer had updated" in text
        assert "layers.3.weight" in text
        assert "load_state_dict" in text


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise ValueError("on purpose")


def slower(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        group["lr"] *= 0.5


def loaded_again(optimizer: torch.optim.Optimizer) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def fails_before() -> None:
    """And then nothing has updated yet with what the optimizer was: it may become another, and step."""
    both = twins()
    both.train(0)
    for change in (slower, loaded_again):
        with pytest.raises(ValueError, match="on purpose"):
            both.run(Fails.apply(batch(1).requires_grad_())).square().mean().backward()
        for each in both.ours.parameters():
            each.grad = None
        for optimizer in (both.mine, both.other):
            change(optimizer)
            optimizer.step()
        both.train(1)


def test_a_backward_that_fails_before_any_update_leaves_no_trace(ranks: Ranks) -> None:
    """It fails while it is traced."""
    ranks.run(fails_before)


class Given(nn.Module):
    """A matrix that is given may lie in the memory of a parameter, whose gradient is ready before it is read."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle = nn.Linear(6, 6), nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.last = nn.Linear(6, 6, bias=False)

    def forward(self, x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x)) @ given
        for layer in self.middle:
            x = torch.tanh(layer(x))
        result: torch.Tensor = self.last(x)
        return result


def other_memory() -> list[int]:
    both = twins(Given, given={"buckets_in_flight": 1})
    captures = []
    for number, shares in enumerate((False, False, True, True, False)):
        for model, run in ((both.ours, both.run), (both.theirs, both.run_theirs)):
            weight = model.last.weight.detach()  # type: ignore[union-attr,operator]
            run(batch(number), weight if shares else weight.clone()).square().mean().backward()
        both.step()
        both.compare()
        captures.append(both.updated and len(dp_compile.report(both.ours).captures))
    return captures


def test_tensors_that_share_memory_in_one_step_and_not_in_another(ranks: Ranks) -> None:
    """Code that was compiled for the one is not run for the other."""
    for captures in ranks.run(other_memory):
        assert captures[0] == 1
        assert captures[-1] > 1


def refused() -> list[str]:
    model = dp_compile.replicate(Net(), config=SMALL)
    other = Net()

    class Own(torch.optim.SGD):
        pass

    dp_compile.optim.in_backward(model, kept := torch.optim.SGD([model.norm.weight], lr=0.1))
    said = []
    attempts: list[Callable[[], object]] = [
        lambda: dp_compile.optim.in_backward(other, torch.optim.SGD(other.parameters(), lr=0.1)),
        lambda: dp_compile.optim.in_backward(model, torch.optim.SGD(other.parameters(), lr=0.1)),
        lambda: dp_compile.optim.in_backward(model, torch.optim.LBFGS(model.parameters())),
        lambda: dp_compile.optim.in_backward(model, torch.optim.SparseAdam(model.parameters())),
        lambda: dp_compile.optim.in_backward(model, Own(model.parameters(), lr=0.1)),
        lambda: dp_compile.optim.in_backward(model, torch.optim.SGD(model.parameters(), lr=0.1, differentiable=True)),
        lambda: dp_compile.optim.in_backward(model, torch.optim.SGD(model.parameters(), lr=0.1)),
        lambda: dp_compile.optim.in_backward(model, kept),
        lambda: dp_compile.optim.in_backward(model, kept, max_norm=0.0),
        lambda: dp_compile.optim.in_backward(model, kept, buckets_in_flight=0),
        lambda: dp_compile.optim.in_backward(model, kept, scaler=1),  # type: ignore[arg-type]
        lambda: dp_compile.optim.in_backward(model, model),  # type: ignore[arg-type]
        lambda: kept.step(lambda: 0.0),
        lambda: kept.step(closure=lambda: 0.0),
    ]
    for attempt in attempts:
        with pytest.raises(dp_compile.DPCompileError) as error:
            attempt()
        said.append(str(error.value))
    return said


def test_what_is_refused(ranks: Ranks) -> None:
    expected = [
        "is not replicated",
        "has no trainable parameter of this module",
        "LBFGS cannot update in the backward: it evaluates the model again",
        "SparseAdam cannot update in the backward: it needs sparse gradients",
        "Own is not of torch.optim",
        "SGD(differentiable=True)",
        "another optimizer updates norm.weight in the backward already",
        "updates in the backward already",
        "max_norm must be a number > 0",
        "buckets_in_flight must be a whole number >= 1",
        "scaler must be a torch.amp.GradScaler",
        "optimizer must be a torch.optim.Optimizer",
        "was given a closure",
        "was given a closure",
    ]
    for said in ranks.run(refused):
        for text, part in zip(said, expected, strict=True):
            assert part in text


# --- one update for one backward --------------------------------------------------------------------------------------


def set_by_hand(given: dict[str, Any]) -> str:
    """A gradient that comes after the update: the plain loop would replace the other one, or add to it."""
    both = twins(given=given, compile_model=waiting if given.get("overlap_forward") else compile_whole)
    both.nearly = True
    both.train(0)
    both.backward(1)
    weight = both.ours.layers[1].weight
    assert weight.grad is None or given.get("shard")
    weight.grad = torch.ones_like(weight)
    before = [each.clone() for each in both.ours.parameters()]
    with pytest.raises(dp_compile.ReductionError) as error:
        both.mine.step()
    assert all(map(torch.equal, before, both.ours.parameters()))
    both.ours.zero_grad()
    both.mine.step()
    both.other.step()
    both.compare()
    return str(error.value)


def waiting(module: nn.Module) -> Any:
    """For `overlap_forward`."""
    return torch.compile(module, backend="dp_compile")


@pytest.mark.parametrize("given", [{}, {"buckets_in_flight": 1}, {"overlap_forward": True}, {"shard": True}])
def test_a_gradient_after_the_update(ranks: Ranks, given: dict[str, Any]) -> None:
    for text in ranks.run(set_by_hand, given):
        assert "layers." in text
        assert "set no .grad" in text


def set_where_nothing_was_updated() -> None:
    """By hooks of the eager way `.grad` is the reduced gradient, and what the loop makes of it counts."""
    both = twins(compile_model=not_compiled)
    for number in range(2):
        both.backward(number)
        for model in (both.ours, both.theirs):
            for each in model.parameters():
                each.grad = each.grad.sign()
        both.step()
        both.compare()


def test_gradients_that_step_uses_may_be_changed(ranks: Ranks) -> None:
    ranks.run(set_where_nothing_was_updated)


def stepped_twice(given: dict[str, Any], compile_model: Callable[[nn.Module], Any]) -> str:
    both = twins(given=given, compile_model=compile_model)
    both.mine.step()  # before any backward, as state is initialised for a checkpoint
    both.train(0)
    with pytest.raises(dp_compile.ReductionError) as error:
        both.mine.step()
    with torch.enable_grad():
        nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()  # of another model: this one may have had no part in it
    both.mine.step()
    both.train(1)
    return str(error.value)


@pytest.mark.parametrize("compile_model", [compile_whole, not_compiled])
@pytest.mark.parametrize("given", [{}, {"shard": True}])
def test_a_second_step(ranks: Ranks, given: dict[str, Any], compile_model: Callable[[nn.Module], Any]) -> None:
    for text in ranks.run(stepped_twice, given, compile_model):
        assert "called twice after one backward" in text


def clipped_by_hand(compile_model: Callable[[nn.Module], Any]) -> str:
    both = twins(compile_model=compile_model)
    both.train(0)
    both.backward(1)
    if compile_model is not_compiled:
        for model in (both.ours, both.theirs):
            dp_compile.optim.clip_grad_norm_(model.parameters(), 0.1)
        both.step()
        both.compare()
        return ""
    with pytest.raises(dp_compile.ReductionError) as error:
        dp_compile.optim.clip_grad_norm_(both.ours.parameters(), 0.1)
    both.step()
    both.compare()
    assert not dp_compile.optim.clip_grad_norm_(both.ours.parameters(), 0.1)
    return str(error.value)


def test_clipping_after_the_update(ranks: Ranks) -> None:
    for text in ranks.run(clipped_by_hand, compile_whole):
        assert "max_norm=" in text
    ranks.run(clipped_by_hand, not_compiled)


def step_that_is_dropped(given: dict[str, Any], compile_model: Callable[[nn.Module], Any]) -> str:
    scaler = torch.amp.GradScaler("cpu")
    both = twins(given={"scaler": scaler, **given}, compile_model=compile_model)
    scaler.scale(both.run(batch(0)).square().mean()).backward()
    with pytest.raises(dp_compile.ReductionError) as error:
        scaler.scale(both.run(batch(1)).square().mean()).backward()
    scaler.step(both.mine)
    scaler.update()
    scaler.scale(both.run(batch(2)).square().mean()).backward()
    return str(error.value)


@pytest.mark.parametrize("compile_model", [compile_whole, not_compiled])
@pytest.mark.parametrize("given", [{}, {"shard": True}])
def test_a_scaled_step_that_is_dropped(
    ranks: Ranks, given: dict[str, Any], compile_model: Callable[[nn.Module], Any]
) -> None:
    for text in ranks.run(step_that_is_dropped, given, compile_model):
        assert "before optimizer.step()" in text
        assert "scaler.update()" in text


def one_after_the_other(given: dict[str, Any]) -> str:
    both = twins(given=given, compile_model=waiting if given else compile_whole)
    both.nearly = True
    both.train(0)
    second = SGD(both.ours.parameters())
    with pytest.raises(dp_compile.ConfigError) as error:
        dp_compile.optim.in_backward(both.ours, second)
    dp_compile.optim.remove_in_backward(both.mine)
    both.train(1)  # the first one steps as any optimizer does
    with pytest.raises(dp_compile.ConfigError, match="does not update in the backward"):
        dp_compile.optim.remove_in_backward(both.mine)
    state = both.mine.state_dict()
    dp_compile.optim.in_backward(both.ours, second, **given)
    second.load_state_dict(state)
    both.mine = second
    both.train(2, 3)
    assert both.updated == 10
    return str(error.value)


@pytest.mark.parametrize("given", [{}, {"overlap_forward": True}])
def test_an_optimizer_that_is_removed(ranks: Ranks, given: dict[str, Any]) -> None:
    for text in ranks.run(one_after_the_other, given):
        assert "remove_in_backward(other_optimizer)" in text


def held_by_a_cycle() -> None:
    model = dp_compile.replicate(Net(), config=SMALL)
    first = dp_compile.optim.in_backward(model, SGD(model.parameters()))
    first.itself = [first]  # type: ignore[attr-defined]
    del first
    dp_compile.optim.in_backward(model, SGD(model.parameters()))


def test_an_optimizer_that_only_a_cycle_holds(ranks: Ranks) -> None:
    ranks.run(held_by_a_cycle)
