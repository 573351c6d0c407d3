"""Texts that a suite expects: in the test itself, or in files beside it. Either can be accepted anew.

| where        | compared with          | accepted anew by                                          |
|--------------|------------------------|-----------------------------------------------------------|
| a file       | a `Path`               | `pytest --dp-compile-accept`, or `DP_COMPILE_ACCEPT=1`    |
| in the test  | a triple-quoted string | `EXPECTTEST_ACCEPT=1`; it is `expecttest` that rewrites it |
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Final

from dp_compile.errors import ConfigError

expecttest: ModuleType | None
try:
    import expecttest
except ImportError:  # only needed to rewrite a string in a test
    expecttest = None

ACCEPT_VARIABLE: Final = "DP_COMPILE_ACCEPT"
INLINE_VARIABLE: Final = "EXPECTTEST_ACCEPT"
HOW_TO_ACCEPT: Final = "pytest --dp-compile-accept (or DP_COMPILE_ACCEPT=1)"
CALLS_ABOVE: Final = 2
"""From `expecttest` up to the test: `assert_text`, and the assertion that called it."""


def assert_text(found: str, expected: str | os.PathLike[str], what: str) -> None:
    """Compare a text with a golden one, or accept it. To be called directly by what a test calls.

    Args:
        found: ends with a newline.
        expected: the text, or the path of a file with it.
        what: what the text is, for the error: `plan`.

    Raises:
        AssertionError: they differ; or there is no such file.
        ConfigError: `expected` is neither; or a string is to be accepted without `expecttest`.
    """
    if isinstance(expected, os.PathLike):
        _assert_file(found, Path(expected), what)
    elif not isinstance(expected, str):
        raise ConfigError(
            f"the expected {what} must be a text, or the pathlib.Path of a golden file, got {type(expected).__name__}."
        )
    elif os.environ.get(INLINE_VARIABLE):
        if expecttest is None:
            raise ConfigError(f"{INLINE_VARIABLE} is set, but rewriting a test takes expecttest: pip install it.")
        expecttest.assert_expected_inline(found, expected, skip=CALLS_ABOVE)
    elif found != expected:
        raise AssertionError(
            _difference(found, expected, f"the {what} is not the one in the test")
            + f"\nIf it is meant to be so: run the test with {INLINE_VARIABLE}=1 (expecttest), look at what changed in "
            "git, and commit it."
        )


def _assert_file(found: str, path: Path, what: str) -> None:
    if is_accepting(os.environ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(found, encoding="utf-8")
        return
    try:
        expected = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise AssertionError(
            f"there is no golden file {_shown(path)} for the {what} yet. Make it with {HOW_TO_ACCEPT}, read it, and "
            "commit it."
        ) from None
    if found != expected:
        raise AssertionError(
            _difference(found, expected, f"the {what} is not the one in {_shown(path)}")
            + f"\nIf it is meant to be so: {HOW_TO_ACCEPT}, look at what changed in git, and commit it."
        )


def is_accepting(environ: Mapping[str, str]) -> bool:
    """Whether golden files are to be written."""
    return any(environ.get(name, "0") not in ("", "0") for name in (ACCEPT_VARIABLE, INLINE_VARIABLE))


def _difference(found: str, expected: str, head: str) -> str:
    lines = list(difflib.unified_diff(expected.splitlines(), found.splitlines(), n=1, lineterm=""))[2:]
    return "\n".join([f"{head} (- expected, + found):", *(f"  {line}" for line in lines)])


def _shown(path: Path) -> str:
    """As it is seen from where the tests run."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
