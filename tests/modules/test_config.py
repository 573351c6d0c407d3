"""Options: what is allowed, and what the environment variable means."""

from __future__ import annotations

import dataclasses
import math
import os
import subprocess
import sys
from typing import Any

import pytest

from dp_compile.config import CACHE_VARIABLE, HOOK_VARIABLE, SWITCHES, ReplicateConfig, keeps_compiled
from dp_compile.errors import ConfigError, DPCompileError


def test_defaults() -> None:
    assert dataclasses.asdict(ReplicateConfig()) == {
        "ddp_python_hook": None,
        "strategy": None,
        "bucket_cap_mb": None,
        "first_bucket_cap_mb": None,
        "cost": None,
        "replan_after": None,
        "two_levels": "always",
        "mp_policy": None,
        "gradient_divide_factor": None,
        "gradient_predivide_factor": None,
        "alignment_bytes": 64,
        "unused_parameters": None,
        "find_unused_parameters": False,
        "static_graph": False,
        "gradient_as_bucket_view": None,
        "broadcast_buffers": True,
        "init_sync_buffers": None,
        "check_reductions": True,
        "check_nan": False,
        "compare_parameters_every": None,
        "backend": "inductor",
        "timeout_s": 300.0,
        "monitor_after_s": 30.0,
        "dump_dir": None,
    }


@pytest.mark.parametrize("name", ["bucket_cap_mb", "first_bucket_cap_mb", "timeout_s", "monitor_after_s"])
@pytest.mark.parametrize("value", [0, -1, -0.5, math.nan, -math.inf, "25", True])
def test_sizes_and_times_have_to_be_positive_numbers(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be .*got {value!r}"):
        ReplicateConfig(**{name: value})


@pytest.mark.parametrize("value", [1, 0.001, 25.0, math.inf])
def test_allowed_sizes(value: float) -> None:
    assert ReplicateConfig(bucket_cap_mb=value, first_bucket_cap_mb=value).bucket_cap_mb == value


@pytest.mark.parametrize("value", [0, -64, 3, 48, 64.0, "64", True, None])
def test_an_alignment_is_a_power_of_two(value: Any) -> None:
    with pytest.raises(ConfigError, match=f"alignment_bytes must be a power of two of bytes, got {value!r}"):
        ReplicateConfig(alignment_bytes=value)


@pytest.mark.parametrize("value", [1, 2, 4096])
def test_allowed_alignments(value: int) -> None:
    assert ReplicateConfig(alignment_bytes=value).alignment_bytes == value


@pytest.mark.parametrize("value", ["never", None, True, 2])
def test_two_levels_always_or_as_predicted(value: Any) -> None:
    with pytest.raises(ConfigError, match="two_levels must be one of always, auto, got"):
        ReplicateConfig(two_levels=value)


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
    [
        ({}, "error"),
        ({"find_unused_parameters": False}, "error"),
        ({"find_unused_parameters": True}, "find"),
        ({"unused_parameters": "error"}, "error"),
        ({"unused_parameters": "zeros"}, "zeros"),
        ({"unused_parameters": "find"}, "find"),
        ({"unused_parameters": "find", "find_unused_parameters": True}, "find"),
    ],
)
def test_what_unused_means(options: dict[str, Any], meaning: str) -> None:
    assert ReplicateConfig(**options).unused == meaning


@pytest.mark.parametrize("mode", ["error", "zeros"])
def test_contradiction_about_unused_parameters(mode: str) -> None:
    with pytest.raises(ConfigError, match=f"find_unused_parameters=True means .*'find', but that is '{mode}'"):
        ReplicateConfig(unused_parameters=mode, find_unused_parameters=True)


@pytest.mark.parametrize("value", ["", "none", True, 0])
def test_unknown_meaning_of_unused(value: Any) -> None:
    with pytest.raises(ConfigError, match="unused_parameters must be one of error, zeros, find, got"):
        ReplicateConfig(unused_parameters=value)


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


@pytest.mark.parametrize(
    ("said", "on_cpus", "on_both"),
    [(None, True, False), ("auto", True, False), ("1", True, True), ("off", False, False)],
)
def test_what_is_compiled_is_kept_where_that_was_tried(said: str | None, on_cpus: bool, on_both: bool) -> None:
    environ = {} if said is None else {CACHE_VARIABLE: said}
    assert keeps_compiled(["cpu", "cpu"], environ) is on_cpus
    assert keeps_compiled(["cpu", "cuda"], environ) is on_both


def test_a_cache_variable_that_says_neither() -> None:
    with pytest.raises(
        ConfigError, match="DP_COMPILE_CACHE must be one of 0, 1, auto, false, no, off, on, true, yes, got 'ja'"
    ):
        keeps_compiled(["cpu"], {CACHE_VARIABLE: "Ja"})
