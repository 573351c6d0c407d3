"""Plans that are made anew: from the captured graph, from measured launches."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dp_compile
from dp_compile.insight.report import Report
from dp_compile.modules.replicated_module import replica_of
from dp_compile.plan.buckets import UNUSED_FLAGS, BucketPlan
from dp_compile.plan.ready_times import ReadyTimes
from dp_compile.testing.ranks import Ranks


class Backwards(nn.Module):
    """Uses its layers in the opposite order of their definition, so the parameters' order is the wrong one."""

    def __init__(self, layers: int = 4, width: int = 24) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in reversed(self.layers):
            x = torch.tanh(layer(x))
        return x


def names(plan: BucketPlan) -> list[str]:
    return [gradient.name for gradient in plan.gradients if gradient.name != UNUSED_FLAGS]


def step(model: Any, x: torch.Tensor) -> None:
    model(x).square().mean().backward()


CONFIG = dp_compile.ReplicateConfig(backend="aot_eager")


def test_launch_order_is_that_of_the_graph(fake_group: dist.ProcessGroup) -> None:
    model = dp_compile.replicate(Backwards(), config=CONFIG)
    assert names(dp_compile.report(model).plan)[0] == "layers.3.bias"
    compiled = torch.compile(model, backend="aot_eager")
    step(compiled, torch.randn(8, 24))
    report = dp_compile.report(model)
    order = [name for name in names(report.plan) if name.endswith("weight")]
    assert order == [f"layers.{number}.weight" for number in range(4)]
    assert "estimated from the captured graph" in str(report)
    captures = torch._dynamo.utils.counters["compiled_autograd"]["captures"]
    step(compiled, torch.randn(8, 24))
    step(compiled, torch.randn(8, 24))
    assert dp_compile.report(model).plan == report.plan
    assert len(dp_compile.report(model).captures) == 2  # gradients None, gradients kept
    assert torch._dynamo.utils.counters["compiled_autograd"]["captures"] <= captures + 1


def train(options: dict[str, Any], steps: int, eager_at: tuple[int, int] = (-1, -1)) -> tuple[Report, torch.Tensor]:
    """Rank `eager_at[0]` cannot capture backward number `eager_at[1]`. Returns the report and a parameter."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    ours = dp_compile.replicate(Backwards(), config=dataclasses.replace(CONFIG, **options))
    compiled = torch.compile(ours, backend="aot_eager")
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    for number in range(steps):
        x = torch.randn(8, 24, generator=torch.Generator().manual_seed(2 * number + dist.get_rank()))
        optimizer.zero_grad()
        with torch.autograd.set_detect_anomaly(eager_at == (dist.get_rank(), number), check_nan=False):
            step(compiled, x)
        optimizer.step()
    return dp_compile.report(ours), next(ours.parameters()).detach()


@pytest.mark.parametrize("who", [0, 1])
def test_one_rank_cannot_capture_the_first_backward(ranks: Ranks, who: int) -> None:
    one, other, *_ = ranks.run(train, {}, 3, (who, 0))
    assert one[0].plan == other[0].plan
    assert torch.equal(one[1], other[1])
    estimated = names(one[0].plan)[0] == "layers.0.bias"
    assert estimated == (who == 1)  # rank 0 decides; without a graph the plan stays


def test_one_plan_from_measured_launches(ranks: Ranks) -> None:
    one, other, *_ = ranks.run(train, {"replan_after": 2}, 6)
    assert one[0].plan == other[0].plan
    assert "ready times are measured" in str(one[0])
    assert "speeds off by 0.9x to 1.1x" in str(one[0])
    # Compiled twice, no more; once if the new plan has the same buckets.
    assert [record.synced for record in one[0].captures] in ([True, True], [True])
    assert one[0].backwards == {"captured": 6}
    assert torch.equal(one[1], other[1])
    torch.testing.assert_close(one[1], ranks.run(train, {}, 6)[0][1])


def test_the_plan_stays_if_a_rank_measured_nothing(ranks: Ranks) -> None:
    one, other, *_ = ranks.run(train, {"replan_after": 1}, 5, (1, 1))
    assert one[0].plan == other[0].plan
    assert "estimated from the captured graph" in str(one[0])
    assert torch.equal(one[1], other[1])


# --- the same plan on every rank -----------------------------------------------------------------------------------


def plan_otherwise_on_rank_1(replan_after: int | None, backwards: int) -> tuple[list[str], list[str]]:
    """Rank 1 takes two equal gradients in another order, as another `sum` of floats could.

    Returns errors by backward, and the plan's names.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    ours = dp_compile.replicate(Backwards(3), config=dataclasses.replace(CONFIG, replan_after=replan_after))
    replica = replica_of(ours)
    make, armed = replica.revisions.revise, replan_after is None
    assert make is not None

    def revise(times: ReadyTimes, cost: Any) -> Any:
        if dist.get_rank() == 1 and armed:
            swapped = {0: times.shares[2], 2: times.shares[0]}
            times = dataclasses.replace(times, shares={**times.shares, **swapped})
        return make(times, cost)

    replica.revisions.revise = revise
    compiled, errors = torch.compile(ours, backend="aot_eager"), []
    for number in range(backwards):
        if number == 1:
            armed = True
        ours.zero_grad()
        try:
            step(compiled, torch.ones(8, 24) * (1 + dist.get_rank()))
            errors.append("")
        except dp_compile.DesyncError as error:
            errors.append(str(error))
    return errors, names(replica.plan)


