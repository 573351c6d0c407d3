"""The log: its switch, that quiet is quiet, that everything is said once."""

from __future__ import annotations

import ast
import logging
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import dp_compile
from dp_compile.engine import logs
from dp_compile.testing.ranks import Ranks

PACKAGE = Path(dp_compile.__file__).parent


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


# --- the switch -----------------------------------------------------------------------------------------------------

CODE = """
import logging, dp_compile, torch  # whichever comes first
logging.getLogger("dp_compile.settling").info("a plan")
logging.getLogger("dp_compile.capture").warning("a fallback")
logging.getLogger("dp_compile.compilation").debug("a graph")
"""


@pytest.mark.parametrize(
    ("setting", "shown"),
    [
        ("", ["a fallback"]),
        pytest.param("dp_compile", ["a plan", "a fallback"], marks=pytest.mark.nightly),
        ("+dp_compile", ["a plan", "a fallback", "a graph"]),
    ],
)
def test_torchs_switch_shows_ours(setting: str, shown: list[str]) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TORCH_LOGS"}
    environment |= {"TORCH_LOGS": setting} if setting else {}  # torch does not take an empty one
    done = subprocess.run([sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, check=True)
    assert [line.split("] ")[-1] for line in done.stderr.splitlines()] == shown


def test_the_table_names_every_logger() -> None:
    found = {
        node.args[0].value.removeprefix("dp_compile.")
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "logging.getLogger"
        if isinstance(node.args[0], ast.Constant)
    }
    assert logs.__doc__ is not None
    assert found == {line.split("`")[1] for line in logs.__doc__.splitlines() if line.startswith("|") and "`" in line}
    assert {logging.getLogger(f"dp_compile.{name}").level for name in found} == {logging.NOTSET}


# --- what is said -----------------------------------------------------------------------------------------------------


def messages_of(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [(each.levelname, each.message) for each in caplog.records if each.name.startswith("dp_compile.")]


def train(model: nn.Module, *, compiled: bool = True, times: int = 6) -> None:
    run = torch.compile(model, backend="aot_eager") if compiled else model
    for number in range(times):
        model.zero_grad(set_to_none=number % 2 == 0)
        run(torch.ones(2, 4)).sum().backward()


@pytest.mark.usefixtures("fake_group")
def test_plans_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    config = dp_compile.ReplicateConfig(backend="aot_eager", replan_after=2)
    with caplog.at_level(logging.INFO, "dp_compile"):
        train(dp_compile.replicate(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), config=config))
    said = messages_of(caplog)
    assert [level for level, _ in said] == ["INFO"] * 3
    first, from_graph, from_launches = (message for _, message in said)
    assert first.startswith("the plan: ")
    assert "predicted end" in first
    assert "above the best any plan could do (assumed" in first
    assert " ms" not in first
    assert from_graph.startswith("a new plan, before the first synchronised backward, from the graph of it: ")
    assert from_graph.endswith("; before 1 bucket")
    assert from_launches.startswith("a new plan, after some synchronised backwards, from measured launches: ")
    assert "(ready times are measured, the slowest rank's count)" in from_launches


@pytest.mark.usefixtures("fake_group")
def test_each_obstacle_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    model = dp_compile.replicate(nn.Linear(4, 4), config=dp_compile.ReplicateConfig(backend="aot_eager"))
    train(model, times=1)
    for _ in range(2):
        with torch.autograd.set_detect_anomaly(True, check_nan=False):
            train(model, times=3)
        run = torch.compile(model, backend="aot_eager")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, once in a process: create_graph makes cycles
            run(torch.ones(2, 4)).sum().backward(create_graph=True)
        model.zero_grad()
    assert messages_of(caplog) == [
        ("WARNING", "a backward is not captured, its hooks run eagerly: anomaly mode is on"),
        ("WARNING", "a backward is not captured, its hooks run eagerly: create_graph=True"),
    ]


def messages_without_compilation() -> list[str]:
    """Of two modules each says it once."""
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("dp_compile").addHandler(handler)
    for _ in range(2):
        model = dp_compile.replicate(nn.Linear(4, 4), config=dp_compile.ReplicateConfig(backend="aot_eager"))
        train(model, compiled=False, times=9)
    logging.getLogger("dp_compile").removeHandler(handler)
    return heard


def test_an_uncompiled_forward_is_said_once(ranks2: Ranks) -> None:
    for heard in ranks2.run(messages_without_compilation):
        assert len(heard) == 2, heard
        assert all(text.startswith("the forward is not compiled: torch's C++ reducer reduces") for text in heard)
