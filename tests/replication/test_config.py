"""Options: what is allowed, and what the environment variables mean."""

from __future__ import annotations

import dataclasses
import math
import pydoc
from typing import Any

import pytest

from dp_compile.config import HOOK_VARIABLE, MONITOR_VARIABLE, SWITCHES, ReplicateConfig, monitor_after_s
from dp_compile.errors import ConfigError


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({"bucket_cap_mb": value}, f"bucket_cap_mb must be .*got {value!r}") for value in (0, math.nan, "25", True)),
        *(({name: 1}, f"{name} must be True or False, got 1") for name in SWITCHES),
        ({"replan_after": 2.0}, "replan_after must be a number of backwards >= 1"),
        ({"backend": "eager"}, "backend must be one of inductor, aot_eager, got 'eager'"),
        ({"cost": 1.0}, "cost must be an AllReduceCost, got float"),
    ],
)
def test_what_is_not_allowed(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ReplicateConfig(**options)
    assert ReplicateConfig(bucket_cap_mb=math.inf).bucket_cap_mb == math.inf


@pytest.mark.parametrize(("said", "meaning"), [("", 30.0), ("0.5", 0.5), ("0", None), (" Off ", None)])
def test_when_the_monitor_warns(said: str, meaning: float | None) -> None:
    assert monitor_after_s({MONITOR_VARIABLE: said}) == meaning
    with pytest.raises(ConfigError, match=f"{MONITOR_VARIABLE} must be seconds >= 0 or off, got 'soon'"):
        monitor_after_s({MONITOR_VARIABLE: "soon"})


@pytest.mark.parametrize(
    ("option", "environ", "expected"),
    [
        (None, {}, True),
        (None, {HOOK_VARIABLE: " Yes "}, True),
        (None, {HOOK_VARIABLE: "OFF"}, False),
        (True, {HOOK_VARIABLE: "0"}, True),
        (False, {HOOK_VARIABLE: "1"}, False),
    ],
)
def test_which_setting_of_the_hook_wins(option: bool | None, environ: dict[str, str], expected: bool) -> None:
    assert ReplicateConfig(ddp_python_hook=option).uses_python_hook(environ) is expected
    with pytest.raises(ConfigError, match=r"DP_COMPILE_DDP_PYTHON_HOOK must be one of 0, 1, false.*got"):
        ReplicateConfig().uses_python_hook({HOOK_VARIABLE: "maybe"})


def test_the_environment_is_not_in_the_documentation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_TOKEN", "secret")
    text = pydoc.render_doc(ReplicateConfig)
    assert "secret" not in text
    assert all(f"{field.name}: `" in text for field in dataclasses.fields(ReplicateConfig))