@pytest.mark.parametrize(("replan_after", "at"), [(None, 0), (1, 2)])
def test_a_plan_that_differs_is_found_before_it_is_used(ranks2: Ranks, replan_after: int | None, at: int) -> None:
    """Two gradients would be added to each other without a word (D5)."""
    one, other = ranks2.run(plan_otherwise_on_rank_1, replan_after, at + 1)
    for errors, _ in (one, other):
        assert errors[:at] == [""] * at
        assert "rank 1 differs from rank 0: the new plan" in errors[at]
    assert one[1] == other[1]  # the plan of before, which all have


# --- hooks or torch's reducer -------------------------------------------------------------------------------------


class Optional(nn.Module):
    """A compiled block that a rank may skip, and a head that is not compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Backwards(1, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, use_block: bool) -> torch.Tensor:
        if use_block:
            x = self.block(x)
        result: torch.Tensor = self.head(x)
        return result


def skip_the_compiled_part() -> dict[str, int]:
    """In the first backward only rank 0 runs anything compiled. Every rank has to reduce in the same way."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    ours = Optional()
    theirs = DistributedDataParallel(copy.deepcopy(ours), find_unused_parameters=True)
    dp_compile.replicate(ours, config=CONFIG, find_unused_parameters=True)
    ours.block.compile(backend="aot_eager")
    for number in range(4):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(number + 7 * dist.get_rank()))
        for model in (ours, theirs):
            model.zero_grad()
            model(x, dist.get_rank() == number % 2).square().sum().backward()
        for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, other.grad, msg=lambda text, name=name: f"{name}: {text}")
    return dict(dp_compile.report(ours).backwards)


def test_one_rank_runs_compiled_code_and_the_other_does_not(ranks: Ranks) -> None:
    one, other, *_ = ranks.run(skip_the_compiled_part)
    assert one == {"captured": 2, "eager hooks": 2}
    assert other == {"captured": 2, "eager hooks": 2}


def late_compilation() -> dict[str, int]:
    """Rank 0 compiles from the third step on, rank 1 never: hooks take over on both when they ask each other."""
    torch._dynamo.reset()
    ours = dp_compile.replicate(Backwards(2), config=CONFIG)
    compiled = torch.compile(ours, backend="aot_eager")
    for number in range(6):
        ours.zero_grad()
        step(compiled if number >= 3 and dist.get_rank() == 0 else ours, torch.ones(2, 24) * (dist.get_rank() + 1))
    return dict(dp_compile.report(ours).backwards)


def test_hooks_come_back_on_all_ranks_at_once(ranks: Ranks) -> None:
    """They ask before backwards 1, 2, 3 and 5."""
    one, other, *_ = ranks.run(late_compilation)
    assert one == {"torch reducer": 4, "captured": 2}
    assert other == {"torch reducer": 4, "eager hooks": 2}


@pytest.mark.usefixtures("fake_group")
def test_a_graph_that_does_not_say_when_gradients_are_ready() -> None:
    """What a saved tensor is unpacked to is known when it is unpacked: the plan stays."""
    model = dp_compile.replicate(Backwards(), config=CONFIG)
    before = replica_of(model).plan
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x):
        step(torch.compile(model, backend="aot_eager"), torch.randn(8, 24))
    assert replica_of(model).plan == before
    assert not replica_of(model).revisions.due
