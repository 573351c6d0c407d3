"""The log: its switch, that quiet is quiet, that everything is said once."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import dp_compile

PACKAGE = Path(dp_compile.__file__).parent


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


# --- the switch -----------------------------------------------------------------------------------------------------

CODE = """
import logging, dp_compile, torch  # whichever comes first
logging.getLogger("dp_compile.plan_sync").info("a plan")
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


# --- what is said -----------------------------------------------------------------------------------------------------


def messages_of(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [(each.levelname, each.message) for each in caplog.records if each.name.startswith("dp_compile.")]


def train(model: nn.Module, *, compiled: bool = True, times: int = 6) -> None:
    run = torch.compile(model, backend="aot_eager") if compiled else model
    for number in range(times):
        model.zero_grad(set_to_none=number % 2 == 0)
        run(torch.ones(2, 4)).sum().backward()


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
