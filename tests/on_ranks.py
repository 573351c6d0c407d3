"""A test that each rank of a pool runs, as in `@on_ranks("ranks2")`: it fails where one of them raises."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest


def on_ranks(pool: str) -> Callable[[Callable[..., object]], Callable[..., None]]:
    """`pool`: a fixture of `conftest.py`. Parameters of the test are fixtures and what `parametrize` gives, as ever."""

    def decorate(scenario: Callable[..., object]) -> Callable[..., None]:
        @functools.wraps(scenario)
        def test(request: pytest.FixtureRequest, **given: Any) -> None:
            request.getfixturevalue(pool).run(_run, scenario.__module__, scenario.__name__, given)

        first = inspect.Parameter("request", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        test.__signature__ = inspect.Signature([first, *inspect.signature(scenario).parameters.values()])
        return test

    return decorate


def _run(module: str, name: str, given: dict[str, Any]) -> None:
    getattr(import_module(module), name).__wrapped__(**given)
