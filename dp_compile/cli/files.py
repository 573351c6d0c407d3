"""Files that are named on a command line: read, with errors that say which file and what it is instead."""

from __future__ import annotations

import json
from pathlib import Path

from dp_compile.errors import ConfigError
from dp_compile.insight.plan_file import read_plan
from dp_compile.insight.profiling import with_profile
from dp_compile.insight.step import Step
from dp_compile.plan.buckets import BucketPlan


def read_text(path: str) -> str:
    """The text of a file.

    Raises:
        ConfigError: it cannot be read, or is no text.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}.") from error
    except ValueError as error:
        raise ConfigError(f"cannot read {path}: it is no text file ({error}).") from error


def read_step_file(path: str, *, profile: str | None = None) -> Step:
    """A file that `Step.to_json` wrote; with what a trace of `torch.profiler` measured, if one is given.

    Raises:
        ConfigError: one of them cannot be read, is something else, of another version, or they do not belong together.
    """
    text = read_text(path)
    try:
        step = Step.from_json(text)
    except ConfigError as error:
        raise ConfigError(f"{path}: {_other_kind(text) or error}") from error
    if not all(bucket.members for bucket in step.plan.buckets):
        raise ConfigError(f"{path}: the plan of the step has an empty bucket. Save it anew.")
    return step if profile is None else with_profile(step, profile)


def read_plan_file(path: str) -> BucketPlan:
    """A file that `strategies.plan_to_json` wrote.

    Raises:
        ConfigError: it cannot be read, is something else, or of another version.
    """
    try:
        return read_plan(read_text(path))
    except ConfigError as error:
        raise error if str(error).startswith("cannot read") else ConfigError(f"{path}: {error}") from error


def _other_kind(text: str) -> str | None:
    """What a file is that is no step file, if that is known."""
    try:
        data = json.loads(text)
    except ValueError:
        return None
    if isinstance(data, dict) and "traceEvents" in data:
        return "not a step file of dp_compile but a trace of a profiler: read it with a trace viewer."
    if isinstance(data, dict) and "buckets" in data:
        kind = "an explanation, which was made from one" if "bound_by" in data else "a plan file: dp-compile plan show"
        return f"not a step file of dp_compile but {kind}."
    return None
