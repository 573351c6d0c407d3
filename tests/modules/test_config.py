"""Options: what is allowed, and what the environment variable means."""

from __future__ import annotations

import dataclasses
import math
import os
import subprocess
import sys
from typing import Any

import pytest

from dp_compile.config import (
    HOOK_VARIABLE,
    MONITOR_VARIABLE,
    SWITCHES,
    ReplicateConfig,
    monitor_after_s,
)
from dp_compile.errors import ConfigError, DPCompileError


def test_defaults() -> None:
    assert dataclasses.asdict(ReplicateConfig()) == {
        "ddp_python_hook": None,
        "bucket_cap_mb": None,
        "cost": None,
        "replan_after": None,
        "gradient_divide_factor": None,
        "mp_policy": None,
        "find_unused_parameters": False,
        "static_graph": False,
        "gradient_as_bucket_view": None,
        "broadcast_buffers": True,
        "init_sync_buffers": None,
        "check_reductions": True,
        "check_nan": False,
        "backend": "inductor",
    }


@pytest.mark.parametrize("value", [0, -1, -0.5, math.nan, -math.inf, "25", True])
def test_a_size_has_to_be_a_positive_number(value: Any) -> None:
    with pytest.raises(ConfigError, match=f"bucket_cap_mb must be .*got {value!r}"):
        ReplicateConfig(bucket_cap_mb=value)


@pytest.mark.parametrize(
    ("said", "meaning"), [("", 30.0), ("5", 5.0), ("0.5", 0.5), ("0", None), ("0.0", None), (" Off ", None)]
)
def test_when_the_monitor_warns(said: str, meaning: float | None) -> None:
    assert monitor_after_s({MONITOR_VARIABLE: said}) == meaning
    assert monitor_after_s({}) == 30.0


@pytest.mark.parametrize("said", ["-1", "nan", "soon"])
def test_a_time_of_the_monitor_that_is_none(said: str) -> None:
    with pytest.raises(ConfigError, match=f"{MONITOR_VARIABLE} must be seconds >= 0 or off, got '{said}'"):
        monitor_after_s({MONITOR_VARIABLE: said})


@pytest.mark.parametrize("value", [1, 0.001, 25.0, math.inf])
def test_allowed_sizes(value: float) -> None:
    assert ReplicateConfig(bucket_cap_mb=value).bucket_cap_mb == value


GONE = (
    "strategy",
    "first_bucket_cap_mb",
    "two_levels",
    "alignment_bytes",
    "gradient_predivide_factor",
    "unused_parameters",
    "compare_parameters_every",
    "timeout_s",
    "monitor_after_s",
    "dump_dir",
    "reduce_dtype",
    "reduce_dtypes",
    "param_dtype",
    "output_dtype",
    "buffer_dtype",
    "cast_forward_inputs",
    "full_precision_modules",
    "full_precision_in_eval",
)


@pytest.mark.parametrize("name", GONE)
def test_an_option_that_is_gone_is_an_unknown_keyword(name: str) -> None:
    """`docs/removed.md` says what to use instead."""
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
        ReplicateConfig(**{name: None})


@pytest.mark.parametrize("backend", ["eager", "", None, "Inductor"])
def test_unknown_backend(backend: Any) -> None:
    with pytest.raises(ConfigError, match=r"backend must be one of inductor, aot_eager, got"):
        ReplicateConfig(backend=backend)


def test_a_config_error_is_a_value_error() -> None:
    assert issubclass(ConfigError, ValueError)
    assert issubclass(ConfigError, DPCompileError)


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        ReplicateConfig().bucket_cap_mb = 1.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("option", "environ", "expected"),
    [
        (None, {}, True),
        (None, {HOOK_VARIABLE: "1"}, True),
        (None, {HOOK_VARIABLE: " Yes "}, True),
        (None, {HOOK_VARIABLE: "0"}, False),
        (None, {HOOK_VARIABLE: "OFF"}, False),
        (True, {HOOK_VARIABLE: "0"}, True),
        (False, {HOOK_VARIABLE: "1"}, False),
        (False, {}, False),
    ],
)
def test_who_decides_about_the_hook(option: bool | None, environ: dict[str, str], expected: bool) -> None:
    assert ReplicateConfig(ddp_python_hook=option).uses_python_hook(environ) is expected


def test_the_real_environment_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DP_COMPILE_DDP_PYTHON_HOOK", "no")
    assert ReplicateConfig().uses_python_hook() is False


@pytest.mark.parametrize("text", ["", "2", "maybe"])
def test_unclear_environment(text: str) -> None:
    with pytest.raises(ConfigError, match=r"DP_COMPILE_DDP_PYTHON_HOOK must be one of 0, 1, false.*got"):
        ReplicateConfig().uses_python_hook({HOOK_VARIABLE: text})
    assert ReplicateConfig(ddp_python_hook=True).uses_python_hook({HOOK_VARIABLE: text}) is True


@pytest.mark.parametrize(
    ("options", "meaning"),
    [({}, False), ({"find_unused_parameters": True}, True), ({"static_graph": True}, True)],
)
def test_whether_parameters_may_be_unused(options: dict[str, Any], meaning: bool) -> None:
    assert ReplicateConfig(**options).may_be_unused == meaning


@pytest.mark.parametrize("name", SWITCHES)
@pytest.mark.parametrize("value", ["no", 1])
def test_switches_are_true_or_false(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be True or False, got {value!r}"):
        ReplicateConfig(**{name: value})


@pytest.mark.parametrize("value", [0, -1, 2.0, True, "3"])
def test_replan_after_is_a_number_of_backwards(value: Any) -> None:
    with pytest.raises(ConfigError, match="replan_after must be a number of backwards >= 1"):
        ReplicateConfig(replan_after=value)


def test_the_environment_is_not_in_the_documentation(monkeypatch: pytest.MonkeyPatch) -> None:
    source = "import dp_compile, pydoc; print(pydoc.render_doc(dp_compile.ReplicateConfig))"
    environ = dict(os.environ) | {"A_TOKEN": "secret"}
    text = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, check=True, env=environ
    ).stdout
    assert "secret" not in text
    for field in dataclasses.fields(ReplicateConfig):
        assert f"{field.name}: `" in text, field.name
