"""Files that are named on a command line, read with errors that say which file is wrong."""

from __future__ import annotations

from pathlib import Path

from dp_compile.errors import ConfigError
from dp_compile.insight.profile import with_profile
from dp_compile.insight.step import Step


def read_step_file(path: str, *, profile: str | None = None) -> Step:
    """A file that `Step.to_json` wrote; `profile`: a trace of `torch.profiler` with measured times of it.

    Raises:
        ConfigError: one of them cannot be read, is of another kind or version, or they are of different plans.
    """
    try:
        step = Step.from_json(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}.") from error
    except (ValueError, ConfigError) as error:
        raise ConfigError(f"{path}: {error}") from error
    return step if profile is None else with_profile(step, profile)


def write_file(path: Path, text: str) -> None:
    """Raises:
    ConfigError: it cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}.") from error
