"""Options: what is allowed, and what the environment variables mean."""

from __future__ import annotations

import dataclasses
import math
import pydoc
from typing import Any

import pytest

from dp_compile.config import HOOK_VARIABLE, MONITOR_VARIABLE, ReplicateConfig, monitor_after_s
from dp_compile.errors import ConfigError


def test_what_is_not_allowed() -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        *(({"bucket_cap_mb": value}, f"bucket_cap_mb must be .*got {value!r}") for value in (0, math.nan, "25", True)),
        *(({each.name: 7}, f"{each.name} must be .* got 7") for each in dataclasses.fields(ReplicateConfig)[5:]),
        ({"backend": "eager"}, "backend must be one of inductor, aot_eager, got 'eager'"),
        ({"cost": 1.0}, "cost must be an AllReduceCost"),
        ({"mp_policy": "bfloat16"}, "mp_policy must be a torch.distributed.fsdp.MixedPrecisionPolicy"),
    ]
    for options, message in wrong:
        with pytest.raises(ConfigError, match=message):
            ReplicateConfig(**options)
    assert ReplicateConfig(bucket_cap_mb=math.inf).bucket_cap_mb == math.inf


@pytest.mark.parametrize(("text", "meaning"), [("", 30.0), ("0.5", 0.5), ("0", None), (" Off ", None)])
def test_when_the_monitor_warns(text: str, meaning: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MONITOR_VARIABLE, text)
    assert monitor_after_s() == meaning
    monkeypatch.setenv(MONITOR_VARIABLE, "soon")
    with pytest.raises(ConfigError, match=f"{MONITOR_VARIABLE} must be seconds >= 0 or off, got 'soon'"):
        monitor_after_s()


@pytest.mark.parametrize(
    ("option", "variable", "expected"),
    [(None, "", True), (None, " Yes ", True), (None, "OFF", False), (True, "0", True), (False, "1", False)],
)
def test_which_setting_of_the_hook_wins(
    option: bool | None, variable: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(HOOK_VARIABLE, variable)
    assert ReplicateConfig(ddp_python_hook=option).uses_python_hook() is expected
    monkeypatch.setenv(HOOK_VARIABLE, "maybe")
    with pytest.raises(ConfigError, match=r"DP_COMPILE_DDP_PYTHON_HOOK must be one of 0, 1, false.*got"):
        ReplicateConfig().uses_python_hook()


def test_each_option_is_documented_with_its_type() -> None:
    text = pydoc.render_doc(ReplicateConfig)
    assert all(f"{field.name}: `" in text for field in dataclasses.fields(ReplicateConfig))
