"""The log: its switch, that quiet is quiet, that everything is said once."""

from __future__ import annotations

import ast
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
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


@pytest.fixture
def package() -> Iterator[logging.Logger]:
    """The package's logger, put back afterwards."""
    package = logging.getLogger("dp_compile")
    loggers = [package, *(logging.getLogger(f"dp_compile.{name}") for name in logs.LOGGERS)]
    before = [(logger, logger.level, logger.propagate, list(logger.handlers)) for logger in loggers]
    yield package
    for logger, level, propagate, handlers in before:
        logger.setLevel(level)
        logger.propagate, logger.handlers = propagate, handlers


# --- the switch -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "levels"),
    [
        ("", {}),
        ("info", {"": logging.INFO}),
        (" Debug ,", {"": logging.DEBUG}),
        ("info,settling=debug", {"": logging.INFO, "settling": logging.DEBUG}),
        ("monitor=off", {"monitor": logging.CRITICAL + 1}),
    ],
)
def test_what_the_switch_says(text: str, levels: dict[str, int]) -> None:
    assert logs.parse_levels(text) == levels


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("loud", "DP_COMPILE_LOGS=loud: unknown level 'loud', allowed are debug, info, warning, error, off."),
        ("settling=", "unknown level ''"),
        ("plan=info", "nothing is logged by 'plan', only by backward, capture, "),
        ("info,debug", "two levels for all loggers, give one"),
        ("monitor=info,monitor=off", "two levels for monitor, give one"),
    ],
)
def test_refuses(text: str, message: str) -> None:
    with pytest.raises(dp_compile.ConfigError) as error:
        logs.parse_levels(text)
    assert message in str(error.value)


def test_levels_by_logger(package: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    others = list(logging.getLogger().handlers)
    logs.configure({"": logging.INFO, "settling": logging.DEBUG})
    for name in ("settling", "capture"):
        logging.getLogger(f"dp_compile.{name}").debug("detail of %s", name)
        logging.getLogger(f"dp_compile.{name}").info("from %s", name)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(": ", 1)[1] for line in lines] == ["detail of settling", "from settling", "from capture"]
    assert lines[0].startswith("[rank ")
    assert " DEBUG dp_compile.settling: " in lines[0]
    assert logging.getLogger().handlers == others


def run_python(code: str, setting: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", logs.VARIABLE)}
    environment |= {logs.VARIABLE: setting, "RANK": "3"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return done.stderr


CODE = """
import logging, dp_compile
package = logging.getLogger("dp_compile")
logging.getLogger("dp_compile.settling").info("a plan")
logging.getLogger("dp_compile.capture").warning("a fallback")
logging.getLogger("another").info("not ours")
assert logging.getLogger().handlers == [], logging.getLogger().handlers
"""


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("info", ["INFO dp_compile.settling: a plan", "WARNING dp_compile.capture: a fallback"]),
        ("loud", ["DP_COMPILE_LOGS=loud: unknown level 'loud', allowed are", "a fallback"]),
    ],
)
def test_read_at_import(setting: str, expected: list[str]) -> None:
    """A value that is not allowed is one warning; warnings are then shown by Python's last resort, as without it."""
    lines = run_python(CODE, setting).splitlines()
    assert len(lines) == len(expected)
    for line, text in zip(lines, expected, strict=True):
        assert text in line
        assert line.startswith("[rank 3] ") is (setting == "info")


@pytest.mark.skipif(logs.VARIABLE in os.environ, reason=f"{logs.VARIABLE} is set")
def test_nothing_is_installed_without_the_switch() -> None:
    for name in ("dp_compile", *(f"dp_compile.{name}" for name in logs.LOGGERS)):
        logger = logging.getLogger(name)
        assert (logger.handlers, logger.level, logger.propagate) == ([], logging.NOTSET, True)


def test_the_table_names_every_logger() -> None:
    found = {
        node.args[0].value.removeprefix("dp_compile.")
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "logging.getLogger"
        if isinstance(node.args[0], ast.Constant)
    }
    assert found == set(logs.LOGGERS)
    assert logs.__doc__ is not None
    assert [name for name in logs.LOGGERS if f"`{name}`" not in logs.__doc__] == []


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
    assert "ratio to the bound 1." in first
    assert from_graph.startswith("a new plan, before the first synchronised backward, from the graph of it: ")
    assert from_graph.endswith("; before 1 bucket")
    assert from_launches.startswith("a new plan, after some synchronised backwards, from measured launches: ")
    assert "(ready times are measured, the slowest rank's count)" in from_launches


@pytest.mark.usefixtures("fake_group")
def test_a_plan_without_a_prediction(caplog: pytest.LogCaptureFixture) -> None:
    config = dp_compile.ReplicateConfig(backend="aot_eager", bucket_cap_mb=1.0)
    with caplog.at_level(logging.INFO, "dp_compile"):
        train(dp_compile.replicate(nn.Linear(4, 4), config=config))
    assert messages_of(caplog) == [("INFO", "the plan: fixed, 1 bucket, 292 B")]


class Broken(nn.Module):
    """Its backward breaks into several graphs: a hook on an activation prints."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        middle = self.layers[0](x)
        return self.layers[1](checked(middle))


class Checked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return grad * 1


def checked(x: torch.Tensor) -> torch.Tensor:
    return Checked.apply(x)


@pytest.mark.usefixtures("fake_group")
def test_a_broken_backward_is_said_once_whatever_is_compiled_anew(caplog: pytest.LogCaptureFixture) -> None:
    """Gradients that are kept and gradients that are not are two compiled backwards."""
    model = dp_compile.replicate(Broken(), config=dp_compile.ReplicateConfig(backend="aot_eager"))
    with dp_compile.compiled_backward():
        train(model, compiled=False)
    assert len(dp_compile.report(model).captures) > 1
    ((level, message),) = messages_of(caplog)
    assert level == "WARNING"
    assert message.startswith("the backward cannot be captured as one graph")


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
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("dp_compile").addHandler(handler)
    model = dp_compile.replicate(nn.Linear(4, 4), config=dp_compile.ReplicateConfig(backend="aot_eager"))
    train(model, compiled=False, times=9)
    logging.getLogger("dp_compile").removeHandler(handler)
    return heard


def test_an_uncompiled_forward_is_said_once(ranks2: Ranks) -> None:
    for heard in ranks2.run(messages_without_compilation):
        assert len(heard) == 1, heard
        assert heard[0].startswith("the forward is not compiled: torch's C++ reducer reduces the gradients")


def test_of_two_modules_each_says_it() -> None:
    """What one module said does not silence another one."""

    class Said:
        def __init__(self) -> None:
            self.said: set[str] = set()

    one, two, heard = Said(), Said(), []
    logger = logging.Logger("unconnected")
    logger.addHandler(handler := logging.Handler())
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logs.warn_once(logger, [one], "of %s", "one")
    logs.warn_once(logger, [one], "of %s", "one again")
    logs.warn_once(logger, [one, two], "of %s", "both")
    logs.warn_once(logger, [one], "of %s", "another key", key="another key")
    assert heard == ["of one", "of both", "of another key"]
