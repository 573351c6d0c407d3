"""Optimizers in the backward, as people see them: what is still on its way is not shown as over, nothing as free."""

from __future__ import annotations

import dataclasses
import os
import re
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dp_compile
from dp_compile.config import DUMP_VARIABLE
from dp_compile.insight.explain import SHORTEST_S, Explanation, explanation_of
from dp_compile.insight.measure import Measurement
from dp_compile.insight.observe import step_of
from dp_compile.insight.predict import predict
from dp_compile.insight.profile import IN_FLIGHT
from dp_compile.insight.step import MeasuredStep, Step

CONFIG = dp_compile.ReplicateConfig(backend="aot_eager", bucket_cap_mb=0.0002)
WAYS: dict[str, dict[str, Any]] = {
    "whole": {},
    "crossing": {"overlap_forward": True},
    "sharded": {"shard": True},
    "sharded crossing": {"shard": True, "overlap_forward": True},
}


class Seen(NamedTuple):
    step: Step
    measured: MeasuredStep
    measurement: Measurement
    report: str
    explanation: Explanation
    text: str


def train(run: Any, optimizer: torch.optim.Optimizer, times: int) -> None:
    for _ in range(times):
        run(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture(scope="module")
def seen(fake_group: dist.ProcessGroup, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Seen]:
    """Each way once: compiled and dumped, then measured in three backwards."""
    found = {}
    for way, options in WAYS.items():
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(8, 8), nn.Tanh())))
        dp_compile.replicate(model, config=CONFIG)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        dp_compile.optim.in_backward(model, optimizer, **options)
        run = torch.compile(model, backend="dp_compile" if "overlap_forward" in options else "aot_eager")
        dump = tmp_path_factory.mktemp("dump") / way
        with mock.patch.dict(os.environ, {DUMP_VARIABLE: str(dump)}):
            train(run, optimizer, 2)
        with dp_compile.measure(model) as measurement:
            train(run, optimizer, 3)
        step, report, explanation = step_of(model), dp_compile.report(model).updates, dp_compile.explain(model)
        assert step.measured is not None
        text = " ".join(str(explanation).split())
        found[way] = Seen(step, step.measured, measurement, report, explanation, text)
        assert [each.name for each in dump.rglob("*-to-inductor.txt")] == ["5-to-inductor.txt"]  # nothing was given up
    return found


def test_what_crosses_is_waited_for_in_the_next_forward(seen: dict[str, Seen]) -> None:
    step, measured, measurement, report, explanation, text = seen["crossing"]
    assert measurement.not_measured == {IN_FLIGHT: 1}
    assert len(measurement.backwards) == 2
    later = {number for number, bucket in enumerate(measured.buckets) if measured.is_after(bucket.wait_s)}
    assert later == step.left == {*range(1, len(step.plan.buckets))}
    forward = measured.next_forward
    assert forward is not None
    assert measured.next_forward_s is not None
    assert 0 < measured.next_forward_s < forward.seconds
    updates = [each for each in measured.follows if each.what == "update"]
    assert len(updates) == len(step.left) > 2
    assert measured.updates_s == 0
    for bucket, update in zip(sorted(b.wait_s or 0.0 for b in measured.buckets)[1:], updates, strict=True):
        assert forward.start_s < bucket < update.start_s < update.end_s < forward.end_s
    assert f"the last backward left {len(updates)} updates for the next forward, " in report
    left = f"{len(step.left)} of {len(step.plan.buckets)} buckets may end under the next forward"
    assert f"{left}; not: flags have to be known when the backward ends" in text
    exposed = [each for each in explanation.buckets if each.planned is not None and each.planned.exposed_s > SHORTEST_S]
    assert all(each.why.startswith("next forward reads it at") for each in exposed if each.number in step.left)
    assert "; after it" in str(measurement)


@pytest.mark.parametrize("way", ["whole", "sharded"])
def test_updates_and_all_gathers_are_no_compute(seen: dict[str, Seen], way: str) -> None:
    step, measured, measurement, report, explanation, text = seen[way]
    assert not measurement.why_not
    updates = [each for each in measured.follows if each.what == "update"]
    assert len(updates) == 3  # of the buckets without flags
    assert 0 < measured.updates_s == pytest.approx(sum(each.seconds for each in updates))
    assert measured.compute_s == pytest.approx(measured.backward_s - measured.exposed_s - measured.updates_s)
    assert bool(measured.gather_s) == bool(step.gather_s) == (way == "sharded")
    if way == "sharded":
        assert measured.end_s == pytest.approx(measured.backward_s + measured.gather_s)
        assert explanation.exposed_s is not None
        assert explanation.exposed_s >= step.gather_s > 0
        assert "all-gathers of parameters" in text
        assert re.search(r"this one [\d,]+ of 216 elements, .* instead of .* \(computed", report)
    else:
        assert f"AdamW updates {4 * 216} B of parameters in the backward" in report


def test_all_gathers_are_waited_for_in_the_next_forward(seen: dict[str, Seen]) -> None:
    step, measured, measurement, report, explanation, _ = seen["sharded crossing"]
    assert measurement.not_measured == {IN_FLIGHT: 1}
    assert step.gathers_late
    assert not step.left
    forward = measured.next_forward
    assert forward is not None
    gathers = [each for each in measured.follows if each.what == "gather"]
    launches, rounds = gathers[:3], gathers[3:]
    assert all(measured.backward_s < each.start_s < each.end_s < forward.start_s for each in launches)
    assert len(rounds) == 3
    assert all(forward.start_s < each.start_s < each.end_s < forward.end_s for each in rounds)
    assert measured.next_forward_s == pytest.approx(forward.seconds - sum(each.seconds for each in rounds))
    assert "the last backward left 3 all-gathers for the next forward, " in report
    assert explanation.end_s is not None
    assert explanation.end_s >= step.bound_s() + step.forward_s
    waited = dataclasses.replace(step, optimizers=tuple(dataclasses.replace(e, stayed=False) for e in step.optimizers))
    assert not waited.gathers_late
    assert "step() waits for what AdamW defers" in " ".join(str(explanation_of(waited)).split())


@pytest.mark.parametrize("way", WAYS)
def test_to_json_and_back(seen: dict[str, Seen], way: str) -> None:
    step = seen[way].step
    again = Step.from_json(step.to_json())
    assert (again.optimizers, again.measured, again.left) == (step.optimizers, step.measured, step.left)
    assert str(explanation_of(again)) == str(seen[way].explanation)
    assert predict(again).end_s == step.end_s
