"""torch's post-local SGD in the captured graph: what torch's DDP computes with the same hook, before and after."""

from __future__ import annotations

import copy
import warnings
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from beside import AOT, batch, compile_whole, mlp, not_compiled
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.nn.parallel import DistributedDataParallel

import dp_compile
from dp_compile.engine import drift
from dp_compile.modules.replicated_module import replica_of
from dp_compile.testing.ranks import Ranks

SWITCH = 3


def halves() -> dist.ProcessGroup:
    """The half of the ranks that this one is in."""
    half = dist.get_world_size() // 2
    groups = [dist.new_group(list(range(first, first + half))) for first in (0, half)]
    return groups[dist.get_rank() // half]


def pair(**options: Any) -> tuple[Any, DistributedDataParallel, PostLocalSGDState]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    ours: Any = nn.Sequential(mlp(7), nn.Tanh(), mlp(5))
    theirs = DistributedDataParallel(copy.deepcopy(ours))
    subgroup = halves()
    theirs.register_comm_hook(PostLocalSGDState(None, subgroup, SWITCH), post_localSGD_hook)
    dp_compile.replicate(ours, config=replace(AOT, **options))
    state = PostLocalSGDState(None, subgroup, SWITCH)
    ours.register_comm_hook(state, post_localSGD_hook)
    return ours, theirs, state


def through_the_switch(compiled: bool, broken: tuple[int, ...], micro: int) -> Any:
    """In the steps `broken` the last rank's backward is not captured."""
    ours, theirs, state = pair(bucket_cap_mb=1e-4)
    run = (compile_whole if compiled else not_compiled)(ours)
    sides = [(each, call, torch.optim.SGD(each.parameters(), 0.1)) for each, call in ((ours, run), (theirs, theirs))]
    for step in range(SWITCH + 3):
        for module, forward, optimizer in sides:
            optimizer.zero_grad()
            by_hooks = module is ours and step in broken and dist.get_rank() == dist.get_world_size() - 1
            for each in range(micro):
                silent = dp_compile.no_sync(ours) if module is ours else theirs.no_sync()
                with warnings.catch_warnings(), silent if each + 1 < micro else nullcontext():
                    warnings.simplefilter("ignore")
                    with torch.autograd.detect_anomaly(check_nan=False) if by_hooks else nullcontext():
                        forward(batch(10 * step + each)).square().mean().backward()
            optimizer.step()
        for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, other.grad, rtol=1e-5, atol=1e-7, msg=f"{name}, step {step}")
        assert state.iter == min(step + 1, SWITCH)
        # Ranks of two subgroups are meant to differ: nobody compares them unasked.
        assert drift._is_wanted(replica_of(ours)) is (step < SWITCH)
    report = dp_compile.report(ours)
    dp_compile.unreplicate(ours)
    weights = torch.cat([each.detach().flatten() for each in ours.parameters()])
    groups = [{stage.group for stage in each.key.reduction.stages} for each in report.plan.buckets]
    return weights, dict(report.backwards), sum(each.synced for each in report.captures), groups


@pytest.mark.parametrize(
    ("compiled", "broken", "micro"),
    [(True, (), 1), (True, (1, SWITCH, SWITCH + 1), 2), (False, (), 1)],
    ids=["captured", "one rank by hooks, accumulated", "not compiled"],
)
def test_as_torch_s_ddp(ranks4: Ranks, compiled: bool, broken: tuple[int, ...], micro: int) -> None:
    found = ranks4.run(through_the_switch, compiled, broken, micro)
    weights = [each for each, *_ in found]
    assert torch.equal(weights[0], weights[1])
    assert torch.equal(weights[2], weights[3])
    assert not torch.equal(weights[0], weights[2])
    for _, ways, graphs, groups in found:
        # Of gradients the subgroup, of flags all ranks.
        assert len(set.union(*groups[:-1])) == 1
        assert groups[-1] != groups[0]
        if compiled and not broken:
            assert (ways, graphs) == ({"captured": SWITCH + 3}, 2)


def other_states(what: str) -> str:
    model: Any = dp_compile.replicate(mlp(), config=AOT)
    subgroup = halves()
    options: dict[str, Any] = {"start_localSGD_iter": 3, "subgroup": subgroup}
    if dist.get_rank() == 0:
        options[what] = 4 if what == "start_localSGD_iter" else dist.GroupMember.NON_GROUP_MEMBER
    try:
        model.register_comm_hook(PostLocalSGDState(None, **options), post_localSGD_hook)
    except dp_compile.DesyncError as error:
        return str(error)
    finally:
        dp_compile.unreplicate(model)
    return ""


@pytest.mark.parametrize("what", ["start_localSGD_iter", "subgroup"])
def test_ranks_with_other_states(ranks2: Ranks, what: str) -> None:
    for text in ranks2.run(other_states, what):
        assert "register_comm_hook(): rank 1 differs from rank 0" in text


@pytest.mark.usefixtures("fake_group")
class TestAlone:
    def test_a_warm_up_through_the_start_iteration_leaves_no_trace(self) -> None:
        torch._dynamo.reset()
        model: Any = dp_compile.replicate(mlp(), config=AOT)
        state = PostLocalSGDState(None, dist.new_group([0]), 1)
        model.register_comm_hook(state, post_localSGD_hook)
        run = compile_whole(model)
        dp_compile.warmup(model, [batch(0)], lambda x: run(x).sum(), accumulation=False)
        assert state.iter == 0
        scales = []
        for _ in range(3):
            run(batch(0)).sum().backward()
            scales.append(dp_compile.report(model).plan.buckets[0].key.reduction.scale)
        assert scales == [0.5, 1.0, 1.0]
        dp_compile.unreplicate(model)

    def test_without_a_reduction_in_the_end_torch_s_reducer_calls_it(self) -> None:
        model: Any = dp_compile.replicate(mlp(), config=AOT)
        state = PostLocalSGDState(None, dist.new_group([0]), 1, post_local_gradient_allreduce=False)
        model.register_comm_hook(state, post_localSGD_hook)
        assert (
            "with post_local_gradient_allreduce=False nothing is reduced" in dp_compile.report(model).why_not_captured
        )
        dp_compile.unreplicate(model)
